"""Whatever a model does with autograd, owners get the gradients that plain autograd gives.

Every case is a model and a script of forwards and backwards, run on owners with two and four ranks,
ZeRO-2 and ZeRO-3, twice in a row, and compared with the same script on one plain process.
"""

from __future__ import annotations

import pytest
import torch

import torchtitan_dmuon as dmuon
from tests.runtime.autograd_cases import CASES
from tests.runtime.plain import (
    Run,
    check_at_rest,
    compare_gradients,
    dedicate,
    open_world,
    plain_gradients,
)
from tests.worlds import run_world


def check_case(name: str, shape: tuple[int, int]) -> None:
    mesh = open_world(shape, 8)
    chosen = CASES[name]
    size, rank = mesh.size(), torch.distributed.get_rank()
    for reshard in (True, False):
        torch.manual_seed(0)
        model = chosen.build()
        dedicate(model, mesh, reshard_after_forward=reshard, **chosen.options)
        optimizer = dmuon.Muon(model)
        for round in range(2):
            where = f"{name}, {'ZeRO-3' if reshard else 'ZeRO-2'}, round {round}, rank {rank}"
            plain = plain_gradients(chosen.build, chosen.script, size, round)
            chosen.script(Run(model, rank, True, round))
            compare_gradients(model, plain, where)
            check_at_rest(model, where)
            optimizer.zero_grad()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("name", CASES.keys())
def test_gradients_are_those_of_plain_autograd(name: str, shape: tuple[int, int]) -> None:
    run_world(shape[0] * shape[1], check_case, name, shape, timeout_seconds=15)
