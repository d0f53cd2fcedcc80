"""Opens windows over the shared memory of one machine (csrc/fabric/shm*)."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm.binding import CShmWait, Library, WindowMesh
from torchtitan_dmuon.comm.ranks import gather_objects, where
from torchtitan_dmuon.comm.streams import CommunicationError
from torchtitan_dmuon.comm.window import Window, WindowRefused
from torchtitan_dmuon.native import build

_P, _INT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
_MORE: dict[str, list[Any]] = {
    "dmuon_shm_attach": [_P],
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
_UNLOCKED_SECONDS = 0.2
_OPENING = "opening of the pool"

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


def open_window(job: str, mesh: WindowMesh, group: dist.ProcessGroup | None = None) -> Window:
    """Open a window between processes of this machine and user. Collective.

    The memory has no name once this returned, so it ends with its processes however they end.

    Args:
        job: 1 to 64 letters, digits or hyphens, the same on all ranks; no other running job of
            this user may have it.
        mesh: The same on all ranks, but for `rank`.
        group: Of all ranks, in their order. With it every rank tells the others whether there was
            room for its memory, and that it has done; without, who finds none leaves them waiting.

    Raises:
        NativeError: the library cannot be compiled.
        ValueError: a bad job or mesh.
        WindowRefused: with a group: no room in /dev/shm for one of them.
        OSError: no room in /dev/shm, or ranks disagree about the mesh.
        CommunicationError: a rank did not come within the mesh's time limit.
    """
    if not isinstance(job, str) or not re.fullmatch("[A-Za-z0-9-]{1,64}", job):
        raise ValueError(f"job {job!r}: expected 1 to 64 letters, digits or hyphens")
    library = _library()
    stop = ctypes.c_int32(0)
    handle: ctypes.c_void_p | None = None
    lack = ""
    try:
        try:
            handle = library.open(mesh, job.encode(), ctypes.byref(stop))
        except OSError as error:
            if group is None:
                raise
            lack = str(error)
        lacks = [lack] if group is None else gather_objects(group, lack, _OPENING)
        first = next((text for text in lacks if text), "")
        if first:
            raise WindowRefused(first)
    except BaseException:
        # Its file has a name until the others have found it.
        if handle is not None:
            library.call("dmuon_close", handle)
        raise
    assert handle is not None
    try:
        _attach(library, handle, stop)
    except CommunicationError as error:
        if group is None:
            raise
        raise CommunicationError(f"{where(group, _OPENING)}: {error}") from error
    if group is not None:
        _see_all_through(library, handle, group)
    return Window(library, handle, mesh)


def _see_all_through(library: Library, handle: ctypes.c_void_p, group: dist.ProcessGroup) -> None:
    """Wait until the memory of all ranks has lost its name; remove a name that a killed one left.

    A rank that was killed between the others' mapping of its memory and its own end of the opening
    could not, and the others would keep their memory, and look for nothing, as long as they live.
    """
    try:
        gather_objects(group, None, _OPENING)
    except BaseException:
        # A process that dies gives up its connections before the lock on its file.
        time.sleep(_UNLOCKED_SECONDS)
        library.call("dmuon_close", handle)
        raise


def _attach(library: Library, handle: ctypes.c_void_p, stop: ctypes.c_int32) -> None:
    """Find the other ranks' memory; give the own up if that fails."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            library.call("dmuon_shm_attach", handle)
        except BaseException as error:
            failed.append(error)
        ended.set()

    # In a thread of its own: a signal's handler could not run while the caller's waits in C.
    thread = threading.Thread(target=work, name="dmuon_open", daemon=True)
    thread.start()
    try:
        ended.wait()
    except BaseException:
        stop.value = 1
        thread.join(_STOP_SECONDS)
        if not thread.is_alive():
            library.call("dmuon_close", handle)
        raise
    thread.join()
    if failed:
        library.call("dmuon_close", handle)
        raise failed[0]


def memory(window: Window) -> torch.Tensor:
    """Return the window's memory, (nbytes,) uint8, without a copy. It keeps the window."""
    raw = (ctypes.c_uint8 * window.nbytes).from_address(window.pointer)
    # torch keeps `raw`, and so the window.
    setattr(raw, "window", window)  # noqa: B010
    return torch.frombuffer(raw, dtype=torch.uint8)
