"""Benchmarks: trainers that take turns in one world, and what is measured on them."""
