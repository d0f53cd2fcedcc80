"""A layer's calls go out as one NCCL group inside a node, and one by one across nodes (paper D.2).

NCCL is not here. Its part is played by a stand-in over gloo that, as NCCL does, starts nothing
before the group ends and knows one process group only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.harness import open_world
from tests.worlds import run_world
from torchtitan_dmuon.comm import c10d
from torchtitan_dmuon.comm.communicator import Run
from torchtitan_dmuon.comm.streams import mark

CPU = torch.device("cpu")
NUMEL = 24


class Together:
    """Stands in for a group of NCCL calls.

    Attributes:
        sizes: Calls of each group that ended, by its collective.
        apart: Calls outside any group, by collective.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.apart: list[str] = []
        self._waiting: list[Any] | None = None
        self._names: list[str] = []
        self._group: dist.ProcessGroup | None = None
        for name in ("broadcast", "reduce"):
            setattr(dist, name, self._held(name, getattr(dist, name)))

    def _held(self, name: str, original: Any) -> Any:
        def call(tensor: torch.Tensor, root: int, group: Any, async_op: bool = False) -> Any:
            if self._waiting is None:
                self.apart.append(name)
                return original(tensor, root, group=group, async_op=async_op)
            assert group is self._group, "calls of two process groups in one"
            assert async_op, "a call that is waited for inside the group never ends"
            self._names.append(name)
            self._waiting.append(lambda: original(tensor, root, group=group, async_op=True))
            return None

        return call

    @contextmanager
    def manager(
        self, group: dist.ProcessGroup, device: torch.device, async_ops: bool
    ) -> Iterator[Together]:
        assert async_ops
        assert device == CPU
        assert self._waiting is None
        self._waiting, self._names, self._group = [], [], group
        yield self
        started, self._waiting = self._waiting, None
        assert len(set(self._names)) == 1
        self.sizes.append((self._names[0], len(started)))
        self._works = [start() for start in started]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _runs(rows: int, columns: int) -> list[Run]:
    """Return a run for each rank, of 2, 3, 4, ... elements."""
    runs, offset = [], 0
    for rank in range(rows * columns):
        runs.append(Run(offset, 2 + rank, *divmod(rank, columns)))
        offset += 2 + rank
    return runs


def _move(shape: tuple[int, int], ranks_per_node: int, backend: str) -> dict[str, Any]:
    open_world()
    rows, columns = shape
    together = Together()
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
    patch.setattr(c10d, "_coalescing_manager", together.manager)
    patch.setattr(dist, "get_backend", lambda group: backend)
    grid = torch.arange(rows * columns).reshape(shape).tolist()
    communicator = c10d.C10dCommunicator(grid, CPU, None)
    me, runs = dist.get_rank(), _runs(rows, columns)
    gathered = torch.full((NUMEL,), -1.0)

    def first() -> None:
        for run in runs:
            if run.column == communicator.column:
                run.of(gathered).fill_(run.column)

    communicator.gather("layer", gathered, runs, [mark(CPU)], first).wait()
    summed = torch.arange(float(NUMEL)) + me
    communicator.reduce("layer", summed, runs, [mark(CPU)], lambda: None).wait()
    mine = next(run for run in runs if (run.row, run.column) == divmod(me, columns))
    if rows > 1:
        communicator.publish("piece", torch.zeros(3), 0, [mark(CPU)]).wait()
    communicator.close()
    dist.destroy_process_group()
    return {
        "grouped": together.sizes,
        "apart": together.apart,
        "gathered": torch.cat([run.of(gathered) for run in runs]).tolist(),
        "summed": (mine.of(summed).tolist(), mine),
    }


# (rows and columns, ranks of a node, backend): groups, and calls outside them, of each rank.
SETTINGS = {
    "a row is a node": (
        ((2, 2), 2, "nccl"),
        [("broadcast", 4), ("reduce", 4)],
        ["reduce", "reduce", "broadcast"],
    ),
    "one node": (((1, 4), 4, "nccl"), [("broadcast", 4), ("reduce", 4)], []),
    "a row of two nodes": (((1, 4), 2, "nccl"), [], ["broadcast"] * 4 + ["reduce"] * 4),
    "gloo": (((1, 2), 2, "gloo"), [], ["broadcast"] * 2 + ["reduce"] * 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_calls_of_a_layer_are_one_group_inside_a_node_only(name: str) -> None:
    """Both patterns move the same, and each is used where the paper measured it to be faster."""
    (shape, ranks_per_node, backend), grouped, apart = SETTINGS[name]
    size = shape[0] * shape[1]
    for rank, log in enumerate(run_world(size, _move, shape, ranks_per_node, backend)):
        assert log["grouped"] == grouped, f"rank {rank}"
        assert log["apart"] == apart, f"rank {rank}"
        runs = _runs(*shape)
        assert log["gathered"] == [float(run.column) for run in runs for _ in range(run.numel)]
        found, mine = log["summed"]
        everybody = sum(range(size))
        wanted = [float(size * i + everybody) for i in range(mine.offset, mine.offset + mine.numel)]
        assert found == wanted, f"rank {rank}"
