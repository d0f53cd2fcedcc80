"""Statistics of a gradient's two sides, and what SOAP and Shampoo do with them.

L = E[G G^T] is "left", rows x rows; R = E[G^T G] is "right", columns x columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, State

LARGEST = 1e12
"""Largest magnitude of an entry that is taken as it is. Squares of larger ones, summed over a row
and multiplied once more, could leave float32's range."""


def sides(rows: int, columns: int, limit: int) -> dict[str, int]:
    """Return the sides that get statistics, with their sizes: those of at most `limit`."""
    return {k: size for k, size in (("left", rows), ("right", columns)) if size <= limit}


def bounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a gradient in `dtype` whose largest entry is at most `LARGEST`.

    A gradient with a larger one is made smaller as a whole, which keeps its direction. One with an
    infinity or NaN is zero: it would stay in the statistics for good. The caller is to find it.
    """
    copy = gradient.to(dtype, copy=True)
    largest = copy.abs().amax()
    copy.mul_(LARGEST / largest.clamp(min=LARGEST))
    # No branch, which would make a GPU wait.
    return torch.where(largest.isfinite(), copy, torch.zeros((), dtype=dtype, device=copy.device))


def steps_of(states: Sequence[State]) -> list[int]:
    """Return how many updates each matrix has had.

    The one place where the host waits for the device: what an update does hangs on it. It is one
    small copy for all matrices of a call.
    """
    return [round(s) for s in torch.stack([s["step"] for s in states]).tolist()]


def accumulate(state: State, gradient: torch.Tensor, beta: float) -> None:
    """Advance L and R: L <- beta L + (1 - beta) G G^T; a plain sum if beta is 1."""
    share = 1 - beta if beta < 1 else 1.0
    if "left" in state:
        state["left"].addmm_(gradient, gradient.mT, beta=beta, alpha=share)
    if "right" in state:
        state["right"].addmm_(gradient.mT, gradient, beta=beta, alpha=share)


def sandwich(
    left: torch.Tensor | None, matrix: torch.Tensor, right: torch.Tensor | None
) -> torch.Tensor:
    """Return left @ matrix @ right; None stands for the identity."""
    if left is not None:
        matrix = left @ matrix
    return matrix if right is None else matrix @ right


def eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of a symmetric matrix, in its dtype.

    Computed in float64 if the solver does not converge in less (float32 on GPUs can fail to).
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def timed_by_frequency(
    rule: MatrixOptimizer, frequency: int
) -> list[tuple[MatrixOptimizer, float]]:
    """Return what `MatrixOptimizer.timed_as` does, for a rule with a `precondition_frequency`.

    A step with a refresh takes r and one without p. Refreshing in each step takes r on average, in
    every second (r + p) / 2, and in every f-th p + (r - p) / f.
    """
    if frequency <= 2:
        return [(rule, 1.0)]
    every, second = (replace(rule, precondition_frequency=n) for n in (1, 2))  # type: ignore[call-arg]
    return [(every, 2 / frequency - 1), (second, 2 - 2 / frequency)]
