"""The server that ranks are forked from, and the library, are ready before the first test."""

from __future__ import annotations

import os

import pytest

from tests.worlds import run_world
from torchtitan_dmuon.comm.operators import Operators


def _open() -> None:
    Operators.shm(f"first-{os.getpid()}", nodes=1, rails=1, rank=0, window_bytes=16).close()


@pytest.fixture(scope="session")
def rank_server() -> None:
    run_world(1, _open, timeout_seconds=250)
