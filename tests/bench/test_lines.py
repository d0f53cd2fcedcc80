"""`dmuon bench`: its figures, its options and its mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from torchtitan_dmuon import cli
from torchtitan_dmuon.bench.layouts import find_layouts
from torchtitan_dmuon.bench.lines import Entry, Options, check_options, rows_of, table
from torchtitan_dmuon.config.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = ["line", "mode", "ranks", "step_ms", "step_ms_iqr", "ratio_to_A", "tokens_per_s"]
KEYS += ["peak_memory_mb", "pool_mb", "bytes_sent", "final_loss"]
NOT_POSITIVE = ("line", "mode", "step_ms_iqr", "pool_mb")


class _Contender:
    """What `rows_of` reads of a contender."""

    tokens_per_step = 1000
    peak_bytes = 3 << 20
    pool_bytes = 1 << 19
    final_loss = 7.5

    def __init__(self, seconds: list[float], sent: int | None) -> None:
        self.round_seconds = seconds
        self.round_bytes = [sent] * len(seconds)


def _rows(lines: dict[str, tuple[list[float], int | None]], steps: int) -> list[dict[str, Any]]:
    (layout,) = find_layouts(4, 1, ["HSDP-Z3"])
    entries = [Entry(cast(Any, line), layout, cast(Any, None)) for line in lines]
    contenders = [_Contender(*value) for value in lines.values()]
    return rows_of(cast(Any, contenders), entries, steps)


def test_figures_are_per_step_and_round() -> None:
    """Two steps a round; the ratio is the median of the rounds' own ratios, so a round that was
    slow for all lines does not show in it."""
    a, c = _rows({"A": ([2.0, 4.0, 2.0], 10), "C": ([3.0, 6.0, 4.0], None)}, steps=2)
    assert list(a) == KEYS
    assert (a["line"], a["mode"], a["ranks"]) == ("A", "hsdp_z3", 4)
    assert (a["step_ms"], a["step_ms_iqr"], a["ratio_to_A"]) == (1000.0, 500.0, 1.0)
    assert (a["tokens_per_s"], a["bytes_sent"]) == (1000.0, 5)
    assert (a["peak_memory_mb"], a["pool_mb"]) == (3.0, 0.5)
    assert (c["step_ms"], c["ratio_to_A"], c["bytes_sent"]) == (2000.0, 1.5, None)
    text = table([a, c], "heading")
    assert re.search(r"hsdp_z3 +A +1,000\.0 +500\.0 +1\.00 +1,000 +3 +0\.5 +0\.0 +7\.5", text)


def test_without_line_a_there_is_no_ratio() -> None:
    """Unknown is null, not 1."""
    (row,) = _rows({"C": ([1.0], 1)}, steps=1)
    assert row["ratio_to_A"] is None
    assert json.loads(json.dumps(row))["ratio_to_A"] is None


def test_options_and_the_jobs_part_ways() -> None:
    """Options with a section belong to the job, in their order, with the values behind them."""
    arguments = ["--lines", "A,C", "--model.flavor", "debug", "--optimizer.betas", "0.8", "0.9"]
    arguments += ["--modes=hsdp_z3", "--device", "cpu", "--ranks", "2", "--json", "x.json"]
    options, job = cli.read("bench", arguments)
    assert options == Options(lines=["A", "C"], modes=["hsdp_z3"], ranks=2, json="x.json")
    assert job == ["--model.flavor", "debug", "--optimizer.betas", "0.8", "0.9", "--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lines", "A,E"], r'^--lines\[1\]: "E" .*is not one of "A", "B", "C", "D", "torch"'),
        (["--modes", "hspd_z2"], r"did you mean 'hsdp_z2'\?"),
        (["--rouds", "3"], r"^--rouds: unknown option; did you mean '--rounds'\?"),
        (["--rounds", "0"], r"^--rounds: expected at least 1, got 0"),
        (["--ranks", "0"], r"^--ranks: expected at least 1, got 0"),
        (["--rows", "-1"], r"^--rows: expected at least 1, got -1"),
        (["--warmup_rounds", "-1"], r"^--warmup_rounds: expected 0 or more, got -1"),
        (["--rounds", "many"], r'^--rounds: expected a whole number, got "many"'),
        (["--json", "/nope/x.json"], r"^--json: no such folder: /nope"),
        (["--optimizer.name", "Muon"], r"^--optimizer.name: is set by the benchmark"),
        (["--parallelism.data-parallel-shard-degree=2"], r"shard_degree: is set by the benchmark"),
        (["--line", "A"], r"^--line: unknown option; did you mean '--lines'\?"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str) -> None:
    """Before torch is imported."""
    with pytest.raises(ConfigError) as error:
        check_options(*cli.read("bench", arguments))
    assert re.search(expected, str(error.value)) and "\n" not in str(error.value)


def _dmuon(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "OMP_NUM_THREADS")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "torchtitan_dmuon.cli", *arguments]
    return subprocess.run(
        command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )


def test_help_names_commands_and_options(tmp_path: Path) -> None:
    """`dmuon` alone, an unknown command, and both helps; status 0 for help only."""
    top = _dmuon("--help", cwd=tmp_path)
    assert top.returncode == 0 and "bench" in top.stdout
    assert _dmuon(cwd=tmp_path).returncode == 2
    wrong = _dmuon("bensh", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: bensh: no such command; did you mean 'bench'?")
    text = _dmuon("bench", "--help", cwd=tmp_path)
    assert text.returncode == 0
    for word in ("--lines", "--modes", "--ranks", "--json", "bytes_sent", "peak_memory_mb"):
        assert word in text.stdout


def test_a_mistake_in_the_job_is_one_line(tmp_path: Path) -> None:
    """It names the option, and no rank starts."""
    done = _dmuon("bench", "--optimizer.ns_steps", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --optimizer.ns_steps: expected 1 to 99, got -1\n"


@pytest.mark.slow
def test_all_lines_in_one_run(tmp_path: Path) -> None:
    """The JSON has a row with the agreed keys for each line and mode. All lines start from the same
    weights; B, C and D end at the same loss; owners orthogonalize once; D has a pool and sends
    less."""
    done = _dmuon(
        "bench", "--lines", "A,B,C,D", "--modes", "fsdp_z3", "--ranks", "2",
        "--rounds", "1", "--warmup_rounds", "0", "--json", "rows.json", "--training.seq_len", "16",
        "--parallelism.owner_cost", "model", "--optimizer.ns_steps", "2", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["mode"], row["line"]) for row in rows] == [
        ("fsdp_z3", line) for line in ("A", "B", "C", "D")
    ]
    for row in rows:
        assert list(row) == KEYS
        assert row["ranks"] == 2
        assert all(row[key] > 0 for key in KEYS if key not in NOT_POSITIVE)
        assert row["mode"] in done.stdout
    a, b, c, d = rows
    assert (a["pool_mb"], b["pool_mb"], c["pool_mb"]) == (0, 0, 0) and d["pool_mb"] > 0
    assert d["final_loss"] == pytest.approx(c["final_loss"], rel=1e-5)
    assert d["bytes_sent"] < c["bytes_sent"]
    assert a["ratio_to_A"] == 1
    assert b["final_loss"] == pytest.approx(c["final_loss"], rel=1e-3)
    assert b["bytes_sent"] > c["bytes_sent"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.json"]
