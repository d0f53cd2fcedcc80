"""The persistent publish of one model: owners' copies to the other rows' copies (paper 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.publish import Publish


class Publisher:
    """Hands pieces on in rounds: each holds every piece once, in the order of the table.

    Args:
        communicator: Of the model.
        publish: The frozen table.
        tasks: Of each piece, its name and whether it is released here.
    """

    def __init__(
        self,
        communicator: OperatorsCommunicator,
        publish: Publish,
        tasks: Sequence[tuple[str, bool]],
    ) -> None:
        self._communicator = communicator
        self._publish = publish
        self._tasks = list(tasks)
        self._next = 0
        self._round = 0
        self._ended: Event | None = None

    def hand_on(self, moved_bytes: int) -> Event:
        """The next piece of the round is final at its owner: send it; every rank of the column.

        Args:
            moved_bytes: Of the piece, where it is received; 0 at its owner.

        Returns:
            The piece's arrival in this rank's copy.
        """
        if self._next == 0:
            self.finish()
            self._round += 1
            self._ended = self._publish.start(self._round)
            self._communicator.operated["publish"] += 1
        task, self._next = self._next, (self._next + 1) % len(self._tasks)
        name, mine = self._tasks[task]
        self._communicator.traffic.add("publish", name, moved_bytes)
        if mine:
            self._publish.release(task)
        return _Arrival(self._communicator, self._publish, task, self._round, name)

    def finish(self) -> None:
        """Wait for the end of the round on this rank: nothing reads or writes its copies any more.

        Raises:
            CommunicationError: it did not end in time.
        """
        if self._ended is not None:
            with self._communicator.publishing("weights"):
                self._ended.wait()
            self._ended = None

    def abandon(self) -> None:
        """Have a round that was begun and will not be completed end with an error, here and now."""
        if self._next != 0:
            self._publish.stop(at_once=True)


class _Arrival(Event):
    """A task of one round is in this rank's copy."""

    __slots__ = ("_communicator", "_name", "_publish", "_round", "_task")

    def __init__(
        self,
        communicator: OperatorsCommunicator,
        publish: Publish,
        task: int,
        number: int,
        name: str,
    ) -> None:
        self._communicator = communicator
        self._publish = publish
        self._task = task
        self._round = number
        self._name = name

    def wait(self) -> None:
        with self._communicator.publishing(self._name):
            self._publish.wait(self._task, self._task + 1, self._round, name=self._name)
