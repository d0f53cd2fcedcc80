"""Line D's transport: what lies in the pool moves with the operators, all else with collectives."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from torchtitan_dmuon.comm import gin, shm
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.comm.communicator import Run
from torchtitan_dmuon.comm.operators import Operators
from torchtitan_dmuon.comm.ranks import brief, gather_objects, in_order_of, local_ranks
from torchtitan_dmuon.comm.streams import CommunicationError, Event
from torchtitan_dmuon.comm.window import Operation, WindowGroup
from torchtitan_dmuon.native.build import NativeError
from torchtitan_dmuon.native.segments import ALIGNMENT, Segment, aligned


class OperatorsCommunicator(C10dCommunicator):
    """Moves a buffer with the operators if it lies in the window, else with torch.distributed.

    The window is opened when its size is known, by `open`; until then every buffer is outside. A
    buffer in the window lies at the same place on all ranks of the mesh, and is movable there
    (`movable`).

    Args:
        ranks: Global rank at each (row, column) of the mesh.
        device: CPU: the ranks are processes of one machine. CUDA: NCCL's device API.
        timeout: Limit of each operation; None: 30 minutes.
        ranks_per_node: Neighbours in the mesh that share a node's memory. On GPUs those of a node;
            on CPUs any, nodes are then virtual. Divides the columns; with one column, the rows.
            None: on GPUs those that torchrun started on this machine, on CPUs a row of the mesh.

    Collective over the ranks of the mesh.

    Attributes:
        operators: The window and its operators; None before `open`.
        operated: Calls that went over the operators, by operation.
        optional: Whether the job goes on with collectives where no window can be opened.
        refused: Why this job does without them; None: it does not.

    Raises:
        ValueError: ranks_per_node does not fit the mesh, or another device.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        device: torch.device,
        timeout: timedelta | None,
        *,
        ranks_per_node: int | None = None,
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {device}: the operators move CPU and CUDA tensors only")
        columns = len(ranks[0])
        if ranks_per_node is None:
            ranks_per_node = columns if device.type == "cpu" else local_ranks()
        span = columns if columns > 1 else len(ranks)
        if ranks_per_node < 1 or span % ranks_per_node:
            raise ValueError(
                f"ranks_per_node is {ranks_per_node}, expected a divisor of {span}: a row of "
                f"the {len(ranks)} x {columns} mesh is made of whole nodes"
            )
        super().__init__(ranks, device, timeout)
        self.operators: Operators | None = None
        self.operated: Counter[str] = Counter()
        self.optional = False
        self.refused: str | None = None
        self._rails = ranks_per_node
        self._timeout = timeout or timedelta(minutes=30)
        self._frozen: dict[tuple[object, ...], WindowGroup] = {}

    @property
    def rail(self) -> int:
        """This rank's number in its node."""
        return self.rank % self._rails

    @property
    def can_publish(self) -> bool:
        """Whether the ranks of a column are one rail: rows are whole nodes."""
        return self.mesh.rows > 1 and (self.mesh.columns > 1 or self._rails == 1)

    def open(self, window_bytes: int) -> torch.Tensor:
        """Open the window: (window_bytes,) uint8, the same layout on every rank. Collective.

        Raises:
            NativeError: the library cannot be compiled.
            WindowRefused: no memory, or NCCL or CUDA refused; all ranks raise it.
            OSError: another error of the system, on this rank.
            CommunicationError: a rank did not come.
        """
        mesh: dict[str, Any] = {
            "nodes": self.mesh.size // self._rails,
            "rails": self._rails,
            "rank": self.rank,
            "gather_nodes": max(1, self.mesh.columns // self._rails),
            "window_bytes": window_bytes,
            "names": self._all_ranks,
        }
        if self.device.type == "cuda":
            exchange = self._groups["exchange"]
            self.operators = Operators.gin(self.device, exchange, timeout=self._timeout, **mesh)
        else:
            names, group = [secrets.token_hex(8)], self._groups.get("exchange")
            if group is not None:
                names = gather_objects(group, names[0], "opening of the pool")
            self.operators = Operators.shm(names[0], timeout=self._timeout, group=group, **mesh)
        return self.operators.empty(window_bytes, torch.uint8)

    def refusal(self) -> str | None:
        """Say why this job cannot use the operators, the same on every rank; None: it can.

        Collective. Every rank says what it lacks; the first that lacks something is named.
        """
        mine = (socket.gethostname(), lack_of(self.device))
        every: list[tuple[str, str | None]] = [mine]
        if self.mesh.size > 1:
            told = gather_objects(self._groups["exchange"], mine, "question for the operators")
            every = in_order_of(self._all_ranks, told)
        for rank, (_, lack) in enumerate(every):
            if lack is not None:
                return f"rank {self._all_ranks[rank]}: {lack}"
        hosts = dict.fromkeys(host for host, _ in every)
        if self.device.type == "cpu" and len(hosts) > 1:
            return f"CPU ranks on several machines ({', '.join(hosts)}) share no memory"
        if self.device.type == "cuda" and self.mesh.size == 1:
            return "there is one GPU, and nobody to move data to"
        if self.device.type == "cuda" and self._all_ranks != sorted(self._all_ranks):
            return f"the mesh has its ranks in another order than theirs ({brief(self._all_ranks)})"
        return None

    def exchange(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        # Once per step: a kernel that gave up waiting has told nobody yet.
        if self.operators is not None and self.device.type == "cuda":
            self.operators.check()
        super().exchange(values, maximum=maximum)

    def gather(
        self,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        after: Sequence[Event],
        first: Callable[[], None],
    ) -> Event:
        if self.operators is None or not self.operators.contains(buffer):
            return super().gather(label, buffer, runs, after, first)
        self.count_gather(label, runs, buffer.element_size())
        group = self._group(Operation.ALL_GATHER_V, label, buffer, runs)
        operators, place = self.operators, self.operators.offset_of(buffer, 0, label)

        def work() -> None:
            first()
            operators.call(group, place, 0)

        return self._run(Operation.ALL_GATHER_V, label, self._row_ranks, work, after)

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
        """Sum each run into its owner's memory; see `Communicator.reduce`.

        Args:
            label: Names the group.
            buffer: (n,), summed over the ranks.
            runs: Its stretches.
            after: Come first.
            then: Runs behind the sum.
            reduced: In the window, of the same dtype: owners get their sums here, if `buffer` lies
                in the window. None: in `buffer`.
            homes: First element of each run in it.
        """
        if self.operators is None or not self.operators.contains(buffer):
            return super().reduce(label, buffer, runs, after, then)
        self.count_reduce(label, runs, buffer.element_size())
        if reduced is None:
            reduced, homes = buffer, [run.offset for run in runs]
        group = self._group(Operation.REDUCE_SCATTER_V, label, buffer, runs, homes)
        operators, place = self.operators, self.operators.offset_of(buffer, 0, label)
        home = operators.offset_of(reduced, 0, label)

        def work() -> None:
            operators.call(group, place, home)
            then()

        return self._run(Operation.REDUCE_SCATTER_V, label, self._all_ranks, work, after)

    @contextmanager
    def publishing(self, label: str) -> Iterator[None]:
        """Name the publish, this rank and its column in errors of what runs inside."""
        try:
            yield
        except (CommunicationError, ValueError) as error:
            where = self._where("publish", label, self._column_ranks)
            raise CommunicationError(f"{where}: {error}") from error

    def close(self) -> None:
        if self.operators is not None:
            self.operators.close()
        super().close()
        self._frozen.clear()
        self.operators = None

    def _run(
        self,
        operation: Operation,
        label: str,
        ranks: Sequence[int],
        work: Callable[[], None],
        after: Sequence[Event],
    ) -> Event:
        assert self.operators is not None
        self.operated[operation.name.lower()] += 1
        where = self._where(operation.name.lower(), label, ranks)
        return self.operators.stream(operation).submit(where, work, after)

    def _group(
        self,
        operation: Operation,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        homes: Sequence[int] = (),
    ) -> WindowGroup:
        """Return the table of a label and its runs, frozen at the first call."""
        key = (operation, label, buffer.dtype, buffer.numel(), tuple(runs), tuple(homes))
        if key in self._frozen:
            return self._frozen[key]
        assert self.operators is not None
        size = buffer.element_size()
        segments = []
        for index, run in enumerate(runs):
            owner = run.column
            if operation is Operation.REDUCE_SCATTER_V:
                owner = self.mesh.rank(run.row, run.column)
            node, rail = divmod(owner, self._rails)
            home = homes[index] * size if homes else 0
            segments.append(Segment(run.offset * size, run.numel * size, node, rail, home=home))
        self._frozen[key] = self.operators.window.create_group(
            operation,
            segments,
            label=label,
            dtype=buffer.dtype,
            buffer_bytes=buffer.numel() * size,
            home_bytes=max((s.home + aligned(s.bytes) for s in segments), default=0),
        )
        return self._frozen[key]


def movable(runs: Sequence[Run], element_bytes: int, numel: int) -> bool:
    """Whether the operators can move runs of a buffer (numel,) where they lie.

    They are aligned, and the padding behind each belongs to nobody.
    """
    end = 0
    for run in sorted(runs, key=lambda run: run.offset):
        begin = run.offset * element_bytes
        if begin % ALIGNMENT or begin < end:
            return False
        end = begin + aligned(run.numel * element_bytes)
    return end <= numel * element_bytes


def lack_of(device: torch.device) -> str | None:
    """Return what this process lacks for the operators on a device; None: nothing.

    Compiles their library unless it was compiled before.
    """
    try:
        if device.type == "cuda":
            gin.prepare(device)
        else:
            shm.prepare()
    except (NativeError, OSError) as error:
        return str(error)
    return None
