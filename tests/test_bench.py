"""scripts/bench_modes.py: all layouts compete in one world, and mistakes cost one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench_modes.py"
LAYOUTS = ["DDP", "FSDP-Z2", "FSDP-Z3", "HSDP-Z2", "HSDP-Z3"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_modes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "OMP_NUM_THREADS")}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.long
def test_all_layouts_in_one_run(tmp_path: Path) -> None:
    """From any folder, --json prints one JSON object and nothing else; it has the layouts asked
    for, ratios to the baseline, and losses that agree."""
    some = ["DDP", "FSDP-Z2", "HSDP-Z3"]
    small = ["--training.seq_len", "32", "--training.local_batch_size", "1"]
    done = _run(
        "--layouts", ",".join(some), "--rounds", "1", "--warmup-rounds", "1",
        "--baseline", "fsdp-z2", "--json", *small, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["model"], result["ranks"]) == ("qwen2_5 debug", 4)
    assert (result["rounds"], result["warmup_rounds"], result["steps_per_round"]) == (1, 1, 1)
    assert result["tokens_per_step"] == 4 * 32
    assert set(result["versions"]) == {"torchtitan_dmuon", "torchtitan", "torch", "python"}
    assert result["device"].startswith("cpu (")
    assert result["spmd_backend"] == "partial_dtensor"
    rows = {row["name"]: row for row in result["layouts"]}
    assert list(rows) == some
    for row in rows.values():
        assert row["replicate"] * row["shard"] == 4
        for measure in (row["tokens_per_second"], row["ratio"]):
            assert 0 < measure["p10"] <= measure["median"] <= measure["p90"]
        assert row["loss"] == pytest.approx(rows["DDP"]["loss"], rel=1e-4)
    assert result["baseline"] == "FSDP-Z2"
    assert rows["FSDP-Z2"]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_wrong_config_is_one_line(tmp_path: Path) -> None:
    """A mistake in the job is found before any rank starts."""
    done = _run("--config", "debgu.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --config debgu.toml: no such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "argument --rounds: expected a whole number of at least 1, got '0'"),
        (["--layouts", "DDP,HSPD-Z2"], "unknown layout 'HSPD-Z2'; did you mean 'HSDP-Z2'?"),
        (["--layouts", "DDP", "--baseline", "HSDP-Z3"], "HSDP-Z3 is not among --layouts"),
        (["--rouds", "3"], "unknown option --rouds; did you mean '--rounds'?"),
        (["--training.steps=5"], "--training.steps is set by this script"),
    ],
)
def test_bad_arguments(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """One line on stderr, status 2."""
    with pytest.raises(SystemExit) as stop:
        bench.read_arguments(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_the_rest_belongs_to_the_job(bench: ModuleType) -> None:
    """Options with a section pass through to the job config, in their order."""
    options, rest = bench.read_arguments(
        ["--model.flavor", "0.5B", "--rounds", "3", "--training.seq_len=512", "--device", "cpu"]
    )
    assert rest == ["--model.flavor", "0.5B", "--training.seq_len=512", "--device", "cpu"]
    assert (options.rounds, options.baseline) == (3, "DDP")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_4_ranks_are_the_debug_configs(bench: ModuleType, name: str) -> None:
    """What is measured is what train_configs/debug_*.toml trains."""
    from torchtitan_dmuon.config.manager import load_job

    job = load_job(["--config", f"debug_{name.lower().replace('-', '_')}.toml"])
    (layout,), p = bench.find_layouts(4, 1, [name]), job.config.parallelism
    assert (layout.replicate, layout.shard, layout.reshard) == (
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.fsdp_reshard_after_forward,
    )


@pytest.mark.parametrize(("ranks", "nodes", "hsdp"), [(8, 1, (2, 4)), (32, 4, (4, 8))])
def test_layouts_of_other_worlds(
    bench: ModuleType, ranks: int, nodes: int, hsdp: tuple[int, int]
) -> None:
    """HSDP shards inside a node; on a single node it makes two halves."""
    found = {layout.name: layout for layout in bench.find_layouts(ranks, nodes)}
    assert (found["HSDP-Z3"].replicate, found["HSDP-Z3"].shard) == hsdp
    assert (found["FSDP-Z3"].replicate, found["FSDP-Z3"].shard) == (1, ranks)
    assert (found["DDP"].replicate, found["DDP"].shard) == (ranks, 1)


def test_rows_can_be_chosen(bench: ModuleType) -> None:
    """`dmuon bench --rows 4`: four replicas of two ranks on one node."""
    (layout,) = bench.find_layouts(8, 1, ["HSDP-Z2"], 4)
    assert (layout.replicate, layout.shard) == (4, 2)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (5, 1), (2, 2), (8, 3)])
def test_worlds_without_hsdp_are_refused(bench: ModuleType, ranks: int, nodes: int) -> None:
    """Too few or uneven ranks: an error that says how many there could be. The other layouts are
    still to be had."""
    from torchtitan_dmuon.config.errors import ConfigError

    with pytest.raises(ConfigError, match=f"a multiple of {max(nodes, 2)} from"):
        bench.find_layouts(ranks, nodes)
    names = ["FSDP-Z3", "DDP"]
    assert [layout.name for layout in bench.find_layouts(ranks, nodes, names)] == names
