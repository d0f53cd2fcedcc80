"""Owned parameters at run time: gathered for a layer, reduced to owners, published to rows."""
