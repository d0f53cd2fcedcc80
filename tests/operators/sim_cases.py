"""Small cases of the protocol, and changed copies of it."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from torchtitan_dmuon.native.build import build, sources_folder
from torchtitan_dmuon.native.segments import Segment, aligned
from torchtitan_dmuon.simulator.binding import PROTOCOL_SOURCES, Run, simulate
from torchtitan_dmuon.simulator.cluster import Costs

CHUNK = 128  # bytes: a rail's slices begin at multiples of it
FAST = Costs(**{f.name: 0.001 if f.name.endswith("_us") else 1000.0 for f in fields(Costs)})
"""All operations take about as long; what random delays do then decides the order."""


def table(chunks: Sequence[int], rails: int, *, chunk: int = CHUNK, turn: int = 0) -> list[Segment]:
    """Return segments with so many chunks per rail, the last one short.

    Args:
        chunks: Per owner node; 0: the node owns nothing.
        rails: GPUs of a node.
        chunk: Bytes.
        turn: Moves the owner to another rail.
    """
    segments, offset = [], 0
    for node, count in enumerate(chunks):
        if count:
            # Full slices on all rails but the last: where rails are cut is the core's rule.
            nbytes = count * chunk * rails - 12
            segments.append(Segment(offset, nbytes, node, (node + turn) % rails))
            offset += nbytes + 12
    return segments


def scraps(chunks: Sequence[int], rails: int) -> list[Segment]:
    """Return segments below a chunk, of all ranks of a node in turn, that fill so many chunks.

    A chunk then holds parts of several segments and owners.

    Args:
        chunks: Per owner node.
        rails: GPUs of a node.
    """
    segments, offset = [], 0
    for node, count in enumerate(chunks):
        home = 0
        lengths = itertools.islice(itertools.cycle((20, 60, 4, 100)), 2 * count)
        for i, nbytes in enumerate(lengths):
            segments.append(Segment(offset, nbytes, node, i % rails, home))
            offset += aligned(nbytes)
            home += aligned(nbytes)
    return segments


def cases(nodes: Sequence[int] = (1, 2, 3, 4)) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield every operation, number of rails and chunks per node: up to 2 rails and 3 chunks."""
    for count, rails in itertools.product(nodes, (1, 2)):
        for chunks in itertools.product(range(4), repeat=count):
            for operation in ("allgatherv", "reducescatterv"):
                yield operation, rails, chunks


def check(
    case: tuple[str, int, tuple[int, ...]],
    *,
    slots: int,
    groups: int,
    lanes: int,
    seed: int,
    schedules: int = 1,
    without_release: str = "",
    protocol: ctypes.CDLL | None = None,
) -> int:
    """Make four calls of different tables with one channel; return the steps that were made.

    The second call is short enough for the star path and ends in half a chunk. Raises Violation.
    """
    operation, rails, chunks = case
    nodes = len(chunks)
    calls = [
        table(chunks, rails),
        table([1] * nodes, rails, chunk=CHUNK // 2 if rails == 1 else CHUNK, turn=1),
        scraps(chunks[::-1], rails),
        table(chunks, rails, turn=1),
    ]
    run = Run(
        operation=operation,
        nodes=nodes,
        rails=rails,
        chunk_bytes=CHUNK,
        slots=slots,
        buffer_bytes=2 * 4 * 3 * CHUNK,
        home_bytes=2 * 3 * CHUNK,
        dtype="bfloat16" if seed % 2 else "float32",
        groups=groups,
        lanes=lanes,
        carry=True,
        without_release=without_release,
        seed=seed,
        delay_us=0.05,
    )
    return simulate(run, FAST, calls, schedules=schedules, protocol=protocol).steps


def mutated(
    changes: Sequence[tuple[str, str, str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sources: Sequence[str] = PROTOCOL_SOURCES,
) -> ctypes.CDLL:
    """Return a changed protocol, to be driven by the simulator.

    Args:
        changes: File of csrc/core, the text to replace, which stands there exactly once, and the
            new text.
        folder: For the changed sources and the library.
        sources: What is compiled of them.
    """
    root = folder / "csrc"
    shutil.copytree(sources_folder() / "core", root / "core")
    (root / "fabric").mkdir()
    for path in (sources_folder() / "fabric").glob("sim_*group.*"):
        shutil.copy(path, root / "fabric" / path.name)
    for file, old, new in changes:
        path = root / "core" / file
        text = path.read_text()
        assert text.count(old) == 1, (
            f"{file}: the protocol has changed, and this test with it: {old}"
        )
        path.write_text(text.replace(old, new))
    with monkeypatch.context() as context:
        # Not by its dotted name: the package shows the function of the same name.
        context.setattr(sys.modules[build.__module__], "sources_folder", lambda: root)
        return ctypes.CDLL(str(build("changed", sources, flags=("-O0",), folder=folder)))
