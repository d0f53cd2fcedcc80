"""NorMuon's update of a matrix (Li et al., arXiv:2510.05491, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_dmuon.arguments import expect, is_size
from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.matrix_optimizer import State, StateShapes, register


@register("normuon")
@dataclass(frozen=True, kw_only=True)
class NorMuon(MuonRule):
    """Muon with a learning rate for each neuron, by the second moment of its row.

    Algorithm 1: M <- momentum M + (1 - momentum) G; O = NewtonSchulz(M); v <- beta2 v + (1 - beta2)
    mean over columns of O^2; O' = O / (sqrt(v) + norm_eps), row by row; the update is
    0.2 sqrt(rows columns) / |O'|_F O', so that the mean square of its entries is 0.2^2 and AdamW's
    learning rates can be used. A neuron is a row (`torch.nn.Linear` has out x in), whichever side
    is longer.

    The authors' code (github.com/zichongli5/NorMuon) has Nesterov's look ahead and another scale:
    that is `nesterov=True, adjust_lr_fn="original"`. With `ns_coefficients="quintic"` Newton-Schulz
    is theirs too.

    Attributes:
        beta2: Share of the old second moment.
        norm_eps: Added to its root; a row of zeros stays one. The value of the authors' code, the
            paper leaves it open.
        nesterov: As in `MuonRule`; not in Algorithm 1.
        adjust_lr_fn: None or "match_rms_adamw": the scale of Algorithm 1. "original": O' with the
            norm of O, and lr * sqrt(max(1, rows / columns)).
    """

    nesterov: bool = False
    beta2: float = 0.95
    norm_eps: float = 1e-10

    def __post_init__(self) -> None:
        MuonRule.__post_init__(self)
        expect("beta2", self.beta2, lambda v: is_size(v) and v < 1, "0 <= beta2 < 1")
        expect("norm_eps", self.norm_eps, lambda v: is_size(v) and v > 0, "a number > 0")

    def state_shapes(self, rows: int, columns: int) -> StateShapes:
        return {"momentum_buffer": "elementwise", "second_momentum_buffer": (rows, 1)}

    def updates(
        self, gradients: Sequence[torch.Tensor], states: Sequence[State]
    ) -> Sequence[torch.Tensor]:
        orthogonal = super().updates(gradients, states)
        return [
            self._by_neuron(o.to(s["second_momentum_buffer"].dtype), s["second_momentum_buffer"])
            for o, s in zip(orthogonal, states, strict=True)
        ]

    def _by_neuron(self, orthogonal: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        """Advance the second moment of rows; return the update."""
        moment.lerp_(orthogonal.square().mean(dim=1, keepdim=True), 1 - self.beta2)
        scaled = orthogonal / moment.sqrt().add_(self.norm_eps)
        size: float | torch.Tensor = 0.2 * math.sqrt(orthogonal.numel())
        if self.adjust_lr_fn == "original":
            size = torch.linalg.vector_norm(orthogonal)
        # The gradient may be zero, and then so is the update.
        tiny = torch.finfo(scaled.dtype).tiny
        return scaled.mul_(size / torch.linalg.vector_norm(scaled).clamp(min=tiny))

    def adjusted_lr(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "original":
            return super().adjusted_lr(rows, columns)
        # The scale of Algorithm 1 is in the update.
        return float(self.lr)

    def flops(self, rows: int, columns: int) -> float:
        # Square, mean, division, two norms, scale.
        return super().flops(rows, columns) + 10.0 * rows * columns
