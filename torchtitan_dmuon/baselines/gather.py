"""Line B's step: gather whole gradients and momenta, orthogonalise on every rank, keep a shard.

Paper section D.2: one more gather and one more write-back than line C, Newton-Schulz on every rank,
and beyond C only buffers of the size of the largest parameter.
"""

from __future__ import annotations

import torch

from torchtitan_dmuon.comm.streams import mark
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer
from torchtitan_dmuon.optim.matrix_step import MatrixWork, batches, update_matrices
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.layout import Segment


@torch.no_grad()
def gathered_update(
    group: Group, index: int, momentum: torch.Tensor, rule: MatrixOptimizer
) -> list[MatrixWork]:
    """Update this rank's shard of a parameter with matrices.

    Args:
        group: The parameter's group, with shards in `masters` and `gradients`.
        index: Of the parameter in the group.
        momentum: 1-D, this rank's shard, updated in place.
        rule: Of the parameter; its state is the momentum alone.

    Returns:
        The matrices orthogonalised here: all of the parameter's.
    """
    entry = group.parameters[index]
    shards = [s for s in group.layout.segments if s.parameter == index]
    own = next(s for s in group.owned if s.parameter == index)
    gradient, full_momentum = _gather_pair(group, shards, own, momentum)
    # Weights begin as zero, so that what they are afterwards is what the shard is to gain.
    gain = torch.zeros_like(gradient)
    works = [
        MatrixWork(m, gain, gradient, 0, {"momentum_buffer": full_momentum}, rule)
        for m in entry.matrices
    ]
    together = batches(works)
    for work in works:
        if not work.done:
            update_matrices(together[work])
    here = slice(own.start, own.start + own.numel)
    momentum.copy_(full_momentum[here])
    group.masters[own].mul_(1 - float(rule.lr) * rule.weight_decay).add_(gain[here])
    return works


def _gather_pair(
    group: Group, shards: list[Segment], own: Segment, momentum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole gradient and the whole momentum, each (numel,) with memory of its own."""
    gradient = group.gradients[own]
    numel = group.parameters[own.parameter].numel
    if group.columns == 1:
        return gradient, momentum.clone()
    assert group.communicator is not None
    width = max(s.numel for s in shards)
    pair = gradient.new_zeros(2, width)
    pair[0, : own.numel] = gradient
    pair[1, : own.numel] = momentum
    staging = gradient.new_empty(group.columns * 2 * width)
    label = f"{group.name}:{group.parameters[own.parameter].name}"
    nothing = _nothing
    group.communicator.shard_gather(
        label, staging, pair.view(-1), [mark(group.device)], nothing, nothing
    ).wait()
    whole = gradient.new_empty(numel), gradient.new_empty(numel)
    for s in shards:
        for i, target in enumerate(whole):
            part = staging.view(group.columns, 2, width)[s.column, i, : s.numel]
            target[s.start : s.start + s.numel] = part
    return whole


def _nothing() -> None:
    return
