"""What a process sends and holds, as the benchmark measures it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tests.operators.shm_cases import job_name, open_operators
from tests.worlds import run_world
from torchtitan_dmuon.bench.measure import PeakMemory, sent_bytes
from torchtitan_dmuon.comm.operators import Segment


def send(numel: int) -> dict[str, int]:
    """Return the bytes that this rank sends for some collectives on `numel` floats."""
    dist.init_process_group("gloo")
    x = torch.ones(numel)
    dist.all_reduce(x)
    dist.barrier()
    found = {}
    for name in ("all_reduce", "broadcast", "none"):
        before = sent_bytes()
        if name == "all_reduce":
            dist.all_reduce(x)
        elif name == "broadcast":
            dist.broadcast(x, src=1)
        time.sleep(0.3)  # The kernel counts what has left, and takes a while over the last of it.
        after = sent_bytes()
        assert before is not None and after is not None
        found[name] = after - before
        dist.barrier()
    return found


def test_sent_bytes_are_those_of_the_collectives() -> None:
    """gloo's all-reduce on 2 ranks sends the data once in each direction, half in each phase; a
    broadcast leaves its source only; nothing is counted where nothing is sent."""
    numel = 1 << 20
    size = 4 * numel
    results = run_world(2, send, numel)
    for rank, found in enumerate(results):
        assert abs(found["all_reduce"] - size) < 0.01 * size
        expected = size if rank == 1 else 0
        assert abs(found["broadcast"] - expected) < 0.01 * size
        assert found["none"] < 1000


def grow(mebibytes: int) -> tuple[int, int]:
    """Return the growth that is seen while and after a tensor lives, in MiB."""
    memory = PeakMemory()
    tensor = torch.zeros(mebibytes << 18).add_(1)
    del tensor
    first = memory.grown_bytes()
    second = PeakMemory().grown_bytes()
    return first >> 20, second >> 20


def test_peak_memory_starts_anew() -> None:
    """The peak counts what has been freed since, and a new object knows nothing of it."""
    ((first, second),) = run_world(1, grow, 64)
    assert 62 <= first <= 80
    assert second < 8


def share(job: str) -> int:
    """Return by how many MiB a window grows a process, all of whose parts both ranks have read."""
    memory = PeakMemory()
    operators = open_operators(job, (1, 2), window_bytes=64 << 20)
    buffer = operators.empty(64 << 20, torch.uint8)
    buffer.fill_(1)
    half = 32 << 20
    gather = operators.all_gather_v([Segment(i * half, half, 0, i) for i in range(2)])
    gather.run(buffer)
    grown = memory.grown_bytes() >> 20
    gather.run(buffer)  # nobody leaves before both have measured
    return grown


def test_shared_memory_counts_once() -> None:
    """Each rank writes half of its buffer into the other's: it is resident in both, and is counted
    for one in all."""
    grown = run_world(2, share, job_name())
    assert all(60 <= n <= 80 for n in grown), grown
