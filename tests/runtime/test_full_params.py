"""`full_params` under bfloat16 compute: float32 masters are what one sees and what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchtitan_dmuon as dmuon
from tests.runtime.communication import each_communication_at_length, run_world
from tests.runtime.plain import Run, Stack, dedicate, open_world


def look(shape: tuple[int, int], mode: str) -> list[float]:
    mesh = open_world(shape)
    rank = torch.distributed.get_rank()
    runs = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = Stack()
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        options: dict[str, Any] = {"param_dtype": torch.bfloat16, "mode": mode}
        dedicate(model, mesh, reduce_dtype=torch.float32, **options)
        optimizer = dmuon.Muon(model, lr=0.02)
        for step in range(3):
            if looks:
                with dmuon.full_params(model, writeback=step == 1):
                    seen = {n: p.detach().clone() for n, p in model.named_parameters()}
                    state = {n: v.clone() for n, v in model.state_dict().items()}
                assert all(v.dtype == torch.float32 for v in seen.values())
                assert all(torch.equal(state[n], seen[n]) for n in seen)
                if step == 0:
                    assert all(torch.equal(seen[n], start[n]) for n in start)
                assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            optimizer.zero_grad()
            loss = model(Run(model, rank, True, step).x()).float().pow(2).mean()
            loss.backward()
            optimizer.step()
        runs.append(float(loss))
    with dmuon.full_params(model), pytest.raises(RuntimeError, match="inside full_params"):
        model(torch.randn(2, 8))
    return runs


SHAPES = pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)], ids=["fsdp", "ddp", "hsdp"])


@each_communication_at_length
@SHAPES
def test_masters_are_seen_and_kept_exactly(shape: tuple[int, int]) -> None:
    """Looking, and writing back what was seen, changes no bit of the run."""
    for without, with_looks in run_world(shape[0] * shape[1], look, shape, "owner"):
        assert without == with_looks


@SHAPES
def test_the_baselines_masters_are_seen_and_kept_exactly(shape: tuple[int, int]) -> None:
    """As with owners."""
    for without, with_looks in run_world(shape[0] * shape[1], look, shape, "gather"):
        assert without == with_looks
