"""Line B's storage: every parameter sharded evenly by rows, as FSDP2 does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_dmuon.comm import Event
from torchtitan_dmuon.comm.streams import mark
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.layout import Segment


class ShardGroup(Group):
    """A group whose parameters are cut into one shard per column; every row holds all of them.

    Gathers and reductions go through one equal-sized staging buffer per column, as in FSDP2.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.has_copy = self.resident
        self.pieces = [self.led]
        # Every column's part of the staging buffer has the size of the first, which is largest.
        first = [s for s in self.layout.segments if s.column == 0]
        self._starts: dict[int, int] = {}
        position = 0
        for s in first:
            self._starts[s.parameter] = position
            position += s.numel
        self._stride = position

    def _gather(self, after: list[Event]) -> Event:
        return self._fill(self.buffer, after)

    @torch.no_grad()
    def gather_masters(self) -> torch.Tensor:
        whole = torch.empty(self.layout.numel, dtype=self.precision.master, device=self.device)
        if self.columns > 1:
            self._fill(whole, [mark(self.device)]).wait()
        else:
            for s in self.owned:
                whole[s.offset : s.offset + s.numel] = self.masters[s]
        return whole

    def _fill(self, buffer: torch.Tensor, after: list[Event]) -> Event:
        """Gather all shards into a buffer laid out as this group's, in the buffer's dtype."""
        assert self.communicator is not None
        staging = buffer.new_empty(self.columns * self._stride)
        shard = buffer.new_zeros(self._stride)
        masters = [(self._in_shard(shard, s), self.masters[s]) for s in self.owned]
        targets = [
            (buffer[s.offset : s.offset + s.numel], self._in_staging(staging, s))
            for s in self.layout.segments
        ]

        def first() -> None:
            _copy(masters)

        def then() -> None:
            _copy(targets)

        return self.communicator.shard_gather(self.name, staging, shard, after, first, then)

    def _reduce(self, packed: torch.Tensor, trainable: frozenset[int]) -> Event | None:
        mine = [s for s in self.owned if s.parameter in trainable]
        if self.communicator is None:
            accumulate = self._accumulator(
                [(s, packed[s.offset : s.offset + s.numel]) for s in mine]
            )
            accumulate()
            return None
        staging = packed.new_zeros(self.columns * self._stride)
        for s in self.layout.segments:
            if s.parameter in trainable:
                source = packed[s.offset : s.offset + s.numel]
                self._in_staging(staging, s).copy_(source)
        shard = packed.new_empty(self._stride)
        accumulate = self._accumulator([(s, self._in_shard(shard, s)) for s in mine])
        return self.communicator.shard_reduce(
            self.name, shard, staging, [mark(self.device)], accumulate
        )

    @torch.no_grad()
    def publish(self, piece: Sequence[Segment]) -> None:
        # Rows update their own shards; only a resident buffer apart from the masters must follow.
        if self.copies and self.precision.master != self.precision.compute:
            for s in piece:
                self.copies[s].copy_(self.masters[s])

    def wait_for_publish(self) -> None:
        return

    def _in_shard(self, shard: torch.Tensor, s: Segment) -> torch.Tensor:
        start = self._starts[s.parameter]
        return shard[start : start + s.numel]

    def _in_staging(self, staging: torch.Tensor, s: Segment) -> torch.Tensor:
        start = s.column * self._stride + self._starts[s.parameter]
        return staging[start : start + s.numel]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)
