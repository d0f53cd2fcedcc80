"""What can be wrong with a checkpoint, as one line."""

from __future__ import annotations

from torchtitan_dmuon.config.errors import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint that is damaged, incomplete, another model's, or cannot be written.

    The message is one line: which checkpoint, what is wrong, what to do. Entry points print it and
    exit with status 2.
    """
