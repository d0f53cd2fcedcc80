"""Opens the symmetric pool of a model: plans it, checks the plan, moves groups in (paper C.1)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator, movable
from torchtitan_dmuon.native.segments import aligned
from torchtitan_dmuon.runtime.copies import Copies
from torchtitan_dmuon.runtime.group import Group
from torchtitan_dmuon.runtime.owner_group import OwnerGroup, OwnerWindow
from torchtitan_dmuon.runtime.pool import ALIGNMENT, Place, Ranges, Record, Space, lay_out
from torchtitan_dmuon.runtime.runtime import Runtime

logger = logging.getLogger("torchtitan_dmuon")

# What the operators can sum.
_SUMMED = (torch.bfloat16, torch.float32)


def open_pool(runtime: Runtime, record: Record) -> None:
    """Open the pool of a model whose last micro-batch was recorded. Collective.

    No group is gathered and nothing is in flight.

    Raises:
        RuntimeError: ranks recorded different orders; both digests are named.
        NativeError: the library cannot be compiled.
        OSError: no memory, or NCCL or CUDA refused.
        CommunicationError: a rank did not come.
    """
    communicator = runtime.communicator
    assert isinstance(communicator, OperatorsCommunicator)
    groups = [group for group in runtime.groups if isinstance(group, OwnerGroup)]
    demands: dict[Place, int] = {}
    for group in groups:
        demands.update(_demands(group))
    ranges = lay_out(record, demands)
    windows = _plan_windows(groups, ranges)
    order = [group for group in runtime.order if isinstance(group, OwnerGroup)]
    copies = Copies(order, communicator)
    _agree(communicator, ranges, windows, copies)
    window_at = ranges.total
    copies_at = window_at + -(-windows.nbytes // ALIGNMENT) * ALIGNMENT
    memory = communicator.open(max(copies_at + copies.nbytes, ALIGNMENT))
    assert communicator.operators is not None
    window = communicator.operators.window
    runtime.pool.open(
        memory,
        ranges,
        {
            "owner window": windows.nbytes,
            "copies": copies.nbytes,
            "rings": window.ring_bytes,
            "control": window.control_bytes,
        },
    )
    windows.install(memory[window_at:copies_at])
    copies.install(memory[copies_at:])
    # Invariant: every rank has moved its copies in before any publishes into them; a late move
    # would bring the old weights back.
    communicator.exchange(torch.zeros(1, device=communicator.device))
    _log(runtime, groups, ranges, copies)


def _demands(group: OwnerGroup) -> dict[Place, int]:
    """Return the bytes of a group's places; none of a space that it cannot be placed in."""
    layout, precision = group.layout, group.precision
    found: dict[Place, int] = {}
    size = precision.compute.itemsize
    everything = range(len(group.parameters))
    if not group.resident and movable(
        layout.runs(everything, columns_only=True), size, layout.numel
    ):
        found[Space.PARAMETERS, group.index] = layout.numel * size
    size = precision.reduce.itemsize
    runs = layout.runs(group.trainable(), columns_only=False)
    if runs and precision.reduce in _SUMMED and movable(runs, size, layout.numel):
        found[Space.GRADIENTS, group.index] = layout.numel * size
    return found


class _Windows:
    """The owner windows of all groups, before and after they have memory.

    Each owner packs its runs from the beginning of its window, so the window is as large as the
    busiest owner needs.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], int] = {}
        self._starts: list[tuple[OwnerGroup, tuple[int, ...]]] = []

    @property
    def nbytes(self) -> int:
        return max(self._ends.values(), default=0)

    def add(self, group: OwnerGroup) -> None:
        """Plan a group's runs; starts in bytes."""
        starts = []
        for run in group.layout.runs(group.trainable(), columns_only=False):
            owner = (run.row, run.column)
            at = self._ends.get(owner, 0)
            starts.append(at)
            self._ends[owner] = at + aligned(run.numel * group.precision.reduce.itemsize)
        self._starts.append((group, tuple(starts)))

    def install(self, memory: torch.Tensor) -> None:
        """Give every group its part of the window's memory, uint8."""
        for group, starts in self._starts:
            dtype = group.precision.reduce
            flat = memory[: self.nbytes].view(dtype)
            firsts = tuple(start // dtype.itemsize for start in starts)
            parts = {}
            trainable = frozenset(group.trainable())
            runs = group.layout.runs(trainable, columns_only=False)
            for s in group.owned:
                if s.parameter not in trainable or s.numel == 0:
                    continue
                run, first = next(
                    (run, first)
                    for run, first in zip(runs, firsts, strict=True)
                    if run.offset <= s.offset < run.offset + run.numel
                )
                begin = first + s.offset - run.offset
                parts[s] = flat[begin : begin + s.numel]
            group.home = OwnerWindow(trainable, flat, firsts, parts)

    def starts(self) -> list[tuple[int, ...]]:
        """Return the first byte of every group's runs, at their owners."""
        return [starts for _, starts in self._starts]


def _plan_windows(groups: Sequence[OwnerGroup], ranges: Ranges) -> _Windows:
    windows = _Windows()
    for group in groups:
        # Sums of another dtype become the masters' on the way, so they need no window.
        same = group.precision.reduce is group.precision.master
        if same and (Space.GRADIENTS, group.index) in ranges.offsets:
            windows.add(group)
    return windows


def _agree(
    communicator: OperatorsCommunicator, ranges: Ranges, windows: _Windows, copies: Copies
) -> None:
    communicator.agree(
        ranges.digest((windows.starts(), copies.nbytes)),
        "ranks planned different pools",
        'layers ran in another order there; communication="c10d" needs no pool',
    )


def _log(
    runtime: Runtime,
    groups: Sequence[Group],
    ranges: Ranges,
    copies: Copies,
) -> None:
    if runtime.communicator is None or runtime.communicator.rank != 0:
        return
    outside = [
        group.name
        for group in groups
        if (Space.GRADIENTS, group.index) not in ranges.offsets
        or (not group.resident and (Space.PARAMETERS, group.index) not in ranges.offsets)
    ]
    logger.info(
        "pool: %.1f MiB on a rank (%s); %d of %d layers on the operators, publish by %s%s",
        runtime.pool.nbytes / 2**20,
        ", ".join(f"{part} {nbytes / 2**20:.1f}" for part, nbytes in runtime.pool.parts.items()),
        len(groups) - len(outside),
        len(groups),
        "one kernel" if copies.published else "broadcasts",
        f", the others (unaligned or unused) on collectives: {', '.join(outside[:8])}"
        if outside
        else "",
    )
