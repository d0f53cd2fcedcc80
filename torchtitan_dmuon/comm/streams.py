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
import math
import multiprocessing
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize

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
        """Run what is queued, then end. What is submitted afterwards is refused."""


class _Progress:
    """How a stream's thread gets on.

    Attributes:
        limit: Seconds that one piece of work may take.
        since: When the thread last began or ended something; infinite: it waits for another stream,
            which has a limit of its own.
        failure: What ended the stream's work, if anything did.
        told: Whether somebody who waited was told of it.
    """

    __slots__ = ("failure", "limit", "since", "told")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since = time.monotonic()
        self.failure: CommunicationError | None = None
        self.told = False

    def left(self, submitted: float) -> float:
        """Seconds that may pass before who waits for a piece submitted then looks again; 0: up."""
        left = max(self.since, submitted) + self.limit - time.monotonic()
        return max(0.0, min(left, _LOOK_SECONDS))


class _HostEvent(Event):
    __slots__ = ("_done", "_error", "_label", "_progress", "_submitted")

    def __init__(self, label: str, progress: _Progress) -> None:
        self._label = label
        self._progress = progress
        self._submitted = time.monotonic()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        # Traces show who waited, for what: only those who really did.
        if not self._done.is_set():
            with torch.profiler.record_function(f"wait for {self._label}"):
                self._wait()
        if self._error is not None:
            self._progress.told = True
            raise CommunicationError(str(self._error)) from self._error

    def _wait(self) -> None:
        # The limit is that of a piece of work: those before this one have each their own.
        while not self._done.wait(self._progress.left(self._submitted)):
            if self._progress.left(self._submitted) == 0.0:
                raise CommunicationError(
                    f"{self._label}: not finished after {self._progress.limit:.0f} s"
                )


class _Done(Event):
    def wait(self) -> None:
        return


class HostStream(Stream):
    """A thread that runs what it is given, one piece after the other.

    After a failure nothing more runs: what is behind it fails with the same error, because ranks no
    longer agree on what was exchanged. The thread ends with the stream, closed or dropped, once
    what was submitted has run.

    Args:
        name: Of the thread.
        timeout_seconds: Limit of the operations that run here.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        # The operation's own limit comes first and has the better message; this is the backstop.
        self._progress = _Progress(timeout_seconds + 30)
        self._process = os.getpid()
        self._queue: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, self._progress), name=name, daemon=True
        )
        _drain_before_the_end()
        _SERVING.add(self._thread)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False
        _OPEN.add(self)

    def submit(self, label: str, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Queue a piece of work; see `Stream.submit`.

        Raises:
            CommunicationError: the stream is closed, or another process opened it.
        """
        if not self._end.alive:
            raise CommunicationError(f"{label}: its stream is closed")
        if os.getpid() != self._process:
            raise CommunicationError(
                f"{label}: its stream belongs to process {self._process}, which forked this one"
            )
        event = _HostEvent(label, self._progress)
        self._queue.put((label, work, tuple(after), event))
        return event

    def close(self, timeout_seconds: float | None = None) -> None:
        """Run what is queued, then end.

        Args:
            timeout_seconds: Longest wait for all of it; None: as long as each piece keeps to its
                limit.
        """
        self._end()
        if os.getpid() != self._process:
            return
        if timeout_seconds is not None:
            self._thread.join(timeout_seconds)
            return
        begin = time.monotonic()
        while self._thread.is_alive() and (left := self._progress.left(begin)) > 0:
            self._thread.join(left)

    @property
    def failure(self) -> CommunicationError | None:
        """What ended this stream's work; None: nothing did."""
        return self._progress.failure

    @property
    def told(self) -> bool:
        """Whether somebody who waited was told of the failure."""
        return self._progress.told


_Queue = queue.SimpleQueue[tuple[str, Callable[[], None], Sequence[Event], _HostEvent] | None]
_LOOK_SECONDS = 5.0


def _serve(work_queue: _Queue, progress: _Progress) -> None:
    while (item := work_queue.get()) is not None:
        label, work, after, event = item
        if progress.failure is None:
            try:
                progress.since = math.inf
                for earlier in after:
                    earlier.wait()
                progress.since = time.monotonic()
                with torch.profiler.record_function(label):
                    work()
            except BaseException as error:
                failure = CommunicationError(_named(label, str(error)))
                failure.__cause__ = error
                progress.failure = failure
        progress.since = time.monotonic()
        event.finish(progress.failure)
        # The closure holds tensors: let them go before waiting for the next piece.
        del item, work, after, event
    _SERVING.discard(threading.current_thread())


def _named(label: str, text: str) -> str:
    """Put the label before an error's text, whose own name of the operation it replaces."""
    name, colon, rest = text.partition(": ")
    return f"{label}: {rest}" if colon and name in label else f"{label}: {text}"


_OPEN: weakref.WeakSet[HostStream] = weakref.WeakSet()
_SERVING: set[threading.Thread] = set()
"""Threads of streams, of dropped ones too until what was submitted to them has run."""
_DRAINED: set[int] = set()
"""Processes that drain at their end."""


def _drain_before_the_end() -> None:
    """Have this process finish what is queued before it ends, once."""
    if os.getpid() in _DRAINED:
        return
    _DRAINED.add(os.getpid())
    if multiprocessing.parent_process() is None:
        atexit.register(_drain)
    else:  # a child of multiprocessing ends without what atexit has
        Finalize(None, _drain, exitpriority=100)


def _drain() -> None:
    # A rank that ends while others still receive from it would fail them: finish what is queued.
    deadline = time.monotonic() + 10
    for stream in list(_OPEN):
        stream.close(max(0.0, deadline - time.monotonic()))
    for thread in list(_SERVING):
        thread.join(max(0.0, deadline - time.monotonic()))


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
