"""A communicator whose gathers and reductions are the operators (line D's transport)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm.binding import Operation, WindowGroup
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.comm.communicator import Run
from torchtitan_dmuon.comm.operators import Operators
from torchtitan_dmuon.comm.streams import Event
from torchtitan_dmuon.native.segments import ALIGNMENT, Segment, aligned, place


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A group of the communicator.

    Attributes:
        group: Its table.
        runs: The stretches that it moves.
        offsets: First byte of each in the window's copy of the buffer.
        natural: Whether the copy has the layout of the buffer itself.
    """

    group: WindowGroup
    runs: tuple[Run, ...]
    offsets: tuple[int, ...]
    natural: bool


class OperatorsCommunicator(C10dCommunicator):
    """Gathers and reduces with the operators; all else goes over torch.distributed.

    A buffer that lies in the window is used in place (the same on all ranks); others are copied to
    a stage in the window and back.

    Args:
        ranks: Global rank at each (row, column) of the mesh.
        device: CPU: the ranks are processes of one machine. CUDA: NCCL's device API.
        timeout: Limit of each operation; None: 30 minutes.
        ranks_per_node: Neighbours in the mesh that share a node's memory. On GPUs those of a node;
            on CPUs any, nodes are then virtual. Divides the columns; with one column, the rows.
        window_bytes: Memory for the stage of each of the two operations: at least the largest
            buffer.

    Collective over the ranks of the mesh.

    Raises:
        ValueError: ranks_per_node does not fit the mesh, or another device.
        NativeError: the library cannot be compiled.
        OSError: no memory, or NCCL or CUDA refused.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        device: torch.device,
        timeout: timedelta | None,
        *,
        ranks_per_node: int,
        window_bytes: int,
    ) -> None:
        if device.type == "cuda" and len(ranks) * len(ranks[0]) == 1:
            raise ValueError("one GPU: there is nobody to move data to")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {device}: the operators move CPU and CUDA tensors only")
        columns = len(ranks[0])
        span = columns if columns > 1 else len(ranks)
        if ranks_per_node < 1 or span % ranks_per_node:
            raise ValueError(
                f"ranks_per_node is {ranks_per_node}, expected a divisor of {span}: a row of "
                f"the {len(ranks)} x {columns} mesh is made of whole nodes"
            )
        super().__init__(ranks, device, timeout)
        self._rails = ranks_per_node
        self.operators = self._open(
            nodes=self.mesh.size // ranks_per_node,
            rails=ranks_per_node,
            rank=self.rank,
            gather_nodes=max(1, columns // ranks_per_node),
            window_bytes=2 * aligned(window_bytes),
            timeout=timeout or timedelta(minutes=30),
        )
        self._stages = {
            operation: self.operators.empty(aligned(window_bytes), torch.uint8)
            for operation in Operation
        }
        self._frozen: dict[tuple[object, ...], _Frozen] = {}

    def _open(self, **mesh: Any) -> Operators:
        if self.device.type == "cuda":
            return Operators.gin(self.device, self._groups["exchange"], **mesh)
        names = [secrets.token_hex(8)]
        if self.mesh.size > 1:
            dist.broadcast_object_list(names, self._all_ranks[0], self._groups["exchange"])
        return Operators.shm(names[0], **mesh)

    def exchange(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        # Once per step: a kernel that gave up waiting has told nobody yet.
        if self.device.type == "cuda":
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
        self.count_gather(label, runs, buffer.element_size())
        frozen = self._freeze(Operation.ALL_GATHER_V, label, buffer, runs)
        mine = [run.column == self.column for run in frozen.runs]

        def work() -> None:
            first()
            self._move(Operation.ALL_GATHER_V, frozen, buffer, mine, [not m for m in mine])

        return self._run(Operation.ALL_GATHER_V, label, self._row_ranks, work, after)

    def reduce(
        self,
        label: str,
        buffer: torch.Tensor,
        runs: Sequence[Run],
        after: Sequence[Event],
        then: Callable[[], None],
    ) -> Event:
        self.count_reduce(label, runs, buffer.element_size())
        frozen = self._freeze(Operation.REDUCE_SCATTER_V, label, buffer, runs)
        mine = [(run.row, run.column) == (self.row, self.column) for run in frozen.runs]

        def work() -> None:
            self._move(Operation.REDUCE_SCATTER_V, frozen, buffer, [True] * len(mine), mine)
            then()

        return self._run(Operation.REDUCE_SCATTER_V, label, self._all_ranks, work, after)

    def close(self) -> None:
        self.operators.close()
        super().close()
        self._frozen.clear()

    def _run(
        self,
        operation: Operation,
        label: str,
        ranks: Sequence[int],
        work: Callable[[], None],
        after: Sequence[Event],
    ) -> Event:
        where = self._where(operation.name.lower(), label, ranks)
        return self.operators.stream(operation).submit(where, work, after)

    def _freeze(
        self, operation: Operation, label: str, buffer: torch.Tensor, runs: Sequence[Run]
    ) -> _Frozen:
        """Return the group of a label and its runs, made at the first call."""
        key = (operation, label, buffer.dtype, buffer.numel(), tuple(runs))
        if key in self._frozen:
            return self._frozen[key]
        size = buffer.element_size()
        natural = _are_segments(runs, size, buffer.numel() * size)
        if natural:
            offsets, nbytes = [run.offset * size for run in runs], buffer.numel() * size
        else:
            offsets, nbytes = place([run.numel * size for run in runs])
        stage = self._stages[operation].numel()
        if nbytes > stage:
            raise ValueError(
                f"{label}: its buffer has {nbytes} bytes, the stage {stage}; give window_bytes "
                f"of {nbytes} or more"
            )
        segments = []
        for run, offset in zip(runs, offsets, strict=True):
            owner = run.column
            if operation is Operation.REDUCE_SCATTER_V:
                owner = self.mesh.rank(run.row, run.column)
            node, rail = divmod(owner, self._rails)
            segments.append(Segment(offset, run.numel * size, node, rail, home=offset))
        group = self.operators.window.create_group(
            operation,
            segments,
            label=label,
            dtype=buffer.dtype,
            buffer_bytes=nbytes,
            home_bytes=nbytes,
        )
        frozen = _Frozen(group, tuple(runs), tuple(offsets), natural)
        self._frozen[key] = frozen
        return frozen

    def _move(
        self,
        operation: Operation,
        frozen: _Frozen,
        buffer: torch.Tensor,
        inward: Sequence[bool],
        outward: Sequence[bool],
    ) -> None:
        """Run one call; runs marked `inward` are this rank's input, those `outward` its result."""
        if frozen.natural and self.operators.contains(buffer):
            place = self.operators.offset_of(buffer, frozen.group.buffer_bytes, "buffer")
            self.operators.call(frozen.group, place, place)
            return
        stage = self._stages[operation]
        size = buffer.element_size()
        pairs = [
            (run.of(buffer), stage[at : at + run.numel * size].view(buffer.dtype))
            for run, at in zip(frozen.runs, frozen.offsets, strict=True)
        ]
        place = self.operators.offset_of(stage, frozen.group.buffer_bytes, "stage")
        with torch.no_grad():
            for (outside, inside), copied in zip(pairs, inward, strict=True):
                if copied:
                    inside.copy_(outside)
            self.operators.call(frozen.group, place, place)
            for (outside, inside), copied in zip(pairs, outward, strict=True):
                if copied:
                    outside.copy_(inside)


def _are_segments(runs: Sequence[Run], element_bytes: int, limit: int) -> bool:
    """Whether runs can be moved where they lie: aligned, with padding that belongs to nobody."""
    end = 0
    for run in sorted(runs, key=lambda run: run.offset):
        begin = run.offset * element_bytes
        if begin % ALIGNMENT or begin < end:
            return False
        end = begin + aligned(run.numel * element_bytes)
    return end <= limit
