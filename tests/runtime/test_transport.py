"""Which transport `dedicate_params` takes, and what it says when the operators cannot run."""

from __future__ import annotations

import logging
import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.harness import make_mesh, open_world
from tests.worlds import run_world
from torchtitan_dmuon.comm import operators_communicator
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.native import NativeError
from torchtitan_dmuon.runtime.runtime import Runtime
from torchtitan_dmuon.runtime.transport import OperatorsRefused

pytestmark = pytest.mark.usefixtures("rank_server")


def _runtime(communication: str, mode: str = "owner") -> Runtime:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    mesh: Any = make_mesh((1, 2))
    owned = dmuon.dedicate_params(
        model,
        mesh,
        communication=communication,  # type: ignore[arg-type]
        mode=mode,  # type: ignore[arg-type]
        cost="model",
        hook_boundary_predicate=lambda name, module: name == "0",
    )
    return owned.runtime


def _outcome(communication: str, mode: str = "owner") -> tuple[str, list[str]]:
    """Return whether there is a pool to open, or the error; and what was logged."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("torchtitan_dmuon")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        runtime = _runtime(communication, mode)
    except (OperatorsRefused, ValueError) as error:
        return f"{type(error).__name__}: {error}", said
    finally:
        logger.removeHandler(listener)
    communicator = runtime.communicator
    taken = isinstance(communicator, OperatorsCommunicator) and communicator.refused is None
    assert communicator is not None
    communicator.close()
    return ("operators" if taken else "c10d"), said


def _without_compiler(device: torch.device) -> str | None:
    if dist.get_rank() == 0:
        return None
    return str(NativeError("no g++"))


def _everything() -> list[tuple[str, list[str]]]:
    open_world()
    found = [
        _outcome("auto"),
        _outcome("c10d"),
        _outcome("auto", "gather"),
        _outcome("operators", "gather"),
    ]
    with patch.object(operators_communicator, "lack_of", _without_compiler):
        found += [_outcome("auto"), _outcome("operators")]
    with patch.object(socket, "gethostname", lambda: f"host{dist.get_rank()}"):
        found += [_outcome("auto"), _outcome("operators")]
    return found


def test_auto_takes_what_every_rank_can_and_says_why() -> None:
    """One rank that cannot is enough for c10d everywhere; "operators" is refused there, on every
    rank in the same words."""
    ranks = run_world(2, _everything, timeout_seconds=200)
    for rank, found in enumerate(ranks):
        outcomes = [outcome for outcome, _ in found]
        assert outcomes[:3] == ["operators", "c10d", "c10d"]
        assert (
            outcomes[3] == 'ValueError: communication: mode gather, the baseline, knows "c10d" only'
        )
        lacks, hosts = (
            "rank 1: no g++",
            "CPU ranks on several machines (host0, host1) share no memory",
        )
        for (auto, said), (refused, _), reason in (
            (*found[4:6], lacks),
            (*found[6:8], hosts),
        ):
            assert auto == "c10d"
            wanted = [f"communication: c10d, the operators cannot run: {reason}"]
            assert [s for s in said if "communication" in s] == (wanted if rank == 0 else [])
            assert refused == (
                f'OperatorsRefused: communication="operators": {reason}; "auto" takes "c10d" where '
                "they cannot run"
            )
