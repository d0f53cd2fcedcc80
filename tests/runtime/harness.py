"""Runs training cases with owners, several in one world, and brings back what they did."""

from __future__ import annotations

from contextlib import nullcontext
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
from tests.runtime.communication import argument, cache, run_world
from tests.runtime.models import FIXTURES, Fixture
from tests.runtime.reference import Trace
from tests.worlds import pack, unpack
from torchtitan_dmuon.runtime.dedicate import Dedication
from torchtitan_dmuon.runtime.site import canonical_name

# Small enough that most matrices of the fixtures have an owner of their own.
SMALL = 1000


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: Unique within its world.
        fixture: Key of FIXTURES.
        mesh: (replicate, shard); (1, 1) is one process without process group.
        accumulate: Micro-batches per step.
        defer: Whether all but the last run under no_sync.
        clip: Largest norm.
        recompute: See `models.Decoder`.
        dedicate: More arguments of dedicate_params.
        muon: More arguments of Muon.
    """

    name: str
    fixture: str
    mesh: tuple[int, int]
    steps: int = 3
    accumulate: int = 1
    defer: bool = False
    clip: float | None = None
    recompute: str | None = None
    dedicate: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.mesh[0] * self.mesh[1]


@dataclass
class Outcome(Trace):
    """A trace with what only the product has, of one rank. Weights are those of rank 0 only.

    Attributes:
        orthogonalized: Counter of each step.
        state: Optimizer state at the end, by name and key; sharded state as its local part.
        num_matrices: What the routing report says one step orthogonalises.
    """

    orthogonalized: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    num_matrices: int = 0


def open_world(seconds: float = 50) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def make_mesh(shape: tuple[int, int]) -> DeviceMesh | None:
    if shape == (1, 1):
        return None
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def dedicate(
    model: nn.Module, mesh: DeviceMesh | None, fixture: Fixture | None = None, **options: Any
) -> Dedication:
    """Give owners with a reproducible cost, and shard what is left."""
    arguments: dict[str, Any] = {"cost": "model", "small_matrix_numel": SMALL}
    arguments |= {**argument(options.get("mode", "owner")), **options}
    if fixture is not None and fixture.specs:
        arguments.setdefault("matrix_specs", fixture.specs)
    owned = dmuon.dedicate_params(model, mesh, **arguments)
    if mesh is not None and any(True for _ in owned.runtime.other_parameters()):
        fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    return owned


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights in full, by canonical name. Collective."""
    with dmuon.full_params(model), torch.no_grad():
        return {
            canonical_name(name): (p.full_tensor() if isinstance(p, DTensor) else p)
            .detach()
            .clone()
            for name, p in model.named_parameters()
        }


def local_state(optimizer: dmuon.Muon) -> dict[str, torch.Tensor]:
    """Return this rank's optimizer state by `name/key`."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key, value in optimizer.state[parameter].items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}/{key}"] = local.detach().clone()
    return found


def rank_of_world() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def micro_batches(model: nn.Module, case: Case, step: int, rank: int, size: int) -> torch.Tensor:
    """Run forward and backward of one step's micro-batches; return the sum of the losses."""
    fixture, total = FIXTURES[case.fixture], torch.zeros(())
    for micro in range(case.accumulate):
        last = micro == case.accumulate - 1
        with dmuon.no_sync(model) if case.defer and not last else nullcontext():
            part, parts = rank * case.accumulate + micro, size * case.accumulate
            loss = fixture.loss(model, step, part, parts, case.accumulate)
            loss.backward()
        total += loss.detach()
    return total


def run_case(case: Case) -> Outcome:
    """Train one case; called by every rank of its mesh."""
    fixture, rank = FIXTURES[case.fixture], rank_of_world()
    model = fixture.build()
    if case.recompute is not None:
        model.recompute = case.recompute  # type: ignore[assignment]
    owned = dedicate(model, make_mesh(case.mesh), fixture, **case.dedicate)
    options = {"lr": 0.02, "ns_dtype": torch.float32, **case.muon}
    optimizer = dmuon.Muon(model, **options)
    result = Outcome(num_matrices=optimizer.routing().num_matrices)

    def keep() -> None:
        weights = full_weights(model)
        result.weights.append(weights if rank == 0 else {})

    keep()
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = micro_batches(model, case, step, rank, case.size)
        if case.clip is not None:
            result.norms.append(float(dmuon.clip_grad_norm_(model, case.clip)))
        optimizer.step()
        if case.size > 1:
            dist.all_reduce(loss)
        result.losses.append(float(loss) / case.size)
        result.orthogonalized.append(optimizer.last_step.orthogonalized)
        if case.steps <= 5 or step == case.steps - 1:
            keep()
    result.state = local_state(optimizer)
    close(owned)
    return result


def close(owned: Dedication) -> None:
    """End the streams of a model that is done, so that a world of many models stays small."""
    if owned.runtime.communicator is not None:
        owned.runtime.communicator.close()


def _run_cases(cases: tuple[Case, ...]) -> bytes:
    if cases[0].size > 1:
        open_world()
    return pack([run_case(case) for case in cases])


@cache
def _outcomes(key: tuple[str, ...]) -> dict[str, list[Outcome]]:
    cases = tuple(_KNOWN[name] for name in key)
    ranks = run_world(cases[0].size, _run_cases, cases, timeout_seconds=180)
    found = [unpack(data) for data in ranks]
    return {case.name: [rank[i] for rank in found] for i, case in enumerate(cases)}


_KNOWN: dict[str, Case] = {}


def outcomes(case: Case, cases: list[Case]) -> list[Outcome]:
    """Return what each rank did in `case`; all of `cases` with its size run in one world, once."""
    together = [c for c in cases if c.size == case.size]
    for c in together:
        assert _KNOWN.setdefault(c.name, c) is c, f"two cases are called {c.name}"
    return _outcomes(tuple(c.name for c in together))[case.name]
