"""Opens windows over the shared memory of one machine (csrc/fabric/shm*)."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import cache
from typing import Any

import torch

from torchtitan_dmuon.comm.binding import CMesh, CShmWait, Library, WindowMesh
from torchtitan_dmuon.comm.window import Window
from torchtitan_dmuon.native import build

_P, _INT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
_MORE: dict[str, list[Any]] = {
    "dmuon_shm_bytes": [ctypes.POINTER(CMesh), ctypes.POINTER(ctypes.c_uint64)],
    "dmuon_shm_call": [_P, ctypes.c_uint64, ctypes.c_uint64, _INT],
    "dmuon_shm_give_up": [_P],
    "dmuon_shm_publish_wait": [
        _P,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.POINTER(CShmWait),
    ],
}
_STOP_SECONDS = 10.0
_FOLDER, _MIB = "/dev/shm", 2**20

_SOURCES = (
    "api/shm_api.cpp",
    "api/shm_publish.cpp",
    "core/publish_table.cpp",
    "core/table.cpp",
    "fabric/shm.cpp",
    "fabric/shm_pool.cpp",
    "fabric/sum.cpp",
)


@cache
def _library() -> Library:
    path = build("dmuon_shm", _SOURCES, libraries=["-pthread"])
    return Library(path, "dmuon_shm_open", [ctypes.c_char_p, _INT], _MORE)


def prepare() -> None:
    """Compile and load the library, so that `open_window` cannot fail for lack of a compiler.

    Raises:
        NativeError: the library cannot be compiled.
    """
    _library()


def lack_of_room(mesh: WindowMesh) -> str | None:
    """Say that this machine's shared memory has no room for a window on all ranks of a mesh.

    Raises:
        ValueError: a bad mesh.
    """
    mine = _library().mesh_bytes("dmuon_shm_bytes", mesh)
    ranks = mesh.nodes * mesh.rails
    space = os.statvfs(_FOLDER)
    free = space.f_bavail * space.f_frsize
    if mine * ranks <= free:
        return None
    return (
        f"{_FOLDER}: {ranks} ranks need {mine / _MIB:,.1f} MiB each, {free / _MIB:,.1f} MiB are "
        f"free in all; give it more (docker run --shm-size, mount -o remount,size=... {_FOLDER})"
    )


def open_window(job: str, mesh: WindowMesh) -> Window:
    """Open a window between processes of this machine and user. Collective.

    The memory has no name once this returned, so it ends with its processes however they end.

    Args:
        job: 1 to 64 letters, digits or hyphens, the same on all ranks; no other running job of
            this user may have it.
        mesh: The same on all ranks, but for `rank`.

    Raises:
        NativeError: the library cannot be compiled.
        ValueError: a bad job or mesh.
        OSError: no room in /dev/shm, or ranks disagree about the mesh.
        CommunicationError: a rank did not come within the mesh's time limit.
    """
    if not isinstance(job, str) or not re.fullmatch("[A-Za-z0-9-]{1,64}", job):
        raise ValueError(f"job {job!r}: expected 1 to 64 letters, digits or hyphens")
    library = _library()
    stop, ended = ctypes.c_int32(0), threading.Event()
    opened: list[Window | BaseException] = []

    def work() -> None:
        try:
            handle = library.open(mesh, job.encode(), ctypes.byref(stop))
            opened.append(Window(library, handle, mesh))
        except BaseException as error:
            opened.append(error)
        ended.set()

    # In a thread of its own: a signal's handler could not run while the caller's waits in C.
    thread = threading.Thread(target=work, name="dmuon_open", daemon=True)
    thread.start()
    try:
        ended.wait()
    except BaseException:
        stop.value = 1
        thread.join(_STOP_SECONDS)
        raise
    thread.join()
    window = opened.pop()
    if isinstance(window, BaseException):
        raise window
    return window


def memory(window: Window) -> torch.Tensor:
    """Return the window's memory, (nbytes,) uint8, without a copy. It keeps the window."""
    raw = (ctypes.c_uint8 * window.nbytes).from_address(window.pointer)
    # torch keeps `raw`, and so the window.
    setattr(raw, "window", window)  # noqa: B010
    return torch.frombuffer(raw, dtype=torch.uint8)
