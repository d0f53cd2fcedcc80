"""The thread blocks of the gin operators, without a cluster: all ranks in one process.

`csrc/fabric/loopback.cuh` shares everything with `csrc/fabric/gin.cuh` but NCCL's puts, signals and
multicast. On threads each block has three, so work and barriers are those of a real block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.operators.loopback import (
    BFLOAT16,
    FLOAT32,
    GATHER,
    REDUCE,
    TIMEOUT,
    Layout,
    Loopback,
    LoopbackError,
    from_bfloat16,
    to_bfloat16,
)
from torchtitan_dmuon.native import sources_folder
from torchtitan_dmuon.native.cuda import build_loopback

ROOT = Path(__file__).resolve().parents[2]
BUFFER, HOME = 0, 1 << 22
WINDOW = 1 << 23


def architecture() -> str | None:
    """The GPU's, without importing torch's CUDA part where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@pytest.fixture(scope="module", params=["threads", pytest.param("gpu", marks=pytest.mark.gpu)])
def library(request: pytest.FixtureRequest) -> Path:
    return build_loopback(architecture() if request.param == "gpu" else None)


def spread(seed: int, nodes: int, rails: int, lengths: list[int]) -> Layout:
    rng = np.random.default_rng(seed)
    owners = [(int(rng.integers(nodes)), int(rng.integers(rails))) for _ in lengths]
    return Layout.of(lengths, owners)


def fill(loopback: Loopback, at: int, rows: np.ndarray) -> None:
    for rank in range(loopback.ranks):
        loopback.write(rank, at, rows[rank])


def check_gathered(loopback: Loopback, layout: Layout, data: np.ndarray, first: int = 0) -> None:
    """`first`: first rank of the row."""
    want = np.zeros(layout.total, np.uint8)
    for at, length, node, rail in layout.segments:
        owner = first + node * loopback.rails + rail
        want[at : at + length] = data[owner][at : at + length]
    for rank in range(first, min(first + loopback.row_ranks, loopback.ranks)):
        got = loopback.read(rank, BUFFER, layout.total)
        for at, length, _, _ in layout.segments:
            assert np.array_equal(got[at : at + length], want[at : at + length]), (rank, at)


MESHES = [(1, 1, 64, 1), (1, 4, 64, 2), (2, 2, 64, 1), (3, 2, 32, 3), (17, 1, 128, 1)]
LENGTHS = [0, 2, 16, 98, 400, 32, 1000, 14, 256, 600]


@pytest.mark.parametrize(("nodes", "rails", "chunk", "slots"), MESHES)
def test_gather_and_reduce(library: Path, nodes: int, rails: int, chunk: int, slots: int) -> None:
    """Gathered bytes equal the owner's and integers add exactly, when rings wrap over many calls
    of two tables (chain and star) of both channels, with ranks that come at different times and
    with calls between that move nothing."""
    rng = np.random.default_rng(1)
    large = spread(2, nodes, rails, LENGTHS)
    small = spread(3, nodes, rails, [16, 6, 8])
    with Loopback(
        library, nodes, rails, user_bytes=WINDOW, chunk_bytes=chunk, slots=slots
    ) as loopback:
        data = rng.integers(0, 256, (loopback.ranks, large.total)).astype(np.uint8)
        numbers = rng.integers(-3, 4, (loopback.ranks, large.total // 2)).astype(np.float32)
        tables = [
            loopback.table(op, BFLOAT16, t) for t in (large, small) for op in (GATHER, REDUCE)
        ]
        reduced_at = large.total
        fill(loopback, BUFFER, data)
        fill(loopback, BUFFER + reduced_at, to_bfloat16(numbers))
        places = [(0, 0), (reduced_at, HOME), (0, 0), (reduced_at, HOME + reduced_at)]
        calls = [(t, *place) for t, place in zip(tables, places, strict=True)]
        nothing = Layout.of([0], [(0, 0)])
        calls += [(loopback.table(op, BFLOAT16, nothing), 0, 0) for op in (GATHER, REDUCE)]
        loopback.run(calls * 3, seed=4, skew=300_000)
        check_gathered(loopback, large, data)
        total = numbers.sum(0)
        for layout, home in ((large, HOME), (small, HOME + reduced_at)):
            for at, length, node, rail in layout.segments:
                got = loopback.read(node * rails + rail, home + at, length).view(np.uint16)
                want = to_bfloat16(total[at // 2 : (at + length) // 2])
                assert np.array_equal(got, want), (at, node, rail)


def test_rows_gather_on_their_own(library: Path) -> None:
    """A gather over rows of two nodes gives each row its own owners' bytes."""
    rng = np.random.default_rng(5)
    layout = spread(6, 2, 2, LENGTHS)
    with Loopback(
        library, 4, 2, gather_nodes=2, user_bytes=WINDOW, chunk_bytes=64, slots=2
    ) as loopback:
        data = rng.integers(0, 256, (8, layout.total)).astype(np.uint8)
        fill(loopback, BUFFER, data)
        table = loopback.table(GATHER, BFLOAT16, layout)
        loopback.run([(table, BUFFER, 0)] * 2, seed=7, skew=100_000)
        for first in (0, 4):
            check_gathered(loopback, layout, data, first)


def rounded_sum(rows: np.ndarray, nodes: int, rails: int, owner: int, star: bool) -> np.ndarray:
    """What the protocol promises, bit for bit: float32 sums, one rounding to bfloat16 per node."""

    def node_sum(node: int, *partials: np.ndarray) -> np.ndarray:
        total = np.zeros(rows.shape[1], np.float32)
        for addend in (*rows[node * rails : (node + 1) * rails], *partials):
            total = total + addend
        return from_bfloat16(to_bfloat16(total))

    others = [(owner + hop) % nodes for hop in range(1, nodes)]
    if star:
        return node_sum(owner, *[node_sum(node) for node in others])
    partial: tuple[np.ndarray, ...] = ()
    for node in [*others, owner]:
        partial = (node_sum(node, *partial),)
    return partial[0]


@pytest.mark.parametrize("star", [False, True])
def test_one_rounding_per_node(library: Path, star: bool) -> None:
    """Without multicast a bfloat16 sum is rounded once per node, in the order of rails and nodes:
    the result is known to the bit and depends on no timing."""
    nodes, rails, numel = 3, 2, 200
    rng = np.random.default_rng(8)
    rows = from_bfloat16(to_bfloat16(rng.normal(size=(6, numel)).astype(np.float32)))
    layout = Layout.of([2 * numel], [(1, 1)])
    chunk = 512 if star else 64
    with Loopback(library, nodes, rails, user_bytes=WINDOW, chunk_bytes=chunk, slots=2) as loopback:
        fill(loopback, BUFFER, to_bfloat16(rows))
        loopback.run([(loopback.table(REDUCE, BFLOAT16, layout), BUFFER, HOME)] * 2)
        got = from_bfloat16(loopback.read(3, HOME, 2 * numel).view(np.uint16))
    assert np.array_equal(got, rounded_sum(rows, nodes, rails, 1, star))
    exact = rows.astype(np.float64).sum(0)
    bound = nodes * 2.0**-8 * np.abs(rows.astype(np.float64)).sum(0)
    assert np.all(np.abs(got - exact) <= bound)


def test_float32_and_numbers_that_are_none(library: Path) -> None:
    """float32 payloads are added as they are; infinities and NaN come through in both types."""
    layout = Layout.of([64], [(0, 1)])
    rows = np.arange(64, dtype=np.float32).reshape(4, 16) + 0.5
    rows[1, 3], rows[2, 4], rows[0, 5], rows[3, 5] = np.inf, np.nan, np.inf, -np.inf
    with Loopback(library, 2, 2, user_bytes=WINDOW, chunk_bytes=32, slots=1) as loopback:
        for dtype, size in ((FLOAT32, 64), (BFLOAT16, 32)):
            packed = rows if dtype == FLOAT32 else to_bfloat16(rows)
            fill(loopback, BUFFER, packed)
            own = layout if dtype == FLOAT32 else Layout.of([32], [(0, 1)])
            loopback.run([(loopback.table(REDUCE, dtype, own), BUFFER, HOME)])
            raw = loopback.read(1, HOME, size)
            got = raw.view(np.float32) if dtype == FLOAT32 else from_bfloat16(raw.view(np.uint16))
            with np.errstate(invalid="ignore"):
                assert np.allclose(got, rows.sum(0), rtol=2.0**-7, equal_nan=True)


@pytest.mark.parametrize(
    ("nodes", "owner", "waits"),
    [
        (2, (0, 0), r"rank 1 to give a slot back \(acknowledgement\); queue of owner node 0"),
        (2, (1, 0), r"a chunk from rank 1 \(arrival\); queue of owner node 1"),
        (1, (0, 1), r"rank 1 to enter the call \(entry\); queue of owner node 0"),
    ],
)
def test_a_missing_rank_ends_in_a_report(
    library: Path, nodes: int, owner: tuple[int, int], waits: str
) -> None:
    """Every wait has a limit: the others end, and say for whom and what they waited; what was
    broken stays refused."""
    layout = Layout.of([4096], [owner])
    with Loopback(
        library, nodes, 2 // nodes, user_bytes=WINDOW, chunk_bytes=64, slots=1, seconds=0.3
    ) as loopback:
        table = loopback.table(GATHER, BFLOAT16, layout)
        begin = time.monotonic()
        with pytest.raises(LoopbackError, match=f"rank 0 waited 0.3 s for {waits}") as raised:
            loopback.run([(table, BUFFER, 0)], absent=1)
        assert time.monotonic() - begin < 20
        assert raised.value.code == TIMEOUT
        assert raised.value.report.peer == 1
        with pytest.raises(LoopbackError, match="after a failed run"):
            loopback.run([(table, BUFFER, 0)])


def run_checked(library: Path, tool: list[str], preload: str | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if preload is not None:
        environment["LD_PRELOAD"] = preload
    done = subprocess.run(
        [*tool, sys.executable, "-m", "tests.operators.loopback_stress", str(library)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return f"{done.stdout}{done.stderr}\nexit {done.returncode}"


def build_with_thread_sanitizer(source: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    library = target / "loopback_tsan.so"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", "-O1", "-g", "-fsanitize=thread", "-x", "c++"]
        + [f"-I{source}", str(source / "api/loopback_api.cu"), str(source / "core/table.cpp")]
        + ["-o", str(library), "-pthread"],
        check=True,
    )
    return library


def thread_sanitizer() -> str:
    path = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("g++ has no libtsan.so")
    return path


@pytest.mark.slow
def test_no_race_between_threads(tmp_path: Path) -> None:
    """ThreadSanitizer finds no race between a block's threads, its blocks, or ranks."""
    preload = thread_sanitizer()
    library = build_with_thread_sanitizer(sources_folder(), tmp_path)
    output = run_checked(library, [], preload)
    assert output.endswith("exit 0"), output
    assert "WARNING: ThreadSanitizer" not in output


BREAKS = {
    "finish releases nothing": (
        "kernels/block.cuh",
        "__atomic_fetch_add(word, value, __ATOMIC_RELEASE)",
        "__atomic_fetch_add(word, value, __ATOMIC_RELAXED)",
    ),
    "a poll acquires nothing": (
        "kernels/block.cuh",
        "__atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(word, __ATOMIC_RELAXED)",
    ),
    "a put signals before all threads copied": (
        "fabric/loopback.cuh",
        "    // Invariant: behind the barrier the releases cover all threads' part of the copy.\n"
        "    barrier();\n",
        "",
    ),
    "a cursor is replaced while it is read": (
        "kernels/node.cuh",
        "    barrier();  // all have read the old one\n",
        "",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKS)
def test_the_sanitizer_sees_a_broken_order(name: str, tmp_path: Path) -> None:
    """A release, an acquire or a barrier less is found: the test above can fail."""
    preload = thread_sanitizer()
    path, right, wrong = BREAKS[name]
    source = tmp_path / "csrc"
    shutil.copytree(sources_folder(), source)
    text = (source / path).read_text()
    assert text.count(right) == 1
    (source / path).write_text(text.replace(right, wrong))
    library = build_with_thread_sanitizer(source, tmp_path)
    # A race is seen only if the threads come close to each other.
    outputs = (run_checked(library, [], preload) for _ in range(4))
    assert any("WARNING: ThreadSanitizer" in output for output in outputs)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_is_content(tool: str) -> None:
    """compute-sanitizer finds no bad access, no race on shared memory and no divergent barrier."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on PATH")
    library = build_loopback(architecture())
    output = run_checked(library, [program, "--tool", tool, "--error-exitcode", "9"])
    assert output.endswith("exit 0"), output


@pytest.mark.gpu
def test_large_messages_on_a_gpu() -> None:
    """At the protocol's own chunk size and megabytes per call, bytes and sums are right."""
    lengths = [1 << 20, 3 << 20, 96 << 10, 2 << 20, 64, 70_000]
    layout = spread(9, 2, 4, lengths)
    rng = np.random.default_rng(10)
    with Loopback(build_loopback(architecture()), 2, 4, user_bytes=3 * layout.total) as loopback:
        data = rng.integers(0, 256, (8, layout.total)).astype(np.uint8)
        numbers = rng.integers(-3, 4, (8, layout.total // 2)).astype(np.float32)
        fill(loopback, BUFFER, data)
        fill(loopback, layout.total, to_bfloat16(numbers))
        gather = loopback.table(GATHER, BFLOAT16, layout)
        reduce = loopback.table(REDUCE, BFLOAT16, layout)
        calls = [(gather, BUFFER, 0), (reduce, layout.total, 2 * layout.total)]
        loopback.run(calls * 5, seed=11, skew=100_000)
        check_gathered(loopback, layout, data)
        for at, length, node, rail in layout.segments:
            got = loopback.read(node * 4 + rail, 2 * layout.total + at, length).view(np.uint16)
            want = to_bfloat16(numbers.sum(0)[at // 2 : (at + length) // 2])
            assert np.array_equal(got, want)
