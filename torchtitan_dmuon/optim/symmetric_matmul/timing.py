"""How long a product takes on the device alone, and a race of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

MIN_ROUNDS, MAX_ROUNDS = 5, 20
BUDGET_SECONDS = 1.0
"""A race of this length ends after `MIN_ROUNDS`; one of five times this after any."""

DROP_FACTOR = 2.0
"""Who needed this multiple of the best time in each of three rounds runs no more."""

_LAUNCHES = 4  # Per graph: enough that the resolution of CUDA events, half a microsecond, is small.

Call = Callable[[], torch.Tensor]
Stopwatch = Callable[[Call, torch.device], Callable[[], float]]
"""Prepares a call on a device; each call of the result runs it and returns seconds."""


def stopwatch(call: Call, device: torch.device) -> Callable[[], float]:
    """The `Stopwatch` of real time.

    On a GPU the call is captured in a CUDA graph and the replay is timed with events, so the host
    does not count: a Newton-Schulz is replayed, too. A call that can not be captured fails here.
    The call must have run before, so that nothing is compiled or loaded while it is timed.
    """
    if device.type != "cuda":

        def once() -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return once

    graph = torch.cuda.CUDAGraph()
    # Other threads of a training process (NCCL's watchdog, async saving) go on using CUDA.
    with torch.cuda.device(device):
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_LAUNCHES):
                call()
        graph.replay()

    def replay() -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1000 / _LAUNCHES

    return replay


def race(entrants: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Run all in turns, starting with another one each round, and return seconds by name.

    A time is the least of an entrant's: other work on the machine only ever adds. Turns spread such
    work over all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in entrants}
    running = list(entrants)
    spent = 0.0
    for number in range(MAX_ROUNDS):
        first = number % len(running)
        for name in running[first:] + running[:first]:
            seconds = entrants[name]()
            times[name].append(seconds)
            spent += seconds
        if number >= 2:
            best = min(min(t) for t in times.values())
            running = [name for name in running if min(times[name]) <= DROP_FACTOR * best]
        long = BUDGET_SECONDS if number + 1 >= MIN_ROUNDS else 5 * BUDGET_SECONDS
        if spent > long or len(running) == 1:
            break
    return {name: min(t) for name, t in times.items()}
