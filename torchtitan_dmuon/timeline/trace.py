"""Reads Chrome traces of torch.profiler: event by event, keeping what a breakdown needs.

A trace of a large model has gigabytes of text, most of it shapes and call sites. It is decoded one
event at a time, so that memory follows the events that are kept, at most `_MOST_EVENTS` of a rank
(about 1 GB with what is computed of them), and not the file.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

_MOST_EVENTS = 3_000_000
_MOST_TEXT = 2**35  # of a file, uncompressed: a compressed one may claim any size
_CHUNK = 2**20
_LARGEST_EVENT = 2**24

_BETWEEN = re.compile(r"[\s,]*")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation")


class TraceError(ValueError):
    """A file that is not a usable trace; the message is one line and names it."""


class Span(NamedTuple):
    """Something that ran from `start` to `end` (microseconds) on a thread or stream."""

    start: float
    end: float
    thread: str
    name: str


class Kernel(NamedTuple):
    """Work on a GPU; `launched` is the host's time of its launch, None if that is unknown."""

    start: float
    end: float
    thread: str
    name: str
    launched: float | None


@dataclass(slots=True)
class Trace:
    """What one rank recorded.

    Attributes:
        path: The file.
        rank: Of the process; -1 if neither the trace nor its name says.
        host: Operators and named ranges of all host threads.
        kernels: Of GPU streams, by start.
        device: Named ranges as they passed on GPU streams.
        steps: Range of each step by its number.
        main: The thread that trains: that of the steps.
    """

    path: Path
    rank: int = -1
    host: list[Span] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    steps: dict[int, Span] = field(default_factory=dict)
    main: str = ""


def read_trace(path: Path) -> Trace:
    """Read the trace of one rank, plain or compressed.

    Raises:
        TraceError: it cannot be read, is no trace, is damaged, or is too large.
    """
    trace = Trace(path)
    reader = _Reader(path)
    launches: dict[Any, float] = {}
    waiting: list[tuple[Span, Any]] = []
    names: dict[str, str] = {}
    last = 0.0
    try:
        for event in reader.events():
            if event.get("ph") != "X" or not isinstance(event.get("name"), str):
                continue
            category = event.get("cat")
            start, duration = _number(event.get("ts")), _number(event.get("dur"))
            if start is None:
                continue
            # A range that was open when recording ended has no length, or none that can be.
            end = float("inf") if duration is None or duration < 0 else start + duration
            last = max(last, start if end == float("inf") else end)
            if category in _LAUNCHES:
                if (launch := _argument(event, "correlation")) is not None:
                    launches[launch] = start
                continue
            text = event["name"][:300]
            thread = f"{event.get('pid')}/{event.get('tid')}"
            span = Span(start, end, names.setdefault(thread, thread), names.setdefault(text, text))
            if category in _KERNELS:
                waiting.append((span, _argument(event, "correlation")))
            elif category == "gpu_user_annotation":
                trace.device.append(span)
            elif category in _HOST:
                trace.host.append(span)
            else:
                continue
            if len(trace.host) + len(trace.device) + len(waiting) + len(launches) > _MOST_EVENTS:
                raise TraceError(
                    f"{path}: more than {_MOST_EVENTS:,} events; record fewer steps "
                    "(profiler.profiler_active)"
                )
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise TraceError(f"{path}: {_reason(e)}") from e
    trace.rank = _rank_of(path, reader.head)
    trace.host = [_closed(span, last) for span in trace.host]
    trace.device = [_closed(span, last) for span in trace.device]
    trace.kernels = sorted(Kernel(*_closed(s, last), launches.get(c)) for s, c in waiting)
    _find_steps(trace)
    return trace


def _find_steps(trace: Trace) -> None:
    for span in trace.host:
        found = re.fullmatch(r"ProfilerStep#(\d{1,18})", span.name)
        if found:
            trace.steps[int(found[1])] = span
            trace.main = span.thread
    # A recording that ends with the job has a last step in which nothing happened any more.
    trace.steps = {n: span for n, span in trace.steps.items() if _has_content(trace, span)}
    if not trace.steps:
        raise TraceError(
            f"{trace.path}: no steps in it (no range ProfilerStep#N): call the profiler's step() "
            "after each training step, with a schedule"
        )


def _has_content(trace: Trace, step: Span) -> bool:
    return any(
        s.thread == step.thread and step.start <= s.start < step.end and s is not step
        for s in trace.host
    )


def _closed(span: Span, last: float) -> Span:
    return span if span.end != float("inf") else span._replace(end=last)


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if usable and abs(value) < 1e300 else None


def _argument(event: dict[str, Any], name: str) -> Any:
    arguments = event.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    return value if isinstance(value, int | str) else None


def _reason(error: Exception) -> str:
    if isinstance(error, gzip.BadGzipFile | zlib.error | UnicodeDecodeError):
        return "not a trace: damaged, or another kind of file"
    if isinstance(error, EOFError):
        return "it ends in the middle: was the job stopped while it was written?"
    return getattr(error, "strerror", None) or str(error)


def _rank_of(path: Path, head: str) -> int:
    found = re.search(r'"distributedInfo":\s*\{[^{}\[\]]*"rank":\s*(\d{1,9})\b', head)
    found = found or re.match(r"rank_?(\d{1,9})\D", path.name)
    return int(found[1]) if found else -1


class _Reader:
    """Decodes the events of a file one by one.

    Attributes:
        head: What stands before the events.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = ""
        self._text = ""
        self._at = 0
        self._read = 0
        self._file: IO[str]

    def events(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as probe:
            zipped = probe.read(2) == b"\x1f\x8b"
        with (
            gzip.open(self.path, "rt", encoding="utf-8")
            if zipped
            else open(self.path, encoding="utf-8")
        ) as self._file:
            self._find_list()
            decoder = json.JSONDecoder()
            while (event := self._next(decoder)) is not None:
                if isinstance(event, dict):
                    yield event

    def _more(self) -> bool:
        """Read on; drop what was decoded. Returns whether there was more."""
        chunk = self._file.read(_CHUNK)
        self._read += len(chunk)
        if self._read > _MOST_TEXT:
            raise TraceError(f"{self.path}: more than {_MOST_TEXT >> 30} GiB of text")
        self._text = self._text[self._at :] + chunk
        self._at = 0
        return bool(chunk)

    def _find_list(self) -> None:
        """Go to the first event: behind `"traceEvents": [`, or in a bare list."""
        while self._more() and not self._text.strip():
            pass
        if self._text.lstrip()[:1] == "[":
            self._at = self._text.index("[") + 1
            return
        while not (found := re.search(r'"traceEvents"\s*:\s*\[', self._text)):
            if len(self._text) > _LARGEST_EVENT or not self._more():
                raise TraceError(
                    f"{self.path}: not a trace: expected JSON with traceEvents, as torch.profiler "
                    "writes it"
                )
        self.head = self._text[: found.start()]
        self._at = found.end()

    def _next(self, decoder: json.JSONDecoder) -> Any:
        """Return the next element; None at the end of the list."""
        while True:
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                break
            if not self._more():
                raise EOFError
        if self._text[self._at] == "]":
            return None
        while True:
            try:
                event, self._at = decoder.raw_decode(self._text, self._at)
                # A number could go on in the next chunk; events are objects.
                return event if isinstance(event, dict) else ()
            except (json.JSONDecodeError, RecursionError) as e:
                long = len(self._text) - self._at > _LARGEST_EVENT
                if isinstance(e, RecursionError) or long:
                    raise TraceError(f"{self.path}: not a trace: damaged JSON") from e
                if not self._more():
                    raise EOFError from e
