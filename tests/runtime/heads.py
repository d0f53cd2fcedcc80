"""F1 of the user needs: bias-free linear layers side by side, with integer data.

The gradient of each weight is exactly c^T x, so sums over ranks are exact in float32, and averages
over a power of two as well. A textbook Muon for single matrices stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import torchtitan_dmuon as dmuon
from tests.runtime.reference import POLAR_EXPRESS
from torchtitan_dmuon.runtime.site import canonical_name

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


class Heads(nn.Module):
    """`out_i = L_i(x_i)`; `loss` sums `c_i * out_i` over the heads in `used`."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(columns, rows, bias=False) for rows, columns in shapes
        )

    def forward(
        self, data: Sequence[tuple[torch.Tensor, torch.Tensor]], used: Sequence[int]
    ) -> torch.Tensor:
        return torch.stack([(data[i][1] * self.layers[i](data[i][0])).sum() for i in used]).sum()


def batch(
    shapes: Sequence[tuple[int, int]], rank: int, step: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (x, c) of each head: integers in [-3, 3], with rows enough for full rank."""
    result = []
    for index, (rows, columns) in enumerate(shapes):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + index)
        count = 2 * max(rows, columns)
        result.append(
            tuple(
                torch.randint(-3, 4, (count, n), generator=generator).float()
                for n in (columns, rows)
            )
        )
    return result  # type: ignore[return-value]


def mean_gradient(
    shapes: Sequence[tuple[int, int]], index: int, size: int, step: int
) -> torch.Tensor:
    """Return the exact average over ranks of c^T x."""
    total = torch.zeros(shapes[index], dtype=torch.float64)
    for rank in range(size):
        x, c = batch(shapes, rank, step)[index]
        total += c.double().T @ x.double()
    return (total / size).float()


class Textbook:
    """One matrix, one process, float32: what every owner must reproduce."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach().clone()
        self.momentum = torch.zeros_like(self.weight)

    def step(self, gradient: torch.Tensor) -> None:
        self.momentum += (1 - MOMENTUM) * (gradient - self.momentum)
        x = gradient + MOMENTUM * (self.momentum - gradient)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (x.norm().item() or 1.0)
        for a, b, c in POLAR_EXPRESS:
            x = x / 1.05
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x
        rows, columns = self.weight.shape
        rate = LR * max(1.0, rows / columns) ** 0.5
        self.weight = self.weight * (1 - LR * DECAY) - rate * x


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights by canonical name. Collective."""
    result = {}
    with dmuon.full_params(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            result[canonical_name(name)] = whole.detach().clone()
    return result


def as_lists(weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return weights as nested lists: tensors do not outlive the rank that sends them."""
    return {name: weight.tolist() for name, weight in weights.items()}


def as_tensors(lists: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in lists.items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of this rank's optimizer state, in a fixed order."""
    return [
        (value.to_local() if isinstance(value, DTensor) else value).clone()
        for state in optimizer.state.values()
        for _, value in sorted(state.items())
    ]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius difference."""
    return float((found - expected).norm() / expected.norm())
