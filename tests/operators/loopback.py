"""A whole mesh in one process, over the loopback fabric: on a GPU, or on threads without one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_dmuon.comm.binding import CMesh as Mesh
from torchtitan_dmuon.comm.binding import CStuck as Report
from torchtitan_dmuon.native.segments import CSegment as Segment
from torchtitan_dmuon.native.segments import place

GATHER, REDUCE = 0, 1
BFLOAT16, FLOAT32 = 0, 1
TIMEOUT, BAD_ARGUMENT = -3, -1


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; the result is its bits, uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Call(ctypes.Structure):
    _fields_ = [("table", ctypes.c_int32), ("buffer", ctypes.c_uint64), ("home", ctypes.c_uint64)]


class LoopbackError(RuntimeError):
    """A call failed; `code` is the C function's, `report` where a wait stood."""

    def __init__(self, code: int, text: str, report: Report) -> None:
        super().__init__(text)
        self.code = code
        self.report = report


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments one behind the other, padded: (offset, bytes, node, rail) each, and the total."""

    segments: tuple[tuple[int, int, int, int], ...]
    total: int

    @staticmethod
    def of(lengths: list[int], owners: list[tuple[int, int]]) -> Layout:
        offsets, end = place(lengths)
        segments = [(at, n, *owner) for at, n, owner in zip(offsets, lengths, owners, strict=True)]
        return Layout(tuple(segments), end)


class Loopback:
    """A mesh of `nodes` x `rails` ranks."""

    def __init__(
        self,
        library: Path,
        nodes: int,
        rails: int,
        *,
        gather_nodes: int | None = None,
        user_bytes: int,
        chunk_bytes: int = 0,
        slots: int = 0,
        seconds: float = 60.0,
    ) -> None:
        self.native = ctypes.CDLL(str(library))
        self.native.dmuon_error.restype = ctypes.c_char_p
        self.nodes, self.rails, self.ranks = nodes, rails, nodes * rails
        self.handle = ctypes.c_void_p()
        row = gather_nodes or nodes
        self.row_ranks = row * rails
        mesh = Mesh(nodes, rails, row, 0, user_bytes, chunk_bytes, slots, seconds)
        self._check(self.native.dmuon_loopback_open(ctypes.byref(mesh), ctypes.byref(self.handle)))
        self.tables = 0

    def table(self, operation: int, dtype: int, layout: Layout) -> int:
        segments = (Segment * max(len(layout.segments), 1))(
            *[Segment(at, at, n, node, rail) for at, n, node, rail in layout.segments]
        )
        code = self.native.dmuon_loopback_table(
            self.handle,
            f"table {self.tables}".encode(),
            operation,
            dtype,
            segments,
            ctypes.c_uint64(len(layout.segments)),
            ctypes.c_uint64(layout.total),
            ctypes.c_uint64(layout.total),
        )
        self._check(code)
        self.tables += 1
        return self.tables - 1

    def write(self, rank: int, offset: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        code = self.native.dmuon_loopback_write(
            self.handle,
            rank,
            ctypes.c_uint64(offset),
            data.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint64(data.nbytes),
        )
        self._check(code)

    def read(self, rank: int, offset: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        code = self.native.dmuon_loopback_read(
            self.handle,
            rank,
            ctypes.c_uint64(offset),
            data.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint64(size),
        )
        self._check(code)
        return data

    def run(
        self,
        calls: list[tuple[int, int, int]],
        *,
        seed: int = 0,
        skew: int = 0,
        absent: int = -1,
    ) -> None:
        """Run calls (table, buffer, home) one after the other on every rank."""
        report = Report()
        code = self.native.dmuon_loopback_run(
            self.handle,
            (Call * max(len(calls), 1))(*[Call(*call) for call in calls]),
            ctypes.c_uint64(len(calls)),
            ctypes.c_uint64(seed),
            ctypes.c_uint64(skew),
            absent,
            ctypes.byref(report),
        )
        self._check(code, report)

    def close(self) -> None:
        self.native.dmuon_loopback_close(self.handle)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, code: int, report: Report | None = None) -> None:
        if code != 0:
            raise LoopbackError(code, self.native.dmuon_error().decode(), report or Report())
