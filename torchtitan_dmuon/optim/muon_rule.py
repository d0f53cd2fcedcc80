"""Muon's update of a matrix, as `torch.optim.Muon` defines it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from torchtitan_dmuon.arguments import expect, is_count, is_size
from torchtitan_dmuon.optim.newton_schulz import newton_schulz
from torchtitan_dmuon.ownership import Matrix

AdjustLr = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """Options of the matrix route; names, meanings and defaults of `torch.optim.Muon`.

    Attributes:
        lr: Learning rate, before the adjustment to the matrix's shape.
        weight_decay: Decoupled weight decay: weights shrink by lr * weight_decay.
        momentum: Share of the old momentum.
        nesterov: Whether the gradient looks one step of momentum ahead.
        ns_coefficients: a, b, c of Newton-Schulz.
        eps: Smallest divisor of its normalisation.
        ns_steps: Its iterations.
        adjust_lr_fn: None or "original": lr * sqrt(max(1, rows / columns)); "match_rms_adamw":
            lr * 0.2 * sqrt(max(rows, columns)), so that AdamW's learning rates can be used.
        ns_dtype: What Newton-Schulz computes in; torch's Muon knows bfloat16 only.

    Raises:
        ValueError: a value out of range; it names option and range.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: AdjustLr | None = None
    ns_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        number, dtypes = "a finite number >= 0", (torch.bfloat16, torch.float32, torch.float64)
        for name, valid, wanted in (
            ("lr", is_size, number),
            ("weight_decay", is_size, number),
            ("momentum", lambda v: is_size(v) and v < 1, "0 <= momentum < 1"),
            ("nesterov", lambda v: isinstance(v, bool), "True or False"),
            ("eps", lambda v: is_size(v) and v > 0, "a number > 0"),
            ("ns_steps", lambda v: is_count(v, 1), "a whole number of at least 1"),
            (
                "ns_coefficients",
                lambda v: len(v) == 3 and all(is_size(abs(c)) for c in v),
                "three numbers",
            ),
            (
                "adjust_lr_fn",
                lambda v: v in (None, *get_args(AdjustLr)),
                "None, original or match_rms_adamw",
            ),
            ("ns_dtype", lambda v: v in dtypes, "torch.bfloat16, torch.float32 or torch.float64"),
        ):
            expect(name, getattr(self, name), valid, wanted)

    @staticmethod
    def of(group: dict[str, Any]) -> MuonOptions:
        """Return the options of a parameter group."""
        return MuonOptions(**{name: group[name] for name in MuonOptions.__dataclass_fields__})

    def adjusted_lr(self, rows: int, columns: int) -> float:
        """Return the learning rate of a matrix of this shape."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return float(self.lr) * 0.2 * math.sqrt(max(rows, columns))
        return float(self.lr) * math.sqrt(max(1.0, rows / columns))


def orthogonal_updates(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    matrices: Sequence[Matrix],
    start: int,
    options: MuonOptions,
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Advance the momentum, in place, and yield each matrix with its orthogonalised direction.

    Args:
        gradient: 1-D, a stretch of a parameter's storage; left as it is.
        momentum: 1-D, the same stretch.
        matrices: The matrices in the stretch.
        start: Element of the parameter where the stretch begins.
        options: Of the parameter.

    Yields:
        The matrix and a (rows, columns) tensor in `options.ns_dtype`.
    """
    momentum.lerp_(gradient, 1 - options.momentum)
    look = gradient.lerp(momentum, options.momentum) if options.nesterov else momentum
    for matrix in matrices:
        yield (
            matrix,
            newton_schulz(
                matrix.view(look, start=start).reshape(matrix.rows, matrix.columns),
                steps=options.ns_steps,
                coefficients=options.ns_coefficients,
                eps=options.eps,
                dtype=options.ns_dtype,
            ),
        )


def apply_updates(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    matrices: Sequence[Matrix],
    start: int,
    options: MuonOptions,
) -> int:
    """Update a stretch of a parameter, in place. Returns the number of matrices orthogonalised."""
    weight.mul_(1 - float(options.lr) * options.weight_decay)
    for matrix, direction in orthogonal_updates(gradient, momentum, matrices, start, options):
        target = matrix.view(weight, start=start)
        rate = options.adjusted_lr(matrix.rows, matrix.columns)
        target.add_(direction.view(target.shape).to(target.dtype), alpha=-rate)
    return len(matrices)
