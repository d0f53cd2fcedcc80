"""What is checked before a window between GPUs is opened, without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.worlds import run_world
from torchtitan_dmuon.comm import gin
from torchtitan_dmuon.comm.binding import WindowMesh
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.streams import CommunicationError
from torchtitan_dmuon.comm.window import Operation
from torchtitan_dmuon.native import NativeError
from torchtitan_dmuon.ownership import OwnerMesh


def mesh(rank: int, *, nodes: int = 2, user_bytes: int = 1 << 20) -> WindowMesh:
    return WindowMesh(
        nodes=nodes,
        rails=1,
        rank=rank,
        gather_nodes=1,
        user_bytes=user_bytes,
        timeout_seconds=5.0,
    )


def refused(case: str) -> str:
    """The error that this rank gets, or an empty text."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meshes = {
        "alike": mesh(rank),
        "sizes differ": mesh(rank, user_bytes=(1 + rank) << 20),
        "wrong size": mesh(rank, nodes=3),
        "one wrong rank": mesh(0),
    }
    assert dist.group.WORLD is not None
    try:
        gin._check_alike(dist.group.WORLD, meshes[case])
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("alike", ""),
        ("sizes differ", "disagree about the window"),
        ("wrong size", "rank 0: mesh of 3 x 1 ranks and rank 0, expected the process group's 2"),
        ("one wrong rank", "rank 1: mesh of 2 x 1 ranks and rank 0, expected .* and rank 1"),
    ],
)
def test_every_rank_hears_of_a_bad_mesh(case: str, words: str) -> None:
    """A mesh that differs on one rank, or does not fit the job, is the same error on all ranks:
    none is left waiting for the others."""
    answers = run_world(2, refused, case)
    assert answers[0] == answers[1]
    assert (answers[0] == "") == (words == "")
    assert re.search(words, answers[0])


class Nccl:
    """Stands for the gin library where there is no GPU: opens, or refuses, and tells a network."""

    def __init__(self, network: tuple[int, int] | str) -> None:
        self._network = network

    def call(self, name: str, *arguments: Any) -> None:
        if name == "dmuon_gin_network_of":
            target = arguments[1]._obj
            target.contexts, target.connections = self._network
        else:
            assert name in ("dmuon_gin_unique_id", "dmuon_memory_of", "dmuon_close")

    def open(self, mesh: WindowMesh, *arguments: object) -> ctypes.c_void_p:
        if isinstance(self._network, str):
            raise OSError(self._network)
        return ctypes.c_void_p()


def opened(networks: list[tuple[int, int] | str]) -> str:
    """What opening a window says on this rank, to which NCCL gives its entry of `networks`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    gin._library = lambda architecture: Nccl(networks[dist.get_rank()])  # type: ignore[assignment]
    gin.architecture = lambda device: "sm_90"
    assert dist.group.WORLD is not None
    try:
        gin.open_window(torch.device("cuda", 0), dist.group.WORLD, mesh(dist.get_rank()))
    except OSError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "opened"


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    ("networks", "words"),
    [
        ([(4, 2), (4, 2)], "opened"),
        ([(4, 2), (2, 2)], "rank 0 has 4 contexts on 2 connections, rank 1 has 2 on 2; use one"),
        ([(4, 2), (4, 1)], "rank 0 has 4 contexts on 2 connections, rank 1 has 4 on 1; use one"),
        ([(4, 2), "ncclDevCommCreate: no"], "gin: rank 1: ncclDevCommCreate: no"),
    ],
    ids=["alike", "contexts", "connections", "one_refused"],
)
def test_every_rank_hears_of_unequal_networks(
    networks: list[tuple[int, int] | str], words: str
) -> None:
    """NCCL may give fewer contexts than were asked for. Ranks with different numbers of them would
    wait for signals that are counted elsewhere: one error at the opening, the same on all ranks;
    and a rank that could not open is named on all."""
    answers = run_world(2, opened, networks)
    assert answers[0] == answers[1]
    assert words in answers[0]


def lacking() -> str:
    """What opening says on this rank if rank 1 has no compiler."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))

    def library(architecture: str) -> Nccl:
        if dist.get_rank() == 1:
            raise NativeError("nvcc: not on PATH")
        return Nccl((4, 2))

    gin._library = library  # type: ignore[assignment]
    gin.architecture = lambda device: "sm_90"
    assert dist.group.WORLD is not None
    try:
        gin.open_window(torch.device("cuda", 0), dist.group.WORLD, mesh(dist.get_rank()))
    except NativeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "opened"


@pytest.mark.usefixtures("rank_server")
def test_every_rank_hears_of_a_missing_compiler() -> None:
    """The others do not wait for a rank that fails before it has met them."""
    assert run_world(2, lacking) == ["gin: rank 1: nvcc: not on PATH"] * 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_torch_without_cuda_is_named() -> None:
    """On a CPU build the error says what is missing, before anything is compiled."""
    with pytest.raises(NativeError, match="this torch has no CUDA"):
        gin.architecture(torch.device("cuda", 0))


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need instructions of compute capability 8.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(NativeError, match=r"compute capability 7\.5, expected 8\.0"):
        gin.architecture(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert gin.architecture(torch.device("cuda", 0)) == "sm_100"


def test_the_communicator_asks_for_the_gpus_of_its_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the operators get the process group of all ranks and the mesh as nodes of neighbours;
    once per step, and at the end, a kernel that gave up waiting is an error."""
    asked: dict[str, object] = {}
    failed: list[str] = []

    class Window:
        nbytes = 1 << 20
        pointer = 0

        def __init__(self, mesh: WindowMesh) -> None:
            self.mesh = mesh

        def check(self, operation: Operation) -> None:
            if failed:
                raise CommunicationError(failed[0])

    def open_window(device: torch.device, group: object, mesh: WindowMesh) -> Window:
        asked.update(device=device, group=group, mesh=mesh)
        return Window(mesh)

    def connect(self: C10dCommunicator, ranks: object, device: torch.device, t: object) -> None:
        self.mesh, self.rank, self.device = OwnerMesh(rows=2, columns=8), 9, device
        self._all_ranks = [rank for row in ranks for rank in row]  # type: ignore[attr-defined]
        self._groups, self._streams = {"exchange": "all"}, {}  # type: ignore[dict-item]

    monkeypatch.setattr(gin, "open_window", open_window)
    memory = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(gin, "memory", lambda window, device: memory)
    monkeypatch.setattr(C10dCommunicator, "__init__", connect)
    monkeypatch.setattr(C10dCommunicator, "exchange", lambda self, values, maximum: None)
    device = torch.device("cuda", 1)
    ranks = [[8 * row + column for column in range(8)] for row in range(2)]
    communicator = OperatorsCommunicator(ranks, device, None, ranks_per_node=4)
    assert communicator.open(1000).shape == (1000,)
    assert (asked["device"], asked["group"]) == (device, "all")
    assert asked["mesh"] == WindowMesh(
        nodes=4,
        rails=4,
        rank=9,
        gather_nodes=2,
        user_bytes=1008,
        timeout_seconds=1800,
        names=tuple(range(16)),
    )
    communicator.exchange(torch.zeros(1))
    failed.append("gather of layer 3: rank 2 did not come")
    with pytest.raises(CommunicationError, match="rank 2 did not come"):
        communicator.exchange(torch.zeros(1))
    monkeypatch.setattr(gin, "prepare", lambda device: None)
    communicator.mesh = OwnerMesh(rows=1, columns=1)
    assert communicator.refusal() == "there is one GPU, and nobody to move data to"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_check_for_clusters_works_without_one() -> None:
    """The script that docs/hardware.md names runs, over shared memory, to its last line."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        + ["-m", "tests.operators.gin_check", "--fabric", "shm", "--nodes", "2"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("all right on 2 nodes x 2 ranks")
