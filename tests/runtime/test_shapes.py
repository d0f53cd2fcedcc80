"""Any shape works at any world size, with more ranks than matrices too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.communication import each_communication_at_length, run_world
from tests.runtime.heads import (
    DECAY,
    LR,
    MOMENTUM,
    Heads,
    Textbook,
    as_lists,
    as_tensors,
    batch,
    full_weights,
    mean_gradient,
    relative,
)
from tests.runtime.plain import dedicate, open_world
from tests.worlds import RankFailed

SHAPES = [(7, 5), (1, 40), (40, 1), (3, 200), (200, 3), (72, 24)]
WORLDS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 1), (3, 1)]
NAMES = ["x".join(map(str, world)) for world in WORLDS]


def train_heads(shape: tuple[int, int], shapes: list[tuple[int, int]]) -> tuple[int, int]:
    """Three steps against the textbook. Returns (matrices owned, orthogonalised per step) here."""
    mesh = open_world(shape) if shape != (1, 1) else None
    rank = torch.distributed.get_rank() if mesh else 0
    size = shape[0] * shape[1]
    torch.manual_seed(0)
    model = Heads(shapes)
    books = [Textbook(layer.weight) for layer in model.layers]
    owned = dedicate(model, mesh, small_matrix_numel=1)
    optimizer = dmuon.Muon(
        model, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_dtype=torch.float32
    )
    before = full_weights(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(shapes, rank, step), range(len(shapes))).backward()
        dmuon.clip_grad_norm_(model, float("inf"))
        for group in owned.runtime.groups:
            for s, gradient in group.gradients.items():
                index = int(group.parameters[s.parameter].name.split(".")[1])
                exact = mean_gradient(shapes, index, size, step)
                if size & (size - 1) == 0:
                    assert torch.equal(gradient.view(exact.shape), exact), (shape, index)
                else:
                    assert relative(gradient.view(exact.shape), exact) < 1e-6
        optimizer.step()
        after = full_weights(model)
        for index, book in enumerate(books):
            old = book.weight
            book.step(mean_gradient(shapes, index, size, step))
            name = f"layers.{index}.weight"
            error = relative(after[name] - before[name], book.weight - old)
            assert error < 1e-4, f"{shape}: {name} {shapes[index]} step {step}: {error}"
        before = after
    mine = sum(owner == rank for owner in owned.assignment.owners)
    return mine, optimizer.last_step.orthogonalized


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("world", WORLDS, ids=NAMES)
def test_any_shape_matches_the_textbook(world: tuple[int, int]) -> None:
    results = run_world(world[0] * world[1], train_heads, world, SHAPES, timeout_seconds=50)
    assert sum(done for _, done in results) == len(SHAPES)
    assert all(owned == done for owned, done in results)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("world", [(1, 4), (2, 2)], ids=["1x4", "2x2"])
def test_more_ranks_than_matrices(world: tuple[int, int], count: int) -> None:
    shapes = [(6, 9), (5, 5), (12, 4)][:count]
    results = run_world(4, train_heads, world, shapes, timeout_seconds=50)
    assert sum(owned for owned, _ in results) == count
    assert sum(owned == 0 for owned, _ in results) == 4 - count, "owners are not spread"


class Scaled(nn.Module):
    """A layer with a scalar gain and a vector next to its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * torch.tanh(self.linear(x)) + self.shift


def train_scalars(shape: tuple[int, int]) -> dict[str, list[Any]]:
    mesh = open_world(shape) if shape != (1, 1) else None
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32, adamw_lr=0.01)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
    return as_lists(full_weights(model))


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
def test_scalar_parameters_train() -> None:
    alone = as_tensors(run_world(1, train_scalars, (1, 1))[0])
    assert alone["0.gain"].shape == () and not torch.equal(alone["0.gain"], torch.tensor(1.5))
    for shape in ((1, 2), (2, 2)):
        for lists in run_world(shape[0] * shape[1], train_scalars, shape):
            found = as_tensors(lists)
            for name, weight in alone.items():
                torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)


class Empty(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.zeros(rows, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (x @ self.nothing.T).sum()


def train_empty(shape: tuple[int, int]) -> str:
    mesh = open_world(shape) if shape != (1, 1) else None
    model = nn.Sequential(Empty(0), Empty(0))
    try:
        dedicate(model, mesh)
    except ValueError as error:
        return str(error)
    optimizer = dmuon.Muon(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
    assert all(w.isfinite().all() for w in full_weights(model).values())
    return ""


@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("world", [(1, 1), (1, 2)], ids=["1x1", "1x2"])
def test_a_matrix_without_rows_trains_or_is_refused_by_name(world: tuple[int, int]) -> None:
    try:
        answers = run_world(world[0] * world[1], train_empty, world)
    except RankFailed as error:
        pytest.fail(str(error))
    assert len(set(answers)) == 1
    assert not answers[0] or "0.nothing" in answers[0]
