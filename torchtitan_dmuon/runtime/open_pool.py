"""Opens the symmetric pool of a model: plans it, checks the plan, moves groups in (paper C.1)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator, movable
from torchtitan_dmuon.comm.window import WindowRefused
from torchtitan_dmuon.memory import give_back
from torchtitan_dmuon.native.segments import aligned
from torchtitan_dmuon.runtime.copies import Copies
from torchtitan_dmuon.runtime.group import Group, Precision
from torchtitan_dmuon.runtime.owner_group import OwnerGroup, OwnerWindow
from torchtitan_dmuon.runtime.pool import ALIGNMENT, Place, Ranges, Record, Space, lay_out
from torchtitan_dmuon.runtime.runtime import Runtime
from torchtitan_dmuon.runtime.transport import refuse

logger = logging.getLogger("torchtitan_dmuon")

# What the operators can sum.
_SUMMED = (torch.bfloat16, torch.float32)


# Micro-batches that are recorded before a job goes on without a pool.
_ATTEMPTS = 8
_NOTHING = -1


def open_pool(runtime: Runtime, record: Record | None) -> bool:
    """Open the pool of a model, if all ranks have recorded the same of a micro-batch. Collective.

    No group is gathered and nothing is in flight. Ranks whose layers ran in different orders, or of
    which some had no backward, record the next micro-batch, a few times; then all layers stay on
    collectives, and the log says so.

    Args:
        runtime: Of the model.
        record: What this rank has recorded; None: nothing yet.

    Returns:
        Whether there is nothing more to do: it is open, or will not be.

    Raises:
        NativeError: the library cannot be compiled.
        OperatorsRefused: no memory, or NCCL or CUDA refused, and the job insists on the operators.
        OSError: another error of the system, on this rank.
        CommunicationError: a rank did not come.
    """
    communicator = runtime.communicator
    assert isinstance(communicator, OperatorsCommunicator)
    groups = [group for group in runtime.groups if isinstance(group, OwnerGroup)]
    if record is None:
        return _is_over(runtime, communicator.digests(_NOTHING))
    demands: dict[Place, int] = {}
    for group in groups:
        demands.update(_demands(group))
    ranges = lay_out(record, demands)
    windows = _plan_windows(groups, ranges)
    order = [group for group in runtime.order if isinstance(group, OwnerGroup)]
    copies = Copies(order, communicator)
    # Invariant: offsets are the same on every rank, so that a place in one window is it in all.
    digest = ranges.digest((windows.starts(), copies.nbytes))
    digests = communicator.digests(digest)
    if any(other != digest for other in digests):
        return _is_over(runtime, digests)
    window_at = ranges.total
    copies_at = window_at + -(-windows.nbytes // ALIGNMENT) * ALIGNMENT
    # What groups had until here is freed, and the window does not come from torch's allocator.
    give_back(communicator.device)
    try:
        memory = communicator.open(max(copies_at + copies.nbytes, ALIGNMENT))
    except WindowRefused as error:
        refuse(communicator, str(error))
        runtime.close_pool()
        return True
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
    return True


def _is_over(runtime: Runtime, digests: Sequence[int]) -> bool:
    """Record again where ranks differ. Returns whether that was tried often enough."""
    if all(digest == _NOTHING for digest in digests):
        return False
    attempts = runtime.pool.record_again()
    over = attempts == _ATTEMPTS
    if over:
        runtime.close_pool()
    communicator = runtime.communicator
    if communicator is not None and communicator.rank == 0 and (over or attempts == 1):
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        logger.warning(
            "pool: mesh ranks 0 and %d ran their layers in different orders in the recorded "
            "micro-batch; %s",
            other,
            f"the last of {attempts}: all layers stay on collectives" if over else "trying again",
        )
    return over


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


def _copied(precision: Precision) -> str:
    made, summed = (
        str(dtype).removeprefix("torch.") for dtype in (precision.compute, precision.reduce)
    )
    return f"; gradients are copied into it: made in {made}, summed in {summed}"


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
        "pool: %.2f MiB on a rank (%s); %d of %d layers on the operators, publish by %s%s%s",
        runtime.pool.nbytes / 2**20,
        ", ".join(f"{part} {nbytes / 2**20:.2f}" for part, nbytes in runtime.pool.parts.items()),
        len(groups) - len(outside),
        len(groups),
        "one kernel" if copies.published else "broadcasts",
        f", the others (unaligned or without a gradient) on collectives: {', '.join(outside[:8])}"
        if outside
        else "",
        "" if any(group.born_in_place for group in groups) else _copied(groups[0].precision),
    )
