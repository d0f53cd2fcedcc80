"""What all tests of the runtime share: ranks that start at once, and what they move data over.

The server that ranks are forked from starts before the first test, outside its time limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.communication import choose
from tests.worlds import run_world


def nothing() -> None:
    return


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    run_world(1, nothing, timeout_seconds=250)


@pytest.fixture(autouse=True)
def communication(request: pytest.FixtureRequest) -> Iterator[str]:
    """c10d, or what `each_communication` says."""
    chosen = getattr(request, "param", "c10d")
    with choose(chosen):
        yield chosen
