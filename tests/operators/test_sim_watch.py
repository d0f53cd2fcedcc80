"""Long simulations: they say how far they are, and Ctrl-C ends them."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.operators.test_sim_operator import dmuon_simulate, small
from torchtitan_dmuon.native.segments import Segment
from torchtitan_dmuon.simulator import command, watch
from torchtitan_dmuon.simulator.binding import library
from torchtitan_dmuon.simulator.cluster import shipped
from torchtitan_dmuon.simulator.operator import predict, predict_publish

LONG = ("operator", "--gpus", "512", "--bytes", str(2**32))
"""Takes minutes."""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, as in a program of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130 and one line, while C++ runs; no thread goes on behind it."""
    seen: list[float] = []

    def interrupt(_: command.Progress, share: float) -> None:
        seen.append(share)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(command.Progress, "__call__", interrupt)
    library()  # compiled before the clock runs
    start = time.monotonic()
    assert dmuon_simulate(monkeypatch, *LONG) == 130
    assert time.monotonic() - start < 60
    assert capsys.readouterr().err == "stopped\n"
    assert not [t for t in threading.enumerate() if t.name == "dmuon-simulate"]


@pytest.mark.parametrize(
    ("operation", "nodes"),
    [
        ("allgatherv", 1),
        ("allgatherv", 3),
        ("reducescatterv", 1),
        ("reducescatterv", 3),
        ("publish", 3),
    ],
)
def test_a_run_ends_at_its_whole(operation: str, nodes: int) -> None:
    """What counts as done adds up to what was to be done: shares grow, and the last is 1."""
    shares: list[float] = []
    cluster, segments = small(nodes)
    if operation == "publish":
        tasks = [Segment(i * 16, 16, i % nodes) for i in range(5)]
        predict_publish(cluster, nodes, tasks, progress=shares.append)
    else:
        predict(operation, cluster, nodes, segments, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_a_star_ends_at_its_whole() -> None:
    """The same on the star path."""
    shares: list[float] = []
    segments = [Segment(i * 8192, 8192, i) for i in range(4)]
    found = predict("reducescatterv", shipped("h100_400g"), 4, segments, progress=shares.append)
    assert found.path == "star" and shares[-1] == 1.0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_how_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing for two seconds; then one line on a terminal, a line now and then in a file."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal, file = _Terminal(), io.StringIO()
    both = [command.Progress(terminal), command.Progress(file)]
    for after, share in ((1.0, 0.1), (3.0, 0.25), (4.0, 0.5), (20.0, 0.04), (21.0, 1.0)):
        now = 100.0 + after
        for progress in both:
            progress(share)
    for progress in both:
        progress.close()
    assert file.getvalue() == (
        "simulating: 25%, about 9 s left\nsimulating: 4%, about 8 min left\n"
    )
    shown = terminal.getvalue().split("\r")
    assert [x.removesuffix("\x1b[K") for x in shown] == [
        "",
        "simulating: 25%, about 9 s left",
        "simulating: 50%, about 4 s left",
        "simulating: 4%, about 8 min left",
        "",
    ]


def test_what_a_run_raises_reaches_who_waits() -> None:
    """An error of the thread is raised where the result is wanted."""
    with pytest.raises(ZeroDivisionError):
        watch.watched(lambda _: 1 // 0, None)
    assert watch.watched(lambda _: sys.maxsize, None) == sys.maxsize
