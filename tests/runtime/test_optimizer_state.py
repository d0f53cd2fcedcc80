"""The optimizer's own state_dict: exact, and refused where it does not fit."""

from __future__ import annotations

import io

import pytest
import torch

import torchtitan_dmuon as dmuon
from tests.runtime.communication import each_communication_at_length, run_world
from tests.runtime.heads import as_lists, full_weights
from tests.runtime.plain import Run, Stack, dedicate, open_world
from tests.worlds import RankFailed


def train(model: torch.nn.Module, optimizer: dmuon.Muon, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(Run(model, rank, True, step).x()).float().pow(2).mean().backward()
        optimizer.step()


def build(mesh: object) -> tuple[torch.nn.Module, dmuon.Muon]:
    torch.manual_seed(0)
    model = Stack()
    dedicate(model, mesh, param_dtype=torch.bfloat16)  # type: ignore[arg-type]
    return model, dmuon.Muon(model, lr=0.02)


def resume(shape: tuple[int, int]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    mesh = open_world(shape)
    rank = torch.distributed.get_rank()
    model, optimizer = build(mesh)
    train(model, optimizer, rank, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other, fresh = build(mesh)
    train(other, fresh, rank, range(2))
    for state in fresh.state.values():
        for value in state.values():
            value.zero_()
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=False))
    train(model, optimizer, rank, range(2, 4))
    train(other, fresh, rank, range(2, 4))
    dtypes = {v.dtype for p in fresh.state.values() for v in p.values()}
    assert dtypes == {torch.float32}, dtypes
    return as_lists(full_weights(model)), as_lists(full_weights(other))


@each_communication_at_length
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["fsdp", "ddp"])
def test_state_survives_a_round_trip_bit_for_bit(shape: tuple[int, int]) -> None:
    """torch casts loaded state to the parameters' dtype, here bfloat16; owners keep float32."""
    for unbroken, resumed in run_world(2, resume, shape, timeout_seconds=50):
        assert unbroken == resumed


def load_another_ranks() -> None:
    _, optimizer = build(open_world((1, 2)))
    states: list[object] = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[1 - torch.distributed.get_rank()])  # type: ignore[arg-type]


def test_the_state_of_another_rank_is_refused_by_name() -> None:
    with pytest.raises(RankFailed, match=r"ValueError: layers.*it belongs to another rank or layo"):
        run_world(2, load_another_ranks, timeout_seconds=50)
