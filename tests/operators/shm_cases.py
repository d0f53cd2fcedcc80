"""Tables and payloads for tests of the shm operators, computed alike by every rank."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch

from torchtitan_dmuon.comm.operators import Operators, Segment, place

MESHES = [(1, 1), (1, 4), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)]
MIB = 1 << 20
LARGEST = 3 * MIB
"""Bytes of the largest table, rounded up."""


def job_name() -> str:
    return f"test-{secrets.token_hex(6)}"


def my_rank() -> int:
    return int(os.environ["RANK"])


def meet(folder: str, ranks: int) -> None:
    """Wait until all ranks run, so that a short limit of what follows is not spent on their start.

    Args:
        folder: Empty at first, the same on all ranks.
        ranks: How many come.
    """
    (Path(folder) / str(my_rank())).touch()
    deadline = time.monotonic() + 50
    while len(os.listdir(folder)) < ranks:
        assert time.monotonic() < deadline, "not all ranks have started"
        time.sleep(0.01)


def open_operators(
    job: str,
    mesh: tuple[int, int],
    *,
    window_bytes: int = 8 * MIB,
    seconds: float = 40,
    chunk_bytes: int = 0,
    slots: int = 0,
) -> Operators:
    return Operators.shm(
        job,
        nodes=mesh[0],
        rails=mesh[1],
        rank=my_rank(),
        window_bytes=window_bytes,
        timeout=timedelta(seconds=seconds),
        chunk_bytes=chunk_bytes,
        slots=slots,
    )


def alone(**options: object) -> Operators:
    """Open the operators of a world of one rank, of a job of its own."""
    arguments = {"nodes": 1, "rails": 1, "rank": 0, "window_bytes": 1 << 16, **options}
    return Operators.shm(job_name(), **arguments)  # type: ignore[arg-type]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(lengths: list[int], owners: list[int], rails: int, gap: int = 0) -> list[Segment]:
    """Return segments one behind the other, `gap` bytes apart; homes are their offsets."""
    offsets, _ = place([length + gap for length in lengths])
    return [
        Segment(offset, length, owner // rails, owner % rails, home=offset)
        for offset, length, owner in zip(offsets, lengths, owners, strict=True)
    ]


def _all_ranks(count: int, mesh: tuple[int, int]) -> list[int]:
    return [i % (mesh[0] * mesh[1]) for i in range(count)]


def _cycle(unit: int, count: int) -> list[int]:
    return [(1 + i % 3) * unit for i in range(count)]


def _many(mesh: tuple[int, int]) -> list[Segment]:
    random = _random(7)
    lengths = (torch.randint(0, 800, (200,), generator=random) * 4).tolist()
    owners = torch.randint(0, mesh[0] * mesh[1], (200,), generator=random).tolist()
    return table(lengths, owners, mesh[1], gap=16)


TABLES: dict[str, Callable[[tuple[int, int]], list[Segment]]] = {
    "nothing": lambda mesh: [],
    "empty_segments": lambda mesh: table([0, 0, 0], _all_ranks(3, mesh), mesh[1]),
    "small_beside_empty": lambda mesh: table([0, 4, 0, 8, 1020], _all_ranks(5, mesh), mesh[1]),
    "one_segment": lambda mesh: table([40000], [mesh[0] * mesh[1] - 1], mesh[1]),
    "spread_123": lambda mesh: table(_cycle(60000, 8), _all_ranks(8, mesh), mesh[1], gap=48),
    "one_owner": lambda mesh: table(_cycle(30000, 5), [mesh[1] // 2] * 5, mesh[1]),
    "one_node": lambda mesh: table(
        _cycle(100000, 6), [i % mesh[1] + (mesh[0] - 1) * mesh[1] for i in range(6)], mesh[1]
    ),
    "two_hundred": _many,
    "megabytes": lambda mesh: table([MIB, MIB + 4, 20, MIB // 2], _all_ranks(4, mesh), mesh[1]),
}
# A gather moves bytes of any number.
ODD = "odd_lengths"


def gather_tables(mesh: tuple[int, int]) -> Iterator[tuple[str, list[Segment]]]:
    for name, make in TABLES.items():
        yield name, make(mesh)
    lengths = [1, 2, 3, 15, 16, 17, 31, 127, 129, 65535, 65537]
    yield ODD, table(lengths, _all_ranks(len(lengths), mesh), mesh[1], gap=32)


def size_of(segments: list[Segment]) -> int:
    return max((s.offset + -(-s.bytes // 16) * 16 for s in segments), default=0)


def owner_of(s: Segment, mesh: tuple[int, int]) -> int:
    return s.node * mesh[1] + s.rail


@cache
def _integers(rank: int) -> torch.Tensor:
    numbers = torch.randint(-16, 17, (LARGEST // 2,), generator=_random(rank), dtype=torch.int8)
    return numbers.float()


def integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small enough that sums over eight ranks are exact in bfloat16."""
    return _integers(rank)[:numel].to(dtype)


@cache
def integer_sums(ranks: int) -> torch.Tensor:
    """Return the sum of what `integers` gives the ranks, (LARGEST // 2,) float32."""
    total = _integers(0).clone()
    for rank in range(1, ranks):
        total += _integers(rank)
    return total


@cache
def _letters() -> torch.Tensor:
    return torch.randint(0, 256, (LARGEST,), generator=_random(9), dtype=torch.uint8)


def payload(length: int, seed: int) -> torch.Tensor:
    """Return bytes that differ from seed to seed."""
    return _letters()[seed * 37 : seed * 37 + length]


def normal(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((numel,), generator=_random(100 + rank)).to(dtype)
