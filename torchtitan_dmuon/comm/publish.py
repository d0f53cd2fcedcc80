"""The persistent publish: owners' new weights to the other rows' copies, task by task.

On every rank of a rail, with the same tasks:

    publish = operators.publish(tasks, copies, label="weights", names=names)
    for step in range(1, steps + 1):
        ended = publish.start(step)         # runs beside everything, until all tasks have moved
        for task in my_tasks:               # in the order of the table
            ...update, and write the own copy of the task...
            publish.release(task)
        publish.wait(first, stop, step)     # before the node gathers tasks first .. stop - 1
        ...gather, compute...
        ended.wait()
        ...tell the other ranks...          # the step rule

On a GPU the call is a kernel that runs until all tasks are released, so between `start` and the
last `release` nothing may wait for the whole device: no `torch.cuda.synchronize`, no memory given
back to CUDA, and, because CUDA loads kernels at their first launch, no kernel that has not run
before. The first steps of a job therefore publish by other means.

The step rule, which callers keep: before any rank releases a task of step n + 1, the call of step n
has ended on every rank of the rail, and so has all that reads those copies. Writing a task, before
its release, asks for this on the own rank only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_dmuon.comm.streams import CommunicationError, Event, open_stream
from torchtitan_dmuon.comm.window import WindowPublish

_DAY = 24 * 3600.0


class Publish:
    """A frozen table of tasks, published once per step. Made by `Operators.publish`.

    Args:
        publish: The table in the window.
        device: Of the window's memory.
        label: Names the publish in errors.

    Attributes:
        label: As given.
    """

    def __init__(self, publish: WindowPublish, device: torch.device, label: str) -> None:
        self.label = label
        self._publish = publish
        self._device = device
        self._steps = 0
        self._closed = False
        # A call's own limit counts from its last progress, and updates may take any time between
        # releases: the stream's limit is only there to be one.
        self._stream = open_stream(
            device, "dmuon_publish", timeout_seconds=_DAY, high_priority=True
        )

    def start(self, step: int, after: Sequence[Event] = ()) -> Event:
        """Start the call of a step: one thread, or on a GPU one block, until all tasks have moved.

        Args:
            step: 1 for the first call, and 1 more for each next one. All ranks of the rail make
                the calls of all their publishes in the same order.
            after: Events that come first. On a GPU the call is not ordered behind the current
                stream: releases order it.

        Returns:
            The end of the call on this rank: its own tasks are in the next row's copy, all others
            are here and passed on, and the call does not read its copies any more. Waiting for it
            raises CommunicationError if nothing went on for the window's timeout, or the publish
            was closed.

        Raises:
            ValueError: not the step behind the last one that was started.
        """
        if step != self._steps + 1:
            raise ValueError(f"publish of {self.label}: step {step!r}, expected {self._steps + 1}")
        self._steps = step
        return self._stream.submit(
            f"publish of {self.label}, step {step}",
            lambda: self._publish.run(step, self._current()),
            after,
        )

    def release(self, task: int) -> None:
        """Task `task`, of this rank, is final in its own copy for the next step.

        Once per step, in the table's order; before or after the step's call is started. On a CPU
        the calling thread has written the copy, on a GPU the current stream has. Returns at once.

        Raises:
            ValueError: another rank's task, not the table's order, or (CPU) the last step's call
                has not ended on this rank.
            CommunicationError: a call of this publish failed, or it is closed.
        """
        if self._closed:
            raise CommunicationError(f"publish of {self.label}: it is closed")
        self._publish.release(task, self._current())

    def wait(self, first: int, stop: int, step: int, *, name: str | None = None) -> None:
        """Wait until tasks first .. stop - 1 of step `step` are in this rank's copy.

        On a CPU the calling thread sleeps, without the interpreter's lock; the window's timeout
        counts from the last task that arrived. On a GPU the current stream waits.

        Args:
            first, stop: Tasks.
            step: As given to `start`.
            name: Of the tasks in traces; None: the publish's label.

        Raises:
            ValueError: no such tasks.
            CommunicationError: they did not come in time (the text names task, source node and
                step), or a call failed. On a GPU a later call, or `Operators.check`, says so.
        """
        # The name is the traces': docs/timeline.md.
        with torch.profiler.record_function(f"wait for publish of {name or self.label}"):
            self._publish.wait(first, stop - first, step, self._current())

    def stop(self, *, at_once: bool = False) -> None:
        """No more releases of this rank will come: a call that waits for one ends with an error.

        Args:
            at_once: Releases of other ranks will not come either: whatever a call waits for.
        """
        self._publish.stop(at_once=at_once)

    def close(self) -> None:
        """Let a started call end, then end the stream. No more releases will come (`stop`)."""
        self._closed = True
        self.stop()
        self._stream.close()

    def _current(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.current_stream(self._device).cuda_stream)
