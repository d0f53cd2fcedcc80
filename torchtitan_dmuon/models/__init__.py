"""Model families this package trains, and initialisation that ignores the sharding."""
