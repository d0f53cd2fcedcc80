"""What every test shares: which markers are skipped, with the reason in the summary, and what a
test's ranks communicate over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def communication(request: pytest.FixtureRequest) -> Iterator[str]:
    """c10d, or what `each_communication` says (tests/runtime/communication.py)."""
    from tests.runtime.communication import choose

    chosen = getattr(request, "param", "c10d")
    with choose(chosen):
        yield chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests that CI has no time for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: scripts/test.sh --long runs it"))

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA GPU: run it on a machine with one")
            )
