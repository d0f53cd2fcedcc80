"""Matrix optimizers with owned matrices, as an extension of torchtitan 0.3.0."""

__version__ = "0.1.0"
