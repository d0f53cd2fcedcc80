"""Invariant I7: when a rank dies or hangs, the others end in time and say what for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import torchtitan_dmuon as dmuon
from tests.runtime.communication import Chosen, chosen, each_communication_at_length
from tests.runtime.plain import Run, Stack, dedicate, open_world
from tests.worlds import _CONTEXT, _main

LIMIT = 3.0
"""The communicator's limit, in seconds."""

LOST = 3
PHASES = ("forward", "backward", "step", "after step")


def survive(phase: str, how: str) -> tuple[str, str, float]:
    """Train until the lost rank is missed. Returns type, text and seconds of the error."""
    mesh = open_world((2, 2), 40)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Stack(4)
    dedicate(model, mesh, timeout=timedelta(seconds=LIMIT))
    optimizer = dmuon.Muon(model)

    def lose(now: str) -> None:
        if rank == LOST and now == phase and armed:
            if how == "dies":
                os._exit(1)
            time.sleep(60)

    # The operators take over at the end of step 1.
    last = 1 if chosen() == "c10d" else 3
    armed = False
    model.layers[1].up.register_forward_hook(lambda *_: lose("forward"))
    model.layers[2].up.register_full_backward_hook(lambda *_: lose("backward"))
    start = time.monotonic()
    try:
        for step in range(last + 3):
            armed = step == last
            start = time.monotonic() if step <= last else start
            optimizer.zero_grad()
            model(Run(model, rank, True, step).x()).sum().backward()
            lose("step")
            dmuon.clip_grad_norm_(model, 1.0)
            optimizer.step()
            lose("after step")
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", time.monotonic() - start


def survivors(phase: str, how: str) -> dict[int, tuple[str, str, float]]:
    """Run four ranks of which one is lost; return what the others report."""
    store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=40))
    ranks, pipes = [], []
    for rank in range(4):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_main,
            args=(theirs, rank, 4, store.port, Chosen(survive), (phase, how)),
            daemon=True,
        )
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    found: dict[int, tuple[str, str, float]] = {}
    deadline = time.monotonic() + 50
    try:
        while len(found) < 3 and time.monotonic() < deadline:
            left = [p for r, p in enumerate(pipes) if r not in found and r != LOST]
            for pipe in wait(left, 1.0):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                found[rank] = pipe.recv()[1]  # type: ignore[union-attr]
        for rank in found:
            ranks[rank].join(15)
            assert not ranks[rank].is_alive(), f"rank {rank} reported, but does not end"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return found


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_in_time_and_say_what_they_waited_for(phase: str, how: str) -> None:
    """Whatever phase the lost rank is in, dead or hanging; the text names the operation once."""
    found = survivors(phase, how)
    assert sorted(found) == [0, 1, 2], f"only {sorted(found)} ended"
    for rank, (kind, text, seconds) in found.items():
        assert kind == "CommunicationError", f"rank {rank}: {kind}: {text}"
        assert text.startswith("dmuon ") and f"rank {rank}" in text, text
        assert any(f"of {what}" in text for what in ("layers.", "scalars")), text
        assert not re.search(r"(\w+_v of \S+).*\1", text), text
        # Each rank waits at most one limit for a rank that itself waits for another.
        assert seconds < 3 * LIMIT + 10, f"rank {rank}: {seconds:.1f} s"
    # Rank 2 shares its row with the lost one.
    assert f"{LOST}" in found[2][1]


ALONE = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from tests.runtime.plain import Run, Stack, dedicate, open_world
mesh = open_world((1, 2), 40)
model = Stack(2)
dedicate(model, mesh, timeout=timedelta(seconds=2))
model(Run(model, 0, True).x()).sum().backward()
if dist.get_rank() == 1:
    os._exit(0)
try:
    for _ in range(3):
        model(Run(model, 0, True).x())
except Exception as error:
    print(type(error).__name__, time.time(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_the_interpreter_ends_promptly_after_a_lost_rank() -> None:
    store = TCPStore("localhost", 0, is_master=True)
    environment = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(["."] + sys.path),
    }
    processes: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = processes[0].communicate(timeout=100)
        ended = time.time()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    kind, when = output.split()
    assert kind == "CommunicationError"
    assert ended - float(when) < 15
