"""Runs of C code that tell how far they are, and that Ctrl-C ends."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.25


class Watch(ctypes.Structure):
    """`dmuon::sim::Watch` of csrc/fabric/sim_watch.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("stop", "done", "all")]

    def share(self) -> float:
        """Return how much of the run is done, 0 to 1."""
        return self.done / self.all if self.all else 0.0


def watched(work: Callable[[Watch], Result], progress: Callable[[float], None] | None) -> Result:
    """Return what `work` returns; it runs in a thread of its own.

    Args:
        work: Hands its `Watch` to a C function, which ends soon after `stop` is set.
        progress: Called in this thread now and then, and at the end, with the share that is done.

    Raises:
        What `work` or `progress` raises; and KeyboardInterrupt, once the C function has ended.
    """
    watch = Watch()
    results: list[Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work(watch))
        except BaseException as e:  # raised again by who waits
            errors.append(e)

    # A second Ctrl-C ends the wait below too, and must not leave a thread that Python waits for.
    thread = threading.Thread(target=target, name="dmuon-simulate", daemon=True)
    try:
        thread.start()
        running = True
        while running:
            thread.join(POLL_SECONDS)
            # Asked before the share is read: after the end that is the whole.
            running = thread.is_alive()
            if progress:
                progress(watch.share())
    except BaseException:
        watch.stop = 1
        if thread.is_alive():
            thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
