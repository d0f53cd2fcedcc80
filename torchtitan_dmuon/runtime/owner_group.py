"""Line C's storage: whole matrices at their owners, and a copy per row to gather from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.comm.streams import mark
from torchtitan_dmuon.runtime.group import Group, part
from torchtitan_dmuon.runtime.layout import Segment, are_neighbours


@dataclass(frozen=True, slots=True)
class OwnerWindow:
    """A group's part of the owner window: where its owners get their sums (paper C.1).

    Attributes:
        trainable: Parameters that it has room for.
        memory: The window, of the reduction's dtype, which is the masters'.
        starts: First element of each run in it, at the run's owner.
        parts: The segments that this rank owns, 1-D.
    """

    trainable: frozenset[int]
    memory: torch.Tensor
    starts: tuple[int, ...]
    parts: dict[Segment, torch.Tensor]


class OwnerGroup(Group):
    """A group whose every segment has one owner in the whole mesh (line C)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        # Paper section 4.4: one more resident copy per node, as soon as there are several.
        self.has_copy = self.rows > 1 or self.resident
        self._publishing: list[Event] = []
        self.pieces = pieces_of(self.led)
        # Line D: where sums go directly; and whether one came since gradients were cleared.
        self.home: OwnerWindow | None = None
        self._summed = False

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
            stretch = join([part(whole, s.offset, s.numel) for s in piece])
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
        nothing = torch.empty(0, dtype=packed.dtype, device=packed.device)
        home = self.home
        # The same on every rank: who sums writes into the owner's memory.
        direct = self._sums_into_window(trainable) and self.pool.contains(packed)
        self._summed = True
        if home is not None and direct:
            sources = [(s, home.parts[s] if s.numel else nothing) for s in mine]
        else:
            sources = [(s, part(packed, s.offset, s.numel)) for s in mine]
        accumulate = self._accumulator(sources)
        if self.communicator is None:
            accumulate()
            return None
        runs = self.layout.runs(trainable, columns_only=False)
        after = [mark(self.device)]
        if home is not None and direct:
            return self.communicator.reduce(
                self.name, packed, runs, after, accumulate, reduced=home.memory, homes=home.starts
            )
        return self.communicator.reduce(self.name, packed, runs, after, accumulate)

    def _sums_into_window(self, trainable: frozenset[int]) -> bool:
        """Whether the next sum can go to the owner window: the first since gradients were cleared,
        of the parameters that it was planned for."""
        return self.home is not None and self.home.trainable == trainable and not self._summed

    @property
    def overwrites(self) -> bool:
        return super().overwrites or not self._sums_into_window(frozenset(self.trainable()))

    def _gradient_of(self, s: Segment, source: torch.Tensor) -> torch.Tensor:
        # What was summed into the owner window is the gradient, where it lies.
        if self.home is not None and self.home.parts.get(s) is source:
            return source
        return super()._gradient_of(s, source)

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self._summed = False

    @torch.no_grad()
    def publish(self, piece: Sequence[Segment]) -> None:
        if not self.copies:
            return
        if piece[0].row == self.row and self.precision.master != self.precision.compute:
            for s in piece:
                self.copies[s].copy_(self.masters[s])
        if self.rows == 1:
            return
        label = self.label_of(piece)
        joined = join([self.copies[s] for s in piece])
        if self.publisher is not None:
            if joined.numel() == 0:
                return
            moved = 0 if piece[0].row == self.row else joined.numel() * joined.element_size()
            self._publishing.append(self.publisher.hand_on(moved))
        else:
            assert self.communicator is not None
            self._publishing.append(
                self.communicator.publish(label, joined, piece[0].row, [mark(self.device)])
            )

    def label_of(self, piece: Sequence[Segment]) -> str:
        """Return a piece's name in errors and counts."""
        return f"{self.name}:{self.parameters[piece[0].parameter].name}"

    def move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        before = self.device
        super().move(convert)
        if self.device != before:
            # They belong to the pool of the other device.
            self.publisher = self.home = None

    def wait_for_publish(self) -> None:
        for event in self._publishing:
            event.wait()
        self._publishing = []


def pieces_of(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Cut a column's segments into what is published as one: same unit, side by side."""
    pieces: list[list[Segment]] = []
    for s in segments:
        last = pieces[-1][-1] if pieces else None
        near = last and are_neighbours(last.offset + last.numel, s)
        if last and near and last.unit == s.unit and last.row == s.row:
            pieces[-1].append(s)
        else:
            pieces.append([s])
    return pieces


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one view over parts that lie side by side in one storage, gaps included."""
    first, last = parts[0], parts[-1]
    end = last.storage_offset() + last.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
