"""Muon's update of a matrix, as `torch.optim.Muon` defines it (paper section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from torchtitan_dmuon.arguments import expect, is_count, is_size
from torchtitan_dmuon.optim.matrix_optimizer import (
    MatrixOptimizer,
    State,
    StateShapes,
    register,
)
from torchtitan_dmuon.optim.newton_schulz import (
    Coefficients,
    Method,
    default_dtype,
    flops,
    per_step,
)
from torchtitan_dmuon.optim.replay import orthogonalize

AdjustLr = Literal["original", "match_rms_adamw"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@register("muon")
@dataclass(frozen=True, kw_only=True)
class MuonRule(MatrixOptimizer):
    """Momentum, orthogonalised; names and meanings of `torch.optim.Muon`.

    Attributes:
        momentum: Share of the old momentum.
        nesterov: Whether the gradient looks one step of momentum ahead.
        ns_coefficients: (a, b, c) of every step of Newton-Schulz, a list with those of each, or
            "polar_express" or "quintic" (torch's).
        eps: Smallest divisor of its normalisation. torch's 1e-7 makes the updates of matrices with
            smaller gradients smaller; with the default the scale of a gradient does not matter.
        ns_steps: Its iterations.
        ns_dtype: What it computes in. None: float16 on GPUs, float32 on CPUs.
        ns_method: "gram", "standard", or "auto" for what needs fewer operations.
        ns_restarts: Steps before which "gram" forms the Gram matrix anew. None: by dtype.
        adjust_lr_fn: None or "original": lr * sqrt(max(1, rows / columns)); "match_rms_adamw":
            lr * 0.2 * sqrt(max(rows, columns)), so that AdamW's learning rates can be used.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients = "polar_express"
    eps: float = 1e-37
    ns_steps: int = 5
    ns_dtype: torch.dtype | None = None
    ns_method: Method = "auto"
    ns_restarts: tuple[int, ...] | None = None
    adjust_lr_fn: AdjustLr | None = None

    def __post_init__(self) -> None:
        MatrixOptimizer.__post_init__(self)
        for name, valid, wanted in (
            ("momentum", lambda v: is_size(v) and v < 1, "0 <= momentum < 1"),
            ("nesterov", lambda v: isinstance(v, bool), "True or False"),
            ("eps", lambda v: is_size(v) and v > 0, "a number > 0"),
            ("ns_steps", lambda v: is_count(v, 1) and v < 100, "a whole number from 1 to 99"),
            (
                "ns_coefficients",
                lambda v: (
                    all(is_size(abs(c)) for row in per_step(v, 1) for c in row) and per_step(v, 99)
                ),
                "polar_express, quintic, three numbers, or three for each step",
            ),
            ("ns_dtype", lambda v: v is None or v in DTYPES, "None or one of " + _names(DTYPES)),
            ("ns_method", lambda v: v in get_args(Method), "auto, gram or standard"),
            (
                "ns_restarts",
                lambda v: v is None or all(is_count(step, 1) for step in v),
                "None or steps, counted from 1",
            ),
            (
                "adjust_lr_fn",
                lambda v: v in (None, *get_args(AdjustLr)),
                "None, original or match_rms_adamw",
            ),
        ):
            expect(name, getattr(self, name), valid, wanted)

    def state_shapes(self, rows: int, columns: int) -> StateShapes:
        return {"momentum_buffer": "elementwise"}

    def update(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        return self.updates([gradient], [state])[0]

    def updates(
        self, gradients: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        looks = [
            self._look(g, s["momentum_buffer"]) for g, s in zip(gradients, states, strict=True)
        ]
        return self.orthogonalized(looks)

    def _look(self, gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        """Advance the momentum; return what is orthogonalised."""
        momentum.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

    def orthogonalized(self, matrices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the orthogonal factors of matrices of one shape, computed together."""
        device = matrices[0].device
        dtype = self.ns_dtype or default_dtype(device)

        def run(matrix: torch.Tensor) -> torch.Tensor:
            return orthogonalize(
                matrix,
                steps=self.ns_steps,
                coefficients=self.ns_coefficients,
                eps=self.eps,
                dtype=dtype,
                method=self.ns_method,
                restarts=self.ns_restarts,
            )

        return (
            [run(matrices[0])] if len(matrices) == 1 else run(torch.stack(list(matrices))).unbind()
        )

    def adjusted_lr(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return float(self.lr) * 0.2 * math.sqrt(max(rows, columns))
        return float(self.lr) * math.sqrt(max(1.0, rows / columns))

    def flops(self, rows: int, columns: int) -> float:
        return float(flops(rows, columns, method=self.ns_method, steps=self.ns_steps))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
