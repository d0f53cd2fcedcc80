"""What the runtime asks of a communication library, and the record of what was asked.

One communicator serves one model on one rank. The mesh has R rows (nodes) of K columns. A group's
buffer is a flat tensor; a `Run` is a stretch of it with one owner. Every rank makes the same calls
in the same order; each kind of call has its own order (its own stream and process group), and the
order between kinds is that of the program, which no data and no timing changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan_dmuon.comm.streams import Event
from torchtitan_dmuon.ownership import OwnerMesh


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a group's buffer that one rank owns.

    Attributes:
        offset: First element.
        numel: Elements.
        row: Owner's row of the mesh.
        column: Owner's column of the mesh.
    """

    offset: int
    numel: int
    row: int
    column: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the run's view of a flat buffer."""
        return buffer[self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True)
class Record:
    """One call.

    Attributes:
        operation: gather, reduce, publish, exchange, shard_gather or shard_reduce.
        label: The group or parameter that it served.
        moved_bytes: Logical bytes of this rank's part: what it receives as a non-root of a gather
            or publish, what it sends as a non-root of a reduction (paper sections 3.2 and 4.4).
        step: Optimizer steps finished before the call.
    """

    operation: str
    label: str
    moved_bytes: int
    step: int


@dataclass(slots=True)
class Traffic:
    """Counts of all calls, and their list while `keep` is set.

    Attributes:
        calls: Calls by operation.
        moved_bytes: Logical bytes by operation, see `Record`.
        keep: Whether to keep the list.
        records: The calls in order, since `keep` was set.
        step: Optimizer steps finished so far.
    """

    calls: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    keep: bool = False
    records: list[Record] = field(default_factory=list)
    step: int = 0

    def add(self, operation: str, label: str, moved_bytes: int) -> None:
        self.calls[operation] += 1
        self.moved_bytes[operation] += moved_bytes
        if self.keep:
            self.records.append(Record(operation, label, moved_bytes, self.step))


class Communicator(ABC):
    """Moves the bytes of groups between ranks.

    All calls return at once with an event, except `exchange`. Tensors must stay untouched until
    the event happened. On a mesh axis of one rank nothing moves and nothing is counted.

    Attributes:
        mesh: The owner mesh.
        rank: This rank in it, 0 .. mesh.size - 1.
        traffic: What was asked so far.
    """

    def __init__(self, mesh: OwnerMesh, rank: int) -> None:
        self.mesh = mesh
        self.rank = rank
        self.row = mesh.row(rank)
        self.column = mesh.column(rank)
        self.traffic = Traffic()

    def count_gather(self, label: str, runs: Sequence[Run], element_bytes: int) -> None:
        """Count a gather in the row: what this rank receives."""
        moved = sum(run.numel for run in runs if run.column != self.column)
        self.traffic.add("gather", label, moved * element_bytes)

    def count_reduce(self, label: str, runs: Sequence[Run], element_bytes: int) -> None:
        """Count a reduction in the row and across rows: what this rank sends."""
        moved = sum(run.numel for run in runs if run.column != self.column or run.row != self.row)
        self.traffic.add("reduce", label, moved * element_bytes)

    @abstractmethod
    def gather(
        self,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        after: Sequence[Event],
        first: Callable[[], None],
    ) -> Event:
        """Fill `buffer` on every rank of the row: each run comes from the rank of its column.

        `first` runs behind `after`, before anything moves: it writes this rank's runs.
        """

    @abstractmethod
    def reduce(
        self,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        after: Sequence[Event],
        then: Callable[[], None],
        *,
        reduced: torch.Tensor | None = None,
        homes: Sequence[int] = (),
    ) -> Event:
        """Sum each run over all ranks of the mesh into its owner's `buffer`.

        Elsewhere the buffer's content is undefined afterwards. `then` runs behind the sum, before
        the event; it may read the runs that this rank owns. With `reduced`, where a transport
        offers it, owners get their sums there, at the run's element of `homes`.
        """

    @abstractmethod
    def publish(self, label: str, piece: torch.Tensor, row: int, after: Sequence[Event]) -> Event:
        """Copy `piece` from the rank of `row` in this column to the column's other ranks."""

    @abstractmethod
    def shard_gather(
        self,
        label: str,
        output: torch.Tensor,
        shard: torch.Tensor,
        after: Sequence[Event],
        first: Callable[[], None],
        then: Callable[[], None],
    ) -> Event:
        """Concatenate the equal shards of the row's ranks, by column: (n,) -> (K * n,).

        `first` runs behind `after`, before anything moves; `then` at the end, before the event.
        """

    @abstractmethod
    def shard_reduce(
        self,
        label: str,
        shard: torch.Tensor,
        buffer: torch.Tensor,
        after: Sequence[Event],
        then: Callable[[], None],
    ) -> Event:
        """Sum `buffer` (K * n,) over all ranks; this column's part (n,) goes to `shard`."""

    @abstractmethod
    def exchange(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum a small vector over all ranks (or take maxima), in place; the caller waits."""

    @abstractmethod
    def collect(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's vector, (n,) -> (ranks, n); the caller waits."""

    @abstractmethod
    def collect_column(self, values: torch.Tensor) -> torch.Tensor:
        """Return the vector of every rank of this column, (n,) -> (rows, n); the caller waits."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is in flight and give up threads; nothing may be asked afterwards.

        Process groups end with the default one: a group of the same ranks that is made after one
        was destroyed meets its leftovers in the store.
        """
