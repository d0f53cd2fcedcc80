"""The publish under random schedules, and that a broken one is noticed.

Updates, calls, arrivals and gathers take random times; the step rule alone orders steps. A run
fails if a flag is up while a byte of the task is not of the flag's step, if a copy is overwritten
that somebody has still to read, or if a byte comes twice or never.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.operators.sim_cases import FAST, mutated
from torchtitan_dmuon.native.segments import Segment, aligned
from torchtitan_dmuon.simulator.binding import PUBLISH_SOURCES, Violation
from torchtitan_dmuon.simulator.cluster import shipped
from torchtitan_dmuon.simulator.publish import PublishRun, simulate_publish

TILE = 64
DELAY_US = 0.05

Case = tuple[tuple[int, ...], ...]
"""Per source node the tiles of its tasks, in the order of release."""


def table(case: Case, seed: int = 0) -> tuple[list[Segment], int]:
    """Return the tasks, sources mixed but each in its order, and the bytes of what they lie in."""
    order = [node for node, tasks in enumerate(case) for _ in tasks]
    random.Random(seed).shuffle(order)
    left = [list(tasks) for tasks in case]
    tasks, offset = [], 0
    for node in order:
        nbytes = left[node].pop(0) * TILE - 28
        tasks.append(Segment(offset, nbytes, node))
        offset += aligned(nbytes) + 16
    return tasks, offset


def check(
    case: Case,
    *,
    slots: int,
    seed: int,
    schedules: int = 1,
    steps: int = 4,
    unordered: bool = False,
    protocol: ctypes.CDLL | None = None,
) -> int:
    """Publish some steps; return how many the groups made. Raises Violation."""
    tasks, nbytes = table(case, seed)
    run = PublishRun(
        nodes=len(case),
        buffer_bytes=nbytes,
        steps=steps,
        tile_bytes=TILE,
        slots=slots,
        carry=True,
        unordered=unordered,
        seed=seed,
        delay_us=DELAY_US,
    )
    # Some updates are quick, some come when all else is over.
    ready = [random.Random(seed + i).choice((0.0, 0.05, 2.0)) for i in range(len(tasks))]
    return simulate_publish(run, FAST, tasks, ready, schedules=schedules, protocol=protocol).steps


def cases() -> Iterator[Case]:
    """Yield up to 4 nodes, each with nothing, one task or two, of 1 to 3 tiles."""
    sources: list[tuple[int, ...]] = [(), (1,), (3,), (2, 1)]
    for nodes in (1, 2, 3, 4):
        yield from itertools.product(sources, repeat=nodes)


def test_every_small_case_is_right() -> None:
    """No deadlock, no lost or doubled byte, no early flag, no copy overwritten too early."""
    steps = 0
    for (i, case), slots in itertools.product(enumerate(cases()), (1, 2, 3)):
        if any(case):
            steps += check(case, slots=slots, seed=10 * i, schedules=3)
    assert steps > 500_000


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_thousands_of_schedules(slots: int) -> None:
    """Streams longer than what may be on its way, so that arrival words are used again."""
    for case in (((3, 2), (1, 3, 1)), ((2, 3), (), (9,), (1, 1))):
        check(case, slots=slots, seed=7, schedules=1000)


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_every_small_case_in_every_setting(slots: int) -> None:
    """The whole product, two hundred schedules each."""
    for i, case in enumerate(cases()):
        if any(case):
            check(case, slots=slots, seed=10_000 + 200 * i, schedules=200)


PUBLISH = "publish.h"

MUTATIONS = {
    "acknowledgements ignored": [
        (PUBLISH, "if (cursor.acked + slots <= cursor.sent) return false;", "")
    ],
    "acknowledgements count too much": [
        (
            PUBLISH,
            "fabric.read_signal(channel.ack_signal(route.ring, 0)) * tiles_per_ack(channel)",
            "fabric.read_signal(channel.ack_signal(route.ring, 0)) * (tiles_per_ack(channel) + 1)",
        )
    ],
    "acknowledged before the arrival": [
        (
            PUBLISH,
            "if (cursor.ready < (cursor.batches + 1) * tiles_per_ack(call_.channel)) return false;",
            "if (cursor.end < (cursor.batches + 1) * tiles_per_ack(call_.channel)) return false;",
        )
    ],
    "arrivals counted per source": [
        (
            "channel.h",
            "return ring * slots + static_cast<int>(sequence % slots);\n  }\n  // Ack",
            "return ring * slots;\n  }\n  // Ack",
        ),
        (
            "steps.h",
            "channel.arrival_signal(ring, sequence)) >= channel.uses(sequence)",
            "channel.arrival_signal(ring, sequence)) > sequence",
        ),
    ],
    "flag at a task's first tile": [
        (
            PUBLISH,
            "if (cursor.ready - start < tiles_to(arriving, tile_bytes)) return;",
            "if (cursor.ready - start != arriving.first_tile + 1) return;",
        )
    ],
    "flags carry the next step": [
        (
            PUBLISH,
            "fabric.flag(arriving.number, call_.step)",
            "fabric.flag(arriving.number, call_.step + 1)",
        )
    ],
    "releases of earlier steps count": [
        (PUBLISH, "call_.released + cursor.arriving < released", "cursor.arriving < released")
    ],
    "put before the release": [
        (PUBLISH, "call_.released + cursor.arriving < released", "true || released > 0")
    ],
    "put on before the arrival": [
        (
            PUBLISH,
            "cursor.sent >= cursor.ready) return false",
            "cursor.sent >= cursor.end) return false",
        )
    ],
    "ends while its puts still read": [
        (
            PUBLISH,
            "return fabric.read_counter(call_.channel.put_counter(route.ring, 0)) >= cursor.sent;",
            "return true;",
        )
    ],
    "ends before all has arrived": [
        (PUBLISH, "if (cursor.ready < cursor.end) return false;\n    if (route", "if (route")
    ],
    "chain one node too short": [
        ("route.h", "hops == channel.nodes - 1 ? 0 : 1;", "hops >= channel.nodes - 2 ? 0 : 1;")
    ],
    "chain one node too long": [
        ("route.h", "hops == channel.nodes - 1 ? 0 : 1;", "1;"),
    ],
    "all tiles to the task's first": [
        (PUBLISH, "static_cast<uint64_t>(tile - sending.first_tile) * channel.chunk_bytes", "0")
    ],
    "last tile as long as the others": [
        (PUBLISH, "left < channel.chunk_bytes ? left : channel.chunk_bytes", "channel.chunk_bytes")
    ],
}


def noticed(**options: object) -> str:
    """Return what the harness says of a broken publish; empty: nothing."""
    hunt: Sequence[Case] = (((3, 2), (2,), (1, 1)), ((9,), ()), ((1, 1), (2,), (3,), (1,)))
    for case, slots in itertools.product(hunt, (1, 2, 8)):
        try:
            check(case, slots=slots, seed=1, schedules=20, **options)  # type: ignore[arg-type]
        except Violation as e:
            return str(e)
    return ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_publish_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule is needed, and the harness sees its absence."""
    changed = mutated(MUTATIONS[name], tmp_path, monkeypatch, PUBLISH_SOURCES)
    assert noticed(protocol=changed)


def test_a_release_without_order_is_noticed() -> None:
    """What the update wrote must be there before the release is seen."""
    assert "wrong bytes" in noticed(unordered=True)


def test_a_standstill_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock is reported with step, rank, source, tile and what is awaited; nothing hangs."""
    change = [
        (PUBLISH, "fabric.signal(route.upstream,", "if (false) fabric.signal(route.upstream,")
    ]
    message = noticed(protocol=mutated(change, tmp_path, monkeypatch, PUBLISH_SOURCES))
    assert "deadlock" in message and "an acknowledgement of" in message and "seed" in message


def test_equal_seeds_are_equal_runs() -> None:
    """A failing schedule can be repeated: the seed decides every delay."""
    tasks, nbytes = table(((3, 2), (2,), (1, 1)))

    def run(seed: int) -> tuple[float, int]:
        setting = PublishRun(
            nodes=3,
            buffer_bytes=nbytes,
            steps=3,
            tile_bytes=TILE,
            carry=True,
            seed=seed,
            delay_us=1,
        )
        outcome = simulate_publish(setting, shipped("h100_400g").costs, tasks)
        return outcome.ms, outcome.steps

    assert run(5) == run(5) != run(6)


def test_a_tile_moves_once_over_every_link() -> None:
    """On a rail of R nodes each NIC sends and receives all that it must, and nothing twice."""
    tasks, nbytes = table(((30, 2), (20,), (10, 5), (7,)))
    run = PublishRun(nodes=4, buffer_bytes=nbytes, tile_bytes=TILE)
    links = simulate_publish(run, shipped("h100_400g").costs, tasks).links
    by_source = [sum(aligned(t.bytes) for t in tasks if t.node == node) for node in range(4)]
    for node, link in enumerate(links):
        assert link.nic_in == sum(by_source) - by_source[node]
        assert link.nic_out == sum(by_source) - by_source[(node + 1) % 4]


def test_updates_hide_the_transfer() -> None:
    """Tasks that become ready one after the other are moved meanwhile: at the end only the last one
    is left, and all of the time of a publish that begins after the update is saved."""
    costs = shipped("h100_400g").costs
    mib = 1 << 20
    tasks = [Segment(4 * mib * i, 4 * mib, i % 8) for i in range(48)]
    run = PublishRun(nodes=8, buffer_bytes=4 * mib * 48)
    alone = simulate_publish(run, costs, tasks).ms
    update_ms = 2 * alone
    ready = [1e3 * update_ms * (1 + i // 8) / 6 for i in range(48)]
    beside = simulate_publish(run, costs, tasks, ready).ms
    assert update_ms < beside < update_ms + alone / 3
