"""`dmuon plan`: what it takes, prints and refuses, and that its owners are the job's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_dmuon as dmuon
from tests.worlds import run_world
from torchtitan_dmuon import cli, train
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, load_job
from torchtitan_dmuon.models.registry import get_model_spec
from torchtitan_dmuon.planner.command import line_for_log, plan_here
from torchtitan_dmuon.planner.devices import DEVICES
from torchtitan_dmuon.planner.estimate import make_plan, mesh_of
from torchtitan_dmuon.planner.plan import Memory, Plan
from torchtitan_dmuon.planner.setting import Setting

CONFIGS = sorted(p.name for p in CONFIG_FOLDER.glob("*.toml"))


def dmuon_plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `dmuon plan` in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["dmuon", "plan", *arguments])
    try:
        return cli.main()
    except SystemExit as e:
        return int(e.code or 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_can_be_planned(name: str) -> None:
    """On the smallest cluster that it is for; memory adds up, owners are in range."""
    job = load_job(["--config", name])
    nodes = 4 if "32b" in name or "moe" in name else 2
    plan = make_plan(job.config, Setting(nodes=nodes, gpus_per_node=8), path=job.path)
    parts = asdict(plan.memory_gib)
    peak = parts.pop("peak")
    assert sum(parts.values()) == pytest.approx(peak) and min(parts.values()) >= 0
    assert plan.fits and plan.groups == len(plan.layers or range(plan.groups))
    assert all(0 <= u.rank < 8 * nodes for layer in plan.layers for u in layer.units)
    assert sum(len(layer.units) for layer in plan.layers) >= plan.units * bool(plan.layers)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected a job config"),
        (["no_such.toml"], "no such file"),
        (["debug_owner.toml", "--device", "h100"], "did you mean 'h100-80g'"),
        (["debug_owner.toml", "--nodes", "-1"], "expected at least 1 of each"),
        (["debug_owner.toml", "--nodes", "9999999"], "more than"),
        (["debug_owner.toml", "--byte-cap", "much"], "--byte_cap: expected a number >= 0, or off"),
        (["debug_owner.toml", "--cost", "h10"], "did you mean 'h100'"),
        (["debug_owner.toml", "--html", "no/such/plan.html"], "--html: no such folder"),
        (["debug_owner.toml", "--html", "."], "is a folder; expected a file"),
        (["debug_owner.toml", "--html", "/dev/null"], "is a device or pipe; expected a file"),
        (
            ["debug_owner.toml", "--config", "debug.toml"],
            "--config: it is debug_owner.toml already",
        ),
        (["debug_owner.toml", "--cost", "measured"], "'measured'; expected model, "),
        (["debug_owner.toml", "--training.dtype", "bfloat16"], "masters of float32 only"),
        (
            ["debug_hsdp_z2.toml", "--nodes", "2", "--parallelism.data_parallel_shard_degree", "0"],
            "shard_degree: expected at least 1, or -1",
        ),
        (
            ["debug_hsdp_z2.toml", "--nodes", "2", "--parallelism.data_parallel_shard_degree", "-1"]
            + ["--parallelism.data_parallel_replicate_degree", "-1"],
            "only one degree can be -1",
        ),
        (
            ["debug_hsdp_z2.toml", "--nodes", "2", "--parallelism.tensor_parallel_degree", "0"],
            "tensor_parallel_degree: expected at least 1",
        ),
        (["debug_owner.toml", "--expert-units", "all"], "each"),
        (["debug_owner.toml", "--nods", "2"], "nods"),
        (["debug_owner.toml", "more"], "one argument too many"),
        (["debug_owner_hsdp_z3.toml", "--nodes", "1", "--gpus-per-node", "3"], "does not divide 3"),
        (
            ["debug_fsdp_z2.toml", "--parallelism.tensor_parallel_degree", "2"],
            "data parallelism only",
        ),
        (
            ["qwen_moe_fsdp_z3.toml", "--parallelism.expert_parallel_degree", "2"],
            "expert parallelism",
        ),
        (
            ["qwen7b_fsdp_z2.toml", "--parallelism.data_parallel_shard_degree", "12"],
            "need 12 ranks",
        ),
        (["qwen_moe_fsdp_z3.toml", "--line", "torch"], "3-D stacks"),
        (["qwen7b_fsdp_z2.toml", "--training.global_batch_size", "100"], "global_batch_size"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, what and where, no traceback."""
    assert dmuon_plan(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err and len(err.strip().splitlines()) == 1


def test_a_job_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1; what to change is said with what it would come to."""
    arguments = ["qwen7b_hsdp_z2.toml", "--nodes", "2", "--device", "a100-40g"]
    assert dmuon_plan(monkeypatch, *arguments, "--json") == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"] and plan["headroom_gib"] < 0
    full = next(a for a in plan["advice"] if "activation_checkpoint.mode full" in a)
    promised = float(re.search(r"([\d.]+) GiB, fits", full)[1])  # type: ignore[index]
    changed = ["--activation_checkpoint.mode", "full"]
    assert dmuon_plan(monkeypatch, *arguments, *changed, "--json") == 0
    peak = json.loads(capsys.readouterr().out)["memory_gib"]["peak"]
    assert peak == pytest.approx(promised, abs=0.051)


def keys(value: Any, prefix: str = "") -> set[str]:
    """Return the keys of a plan as the docs write them."""
    if isinstance(value, dict):
        dot = f"{prefix}." if prefix else ""
        return set().union(*(keys(v, f"{dot}{k}") for k, v in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        depth = "j" if "[i]" in prefix else "i"
        return keys(value[0], f"{prefix}[{depth}]")
    return {prefix}


def test_json_has_the_keys_that_the_docs_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways: nothing undocumented, nothing missing."""
    assert dmuon_plan(monkeypatch, "debug_owner_hsdp_z3.toml", "--json") == 0
    found = keys(json.loads(capsys.readouterr().out))
    docs = (CONFIG_FOLDER.parent / "docs/planner.md").read_text()
    table = docs[docs.index("## Keys of") :]
    promised = {
        k for row in re.findall(r"^\| (`.*?) \|", table, re.M) for k in re.findall(r"`(.*?)`", row)
    }
    assert found == promised


def test_accumulated_gradients_stay() -> None:
    """From the second micro-batch on the reduced gradients are there beside all activations."""

    def peak(line: str, batch: int) -> float:
        changes = ["--line", line, "--training.global_batch_size", str(batch)]
        job = load_job(["--config", "qwen7b_hsdp_z2.toml", *changes])
        return make_plan(job.config, Setting(nodes=2, gpus_per_node=8)).memory_gib.peak

    # A: the layers' shards. Those of the rest are there in the backward pass anyway.
    elements = 6_525_618_176
    assert peak("A", 256) - peak("A", 64) == pytest.approx(4 * elements / 8 / 2**30, rel=0.01)
    assert peak("C", 256) - peak("C", 64) == pytest.approx(4 * elements / 16 / 2**30, rel=0.1)


def test_without_owners_there_is_nothing_to_balance() -> None:
    job = load_job(["--config", "qwen7b_hsdp_z2.toml", "--line", "A"])
    plan = make_plan(job.config, Setting(nodes=2, gpus_per_node=8))
    assert (plan.matrices, plan.units, plan.owners, plan.assignment) == (0, 0, 0, "none")
    balances = plan.columns.publish_max_over_mean, plan.bytes.heaviest_over_mean
    assert balances == (1, 1) and plan.worst_layer_root_ratio == 1 and not plan.rails


def test_the_log_of_a_job_has_a_line() -> None:
    """On the machine it runs on; a job that cannot be planned says so and goes on."""
    job = load_job(["--config", "debug_owner_hsdp_z3.toml"])
    line = line_for_log(job, 4, 4, "cpu")
    assert line.startswith("plan: 28 matrices in") and "GiB per rank (fits)" in line
    assert plan_here(job, 4, 4, "cpu").cluster.rows == 2
    job = load_job(["--config", "debug_hsdp_z2.toml"])
    job.config.parallelism.context_parallel_degree = 2
    assert line_for_log(job, 4, 4, "cpu").startswith("plan: none (parallelism: a plan knows")


@pytest.mark.parametrize(
    ("name", "ranks", "mesh"),
    [
        ("qwen7b_fsdp_z3.toml", 32, (1, 32)),
        ("qwen7b_hsdp_z2.toml", 32, (4, 8)),
        ("debug_owner_ddp.toml", 8, (8, 1)),
    ],
)
def test_the_mesh_follows_the_cluster(name: str, ranks: int, mesh: tuple[int, int]) -> None:
    got = mesh_of(load_job(["--config", name]).config, ranks)
    assert (got.rows, got.columns) == mesh


def owners_of_a_job(shape: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]]:
    spec = get_model_spec("qwen2_5", "debug", attn_backend="sdpa")
    model: Any = spec.model.build()
    blocks = set(model.layers.values())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    dedication = dmuon.dedicate_params(
        model,
        mesh,
        hook_boundary_predicate=lambda _, module: module in blocks,
        param_dtype=torch.bfloat16,
        cost="h100",
        small_matrix_numel=20_000,
    )
    return dedication.assignment.matrix_owners, dedication.memory_bytes()


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_owners_and_bytes_are_the_jobs(shape: tuple[int, int]) -> None:
    """The runtime on four ranks has the owners, masters and copies that the plan names."""
    results = run_world(4, owners_of_a_job, shape, timeout_seconds=60)
    names = {
        (2, 2): "debug_owner_hsdp_z3",
        (1, 4): "debug_owner_fsdp_z3",
        (4, 1): "debug_owner_ddp",
    }
    job = load_job(
        [
            *("--config", f"{names[shape]}.toml", "--parallelism.owner_cost", "h100"),
            *("--parallelism.small_matrix_numel", "20000"),
            *("--training.mixed_precision_param", "bfloat16"),
        ]
    )
    plan = make_plan(job.config, Setting(nodes=1, gpus_per_node=4))
    owners = results[0][0]
    for layer in plan.layers:
        for unit in layer.units:
            if unit.matrices:
                assert owners[unit.name] == unit.rank
    rest = 4 * (plan.model.parameters - plan.model.owned_elements) / shape[1]
    assert max(r[1]["masters"] for r in results) == plan.master_bytes.busiest - rest
    if shape == (2, 2):
        assert max(r[1]["copies"] for r in results) == plan.leader_copy_bytes.busiest


def test_more_recomputation_and_sharding_never_need_more() -> None:
    """ZeRO-3 against ZeRO-2, selective and full against none, more nodes, and line C against D."""

    def peak(config: str, nodes: int, *changes: str) -> float:
        job = load_job(["--config", config, *changes])
        return make_plan(job.config, Setting(nodes=nodes, gpus_per_node=8)).memory_gib.peak

    z2, z3 = peak("qwen1.5b_fsdp_z2.toml", 2), peak("qwen1.5b_fsdp_z3.toml", 2)
    assert z3 < z2 and peak("qwen1.5b_fsdp_z3.toml", 16) < z3
    assert z3 < peak("qwen1.5b_fsdp_z3.toml", 2, "--line", "D")
    modes = [
        peak("qwen1.5b_fsdp_z3.toml", 2, "--activation_checkpoint.mode", m)
        for m in ("selective", "full")
    ]
    assert modes[1] < modes[0] < z3


def test_a_plan_is_whole() -> None:
    """Fields of Memory and the devices' table cannot drift apart from what is documented."""
    assert {"h100-80g", "a100-80g"} <= set(DEVICES)
    assert set(Memory.__slots__) >= {"pool", "leader_copies", "peak"}
    assert Plan.__dataclass_fields__["version"].default == 1


def test_4096_gpus(tmp_path: Path) -> None:
    """Qwen2.5-32B on 512 nodes: every unit has an owner, and no owner two."""
    job = load_job(["--config", "qwen32b_hsdp_z3.toml"])
    plan = make_plan(job.config, Setting(nodes=512, gpus_per_node=8))
    ranks = [u.rank for layer in plan.layers for u in layer.units if u.matrices]
    assert len(ranks) == 448 and len(set(ranks)) == 448
    assert len(plan.to_json()) < 2**22


def test_plan_with_torchrun_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the launcher too: rank 0 prints the plan, and no rank has a job to run."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in (0, 1):
        assert train.resolve(["--config", "debug_owner_hsdp_z3.toml", "--plan"], rank) is None
        assert ("owners    28 matrices" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.long
def test_a_pipe_whose_reader_left_is_no_error(tmp_path: Path) -> None:
    """`dmuon plan ... | head` ends without a word."""
    program = "import sys; from torchtitan_dmuon.cli import main; sys.exit(main())"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", program, "plan", "debug_owner_hsdp_z3.toml", "--json"]
    done = subprocess.run(
        command,
        check=False,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_report_goes_where_a_link_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link stays a link, and its file is replaced."""
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    arguments = ["debug_owner.toml", "--html", str(tmp_path / "link.html")]
    assert dmuon_plan(monkeypatch, *arguments) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "old.html").read_text().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["debug_fsdp_z3.toml", "debug_owner_fsdp_z3.toml"])
def test_bytes_of_masters_and_states(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank every element has a float32 master, and two moments or one momentum."""
    arguments = [name, "--nodes", "1", "--gpus-per-node", "1", "--json"]
    assert dmuon_plan(monkeypatch, *arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    parts, numel = plan["memory_gib"], plan["model"]["parameters"]
    assert parts["masters"] * 2**30 == pytest.approx(4 * numel)
    matrices = plan["model"]["matrix_elements"] if "owner" in name else 0
    assert parts["momentum"] * 2**30 == pytest.approx(8 * numel - 4 * matrices)
