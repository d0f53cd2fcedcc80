"""The functions of a training loop around a model with owned parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.arguments import expect, is_size
from torchtitan_dmuon.runtime.dedicate import runtime_of
from torchtitan_dmuon.runtime.gradients import agree_on_gradients
from torchtitan_dmuon.runtime.site import sites_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    *,
    scale_matrices: bool = True,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`. Collective.

    One norm over owned and sharded parameters, each counted once. It acts on reduced gradients,
    never on the orthogonal update. If the norm is not finite nothing is scaled: the step decides.

    Args:
        model: With owned parameters.
        max_norm: Largest norm; infinity only measures.
        scale_matrices: Whether gradients of the matrix route are scaled too (they count either
            way). Muon's direction does not depend on a gradient's scale, but what goes into the
            momentum does.
        error_if_nonfinite: Raise instead, on all ranks.

    Returns:
        The norm before clipping: a float32 scalar on the model's device, the same on all ranks.

    Raises:
        ValueError: `max_norm` is negative or NaN.
        FloatingPointError: see `error_if_nonfinite`; the message names the parameters.
    """
    expect("max_norm", max_norm, lambda v: is_size(v) or v == float("inf"), "a number >= 0")
    runtime = runtime_of(model)
    found = agree_on_gradients(runtime, reuse=False)
    if error_if_nonfinite and found.nonfinite:
        raise FloatingPointError(f"gradients are not finite: {', '.join(found.nonfinite)}")
    scale = max_norm / (found.norm + 1e-6)
    if not found.nonfinite and scale < 1:
        for group in runtime.groups:
            for s, gradient in group.gradients.items():
                if scale_matrices or not group.parameters[s.parameter].matrices:
                    gradient.mul_(scale)
        for parameter in found.others:
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().mul_(scale)
            elif parameter.grad is not None:
                parameter.grad.mul_(scale)
    return torch.tensor(found.norm, dtype=torch.float32, device=runtime.device)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside accumulate gradients on each rank; the first one outside reduces them all.

    Covers owned parameters and those of `fully_shard`.
    """
    runtime = runtime_of(model)
    shards = [m for m in model.modules() if isinstance(m, FSDPModule)]
    before = runtime.sync
    runtime.sync = False
    for module in shards:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        runtime.sync = before
        for module in shards:
            module.set_requires_gradient_sync(before, recurse=False)


def skip_backward(model: nn.Module) -> None:
    """Take part, with zeros, in the backward of the last forward that this rank will not run.

    For a rank that drops its loss (say, it is NaN) while the others run theirs. `step` and clipping
    do it for the last micro-batch; call this when more forwards follow before them. A rank leaves
    out all of a backward or nothing: not one of the forwards that others put into one backward.
    """
    runtime_of(model).drop_backward()


def wait_for_publish(model: nn.Module) -> None:
    """Order the caller after the publishes of the last step (they overlap what follows it)."""
    runtime_of(model).wait_for_publish()


@contextmanager
def full_params(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Hold the full owned parameters of a module and its children. Collective.

    For initialisation, inspection and export; layer by layer, no rank holds the whole model. The
    values are the masters, in float32 whatever `param_dtype` is.

    Args:
        module: The model, a layer, or what wraps them.
        writeback: Whether owners take their parts from what the parameters hold at the end. Every
            rank must have written the same values (same seed).
    """
    sites = sites_of(module)
    groups = list(dict.fromkeys(g for site in sites for g in site.groups))
    if not groups:
        raise ValueError(f"{type(module).__name__} has no owned parameters")
    with torch.no_grad(), runtime_of(module).gathered(groups, writeback=writeback):
        yield


def write_full(model: nn.Module, parameter: nn.Parameter, full: torch.Tensor) -> bool:
    """Let the owners of a parameter take their parts from its full value.

    Args:
        model: With owned parameters.
        parameter: As registered in the model.
        full: The parameter's shape, any dtype; the same on every rank.

    Returns:
        Whether the parameter is owned; if not, nothing was done.
    """
    runtime = runtime_of(model)
    for group in runtime.groups:
        for index, entry in enumerate(group.parameters):
            if entry.parameter is parameter:
                group.write(index, full)
                runtime.mark_stale()
                return True
    return False
