"""Jobs of line D that tests/operators/test_line_d.py runs and looks at."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.harness import dedicate, full_weights, make_mesh, open_world
from tests.runtime.models import FIXTURES
from tests.worlds import pack
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.binding import Library
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.runtime import open_pool
from torchtitan_dmuon.runtime.copies import Copies
from torchtitan_dmuon.runtime.pool import Ranges, Record, Space
from torchtitan_dmuon.runtime.transport import OperatorsRefused

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


def arrays(mesh: tuple[int, int], communication: str) -> Any:
    """Hooks read gradients and weights with numpy, and keep arrays of some gradients."""
    job = Job(mesh, communication=communication)
    kept: list[tuple[Any, Any]] = []

    def read(module: nn.Module, *_: Any) -> None:
        assert sum(float(p.detach().numpy().sum()) for p in module.parameters()) != 0.0

    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        array = parameter.grad.numpy()
        kept.append((array, array.copy()))

    for layer in job.model.layers:
        layer.register_forward_hook(read)
    parameters = dict(job.model.named_parameters())
    for step in range(STEPS):
        if step == OPENED:
            parameters["layers.1.attention.wqkv.weight"].register_post_accumulate_grad_hook(keep)
            parameters["layers.3.ffn.w2.weight"].register_post_accumulate_grad_hook(keep)
        job.step(step, 2)
    assert len(kept) == 4 * (STEPS - OPENED)
    return {"same": all((one == other).all() for one, other in kept), **job.facts()}, job.end()


def crowded(mesh: tuple[int, int], communication: str) -> Any:
    """When the pool is to be opened, rank 1 finds no room for it."""

    opened = Library.open

    def crowded_open(self: Library, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1: no room")
        return opened(self, *arguments)

    with patch.object(Library, "open", crowded_open):
        if communication == "auto":
            return plain(mesh, communication=communication)
        job = Job(mesh)
        job.step(0)
        with pytest.raises(OperatorsRefused) as caught:
            job.step(1)
    return {"text": str(caught.value)}, job.end()


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
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            # Before the layer, so that backward comes to it behind the layer.
            residual = x * 1.0
            x = residual + torch.tanh(self.layers[index](x.detach() if self.detached else x))
            if index == 0:
                x.register_hook(lambda _: time.sleep(self.pause))
        return x


# What the layers of `Ten` do in the steps behind the recorded one, until the last.
ORDERS = {
    "reversed": [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [*range(10)], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]],
    # Far apart, so that other layers' sums need the place of the one that is not complete.
    "repeated": [[*range(10), 3], [0, 1, 2, 9, 4, 5, 6, 7, 8, 9], [5, 0, 5, 1, 2, 5, 3, 0, 8]],
    "unsummed": [[*range(10)]] * 3,
    # A layer's input takes a gradient, of the weight's size, only behind the recorded micro-batch:
    # where the weight's was made first it is now the input's, which autograd holds.
    "attached": [[*range(10)]] * 3,
}


def of_ten(mesh: tuple[int, int], communication: str, kind: str, **options: Any) -> Any:
    """Layers in another order than the recorded one, or used several times; or a backward that is
    not summed behind one whose sums are on their way, since half of the ranks are late."""
    model = Ten()
    options = {"communication": communication, "cost": "model", **options}
    owned = dmuon.dedicate_params(model, make_mesh(mesh), **options)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)

    def backward(step: int, micro: int) -> None:
        seed = 100 * step + 10 * micro + dist.get_rank()
        model(torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))).sum().backward()

    for step in range(STEPS):
        optimizer.zero_grad()
        late = step > OPENED and kind == "unsummed" and dist.get_rank() >= 2
        if step > OPENED:
            model.order = ORDERS[kind][step - OPENED - 1]
        model.detached = kind == "attached" and step <= OPENED
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
    """Somebody keeps gradients from hooks beyond the step: they do not change afterwards, nor when
    the next micro-batch's are summed where they were made."""
    job = Job(mesh)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        kept.append((gradient, gradient.clone()))

    for index, parameter in enumerate(job.owned.parameters):
        if index % 2:
            parameter.register_hook(keep)
        else:
            parameter.register_post_accumulate_grad_hook(lambda p: keep(p.grad))
    for step in range(STEPS):
        job.step(step, 2, defer=step % 2 == 1)
    same = [torch.equal(one, other) for one, other in kept]
    count = 2 * STEPS * len(job.owned.parameters)
    return {"same": same, "count": count, **job.facts()}, job.end()


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
            ("arrays", arrays, ()),
            *((kind, of_ten, (kind,)) for kind in ORDERS),
        )
    },
    "repeated_zero2": (
        of_ten,
        ((2, 2), "operators", "repeated"),
        {"reshard_after_forward": False},
    ),
    "crowded_auto": (crowded, ((2, 2), "auto"), {}),
    "crowded_operators": (crowded, ((2, 2), "operators"), {}),
    "c10d": (plain, ((2, 2),), {"communication": "c10d"}),
    "resumed": (resumed, ((2, 2),), {}),
    "reordered": (reordered, ((2, 2), "operators"), {}),
    "reordered_c10d": (reordered, ((2, 2), "c10d"), {}),
    "interrupted": (interrupted, ((2, 2),), {}),
    "held": (held, ((2, 2),), {}),
    "in_pool": (in_pool, ((2, 2),), {}),
}


def run_cases(names: tuple[str, ...]) -> bytes:
    open_world()
    found = {}
    for name in names:
        target, arguments, options = {**RUNS, **LAST}[name]
        found[name] = target(*arguments, **options)
    return pack(found)
