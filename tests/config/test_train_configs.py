"""Every file of train_configs/ says what its name says, and passes every check."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check
from torchtitan_dmuon.config.lines import LINES
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, Job, load_job

DEBUG = ["ddp", "fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]
QWEN = {
    "qwen1.5b": ("1.5B", 6, 4096, ["fsdp_z2", "fsdp_z3", "hsdp_z2"]),
    "qwen7b": ("7B", 4, 2560, ["fsdp_z2", "fsdp_z3", "hsdp_z2"]),
    "qwen32b": ("32B", 4, 4096, ["fsdp_z3", "hsdp_z3"]),
}
"""Flavor, micro-batch, sequence length and layouts of the paper's Table 1."""
RUNS = [(model, layout) for model, row in QWEN.items() for layout in row[3]]


def _on_cpu(job: Job) -> Job:
    """The job without what this machine lacks: GPUs and the model's tokenizer."""
    config = copy.deepcopy(job.config)
    config.device, config.hf_assets_path = "cpu", ""
    config.dataloader = dataclasses.replace(config.dataloader, dataset="random_tokens")
    return dataclasses.replace(job, config=config)


def test_no_file_is_left_out() -> None:
    """The shipped jobs are exactly the ones tested here and the debug jobs without owners."""
    names = {p.stem for p in CONFIG_FOLDER.glob("*.toml")}
    expected = {*QWEN, *(f"{model}_{layout}" for model, layout in RUNS)}
    expected |= {"debug", "debug_owner", "bench_cpu"}
    expected |= {f"debug_{layout}" for layout in DEBUG}
    expected |= {f"debug_owner_{layout}" for layout in DEBUG}
    assert names == expected


@pytest.mark.parametrize("layout", DEBUG)
@pytest.mark.parametrize("line", LINES)
def test_debug_jobs_run_every_line(layout: str, line: str) -> None:
    """An owner job differs from the job it is named after by the line alone; all lines check."""
    owner = load_job(["--config", f"debug_owner_{layout}.toml"]).config
    plain = load_job(["--config", f"debug_{layout}.toml"]).config
    assert (owner.parallelism.mode, owner.optimizer.name) == ("owner", "DMuon")
    for key in (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
    ):
        assert getattr(owner.parallelism, key) == getattr(plain.parallelism, key)
    assert (owner.model, owner.training) == (plain.model, plain.training)
    job = load_job(["--config", f"debug_owner_{layout}.toml", "--line", line])
    check(job, 4, "cpu")
    build(job, "cpu")


@pytest.mark.parametrize(("model", "layout"), RUNS)
@pytest.mark.parametrize("line", LINES)
def test_qwen_jobs_are_the_papers(model: str, layout: str, line: str) -> None:
    """Model, batch, sequence and layout are those of Table 1, for every line; 16 ranks fit."""
    flavor, batch, seq_len, _ = QWEN[model]
    if (model, layout) == ("qwen7b", "hsdp_z2"):
        seq_len = 2048
    job = load_job(["--config", f"{model}_{layout}.toml", "--line", line])
    c = job.config
    assert (c.model.name, c.model.flavor) == ("qwen2_5", flavor)
    assert (c.training.local_batch_size, c.training.seq_len) == (batch, seq_len)
    assert c.training.mixed_precision_param == c.training.mixed_precision_reduce == "bfloat16"
    assert c.training.dtype == "float32"
    assert (c.activation_checkpoint.mode == "full") == (model == "qwen32b")
    p = c.parallelism
    assert p.mode == LINES[line].mode
    assert p.fsdp_reshard_after_forward == ("always" if layout.endswith("z3") else "never")
    mesh = (p.data_parallel_replicate_degree, p.data_parallel_shard_degree)
    assert mesh == ((2, 8) if layout.startswith("hsdp") else (1, -1))
    assert Path(c.dump_folder).name == f"{model}_{layout}"
    check(_on_cpu(job), 16, "cpu")
    build(_on_cpu(job), "cpu")
