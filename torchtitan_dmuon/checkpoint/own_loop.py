"""Checkpoints for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from torchtitan_dmuon.arguments import expect, is_count
from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveWriter
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder
from torchtitan_dmuon.checkpoint.state import (
    ModelState,
    OptimizerState,
    RandomState,
    muon_state,
)
from torchtitan_dmuon.checkpoint.transfer import on_first_rank, read, write
from torchtitan_dmuon.log import logger
from torchtitan_dmuon.optim.muon import Muon
from torchtitan_dmuon.runtime.dedicate import runtime_of

OPTIMIZER, RANDOM = "optimizer", "rng"


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Muon,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = 0,
) -> Path:
    """Save model, optimizer and random generators as `folder/step-<step>`. Collective.

    Each matrix and its momentum is written by its owner; nothing is gathered. The checkpoint
    appears when it is whole: a job killed at any moment leaves earlier ones as they were.

    Args:
        folder: Of all checkpoints of the job, seen by all nodes; made if need be.
        step: A whole number >= 0.
        model: That `dedicate_params` was called on.
        optimizer: Its optimizer.
        extra: More state by name: what has `state_dict` and `load_state_dict` (learning-rate
            schedulers, data loaders), or dicts of tensors, numbers and text.
        keep: Delete all but so many of the newest checkpoints; 0 keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written; nothing was overwritten.
        RuntimeError: another rank is lost.
    """
    expect("step", step, lambda v: is_count(v, 0), "a whole number >= 0")
    expect("keep", keep, lambda v: is_count(v, 0), "a whole number >= 0")
    checkpoints = CheckpointFolder(Path(folder))

    def make_room() -> None:
        lock = checkpoints.lock()
        checkpoints.recover()
        if lock is not None:
            lock.close()

    on_first_rank(f"saving to {folder}", make_room)
    states = _states(model, optimizer, extra)
    write(states, ArchiveWriter(checkpoints, step, {}))

    def delete_old() -> None:
        checkpoints.retire(keep)
        checkpoints.recover()

    if keep:
        on_first_rank(f"deleting from {folder}", delete_old)
    return checkpoints.at(step)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Muon,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
) -> int | None:
    """Load the newest complete checkpoint, written on any number of ranks. Collective.

    Weights and state go to their present owners. The settings of the optimizer (`param_groups`)
    stay as they are, but for the rates that a scheduler in `extra` had reached.

    Args:
        folder: Of the job's checkpoints.
        model, optimizer, extra: As for `save_checkpoint`; `extra` with the same names. They are
            changed in place.
        step: Load this one instead.

    Returns:
        The step, or None if there is no checkpoint yet.

    Raises:
        CheckpointError: there is no such step, it is damaged, or of another model.
        RuntimeError: another rank is lost.
    """
    checkpoints = CheckpointFolder(Path(folder))
    found = on_first_rank(f"loading from {folder}", lambda: checkpoints.choose(step))
    if found is None:
        return None
    archive = Archive.open(checkpoints.at(found))
    states = _states(model, optimizer, extra)
    fresh = read(states, archive, states)
    ModelState(model).load_state_dict(states)
    for value in (extra or {}).values():
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            set_learning_rates(value)
    if fresh:
        logger.info("optimizer state starts fresh, updated by another rule so far: %s", fresh)
    return found


def _states(model: nn.Module, optimizer: Muon, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    reserved = {OPTIMIZER, RANDOM}
    taken = reserved & set(extra or {})
    if taken:
        raise ValueError(f"extra: {', '.join(sorted(taken))} is saved already; choose another name")
    return {
        **ModelState(model).state_dict(),
        OPTIMIZER: OptimizerState(lambda: muon_state(optimizer)),
        RANDOM: RandomState(runtime_of(model).device),
        **(extra or {}),
    }


def set_learning_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Bring the optimizer to where its schedule is; loading a scheduler does not."""
    groups = scheduler.optimizer.param_groups
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
