"""Shampoo's update of a matrix (Gupta et al., arXiv:1802.09568; Shi et al., arXiv:2309.06497)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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

Grafting = Literal["adam", "none"]


@register("shampoo")
@dataclass(frozen=True, kw_only=True)
class Shampoo(MatrixOptimizer):
    """The momentum between inverse fourth roots of the gradient's statistics, L^-1/4 M R^-1/4.

    Gupta et al., Algorithm 1, as Distributed Shampoo (Shi et al.) runs it: L, R and M are
    exponential averages with Adam's bias correction; roots are renewed every
    `precondition_frequency` steps, with eps added to the eigenvalues, once all have been lifted if
    rounding made the smallest negative; the update has the direction of L^-1/4 M R^-1/4 and the
    norm of Adam's update with the same betas (grafting). Until the first roots there is Adam alone.

    Gupta's own Algorithm 1 is `betas=(0, 1), grafting="none", precondition_frequency=1`.

    Defaults are Distributed Shampoo's recipe in place of AdamW. Its separate momentum of updates,
    off by default, is left out. It cuts matrices with a side longer than `max_precond_dim` into
    blocks; here that side is left alone and the other's root is the inverse square root (as in the
    code of Anil et al., arXiv:2002.09018, whose exponent is 1 over twice the number of sides that
    have a root). If both are longer, the update is what would be grafted.

    All is computed in the dtype of the state (float32), on its device.

    Attributes:
        betas: Share of the old first moment; of the old L, R and second moment. 1 for the second:
            they are sums, as in Algorithm 1 and AdaGrad.
        eps: Added to the eigenvalues of L and R.
        grafting: "adam", or "none" for L^-1/4 M R^-1/4 as it is. Then roots are renewed in each of
            the first `precondition_frequency` steps: those of few gradients blow up what is new in
            the next, and there is no norm to bring that back to.
        grafting_eps: Added to the root of Adam's second moment.
        precondition_frequency: Steps from one computation of roots to the next.
        max_precond_dim: Longest side that gets a root. What state is kept is decided by this and
            `grafting` before the first step.
    """

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-12
    grafting: Grafting = "adam"
    grafting_eps: float = 1e-8
    precondition_frequency: int = 100
    max_precond_dim: int = 8192

    def __post_init__(self) -> None:
        MatrixOptimizer.__post_init__(self)
        for name, valid, wanted in (
            (
                "betas",
                lambda v: len(v) == 2 and all(map(is_size, v)) and v[0] < 1 and 0 < v[1] <= 1,
                "two numbers with 0 <= first < 1 and 0 < second <= 1",
            ),
            ("eps", lambda v: is_size(v) and v > 0, "a number > 0"),
            ("grafting", lambda v: v in get_args(Grafting), "adam or none"),
            ("grafting_eps", lambda v: is_size(v) and v > 0, "a number > 0"),
            ("precondition_frequency", lambda v: is_count(v, 1), "a whole number >= 1"),
            ("max_precond_dim", lambda v: is_count(v, 0), "a whole number >= 0"),
        ):
            expect(name, getattr(self, name), valid, wanted)

    def state_shapes(self, rows: int, columns: int) -> StateShapes:
        shapes: dict[str, tuple[int, ...] | Literal["elementwise"]] = {
            "step": (),
            "exp_avg": "elementwise",
        }
        if self.grafting == "adam":
            shapes["exp_avg_sq"] = "elementwise"
        for side, size in sides(rows, columns, self.max_precond_dim).items():
            shapes[side] = shapes[f"{side}_root"] = (size, size)
        return shapes

    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        return self.updates([gradient], [state])[0]

    def updates(
        self, gradients: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        return [
            self._update(bounded(g, s["exp_avg"].dtype), s, step + 1)
            for g, s, step in zip(gradients, states, steps_of(states), strict=True)
        ]

    def _update(self, gradient: torch.Tensor, state: State, step: int) -> torch.Tensor:
        beta1, beta2 = self.betas
        state["step"].add_(1)
        accumulate(state, gradient, beta2)
        # A sum has no bias.
        unbias = 1 - beta2**step if beta2 < 1 else 1.0
        grafted = "exp_avg_sq" in state
        early = step < self.precondition_frequency
        if step % self.precondition_frequency == 0 or (early and not grafted):
            _renew_roots(state, unbias, self.eps)
        momentum = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
        adam = self._adam(gradient, momentum, state["exp_avg_sq"], unbias) if grafted else None
        left, right = state.get("left_root"), state.get("right_root")
        if adam is not None and (early or (left is None and right is None)):
            return adam
        direction = sandwich(left, momentum, right)
        return direction if adam is None else _with_norm_of(direction, adam)

    def _adam(
        self, gradient: torch.Tensor, momentum: torch.Tensor, squares: torch.Tensor, unbias: float
    ) -> torch.Tensor:
        """Advance the second moment; return Adam's update."""
        beta2 = self.betas[1]
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2 if beta2 < 1 else 1.0)
        return momentum / squares.div(unbias).sqrt_().add_(self.grafting_eps)

    def flops(self, rows: int, columns: int) -> float:
        total = 20.0 * rows * columns
        for size in sides(rows, columns, self.max_precond_dim).values():
            # Statistics and root times momentum; every so often eigh (about 9 n^3) and the root.
            total += 4.0 * rows * columns * size + 11.0 * size**3 / self.precondition_frequency
        return total

    @property
    def period(self) -> int:
        return self.precondition_frequency

    def timed_as(self) -> Sequence[tuple[MatrixOptimizer, float]]:
        return timed_by_frequency(self, self.precondition_frequency)


def _renew_roots(state: State, unbias: float, eps: float) -> None:
    known = [side for side in ("left", "right") if side in state]
    for side in known:
        values, vectors = eigh(state[side] / unbias)
        values = values - values.amin().clamp(max=0.0) + eps
        root = values.pow_(-1 / (2 * len(known)))
        torch.matmul(vectors * root, vectors.mT, out=state[f"{side}_root"])


def _with_norm_of(direction: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `direction` with the Frobenius norm of `other`; zero if it is zero."""
    # Roots that are older than a jump of the gradient can make it so large that its square is not
    # finite: bring its largest entry to one first.
    tiny = torch.finfo(direction.dtype).tiny
    unit = direction / direction.abs().amax().clamp(min=tiny)
    size = torch.linalg.vector_norm(other) / torch.linalg.vector_norm(unit).clamp(min=tiny)
    return unit.mul_(size)
