"""What all tests of the runtime share: ranks that start at once, and what they move data over.

The server that ranks are forked from starts before the first test, outside its time limit.
"""

from __future__ import annotations

import pytest

from tests.worlds import run_world


def nothing() -> None:
    return


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    run_world(1, nothing, timeout_seconds=250)


@pytest.fixture(autouse=True)
def _chosen(communication: str) -> None:
    """Every test of this folder may be run over each transport."""
