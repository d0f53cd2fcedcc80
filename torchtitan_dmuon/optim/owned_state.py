"""The state of a matrix optimizer on its owners: where it is kept, and how a checkpoint names it.

Elementwise state has one tensor for each segment, as long as the segment. All other state has one
tensor for each matrix. The name of each begins with its optimizer's, so that none is ever taken for
another's; Muon's has torch's name. It stands in torch's `optimizer.state[parameter]` as it is if
there is one such tensor for the parameter, and with `.<index of the matrix>` behind it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, State, checked_shapes
from torchtitan_dmuon.optim.saved import SavedState
from torchtitan_dmuon.ownership import Matrix
from torchtitan_dmuon.runtime.group import Group, OwnedParameter
from torchtitan_dmuon.runtime.layout import Segment


def make(rule: MatrixOptimizer, group: Group, s: Segment) -> State:
    """Return the state of an owned segment before the first step, by its keys in torch's state."""
    entry, master = group.parameters[s.parameter], group.masters[s]
    state: State = {}
    # In line B the rank has a shard, and the matrices are the whole parameter's.
    for matrix in s.matrices or entry.matrices:
        for key, shape in checked_shapes(rule, *matrix.shape).items():
            if shape == "elementwise":
                whole = s.numel == entry.numel
                like = master.view(entry.shape) if whole else master
                state.setdefault(_of_stretch(entry, s, name(rule, key)), torch.zeros_like(like))
            else:
                state[_of_matrix(matrix, name(rule, key))] = master.new_zeros(shape)
    return state


def of_matrix(
    rule: MatrixOptimizer, entry: OwnedParameter, s: Segment, matrix: Matrix, state: State
) -> State:
    """Return the state of one matrix, elementwise as the segment's 1-D stretch."""
    result: State = {}
    for key, shape in rule.state_shapes(*matrix.shape).items():
        if shape == "elementwise":
            result[key] = state[_of_stretch(entry, s, name(rule, key))].view(-1)
        else:
            result[key] = state[_of_matrix(matrix, name(rule, key))]
    return result


def saved(rule: MatrixOptimizer, group: Group, index: int, state: State) -> Iterator[SavedState]:
    """Yield the state of a parameter for a checkpoint: the same entries on every rank.

    Args:
        rule: Its optimizer.
        group: The parameter's group.
        index: Of the parameter in the group.
        state: What this rank has of it, by the keys of `make`.
    """
    entry = group.parameters[index]
    dtype = group.precision.master
    mine = [s for s in group.owned if s.parameter == index]
    here = {m: s for s in mine for m in s.matrices}
    done: set[str] = set()
    for matrix in entry.matrices:
        for key, shape in rule.state_shapes(*matrix.shape).items():
            full = name(rule, key)
            if shape != "elementwise":
                held = [state[_of_matrix(matrix, full)]] if matrix in here else []
                size = torch.Size(shape)
                yield SavedState(entry.name, full, size, dtype, matrix=matrix, tensors=held)
            elif full not in done:
                done.add(full)
                stretches = [(s.start, state[_of_stretch(entry, s, full)].view(-1)) for s in mine]
                yield SavedState(entry.name, full, entry.shape, dtype, stretches=stretches)


def saved_adamw(group: Group, index: int, state: State) -> Iterator[SavedState]:
    """Yield the state of a parameter on the AdamW route: the same entries on every rank."""
    entry, dtype = group.parameters[index], group.precision.master
    mine = [s for s in group.owned if s.parameter == index]
    steps = [state["step"]] if mine else []
    yield SavedState(entry.name, "step", torch.Size(()), torch.float32, tensors=steps)
    for key in ("exp_avg", "exp_avg_sq"):
        stretches = [(s.start, state[key].view(-1)) for s in mine]
        yield SavedState(entry.name, key, entry.shape, dtype, stretches=stretches)


def name(rule: MatrixOptimizer, key: str) -> str:
    """Return the name of an entry of a rule's state, in torch's state and in checkpoints."""
    own = rule.label()
    return key if own == "muon" else f"{own}_{key}"


def _of_stretch(entry: OwnedParameter, s: Segment, key: str) -> str:
    if not s.matrices or s.numel == entry.numel:
        return key
    return f"{key}.{s.matrices[0].index}"


def _of_matrix(matrix: Matrix, key: str) -> str:
    return key if matrix.count == 1 else f"{key}.{matrix.index}"
