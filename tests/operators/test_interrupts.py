"""Signals while C++ waits: Python's handlers run, and what they raise ends the wait."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import job_name, my_rank
from tests.worlds import run_world
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.operators import Operators, Publish, Segment

pytestmark = pytest.mark.usefixtures("rank_server")

LIMIT = 60.0
"""Seconds that C++ waits; what ends long before was interrupted."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _interrupted_opening(job: str) -> float:
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cases.open_operators(job, (1, 2), seconds=LIMIT)
    return time.monotonic() - begin


def test_an_opening_is_interrupted() -> None:
    """Ctrl-C while a rank is awaited ends the opening, and takes its memory with it."""
    job = job_name()
    (seconds,) = run_world(1, _interrupted_opening, job)
    assert seconds < LIMIT / 2
    assert not list(Path("/dev/shm").glob(f"dmuon-{os.getuid()}-{job}-*"))


def _interrupted_call(job: str, folder: str) -> str:
    operators = cases.open_operators(job, (1, 2), seconds=LIMIT)
    group = operators.all_gather_v([Segment(0, 64, 0)], label="layer.3")
    buffer = operators.empty(64, torch.uint8)
    if my_rank() == 1:
        cases.meet(folder, 2)
        return "did not call"
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.run(buffer)
    assert time.monotonic() - begin < LIMIT / 2
    with pytest.raises(CommunicationError) as caught:
        group.run(buffer)
    cases.meet(folder, 2)
    return str(caught.value)


def test_a_call_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in run(); the others still count on the call, so later ones are refused."""
    texts = run_world(2, _interrupted_call, job_name(), str(tmp_path))
    assert texts[0] == (
        "after a failed call: all_gather_v of layer.3: rank 0 was interrupted in call 1"
    )


def _disturbed_calls(job: str) -> tuple[int, int]:
    operators = cases.open_operators(job, (1, 2), seconds=LIMIT)
    group = operators.all_gather_v([Segment(0, 64, 1 - 1, 1)], label="layer.3")
    buffer = operators.empty(64, torch.uint8)
    handled = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled
        handled += 1

    buffer.fill_(my_rank())
    if my_rank() == 1:
        for call in range(3):
            time.sleep(0.3)
            buffer.fill_(10 + call)
            group.run(buffer)
    else:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        for call in range(3):
            group.run(buffer)
            assert buffer[0] == 10 + call
        signal.setitimer(signal.ITIMER_REAL, 0)
    return handled, int(buffer[0])


def test_a_call_goes_on_after_a_signal() -> None:
    """A handler that raises nothing, as a profiler's, runs while the call waits and changes
    nothing."""
    (handled, first), (_, second) = run_world(2, _disturbed_calls, job_name())
    assert handled > 3
    assert (first, second) == (12, 12)


def _publish_alone(seconds: float = LIMIT) -> tuple[Operators, Publish]:
    """One row: its own release is what a wait is for."""
    operators = cases.alone(timeout=timedelta(seconds=seconds))
    buffer = operators.empty(64, torch.uint8)
    return operators, operators.publish([Segment(0, 64, 0)], buffer, label="weights")


def _interrupted_wait() -> float:
    _, publish = _publish_alone()
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        publish.wait(0, 1, 1)
    seconds = time.monotonic() - begin
    publish.release(0)
    publish.wait(0, 1, 1)
    return seconds


def test_a_wait_for_a_publish_is_interrupted() -> None:
    """Ctrl-C while a task is awaited; the publish itself is none the worse."""
    (seconds,) = run_world(1, _interrupted_wait)
    assert seconds < LIMIT / 2


def _disturbed_wait() -> tuple[int, str, float]:
    _, publish = _publish_alone(2.0)
    handled = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled
        handled += 1

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        publish.wait(0, 1, 1)
    return handled, str(caught.value), time.monotonic() - begin


def test_signals_do_not_prolong_a_wait() -> None:
    """Handlers run while a task is awaited, and the limit counts on from where it stood."""
    ((handled, text, seconds),) = run_world(1, _disturbed_wait)
    assert handled > 3
    assert "weights" in text
    assert seconds < LIMIT / 2
