"""Communication order does not depend on timing, and replicas stay identical."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchtitan_dmuon as dmuon
from tests.runtime.communication import (
    Work,
    chosen,
    each_communication,
    each_communication_at_length,
    run_world,
    watch,
)
from tests.runtime.heads import full_weights
from tests.runtime.plain import Decoder, Run, Stack, dedicate, open_world
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.runtime.backward import BackwardRun
from torchtitan_dmuon.runtime.runtime import Runtime

STEPS = 50
Log = list[tuple[str, str]]
# Among whom each kind of operation runs.
IN_ROWS = ("gather", "reduce", "all_gather_v")
IN_COLUMNS = ("reduce_rows", "publish")
IN_ALL = ("exchange", "reduce_scatter_v")


def disturb(seed: int) -> None:
    """Sleep up to 20 ms at hook boundaries and in communication threads."""
    for owner, name in (
        (Runtime, "enter"),
        (Runtime, "leave"),
        (BackwardRun, "enter"),
        (BackwardRun, "advance"),
    ):
        _delay(owner, name, random.Random(f"{seed} {name}"))
    random_numbers = random.Random(f"{seed} threads")

    def late(kind: str, label: str, work: Work) -> Work:
        seconds = _seconds(random_numbers)

        def slow() -> None:
            time.sleep(seconds)
            work()

        return slow

    watch(late)


def _seconds(numbers: random.Random) -> float:
    # Most are short, so that fifty steps take seconds; the longest are 20 ms.
    return 0.02 * numbers.random() ** 4


def _delay(owner: Any, name: str, numbers: random.Random) -> None:
    original = getattr(owner, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_seconds(numbers))
        return original(*args, **kwargs)

    setattr(owner, name, delayed)


def record() -> Log:
    """Have everything that is given to a process group or the operators written down, in order."""
    log: Log = []
    exchange = C10dCommunicator.exchange

    def submitting(kind: str, label: str, work: Work) -> Work:
        log.append((kind, label))
        return work

    def exchanging(self: Any, values: torch.Tensor, *, maximum: bool = False) -> None:
        log.append(("exchange", str(values.numel())))
        exchange(self, values, maximum=maximum)

    watch(submitting)
    C10dCommunicator.exchange = exchanging  # type: ignore[method-assign]
    return log


def train(disturbed: bool, reshard: bool) -> tuple[Log, str]:
    mesh = open_world((2, 2))
    rank = dist.get_rank()
    if disturbed:
        disturb(rank)
    log = record()
    torch.manual_seed(0)
    model = Decoder()
    dedicate(model, mesh, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(Run(model, rank, True, step).tokens())
        (out * out.roll(1, -1)).mean().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
    dmuon.check_replicas(model)
    weights = full_weights(model)
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()
    return log, digest


@each_communication_at_length
@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize(
    "reshard", [True, pytest.param(False, marks=pytest.mark.long)], ids=["zero3", "zero2"]
)
def test_order_and_bits_do_not_depend_on_timing(reshard: bool) -> None:
    calm = run_world(4, train, False, reshard, timeout_seconds=60)
    results = run_world(4, train, True, reshard, timeout_seconds=60)
    logs = [log for log, _ in results]
    # One publish of the operators carries what collectives publish piece by piece.
    assert len(logs[0]) > (10 if chosen() == "c10d" else 5) * STEPS
    for row in ((0, 1), (2, 3)):
        a, b = (_only(logs[r], *IN_ROWS, *IN_ALL) for r in row)
        assert a == b, "ranks of a row submitted different sequences"
    for column in ((0, 2), (1, 3)):
        a, b = (_only(logs[r], *IN_COLUMNS, *IN_ALL) for r in column)
        assert a == b, "ranks of a column submitted different sequences"
    assert [log for log, _ in calm] == logs, "timing changed the order"
    assert len({digest for _, digest in [*calm, *results]}) == 1


def _only(log: Log, *names: str) -> Log:
    return [entry for entry in log if entry[0] in names]


def count_groups(depth: int) -> int:
    mesh = open_world((2, 2))
    made, new_group = [], dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return new_group(*args, **kwargs)

    dist.new_group = counting
    model = Stack(depth)
    dedicate(model, mesh)
    optimizer = dmuon.Muon(model)
    for step in range(3):
        optimizer.zero_grad()
        model(Run(model, dist.get_rank(), True, step).x()).sum().backward()
        optimizer.step()
    return len(made)


@each_communication
@pytest.mark.timeout(60, func_only=True)
def test_the_number_of_process_groups_does_not_grow_with_the_model() -> None:
    assert set(run_world(4, count_groups, 2)) == set(run_world(4, count_groups, 8)) == {5}


def corrupt() -> list[str]:
    mesh = open_world((2, 2))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Decoder()
    owned = dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02)
    for step in range(3):
        optimizer.zero_grad()
        model(Run(model, rank, True, step).tokens()).sum().backward()
        optimizer.step()
    dmuon.check_replicas(model)
    messages = []
    # One bit of one element: of a leader's copy in row 1, column 0; then of a sharded replica.
    group = owned.runtime.groups[1]
    for tensor in (
        group.copies[group.led[0]].view(torch.int32),
        model.head.weight.detach().to_local().view(torch.int32),
    ):
        if rank == 2:
            tensor.view(-1)[3] ^= 1
        try:
            dmuon.check_replicas(model)
        except RuntimeError as error:
            messages.append(str(error))
        else:
            messages.append("")
        if rank == 2:
            tensor.view(-1)[3] ^= 1
    dmuon.check_replicas(model)
    led = group.parameters[group.led[0].parameter].name
    return [led, *messages]


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
def test_a_single_changed_bit_on_one_replica_is_found_and_named() -> None:
    results = run_world(4, corrupt, timeout_seconds=50)
    for rank in (0, 2):
        led, owned, sharded = results[rank]
        assert led in owned and "head" not in owned
        assert "head.weight" in sharded and led not in sharded
    assert all(results[rank][1:] == ["", ""] for rank in (1, 3))
