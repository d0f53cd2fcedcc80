"""TOML job config -> torchtitan's Trainer.Config: schema, errors, checks.

This package imports nothing by itself: `errors` is light, the other modules import torchtitan.
"""
