"""What is checked before a window between GPUs is opened, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.worlds import run_world
from torchtitan_dmuon.comm import gin
from torchtitan_dmuon.comm.binding import WindowMesh
from torchtitan_dmuon.native import NativeError


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
