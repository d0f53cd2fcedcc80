"""What the product is compared with, on the same runtime."""
