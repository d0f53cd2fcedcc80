"""Smoke runs as a user starts them: one job with `--smoke`, and scripts/smoke.sh over several."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "mode"),
    [
        ("qwen_moe_hsdp_z3.toml", "C", "qwen_moe debug: .* owner on 2 x 2 cpu ranks"),
        pytest.param(
            *("llama3b_hsdp_z3.toml", "C", "llama3 3.2-3B-toy: .* owner on 2 x 2 cpu ranks"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("qwen1.5b_fsdp_z2.toml", "A", "qwen2_5 1.5B-toy: .* fsdp on 1 x 4 cpu ranks"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_full_size_config_runs_here(tmp_path: Path, name: str, line: str, mode: str) -> None:
    """A job for clusters takes five steps on four CPU ranks, with its mode and layout, whatever
    NGPU says, and tells what is not as in its file."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torchtitan_dmuon.launch"]
        + ["--config", name, "--smoke", "--line", line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NGPU": "8"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(mode, done.stdout)
    assert re.search(r"smoke: dataloader +dataset random_tokens \(was fineweb_edu\)", done.stdout)
    losses = [float(x) for x in re.findall(r"loss: +([\d.]+)", done.stdout)]
    assert len(losses) == 5
    # Random tokens of a vocabulary of 2048: log(2048) = 7.62 for a model that knows nothing.
    assert all(7.3 < loss < 8.5 for loss in losses)
    assert (tmp_path / "outputs" / "smoke" / Path(name).stem / "logs").is_dir()


_STAND_IN = """\
#!/usr/bin/env bash
echo "$*" >>calls
case $* in
  *broken*) echo "error: no such thing" >&2; exit 2 ;;
  *lost*) echo "step:  1  loss:  7.5  tps"; exit 0 ;;
  *nan*) loss=nan ;;
  *) loss=6.25 ;;
esac
echo "step:  1  loss:  7.50000  grad_norm"
echo "step:  5  loss:  $loss  grad_norm"
echo "done: step 5 of 5"
"""


def _script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/smoke.sh in a tree whose run_train.sh only pretends to train."""
    for folder in ("scripts", "train_configs"):
        (tmp_path / folder).mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "smoke.sh", tmp_path / "scripts")
    (tmp_path / "train_configs" / "family.toml").write_text("")
    for leaf in ("first", "second"):
        (tmp_path / "train_configs" / f"{leaf}.toml").write_text('base = "family.toml"\n')
    program = tmp_path / "run_train.sh"
    program.write_text(_STAND_IN)
    program.chmod(0o755)
    return subprocess.run(
        [str(tmp_path / "scripts" / "smoke.sh"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_script_runs_all_configs_and_prints_a_table(tmp_path: Path) -> None:
    """Without names every job runs, except the files that others build on."""
    done = _script(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split()[:5] for line in done.stdout.splitlines()[1:]]
    assert rows == [[name, "file", "ok", "7.50000", "6.25"] for name in ("first", "second")]


def test_the_script_fails_if_one_run_failed(tmp_path: Path) -> None:
    """An exit status, missing steps and a loss that is no number count; the others still run."""
    done = _script(tmp_path, "broken.toml", "lost", "nan.toml", "fine", "--line", "A", "--line=C")
    assert done.returncode == 1
    rows = [x.split()[:3] for x in done.stdout.splitlines()[1:] if not x.startswith("  ")]
    results = {"broken": "failed", "lost": "failed", "nan": "failed", "fine": "ok"}
    assert rows == [[name, line, r] for name, r in results.items() for line in "AC"]
    assert "status 2, outputs/smoke/broken-A/smoke.log: error: no such thing" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1] == "--config fine --smoke --dump_folder outputs/smoke/fine-C --line C"


@pytest.mark.parametrize("arguments", [["--line", "D"], ["--line"], ["--lines", "A"]])
def test_the_script_names_a_wrong_argument(tmp_path: Path, arguments: list[str]) -> None:
    """One line, status 2, nothing run."""
    done = _script(tmp_path, *arguments)
    assert done.returncode == 2 and not (tmp_path / "calls").exists()
    assert done.stderr.startswith("error: --line") and done.stderr.count("\n") == 1
