"""The C functions of csrc/api/dmuon.h for Python: what every fabric's library has in common."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_dmuon.comm.streams import CommunicationError
from torchtitan_dmuon.native import load
from torchtitan_dmuon.native.segments import CSegment

_BAD_ARGUMENT, _SYSTEM, _TIMEOUT, _BROKEN = -1, -2, -3, -4


@dataclass(frozen=True, slots=True)
class WindowMesh:
    """What a window is opened with; all but `rank` is the same on every rank.

    Attributes:
        nodes: R.
        rails: K, ranks per node; rank = node * K + rail.
        rank: This rank.
        gather_nodes: Consecutive nodes that a gather spans; divides R. A reduction spans all.
        user_bytes: Size of the window's part for buffers.
        timeout_seconds: Longest wait of any operation for another rank.
        chunk_bytes: Size of a chunk, a multiple of 16; 0: the fabric's own.
        slots: Slots of every ring; 0: the fabric's own.
        names: Of all ranks, for errors, as the job numbers them; none: 0, 1, ...
    """

    nodes: int
    rails: int
    rank: int
    gather_nodes: int
    user_bytes: int
    timeout_seconds: float
    chunk_bytes: int = 0
    slots: int = 0
    names: tuple[int, ...] = ()


class CMesh(ctypes.Structure):
    """`dmuon_mesh` of csrc/api/dmuon.h."""

    _fields_ = [
        ("nodes", ctypes.c_int32),
        ("rails", ctypes.c_int32),
        ("gather_nodes", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("user_bytes", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint32),
        ("slots", ctypes.c_int32),
        ("timeout_seconds", ctypes.c_double),
        ("names", ctypes.POINTER(ctypes.c_int32)),
    ]


class CStuck(ctypes.Structure):
    """`dmuon_stuck_report` of csrc/api/dmuon.h."""

    _fields_ = [
        ("wait", ctypes.c_int32),
        ("queue", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("chunk", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
    ]


class CMemory(ctypes.Structure):
    """`dmuon_memory` of csrc/api/dmuon.h."""

    _fields_ = [
        ("user", ctypes.c_void_p),
        ("user_bytes", ctypes.c_uint64),
        ("ring_bytes", ctypes.c_uint64),
        ("control_bytes", ctypes.c_uint64),
    ]


class CShmWait(ctypes.Structure):
    """`dmuon_shm_wait` of csrc/api/dmuon.h."""

    _fields_ = [
        ("paused", ctypes.c_int32),
        ("next", ctypes.c_uint64),
        ("raised", ctypes.c_uint64),
        ("since", ctypes.c_int64),
    ]


_P = ctypes.c_void_p
_OUT = ctypes.POINTER(_P)
_ARGUMENTS: dict[str, list[Any]] = {
    "dmuon_memory_of": [_P, ctypes.POINTER(CMemory)],
    "dmuon_group_create": [
        _P,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.POINTER(CSegment),
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        _OUT,
    ],
    "dmuon_check": [_P, ctypes.c_uint64, ctypes.c_uint64],
    "dmuon_call": [_P, ctypes.c_uint64, ctypes.c_uint64, _P],
    "dmuon_publish_create": [
        _P,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(CSegment),
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        _OUT,
    ],
    "dmuon_publish_run": [_P, ctypes.c_uint64, _P],
    "dmuon_publish_release": [_P, ctypes.c_uint64, _P],
    "dmuon_publish_wait": [_P, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, _P],
    "dmuon_publish_stop": [_P, ctypes.c_int32],
    "dmuon_publish_destroy": [_P],
    "dmuon_stuck": [_P, ctypes.c_int32, ctypes.POINTER(CStuck)],
    "dmuon_group_destroy": [_P],
    "dmuon_close": [_P],
}


class Library:
    """A fabric's shared library.

    Calls give the interpreter lock up while they run.

    Args:
        path: The compiled library.
        opener: Its function that opens a communicator.
        arguments: C types of the opener's arguments before the mesh.
        more: Functions that only this fabric's library has, and their C types.

    Raises:
        NativeError: it does not load.
    """

    def __init__(
        self,
        path: Path,
        opener: str,
        arguments: Sequence[Any],
        more: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._functions = load(path)
        self._functions.dmuon_error.restype = ctypes.c_char_p
        self._functions.dmuon_error.argtypes = []
        self._opener = opener
        declared = {**_ARGUMENTS, opener: [*arguments, ctypes.POINTER(CMesh), _OUT], **(more or {})}
        for name, types in declared.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = ctypes.c_int, types

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise what its code means, with its text.

        Raises:
            ValueError: bad argument.
            CommunicationError: a rank did not come in time, or an earlier call failed.
            OSError: the system refused.
        """
        code = getattr(self._functions, name)(*arguments)
        if code == 0:
            return
        text = self._functions.dmuon_error().decode()
        if code == _BAD_ARGUMENT:
            raise ValueError(text)
        raise OSError(text) if code == _SYSTEM else CommunicationError(text)

    def open(self, mesh: WindowMesh, *arguments: Any) -> ctypes.c_void_p:
        """Open a communicator with the library's opener; return its handle. Collective.

        Raises:
            ValueError: a bad mesh.
            CommunicationError: a rank did not come in time.
            OSError: the system refused.
        """
        handle = ctypes.c_void_p()
        self.call(self._opener, *arguments, ctypes.byref(_to_c(mesh)), ctypes.byref(handle))
        return handle


def _to_c(mesh: WindowMesh) -> CMesh:
    """Return a mesh for C, which checks it; only C's integers must hold its numbers."""
    values = {name: getattr(mesh, name) for name, *_ in CMesh._fields_}
    names = values.pop("names")
    for name, kind, *_ in CMesh._fields_:
        if kind is ctypes.c_double or name not in values:
            continue
        size = 1 << 8 * ctypes.sizeof(kind)
        least = -size // 2 if kind is ctypes.c_int32 else 0
        value = values[name]
        if not isinstance(value, int) or not least <= value < least + size:
            expected = f"{least} to {least + size - 1}"
            raise ValueError(f"{name} is {value!r}, expected a number from {expected}")
    if not names:
        return CMesh(**values)
    if len(names) != mesh.nodes * mesh.rails:
        raise ValueError(f"{len(names)} names, expected {mesh.nodes} x {mesh.rails} ranks'")
    for name in names:
        if not isinstance(name, int) or not 0 <= name < 1 << 31:
            raise ValueError(f"names: expected ranks, numbers from 0 to {2**31 - 1}, got {name!r}")
    return CMesh(**values, names=(ctypes.c_int32 * len(names))(*names))
