"""What shares a link in the simulator: one port alone, and calls whose chunks have many pieces."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_dmuon.native.build import build
from torchtitan_dmuon.native.segments import Segment
from torchtitan_dmuon.simulator.cluster import Cluster, shipped
from torchtitan_dmuon.simulator.operator import predict, segments_of

OPERATIONS = ("allgatherv", "reducescatterv")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return csrc/tests/sim_port.cpp."""
    folder: Path = tmp_path_factory.mktemp("port")
    library = ctypes.CDLL(
        str(build("port", ("tests/sim_port.cpp",), flags=("-O1",), folder=folder))
    )
    library.dmuon_sim_port.restype = ctypes.c_uint64
    return library


def passed(port: ctypes.CDLL, messages: Sequence[tuple[int, int, int]], gap: int = 0) -> list[int]:
    """Return when each message has passed the port.

    Args:
        port: The library.
        messages: Of each when it asks, from when on it passes, and how long it takes.
        gap: Before each, in the same picoseconds.
    """
    columns = list(zip(*messages, strict=True))
    arrays = [(ctypes.c_int64 * len(messages))(*column) for column in columns]
    found = (ctypes.c_int64 * len(messages))()
    counted = port.dmuon_sim_port(
        ctypes.c_uint64(len(messages)), *arrays, ctypes.c_int64(gap), found
    )
    assert counted == sum(columns[2])
    return list(found)


def test_a_later_time_on_a_port_leaves_the_time_before_it_free(port: ctypes.CDLL) -> None:
    """Who asks second, for an earlier time, does not wait; what does not fit in goes on behind."""
    assert passed(port, [(0, 100, 50), (0, 10, 20), (0, 40, 80)]) == [150, 30, 170]
    assert passed(port, [(0, 100, 50), (0, 0, 100), (0, 0, 1)]) == [150, 100, 151]
    # Without a length it passes as soon as nothing else does.
    assert passed(port, [(0, 10, 10), (0, 5, 0), (0, 15, 0), (20, 20, 0)]) == [20, 5, 20, 20]
    assert passed(port, [(0, 0, 10), (0, 0, 10)], gap=3) == [13, 26]


def _messages(seed: int, gap: int) -> Iterator[tuple[int, int, int]]:
    rng, now = random.Random(seed), 0
    spread = rng.choice((5, 50, 400))
    for _ in range(200):
        now += rng.choice((0, 0, 1, rng.randrange(12)))
        yield now, now + rng.randrange(spread), rng.randrange(0 if gap else 1, 12)


@pytest.mark.parametrize("gap", [0, 2])
def test_a_port_is_busy_when_something_waits_and_never_twice(port: ctypes.CDLL, gap: int) -> None:
    """Against counting: each message takes the first free picoseconds from its start on."""
    for seed in range(60):
        messages = list(_messages(seed, gap))
        busy: set[int] = set()
        expected = []
        for _, start, length in messages:
            time = start
            for _ in range(length + gap):
                while time in busy:
                    time += 1
                busy.add(time)
            expected.append(time + 1)
        assert passed(port, messages, gap) == expected, seed


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_pieces_of_a_chunk_cost_their_first_bytes_and_no_more(operation: str, nodes: int) -> None:
    """Bytes cut finer: each piece adds the first bytes' time, once per stage, not per GPU."""
    cluster, whole = shipped("h100_400g"), 3 << 19
    costs = cluster.costs

    def us(cut: int) -> float:
        part = whole // cut
        segments = [Segment(i * part, part, 0, home=i * part) for i in range(cut)]
        return 1e3 * predict(operation, cluster, nodes, segments).ms

    one = us(1)
    stages = costs.load_us + nodes * costs.store_us
    if operation == "reducescatterv":
        stages = nodes * costs.reduce_us
    for cut in (8, 64):
        # Every GPU has 3 chunks, each in a block of its own.
        pieces = -(-cut // 3)
        assert one < us(cut) < one + pieces * stages + 3, cut


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_gpus_of_a_node_work_at_the_same_time(operation: str, nodes: int) -> None:
    """Chunks of many pieces: 8 GPUs that share the work take about as long as each one's share."""
    cluster, cut = shipped("h100_400g"), 24

    def us(rails: int) -> float:
        part = rails * 8192
        segments = [Segment(i * part, part, i % nodes, home=i * part) for i in range(cut)]
        return 1e3 * predict(operation, replace(cluster, gpus_per_node=rails), nodes, segments).ms

    assert us(8) < 1.15 * us(2)


def _times(
    operation: str, cluster: Cluster, nodes: int, owners: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, float]]:
    """Yield path and milliseconds of growing calls, each 1.09 times as large as the one before."""
    for step in range(60):
        total = int(65536 * 2 ** (step / 8)) // 2 * 2
        found = predict(operation, cluster, nodes, segments_of(total, (1, 2, 3), owners))
        yield found.path, found.ms


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spread", ["nodes", "gpus", "one"])
def test_more_bytes_take_no_less_time(operation: str, spread: str) -> None:
    """On 4 nodes, 64 KiB to 10 MiB: never more than 2 percent faster while the path is the same.

    Pieces cost nothing by themselves here: with their cost, a call in which fewer meet in the
    longest chunk may be faster.
    """
    cluster, nodes = shipped("h100_400g"), 4
    costs = replace(cluster.costs, load_us=0.0, store_us=0.0, reduce_us=0.0)
    rails = 8 if spread == "gpus" else 1
    owners = [(n, k) for n in range(1 if spread == "one" else nodes) for k in range(rails)]
    path, longest = "", 0.0
    for now, ms in _times(operation, replace(cluster, costs=costs), nodes, owners):
        if now != path:
            path, longest = now, ms
        assert ms > 0.98 * longest
        longest = max(longest, ms)
