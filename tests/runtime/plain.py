"""Comparison with plain autograd: a script of forwards and backwards, run on owners and plain.

A script is a function of a `Run`. The plain side runs it once for each rank on an ordinary copy of
the model, so that its gradients are the sum over ranks; the owner side runs it on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchtitan_dmuon as dmuon
from tests.runtime.communication import argument
from torchtitan_dmuon.runtime.dedicate import Dedication, runtime_of
from torchtitan_dmuon.runtime.gradients import agree_on_gradients

WIDTH = 8


class Block(nn.Module):
    """A residual layer with two matrices and two vectors."""

    def __init__(self, width: int = WIDTH, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and nothing outside them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head; the head is not tied."""

    def __init__(self, depth: int = 2, vocabulary: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Run:
    """What a script sees.

    Attributes:
        model: The plain copy, or the one with owners.
        rank: The rank that is run, or run for.
        owned: Whether the model has owners.
        round: Scripts run twice, on different data.
    """

    model: Any
    rank: int
    owned: bool
    round: int = 0

    def x(self, k: int = 0) -> torch.Tensor:
        """Return the k-th input of this rank and round, (4, WIDTH)."""
        seed = 1000 * self.round + 10 * self.rank + k
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))

    def tokens(self, k: int = 0) -> torch.Tensor:
        seed = 1000 * self.round + 10 * self.rank + k
        return torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(seed))


def open_world(shape: tuple[int, int], seconds: float = 50) -> DeviceMesh:
    """Start gloo and return the (replicate, shard) mesh."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def dedicate(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> Dedication:
    """Dedicate, with owners spread over single matrices, and shard the rest."""
    arguments = {"cost": "model", "small_matrix_numel": 50}
    arguments |= {**argument(options.get("mode", "owner")), **options}
    owned = dmuon.dedicate_params(model, mesh, **arguments)
    if mesh is not None and any(True for _ in owned.runtime.other_parameters()):
        fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    return owned


@dataclass
class Plain:
    """The mean over ranks of what plain autograd gives; None where it gives nothing."""

    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def plain_gradients(
    build: Callable[[], nn.Module], script: Callable[[Run], None], size: int, round: int
) -> Plain:
    torch.manual_seed(0)
    model = build()
    for rank in range(size):
        script(Run(model, rank, False, round))
    return Plain(
        {n: None if p.grad is None else p.grad / size for n, p in model.named_parameters()}
    )


def compare_gradients(model: nn.Module, plain: Plain, where: str) -> None:
    """Compare this rank's reduced gradients, owned and sharded, with the reference. Collective."""
    runtime = runtime_of(model)
    found = agree_on_gradients(runtime, reuse=False)
    owned = {e.name for g in runtime.groups for e in g.parameters}
    expected = {n for n in owned if plain.gradients[n] is not None}
    assert found.present == expected, f"{where}: present {found.present ^ expected}"
    for group in runtime.groups:
        for entry in group.parameters:
            assert entry.parameter.grad is None, f"{where}: {entry.name} keeps a gradient"
        for s, gradient in group.gradients.items():
            name = group.parameters[s.parameter].name
            reference = plain.gradients[name]
            if reference is None:
                assert not gradient.any(), f"{where}: {name} has a gradient from nowhere"
                continue
            part = reference.reshape(-1)[s.start : s.start + s.numel]
            torch.testing.assert_close(
                gradient, part, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{where}: {n}: {m}"
            )
        for s in group.owned:
            name = group.parameters[s.parameter].name
            assert s in group.gradients or name not in expected, f"{where}: {name} got none"
    for name, parameter in runtime.other_parameters():
        reference = plain.gradients[name]
        if parameter.grad is None or reference is None:
            assert reference is None and parameter.grad is None, f"{where}: {name}"
            continue
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(
            whole, reference, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{where}: {n}: {m}"
        )


def check_at_rest(model: nn.Module, where: str) -> None:
    """After backward nothing is gathered any more, and nothing counts as running."""
    for group in runtime_of(model).groups:
        assert group.uses == 0, f"{where}: {group.name} counts as running"
        assert group.memory_bytes()["gathered"] == 0, f"{where}: {group.name} is still gathered"
