"""Line C's storage: whole matrices at their owners, and a copy per row to gather from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.comm.streams import mark
from torchtitan_dmuon.runtime.group import Group, part
from torchtitan_dmuon.runtime.layout import Segment, are_neighbours


class OwnerGroup(Group):
    """A group whose every segment has one owner in the whole mesh (line C)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        # Paper section 4.4: one more resident copy per node, as soon as there are several.
        self.has_copy = self.rows > 1 or self.resident
        self._publishing: list[Event] = []
        self.pieces = self._cut()

    def _cut(self) -> list[list[Segment]]:
        """Cut the led segments into what is published as one: same unit, side by side."""
        pieces: list[list[Segment]] = []
        for s in self.led:
            last = pieces[-1][-1] if pieces else None
            near = last and are_neighbours(last.offset + last.numel, s)
            if last and near and last.unit == s.unit and last.row == s.row:
                pieces[-1].append(s)
            else:
                pieces.append([s])
        return pieces

    def _gather(self, after: list[Event]) -> Event:
        assert self.communicator is not None
        runs = self.layout.runs(self._everything, columns_only=True)
        sources = [
            (
                part(self.buffer, s.offset, s.numel),
                self.copies[s] if self.copies else self.masters[s],
            )
            for s in self.led
        ]

        def first() -> None:
            with torch.no_grad():
                for target, source in sources:
                    target.copy_(source)

        # The only place that waits for a publish: the row's next gather of what it delivers.
        after = [*after, *self._publishing]
        self._publishing = []
        return self.communicator.gather(self.name, self.buffer, runs, after, first)

    @torch.no_grad()
    def gather_masters(self) -> torch.Tensor:
        whole = torch.empty(self.layout.numel, dtype=self.precision.master, device=self.device)
        for s in self.owned:
            part(whole, s.offset, s.numel).copy_(self.masters[s])
        if self.communicator is None:
            return whole
        events = []
        for piece in self.pieces if self.rows > 1 else ():
            stretch = _join([part(whole, s.offset, s.numel) for s in piece])
            after = [mark(self.device)]
            events.append(self.communicator.publish(self.name, stretch, piece[0].row, after))
        for event in events:
            event.wait()
        if self.columns > 1:
            runs = self.layout.runs(self._everything, columns_only=True)
            after = [mark(self.device)]
            self.communicator.gather(self.name, whole, runs, after, lambda: None).wait()
        return whole

    def _reduce(self, packed: torch.Tensor, trainable: frozenset[int]) -> Event | None:
        mine = [s for s in self.owned if s.parameter in trainable]
        accumulate = self._accumulator([(s, part(packed, s.offset, s.numel)) for s in mine])
        if self.communicator is None:
            accumulate()
            return None
        runs = self.layout.runs(trainable, columns_only=False)
        return self.communicator.reduce(self.name, packed, runs, [mark(self.device)], accumulate)

    @torch.no_grad()
    def publish(self, piece: Sequence[Segment]) -> None:
        if not self.copies:
            return
        if piece[0].row == self.row and self.precision.master != self.precision.compute:
            for s in piece:
                self.copies[s].copy_(self.masters[s])
        if self.rows > 1:
            assert self.communicator is not None
            label = f"{self.name}:{self.parameters[piece[0].parameter].name}"
            joined = _join([self.copies[s] for s in piece])
            self._publishing.append(
                self.communicator.publish(label, joined, piece[0].row, [mark(self.device)])
            )

    def wait_for_publish(self) -> None:
        for event in self._publishing:
            event.wait()
        self._publishing = []


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one view over parts that lie side by side in one storage, gaps included."""
    first, last = parts[0], parts[-1]
    end = last.storage_offset() + last.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
