"""What travels, how often and how much: paper sections 3.2 and 4.4, counted twice.

The product's own counts are compared with the formulas, and with a second count made by wrapping
torch.distributed's collectives underneath. The operators count what they carry by the segment, so
there the second count is that the collectives carry nothing of it. All sizes are multiples of 8
elements: no padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_dmuon as dmuon
from tests.runtime.communication import (
    cache,
    chosen,
    each_communication_at_length,
    run_world,
    warm_up,
)
from tests.runtime.harness import (
    Case,
    close,
    dedicate,
    make_mesh,
    micro_batches,
    open_world,
    rank_of_world,
)
from tests.runtime.models import FIXTURES
from tests.runtime.test_invariants import NUMEL, Blocks

STEPS = 2
LAYERS = len(Blocks().layers)
BYTES = 4 * NUMEL
MESHES = [(1, 2), (1, 4), (2, 2), (4, 1), (2, 4)]
SCALARS = {"gather_scalars", "broadcast_scalars"}
# (name, arguments of dedicate_params, of Muon, micro-batches, whether all but the last defer)
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "zero3": ({}, {}, 1, False),
    "zero2": ({"reshard_after_forward": False}, {}, 1, False),
    "zero3_accumulate": ({}, {}, 3, False),
    "zero3_defer": ({}, {}, 3, True),
    "zero2_defer": ({"reshard_after_forward": False}, {}, 3, True),
    "ns3": ({}, {"ns_steps": 3}, 1, False),
    "ns7": ({}, {"ns_steps": 7}, 1, False),
    "bf16": ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, {}, 1, False),
}


@dataclass
class Log:
    """One rank's calls.

    Attributes:
        calls: (phase, collective, bytes of its tensor, ranks, whether this rank is the root).
        records: The product's (phase, operation, label, moved bytes).
        orthogonalized: Matrices done here.
    """

    calls: list[tuple[str, str, int, int, bool]] = field(default_factory=list)
    records: list[tuple[str, str, str, int]] = field(default_factory=list)
    orthogonalized: int = 0

    def moved(self, operation: str, phase: str | None = None) -> int:
        return sum(r[3] for r in self.records if r[1] == operation and phase in (None, r[0]))


@contextmanager
def _wrapped(log: list[tuple[str, str, int, int, bool]], phase: list[str]) -> Iterator[None]:
    """Count every collective that goes through torch.distributed."""
    saved: dict[str, Callable[..., Any]] = {}

    def wrap(name: str, tensor_at: int) -> None:
        saved[name] = original = getattr(dist, name)
        group_at = 3 if name == "gather" else 2

        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[group_at] if len(args) > group_at else None)
            tensor = args[tensor_at]
            members = dist.get_process_group_ranks(group)
            rooted = name in ("broadcast", "reduce") and args[1] == dist.get_rank()
            size = tensor.numel() * tensor.element_size()
            # Of what owners exchange, scalars alone are float64: they go to one rank and back.
            scalars = "_scalars" if tensor.dtype == torch.float64 else ""
            log.append((phase[0], name + scalars, size, len(members), rooted))
            return original(*args, **kwargs)

        setattr(dist, name, counted)

    for name in (
        "broadcast",
        "reduce",
        "gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
        wrap(name, 0)
    for name in ("all_reduce", "all_gather"):
        wrap(name, 1 if name == "all_gather" else 0)
    try:
        yield
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)


def _train(mesh: tuple[int, int], setting: str) -> Log:
    options, muon, accumulate, defer = SETTINGS[setting]
    model = Blocks()
    owned = dedicate(model, make_mesh(mesh), **options)
    optimizer = dmuon.Muon(model, **{"ns_dtype": torch.float32, **muon})
    runtime, log, phase = owned.runtime, Log(), [""]

    def micro_batch(micro: int) -> None:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(micro))
        model(x).square().sum().backward()

    warm_up(lambda: micro_batch(0), optimizer.step)
    # What happens before the first step (copies of the first weights) is not a step's traffic.
    runtime.publish_all()
    runtime.wait_for_publish()
    runtime.traffic.keep = True

    def enter(name: str) -> None:
        seen = runtime.traffic.records
        log.records += [(phase[0], r.operation, r.label, r.moved_bytes) for r in seen]
        seen.clear()
        phase[0] = name

    with _wrapped(log.calls, phase):
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(accumulate):
                enter(f"{step} backward")
                deferred = defer and micro < accumulate - 1
                with dmuon.no_sync(model) if deferred else nullcontext():
                    micro_batch(micro)
            runtime.settle()
            enter(f"{step} clip")
            dmuon.clip_grad_norm_(model, 1.0)
            enter(f"{step} step")
            optimizer.step()
            dmuon.wait_for_publish(model)
            enter("")
            log.orthogonalized += optimizer.last_step.orthogonalized
    close(owned)
    return log


def _run(mesh: tuple[int, int], settings: tuple[str, ...]) -> list[Log]:
    if mesh != (1, 1):
        open_world()
    return [_train(mesh, setting) for setting in settings]


@cache
def _logs(mesh: tuple[int, int]) -> dict[str, list[Log]]:
    # Eight ranks are slow here: the two settings whose volumes differ.
    settings = tuple(SETTINGS) if mesh != (2, 4) else ("zero3", "zero2_defer")
    ranks = run_world(mesh[0] * mesh[1], _run, mesh, settings, timeout_seconds=120)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(settings)}


BOTH = [(m, s) for m in MESHES for s in SETTINGS if m != (2, 4) or s in ("zero3", "zero2_defer")]
_each_setting = pytest.mark.parametrize(
    ("mesh", "setting"), BOTH, ids=[f"{m[0]}x{m[1]}-{s}" for m, s in BOTH]
)


def each_run(test: Callable[..., None]) -> Callable[..., None]:
    return each_communication_at_length(_each_setting(test))


def _times(setting: str) -> tuple[int, int]:
    """Return gathers and reductions of a layer in one step."""
    options, _, accumulate, defer = SETTINGS[setting]
    per_pass = 2 if options.get("reshard_after_forward", True) else 1
    return per_pass * accumulate, 1 if defer else accumulate


@each_run
def test_each_matrix_travels_as_often_as_the_method_says(
    mesh: tuple[int, int], setting: str
) -> None:
    """Gathered once (ZeRO-2) or twice (ZeRO-3) per pass, reduced once per pass that synchronises,
    published once per step on HSDP; on every rank, for every layer."""
    rows, columns = mesh
    gathers, reductions = _times(setting)
    for rank, log in enumerate(_logs(mesh)[setting]):
        counts = Counter((operation, label.split(":")[0]) for _, operation, label, _ in log.records)
        for i in range(LAYERS):
            name = f"layers.{i}"
            assert counts["gather", name] == (STEPS * gathers if columns > 1 else 0), name
            assert counts["reduce", name] == STEPS * reductions, name
        published = [r[2] for r in log.records if r[1] == "publish"]
        column = [p for p, n in Counter(published).items() if n == STEPS]
        assert sorted(column) == sorted(set(published)), f"rank {rank}: not once per step"
    columns_publish = [
        {r[2] for r in log.records if r[1] == "publish"} for log in _logs(mesh)[setting][:columns]
    ]
    labels = [label for labels in columns_publish for label in labels]
    assert sorted(labels) == ([f"layers.{i}:layers.{i}.weight" for i in range(LAYERS)] * (rows > 1))
    assert sum(log.orthogonalized for log in _logs(mesh)[setting]) == STEPS * LAYERS


@each_run
def test_volumes_are_those_of_the_paper(mesh: tuple[int, int], setting: str) -> None:
    """Sections 3.2 and 4.4, exactly, summed over ranks and per step.

    Gather: (K - 1) P in each of R rows. Reduction: (K - 1) P in each row, (R - 1) P across rows.
    Publish: (R - 1) P across rows.
    """
    rows, columns = mesh
    gathers, reductions = _times(setting)
    payload = BYTES // 2 if setting == "bf16" else BYTES
    logs = _logs(mesh)[setting]

    def total(operation: str) -> int:
        return sum(log.moved(operation) for log in logs) // STEPS

    assert total("gather") == gathers * rows * (columns - 1) * payload
    assert total("reduce") == reductions * (rows * (columns - 1) + rows - 1) * BYTES
    assert total("publish") == (rows - 1) * payload
    assert total("shard_gather") == total("shard_reduce") == 0
    if rows == 1 and setting in ("zero2", "zero3"):
        # "2 (N-1)/N P_M under ZeRO-2 and 3 (N-1)/N P_M under ZeRO-3", per rank and step.
        mean = (total("gather") + total("reduce")) / columns
        assert mean == (2 if setting == "zero2" else 3) * (columns - 1) / columns * BYTES


@each_run
def test_collectives_underneath_carry_the_same_bytes(mesh: tuple[int, int], setting: str) -> None:
    """The second count: what torch.distributed was asked for, rank by rank."""
    for log in _logs(mesh)[setting]:
        sent = Counter[str]()
        for _, name, size, _, root in log.calls:
            if not root:
                sent[name] += size
        if chosen() == "operators":
            assert set(sent) <= SCALARS
            continue
        assert sent["broadcast"] == log.moved("gather") + log.moved("publish")
        assert sent["reduce"] == log.moved("reduce")
        assert set(sent) <= {"broadcast", "reduce"} | SCALARS


@each_run
def test_the_step_moves_scalars_and_publishes_only(mesh: tuple[int, int], setting: str) -> None:
    """No gradient, momentum or weight but the new one travels at the update."""
    rows = mesh[0]
    for log in _logs(mesh)[setting]:
        for step in range(STEPS):
            clip = [call[1:3] for call in log.calls if call[0] == f"{step} clip"]
            # Norm, presence, finiteness, and whether the last update was finite, in float64.
            scalars = 8 * (1 + 3 * LAYERS)
            assert clip == [("gather_scalars", scalars), ("broadcast_scalars", scalars)]
            during = [call for call in log.calls if call[0] == f"{step} step"]
            names = {call[1] for call in during}
            assert names == ({"broadcast"} if during and rows > 1 else set())
            publishes = [r for r in log.records if r[0] == f"{step} step"]
            assert {r[1] for r in publishes} <= {"publish"}
            assert all(call[3] == rows for call in during), "a publish stays in its column"


@each_communication_at_length
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
def test_bytes_do_not_grow_with_newton_schulz(mesh: tuple[int, int]) -> None:
    """3 and 7 iterations move the same bytes; deferred micro-batches reduce once."""
    logs = _logs(mesh)
    for rank in range(mesh[0] * mesh[1]):
        assert sorted(logs["ns3"][rank].calls) == sorted(logs["ns7"][rank].calls)
        deferred = logs["zero3_defer"][rank].moved("reduce")
        assert deferred == logs["zero3"][rank].moved("reduce")


@each_communication_at_length
def test_nothing_is_reduced_before_the_last_micro_batch() -> None:
    """no_sync defers: with three micro-batches the first two move no gradient."""
    for log in _logs((1, 2))["zero3_defer"]:
        operations = [r[1] for r in log.records if r[0] == "0 backward"]
        first = operations.index("reduce")
        assert operations[:first].count("gather") >= 2 * 2 * LAYERS + LAYERS


def test_one_process_moves_nothing() -> None:
    for log in run_world(1, _run, (1, 1), ("zero3", "zero2_defer"))[0]:
        assert log.calls == [] and log.records == []
        assert log.orthogonalized == STEPS * LAYERS


# -- the baseline, and a model with sharded parameters --------------------------------------------


def _baseline(mesh: tuple[int, int]) -> Log:
    open_world()
    SETTINGS["baseline"] = ({"mode": "gather"}, {}, 1, False)
    return _train(mesh, "baseline")


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
def test_the_baseline_gathers_gradient_and_momentum_at_the_step(mesh: tuple[int, int]) -> None:
    """Control, and section D.2: what line C saves is what these counts show for line B."""
    rows, columns = mesh
    for log in run_world(rows * columns, _baseline, mesh):
        step = log.moved("shard_gather", "0 step")
        assert step == 2 * BYTES * (columns - 1) // columns
        assert log.moved("shard_gather", "0 backward") == step
        assert log.moved("publish") == 0
        assert log.orthogonalized == STEPS * LAYERS


def _with_rest(mesh: tuple[int, int]) -> list[tuple[str, str, int, int, bool]]:
    open_world()
    model, fixture = FIXTURES["decoder"].build(), FIXTURES["decoder"]
    owned = dedicate(model, make_mesh(mesh), fixture)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    case = Case("rest", "decoder", mesh)

    def micro_batch() -> None:
        micro_batches(model, case, 0, rank_of_world(), case.size)

    warm_up(micro_batch, optimizer.step)
    calls: list[tuple[str, str, int, int, bool]] = []
    for step in range(2):
        optimizer.zero_grad()
        micro_batches(model, case, step, rank_of_world(), case.size)
        owned.runtime.settle()
        with _wrapped(calls, ["step"]):
            dmuon.clip_grad_norm_(model, 1.0)
            optimizer.step()
            dmuon.wait_for_publish(model)
    return calls


@each_communication_at_length
def test_sharded_parameters_add_no_traffic_to_the_step() -> None:
    """With embedding and head on fully_shard: one exchange of scalars, and the publishes."""
    for calls in run_world(4, _with_rest, (2, 2)):
        counts = Counter(call[1] for call in calls)
        assert [counts[name] for name in sorted(SCALARS)] == [2, 2]
        assert set(counts) <= {"broadcast"} | SCALARS
