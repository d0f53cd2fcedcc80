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

# Five steps of Polar Express (arXiv:2505.16932), argument divided by 1.05.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5

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


def newton_schulz(matrix: torch.Tensor, quintic: bool = False) -> torch.Tensor:
    """The textbook's iteration, in the matrix's dtype; `quintic` with torch's coefficients."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T, quintic).T
    x = matrix / (float(torch.linalg.norm(matrix)) or 1.0)
    for a, b, c in QUINTIC if quintic else POLAR_EXPRESS:
        y = x if quintic else x / 1.05
        gram = y @ y.T
        x = a * y + (b * gram + c * gram @ gram) @ y
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
    quintic: bool = False,
) -> Trace:
    """Train. `per_slice` > 1 cuts each matrix into row slices; `torch_muon` takes torch.optim.Muon
    (which iterates in bfloat16, and knows plain matrices only); `quintic` its coefficients."""
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
                    (lr, weight_decay, momentum, per_slice, quintic),
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
    lr, weight_decay, momentum, slices, quintic = options
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
                wide[part] -= scale * newton_schulz(flat[part], quintic)
    weight.copy_(wide.view(weight.shape))


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference in Frobenius norm, of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())
