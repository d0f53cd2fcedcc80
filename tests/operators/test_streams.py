"""The limits and the end of a CPU stream."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchtitan_dmuon.comm.streams import CommunicationError, HostStream

BACKSTOP = 30.0
"""Seconds that a stream adds to its operations' own limit."""


def _stream(limit: float, name: str = "dmuon_test") -> HostStream:
    return HostStream(name, limit - BACKSTOP)


def _alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_the_limit_is_that_of_one_piece() -> None:
    """A caller that waits behind many pieces is not told that its own has taken too long."""
    stream = _stream(2.0)
    events = [stream.submit(f"call {i}", lambda: time.sleep(0.5)) for i in range(6)]
    events[-1].wait()
    stream.close()


def test_work_behind_another_stream_has_that_ones_limit() -> None:
    """A piece that waits for others has not begun: only their own limits count meanwhile."""
    slow, quick = _stream(20.0), _stream(0.5)
    behind = quick.submit("behind", lambda: None, [slow.submit("slow", lambda: time.sleep(1.5))])
    behind.wait()
    time.sleep(0.7)  # An idle stream has not stood still.
    quick.submit("later", lambda: None).wait()


def test_a_piece_that_takes_too_long_is_named() -> None:
    """The backstop, for operations that do not keep their own limit."""
    stream, end = _stream(0.3), threading.Event()
    event = stream.submit("gather of layer.3", end.wait)  # type: ignore[arg-type]
    begin = time.monotonic()
    with pytest.raises(CommunicationError, match=r"gather of layer\.3: not finished after 0 s"):
        event.wait()
    assert 0.3 <= time.monotonic() - begin < 20
    end.set()
    deadline = time.monotonic() + 20
    while True:  # The same event, once its piece has ended.
        try:
            event.wait()
            break
        except CommunicationError:
            assert time.monotonic() < deadline


def test_a_closed_stream_refuses() -> None:
    """At once: nobody would run it."""
    stream = _stream(20.0)
    ran: list[int] = []
    stream.submit("before", lambda: ran.append(1))
    stream.close()
    assert ran == [1]
    with pytest.raises(CommunicationError, match="after: its stream is closed"):
        stream.submit("after", lambda: ran.append(2))
    stream.close()


def test_a_dropped_stream_ends_its_thread() -> None:
    """Once what was submitted has run."""
    ran: list[int] = []
    stream = _stream(20.0, "dmuon_dropped")
    stream.submit("work", lambda: time.sleep(0.2))
    last = stream.submit("work", lambda: ran.append(1))
    assert _alive("dmuon_dropped")
    del stream
    gc.collect()
    last.wait()
    deadline = time.monotonic() + 20
    while _alive("dmuon_dropped"):
        assert time.monotonic() < deadline, "the thread stays"
        time.sleep(0.01)
    assert ran == [1]


def test_a_failure_is_kept_until_somebody_is_told() -> None:
    """Closing can then say what nobody has heard."""
    stream = _stream(20.0)

    def fail() -> None:
        raise ValueError("no route")

    event = stream.submit("gather", fail)
    stream.close()
    assert str(stream.failure) == "gather: no route"
    assert not stream.told
    with pytest.raises(CommunicationError, match="gather: no route"):
        event.wait()
    assert stream.told


def _leave_with_work(path: str) -> None:
    """Return while a piece of work runs and another waits, with nobody holding the stream."""

    def work(text: str) -> None:
        time.sleep(0.3)
        with open(path, "a") as file:
            file.write(text)

    stream = HostStream("leaves", 10)
    stream.submit("first", lambda: work("first "))
    stream.submit("second", lambda: work("second"))


@pytest.mark.parametrize("how", ["child", "script"])
def test_a_process_ends_when_its_work_is_done(how: str, tmp_path: Path) -> None:
    """Others may still wait for what it sends; children of multiprocessing run no atexit."""
    path = str(tmp_path / "done")
    if how == "child":
        child = multiprocessing.get_context("spawn").Process(target=_leave_with_work, args=(path,))
        child.start()
        child.join(50)
        assert child.exitcode == 0
    else:
        code = f"from {__name__} import _leave_with_work; _leave_with_work({path!r})"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
    assert Path(path).read_text() == "first second"
