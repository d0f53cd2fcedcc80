"""Where weights, gradients and state are, and that their copies agree (invariants I1-I3, I6)."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.communication import cache, each_communication_at_length, run_world
from tests.runtime.harness import (
    close,
    dedicate,
    full_weights,
    local_state,
    make_mesh,
    open_world,
    pack,
    rank_of_world,
    unpack,
)
from tests.runtime.models import FIXTURES, Head
from torchtitan_dmuon.runtime.dedicate import Dedication

BF16, FP32 = torch.bfloat16, torch.float32
MESHES = [(1, 2), (2, 2), (4, 1), (1, 4)]


class Blocks(nn.Module):
    """Layers of matrices only, all sizes multiples of 8, and nothing outside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = ((32, 48), (48, 64), (64, 32), (32, 40), (40, 32))
        self.layers = nn.ModuleList(Head(shape[::-1]) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


NUMEL = sum(p.numel() for p in Blocks().parameters())


def _held_bytes(window: range = range(0)) -> int:
    """Return the bytes of all storages that Python tensors of this process refer to.

    Args:
        window: Addresses that are left out.
    """
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # By type: asking proxies for their class may import whole libraries.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.data_ptr() not in window:
                storages[storage.data_ptr() or id(thing)] = storage.nbytes()
    return sum(storages.values())


def _window(owned: Dedication) -> range:
    """Return the addresses of the symmetric pool."""
    operators = getattr(owned.runtime.communicator, "operators", None)
    if operators is None:
        return range(0)
    return range(operators.window.pointer, operators.window.pointer + operators.window.nbytes)


def _copies_in_pool(owned: Dedication) -> int:
    """Return the bytes of the copies that lie in the pool, the owners' among them."""
    copies = (t for group in owned.runtime.groups for t in group.copies.values())
    pool = owned.runtime.pool
    return sum(t.numel() * t.element_size() for t in copies if pool.contains(t))


def _train(model: nn.Module, optimizer: dmuon.Muon, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank_of_world())
        model(torch.randn(64, 32, generator=generator)).square().sum().backward()
        optimizer.step()


def _measure_memory(mesh: tuple[int, int], param_dtype: torch.dtype) -> bytes:
    open_world()
    device_mesh = make_mesh(mesh)
    before = _held_bytes()
    model = Blocks()
    owned = dedicate(model, device_mesh, param_dtype=param_dtype)
    optimizer = dmuon.Muon(model, ns_dtype=FP32)
    _train(model, optimizer, 3)
    dmuon.wait_for_publish(model)
    with_gradients = _held_bytes(_window(owned)) - before
    reported = owned.memory_bytes()
    optimizer.zero_grad()
    result = {
        "reported": reported,
        "copies": reported["copies"] + _copies_in_pool(owned),
        "with_gradients": with_gradients,
        "held": _held_bytes(_window(owned)) - before,
        "state": local_state(optimizer),
        "masters": {
            group.parameters[s.parameter].name: master.clone()
            for group in owned.runtime.groups
            for s, master in group.masters.items()
        },
    }
    return pack(result)


@cache
def _memory(mesh: tuple[int, int], param_dtype: torch.dtype) -> list[dict[str, Any]]:
    ranks = run_world(mesh[0] * mesh[1], _measure_memory, mesh, param_dtype)
    return [unpack(data) for data in ranks]


@each_communication_at_length
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_everything_of_a_matrix_is_on_its_one_owner(mesh: tuple[int, int]) -> None:
    """I1: FP32 master, momentum and reduced gradient, 4 bytes per element each, exist once."""
    ranks = _memory(mesh, BF16)
    names = [name for rank in ranks for name in rank["masters"]]
    assert sorted(names) == sorted(n for n, _ in Blocks().named_parameters()), "one owner each"
    for rank in ranks:
        elements = sum(master.numel() for master in rank["masters"].values())
        assert set(rank["state"]) == {f"{name}/momentum_buffer" for name in rank["masters"]}
        assert rank["reported"]["gradients"] == 4 * elements
        assert rank["reported"]["masters"] == 4 * elements
        assert all(m.dtype == FP32 for m in [*rank["masters"].values(), *rank["state"].values()])
    state = sum(t.numel() * t.element_size() for rank in ranks for t in rank["state"].values())
    assert state == 4 * NUMEL


@each_communication_at_length
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameter_memory_is_that_of_section_4_4(mesh: tuple[int, int]) -> None:
    """Per GPU on average 2M/K + 4M/(RK) bytes on HSDP with bf16 compute; 4M/K on one row."""
    rows, columns = mesh
    ranks = _memory(mesh, BF16)
    parameters = sum(r["reported"]["masters"] + r["copies"] for r in ranks)
    copies = 2 * NUMEL / columns if rows > 1 else 0
    assert parameters / len(ranks) == copies + 4 * NUMEL / (rows * columns)
    for rank in ranks:
        assert rank["reported"]["unsynced"] == 0
        # One column never gathers: its copies are what the layers compute with.
        assert rank["reported"]["gathered"] == 0


@each_communication_at_length
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tensors_hold_no_more_than_what_is_reported(mesh: tuple[int, int]) -> None:
    """All tensors in the process outside the pool: masters, copies, momentum, gradients, a few
    scalars."""
    for rank, found in enumerate(_memory(mesh, BF16)):
        state = sum(t.numel() * t.element_size() for t in found["state"].values())
        expected = found["reported"]["masters"] + found["reported"]["copies"] + state
        assert expected <= found["held"] <= expected + 512, f"rank {rank}"
        gradients = found["reported"]["gradients"]
        assert 0 <= found["with_gradients"] - expected - gradients <= 512, f"rank {rank}"


@each_communication_at_length
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=str)
def test_one_storage_where_master_and_copy_are_equal(mesh: tuple[int, int]) -> None:
    """With FP32 compute the owner's copy is its master: one copy per row in all, 4M/K."""
    ranks = _memory(mesh, FP32)
    parameters = sum(r["reported"]["masters"] + r["copies"] for r in ranks)
    assert parameters == 4 * NUMEL * mesh[0]
    held = sum(r["held"] for r in ranks)
    in_pool = sum(r["copies"] - r["reported"]["copies"] for r in ranks)
    assert held + in_pool - parameters - 4 * NUMEL <= 512 * len(ranks)


# -- copies and gathered values ------------------------------------------------------------------


def _look_at_weights(mesh: tuple[int, int]) -> bytes:
    """For both dtypes: what layers saw in forward, what full_params shows, masters and copies."""
    open_world()
    found = {}
    for dtype in (BF16, FP32):
        fixture = FIXTURES["fused"]
        model = fixture.build()
        owned = dedicate(model, make_mesh(mesh), fixture, param_dtype=dtype)
        optimizer = dmuon.Muon(model, ns_dtype=FP32)
        seen: dict[str, torch.Tensor] = {}

        def look(module: nn.Module, _: object, seen: dict[str, torch.Tensor] = seen) -> None:
            for group in module._dmuon_site.groups:  # type: ignore[union-attr]
                for entry in group.parameters:
                    seen[entry.name] = entry.parameter.detach().clone()

        for step in range(3):
            optimizer.zero_grad()
            fixture.loss(model, step, rank_of_world(), mesh[0] * mesh[1], 1).backward()
            optimizer.step()
        for layer in model.layers:  # type: ignore[union-attr]
            layer.register_forward_pre_hook(look)
        # At once after the step: the forward must wait for what is still being published.
        fixture.loss(model, 3, rank_of_world(), mesh[0] * mesh[1], 1).backward()
        dmuon.wait_for_publish(model)
        groups = owned.runtime.groups
        found[dtype] = {
            "seen": seen,
            "full": {n: v for n, v in full_weights(model).items() if n in seen},
            "masters": _by_place(groups, "masters"),
            "copies": _by_place(groups, "copies"),
        }
        dmuon.check_replicas(model)
        close(owned)
    return pack(found)


def _by_place(groups: list[Any], attribute: str) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (group.parameters[s.parameter].name, s.start): value.clone()
        for group in groups
        for s, value in getattr(group, attribute).items()
    }


@cache
def _weights(mesh: tuple[int, int]) -> list[dict[torch.dtype, Any]]:
    return [unpack(data) for data in run_world(mesh[0] * mesh[1], _look_at_weights, mesh)]


@each_communication_at_length
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_gathered_weights_are_the_owners(mesh: tuple[int, int], dtype: torch.dtype) -> None:
    """I3: bit for bit, on every rank: in a forward right after the step in the compute dtype, in
    full_params in the masters' own."""
    ranks = [rank[dtype] for rank in _weights(mesh)]
    masters = [rank["masters"] for rank in ranks]
    places = [place for owned in masters for place in owned]
    assert len(places) == len(set(places)), "a segment has two owners"
    covered: dict[str, int] = {}
    for owned in masters:
        for (name, start), master in owned.items():
            covered[name] = covered.get(name, 0) + master.numel()
            for number, rank in enumerate(ranks):
                for view, kind in (("seen", dtype), ("full", FP32)):
                    value = rank[view][name]
                    assert value.dtype == kind
                    part = value.reshape(-1)[start : start + master.numel()]
                    assert torch.equal(part, master.to(kind)), f"{name}, rank {number}, {view}"
    assert covered == {name: value.numel() for name, value in ranks[0]["seen"].items()}


@each_communication_at_length
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=str)
def test_leaders_copies_are_identical(mesh: tuple[int, int], dtype: torch.dtype) -> None:
    """I2: after the publish every rank of the owner's column holds the owner's bits."""
    rows, columns = mesh
    ranks = [rank[dtype] for rank in _weights(mesh)]
    masters = {place: m for rank in ranks for place, m in rank["masters"].items()}
    for column in range(columns):
        leaders = [ranks[row * columns + column]["copies"] for row in range(rows)]
        assert leaders[0], f"column {column} leads nothing"
        for copies in leaders:
            assert copies.keys() == leaders[0].keys()
            for place, value in copies.items():
                assert torch.equal(value, masters[place].to(dtype)), place
    held = sum(len(rank["copies"]) for rank in ranks)
    assert held == rows * len(masters), "each row holds each matrix once"


# -- agreement -----------------------------------------------------------------------------------


def _digests(mesh: tuple[int, int], cost: str) -> tuple[str, list[str]]:
    open_world()
    fixture = FIXTURES["decoder"]
    owned = dedicate(fixture.build(), make_mesh(mesh), fixture, cost=cost)
    return owned.assignment.digest(), [g.layout.digest() for g in owned.runtime.groups]


@pytest.mark.parametrize("cost", ["model", "measured"])
def test_all_ranks_compute_the_same_tables(cost: str) -> None:
    """I6, also where the costs that decide are measured on each rank."""
    found = run_world(4, _digests, (2, 2), cost)
    assert all(rank == found[0] for rank in found)


def _disagree(what: str) -> str:
    open_world(20)
    mesh, odd = make_mesh((1, 2)), rank_of_world() == 1
    fixture = FIXTURES["decoder"]
    try:
        if what == "owners":
            dedicate(fixture.build(), mesh, small_matrix_numel=10**6 if odd else 10)
        elif what == "reduce_dtype":
            dedicate(fixture.build(), mesh, reduce_dtype=torch.bfloat16 if odd else torch.float32)
        elif what == "reshard_after_forward":
            dedicate(fixture.build(), mesh, reshard_after_forward=odd)
        elif what == "requires_grad":
            model = fixture.build()
            model.layers[0].requires_grad_(odd)  # type: ignore[union-attr, index]
            dedicate(model, mesh)
        else:
            # The same units and owners, another order of the parameters in memory.
            model = fixture.build()
            if odd:
                block = model.layers[0].ffn  # type: ignore[union-attr, index]
                block.w1, block.w3 = (block.w3, block.w1)
                block._modules = dict(reversed(block._modules.items()))
            dedicate(model, mesh)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "what", ["owners", "offsets", "reduce_dtype", "reshard_after_forward", "requires_grad"]
)
def test_a_mismatch_stops_all_ranks_and_names_both_values(what: str) -> None:
    messages = run_world(2, _disagree, what)
    assert messages[0] == messages[1]
    digests = re.findall(r"\b[0-9a-f]{15}\b", messages[0])
    assert len(digests) == 2 and digests[0] != digests[1], messages[0]
    assert "rank 0" in messages[0] and "rank 1" in messages[0]


def _drift(mesh: tuple[int, int]) -> str:
    open_world(20)
    model = Blocks()
    owned = dedicate(model, make_mesh(mesh), param_dtype=BF16)
    dmuon.Muon(model, ns_dtype=FP32)
    model(torch.ones(4, 32)).sum().backward()
    dmuon.check_replicas(model)
    if rank_of_world() == 1:
        group = next(g for g in owned.runtime.groups if g.copies)
        copy = next(iter(group.copies.values()))
        copy.view(torch.int16)[3] ^= 1
    try:
        dmuon.check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_single_flipped_bit_is_found_and_named() -> None:
    """I2 can be checked in a run: control of the check itself."""
    assert all("layers.0.weight" in message for message in run_world(2, _drift, (2, 1)))
