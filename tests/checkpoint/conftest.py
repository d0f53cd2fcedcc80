"""What the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchtitan_dmuon import cli

Dmuon = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dmuon(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Dmuon:
    """Run a command; return status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["dmuon", *map(str, arguments)])
        capfd.readouterr()
        status = cli.main()
        return status, *capfd.readouterr()

    return run
