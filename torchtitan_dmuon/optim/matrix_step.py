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
        finite: 0-D boolean, once it was: whether the update was finite. If not, the weight stays.
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
        self.done = True
        self.finite = torch.isfinite(update.sum(dtype=torch.float32))
        target = self.matrix.view(self.weight, start=self.start)
        decay = 1 - float(self.rule.lr) * self.rule.weight_decay
        if self.finite.is_cuda:
            # A branch would make the host wait.
            target.mul_(torch.where(self.finite, decay, 1.0).to(target.dtype))
            update = update.masked_fill(self.finite.logical_not(), 0)
        elif self.finite:
            target.mul_(decay)
        else:
            return
        rate = self.rule.adjusted_lr(*self.matrix.shape)
        target.add_(update.reshape(target.shape).to(target.dtype), alpha=-rate)


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
    before = [gradient._version for gradient in gradients]
    try:
        updates = works[0].rule.updates(gradients, states)
    except Exception as error:  # a rule may be anybody's: say where
        names = ", ".join(work.matrix.name for work in works[:3])
        error.add_note(f"in the update of {names} by matrix optimizer {works[0].rule.label()}")
        raise
    _check(works, updates, [g._version for g in gradients] == before)
    for work, update, state in zip(works, updates, states, strict=True):
        work.finish(update, state)


def _check(works: Sequence[MatrixWork], updates: Sequence[torch.Tensor], untouched: bool) -> None:
    """Check what a rule returned: it may be anybody's."""
    rule = works[0].rule.label()
    if not untouched:
        raise RuntimeError(
            f"matrix optimizer {rule}: changed the gradient of {works[0].matrix.name}; it is to be "
            "read only"
        )
    if len(updates) != len(works):
        raise RuntimeError(
            f"matrix optimizer {rule}: expected {len(works)} updates, got {len(updates)}"
        )
    for work, update in zip(works, updates, strict=True):
        if update.shape != work.matrix.shape or not update.is_floating_point():
            wanted = " x ".join(map(str, work.matrix.shape))
            raise RuntimeError(
                f"matrix optimizer {rule}: the update of {work.matrix.name} must be {wanted} "
                f"floating-point numbers, got {tuple(update.shape)} of {update.dtype}"
            )
