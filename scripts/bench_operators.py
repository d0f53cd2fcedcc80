#!/usr/bin/env python3
"""Time AllGatherV and ReduceScatterV over shared memory against gloo, in turns, in one run.

Per operation, size and spread of owners, rounds of five ways take turns on the same processes:

    ours      one operator call in the calling thread
    stream    the same through the operation's stream, as training starts it, then waited for
    owners    gloo, one asynchronous broadcast or reduce per owner, all issued, then waited for
    regular   gloo's all_gather_into_tensor or reduce_scatter_tensor of as many bytes, which need
              equal shards and cannot serve owners
    copy      every rank copies as many bytes as the two-level path makes it move on average

A round repeats a call, since gloo's barrier before it lets the ranks go 0.5 to 4 ms apart, which
counts in every way's first call. Ratios are taken within a round (other ways' time over ours);
shown are medians and the range between quartiles. `copy` is what memcpy needs: a copy through a
ring counts like any other, a sum of s inputs as (s + 1) / 2 copies, since it reads s and writes 1.
Read "of bound" as the part of that bandwidth that our operator reaches. It may pass 100 percent:
stores past the cache are faster than memcpy's here, and chunks stay in the cache between two
copies. "of bound (CPU)" is the same in processor time, summed over all ranks: it leaves out waiting
for a processor, of which there is much when ranks or other programs outnumber processors.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import secrets
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist
import tyro

from torchtitan_dmuon.comm.operators import Operators, Segment, place
from torchtitan_dmuon.simulator.cluster import shipped
from torchtitan_dmuon.simulator.operator import predict

Times = dict[str, list[float]]
"""By way; one value per round."""

WAYS = ("ours", "stream", "owners", "regular", "copy")
KIB, MIB = 1 << 10, 1 << 20
_COPY_BYTES = 64 * MIB
"""Each rank's copies go round in two buffers of this size, beyond any cache."""

_MOST = {"kib": 1 << 22, "rounds": 10_000, "round_bytes": 1 << 40}


@dataclass(kw_only=True, slots=True)
class Options:
    """Time the operators over shared memory against gloo and against copying."""

    meshes: tuple[str, ...] = ("2x2", "1x4", "2x4", "1x8")
    """Worlds, nodes x ranks per node; the nodes are virtual."""

    kib: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)
    """Sizes of the whole buffer."""

    operations: tuple[Literal["gather", "reduce"], ...] = ("gather", "reduce")
    """What to time."""

    owners: tuple[Literal["all", "per_node"], ...] = ("all", "per_node")
    """Owners: every rank, or one per node. Lengths cycle 1:2:3."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Elements."""

    rounds: int = 7
    """Rounds of each way."""

    round_bytes: int = 64 * MIB
    """A round repeats a call until it has moved about so many bytes, at most 50 times."""

    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table.

    Attributes:
        operation: gather or reduce.
        owners: all or per_node.
        nbytes: Of the buffer.
    """

    operation: str
    owners: str
    nbytes: int


@dataclass(slots=True)
class Line:
    """What was measured in a case.

    Attributes:
        mesh: Nodes x ranks per node.
        operation: gather or reduce.
        owners: all or per_node.
        kib: Size of the buffer.
        seconds: One call of each way, median of the rounds, slowest rank.
        quartiles: The rounds' quartiles of the same.
        ratios: Other ways' time over ours, median of the rounds; and `owners/stream`.
        ratio_quartiles: Their quartiles.
        cpu_seconds: Processor time of one call of each way, all ranks together, median.
        cpu_of_bound: Copying's processor time over ours, median of the rounds.
    """

    mesh: str
    operation: str
    owners: str
    kib: int
    seconds: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    ratio_quartiles: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    cpu_of_bound: float = 0.0


def make_table(case: Case, nodes: int, rails: int) -> list[Segment]:
    """Return segments of lengths 1:2:3 that fill about `case.nbytes`."""
    ranks = range(nodes * rails) if case.owners == "all" else range(0, nodes * rails, rails)
    weights = [1 + i % 3 for i in range(len(ranks))]
    lengths = [max(16, case.nbytes * w // sum(weights) // 16 * 16) for w in weights]
    offsets, _ = place(lengths)
    return [
        Segment(offset, length, rank // rails, rank % rails, home=offset)
        for offset, length, rank in zip(offsets, lengths, ranks, strict=True)
    ]


def copies(operation: str, nodes: int, rails: int, star: bool) -> float:
    """Return how many bytes all ranks together must copy for each byte of the buffer."""
    hops = nodes - 1
    if operation == "gather":
        # Owner's node: into the ring, unless there is nobody to send to, and to the other ranks.
        # Every other node: a put, and from the ring to all its ranks.
        return (1 if hops else 0) + rails - 1 + hops * (1 + rails)
    node = (rails + 1) / 2
    if not hops:
        return node
    if star:
        return hops * (node + 1) + (rails + hops + 1) / 2
    return node + hops * (1 + (rails + 2) / 2)


def is_star(segments: Sequence[Segment], nodes: int, rails: int) -> bool:
    """Whether the core takes the star path: the simulator, which runs the core, says so."""
    cluster = replace(shipped("h100_400g"), gpus_per_node=rails)
    return predict("allgatherv", cluster, nodes, segments).path == "star"


class Rank:
    """One process of a world."""

    def __init__(self, rank: int, nodes: int, rails: int, job: str, options: Options) -> None:
        self.rank, self.size = rank, nodes * rails
        self.nodes, self.rails = nodes, rails
        self.dtype = getattr(torch, options.dtype)
        self.options = options
        largest = max(options.kib) * KIB + 4096
        self.operators = Operators.shm(
            job,
            nodes=nodes,
            rails=rails,
            rank=rank,
            window_bytes=largest,
            timeout=timedelta(seconds=120),
        )
        self.buffer = self.operators.empty(largest // self.dtype.itemsize, self.dtype)
        self.buffer.zero_()
        self.shard = torch.zeros(largest // self.size // 4 + 16, dtype=torch.float32)
        self.sources = [torch.zeros(_COPY_BYTES, dtype=torch.uint8) for _ in range(2)]

    def ways(self, case: Case) -> dict[str, Callable[[], None]]:
        """Return what runs one call of each way."""
        segments = make_table(case, self.nodes, self.rails)
        size = self.dtype.itemsize
        nbytes = max(s.offset + s.bytes for s in segments)
        parts = [
            (s.node * self.rails + s.rail, self.buffer[s.offset // size :][: s.bytes // size])
            for s in segments
        ]
        shard_numel = nbytes // size // self.size
        whole = self.buffer[: shard_numel * self.size]
        shard = self.shard.view(self.dtype)[:shard_numel]
        if case.operation == "gather":
            gather = self.operators.all_gather_v(segments)
            return {
                "ours": lambda: gather.run(self.buffer),
                "stream": lambda: gather(self.buffer).wait(),
                "owners": lambda: _wait(
                    [dist.broadcast(part, owner, async_op=True) for owner, part in parts]
                ),
                "regular": lambda: dist.all_gather_into_tensor(whole, shard),
                "copy": self._copier(case, segments, nbytes),
            }
        reduce = self.operators.reduce_scatter_v(segments, self.dtype)
        return {
            "ours": lambda: reduce.run(self.buffer, self.buffer),
            "stream": lambda: reduce(self.buffer, self.buffer).wait(),
            "owners": lambda: _wait(
                [dist.reduce(part, owner, async_op=True) for owner, part in parts]
            ),
            "regular": lambda: dist.reduce_scatter_tensor(shard, whole),
            "copy": self._copier(case, segments, nbytes),
        }

    def _copier(self, case: Case, segments: Sequence[Segment], nbytes: int) -> Callable[[], None]:
        star = is_star(segments, self.nodes, self.rails)
        moved = int(nbytes * copies(case.operation, self.nodes, self.rails, star) / self.size)
        source, target = self.sources
        # A small buffer of the operator's stays in the cache too.
        span = max(16, min(_COPY_BYTES, nbytes))

        def copy() -> None:
            left = moved
            while left > 0:
                now = min(left, span)
                ctypes.memmove(target.data_ptr(), source.data_ptr(), now)
                left -= now

        return copy

    def measure(self, case: Case) -> tuple[Times, Times]:
        """Return one call's seconds on the slowest rank, and all ranks' processor seconds."""
        ways = self.ways(case)
        calls = max(1, min(50, self.options.round_bytes // case.nbytes))
        times: Times = {way: [] for way in WAYS}
        cpu: Times = {way: [] for way in WAYS}
        for turn in range(self.options.rounds + 1):
            order = [WAYS[(turn + i) % len(WAYS)] for i in range(len(WAYS))]
            for way in order:
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    ways[way]()
                taken = torch.tensor([(time.perf_counter() - start) / calls])
                used = torch.tensor([(time.process_time() - start_cpu) / calls])
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                dist.all_reduce(used)
                if turn > 0:  # the first round warms up
                    times[way].append(float(taken))
                    cpu[way].append(float(used))
        return times, cpu


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def run_rank(
    rank: int, nodes: int, rails: int, port: int, job: str, options: Options, pipe: Connection
) -> None:
    """Measure all cases; rank 0 sends each as it is done."""
    # Newer torch has other names for the same two collectives.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=nodes * rails, timeout=limit)
    me = Rank(rank, nodes, rails, job, options)
    for case in cases(options):
        times, cpu = me.measure(case)
        if rank == 0:
            pipe.send((case, times, cpu))
    me.operators.close()
    dist.barrier()
    dist.destroy_process_group()


def cases(options: Options) -> list[Case]:
    return [
        Case(operation, owners, kib * KIB)
        for operation in options.operations
        for owners in options.owners
        for kib in options.kib
    ]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _add_ratio(line: Line, name: str, above: Sequence[float], below: Sequence[float]) -> None:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    line.ratios[name] = statistics.median(ratios)
    line.ratio_quartiles[name] = _quartiles(ratios)


def summarize(mesh: str, case: Case, times: Times, cpu: Times) -> Line:
    """Return medians and quartiles; ratios are taken within rounds."""
    line = Line(mesh, case.operation, case.owners, case.nbytes // KIB)
    for way, values in times.items():
        line.seconds[way] = statistics.median(values)
        line.quartiles[way] = _quartiles(values)
        if way != "ours":
            _add_ratio(line, way, values, times["ours"])
    _add_ratio(line, "owners/stream", times["owners"], times["stream"])
    line.cpu_seconds = {way: statistics.median(values) for way, values in cpu.items()}
    shares = [a / max(b, 1e-9) for a, b in zip(cpu["copy"], cpu["ours"], strict=True)]
    line.cpu_of_bound = statistics.median(shares)
    return line


def show(line: Line) -> str:
    parts = [
        f"{line.mesh:>5} {line.operation:<6} {line.owners:<8} {line.kib:>7}",
        *(f"{1e3 * line.seconds[way]:>9.3f}" for way in WAYS),
    ]
    for way in ("owners", "owners/stream", "regular"):
        low, high = line.ratio_quartiles[way]
        parts.append(f"{line.ratios[way]:>7.2f} ({low:.2f}-{high:.2f})")
    low, high = line.ratio_quartiles["copy"]
    parts.append(f"{100 * line.ratios['copy']:>5.0f}% ({100 * low:.0f}-{100 * high:.0f})")
    parts.append(f"{100 * line.cpu_of_bound:>5.0f}%")
    return " ".join(parts)


HEADER = (
    " mesh op     owners       KiB   ours ms    stream    owners   regular   copy ms  "
    "owners/ours      owners/stream    regular/ours       of bound      (CPU)"
)


def run_mesh(mesh: str, options: Options, report: Callable[[Line], None]) -> None:
    """Run one world.

    Raises:
        RuntimeError: a rank failed; its own message is on standard error.
    """
    nodes, rails = (int(x) for x in mesh.split("x"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    job, port = f"bench-{secrets.token_hex(6)}", _free_port()
    ranks = [
        context.Process(target=run_rank, args=(r, nodes, rails, port, job, options, theirs))
        for r in range(nodes * rails)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        for _ in cases(options):
            report(summarize(mesh, *ours.recv()))
        for process in ranks:
            process.join(60)
    except EOFError:
        raise RuntimeError(f"mesh {mesh}: a rank failed") from None
    finally:
        for process in ranks:
            process.kill()


def check(options: Options) -> None:
    """Raise ValueError, with the option's name, for what cannot be measured."""
    for mesh in options.meshes:
        sizes = [int(x) for x in mesh.split("x")] if re.fullmatch(r"\d{1,4}x\d{1,4}", mesh) else []
        if not (sizes and 1 <= sizes[0] <= 1024 and 1 <= sizes[1] <= 72):
            raise ValueError(
                "--meshes: expected NODESxRANKS, 1 to 1024 nodes of 1 to 72 ranks, e.g. 2x4, got "
                f'"{mesh}"'
            )
    numbers = {"kib": options.kib, "rounds": [options.rounds], "round_bytes": [options.round_bytes]}
    for name, values in numbers.items():
        for value in values:
            if not 1 <= value <= _MOST[name]:
                raise ValueError(f"--{name}: expected 1 to {_MOST[name]}, got {value}")
    for name in ("meshes", "kib", "operations", "owners"):
        if not getattr(options, name):
            raise ValueError(f"--{name}: expected one or more")


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    try:
        check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines: list[Line] = []

    def report(line: Line) -> None:
        lines.append(line)
        if not options.json:
            print(show(line), flush=True)

    if not options.json:
        print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the start")
        print(HEADER)
    for mesh in options.meshes:
        run_mesh(mesh, options, report)
    if options.json:
        print(json.dumps({"processors": os.cpu_count(), "lines": [asdict(x) for x in lines]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
