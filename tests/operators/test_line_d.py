"""Line D's pool, signatures and publish under training: what only they promise."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.harness import dedicate, full_weights, make_mesh, open_world
from tests.runtime.models import FIXTURES
from tests.worlds import pack, run_world, unpack
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.runtime import open_pool
from torchtitan_dmuon.runtime.copies import Copies
from torchtitan_dmuon.runtime.pool import Ranges, Record, Space

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.slow]

STEPS = 6
OPENED = 2
"""Steps before the pool is open, with one micro-batch per step."""


class Job:
    """A model that trains on line D, and what the tests look at."""

    def __init__(self, mesh: tuple[int, int], fixture: str = "deep", **options: Any) -> None:
        self.fixture = FIXTURES[fixture]
        self.model = self.fixture.build()
        self.recompute = options.pop("recompute", None)
        if self.recompute:
            self.model.recompute = self.recompute  # type: ignore[assignment]
        options = {"communication": "operators", "reshard_after_forward": True, **options}
        self.owned = dedicate(self.model, make_mesh(mesh), self.fixture, **options)
        self.runtime = self.owned.runtime
        self.optimizer = dmuon.Muon(self.model, lr=0.02, ns_dtype=torch.float32)
        self.rank, self.size = dist.get_rank(), mesh[0] * mesh[1]

    def backward(self, step: int, micro: int = 0, of: int = 1) -> None:
        part = self.rank * of + micro
        self.fixture.loss(self.model, step, part, self.size * of, of).backward()

    def step(self, step: int, micro_batches: int = 1, defer: bool = False) -> None:
        self.optimizer.zero_grad()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with dmuon.no_sync(self.model) if defer and not last else nullcontext():
                self.backward(step, micro, micro_batches)
        self.optimizer.step()

    def facts(self) -> dict[str, Any]:
        counters = self.runtime.hit_counters()
        ranges = self.runtime.pool.ranges
        communicator = self.runtime.communicator
        operated = communicator.operated if isinstance(communicator, OperatorsCommunicator) else {}
        return {
            "operated": dict(operated),
            "hits": counters and (counters.hits, counters.misses, counters.learned),
            "bytes": ranges and {space.value: n for space, n in ranges.space_bytes.items()},
            "places": ranges and len(ranges.offsets),
            "parts": dict(self.runtime.pool.parts),
            "gradient_bytes": ranges
            and [n for place, n in ranges.nbytes.items() if place[0] is Space.GRADIENTS],
            "memory": self.runtime.memory_bytes()["pool"],
        }

    def end(self) -> dict[str, torch.Tensor]:
        weights = full_weights(self.model)
        assert self.runtime.communicator is not None
        self.runtime.communicator.close()
        return weights


def plain(mesh: tuple[int, int], **options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    job = Job(mesh, **options)
    for step in range(STEPS):
        job.step(step)
    return job.facts(), job.end()


def accumulating(mesh: tuple[int, int], defer: bool) -> Any:
    job = Job(mesh)
    for step in range(STEPS):
        job.step(step, 3, defer)
    return job.facts(), job.end()


def interrupted(mesh: tuple[int, int]) -> Any:
    """Evaluation, full parameters, a failing backward and new weights between steps."""
    job = Job(mesh)
    for step in range(STEPS):
        job.step(step)
        job.model.eval()
        with torch.no_grad():
            job.fixture.loss(job.model, step, job.rank, job.size, 1)
        job.model.train()
        if step == 3:
            loss = job.fixture.loss(job.model, step, job.rank, job.size, 1)

            def fail(_: torch.Tensor) -> None:
                raise ArithmeticError

            loss.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
        if step == 4:
            with dmuon.full_params(job.model, writeback=True), torch.no_grad():
                for parameter in job.owned.parameters:
                    parameter.mul_(0.5)
    return job.facts(), job.end()


def resumed(mesh: tuple[int, int]) -> Any:
    """Saved with an open pool, loaded into another job, and into itself."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    job = Job(mesh)
    for step in range(STEPS - 2):
        job.step(step)
    dmuon.save_checkpoint(folders[0], 1, job.model, job.optimizer)
    job.step(STEPS)  # what is loaded replaces this step
    dmuon.load_checkpoint(folders[0], job.model, job.optimizer)
    other = Job(mesh)
    dmuon.load_checkpoint(folders[0], other.model, other.optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    for step in range(STEPS - 2, STEPS):
        job.step(step)
        other.step(step)
    return {"other": other.end(), **job.facts()}, job.end()


def reordered(mesh: tuple[int, int], communication: str) -> Any:
    """After the pool was planned, two forwards have one backward: more is in use at a time."""
    job = Job(mesh, communication=communication)
    for step in range(STEPS):
        if step < STEPS - 2:
            job.step(step)
            continue
        job.optimizer.zero_grad()
        losses = [
            job.fixture.loss(job.model, step, job.rank * 2 + half, job.size * 2, 2)
            for half in range(2)
        ]
        torch.stack(losses).sum().backward()
        job.optimizer.step()
    return job.facts(), job.end()


def uneven(mesh: tuple[int, int], communication: str, odd: bool) -> Any:
    """In odd or in even steps rank 0 leaves the backward out; the second is recorded."""
    job = Job(mesh, communication=communication)
    for step in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.fixture.loss(job.model, step, job.rank, job.size, 1)
        if job.rank != 0 or step % 2 != odd:
            loss.backward()
        job.optimizer.step()
    return job.facts(), job.end()


def differing(mesh: tuple[int, int], times: int) -> Any:
    """For some times rank 0 has recorded something else than the others."""
    lay_out, calls = open_pool.lay_out, 0

    def other(record: Record, nbytes: Any) -> Ranges:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 0 and calls <= times:
            record = Record(record.events[::-1])
        return lay_out(record, nbytes)

    with patch.object(open_pool, "lay_out", other), patch.object(open_pool, "_ATTEMPTS", 3):
        return plain(mesh)


def skipping(mesh: tuple[int, int], communication: str) -> Any:
    """Layers that hand their input through, others on every rank and in every step."""
    job = Job(mesh, communication=communication)
    step = 0

    def skip(layer: nn.Module, index: int) -> None:
        forward = layer.forward

        def skipping(x: torch.Tensor) -> torch.Tensor:
            left_out = step > OPENED and (step + job.rank + index) % 3 == 0
            return x if left_out else forward(x)  # type: ignore[no-any-return]

        layer.forward = skipping  # type: ignore[method-assign]

    for index, layer in enumerate(job.model.layers):
        skip(layer, index)
    for step in range(STEPS):
        job.step(step)
    return job.facts(), job.end()


def replaced(mesh: tuple[int, int], communication: str) -> Any:
    """Hooks keep a gradient, and give another one in its stead."""
    job = Job(mesh, communication=communication)
    kept: list[torch.Tensor | None] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        kept.append(gradient)
        return gradient * 0.5

    def exchange(parameter: torch.Tensor) -> None:
        kept.append(parameter.grad)
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    for step in range(STEPS):
        if step == OPENED + 1:
            parameters = dict(job.model.named_parameters())
            parameters["layers.1.attention.wqkv.weight"].register_hook(halve)
            # Not the layer's last one, whose gradient is taken before later hooks see it.
            parameters["layers.3.ffn.w2.weight"].register_post_accumulate_grad_hook(exchange)
        job.step(step)
    return job.facts(), job.end()


class Small(nn.Module):
    """Fewer matrices than columns, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(24, 24, bias=False)])
        self.layers[0].empty = nn.Parameter(torch.empty(0))


def small(mesh: tuple[int, int], communication: str) -> Any:
    """New weights from outside are published on every rank, those that own nothing too."""
    device_mesh = make_mesh(mesh)
    model = Small()
    options = {"communication": communication, "cost": "model"}
    owned = dmuon.dedicate_params(model, device_mesh, **options)  # type: ignore[arg-type]
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        model.layers[0](x).square().mean().backward()
        optimizer.step()
        if step == OPENED + 1:
            with dmuon.full_params(model, writeback=True), torch.no_grad():
                model.layers[0].weight.mul_(0.5)
    weights = full_weights(model)
    assert owned.runtime.communicator is not None
    owned.runtime.communicator.close()
    return {}, weights


class Ten(nn.Module):
    """Enough layers that places are shared, and nothing outside them that would make ranks wait."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))
        self.order = list(range(10))
        self.pause = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + torch.tanh(self.layers[index](x))
            if index == 0:
                x.register_hook(lambda _: time.sleep(self.pause))
        return x


def of_ten(mesh: tuple[int, int], communication: str, reverse: bool) -> Any:
    """Layers in another order than the recorded one; or a backward that is not summed behind one
    whose sums are on their way, since half of the ranks are late."""
    model = Ten()
    options = {"communication": communication, "cost": "model"}
    owned = dmuon.dedicate_params(model, make_mesh(mesh), **options)  # type: ignore[arg-type]
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)

    def backward(step: int, micro: int) -> None:
        seed = 100 * step + 10 * micro + dist.get_rank()
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).sum().backward()

    for step in range(STEPS):
        optimizer.zero_grad()
        late = step > OPENED and not reverse and dist.get_rank() >= 2
        if step > OPENED and reverse:
            model.order = model.order[::-1]
        model.pause = 0.3 if late else 0.0
        backward(step, 0)
        model.pause = 0.0
        with dmuon.no_sync(model):
            backward(step, 1)
        backward(step, 2)
        optimizer.step()
    weights = full_weights(model)
    assert owned.runtime.communicator is not None
    owned.runtime.communicator.close()
    return {}, weights


def failing(mesh: tuple[int, int]) -> Any:
    """An update fails midway, on every rank, and the caller takes the next step."""
    job = Job(mesh)
    for step in range(OPENED + 1):
        job.step(step)
    publish, calls = type(job.runtime.groups[0]).publish, 0

    def fail(self: Any, piece: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError
        publish(self, piece)

    with patch.object(type(job.runtime.groups[0]), "publish", fail), pytest.raises(ArithmeticError):
        job.step(OPENED + 1)
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        job.step(OPENED + 2)
    facts = {"text": str(caught.value), "seconds": time.monotonic() - begin}
    return facts, {}


def late(mesh: tuple[int, int]) -> Any:
    """Rank 0 is late when the pool opens: the others have updated before it has moved in."""
    install = Copies.install

    def slow(self: Copies, memory: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            time.sleep(1)
        install(self, memory)

    with patch.object(Copies, "install", slow):
        return plain(mesh)


def held(mesh: tuple[int, int]) -> Any:
    """Somebody keeps gradients from a hook beyond the step: they do not change afterwards."""
    job = Job(mesh)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    parameter = next(iter(sorted(job.owned.parameters, key=lambda p: p.numel())))
    parameter.register_post_accumulate_grad_hook(
        lambda p: kept.append((p.grad, p.grad.clone()))  # type: ignore[arg-type,union-attr]
    )
    for step in range(STEPS):
        job.step(step)
    same = [torch.equal(one, other) for one, other in kept]
    return {"same": same, **job.facts()}, job.end()


def in_pool(mesh: tuple[int, int]) -> Any:
    """Where parameters and gradients really lie while a layer runs."""
    job = Job(mesh)
    found: dict[str, list[bool]] = {"parameters": [], "gradients": []}
    pool = job.runtime.pool

    def after_gradient(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        found["gradients"].append(pool.contains(parameter.grad))
        found["parameters"].append(pool.contains(parameter.data))

    for parameter in job.owned.parameters:
        parameter.register_post_accumulate_grad_hook(after_gradient)
    for step in range(STEPS):
        job.step(step)
    return {**found, "count": len(job.owned.parameters), **job.facts()}, job.end()


# What a job does not go on from.
LAST = {"failing": (failing, ((2, 2),), {})}
RUNS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "plain": (plain, ((2, 2),), {}),
    "copied": (plain, ((2, 2),), {"allocation_signatures": False}),
    "zero2": (plain, ((2, 2),), {"reshard_after_forward": False}),
    "depth": (plain, ((2, 2),), {"prefetch_depth": 3}),
    "recompute": (plain, ((2, 2),), {"fixture": "decoder", "recompute": "layer"}),
    "accumulate": (accumulating, ((2, 2), False), {}),
    "defer": (accumulating, ((2, 2), True), {}),
    "late": (late, ((2, 2),), {}),
    "differing": (differing, ((2, 2), 2), {}),
    "always_differing": (differing, ((2, 2), STEPS), {}),
    **{
        f"{name}_{communication}": (target, ((2, 2), communication, *more), {})
        for communication in ("operators", "c10d")
        for name, target, more in (
            ("uneven_recorded", uneven, (True,)),
            ("uneven_later", uneven, (False,)),
            ("skipping", skipping, ()),
            ("replaced", replaced, ()),
            ("small", small, ()),
            ("reversed", of_ten, (True,)),
            ("unsummed", of_ten, (False,)),
        )
    },
    "c10d": (plain, ((2, 2),), {"communication": "c10d"}),
    "resumed": (resumed, ((2, 2),), {}),
    "reordered": (reordered, ((2, 2), "operators"), {}),
    "reordered_c10d": (reordered, ((2, 2), "c10d"), {}),
    "interrupted": (interrupted, ((2, 2),), {}),
    "held": (held, ((2, 2),), {}),
    "in_pool": (in_pool, ((2, 2),), {}),
}


def _run(names: tuple[str, ...]) -> bytes:
    open_world()
    found = {}
    for name in names:
        target, arguments, options = {**RUNS, **LAST}[name]
        found[name] = target(*arguments, **options)
    return pack(found)


@cache
def _ranks() -> list[dict[str, Any]]:
    return [unpack(data) for data in run_world(4, _run, tuple(RUNS), timeout_seconds=280)]


def _same(one: str, other: str) -> bool:
    weights, others = _ranks()[0][one][1], _ranks()[0][other][1]
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_every_gradient_is_born_in_its_place() -> None:
    """From the second step with a pool on, autograd allocates every owned gradient in the pool."""
    for rank in _ranks():
        facts, _ = rank["in_pool"]
        last = facts["count"]
        assert all(facts["gradients"][-last:])
        assert all(facts["parameters"][-last:])
        assert not any(facts["gradients"][: OPENED * last])
        hits, misses, _ = facts["hits"]
        assert (hits, misses) == ((STEPS - OPENED) * last, 0)


@pytest.mark.parametrize("name", ["recompute", "accumulate", "zero2", "depth"])
def test_no_signature_misses(name: str) -> None:
    """Recomputation, accumulation and the order of gathers do not confuse the signatures."""
    for rank in _ranks():
        hits, misses, _ = rank[name][0]["hits"]
        assert hits > 0
        assert misses == 0


@pytest.mark.parametrize("other", ["copied", "zero2", "depth", "in_pool", "late"])
def test_the_pool_changes_no_bit(other: str) -> None:
    """Where gradients are born, ZeRO-2 and prefetch depth change nothing (invariant I5)."""
    assert _same("plain", other)


def test_without_signatures_gradients_are_copied() -> None:
    """Control: the switch is really off, and the operators run all the same."""
    facts, _ = _ranks()[0]["copied"]
    assert facts["hits"] is None
    assert facts["operated"] == _ranks()[0]["plain"][0]["operated"]


def test_gathers_reductions_and_publishes_use_the_operators() -> None:
    """Every layer's gather (twice, ZeRO-3) and reduction, and one publish per step."""
    facts, _ = _ranks()[0]["plain"]
    layers = len(FIXTURES["deep"].build().layers)  # type: ignore[arg-type]
    operated = facts["operated"]
    assert operated["reduce_scatter_v"] == layers * (STEPS - OPENED)
    assert operated["all_gather_v"] >= (2 * layers - 1) * (STEPS - OPENED)
    assert operated["publish"] == STEPS - OPENED + 1
    assert facts["places"] == 2 * layers


def test_zero3_needs_less_of_the_pool() -> None:
    """Places are shared by layers that are never in use together; ZeRO-2 keeps all of them."""
    zero3, zero2 = (_ranks()[0][name][0]["bytes"] for name in ("plain", "zero2"))
    assert zero3["parameters"] < zero2["parameters"]


def test_accumulation_is_the_same_deferred_or_not() -> None:
    """Sums of micro-batches: reduced one by one, or once at the end, within float32 rounding."""
    one, other = (_ranks()[0][name][1] for name in ("accumulate", "defer"))
    for name, weights in one.items():
        torch.testing.assert_close(weights, other[name], rtol=1e-4, atol=1e-6)


def test_evaluation_failures_and_new_weights_between_steps() -> None:
    """Everything is still finite, learned and on the operators after them."""
    for rank in _ranks():
        facts, weights = rank["interrupted"]
        assert all(torch.isfinite(value).all() for value in weights.values())
        assert facts["operated"]["reduce_scatter_v"] > 0
    facts = _ranks()[0]["interrupted"][0]
    assert facts["operated"]["publish"] == STEPS - OPENED + 2, "new weights are published once more"


def test_a_checkpoint_goes_on_in_another_job() -> None:
    """Loaded into the job itself it goes on bit for bit as without; into a new one, which sums its
    first micro-batches over collectives, within float32 rounding."""
    facts, weights = _ranks()[0]["resumed"]
    plain_weights = _ranks()[0]["plain"][1]
    for name, value in weights.items():
        assert torch.equal(value, plain_weights[name]), name
        torch.testing.assert_close(facts["other"][name], value, rtol=1e-4, atol=1e-5)


def test_an_order_that_was_not_recorded() -> None:
    """What does not fit the plan lives elsewhere for that time; the sums are those of line C."""
    facts, weights = _ranks()[0]["reordered"]
    others = _ranks()[0]["reordered_c10d"][1]
    assert facts["operated"]["reduce_scatter_v"] > 0
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["uneven_recorded", "uneven_later", "skipping", "replaced", "small", "reversed", "unsummed"],
)
def test_what_ranks_do_differently_changes_no_sum(name: str) -> None:
    """One rank leaves a backward out; ranks skip other layers; hooks keep and replace gradients; a
    column owns nothing; layers in reverse; a backward that is not summed behind one that is: the
    weights are those of line C."""
    for rank in _ranks():
        _, weights = rank[f"{name}_operators"]
        _, others = rank[f"{name}_c10d"]
        for key, value in weights.items():
            torch.testing.assert_close(value, others[key], rtol=1e-4, atol=1e-5)


def test_a_layer_that_was_left_out_gets_no_place() -> None:
    """Its gradients are already being summed when autograd tells of it."""
    for rank in _ranks():
        _, misses, _ = rank["skipping_operators"][0]["hits"]
        assert misses == 0


def test_ranks_that_recorded_different_orders_record_again() -> None:
    """The pool opens with the first micro-batch that was the same on every rank."""
    for rank in _ranks():
        facts, weights = rank["differing"]
        assert facts["operated"]["publish"] == STEPS - 3, "opened in the fourth step"
        for name, value in weights.items():
            torch.testing.assert_close(value, rank["c10d"][1][name], rtol=1e-4, atol=1e-5)


def test_ranks_that_never_agree_go_on_without_a_pool() -> None:
    """After some attempts; they train over collectives, with the bits of line C."""
    for rank in _ranks():
        facts, weights = rank["always_differing"]
        assert (facts["operated"], facts["parts"], facts["hits"]) == ({}, {}, None)
        assert all(torch.equal(weights[name], rank["c10d"][1][name]) for name in weights)


def test_gradients_of_all_layers_are_never_in_the_pool_together() -> None:
    """At most two sums on their way and two layers beside them have places of their own."""
    parts = _ranks()[0]["plain"][0]["parts"]
    layers = sorted(_ranks()[0]["plain"][0]["gradient_bytes"])
    assert parts["gradients"] <= sum(layers[-4:]) < sum(layers)


def test_an_update_that_failed_does_not_make_the_next_step_wait() -> None:
    """It ends at once, and says that the publish was left."""
    rank: dict[str, Any]
    for rank in [unpack(data) for data in run_world(4, _run, ("failing",), timeout_seconds=100)]:
        facts, _ = rank["failing"]
        assert facts["seconds"] < 10
        assert facts["text"].startswith("an update failed midway")


def test_kept_gradients_keep_their_values() -> None:
    """A gradient that a hook keeps is moved out of the pool before its place is used again."""
    for rank in _ranks():
        facts, _ = rank["held"]
        assert facts["same"] == [True] * STEPS


def test_the_pools_parts_are_told() -> None:
    """All that a rank's pool takes, the fabric's rings and words too, the same on every rank."""
    facts, _ = _ranks()[0]["plain"]
    parts = facts["parts"]
    assert list(parts) == [
        *(space.value for space in Space), "owner window", "copies", "rings", "control"
    ]  # fmt: skip
    assert all(n > 0 for n in parts.values())
    assert sum(parts.values()) == facts["memory"]
    assert all(rank["plain"][0]["parts"] == parts for rank in _ranks())
