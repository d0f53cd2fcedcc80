"""Optimizers of matrices."""
