"""Communication on CPUs really runs beside compute, forward, backward and across the step.

Operations take a fixed time here, by a sleep in the communication thread, and so do layers. The
serial run waits for each operation where it is started.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.communication import (
    Work,
    each_communication_at_length,
    run_world,
    warm_up,
    watch,
)
from tests.runtime.plain import Block, Run, dedicate, open_world
from torchtitan_dmuon.comm.window import WindowPublish

LAYERS, SECONDS = 6, 0.06


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return gradient


class Slow(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pause.apply(super().forward(x))


class SlowStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def slow_down(name: str, serial: bool) -> None:
    """Make operations of one kind take `SECONDS` longer; wait for all of them if `serial`."""
    kinds = (name, {"gather": "all_gather_v", "reduce": "reduce_scatter_v"}.get(name))

    def slowly(kind: str, label: str, work: Work) -> Work:
        def slow() -> None:
            if kind in kinds:
                time.sleep(SECONDS)
            work()

        return slow

    watch(slowly, serial=serial)


def slow_down_publish() -> None:
    """Make the operators' publish, one call for all layers, end later than its tasks arrive."""
    run = WindowPublish.run

    def slow(self: Any, step: int, stream: int | None = None) -> None:
        run(self, step, stream)
        time.sleep(SECONDS * LAYERS)

    WindowPublish.run = slow  # type: ignore[method-assign]


def measure(shape: tuple[int, int], kind: str, serial: bool) -> tuple[float, float, float]:
    """Return the shortest of two forwards, backwards, and steps with the next forward."""
    mesh = open_world(shape)
    torch.manual_seed(0)
    model = SlowStack()
    runtime = dedicate(model, mesh, reshard_after_forward=True).runtime
    optimizer = dmuon.Muon(model)
    x = Run(model, 0, True).x()
    warm_up(lambda: model(x).sum().backward(), optimizer.step)
    model(x).sum().backward()  # records the order of the layers
    if kind == "publish" and runtime.publisher is not None:
        slow_down_publish()
    else:
        slow_down(kind, serial)
    times = []
    for _ in range(2):
        marks = [time.monotonic()]
        loss = model(x).sum()
        marks.append(time.monotonic())
        loss.backward()
        marks.append(time.monotonic())
        optimizer.step()
        if serial and runtime.publisher is not None:
            runtime.publisher.finish()
        with torch.no_grad():
            model(x)
        dmuon.wait_for_publish(model)
        marks.append(time.monotonic())
        times.append([b - a for a, b in pairwise(marks)])
    forward, backward, step = map(min, zip(*times, strict=True))
    return forward, backward, step


def both(shape: tuple[int, int], kind: str, phase: int) -> tuple[float, float]:
    overlapped = run_world(2, measure, shape, kind, False, timeout_seconds=30)
    serial = run_world(2, measure, shape, kind, True, timeout_seconds=30)
    return max(r[phase] for r in overlapped), max(r[phase] for r in serial)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param("gather", 0, marks=pytest.mark.long),
        ("gather", 1),
        ("reduce", 1),
    ],
    ids=str,
)
def test_gathers_and_reductions_run_beside_layers(kind: str, phase: int) -> None:
    overlapped, serial = both((1, 2), kind, phase)
    # Of LAYERS operations all but the first or last can hide; half of that must.
    assert overlapped < serial - SECONDS * LAYERS / 2, (overlapped, serial)


@each_communication_at_length
@pytest.mark.timeout(60, func_only=True)
def test_publishes_run_beside_the_next_forward() -> None:
    overlapped, serial = both((2, 1), "publish", 2)
    assert overlapped < serial - SECONDS * LAYERS / 2, (overlapped, serial)
