"""Windows: a communicator's memory, its groups and publishes, over any fabric's library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from torchtitan_dmuon.comm.binding import CMemory, CShmWait, CStuck, Library, WindowMesh
from torchtitan_dmuon.comm.streams import CommunicationError
from torchtitan_dmuon.native.segments import Segment, extent, to_c


class WindowRefused(OSError):
    """No window can be opened, for a reason that all its ranks agree on: all of them raise this."""


class Operation(IntEnum):
    """Numbers of the operations that groups are made for."""

    ALL_GATHER_V = 0
    REDUCE_SCATTER_V = 1


PUBLISH = 2
"""Number of the publish, whose tables are no groups."""

_DTYPES = {torch.bfloat16: 0, torch.float32: 1}


@dataclass(frozen=True, slots=True)
class StuckReport:
    """Where a call stood when a wait took too long.

    Attributes:
        wait: nothing, entry, arrival, acknowledgement, put, exit or release.
        queue: Owner node of the data, -1: none.
        peer: Node that was awaited (entry and exit: rail of the own node), -1: unknown.
        thread_group: Which of the call's.
        chunk: Number in the queue's stream on this rail.
        number: Of the call among its operation's calls, from 1; of a publish the step.
    """

    wait: str
    queue: int
    peer: int
    thread_group: int
    chunk: int
    number: int


_WAITS = ("nothing", "entry", "arrival", "acknowledgement", "put", "exit", "release", "flag")


class Window:
    """A communicator's memory and groups, through one library.

    Attributes:
        mesh: As it was opened.
        pointer: Address of the memory for buffers.
        nbytes: Its size.
        ring_bytes: Of this rank's rings, which lie beside it.
        control_bytes: Of this rank's signals, counters and flags.
    """

    def __init__(self, library: Library, handle: ctypes.c_void_p, mesh: WindowMesh) -> None:
        self.mesh = mesh
        self._library = library
        self._handle = handle
        memory = CMemory()
        library.call("dmuon_memory_of", handle, ctypes.byref(memory))
        self.pointer, self.nbytes = int(memory.user or 0), int(memory.user_bytes)
        self.ring_bytes, self.control_bytes = int(memory.ring_bytes), int(memory.control_bytes)
        # Without a user of the memory nobody can be hurt by its end. Not at the interpreter's exit:
        # a thread may still be inside a call, and the system takes the memory back anyway.
        self._close = weakref.finalize(self, library.call, "dmuon_close", handle)
        self._close.atexit = False

    def create_group(
        self,
        operation: Operation,
        segments: Sequence[Segment],
        *,
        label: str,
        dtype: torch.dtype,
        buffer_bytes: int | None = None,
        home_bytes: int | None = None,
    ) -> WindowGroup:
        """Freeze a table; every rank does it alike. Nothing is sent.

        Args:
            operation: What calls of the group do.
            segments: The table.
            label: Names the group in errors.
            dtype: Of a reduction's elements: bfloat16 or float32. A gather moves bytes of any.
            buffer_bytes: Size of the group's buffer; None: what the segments take.
            home_bytes: Reduction: size of the owners' reduced buffers; None: as above.

        Raises:
            ValueError: a segment is misaligned, overlaps another, lies outside or has an owner
                outside the mesh, or there are too many; the text names it.
        """
        encoded = _encoded(label)
        number = _DTYPES.get(dtype)
        if number is None and operation is Operation.REDUCE_SCATTER_V:
            raise ValueError(f"{label}: cannot reduce {dtype}, expected bfloat16 or float32")
        try:
            table = to_c(segments)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        if buffer_bytes is None:
            buffer_bytes = extent(segments)
        if home_bytes is None:
            reduces = operation is Operation.REDUCE_SCATTER_V
            home_bytes = extent(segments, homes=True) if reduces else 0
        handle = ctypes.c_void_p()
        self._library.call(
            "dmuon_group_create",
            self._handle,
            encoded,
            int(operation),
            number or 0,
            table,
            len(segments),
            buffer_bytes,
            home_bytes,
            ctypes.byref(handle),
        )
        return WindowGroup(self, self._library, handle, dtype, buffer_bytes, home_bytes)

    def ask(self, function: str, *arguments: Any) -> None:
        """Call a function that only this fabric's library has, on the communicator."""
        self._library.call(function, self._handle, *arguments)

    def create_publish(
        self,
        tasks: Sequence[Segment],
        *,
        label: str,
        names: Sequence[str],
        buffer: int,
        buffer_bytes: int,
    ) -> WindowPublish:
        """Freeze a publish's table; every rank of the rail does it alike. Nothing is sent.

        Args:
            tasks: `node` is the owner's row, `rail` this rank's; one owner's in the order in which
                it releases them.
            label: Names the publish in errors.
            names: Of the tasks, for errors.
            buffer: Window offset of what the tasks lie in.
            buffer_bytes: Its size.

        Raises:
            ValueError: a task is empty, misaligned, overlaps another, lies outside or has an owner
                outside the rail, or there are too many; the text names it.
        """
        encoded = _encoded(label)
        if len(names) != len(tasks):
            raise ValueError(f"publish of {label}: {len(names)} names for {len(tasks)} tasks")
        try:
            table = to_c(tasks, "task")
        except ValueError as error:
            raise ValueError(f"publish of {label}: {error}") from None
        handle = ctypes.c_void_p()
        self._library.call(
            "dmuon_publish_create",
            self._handle,
            encoded,
            (ctypes.c_char_p * len(names))(*map(_encoded, names)),
            table,
            len(tasks),
            buffer,
            buffer_bytes,
            ctypes.byref(handle),
        )
        return WindowPublish(self, self._library, handle)

    def check(self, operation: int) -> None:
        """Raise CommunicationError if a call of the operation, or `PUBLISH`, failed."""
        report = ctypes.byref(CStuck())
        self._library.call("dmuon_stuck", self._handle, int(operation), report)

    def stuck(self, operation: int) -> StuckReport | None:
        """Return where the operation's failed call stood; None if none failed."""
        report = CStuck()
        try:
            self._library.call("dmuon_stuck", self._handle, int(operation), ctypes.byref(report))
        except CommunicationError:
            return StuckReport(
                _WAITS[report.wait],
                report.queue,
                report.peer,
                report.group,
                report.chunk,
                report.number,
            )
        return None


class WindowGroup:
    """A frozen table. Keeps its window.

    Attributes:
        window: Where its buffers lie.
        dtype: Of a reduction's elements.
        buffer_bytes: Size of its buffer.
        home_bytes: Size of the owners' reduced buffers.
    """

    def __init__(
        self,
        window: Window,
        library: Library,
        handle: ctypes.c_void_p,
        dtype: torch.dtype,
        buffer_bytes: int,
        home_bytes: int,
    ) -> None:
        self.window = window
        self.dtype = dtype
        self.buffer_bytes = buffer_bytes
        self.home_bytes = home_bytes
        self._library = library
        self._handle = handle
        _own(self, "dmuon_group_destroy", library, handle, window)

    def check(self, buffer: int, home: int = 0) -> None:
        """Raise ValueError if `call` would, for these places."""
        self._library.call("dmuon_check", self._handle, buffer, home)

    def call(self, buffer: int, home: int = 0, stream: int | None = None) -> None:
        """Run the operation on buffers at these window offsets, the same on every rank.

        Args:
            buffer: Of the group's buffer, bytes, a multiple of 16.
            home: Reduction: of the owners' reduced buffer.
            stream: gin: the CUDA stream's handle; the call returns at once. shm: None; the call
                runs to the end in the calling thread. If a signal's handler raises there, the
                call ends with what it raised, and later calls fail.

        Raises:
            ValueError: an offset outside the window, or buffers that overlap.
            CommunicationError: a rank did not come in time, or (shm) ranks disagree about the call;
                later calls fail too.
        """
        if stream is not None:
            self._library.call("dmuon_call", self._handle, buffer, home, stream)
            return
        paused = ctypes.c_int32(0)
        try:
            # Handlers of signals run when C returns, before its answer is looked at: only C's own
            # word says then whether the call has paused.
            self._go_on(buffer, home, paused)
            while paused.value:
                self._go_on(buffer, home, paused)
        except BaseException:
            if paused.value:
                self._library.call("dmuon_shm_give_up", self._handle)
            raise

    def _go_on(self, buffer: int, home: int, paused: ctypes.c_int32) -> None:
        self._library.call("dmuon_shm_call", self._handle, buffer, home, ctypes.byref(paused))


class WindowPublish:
    """A frozen publish. Keeps its window.

    Args:
        window: Where its buffer lies.
        library: The window's.
        handle: What the library made.
    """

    def __init__(self, window: Window, library: Library, handle: ctypes.c_void_p) -> None:
        self.window = window
        self._library = library
        self._handle = handle
        _own(self, "dmuon_publish_destroy", library, handle, window)

    def run(self, step: int, stream: int | None = None) -> None:
        """Move the tasks of a step; `stream` as for `WindowGroup.call`.

        Raises:
            ValueError: not the step behind the last run's.
            CommunicationError: nothing went on for too long; later runs fail too.
        """
        self._library.call("dmuon_publish_run", self._handle, step, stream)

    def release(self, task: int, stream: int | None = None) -> None:
        """A task of this rank is final in its copy for the next step.

        Raises:
            ValueError: another rank's task, not the table's order, or released before the last
                step's run ended.
            CommunicationError: a run failed.
        """
        if task < 0:
            raise ValueError(f"task {task}: expected 0 or more")
        self._library.call("dmuon_publish_release", self._handle, task, stream)

    def wait(self, first: int, count: int, step: int, stream: int | None = None) -> None:
        """Wait for tasks first .. first + count - 1 of a step; `stream` as for `WindowGroup.call`.

        Raises:
            ValueError: no such tasks.
            CommunicationError: they did not come in time, or a run failed.
        """
        if first < 0 or count < 0 or step < 0:
            raise ValueError(f"tasks {first} to {first + count} of step {step}: expected 0 or more")
        if stream is not None:
            self._library.call("dmuon_publish_wait", self._handle, first, count, step, stream)
            return
        # Handlers of signals run when C returns; what they raise ends the wait.
        state = CShmWait()
        arguments = (self._handle, first, count, step, ctypes.byref(state))
        self._library.call("dmuon_shm_publish_wait", *arguments)
        while state.paused:
            self._library.call("dmuon_shm_publish_wait", *arguments)

    def stop(self, *, at_once: bool = False) -> None:
        """No more releases will come: a run that waits for one ends; `at_once`: any run does."""
        self._library.call("dmuon_publish_stop", self._handle, int(at_once))


def _encoded(text: str) -> bytes:
    """Return a label for C, which ends it at the first NUL."""
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"label {text!r}: expected text without NUL")
    return text.encode()


def _own(
    owner: object, destroy: str, library: Library, handle: ctypes.c_void_p, window: Window
) -> None:
    """Let `owner`'s end give its handle up. Not at the interpreter's exit, as for a window."""
    finalizer = weakref.finalize(owner, _destroy, destroy, library, handle, window)
    finalizer.atexit = False


def _destroy(name: str, library: Library, handle: ctypes.c_void_p, window: Window) -> None:
    # The window is an argument so that it outlives what lies in it.
    library.call(name, handle)
    del window
