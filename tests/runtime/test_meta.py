"""Models on the meta device, initial values, and what a dedicated model refuses."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import torchtitan_dmuon as dmuon
from tests.runtime.heads import as_lists, full_weights
from tests.runtime.plain import Decoder, Run, Stack, dedicate, open_world
from tests.worlds import run_world


def initialise(module: nn.Module) -> None:
    """Draw every parameter of a module from a stream of its own name-independent order."""
    generator = torch.Generator().manual_seed(sum(1 for _ in module.parameters()) * 7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def from_meta(shape: tuple[int, int], mode: str, reshard: bool) -> dict[str, str]:
    """Return digests of the initial weights, and of those after two steps."""
    mesh = open_world(shape) if shape != (1, 1) else None
    with torch.device("meta"):
        model = Stack()
    owned = dedicate(model, mesh, mode=mode, reshard_after_forward=reshard)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in model.parameters())
    for layer in model.layers:
        with dmuon.full_params(layer, writeback=True):
            initialise(layer)
    result = {n: _digest(w) for n, w in full_weights(model).items()}
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    run = Run(model, 0, True)
    for k in range(2):
        optimizer.zero_grad()
        model(run.x(k)).pow(2).sum().backward()
        optimizer.step()
    assert owned.parameters == set(model.parameters())
    result.update({f"trained {n}": _digest(w) for n, w in full_weights(model).items()})
    return result


def _digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


@pytest.mark.timeout(120, func_only=True)
def test_initial_weights_depend_neither_on_world_nor_mode() -> None:
    alone = run_world(1, from_meta, (1, 1), "owner", True)[0]
    for shape, mode, reshard in (
        ((1, 2), "owner", True),
        ((2, 1), "owner", False),
        ((2, 2), "owner", True),
        ((1, 2), "gather", True),
    ):
        for found in run_world(shape[0] * shape[1], from_meta, shape, mode, reshard):
            first = {n for n in alone if not n.startswith("trained")}
            assert {n: found[n] for n in first} == {n: alone[n] for n in first}, (shape, mode)
            if mode == "owner":
                # The same data on all ranks and power-of-two worlds: even training is exact.
                assert found == alone, (shape, mode)


def different_seeds(shape: tuple[int, int]) -> list[Any]:
    mesh = open_world(shape)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = Stack()
    mine = {n: p.detach().clone() for n, p in model.named_parameters()}
    owned = dedicate(model, mesh, param_dtype=torch.bfloat16)
    with torch.no_grad():
        out = model(Run(model, 0, True).x())
    dmuon.check_replicas(model)
    weights = full_weights(model)
    for group in owned.runtime.groups:
        for s in group.owned:
            name = group.parameters[s.parameter].name
            part = slice(s.start, s.start + s.numel)
            expected = mine[name].view(-1)[part].bfloat16()
            assert torch.equal(weights[name].view(-1)[part].bfloat16(), expected), name
    return [out.float().tolist(), as_lists(weights)]


@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)])
def test_all_ranks_start_from_the_owners_values(shape: tuple[int, int]) -> None:
    first, *others = run_world(shape[0] * shape[1], different_seeds, shape, timeout_seconds=50)
    assert all(other == first for other in others)


def refusals() -> dict[str, str]:
    """Return the messages of everything that must be refused on two ranks."""
    mesh = open_world((1, 2))
    result: dict[str, str] = {}

    def refuse(name: str, action: Callable[[], Any], *errors: type[Exception]) -> None:
        try:
            action()
        except errors as error:
            result[name] = str(error)
        else:
            result[name] = ""

    torch.manual_seed(0)
    model = Decoder()
    owned = dedicate(model, mesh)
    dmuon.Muon(model)
    before = full_weights(model)
    refuse("cast", lambda: model.to(torch.bfloat16), TypeError)
    refuse("half", model.half, TypeError)
    # Of the whole model fully_shard says so itself.
    refuse("deepcopy layer", lambda: copy.deepcopy(model.layers[0]), NotImplementedError)
    refuse("deepcopy layers", lambda: copy.deepcopy(model.layers), NotImplementedError)
    refuse("state_dict", model.state_dict, RuntimeError)
    refuse("load", lambda: model.load_state_dict(before), RuntimeError)
    refuse("twice", lambda: dmuon.dedicate_params(model, mesh), ValueError)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "a refused cast left traces"
    model(Run(model, 0, True).tokens()).sum().backward()
    after = full_weights(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    with dmuon.full_params(model):
        inside = model.state_dict()
        for name in (e.name for g in owned.runtime.groups for e in g.parameters):
            assert torch.equal(inside[name], before[name]), name

    forgotten = Decoder()
    dedicate_only(forgotten, mesh)
    refuse("forgotten", lambda: dmuon.Muon(forgotten), ValueError)

    unaware = Decoder()
    dedicate_only(unaware, mesh)

    def use() -> None:
        fully_shard(unaware, mesh=mesh)
        dmuon.Muon(unaware)

    # Placeholders are not contiguous: fully_shard refuses them itself.
    refuse("unaware", use, NotImplementedError)
    refuse("no mesh", lambda: dmuon.dedicate_params(Stack()), ValueError)
    refuse("not dedicated", lambda: dmuon.Muon(Stack()), ValueError)
    with torch.device("meta"):
        bodiless = Stack()
    dedicate_only(bodiless, mesh)
    refuse("optimizer on meta", lambda: dmuon.Muon(bodiless), ValueError, RuntimeError)
    return result


def dedicate_only(model: nn.Module, mesh: Any) -> None:
    dmuon.dedicate_params(model, mesh, cost="model")


@pytest.mark.timeout(60, func_only=True)
def test_misuse_is_refused_with_what_to_do() -> None:
    for messages in run_world(2, refusals, timeout_seconds=50):
        for name, part in {
            "cast": "param_dtype",
            "half": "param_dtype",
            "deepcopy layer": "before dedicate_params",
            "deepcopy layers": "before dedicate_params",
            "state_dict": "full_params",
            "load": "writeback=True",
            "twice": "already",
            "forgotten": "fully_shard(model, mesh=mesh, ignored_params=owned.parameters)",
            "unaware": "FSDP does not support",
            "no mesh": "mesh",
            "not dedicated": "dedicate_params",
            "optimizer on meta": "to_empty",
        }.items():
            assert part in messages[name], f"{name}: {messages[name]!r}"


def unaware_on_replicas() -> str:
    """Where nothing is sharded, owned parameters are real tensors, and fully_shard takes them."""
    mesh = open_world((2, 1))
    model = Decoder()
    dedicate_only(model, mesh)
    fully_shard(model, mesh=mesh)
    try:
        dmuon.Muon(model)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60, func_only=True)
def test_owned_parameters_taken_by_fully_shard_are_refused_by_name() -> None:
    for message in run_world(2, unaware_on_replicas, timeout_seconds=50):
        assert "ignored_params=owned.parameters" in message and "layers.0" in message


def load_and_zero(shape: tuple[int, int]) -> None:
    mesh = open_world(shape)
    torch.manual_seed(0)
    model, source = Stack(), Stack()
    owned = dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.1)
    state = {n: p.detach().clone() for n, p in source.named_parameters()}
    with dmuon.full_params(model, writeback=True):
        model.load_state_dict(state)
    weights = full_weights(model)
    assert all(torch.equal(weights[n], state[n]) for n in state)
    # A loop that clears by the model, not by the optimizer, must not keep owners' gradients.
    model(Run(model, 0, True).x()).sum().backward()
    model.zero_grad()
    optimizer.step()
    assert optimizer.last_step.orthogonalized == 0 and not owned.runtime.groups[0].gradients
    weights = full_weights(model)
    assert all(torch.equal(weights[n], state[n]) for n in state)


@pytest.mark.timeout(60, func_only=True)
def test_loading_a_state_dict_and_clearing_gradients_by_the_model() -> None:
    run_world(4, load_and_zero, (2, 2), timeout_seconds=50)
