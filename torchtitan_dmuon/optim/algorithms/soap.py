"""SOAP's update of a matrix (Vyas et al., arXiv:2409.11321, Algorithms 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_dmuon.arguments import expect, is_count, is_size
from torchtitan_dmuon.optim.algorithms.kronecker import (
    accumulate,
    bounded,
    eigh,
    sandwich,
    sides,
    steps_of,
    timed_by_frequency,
)
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, State, StateShapes, register


@register("soap")
@dataclass(frozen=True, kw_only=True)
class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's statistics.

    With G' = Q_L^T G Q_R (Algorithm 3): M' <- beta1 M' + (1 - beta1) G', V <- beta2 V + (1 - beta2)
    G'^2, the update is Q_L (M' / (sqrt(V) + eps)) Q_R^T. Then L and R take G in, and every
    `precondition_frequency` steps one power iteration follows them (Algorithm 4): Q_L <- QR(L Q_L).

    Where the paper is silent, as the authors' code (github.com/nikhilvyas/SOAP):

    - The first step only sets L, R and, by eigendecomposition, their bases: its update is zero, so
      that no gradient is projected on a basis that it made. Bias correction counts from the second.
    - M' is kept in the basis and turned when that changes, so that it stays what Algorithm 3 keeps
      outside. V is not turned; its rows and columns follow when columns of a basis are reordered,
      by falling eigenvalues, before QR.
    - eps is added to the root of V before the correction of its bias.

    Weight decay acts before the update, as everywhere here, not after it, and in the first step as
    well. All is computed in the dtype of the state (float32), on its device.

    Attributes:
        betas: Share of the old first moment, and of the old second.
        shampoo_beta: Share of the old L and R. None: the second of `betas`.
        eps: Added to the root of the second moment.
        precondition_frequency: Steps from one power iteration to the next.
        max_precond_dim: Sides longer than this keep their own basis; if both are, this is Adam. It
            decides, before the first step, what state is kept.
    """

    lr: float = 3e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.95, 0.95)
    shampoo_beta: float | None = None
    eps: float = 1e-8
    precondition_frequency: int = 10
    max_precond_dim: int = 10000

    def __post_init__(self) -> None:
        MatrixOptimizer.__post_init__(self)
        for name, valid, wanted in (
            (
                "betas",
                lambda v: len(v) == 2 and all(is_size(b) and b < 1 for b in v),
                "two numbers with 0 <= beta < 1",
            ),
            (
                "shampoo_beta",
                lambda v: v is None or (is_size(v) and v < 1),
                "None or 0 <= shampoo_beta < 1",
            ),
            ("eps", lambda v: is_size(v) and v > 0, "a number > 0"),
            ("precondition_frequency", lambda v: is_count(v, 1), "a whole number >= 1"),
            ("max_precond_dim", lambda v: is_count(v, 0), "a whole number >= 0"),
        ):
            expect(name, getattr(self, name), valid, wanted)

    def state_shapes(self, rows: int, columns: int) -> StateShapes:
        shapes: dict[str, tuple[int, ...]] = {
            "step": (),
            # Both in the eigenbasis: not elementwise, but of this matrix as a whole.
            "exp_avg": (rows, columns),
            "exp_avg_sq": (rows, columns),
        }
        for side, size in sides(rows, columns, self.max_precond_dim).items():
            shapes[side] = shapes[f"{side}_basis"] = (size, size)
        return shapes

    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        return self.updates([gradient], [state])[0]

    def updates(
        self, gradients: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        return [
            self._update(bounded(g, s["exp_avg"].dtype), s, step)
            for g, s, step in zip(gradients, states, steps_of(states), strict=True)
        ]

    def _update(self, gradient: torch.Tensor, state: State, step: int) -> torch.Tensor:
        shampoo_beta = self.betas[1] if self.shampoo_beta is None else self.shampoo_beta
        state["step"].add_(1)
        if step == 0:
            accumulate(state, gradient, shampoo_beta)
            for side in _sides(state):
                # Eigenvalues come ascending.
                state[f"{side}_basis"].copy_(eigh(_normalized(state[side]))[1].flip(1))
            return torch.zeros_like(gradient)
        update = self._adam(gradient, state, step)
        accumulate(state, gradient, shampoo_beta)
        if step % self.precondition_frequency == 0:
            self._refresh(state)
        return update

    def _adam(self, gradient: torch.Tensor, state: State, step: int) -> torch.Tensor:
        """Return the update of the `step`th step of Adam, outside the basis."""
        beta1, beta2 = self.betas
        projected = _project(gradient, state)
        state["exp_avg"].lerp_(projected, 1 - beta1)
        state["exp_avg_sq"].lerp_(projected.square(), 1 - beta2)
        scale = math.sqrt(1 - beta2**step) / (1 - beta1**step)
        adam = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(self.eps)
        return _project_back(adam.mul_(scale), state)

    def _refresh(self, state: State) -> None:
        """One power iteration for each basis. Invariant: Q_L M' Q_R^T stays what it was."""
        outside = _project_back(state["exp_avg"], state)
        for side in _sides(state):
            basis = state[f"{side}_basis"]
            product = _normalized(state[side]) @ basis
            order = (basis * product).sum(dim=0).argsort(descending=True)
            squares = state["exp_avg_sq"]
            squares.copy_(squares.index_select(0 if side == "left" else 1, order))
            basis.copy_(torch.linalg.qr(product.index_select(1, order))[0])
        state["exp_avg"].copy_(_project(outside, state))

    def flops(self, rows: int, columns: int) -> float:
        total = 10.0 * rows * columns
        for size in sides(rows, columns, self.max_precond_dim).values():
            product = 2.0 * rows * columns * size
            # Statistics, into the basis, out of it; every so often L Q, its QR (4/3 n^3 to reduce,
            # 4/3 to form Q), and the momentum out of the old basis and into the new.
            total += (
                3 * product + ((2 + 8 / 3) * size**3 + 2 * product) / self.precondition_frequency
            )
        return total

    @property
    def period(self) -> int:
        return self.precondition_frequency

    def timed_as(self) -> Sequence[tuple[MatrixOptimizer, float]]:
        return timed_by_frequency(self, self.precondition_frequency)


def _sides(state: State) -> list[str]:
    return [side for side in ("left", "right") if side in state]


def _project(matrix: torch.Tensor, state: State) -> torch.Tensor:
    left = state.get("left_basis")
    return sandwich(None if left is None else left.mT, matrix, state.get("right_basis"))


def _project_back(matrix: torch.Tensor, state: State) -> torch.Tensor:
    right = state.get("right_basis")
    return sandwich(state.get("left_basis"), matrix, None if right is None else right.mT)


def _normalized(statistics: torch.Tensor) -> torch.Tensor:
    """Bring the largest entry to one: solvers lose small numbers, and bases have no scale."""
    return statistics / statistics.abs().amax().clamp(min=torch.finfo(statistics.dtype).tiny)
