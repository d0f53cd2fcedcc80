"""The reference: one process, one ordinary model, the textbook's Muon and torch's AdamW.

Gradients are summed over micro-batches and averaged over ranks, as FSDP2 does it. Nothing here is
shared with the product: Newton-Schulz is written again, in float64, and matrices are lists of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from tests.runtime.models import Fixture

A, B, C = 3.4445, -4.7750, 2.0315

# Beside the ranks of a world, which have one thread each, more threads only wait for each other.
torch.set_num_threads(1)


@dataclass
class Trace:
    """What a run of some steps did: the state before the first step and after each one.

    Attributes:
        weights: Full weights by name.
        losses: Mean over ranks of the summed micro-batch losses.
        norms: Global gradient norm before clipping, if it was asked for.
    """

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def update(self, step: int, name: str) -> torch.Tensor:
        return self.weights[step + 1][name].double() - self.weights[step][name].double()


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The textbook's quintic iteration, in the matrix's dtype."""
    x = matrix / max(float(torch.linalg.norm(matrix)), 1e-7)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(matrix.T, steps).T
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def matrix_names(model: nn.Module) -> list[str]:
    """Weights of at least two dimensions, without embedding and output head."""
    skip = ("embedding.", "head.")
    return [n for n, p in model.named_parameters() if p.ndim >= 2 and not n.startswith(skip)]


def train(
    fixture: Fixture,
    *,
    ranks: int,
    micro_batches: int = 1,
    steps: int = 3,
    clip: float | None = None,
    lr: float = 0.02,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    adamw_lr: float = 3e-4,
    per_slice: int = 1,
    torch_muon: bool = False,
) -> Trace:
    """Train. `per_slice` > 1 cuts each matrix into row slices; `torch_muon`
    takes torch.optim.Muon (which iterates in bfloat16, and knows plain matrices only)."""
    model = fixture.build()
    names = matrix_names(model)
    parameters = dict(model.named_parameters())
    rest = [p for n, p in parameters.items() if n not in names]
    adamw = torch.optim.AdamW(rest, adamw_lr, (0.9, 0.95), 1e-8, 0.0) if rest else None
    peer = None
    if torch_muon:
        matrices = [parameters[n] for n in names]
        peer = torch.optim.Muon(matrices, lr, weight_decay, momentum=momentum)
    buffers: dict[str, torch.Tensor] = {}
    trace = Trace([_copy(model)])
    for step in range(steps):
        model.zero_grad()
        loss = _backward_all(model, fixture, step, ranks, micro_batches)
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad /= ranks
        if clip is not None:
            trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        if peer is not None:
            peer.step()
        else:
            for name in names:
                _muon(
                    parameters[name],
                    buffers.setdefault(name, torch.zeros(parameters[name].shape).double()),
                    fixture.matrix_rows.get(name),
                    (lr, weight_decay, momentum, per_slice),
                )
        if adamw is not None:
            adamw.step()
        trace.weights.append(_copy(model))
        trace.losses.append(loss)
    return trace


def _backward_all(
    model: nn.Module, fixture: Fixture, step: int, ranks: int, micro_batches: int
) -> float:
    total, parts = 0.0, ranks * micro_batches
    for part in range(parts):
        loss = fixture.loss(model, step, part, parts, micro_batches)
        loss.backward()
        total += loss.item() / ranks
    return total


@torch.no_grad()
def _muon(
    weight: torch.Tensor, buffer: torch.Tensor, rows: Sequence[Sequence[int]] | None, options: Any
) -> None:
    lr, weight_decay, momentum, slices = options
    assert weight.grad is not None
    gradient = weight.grad.double()
    buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
    look = (1 - momentum) * gradient + momentum * buffer
    flat, wide = look.reshape(-1, look.size(-1)), weight.double().reshape(-1, look.size(-1))
    wide = (1 - lr * weight_decay) * wide
    for block in rows or [range(flat.size(0))]:
        scale = lr * max(1.0, len(block) / flat.size(1)) ** 0.5
        for part in torch.tensor(list(block)).tensor_split(slices):
            if len(part):
                wide[part] -= scale * newton_schulz(flat[part])
    weight.copy_(wide.view(weight.shape))


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference in Frobenius norm, of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())
