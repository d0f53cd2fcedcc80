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
    table = (CSegment * len(segments))()
    for i, s in enumerate(segments):
        for name in ("offset", "home", "bytes"):
            if not 0 <= getattr(s, name) < 1 << 63:
                raise ValueError(f"{noun} {i}: {name} {getattr(s, name)}, expected 0 to 2^63 - 1")
        for name in ("node", "rail"):  # what is no rank, but a number, the core names
            if not -(1 << 31) <= getattr(s, name) < 1 << 31:
                raise ValueError(f"{noun} {i}: owner {name} {getattr(s, name)} is no rank")
        table[i] = CSegment(s.offset, s.home, s.bytes, s.node, s.rail)
    return table


def aligned(length: int) -> int:
    """Return the bytes that a stretch of `length` bytes takes."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def place(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Lay stretches of any lengths out one behind the other, as segments must lie.

    Args:
        lengths: Bytes of each.

    Returns:
        First byte of each, and the bytes of the whole buffer; multiples of 16.
    """
    offsets, position = [], 0
    for length in lengths:
        offsets.append(position)
        position += aligned(length)
    return offsets, position
