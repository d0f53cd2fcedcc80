"""AllGatherV and ReduceScatterV of variable-length segments, for any program.

On four ranks of one machine:

    offsets, nbytes = place([s.bytes for s in matrices])
    operators = Operators.shm("my-job", nodes=1, rails=4, rank=rank, window_bytes=2 * nbytes)
    buffer = operators.empty(nbytes, torch.uint8)
    gather = operators.all_gather_v([Segment(o, b, node=0, rail=r) for ...], label="layer 0")
    ...write the own segments into buffer...
    gather(buffer).wait()

All ranks make the same groups, allocations and calls of one operation in the same order. Calls are
asynchronous: each operation has its own stream, so a gather runs beside a reduction.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm import gin, shm
from torchtitan_dmuon.comm.binding import WindowMesh
from torchtitan_dmuon.comm.publish import Publish
from torchtitan_dmuon.comm.streams import (
    CommunicationError,
    Event,
    HostStream,
    Stream,
    mark,
    open_stream,
)
from torchtitan_dmuon.comm.window import PUBLISH, Operation, Window, WindowGroup
from torchtitan_dmuon.native.segments import (
    ALIGNMENT,
    Segment,
    aligned,
    check_segments,
    extent,
    place,
)

__all__ = ["AllGatherV", "Operators", "Publish", "ReduceScatterV", "Segment", "place"]


class _Operator:
    """A group of one operation."""

    _operation: Operation

    def __init__(self, operators: Operators, group: WindowGroup, label: str) -> None:
        self.label = label
        self._operators = operators
        self._group = group

    def _offset(self, tensor: torch.Tensor, nbytes: int) -> int:
        return self._operators.offset_of(tensor, nbytes, self.label)

    def _start(self, buffer: int, home: int, after: Sequence[Event]) -> Event:
        self._operators.check_open(self.label)
        # Here, not on the stream, which runs nothing more after an error.
        self._group.check(buffer, home)
        event = self._operators.stream(self._operation).submit(
            f"{self._operation.name.lower()} of {self.label}",
            lambda: self._operators.call(self._group, buffer, home),
            # On a GPU behind what the caller has put into the current stream, as a kernel would be.
            (*after, mark(self._operators.memory.device)),
        )
        self._operators.started(self._operation, event)
        return event

    def _run(self, buffer: int, home: int) -> None:
        self._operators.check_open(self.label)
        self._operators.finish(self._operation)
        self._operators.call(self._group, buffer, home)


class AllGatherV(_Operator):
    """Gives every rank of the row the segments of all owners."""

    _operation = Operation.ALL_GATHER_V

    def __call__(self, buffer: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Start one call.

        Args:
            buffer: In the window (`Operators.empty`), at least the group's size, of any dtype, at
                the same place on every rank. Owners have written their segments; the others' are
                overwritten, and nothing else. Untouched by others until the event.
            after: Events that come first, beside what the current stream of a GPU has to do.

        Returns:
            The end of the call on this rank.

        Raises:
            ValueError: a buffer that is not contiguous, outside the window or too small.
            CommunicationError: the operators are closed.
        """
        return self._start(self._offset(buffer, self._group.buffer_bytes), 0, after)

    def run(self, buffer: torch.Tensor) -> None:
        """Run one call in the calling thread, behind what was started before.

        No other thread is woken for it, which for little data takes most of the time. On a GPU the
        call goes into the current stream.

        Raises:
            ValueError: as for a call.
            CommunicationError: a rank did not come in time, ranks disagree about the call, or the
                operators are closed.
        """
        self._run(self._offset(buffer, self._group.buffer_bytes), 0)


class ReduceScatterV(_Operator):
    """Gives the owner of each segment its sum over all ranks.

    Added in float32, rounded once per node to the dtype; the result depends on no timing.
    """

    _operation = Operation.REDUCE_SCATTER_V

    def __call__(
        self, buffer: torch.Tensor, reduced: torch.Tensor, after: Sequence[Event] = ()
    ) -> Event:
        """Start one call.

        Args:
            buffer: In the window, of the group's dtype, at least its size, at the same place on
                every rank; every rank has written all segments.
            reduced: In the window, of the group's dtype, at the same place on every rank; owners
                get their sums at their segments' `home`. May be `buffer` if each segment's home is
                its offset; else the two do not overlap.
            after: Events that come first, beside what the current stream of a GPU has to do.

        Returns:
            The end of the call on this rank.

        Raises:
            ValueError: a buffer that is not contiguous, outside the window, too small or of another
                dtype, or buffers that overlap.
            CommunicationError: the operators are closed.
        """
        return self._start(*self._places(buffer, reduced), after)

    def run(self, buffer: torch.Tensor, reduced: torch.Tensor) -> None:
        """Run one call in the calling thread; see `AllGatherV.run`."""
        self._run(*self._places(buffer, reduced))

    def _places(self, buffer: torch.Tensor, reduced: torch.Tensor) -> tuple[int, int]:
        for name, tensor in (("buffer", buffer), ("reduced", reduced)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype != self._group.dtype:
                raise ValueError(
                    f"{self.label}: {name} is of {tensor.dtype}, the group of {self._group.dtype}"
                )
        return (
            self._offset(buffer, self._group.buffer_bytes),
            self._offset(reduced, self._group.home_bytes),
        )


def _mesh(
    nodes: int,
    rails: int,
    rank: int,
    gather_nodes: int | None,
    window_bytes: int,
    timeout: timedelta,
    chunk_bytes: int = 0,
    slots: int = 0,
    names: Sequence[int] = (),
) -> WindowMesh:
    if not isinstance(window_bytes, int) or window_bytes < 1:
        raise ValueError(f"window_bytes is {window_bytes!r}, expected a whole number from 1")
    if not isinstance(timeout, timedelta):
        raise ValueError(f"timeout is {timeout!r}, expected a datetime.timedelta")
    return WindowMesh(
        nodes=nodes,
        rails=rails,
        rank=rank,
        gather_nodes=nodes if gather_nodes is None else gather_nodes,
        user_bytes=aligned(window_bytes),
        timeout_seconds=timeout.total_seconds(),
        chunk_bytes=chunk_bytes,
        slots=slots,
        names=tuple(names),
    )


class Operators:
    """The two operators, and the publish, over one window.

    Args:
        window: Opened by `comm/shm.py` or `comm/gin.py`.
        memory: Its bytes, (window bytes,) uint8, as the same module shows them.
    """

    def __init__(self, window: Window, memory: torch.Tensor) -> None:
        self.window = window
        self.memory = memory
        self._used = 0
        self._closed = False
        self._process = os.getpid()
        self._last: dict[Operation, Event] = {}
        self._publishes: list[Publish] = []
        self._streams: dict[Operation, Stream] = {
            operation: open_stream(
                memory.device,
                f"dmuon_{operation.name.lower()}",
                timeout_seconds=window.mesh.timeout_seconds,
                high_priority=True,
            )
            for operation in Operation
        }

    @classmethod
    def shm(
        cls,
        job: str,
        *,
        nodes: int,
        rails: int,
        rank: int,
        window_bytes: int,
        gather_nodes: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        chunk_bytes: int = 0,
        slots: int = 0,
        group: dist.ProcessGroup | None = None,
        names: Sequence[int] = (),
    ) -> Operators:
        """Open a window between processes of this machine. Collective.

        Args:
            job: 1 to 64 letters, digits or hyphens, equal on all ranks, unique among the running
                jobs of this user.
            nodes: R.
            rails: K; rank = node * K + rail.
            rank: This rank.
            window_bytes: Memory for buffers, on each rank.
            gather_nodes: Consecutive nodes that a gather spans; None: all.
            timeout: Longest wait for another rank.
            chunk_bytes: Of a chunk; 0: the fabric's own.
            slots: Of a ring; 0: the fabric's own.
            group: Of all ranks, in their order. With it every rank tells the others whether there
                was room for its memory; without, who finds none leaves them waiting.
            names: Of all ranks, for errors, where the job has other numbers for them.

        Raises:
            ValueError: a bad argument.
            WindowRefused: with a group: no room for one of them.
            OSError: no room, or ranks disagree about the arguments.
            CommunicationError: a rank did not come.
        """
        mesh = _mesh(
            nodes, rails, rank, gather_nodes, window_bytes, timeout, chunk_bytes, slots, names
        )
        window = shm.open_window(job, mesh, group)
        return cls(window, shm.memory(window))

    @classmethod
    def gin(
        cls,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        nodes: int,
        rails: int,
        rank: int,
        window_bytes: int,
        gather_nodes: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        names: Sequence[int] = (),
    ) -> Operators:
        """Open a window between the GPUs of a process group, over NCCL's device API. Collective.

        A call returns at once; one whose wait passes the limit ends on the GPU, and the next call,
        or `check`, says where it stood. No GPU has run it yet: docs/hardware.md.

        Args:
            device: This rank's GPU.
            group: Its ranks are the mesh's, in their order.
            nodes: R.
            rails: K, the GPUs of a node; rank = node * K + rail.
            rank: This rank.
            window_bytes: Memory for buffers, on each rank.
            gather_nodes: Consecutive nodes that a gather spans; None: all.
            timeout: Longest wait for another rank.
            names: Of all ranks, for errors, where the job has other numbers for them.

        Raises:
            NativeError: no nvcc, or no NCCL headers of the version that torch has loaded.
            ValueError: a bad mesh, or ranks that disagree about it.
            OSError: NCCL or CUDA refused; the text says what is missing.
        """
        mesh = _mesh(nodes, rails, rank, gather_nodes, window_bytes, timeout, names=names)
        window = gin.open_window(device, group, mesh)
        return cls(window, gin.memory(window, device))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Take a tensor (numel,) of the window, with undefined content, until the window ends.

        All ranks take the same sizes in the same order, so that it lies at the same place.

        Raises:
            ValueError: a bad size or dtype, or the window has no room.
            CommunicationError: the operators are closed.
        """
        self.check_open("empty()")
        if not isinstance(numel, int) or numel < 0:
            raise ValueError(f"numel is {numel!r}, expected a whole number from 0")
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {dtype!r}, expected a torch.dtype")
        nbytes = numel * dtype.itemsize
        if nbytes > self.window.nbytes - self._used:
            raise ValueError(
                f"window: no room for {nbytes} bytes, {self.window.nbytes - self._used} of "
                f"{self.window.nbytes} are left; open it with more window_bytes"
            )
        found = self.memory[self._used : self._used + nbytes].view(dtype)
        self._used = min(aligned(self._used + nbytes), self.window.nbytes)
        return found

    def all_gather_v(self, segments: Sequence[Segment], *, label: str = "all") -> AllGatherV:
        """Freeze a gather's table. `label` names it in errors.

        The label is the same on every rank; on shm ranks compare it.

        Raises:
            ValueError: a bad segment, or one that no window of this size holds; the text names it.
            CommunicationError: the operators are closed.
        """
        self.check_open(label)
        group = self.window.create_group(
            Operation.ALL_GATHER_V, tuple(segments), label=label, dtype=torch.uint8
        )
        return AllGatherV(self, group, label)

    def reduce_scatter_v(
        self, segments: Sequence[Segment], dtype: torch.dtype, *, label: str = "all"
    ) -> ReduceScatterV:
        """Freeze a reduction's table, of bfloat16 or float32 elements; else as `all_gather_v`.

        Raises:
            ValueError: a bad segment or dtype; the text names it.
            CommunicationError: the operators are closed.
        """
        self.check_open(label)
        group = self.window.create_group(
            Operation.REDUCE_SCATTER_V, tuple(segments), label=label, dtype=dtype
        )
        return ReduceScatterV(self, group, label)

    def publish(
        self,
        tasks: Sequence[Segment],
        buffer: torch.Tensor,
        *,
        label: str = "all",
        names: Sequence[str] | None = None,
    ) -> Publish:
        """Freeze the table of a publish between the rows of the mesh (comm/publish.py).

        A row is `gather_nodes` nodes; the publish connects the ranks at the same place of all rows.
        They make the same publishes in the same order; other ranks have tables of their own.

        Args:
            tasks: What owners of this rank's place give to the other rows: `node` is the owner's
                row, `rail` this rank's own, `offset` counts from `buffer`. One owner's tasks stand
                in the order in which it releases them; all are at least a byte long.
            buffer: In the window, at the same place on every rank: the copies.
            label: Names the publish in errors.
            names: Of the tasks, for errors; None: their numbers alone.

        Raises:
            ValueError: a bad task or buffer; the text names it.
            CommunicationError: the operators are closed.
        """
        self.check_open(label)
        check_segments(tasks, "task")
        nbytes = extent(tasks)
        table = self.window.create_publish(
            tasks,
            label=label,
            names=[str(i) for i in range(len(tasks))] if names is None else names,
            buffer=self.offset_of(buffer, nbytes, label),
            buffer_bytes=nbytes,
        )
        made = Publish(table, self.memory.device, label)
        self._publishes.append(made)
        return made

    def call(self, group: WindowGroup, buffer: int, home: int) -> None:
        """Run a group at window offsets: here to the end, on a GPU behind the current stream."""
        device = self.memory.device
        on_gpu = device.type == "cuda"
        group.call(buffer, home, torch.cuda.current_stream(device).cuda_stream if on_gpu else None)

    def stream(self, operation: Operation) -> Stream:
        """Return the stream on which an operation's calls run."""
        return self._streams[operation]

    def started(self, operation: Operation, event: Event) -> None:
        """Note the end of an operation's latest call."""
        self._last[operation] = event

    def finish(self, operation: Operation) -> None:
        """Wait for the operation's calls that were started."""
        event = self._last.pop(operation, None)
        if event is not None:
            event.wait()

    def check(self) -> None:
        """Raise CommunicationError if a call that has ended on the GPU waited for too long.

        On shm the call itself raises.
        """
        for operation in (*Operation, PUBLISH):
            self.window.check(operation)

    def check_open(self, what: str) -> None:
        """Raise CommunicationError if this was closed, or opened by a process that forked this one.

        Args:
            what: Is asked for; the text begins with it.
        """
        if self._closed:
            raise CommunicationError(f"{what}: the operators are closed")
        if os.getpid() != self._process:
            raise CommunicationError(
                f"{what}: the operators belong to process {self._process}, which forked this one"
            )

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the window."""
        begin = tensor.data_ptr() - self.window.pointer
        return 0 <= begin <= self.window.nbytes - tensor.numel() * tensor.element_size()

    def offset_of(self, tensor: torch.Tensor, nbytes: int, label: str) -> int:
        """Return a tensor's window offset in bytes.

        Raises:
            ValueError: it is not contiguous, outside the window, smaller than `nbytes` or begins
                at no multiple of 16.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{label}: expected a dense tensor, got {type(tensor).__name__}")
        size = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or size < nbytes:
            raise ValueError(
                f"{label}: needs a contiguous tensor of {nbytes} bytes or more (segments take "
                f"multiples of {ALIGNMENT}), got {size} bytes with strides {tensor.stride()}"
            )
        if size == 0:
            return 0  # lies nowhere
        if not self.contains(tensor):
            raise ValueError(f"{label}: the tensor is not in the window; take it with empty()")
        offset = tensor.data_ptr() - self.window.pointer
        if offset % ALIGNMENT:
            raise ValueError(
                f"{label}: the tensor begins at byte {offset} of the window, expected a multiple "
                f"of {ALIGNMENT}"
            )
        return offset

    def close(self) -> None:
        """Finish what was started and end the streams. Memory ends with its last tensor.

        Raises:
            CommunicationError: a call failed and nobody who waited was told, or, on a GPU, waited
                for too long.
        """
        if self._closed:
            return
        self._closed = True
        for publish in self._publishes:
            publish.close()
        for stream in self._streams.values():
            stream.close()
        if self.memory.device.type == "cuda":
            self.check()
        hosts = [s for s in self._streams.values() if isinstance(s, HostStream)]
        failures = [stream.failure for stream in hosts if stream.failure is not None]
        if failures and not any(stream.told for stream in hosts):
            raise failures[0]
