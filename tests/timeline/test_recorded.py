"""Real traces: communication on CPUs runs beside compute, and the trace shows it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_dmuon as dmuon
from tests.runtime.plain import Run, dedicate, open_world
from tests.runtime.test_overlap import LAYERS, SlowStack
from tests.worlds import run_world
from torchtitan_dmuon.comm.c10d import C10dCommunicator
from torchtitan_dmuon.profiler import Profiler
from torchtitan_dmuon.timeline.command import analyse, find_files

SECONDS = 0.02

# torch says that each recording stands alone, and that one without warm-up is skewed.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler:UserWarning")


def train(folder: str, shape: tuple[int, int]) -> None:
    """Take four steps whose gathers and layers take some time each; record the last two."""
    submit = C10dCommunicator._submit

    def slowly(self: Any, name: str, label: str, ranks: Any, work: Any, after: Any) -> Any:
        def slow() -> None:
            time.sleep(SECONDS if name in ("gather", "publish") else 0)
            work()

        return submit(self, name, label, ranks, slow, after)

    C10dCommunicator._submit = slowly  # type: ignore[method-assign]
    mesh = open_world(shape)
    torch.manual_seed(0)
    model = SlowStack()
    dedicate(model, mesh, reshard_after_forward=True)
    optimizer = dmuon.Muon(model)
    x = Run(model, 0, True).x()
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with dmuon.profile(folder, schedule=schedule) as profiler:
        for _ in range(4):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dmuon.wait_for_publish(model)


@pytest.mark.timeout(120, func_only=True)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["gather", "publish"])
def test_a_trace_shows_the_overlap(tmp_path: Path, shape: tuple[int, int]) -> None:
    """One file per rank, numbered like the steps; gathers and publishes are hidden behind layers
    but for the first, and what is waited for is exposed."""
    run_world(2, train, str(tmp_path), shape, timeout_seconds=60)
    files = find_files(str(tmp_path))
    names = [str(path.relative_to(tmp_path)) for path in files]
    assert names == [f"iteration_4/rank{rank}_trace.json.gz" for rank in (0, 1)]
    for step in (3, 4):
        _, figures = analyse(files, step, -1)
        for rank in figures:
            parts = ("forward", "backward", "optimizer", "exposed", "publish_wait", "idle")
            total = sum(rank[f"{part}_ms"] for part in parts)
            assert total == pytest.approx(rank["step_ms"], abs=1e-3)
            # Of test_overlap's layers each takes 60 ms in both directions.
            assert rank["forward_ms"] > 60 * LAYERS * 0.9
            assert rank["backward_ms"] > 60 * LAYERS * 0.9
            assert rank["optimizer_ms"] > 0
            kind = "gather" if shape == (1, 2) else "publish"
            assert rank["communication"][kind] > SECONDS * 1e3 * LAYERS * 0.9
            assert rank["hidden"][kind] > SECONDS * 1e3 * LAYERS / 2
            if kind == "gather":
                # Nothing runs before the first layer's.
                assert rank["exposed"]["gather"] > SECONDS * 1e3 * 0.9
            assert rank["exposed"]["other"] > 0  # agreeing on gradients


def test_the_job_config_section(tmp_path: Path) -> None:
    """`[profiler]` of a job that goes on at step 8: files and ranges have the trainer's numbers,
    and the end of the job does not replace a whole trace by an empty one."""
    config = Profiler.Config(
        enable_profiling=True, profile_freq=2, profiler_warmup=1, save_traces_folder="traces"
    )
    with config.build(global_step=7, base_folder=str(tmp_path)) as profiler:
        for _ in range(5):
            torch.ones(3).add(1)
            profiler.step()
    found = sorted(p.name for p in (tmp_path / "traces").iterdir())
    assert found == ["iteration_10", "iteration_12", "iteration_8"]
    for number in (8, 10, 12):
        files = find_files(str(tmp_path / "traces" / f"iteration_{number}"))
        assert [p.name for p in files] == ["rank0_trace.json.gz"]
        _, figures = analyse(files, -1, -1)
        assert figures[0]["step"] == number
        assert figures[0]["forward_ms"] > 0


def test_every_step_can_be_recorded(tmp_path: Path) -> None:
    """With no pause between recordings the last file is that of the last step, not of the exit."""
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=1)
    written: list[Path] = []
    with dmuon.profile(tmp_path, schedule=schedule, written=written.append) as profiler:
        for _ in range(3):
            torch.ones(3).add(1)
            profiler.step()
    assert [path.parent.name for path in written] == [f"iteration_{n}" for n in (1, 2, 3)]
    assert analyse(find_files(str(tmp_path)), -1, -1)[1][0]["step"] == 3
    assert not list(tmp_path.rglob(".*"))


def test_a_profiler_that_is_off(tmp_path: Path) -> None:
    """The default costs nothing and writes nothing."""
    with Profiler.Config().build(base_folder=str(tmp_path)) as profiler:
        profiler.step()
    assert list(tmp_path.iterdir()) == []
    assert json.dumps(Profiler.Config().to_dict())
