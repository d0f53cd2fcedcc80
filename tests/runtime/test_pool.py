"""The plan of the symmetric pool: what is in use together never shares memory."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_dmuon.runtime.pool import ALIGNMENT, Place, Pool, Record, Space, lay_out

PARAMETERS, GRADIENTS = Space.PARAMETERS, Space.GRADIENTS


def _zero3(layers: int, depth: int = 1) -> Record:
    """What a step of ZeRO-3 does: forward and backward, each with layers gathered ahead."""
    record = Record()
    order = [*range(layers), *reversed(range(layers))]
    for backward, half in enumerate((order[:layers], order[layers:])):
        for position, layer in enumerate(half):
            for ahead in half[position + (1 if position else 0) : position + 1 + depth]:
                record.events.append(((PARAMETERS, ahead), True))
            if backward:
                record.events.append(((GRADIENTS, layer), True))
            record.events.append(((PARAMETERS, layer), False))
            if backward:
                record.events.append(((GRADIENTS, layer), False))
    return record


@st.composite
def _records(draw: st.DrawFn) -> tuple[Record, dict[Place, int]]:
    groups = draw(st.integers(1, 6))
    choice = random.Random(draw(st.integers(0, 10**6)))
    places = [(space, g) for space in Space for g in range(groups)]
    record, held = Record(), set[Place]()
    for _ in range(draw(st.integers(0, 40))):
        place = choice.choice(places)
        record.events.append((place, place not in held))
        held ^= {place}
    sizes = {place: choice.choice([1, 16, 255, 256, 257, 5000]) for place in places}
    return record, sizes


@settings(max_examples=200, deadline=None)
@given(_records())
def test_what_is_in_use_together_never_overlaps(case: tuple[Record, dict[Place, int]]) -> None:
    """Replaying the record, twice since it is a cycle, finds every place free when it is taken."""
    record, sizes = case
    ranges = lay_out(record, sizes)
    pool = Pool()
    pool.open(torch.zeros(ranges.total, dtype=torch.uint8), ranges, {})
    for _ in range(2):
        for place, acquired in record.events:
            if acquired:
                found = pool.acquire(place)
                assert found is not None and found.numel() == sizes[place]
            else:
                pool.release(place)


@settings(max_examples=50, deadline=None)
@given(_records())
def test_places_are_aligned_and_inside_their_space(case: tuple[Record, dict[Place, int]]) -> None:
    """Spaces follow each other; every place begins at a multiple of the alignment."""
    record, sizes = case
    ranges = lay_out(record, sizes)
    base = 0
    for space in Space:
        for place, offset in ranges.offsets.items():
            if place[0] is space:
                assert offset % ALIGNMENT == 0
                assert base <= offset
                assert offset + ranges.nbytes[place] <= base + ranges.space_bytes[space]
        base += ranges.space_bytes[space]
    assert base == ranges.total


@pytest.mark.parametrize("layers", [2, 3, 7, 20])
def test_layers_of_zero3_share_two_places(layers: int) -> None:
    """With one layer gathered ahead, two layers are there at a time, however many there are."""
    sizes = {(space, g): 1024 for space in Space for g in range(layers)}
    ranges = lay_out(_zero3(layers), sizes)
    assert ranges.space_bytes[PARAMETERS] == 2 * 1024
    assert ranges.space_bytes[GRADIENTS] == 1024


def test_without_release_everything_has_its_own_place() -> None:
    """ZeRO-2 keeps all layers between forward and backward."""
    record = Record([((PARAMETERS, g), True) for g in range(5)])
    record.events += [((PARAMETERS, g), False) for g in reversed(range(5))]
    ranges = lay_out(record, {(PARAMETERS, g): 100 for g in range(5)})
    assert ranges.space_bytes[PARAMETERS] == 5 * ALIGNMENT


def test_a_place_that_was_not_planned_is_refused() -> None:
    """A group that the record does not know, or whose memory another group uses, gets none."""
    record = Record([((PARAMETERS, 0), True), ((PARAMETERS, 0), False)])
    record.events += [((PARAMETERS, 1), True), ((PARAMETERS, 1), False)]
    ranges = lay_out(record, {(PARAMETERS, 0): 100, (PARAMETERS, 1): 100})
    pool = Pool()
    pool.open(torch.zeros(ranges.total, dtype=torch.uint8), ranges, {})
    assert pool.acquire((PARAMETERS, 2)) is None
    assert pool.acquire((PARAMETERS, 0)) is not None
    assert pool.acquire((PARAMETERS, 1)) is None
    assert pool.blocking((PARAMETERS, 1)) == [(PARAMETERS, 0)]
    pool.release((PARAMETERS, 0))
    assert pool.acquire((PARAMETERS, 1)) is not None


def test_the_digest_tells_plans_apart() -> None:
    """Ranks compare it: an offset, a size or the rest of the plan that differs shows."""
    sizes = {(PARAMETERS, 0): 100, (PARAMETERS, 1): 100}
    record = Record([((PARAMETERS, 0), True), ((PARAMETERS, 1), True)])
    turned = Record(list(reversed(record.events)))
    plans = [
        lay_out(record, sizes).digest(),
        lay_out(turned, sizes).digest(),
        lay_out(record, {**sizes, (PARAMETERS, 1): 101}).digest(),
        lay_out(record, sizes).digest([(0, 16)]),
    ]
    assert len(set(plans)) == 4
    assert lay_out(record, dict(sizes)).digest() == plans[0]
