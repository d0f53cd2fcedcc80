"""The symmetric pool: where parameters and gradients lie while they are used (paper C.1).

The layout is planned once from what one micro-batch acquired and released, in its order. Groups
that are never in use together share a range. The plan is a pure function of that record, so that
every rank computes the same offsets.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

ALIGNMENT = 256
"""Bytes: every place begins at a multiple, more than any load or cache line needs."""


class Space(enum.Enum):
    """What a range of the pool is for."""

    PARAMETERS = "parameters"
    """A group's gathered parameters, from the start of their gather until they are freed."""

    GRADIENTS = "gradients"
    """A group's gradients, from the start of its backward until they are reduced."""


Place = tuple[Space, int]
"""A space, and the index of a group in the runtime."""


@dataclass(slots=True)
class Record:
    """The order in which places were acquired and released.

    Attributes:
        events: (place, whether it was acquired), in program order.
    """

    events: list[tuple[Place, bool]] = field(default_factory=list)

    def lifetimes(self) -> dict[Place, list[tuple[int, int]]]:
        """Return the stretches of events [first, last] in which each place was in use.

        The record is one round of a cycle: what was released without having been acquired was in
        use from the beginning; what was not released is in use to the end, and in the next round
        until it is acquired again.
        """
        found: dict[Place, list[tuple[int, int]]] = {}
        since: dict[Place, int] = {}
        first: dict[Place, int] = {}
        for position, (place, acquired) in enumerate(self.events):
            found.setdefault(place, [])
            first.setdefault(place, position)
            if acquired:
                since.setdefault(place, position)
            else:
                begin = since.pop(place, 0 if not found[place] else position)
                found[place].append((begin, position))
        for place, begin in since.items():
            found[place] += [(begin, len(self.events)), (0, first[place])]
        return found


@dataclass(frozen=True, slots=True)
class Ranges:
    """Where the places lie.

    Attributes:
        offsets: First byte of each place in the pool.
        nbytes: Bytes of each place.
        space_bytes: Bytes of each space.
    """

    offsets: Mapping[Place, int]
    nbytes: Mapping[Place, int]
    space_bytes: Mapping[Space, int]

    @property
    def total(self) -> int:
        return sum(self.space_bytes.values())

    def digest(self, more: object = None) -> int:
        """Return 60 bits that differ if any offset or size, or the text of `more`, differs."""
        rows = sorted(
            (space.value, group, offset, self.nbytes[space, group])
            for (space, group), offset in self.offsets.items()
        )
        return int(hashlib.sha256(repr((rows, self.total, more)).encode()).hexdigest()[:15], 16)

    def overlap(self, one: Place, other: Place) -> bool:
        """Whether two places share memory."""
        return (
            self.offsets[one] < self.offsets[other] + self.nbytes[other]
            and self.offsets[other] < self.offsets[one] + self.nbytes[one]
        )


def lay_out(record: Record, nbytes: Mapping[Place, int]) -> Ranges:
    """Give every place of `nbytes` that the record mentions its range, in the order of first use.

    Each takes the lowest range that no place has which was in use together with it. The spaces
    follow each other.
    """
    lifetimes = record.lifetimes()
    offsets: dict[Place, int] = {}
    space_bytes = dict.fromkeys(Space, 0)
    base = 0
    for space in Space:
        for place, mine in lifetimes.items():
            if place[0] is not space or place not in nbytes:
                continue
            taken = sorted(
                (offsets[other], offsets[other] + _aligned(nbytes[other]))
                for other in offsets
                if other[0] is space and _together(lifetimes[other], mine)
            )
            offsets[place] = _lowest_gap(taken, _aligned(nbytes[place]), base)
            end = offsets[place] + _aligned(nbytes[place]) - base
            space_bytes[space] = max(space_bytes[space], end)
        base += space_bytes[space]
    return Ranges(offsets, {place: nbytes[place] for place in offsets}, space_bytes)


class Pool:
    """Says where groups lie: nowhere while it warms up and records, then in its memory.

    Attributes:
        ranges: The plan; None until it is opened.
        parts: Bytes on this rank by part: parameters, gradients, owner window, copies, rings,
            control. Empty until it is opened.
    """

    def __init__(self) -> None:
        self.ranges: Ranges | None = None
        self.parts: dict[str, int] = {}
        self._record: Record | None = None
        self._attempts = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_use: set[Place] = set()

    def record(self) -> None:
        """Begin to record what is acquired and released."""
        if self.ranges is None and self._record is None:
            self._record = Record()

    def record_again(self) -> int:
        """Forget what was recorded. Returns how often that was asked for."""
        self._record = None
        self._attempts += 1
        return self._attempts

    @property
    def recorded(self) -> Record | None:
        """What was recorded, once it holds a backward."""
        record = self._record
        if record is None or all(place[0] is not Space.GRADIENTS for place, _ in record.events):
            return None
        return record

    def open(self, memory: torch.Tensor, ranges: Ranges, beside: Mapping[str, int]) -> None:
        """Hand out places from now on. Nothing may be in use.

        Args:
            memory: (ranges.total,) uint8, or more with what else lies in the window, the same on
                every rank.
            ranges: The plan.
            beside: Bytes by part of what the window has beside the places.
        """
        self.parts = {space.value: ranges.space_bytes[space] for space in Space} | dict(beside)
        self._memory, self.ranges, self._record = memory, ranges, None
        self._in_use.clear()

    def close(self) -> None:
        """Hand out nothing any more, and record nothing."""
        self.ranges = self._record = None
        self._in_use.clear()

    def at(self, place: Place) -> torch.Tensor:
        """Return the memory of a place, uint8."""
        assert self.ranges is not None
        offset = self.ranges.offsets[place]
        return self._memory[offset : offset + self.ranges.nbytes[place]]

    @property
    def nbytes(self) -> int:
        """Bytes on this rank, all parts together; 0 before it is opened."""
        return sum(self.parts.values())

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the pool."""
        begin = tensor.data_ptr() - self._memory.data_ptr()
        return 0 <= begin < self._memory.numel()

    def blocking(self, place: Place) -> list[Place]:
        """Return the other places in use that share memory with `place`, if it has any."""
        ranges = self.ranges
        if ranges is None or place not in ranges.offsets:
            return []
        return [p for p in self._in_use if p != place and ranges.overlap(p, place)]

    def acquire(self, place: Place) -> torch.Tensor | None:
        """Take a place into use; None if there is none, or one in use shares its memory."""
        if self._record is not None:
            self._record.events.append((place, True))
        if self.ranges is None or place not in self.ranges.offsets or self.blocking(place):
            return None
        self._in_use.add(place)
        return self.at(place)

    def held(self, place: Place) -> torch.Tensor | None:
        """Return the memory of a place that is in use, uint8; None if it is not."""
        return self.at(place) if place in self._in_use else None

    def release(self, place: Place) -> None:
        """Give a place back; nothing if it is not in use."""
        if self._record is not None:
            self._record.events.append((place, False))
        self._in_use.discard(place)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _together(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


def _lowest_gap(taken: Iterable[tuple[int, int]], nbytes: int, base: int) -> int:
    """Return the lowest offset from `base` on at which `nbytes` fit between the taken ranges."""
    at = base
    for begin, end in taken:
        if begin - at >= nbytes:
            break
        at = max(at, end)
    return at
