"""The protocol under weak memory and random schedules; and that a broken one is noticed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.operators.sim_cases import cases, check, mutated, table
from torchtitan_dmuon.simulator.binding import Run, Violation, simulate
from torchtitan_dmuon.simulator.cluster import shipped

STEPS = "steps.h"
GATHER = "allgatherv.h"
REDUCE = "reducescatterv.h"

MUTATIONS = {
    "a chunk's segments gathered from one place of the slot": [
        (GATHER, "      from += piece.bytes;", "")
    ],
    "a chunk's segments reduced in one place of the slot": [
        (REDUCE, "      slot += piece.bytes;", "")
    ],
    "only the first segment's owner has entered": [
        (
            GATHER,
            "if (!entered.one(fabric, plan.pieces[i].owner_rail)) return false;",
            "if (i == plan.chunk_pieces[chunk] &&"
            " !entered.one(fabric, plan.pieces[i].owner_rail)) return false;",
        )
    ],
    "all sums of a chunk to its first owner": [
        (
            REDUCE,
            "route.last ? piece.owner_rail : channel.rail",
            "route.last ? plan.pieces[plan.chunk_pieces[chunk]].owner_rail : channel.rail",
        )
    ],
    "acknowledgement ignored": [
        (
            STEPS,
            "if (fabric.read_signal(ack) + channel.slots <= sequence) return false;",
            "(void)ack;",
        )
    ],
    "acknowledged before the put ended": [
        (STEPS, "if (fabric.read_counter(counter) < channel.uses(cursor.freed)) return false;", "")
    ],
    "own slot filled again while a put reads it": [
        (GATHER, "if (!slot_is_free(fabric, channel, route, cursor.ready)) return false;", "")
    ],
    "own slot summed into while a put reads it": [
        (REDUCE, "channel.nodes == 1 || slot_is_free(fabric, channel, route, sequence)", "true")
    ],
    "own slot filled again before its multicast": [
        (GATHER, "if (cursor.ready >= cursor.done + channel.slots) return false;", "")
    ],
    "multicast before all entered": [
        (GATHER, "cursor.done < cursor.ready && entered.all(fabric)", "cursor.done < cursor.ready")
    ],
    "multicast on one node before all entered": [
        (GATHER, "cursor.done == cursor.end || !entered.all(fabric)", "cursor.done == cursor.end")
    ],
    "owner read before it entered": [
        (GATHER, "if (!entered.one(fabric, plan.pieces[i].owner_rail)) return false;", "")
    ],
    "summed before all entered": [
        (REDUCE, "cursor.done == cursor.end || !entered.all(fabric)", "cursor.done == cursor.end")
    ],
    "others' ends not waited for": [
        ("group.h", "if (!fabric.finished(call_.groups_finished)) return Progress::idle;", "")
    ],
    "arrivals counted per ring": [
        (
            STEPS,
            "channel.arrival_signal(ring, sequence)) >= channel.uses(sequence)",
            "channel.arrival_signal(ring, 0)) > sequence",
        ),
        (STEPS, "channel.arrival_signal(there, sequence)", "channel.arrival_signal(there, 0)"),
    ],
    "star: sums from the wrong inbox on": [
        (
            REDUCE,
            "channel.star_inbox(channel.node, channel.node + 1) : route.ring",
            "channel.star_inbox(channel.node, channel.node + 2) : route.ring",
        )
    ],
    "star: all acknowledgements count as one target's": [
        ("route.h", "route.ack_target = hops - 1;", "route.ack_target = 0;")
    ],
    "star: inboxes not given back": [
        (REDUCE, "if (from_star) give_back_all(fabric, channel, route);", "")
    ],
    "chunks in the wrong order": [
        (STEPS, "static_cast<uint32_t>(sequence - start) * pipeline.stride", "(sequence - start)")
    ],
    "chain one node too short": [
        ("route.h", "hops == channel.nodes - 1 ? 0 : 1;", "hops >= channel.nodes - 2 ? 0 : 1;")
    ],
}


def test_every_small_case_is_right() -> None:
    """No deadlock, lost or doubled chunk, early write or overwritten slot, and right bytes.

    Up to 4 nodes of 2 ranks with 3 chunks each and slots 1 to 3; groups and lanes take turns.
    """
    steps = 0
    for i, (case, slots) in enumerate(itertools.product(cases(), (1, 2, 3))):
        steps += check(case, slots=slots, groups=1 + i % 4, lanes=i % 3, seed=i)
    assert steps > 1_000_000


@pytest.mark.parametrize("operation", ["allgatherv", "reducescatterv"])
def test_thousands_of_schedules(operation: str) -> None:
    """Cases that wrap their rings, each under hundreds of schedules."""
    shapes = [(2, (3, 2)), (1, (1, 3, 0)), (2, (3, 0, 1, 2)), (1, (3, 3, 3, 3))]
    for (rails, chunks), slots in itertools.product(shapes, (1, 2)):
        check((operation, rails, chunks), slots=slots, groups=2, lanes=1, seed=7, schedules=150)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_every_small_case_in_every_setting(groups: int, lanes: int) -> None:
    """The whole product, eight schedules each."""
    for i, (case, slots) in enumerate(itertools.product(cases(), (1, 2, 3))):
        check(case, slots=slots, groups=groups, lanes=lanes, seed=100 + 8 * i, schedules=8)


def _noticed(**options: object) -> str:
    """Return what the harness says of a broken protocol; empty: nothing."""
    hunt = [
        ("allgatherv", 2, (3, 2)),
        ("reducescatterv", 2, (3, 2)),
        ("allgatherv", 2, (3,)),
        ("reducescatterv", 1, (3, 3, 3)),
        ("allgatherv", 2, (1, 1, 1)),
        ("reducescatterv", 1, (1, 1, 1, 1)),
        ("allgatherv", 1, (3, 3, 3)),
    ]
    for case, slots, lanes in itertools.product(hunt, (1, 2), (1, 2)):
        try:
            check(case, slots=slots, groups=2, lanes=lanes, seed=1, schedules=30, **options)  # type: ignore[arg-type]
        except Violation as e:
            return str(e)
    return ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule of the protocol is needed, and the harness sees its absence."""
    assert _noticed(protocol=mutated(MUTATIONS[name], tmp_path, monkeypatch))


@pytest.mark.parametrize("release", ["put", "signal", "finish", "enter"])
def test_a_fabric_without_a_release_is_noticed(release: str) -> None:
    """The orders that core/fabric.h asks for are needed, and the harness sees their absence."""
    assert _noticed(without_release=release)


def test_a_standstill_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock is reported with call, rank, queue, chunk and what is awaited; nothing hangs."""
    change = [(STEPS, "fabric.signal(route.upstream,", "if (false) fabric.signal(route.upstream,")]
    message = _noticed(protocol=mutated(change, tmp_path, monkeypatch))
    assert "deadlock" in message and "an acknowledgement of" in message and "seed" in message


def test_equal_seeds_are_equal_runs() -> None:
    """A failing schedule can be repeated: the seed decides every delay."""

    def run(seed: int) -> tuple[float, int]:
        setting = Run(
            operation="reducescatterv",
            nodes=3,
            rails=2,
            chunk_bytes=128,
            slots=2,
            buffer_bytes=4096,
            home_bytes=4096,
            carry=True,
            seed=seed,
            delay_us=1.0,
        )
        outcome = simulate(setting, shipped("h100_400g").costs, [table((2, 3, 1), 2)] * 2)
        return outcome.ms, outcome.steps

    assert run(5) == run(5) != run(6)
