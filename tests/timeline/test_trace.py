"""Traces are read event by event, and what is no trace is refused in one line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.timeline.synthetic import backward, kernel, span, step, text, write
from torchtitan_dmuon.timeline import trace as reader
from torchtitan_dmuon.timeline.trace import TraceError, read_trace

EVENTS = [step(3, 0, 100), span("aten::mm", 10, 20), *kernel("gemm", 30, 40, 7, 15)]


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["rank1_trace.json.gz", "rank1_trace.json", "renamed.json.gz"])
@pytest.mark.parametrize("chunk", [7, 64, 2**20])
def test_reads(tmp_path: Path, monkeypatch: Any, name: str, chunk: int) -> None:
    """Compressed or not, wherever reads cut the text; the rank is the trace's own."""
    monkeypatch.setattr(reader, "_CHUNK", chunk)
    found = read_trace(write(tmp_path / name, EVENTS, rank=5))
    assert found.rank == 5
    assert found.main == "1/100"
    assert list(found.steps) == [3]
    assert [s.name for s in found.host] == ["ProfilerStep#3", "aten::mm"]
    assert found.kernels == [(30.0, 40.0, "0/7", "gemm", 15.0)]


def test_rank_from_the_name(tmp_path: Path) -> None:
    """A process without torch.distributed has no rank in its trace; the file may say it."""
    assert read_trace(write(tmp_path / "rank12_trace.json", EVENTS, rank=None)).rank == 12
    assert read_trace(write(tmp_path / "trace.json", EVENTS, rank=None)).rank == -1


def test_a_bare_list_of_events(tmp_path: Path) -> None:
    """Chrome's format also allows a list alone."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EVENTS))
    assert list(read_trace(path).steps) == [3]


def test_odd_events_are_passed_over(tmp_path: Path) -> None:
    """Events without name, time or with times that are no numbers do not end the reading."""
    odd: list[Any] = [
        3,
        "text",
        None,
        [1],
        {"ph": "X"},
        {"ph": "X", "name": 4, "ts": 1, "dur": 1, "cat": "cpu_op"},
        span("aten::mm", float("nan"), 1),
        {**span("aten::mm", 0, 1), "ts": "soon"},
        {**span("aten::mm", 0, 1), "ts": 10**400},
        {"ph": "M", "name": "thread_name", "args": {"name": "x"}},
    ]
    assert [s.name for s in read_trace(write(tmp_path / "t.json", odd + EVENTS)).host] == [
        "ProfilerStep#3",
        "aten::mm",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a trace: expected JSON with traceEvents"),
        (b"hello", "not a trace: expected JSON with traceEvents"),
        (b'{"a": 1}', "not a trace: expected JSON with traceEvents"),
        (b"\x1f\x8b\x08\x00garbage of a gz", "damaged, or another kind of file"),
        (b"\xff\xfe\x00\x01", "damaged, or another kind of file"),
        (gzip.compress(text(EVENTS).encode())[:-30], "ends in the middle"),
        (text(EVENTS).encode()[:-120], "ends in the middle"),
        (text([*EVENTS, "?"]).encode().replace(b'"?"', b'{"a": }'), "ends in the middle"),
        (b'{"traceEvents": [' + b"[" * 100_000, "damaged JSON"),
        (text([span("aten::mm", 0, 1)]).encode(), "no steps in it"),
        (text([step(1, 0, 1)]).encode(), "no steps in it"),
    ],
    ids=[
        "empty",
        "text",
        "json",
        "zip",
        "binary",
        "cut zip",
        "cut",
        "damaged",
        "deep",
        "no steps",
        "empty step",
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, says: str) -> None:
    """Each wrong file is named, with what is wrong."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert says in refused(path)


def test_damage_is_found_without_reading_on(tmp_path: Path, monkeypatch: Any) -> None:
    """An element that does not end is not collected without bound."""
    monkeypatch.setattr(reader, "_LARGEST_EVENT", 2**16)
    monkeypatch.setattr(reader, "_CHUNK", 2**12)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 2**20)
    assert "damaged JSON" in refused(path)
    path.write_text('{"other": "' + "x" * 2**20)
    assert "not a trace" in refused(path)


def test_limits(tmp_path: Path, monkeypatch: Any) -> None:
    """More events, or more text, than memory was planned for: refused, with what helps."""
    path = write(tmp_path / "trace.json.gz", [step(1, 0, 9), *[backward(1, 2)] * 50])
    monkeypatch.setattr(reader, "_MOST_EVENTS", 50)
    assert "more than 50 events; record fewer steps" in refused(path)
    monkeypatch.setattr(reader, "_MOST_EVENTS", 51)
    assert len(read_trace(path).host) == 51
    monkeypatch.setattr(reader, "_MOST_TEXT", 1000)
    assert "GiB of text" in refused(path)


def test_memory_follows_the_kept_events(tmp_path: Path) -> None:
    """Shapes and call sites, most of a trace, are let go as they are read."""
    bulky = {"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 1, "args": {}}
    bulky["args"] = {"stack": ["x" * 100] * 100}
    path = write(tmp_path / "trace.json", [step(1, 0, 9), backward(1, 2), *[bulky] * 1500])
    size = path.stat().st_size
    assert size > 15_000_000
    tracemalloc.start()
    try:
        read_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2, peak
