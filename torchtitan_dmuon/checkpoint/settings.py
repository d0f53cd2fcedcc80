"""The settings of a job that a checkpoint notes, so that a later job can say what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchtitan_dmuon.checkpoint.archive import Archive
from torchtitan_dmuon.checkpoint.planners import some
from torchtitan_dmuon.log import logger

Options = dict[str, Any]


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Options]:
    """Return the settings of each parameter by name, as JSON has them; rates without schedule."""
    result = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {
                key: _plain(value)
                for key, value in group.items()
                if key not in ("params", "param_names", "lr", "initial_lr")
            }
            options["lr"] = _plain(group.get("initial_lr", group.get("lr")))
            result.update(dict.fromkeys(group["param_names"], options))
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def facts(optimizers: Iterable[torch.optim.Optimizer], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest notes.

    Args:
        optimizers: Of the job.
        job: More to note, as JSON; what is in its `job` is compared after a load.
    """
    kinds: list[tuple[Options, list[str]]] = []
    for name, options in settings_of(optimizers).items():
        # Most parameters share their settings.
        known = next((names for other, names in kinds if other == options), None)
        if known is None:
            kinds.append((options, [name]))
        else:
            known.append(name)
    return {**job, "settings": [list(kind) for kind in kinds]}


def say_loaded(
    archive: Archive,
    fresh: Sequence[str],
    optimizers: Iterable[torch.optim.Optimizer],
    job: Mapping[str, Any],
) -> None:
    """Log what a job that goes on from a checkpoint does otherwise than the one that saved it.

    Args:
        archive: What was loaded.
        fresh: Parameters whose optimizer state was not.
        optimizers: Of this job.
        job: What this job would note in a manifest, as for `facts`.
    """
    if fresh:
        text = "optimizer state starts fresh for %d parameters that another rule updated: %s"
        logger.info(text, len(fresh), some(fresh))
    manifest = archive.manifest or {}
    there, here = manifest.get("job", {}), job.get("job", {})
    changes = [f"{k} {there[k]} -> {v}" for k, v in here.items() if there.get(k, v) != v]
    stored = {name: options for options, names in manifest.get("settings", []) for name in names}
    changes += differing(
        stored, {k: v for k, v in settings_of(optimizers).items() if k not in fresh}
    )
    if changes:
        logger.info("changed since the checkpoint: %s", "; ".join(changes))


def differing(stored: Mapping[str, Options], here: Mapping[str, Options]) -> list[str]:
    """Say how settings by parameter differ, one text for each kind of difference."""
    counts: dict[str, int] = {}
    for name, options in here.items():
        for key, value in options.items():
            old = stored.get(name, {}).get(key, value)
            if old != value:
                text = f"{key} {old} -> {value}"
                counts[text] = counts.get(text, 0) + 1
    return [f"{text} ({n} parameter{'s' * (n > 1)})" for text, n in sorted(counts.items())]
