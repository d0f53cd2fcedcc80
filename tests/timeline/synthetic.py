"""Traces made by hand, in the form in which torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN = 100
"""Thread that trains."""


def span(
    name: str, start: float, end: float | None, thread: int = MAIN, category: str = "cpu_op"
) -> dict[str, Any]:
    """Return an event of a host thread, microseconds; without an end if that is None."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start}
    return event if end is None else {**event, "dur": end - start}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return span(f"ProfilerStep#{number}", start, end, category="user_annotation")


def backward(start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return span("autograd::engine::evaluate_function: MmBackward0", start, end, thread)


def optimizer(start: float, end: float) -> dict[str, Any]:
    return span("Optimizer.step#Muon.step", start, end, category="user_annotation")


def moves(kind: str, start: float, end: float, thread: int) -> dict[str, Any]:
    """Return communication on a thread of its own."""
    return span(f"dmuon {kind} of layers.0 (rank 0 among ranks 0, 1)", start, end, thread)


def waits(kind: str, start: float, end: float | None, thread: int = MAIN) -> dict[str, Any]:
    return span(f"wait for dmuon {kind} of layers.0 (rank 0 among ranks 0, 1)", start, end, thread)


def kernel(
    name: str, start: float, end: float, stream: int, launched: float | None = None
) -> list[dict[str, Any]]:
    """Return a kernel of a GPU stream, and the call that launched it."""
    number = int(start * 1000 + stream)
    event = span(name, start, end, stream, "kernel")
    event |= {"pid": 0, "args": {"stream": stream, "correlation": number}}
    if launched is None:
        return [event]
    launch = span("cudaLaunchKernel", launched, launched + 1, category="cuda_runtime")
    return [event, {**launch, "args": {"correlation": number}}]


def text(events: list[dict[str, Any]], rank: int | None = 0) -> str:
    head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
    if rank is not None:
        head["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": 2}
    return json.dumps({**head, "traceEvents": events, "traceName": "x.json"}, indent=2)


def write(path: Path, events: list[dict[str, Any]], rank: int | None = 0) -> Path:
    data = text(events, rank).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
