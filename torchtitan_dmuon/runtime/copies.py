"""Where the rows' copies lie in the pool, and what of them is published (paper C.2).

Ranks of one column have the same copies; the space is as large as the heaviest column needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchtitan_dmuon.comm.communicator import Run
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator, movable
from torchtitan_dmuon.native.segments import Segment as Task
from torchtitan_dmuon.native.segments import aligned
from torchtitan_dmuon.runtime.layout import Segment, align
from torchtitan_dmuon.runtime.owner_group import OwnerGroup, join, pieces_of
from torchtitan_dmuon.runtime.pool import ALIGNMENT
from torchtitan_dmuon.runtime.publisher import Publisher
from torchtitan_dmuon.runtime.signatures import move_storage


class Copies:
    """The copies of all groups, planned for every column.

    Args:
        groups: In the order in which they are published.
        communicator: Of the model.
    """

    def __init__(self, groups: Sequence[OwnerGroup], communicator: OperatorsCommunicator) -> None:
        self._communicator = communicator
        self._groups = [group for group in groups if group.rows > 1]
        columns = range(communicator.mesh.columns)
        self._starts: dict[OwnerGroup, int] = {}
        self.nbytes = 0
        for column in columns:
            at = 0
            for group in self._groups:
                if column == communicator.column:
                    self._starts[group] = at
                size = group.precision.compute.itemsize
                numel = _extent(group, column)
                at += -(-numel * size // ALIGNMENT) * ALIGNMENT
            self.nbytes = max(self.nbytes, at)
        publishable = communicator.can_publish and all(
            _are_tasks(group, column) for group in self._groups for column in columns
        )
        if not publishable:
            self._groups, self.nbytes = [], 0

    @property
    def published(self) -> bool:
        """Whether there are any, and the publish can move them."""
        return bool(self._groups)

    def install(self, memory: torch.Tensor) -> None:
        """Move all copies into memory (nbytes,) uint8 of the window, and publish from there."""
        if not self._groups:
            return
        tasks, names = [], []
        for group in self._groups:
            start = self._starts[group]
            size = group.precision.compute.itemsize
            flat = group.buffer if group.resident else next(iter(group.copies.values()), None)
            if flat is None:
                continue
            end = start + _extent(group, group.column) * size
            move_storage(flat, memory[start:end], copy=True)
            for piece in group.pieces:
                joined = join([group.copies[s] for s in piece])
                if joined.numel() == 0:
                    continue
                offset = joined.data_ptr() - memory.data_ptr()
                rail = self._communicator.rail
                tasks.append(Task(offset, joined.numel() * size, piece[0].row, rail))
                names.append((group.label_of(piece), piece[0].row == group.row))
        operators = self._communicator.operators
        assert operators is not None
        if not tasks:
            return
        publish = operators.publish(
            tasks, memory, label="weights", names=[name for name, _ in names]
        )
        publisher = Publisher(self._communicator, publish, names)
        for group in self._groups:
            group.publisher = publisher


def _led(group: OwnerGroup, column: int) -> list[Segment]:
    return [s for s in group.layout.segments if s.column == column]


def _positions(group: OwnerGroup, column: int) -> Mapping[Segment, int]:
    """Return the first element of each segment among a column's copies; see `Group.allocate`."""
    led = _led(group, column)
    if group.resident:
        return {s: s.offset for s in led}
    starts, at = {}, 0
    for s in led:
        starts[s] = at
        at += align(s.numel)
    return starts


def _extent(group: OwnerGroup, column: int) -> int:
    """Return the elements of a column's copies."""
    if group.resident:
        return group.layout.numel
    return sum(align(s.numel) for s in _led(group, column))


def _are_tasks(group: OwnerGroup, column: int) -> bool:
    """Whether the publish can move a column's pieces where they lie."""
    starts = _positions(group, column)
    runs = []
    for piece in pieces_of(_led(group, column)):
        begin, last = starts[piece[0]], piece[-1]
        numel = starts[last] + last.numel - begin
        if numel:
            runs.append(Run(begin, numel, piece[0].row, column))
    size = group.precision.compute.itemsize
    return movable(runs, size, aligned(_extent(group, column) * size) // size)
