"""Checks the operators between the ranks of a torchrun job; `--fabric gin` on a cluster's GPUs.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m tests.operators.gin_check --fabric gin
    torchrun --nproc-per-node 4 -m tests.operators.gin_check --fabric shm --nodes 2

Gathered bytes must equal the owner's, integers must add exactly, over tables of many shapes, on
both channels, in back-to-back calls. Every rank checks what it got; the first difference ends the
job with its place. docs/hardware.md says what a run has to show.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm import gin, shm
from torchtitan_dmuon.comm.binding import WindowMesh
from torchtitan_dmuon.comm.window import Operation, Window
from torchtitan_dmuon.native.segments import Segment

TABLES = {
    "one small segment": [16],
    "star: a few short ones": [96, 2, 0, 30, 4096],
    "lengths 1:2:3 of a MiB": [1 << 20, 2 << 20, 3 << 20],
    "200 segments": [2 * (37 * i % 5000) for i in range(200)],
    "one of 8 MiB": [8 << 20],
}

MOST_RANKS = 13 * 256
"""bfloat16 holds whole numbers up to 256; see `addend`."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's window.

    Attributes:
        window: Opened.
        memory: Its bytes.
        rank: Of the job.
        size: Ranks of the job.
    """

    window: Window
    memory: torch.Tensor
    rank: int
    size: int

    def call(self, group: object, buffer: int, home: int) -> None:
        stream = None
        if self.memory.is_cuda:
            stream = torch.cuda.current_stream(self.memory.device).cuda_stream
        group.call(buffer, home, stream)  # type: ignore[attr-defined]

    def settle(self, operation: Operation) -> None:
        """Wait for what was started; raise if a wait passed its limit."""
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)
        stuck = self.window.stuck(operation)
        if stuck is not None:
            raise RuntimeError(f"rank {self.rank}: {operation.name} stood still: {stuck}")


def place(lengths: list[int], size: int, rails: int, one_owner: bool) -> list[Segment]:
    segments, end = [], 0
    for i, length in enumerate(lengths):
        owner = size - 1 if one_owner else 5 * i % size
        segments.append(Segment(end, length, owner // rails, owner % rails, home=end))
        end += -(-length // 16) * 16
    return segments


def owned_bytes(segment: Segment, number: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(segment.bytes, device=device, dtype=torch.int64)
    return ((at * 131 + at // 251 + segment.offset + 17 * number) % 256).to(torch.uint8)


def addend(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    at = torch.arange(numel, device=device, dtype=torch.int64)
    # One rank in 13 adds a one to an element: sums are exact in bfloat16 up to MOST_RANKS.
    return ((at + 5 * rank) % 13 == 0).to(dtype)


def check_gather(me: Rank, label: str, segments: list[Segment], total: int) -> None:
    rails = me.window.mesh.rails
    group = me.window.create_group(
        Operation.ALL_GATHER_V, segments, label=label, dtype=torch.uint8, buffer_bytes=total
    )
    for number in range(3):
        me.memory[:total].fill_(255 - number)
        for s in segments:
            if s.node * rails + s.rail == me.rank:
                me.memory[s.offset : s.offset + s.bytes] = owned_bytes(s, number, me.memory.device)
        me.call(group, 0, 0)
        me.settle(Operation.ALL_GATHER_V)
        for i, s in enumerate(segments):
            got = me.memory[s.offset : s.offset + s.bytes]
            if not torch.equal(got, owned_bytes(s, number, got.device)):
                raise RuntimeError(f"rank {me.rank}: gather {label}: segment {i} differs")
        # Nobody writes for the next call while another still compares: calls order ranks only in
        # what they move.
        dist.barrier()


def check_reduce(
    me: Rank, label: str, segments: list[Segment], total: int, dtype: torch.dtype
) -> None:
    rails, size = me.window.mesh.rails, dtype.itemsize
    group = me.window.create_group(
        Operation.REDUCE_SCATTER_V,
        segments,
        label=label,
        dtype=dtype,
        buffer_bytes=total,
        home_bytes=total,
    )
    device = me.memory.device
    own = me.memory[:total].view(dtype)
    own.copy_(addend(me.rank, total // size, dtype, device))
    dist.barrier()
    for _ in range(3):
        me.call(group, 0, total)
    me.settle(Operation.REDUCE_SCATTER_V)
    want = sum(addend(r, total // size, torch.int64, device) for r in range(me.size))
    reduced = me.memory[total : 2 * total].view(dtype)
    for i, s in enumerate(segments):
        if s.node * rails + s.rail != me.rank:
            continue
        part = slice(s.offset // size, (s.offset + s.bytes) // size)
        if not torch.equal(reduced[part].to(torch.int64), want[part]):  # type: ignore[index]
            raise RuntimeError(f"rank {me.rank}: reduction {label}: segment {i} differs")
    dist.barrier()


def open_rank(fabric: str, nodes: int, window_bytes: int) -> Rank:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = WindowMesh(
        nodes=nodes,
        rails=size // nodes,
        rank=rank,
        gather_nodes=nodes,
        user_bytes=window_bytes,
        timeout_seconds=120.0,
    )
    if fabric == "shm":
        window = shm.open_window(f"check-{os.environ['MASTER_PORT']}", mesh)
        return Rank(window, shm.memory(window), rank, size)
    device = torch.device("cuda", torch.cuda.current_device())
    assert dist.group.WORLD is not None
    window = gin.open_window(device, dist.group.WORLD, mesh)
    return Rank(window, gin.memory(window, device), rank, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fabric", choices=("gin", "shm"), required=True)
    parser.add_argument("--nodes", type=int, help="default: the job's")
    arguments = parser.parse_args()
    if arguments.fabric == "gin":
        if not torch.cuda.is_available():
            parser.error("--fabric gin needs a GPU that this torch can use")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.fabric == "gin" else "gloo")
    size = dist.get_world_size()
    if size > MOST_RANKS:
        parser.error(f"{size} ranks, expected at most {MOST_RANKS}: bfloat16 sums are not exact")
    nodes = arguments.nodes or size // int(os.environ["LOCAL_WORLD_SIZE"])
    me = open_rank(arguments.fabric, nodes, 64 << 20)
    for name, lengths in TABLES.items():
        for one_owner in (False, True):
            segments = place(lengths, size, me.window.mesh.rails, one_owner)
            total = segments[-1].offset + -(-segments[-1].bytes // 16) * 16
            label = f"{name}, {'one owner' if one_owner else 'owners spread'}"
            begin = time.perf_counter()
            check_gather(me, label, segments, total)
            check_reduce(me, label, segments, total, torch.bfloat16)
            if all(s.bytes % 4 == 0 for s in segments):
                check_reduce(me, label, segments, total, torch.float32)
            if me.rank == 0:
                print(f"{label}: right, {time.perf_counter() - begin:.1f} s", flush=True)
    if me.rank == 0:
        print(f"all right on {nodes} nodes x {size // nodes} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
