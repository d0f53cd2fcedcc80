"""One step of a matrix optimizer on matrices in flat storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, State
from torchtitan_dmuon.ownership import Matrix

# Smaller matrices of one shape and layer are updated in one call: each alone leaves a device idle.
# Larger ones fill it, and are better published one by one.
BATCH_MATRIX_NUMEL = 5_000_000
# Bounds what such a call needs beyond the state: the gradients' copies and the iteration's.
BATCH_NUMEL = 1 << 26


@dataclass(slots=True, eq=False)
class MatrixWork:
    """A matrix that is to be updated in this step, by its owner.

    Attributes:
        matrix: The matrix.
        weight: 1-D, a stretch of the parameter's storage that contains it.
        gradient: 1-D, the same stretch.
        start: Element of the parameter where the stretch begins.
        state: Its state: elementwise as the same stretch, all else as it is.
        rule: Its optimizer.
        done: Whether it was updated.
        finite: 0-D boolean, once it was: whether the update was finite. If not, the update is
            taken as zero.
    """

    matrix: Matrix
    weight: torch.Tensor
    gradient: torch.Tensor
    start: int
    state: State
    rule: MatrixOptimizer
    done: bool = False
    finite: torch.Tensor = field(default_factory=lambda: torch.tensor(True))

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix in a stretch, (rows, columns): a copy if it is interleaved there."""
        return self.matrix.view(flat, start=self.start).reshape(self.matrix.shape)

    def read_state(self) -> State:
        """Return the state as the optimizer wants it; views where that is possible."""
        shapes = self.rule.state_shapes(*self.matrix.shape)
        return {
            key: self.read(value) if shapes[key] == "elementwise" else value
            for key, value in self.state.items()
        }

    def finish(self, update: torch.Tensor, state: State) -> None:
        """Apply an update, and keep the state that came from `read_state`."""
        if not self.matrix.contiguous:
            shapes = self.rule.state_shapes(*self.matrix.shape)
            for key in (k for k, shape in shapes.items() if shape == "elementwise"):
                target = self.matrix.view(self.state[key], start=self.start)
                target.copy_(state[key].view(target.shape))
        target = self.matrix.view(self.weight, start=self.start)
        target.mul_(1 - float(self.rule.lr) * self.rule.weight_decay)
        self.finite = torch.isfinite(update.sum(dtype=torch.float32))
        # A GPU would wait for a branch; on a CPU it is quicker than one more pass over the matrix.
        if self.finite.is_cuda or not self.finite:
            update = update.masked_fill(self.finite.logical_not(), 0)
        rate = self.rule.adjusted_lr(*self.matrix.shape)
        target.add_(update.reshape(target.shape).to(target.dtype), alpha=-rate)
        self.done = True


def batches(works: Iterable[MatrixWork]) -> dict[MatrixWork, list[MatrixWork]]:
    """Return for each matrix those that are updated in one call with it, itself included.

    That depends on shapes and options alone, so that a resumed job repeats it.
    """
    result: dict[MatrixWork, list[MatrixWork]] = {}
    open_batches: dict[tuple[int, tuple[int, int]], list[MatrixWork]] = {}
    for work in works:
        key = (id(work.rule), work.matrix.shape)
        batch = open_batches.get(key)
        room = batch is not None and (len(batch) + 1) * work.matrix.numel <= BATCH_NUMEL
        if batch is None or not room or work.matrix.numel >= BATCH_MATRIX_NUMEL:
            batch = open_batches[key] = []
        batch.append(work)
        result[work] = batch
    return result


def update_matrices(works: Sequence[MatrixWork]) -> None:
    """Update matrices of one shape and optimizer, in place."""
    states = [work.read_state() for work in works]
    gradients = [work.read(work.gradient) for work in works]
    updates = works[0].rule.updates(gradients, states)
    for work, update, state in zip(works, updates, states, strict=True):
        work.finish(update, state)
