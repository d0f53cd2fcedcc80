"""The examples run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _losses(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize(
    "ranks, rows",
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
    ids=["one", "fsdp", "ddp"],
)
def test_own_loop_trains(ranks: int, rows: int, tmp_path: Path) -> None:
    """A loop of one's own trains on one process and on several, says where matrices went, and
    leaves a checkpoint."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, "examples/own_loop.py", "--steps", "20", "--layers", "2", "--batch", "16"]
    command += ["--checkpoints", str(tmp_path)]
    done = subprocess.run(
        [*command, "--replicate", str(rows)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "matrix: 8 parameters (12 matrices)" in done.stdout
    assert (tmp_path / "step-20" / ".metadata").is_file()
    losses = _losses(done.stdout)
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("ranks, layout", [(4, "2 nodes of 2"), (3, "1 nodes of 3")])
def test_operators_alone(ranks: int, layout: str) -> None:
    """The operators move segments between processes without a model."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", "examples/operators.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    owned = 2 * 4 * 1000 * ranks * (ranks + 1) // 2
    expected = f"{2 * ranks} segments, {owned:,} bytes: gathered on all {ranks} ranks"
    assert expected in done.stdout and layout in done.stdout
