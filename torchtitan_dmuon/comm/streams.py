"""Queues of asynchronous work with CUDA's rules of order, on GPUs and on CPUs.

A stream runs what is submitted to it in the order of submission, beside the caller. An event marks
the end of one piece of work; work on another stream, and the caller, can be ordered after it. On a
GPU these are CUDA streams and events. On a CPU a stream is a thread, so that communication really
runs beside compute; collectives release the interpreter lock while they move bytes.

The order of submission is the order of execution, so that ranks that submit the same sequence run
the same sequence, whatever their timing.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch


class CommunicationError(RuntimeError):
    """A communication operation failed or did not finish in time; says which, and for what."""


class Event(ABC):
    """The end of one piece of work."""

    @abstractmethod
    def wait(self) -> None:
        """Order what the caller does next after this event.

        On a GPU the current stream waits, on a CPU the calling thread.

        Raises:
            CommunicationError: the work failed, or (CPU) did not end in time.
        """


class Stream(ABC):
    """Runs submitted work in order, beside the caller."""

    @abstractmethod
    def submit(self, label: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Queue `work` behind what was submitted before and behind the events of `after`.

        Args:
            label: Names operation and group in errors and traces.
            work: Must not raise for reasons other than a failed operation.
            after: Events that must have happened first.
        """

    @abstractmethod
    def close(self) -> None:
        """Run what is queued, then end. Nothing may be submitted afterwards."""


class _HostEvent(Event):
    __slots__ = ("_done", "_error", "_label", "_timeout_seconds")

    def __init__(self, label: str, timeout_seconds: float) -> None:
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        # Traces show who waited, for what: only those who really did.
        if not self._done.is_set():
            with torch.profiler.record_function(f"wait for {self._label}"):
                self._done.wait(self._timeout_seconds)
        if not self._done.is_set():
            raise CommunicationError(
                f"{self._label}: not finished after {self._timeout_seconds:.0f} s"
            )
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error


class _Done(Event):
    def wait(self) -> None:
        return


class HostStream(Stream):
    """A thread that runs what it is given, one piece after the other.

    After a failure nothing more runs: what is behind it fails with the same error, because ranks no
    longer agree on what was exchanged.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        # The operation's own limit comes first and has the better message; this is the backstop.
        self._timeout_seconds = timeout_seconds + 30
        self._queue: queue.SimpleQueue[
            tuple[str, Callable[[], None], Sequence[Event], _HostEvent] | None
        ]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def submit(self, label: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        event = _HostEvent(label, self._timeout_seconds)
        self._queue.put((label, work, tuple(after), event))
        return event

    def close(self, timeout_seconds: float | None = None) -> None:
        self._queue.put(None)
        self._thread.join(self._timeout_seconds if timeout_seconds is None else timeout_seconds)


def _serve(
    work_queue: queue.SimpleQueue[
        tuple[str, Callable[[], None], Sequence[Event], _HostEvent] | None
    ],
) -> None:
    failure: BaseException | None = None
    while (item := work_queue.get()) is not None:
        label, work, after, event = item
        if failure is None:
            try:
                for earlier in after:
                    earlier.wait()
                with torch.profiler.record_function(label):
                    work()
            except BaseException as error:
                failure = CommunicationError(_named(label, str(error)))
                failure.__cause__ = error
        event.finish(failure)
        # The closure holds tensors: let them go before waiting for the next piece.
        del item, work, after, event


def _named(label: str, text: str) -> str:
    """Put the label before an error's text, whose own name of the operation it replaces."""
    name, colon, rest = text.partition(": ")
    return f"{label}: {rest}" if colon and name in label else f"{label}: {text}"


_OPEN: weakref.WeakSet[HostStream] = weakref.WeakSet()


def _drain_at_exit() -> None:
    # A rank that ends while others still receive from it would fail them: finish what is queued.
    deadline = time.monotonic() + 10
    for stream in list(_OPEN):
        stream.close(max(0.0, deadline - time.monotonic()))


atexit.register(_drain_at_exit)


class _CudaEvent(Event):
    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class CudaStream(Stream):
    """A CUDA stream. Work is enqueued at once; the device keeps the order."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)

    def submit(self, label: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        for earlier in after:
            if isinstance(earlier, _CudaEvent):
                self._stream.wait_event(earlier.event)
            else:
                with torch.cuda.stream(self._stream):
                    earlier.wait()
        with torch.cuda.stream(self._stream), torch.profiler.record_function(label):
            work()
        return _CudaEvent(self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


def open_stream(
    device: torch.device, name: str, *, timeout_seconds: float, high_priority: bool
) -> Stream:
    """Open a stream for `device`.

    Args:
        device: CPU or CUDA.
        name: Shown in stack dumps and profiles.
        timeout_seconds: Longest time that a caller waits for one piece of work (CPU).
        high_priority: Whether its kernels go before those of other streams (CUDA).
    """
    if device.type == "cuda":
        return CudaStream(device, priority=-1 if high_priority else 0)
    return HostStream(name, timeout_seconds)


def mark(device: torch.device) -> Event:
    """Return an event at the caller's present position: all that it has started on `device`."""
    if device.type == "cuda":
        return _CudaEvent(torch.cuda.current_stream(device).record_event())
    return _Done()
