"""Every way to give a mesh means the same ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchtitan_dmuon as dmuon
from tests.runtime.communication import each_communication, run_world
from tests.runtime.heads import full_weights
from tests.runtime.plain import Run, Stack, dedicate, open_world
from tests.worlds import RankFailed
from torchtitan_dmuon.comm.c10d import C10dCommunicator


def train(mesh: DeviceMesh, replicate: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack()
    dedicate(model, mesh, replicate_mesh=replicate)
    optimizer = dmuon.Muon(model, lr=0.02)
    for step in range(3):
        optimizer.zero_grad()
        model(Run(model, dist.get_rank(), True, step).x()).pow(2).sum().backward()
        optimizer.step()
    return full_weights(model)


def same_mesh_twice() -> None:
    mesh = open_world((2, 3))
    apart = train(mesh["shard"], mesh["replicate"])
    for name, weight in train(mesh).items():
        assert torch.equal(weight, apart[name]), name


@each_communication
def test_a_replicate_mesh_and_a_mesh_of_two_axes_are_the_same() -> None:
    """On 2 x 3 ranks, bit for bit: the same owners, the same order of sums."""
    run_world(6, same_mesh_twice, timeout_seconds=55)


def any_ranks() -> list[float]:
    open_world((1, 4))
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([3, 1], [0, 2])]
    mine = next(m for m in meshes if m.get_coordinate() is not None)
    weights = train(mine)
    return [float(w.double().sum()) for w in weights.values()]


@each_communication
def test_a_mesh_may_be_a_part_of_the_world_in_any_order() -> None:
    """Two models on two ranks each, one of them with its ranks in descending order."""
    results = run_world(4, any_ranks, timeout_seconds=55)
    assert results[3] == results[1] and results[0] == results[2] and results[0] != results[1]


def told(grid: list[list[int]]) -> tuple[list[float], list[float]]:
    dist.init_process_group("gloo")
    communicator = C10dCommunicator(grid, torch.device("cpu"), None)
    mine = torch.tensor([float(dist.get_rank())])
    return communicator.collect(mine)[:, 0].tolist(), communicator.collect_column(mine)[
        :, 0
    ].tolist()


def test_what_ranks_tell_is_in_the_order_of_the_mesh() -> None:
    """Process groups sort their ranks; errors name ranks by these positions."""
    grid = [[3, 1], [0, 2]]
    for rank, (every, column) in enumerate(run_world(4, told, grid, timeout_seconds=30)):
        assert every == [3, 1, 0, 2]
        assert column == ([3, 0] if rank in (0, 3) else [1, 2])


def outside() -> None:
    open_world((1, 2))
    dmuon.dedicate_params(Stack(), DeviceMesh("cpu", [0]))


def test_a_rank_outside_the_mesh_is_told() -> None:
    with pytest.raises(RankFailed, match="mesh: rank 1 is not in"):
        run_world(2, outside, timeout_seconds=55)


def too_many_axes() -> None:
    open_world((1, 2))
    dmuon.dedicate_params(Stack(), init_device_mesh("cpu", (1, 1, 2)))


def test_three_axes_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"mesh: expected \(shard,\) or .* got 3 axes"):
        run_world(2, too_many_axes, timeout_seconds=55)
