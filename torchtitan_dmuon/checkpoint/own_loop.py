"""Checkpoints for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_dmuon.arguments import expect, is_count
from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveWriter
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import INDEX, CheckpointFolder, remove
from torchtitan_dmuon.checkpoint.meter import Meter
from torchtitan_dmuon.checkpoint.planners import OPTIMIZER, RANDOM
from torchtitan_dmuon.checkpoint.settings import facts, say_loaded
from torchtitan_dmuon.checkpoint.state import (
    ModelState,
    OptimizerState,
    RandomState,
    owner_state,
)
from torchtitan_dmuon.checkpoint.transfer import (
    on_every_rank,
    on_first_rank,
    read,
    say_read,
    say_saved,
    write,
)
from torchtitan_dmuon.optim.owner_optimizer import OwnerOptimizer
from torchtitan_dmuon.runtime.dedicate import runtime_of


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: OwnerOptimizer,
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
        extra: More state by name, the same on every rank: what has `state_dict` and
            `load_state_dict` (learning-rate schedulers, data loaders), or dicts of tensors, numbers
            and text.
        keep: Delete all but so many of the newest checkpoints; 0 keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written; nothing was overwritten.
        ValueError: a name in `extra` is taken, or a value is none that could be loaded again.
        RuntimeError: another rank is lost.
    """
    expect("step", step, lambda v: is_count(v, 0), "a whole number >= 0")
    expect("keep", keep, lambda v: is_count(v, 0), "a whole number >= 0")
    checkpoints = CheckpointFolder(Path(folder))
    meter = Meter(runtime_of(model).device)
    states = _states(model, optimizer, extra)
    lock: IO[str] | None = None

    def claim() -> None:
        nonlocal lock
        lock = checkpoints.lock()
        checkpoints.recover()

    def delete_old() -> None:
        for path in checkpoints.retire(keep):
            remove(path)

    try:
        on_first_rank(f"saving to {folder}", claim)
        agreed = on_first_rank(f"saving to {folder}", lambda: step)
        on_every_rank(f"saving to {folder}", lambda: _check_step(step, agreed))
        writer = ArchiveWriter(checkpoints, step, facts([optimizer], {}))
        write(states, writer)
        if keep:
            on_first_rank(f"deleting from {folder}", delete_old)
    finally:
        if lock is not None:
            lock.close()
    say_saved(writer, meter)
    return checkpoints.at(step)


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OwnerOptimizer,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    exclude: Collection[str] = (),
) -> int | None:
    """Load the newest complete checkpoint, written on any number of ranks. Collective.

    Weights and state go to their present owners. The settings of the optimizer (`param_groups`)
    stay as they are, but for the rates that a scheduler in `extra` had reached.

    Args:
        folder: Of the job's checkpoints.
        model, optimizer, extra: As for `save_checkpoint`; `extra` with the same names. They are
            changed in place.
        step: Load this one instead.
        exclude: Parts that are not loaded: "optimizer", "rng", names in `extra`.

    Returns:
        The step, or None if there is no checkpoint yet.

    Raises:
        CheckpointError: there is no such step, it is damaged, or of another model.
        RuntimeError: another rank is lost.
    """
    checkpoints = CheckpointFolder(Path(folder))
    meter = Meter(runtime_of(model).device)

    def choose() -> int | None:
        if (checkpoints.path / INDEX).is_file():
            raise CheckpointError(f"{folder}: expected the folder around it, and step=N")
        if checkpoints.lost_names():
            with checkpoints.lock() or nullcontext():
                checkpoints.recover()
        return checkpoints.choose(step)

    found = on_first_rank(f"loading from {folder}", choose)
    if found is None:
        return None
    archive = on_every_rank(f"loading {found}", lambda: Archive.open(checkpoints.at(found)))
    states = _states(model, optimizer, extra)
    wanted = {key: value for key, value in states.items() if key not in exclude}
    fresh = read(wanted, archive, {*states, *exclude})
    ModelState(model).load_state_dict(wanted)
    for name, value in (extra or {}).items():
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and name not in exclude:
            set_learning_rates(value)
    say_read(archive, meter)
    say_loaded(archive, fresh, [optimizer], {})
    return found


def _check_step(step: int, agreed: int) -> None:
    if step != agreed:
        raise CheckpointError(f"step: {step} on a rank and {agreed} on the first; ranks must agree")


def _states(
    model: nn.Module, optimizer: OwnerOptimizer, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    weights = ModelState(model).state_dict()
    _check_extra(extra or {}, {OPTIMIZER, RANDOM, *(key.split(".")[0] for key in weights)})
    return {
        **weights,
        OPTIMIZER: OptimizerState(lambda: owner_state(optimizer)),
        RANDOM: RandomState(runtime_of(model).device),
        **(extra or {}),
    }


def _check_extra(extra: Mapping[str, Any], taken: Collection[str]) -> None:
    """Refuse what would be saved and could not be loaded again, or take the place of a weight."""
    for name, value in extra.items():
        if name in taken or "." in name:
            raise ValueError(
                f"extra: {name} is a name of the model or its optimizer's; use another"
            )
        state = value.state_dict() if isinstance(value, Stateful) else value
        if not isinstance(state, dict):
            raise ValueError(
                f"extra: {name}: expected a dict, or an object with state_dict and "
                f"load_state_dict, got {type(value).__name__}"
            )
        _check_keys(name, state)


def _check_keys(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"extra: {where}: expected names for keys, got {key!r}")
            _check_keys(f"{where}.{key}", inner)


def set_learning_rates(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Bring the optimizer to where its schedule is; loading a scheduler does not."""
    groups = scheduler.optimizer.param_groups
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
