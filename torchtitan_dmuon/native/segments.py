"""Segments, as the C functions of every fabric take them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Bytes; segments begin at multiples of it, and are moved up to the next one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The contiguous bytes of one matrix or small vector in its group's buffer.

    Attributes:
        offset: First byte in the buffer, a multiple of 16.
        bytes: Length, from 0. The bytes up to the next multiple of 16 are moved too.
        node: Of the owner; in a gather counted from the row's first node.
        rail: Of the owner.
        home: Reduction: first byte in the owner's reduced buffer, a multiple of 16.
    """

    offset: int
    bytes: int
    node: int
    rail: int = 0
    home: int = 0


class CSegment(ctypes.Structure):
    """`dmuon::Segment` of csrc/core/table.h."""

    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("home", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("node", ctypes.c_int32),
        ("rail", ctypes.c_int32),
    ]


def to_c(segments: Sequence[Segment], noun: str = "segment") -> ctypes.Array[CSegment]:
    """Return a table for C; C checks it against mesh and buffers. `noun` names one in errors.

    Raises:
        ValueError: a number that C's integers do not hold; the text names the segment.
    """
    check_segments(segments, noun)
    table = (CSegment * len(segments))()
    for i, s in enumerate(segments):
        table[i] = CSegment(s.offset, s.home, s.bytes, s.node, s.rail)
    return table


def check_segments(segments: Sequence[Segment], noun: str = "segment") -> None:
    """Raise ValueError, with the segment's number, for what C's integers do not hold."""
    for i, s in enumerate(segments):
        if not isinstance(s, Segment):
            raise ValueError(f"{noun} {i}: is {s!r}, expected a Segment")
        for name in ("offset", "home", "bytes"):
            value = getattr(s, name)
            if not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise ValueError(f"{noun} {i}: {name} {value!r}, expected 0 to 2^63 - 1")
        for name in ("node", "rail"):  # what is no rank, but a number, the core names
            value = getattr(s, name)
            if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
                raise ValueError(f"{noun} {i}: owner {name} {value!r} is no rank")


def extent(segments: Sequence[Segment], *, homes: bool = False) -> int:
    """Return the bytes that hold all segments with their padding, or all their homes."""
    return max(((s.home if homes else s.offset) + aligned(s.bytes) for s in segments), default=0)


def aligned(length: int) -> int:
    """Return the bytes that a stretch of `length` bytes takes."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def place(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Lay stretches of any lengths out one behind the other, as segments must lie.

    Args:
        lengths: Bytes of each.

    Returns:
        First byte of each, and the bytes of the whole buffer; multiples of 16.

    Raises:
        ValueError: a length below 0.
    """
    offsets, position = [], 0
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"length {i} is {length}, expected 0 or more")
        offsets.append(position)
        position += aligned(length)
    return offsets, position
