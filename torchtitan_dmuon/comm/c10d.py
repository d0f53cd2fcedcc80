"""The communicator over torch.distributed: NCCL on GPUs, gloo on CPUs (line C of the paper).

Five process groups, whatever the model's size, made once: row gather, row reduction, column
reduction, column publish, and one over all ranks for scalars. An axis of one rank needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from torchtitan_dmuon.comm.communicator import Communicator, Run
from torchtitan_dmuon.comm.ranks import brief, in_order_of, local_ranks
from torchtitan_dmuon.comm.streams import CommunicationError, Event, Stream, open_stream
from torchtitan_dmuon.ownership import OwnerMesh


class C10dCommunicator(Communicator):
    """Moves segments with broadcasts and reductions, one per owner and stretch.

    The calls of a layer go out as one NCCL group inside a node, and one per owner across nodes: the
    faster pattern at each level (paper D.2). A publish goes piece by piece: a layer seldom has two
    on a rail, and from four nodes on a call for each is the faster (table 7). gloo has no groups;
    it runs the calls of a layer side by side.

    Args:
        ranks: Global rank at each (row, column) of the mesh.
        device: Where the tensors live; picks the backend.
        timeout: Limit of each operation; None: 30 minutes.

    Collective over the ranks of the mesh.
    """

    def __init__(
        self, ranks: Sequence[Sequence[int]], device: torch.device, timeout: timedelta | None
    ) -> None:
        mesh = OwnerMesh(rows=len(ranks), columns=len(ranks[0]))
        flat = [rank for row in ranks for rank in row]
        super().__init__(mesh, flat.index(dist.get_rank()) if mesh.size > 1 else 0)
        self.device = device
        self._row_ranks = list(ranks[self.row])
        self._column_ranks = [row[self.column] for row in ranks]
        self._all_ranks = flat
        timeout = timeout or timedelta(minutes=30)
        self._streams: dict[str, Stream] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._grouped: set[str] = set()
        # The paper's first version: kernels inside a node go before those across nodes.
        for name, members, high in (
            ("gather", self._row_ranks, True),
            ("reduce", self._row_ranks, True),
            ("reduce_rows", self._column_ranks, False),
            ("publish", self._column_ranks, False),
            ("exchange", self._all_ranks, False),
        ):
            if len(members) == 1:
                continue
            self._groups[name] = dist.new_group(
                members, timeout=timeout, use_local_synchronization=True, group_desc=f"dmuon_{name}"
            )
            if _in_one_launch(self._groups[name]):
                self._grouped.add(name)
            if name != "exchange":
                self._streams[name] = open_stream(
                    device,
                    f"dmuon_{name}",
                    timeout_seconds=timeout.total_seconds(),
                    high_priority=high,
                )

    def gather(
        self,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        after: Sequence[Event],
        first: Callable[[], None],
    ) -> Event:
        self.count_gather(label, runs, buffer.element_size())

        def work() -> None:
            first()
            calls = [(run.of(buffer), self._row_ranks[run.column]) for run in runs]
            self._each("gather", dist.broadcast, calls)

        return self._submit("gather", label, self._row_ranks, work, after)

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
        assert reduced is None, "collectives reduce in place"
        mine = [run for run in runs if run.column == self.column]
        self.count_reduce(label, runs, buffer.element_size())

        def inside() -> None:
            calls = [(run.of(buffer), self._row_ranks[run.column]) for run in runs]
            self._each("reduce", dist.reduce, calls)

        def across() -> None:
            calls = [(run.of(buffer), self._column_ranks[run.row]) for run in mine]
            self._each("reduce_rows", dist.reduce, calls)

        return self._in_stages(label, inside, across, after, then)

    def publish(self, label: str, piece: torch.Tensor, row: int, after: Sequence[Event]) -> Event:
        moved = 0 if row == self.row else piece.numel() * piece.element_size()
        self.traffic.add("publish", label, moved)

        def work() -> None:
            dist.broadcast(piece, self._column_ranks[row], self._groups["publish"])

        return self._submit("publish", label, self._column_ranks, work, after)

    def shard_gather(
        self,
        label: str,
        output: torch.Tensor,
        shard: torch.Tensor,
        after: Sequence[Event],
        first: Callable[[], None],
        then: Callable[[], None],
    ) -> Event:
        moved = (output.numel() - shard.numel()) * output.element_size()
        self.traffic.add("shard_gather", label, moved)

        def work() -> None:
            first()
            dist.all_gather_into_tensor(output, shard, self._groups["gather"])
            then()

        return self._submit("gather", label, self._row_ranks, work, after)

    def shard_reduce(
        self,
        label: str,
        shard: torch.Tensor,
        buffer: torch.Tensor,
        after: Sequence[Event],
        then: Callable[[], None],
    ) -> Event:
        # Reduce-scatter in the row, then both halves of an all-reduce across rows (section 4.4).
        moved = buffer.numel() - shard.numel() if self.mesh.columns > 1 else 0
        moved += 2 * shard.numel() * (self.mesh.rows - 1) // self.mesh.rows
        self.traffic.add("shard_reduce", label, moved * buffer.element_size())

        def inside() -> None:
            dist.reduce_scatter_tensor(shard, buffer, group=self._groups["reduce"])

        def across() -> None:
            dist.all_reduce(shard, group=self._groups["reduce_rows"])

        if self.mesh.columns == 1:
            shard.copy_(buffer)
        return self._in_stages(label, inside, across, after, then)

    def exchange(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        self.traffic.add("exchange", "scalars", values.numel() * values.element_size())
        group = self._groups["exchange"]
        with self._named("exchange", self._all_ranks):
            if dist.get_backend(group) == "gloo":
                self._exchange_at_root(values, maximum)
            else:
                op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
                dist.all_reduce(values, op, group=group)

    def _exchange_at_root(self, values: torch.Tensor, maximum: bool) -> None:
        """One rank adds up and tells all: two turns in place of the 2 (n - 1) of gloo's ring, which
        for a few numbers are all the time that it takes."""
        root, group = self._all_ranks[0], self._groups["exchange"]
        every = None
        if self.rank == 0:
            every = list(values.new_empty(self.mesh.size, *values.shape).unbind())
        dist.gather(values, every, root, group)
        if every is not None:
            stacked = torch.stack(every)
            values.copy_(stacked.amax(0) if maximum else stacked.sum(0))
        dist.broadcast(values, root, group)

    def collect(self, values: torch.Tensor) -> torch.Tensor:
        result = [torch.empty_like(values) for _ in self._all_ranks]
        with self._named("collect", self._all_ranks):
            dist.all_gather(result, values, group=self._groups["exchange"])
        return torch.stack(in_order_of(self._all_ranks, result))

    def digests(self, digest: int) -> list[int]:
        """Return the 63 bits or fewer that each rank of the mesh gives. Collective."""
        mine = torch.tensor([digest], dtype=torch.int64, device=self.device)
        return [int(value) for value in self.collect(mine)[:, 0].tolist()]

    def agree(self, digest: int, difference: str, advice: str) -> None:
        """Check that 60 bits of digest are the same on every rank (invariant I6). Collective.

        Raises:
            RuntimeError: it is not: `difference`, both ranks' digests, `advice`.
        """
        values = self.digests(digest)
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RuntimeError(
                    f"{difference}: mesh rank 0 has digest {values[0]:015x}, rank {rank} has "
                    f"{value:015x}; {advice}"
                )

    def collect_column(self, values: torch.Tensor) -> torch.Tensor:
        result = [torch.empty_like(values) for _ in self._column_ranks]
        # The publish group, whose stream the caller has waited for.
        with self._named("collect", self._column_ranks):
            dist.all_gather(result, values, group=self._groups["publish"])
        return torch.stack(in_order_of(self._column_ranks, result))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._groups.clear()

    def _each(
        self,
        name: str,
        collective: Callable[..., dist.Work | None],
        calls: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Broadcast tensors from, or reduce them to, the global ranks beside them, and wait."""
        group = self._groups[name]

        def start() -> list[dist.Work | None]:
            return [collective(t, root, group=group, async_op=True) for t, root in calls]

        if len(calls) > 1 and name in self._grouped:
            with _coalescing_manager(group, self.device, async_ops=True) as together:
                start()
            together.wait()
            return
        for work in start():
            if work is not None:
                work.wait()

    def _in_stages(
        self,
        label: str,
        inside: Callable[[], None],
        across: Callable[[], None],
        after: Sequence[Event],
        then: Callable[[], None],
    ) -> Event:
        """Reduce in the row, then across rows; `then` runs behind the last stage there is."""

        def last(stage: Callable[[], None]) -> Callable[[], None]:
            def work() -> None:
                stage()
                then()

            return work

        if self.mesh.rows == 1:
            return self._submit("reduce", label, self._row_ranks, last(inside), after)
        if self.mesh.columns > 1:
            after = [self._submit("reduce", label, self._row_ranks, inside, after)]
        return self._submit("reduce_rows", label, self._column_ranks, last(across), after)

    def _submit(
        self,
        name: str,
        label: str,
        ranks: Sequence[int],
        work: Callable[[], None],
        after: Sequence[Event],
    ) -> Event:
        return self._streams[name].submit(self._where(name, label, ranks), work, after)

    def _where(self, name: str, label: str, ranks: Sequence[int]) -> str:
        return f"dmuon {name} of {label} (rank {self._all_ranks[self.rank]} among {brief(ranks)})"

    @contextmanager
    def _named(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """Name the operation in errors and traces, as streams do: the caller waits for these."""
        where = self._where(name, "scalars", ranks)
        try:
            with torch.profiler.record_function(where):
                yield
        except RuntimeError as error:
            raise CommunicationError(f"{where}: {error}") from error


def _in_one_launch(group: dist.ProcessGroup) -> bool:
    """Whether calls over a process group are faster as one: NCCL, and all its ranks in one node."""
    if dist.get_backend(group) != "nccl":
        return False
    return len({rank // local_ranks() for rank in dist.get_process_group_ranks(group)}) == 1
