"""The check that a checkpoint's data state belongs to the data of this run."""

from collections.abc import Mapping
from typing import Any

from torchtitan_dmuon.config.errors import ConfigError

REMEDY = (
    "to start the data from their beginning and load everything else, set "
    'checkpoint.exclude_from_loading = ["dataloader"].'
)


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare a loaded state with this loader's.

    Args:
        state: What the checkpoint holds.
        expected: The keys it must have, and the value that each must have, in the order in which a
            difference explains most; None stands for any value.

    Raises:
        ValueError: A key is missing or differs; the message names it, both values and the remedy.
    """
    for key, value in expected.items():
        if key not in state:
            raise ConfigError(
                f"dataloader: the checkpoint's state has no '{key}' (it has {sorted(state)}), so "
                f"another kind of loader wrote it; {REMEDY}"
            )
        if value is not None and state[key] != value:
            raise ConfigError(
                f"dataloader: '{key}' is {state[key]!r} in the checkpoint and {value!r} in this "
                f"run, so the data can not continue where they stopped. Use the same {key}, "
                f"or: {REMEDY}"
            )
