"""Recordings of Newton-Schulz: the logic, with a recorder that runs on any device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from torchtitan_dmuon.optim.newton_schulz import newton_schulz
from torchtitan_dmuon.optim.replay import Recording, Replays, orthogonalize


class Recorder:
    """Records as CUDA graphs do: a replay computes from the static input into a static result."""

    def __init__(self, fail: bool = False) -> None:
        self.count, self.replays, self.fail = 0, 0, fail

    def __call__(self, compute: Any, source: torch.Tensor) -> Recording:
        if self.fail:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.count += 1
        static, result = torch.empty_like(source), torch.empty_like(source)

        def replay() -> None:
            self.replays += 1
            result.copy_(compute(static))

        return Recording(static, result, replay)


def test_a_shape_is_recorded_the_second_time_and_replayed_from_then_on() -> None:
    """Results are those of the plain computation, and do not change when the next one is made."""
    recorder = Recorder()
    replays = Replays(recorder)
    kept = []
    for i in range(4):
        for key, size in (("a", 3), ("b", 5)):
            x = torch.full((size,), float(i))
            kept.append((replays.run(key, lambda x: 2 * x, x), 2 * x))
    assert recorder.count == replays.recorded == 2
    assert recorder.replays == 2 * 3
    assert all(torch.equal(found, expected) for found, expected in kept)


def test_a_recording_that_fails_is_said_once_and_computed_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replays = Replays(Recorder(fail=True))
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        for i in range(4):
            x = torch.full((3, 2), float(i))
            assert torch.equal(replays.run("a", lambda x: x + 1, x), x + 1)
    (record,) = caplog.records
    assert "(3, 2)" in record.getMessage() and "stream is capturing" in record.getMessage()
    assert replays.recorded == 0


@pytest.mark.gpu
def test_replays_on_a_gpu_are_the_plain_computation() -> None:
    """Whatever the order of shapes, in one memory pool."""
    options = {"dtype": torch.float16}
    shapes = [(64, 256), (256, 64), (512, 1024), (3, 128, 256)]
    for i in range(4):
        for shape in shapes[i:] + shapes[:i]:
            generator = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(shape, device="cuda", generator=generator)
            expected = newton_schulz(x, **options)  # type: ignore[arg-type]
            torch.testing.assert_close(orthogonalize(x, **options), expected, rtol=0, atol=2e-3)
