"""Wrappers change nothing; one process needs no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchtitan_dmuon as dmuon
from tests.runtime.communication import cache, each_communication_at_length, run_world
from tests.runtime.heads import as_lists, as_tensors, full_weights
from tests.runtime.plain import Decoder, Run, dedicate, open_world

CASES = (
    "plain",
    "wrapped before",
    "wrapped after",
    "compiled",
    "compiled aot",
    "wrapped and compiled",
    "compiled and wrapped",
    "whole model compiled",
)
EXACT = {f"layers.{i}.{m}.weight" for i in range(2) for m in ("up", "down")}


def prepare(case: str, mesh: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Decoder()
    backend = "aot_eager" if "aot" in case else "eager"
    blocks = range(len(model.layers))
    if case in ("wrapped before", "wrapped and compiled"):
        for i in blocks:
            model.layers[i] = checkpoint_wrapper(model.layers[i])
    if case in ("compiled", "compiled aot", "wrapped and compiled", "compiled and wrapped"):
        for i in blocks:
            model.layers[i].compile(backend=backend, fullgraph=True)
    if case == "compiled and wrapped":
        for i in blocks:
            model.layers[i] = checkpoint_wrapper(model.layers[i])
    owned = dedicate(model, mesh, predicate=lambda name, _: name in EXACT)
    if case == "wrapped after":
        for i in blocks:
            model.layers[i] = checkpoint_wrapper(model.layers[i])
    if case == "whole model compiled":
        return torch.compile(model, backend=backend), owned
    return model, owned


def train(case: str, shape: tuple[int, int]) -> tuple[Any, ...]:
    mesh = open_world(shape)
    rank = dist.get_rank()
    model, owned = prepare(case, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(3):
        optimizer.zero_grad()
        out = model(Run(model, rank, True, step).tokens())
        (out * out.roll(1, -1)).mean().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
    names = [n for group in optimizer.param_groups for n in group["param_names"]]
    return (
        optimizer.routing().as_dicts(),
        owned.assignment.digest(),
        names,
        as_lists(full_weights(model)),
    )


@cache
def plain() -> list[Any]:
    return run_world(2, train, "plain", (1, 2), timeout_seconds=50)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("case", CASES[1:])
def test_wrappers_change_nothing(case: str) -> None:
    results = run_world(2, train, case, (1, 2), timeout_seconds=55)
    for (routes, owners, names, weights), expected in zip(results, plain(), strict=True):
        assert routes == expected[0] and owners == expected[1] and names == expected[2]
        assert {r["name"] for r in routes if r["route"] == "matrix"} == EXACT
        assert weights.keys() == expected[3].keys()
        reference = as_tensors(expected[3])
        for name, weight in as_tensors(weights).items():
            torch.testing.assert_close(weight, reference[name], rtol=1e-6, atol=1e-6, msg=name)


def alone(start_gloo: bool) -> tuple[dict[str, list[Any]], int]:
    mesh = open_world((1, 1)) if start_gloo else None
    torch.manual_seed(0)
    model = Decoder()
    if mesh is not None:
        dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(5):
        optimizer.zero_grad()
        out = model(Run(model, 0, True, step).tokens())
        (out * out.roll(1, -1)).mean().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
    dmuon.check_replicas(model)
    calls = sum(optimizer.runtime.traffic.calls.values())
    return as_lists(full_weights(model)), calls


@pytest.mark.timeout(60, func_only=True)
def test_one_process_works_with_and_without_a_process_group() -> None:
    (without, none), (within, no) = (run_world(1, alone, start)[0] for start in (False, True))
    assert none == no == 0, "one rank has nobody to talk to"
    assert without == within
