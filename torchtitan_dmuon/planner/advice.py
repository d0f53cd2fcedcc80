"""What to change in a job that does not fit, with what each change would come to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan_dmuon.config.schema import JobConfig

CLOSE = 0.05
"""Less than this share of a GPU's memory left is close to the limit."""


def changes(config: JobConfig) -> Iterator[tuple[str, Any]]:
    """Yield keys and values that may save memory, those that cost least speed first."""
    if config.loss.name != "chunked_cross_entropy":
        yield "loss.name", "chunked_cross_entropy"
    if config.parallelism.fsdp_reshard_after_forward == "never":
        yield "parallelism.fsdp_reshard_after_forward", "always"
    modes = ["none", "selective", "full"]
    mode = config.activation_checkpoint.mode
    for stronger in modes[modes.index(mode) + 1 :] if mode in modes else ():
        yield "activation_checkpoint.mode", stronger
    if config.training.local_batch_size > 1:
        yield "training.local_batch_size", config.training.local_batch_size // 2
    if config.parallelism.communication != "c10d":
        yield ("line", "C") if config.line else ("parallelism.communication", "c10d")


def advise(
    config: JobConfig,
    peak: float,
    capacity: float,
    peak_of: Callable[[JobConfig], float],
    peak_on_twice_the_nodes: Callable[[], float],
) -> Iterator[str]:
    """Yield what to change, if a job does not fit or is close to the limit.

    Args:
        config: The job.
        peak: Its peak memory in GiB.
        capacity: Memory of a GPU in GiB.
        peak_of: Returns the peak of a changed job.
        peak_on_twice_the_nodes: Returns the peak there.
    """
    if peak <= capacity * (1 - CLOSE):
        return
    left = f"{capacity - peak:.1f} GiB are left" if peak <= capacity else "it does not fit"
    yield f"{peak:.1f} of {capacity:.1f} GiB: {left}. Each of these by itself:"
    for key, value in changes(config):
        changed = copy.deepcopy(config)
        _set(changed, key, value)
        less = peak_of(changed)
        if less < peak:
            yield _outcome(f"--{key} {value}", less, capacity)
    less = peak_on_twice_the_nodes()
    if less < peak:
        yield _outcome("twice the nodes", less, capacity)


def _outcome(what: str, peak: float, capacity: float) -> str:
    return f"{what}: {peak:.1f} GiB, {'fits' if peak <= capacity else 'does not fit'}"


def _set(config: JobConfig, key: str, value: Any) -> None:
    if key == "line":
        config.line, config.parallelism.communication = value, "c10d"
        return
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, value)
