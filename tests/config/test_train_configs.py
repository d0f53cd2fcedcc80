"""Every file of train_configs/ says what its name says, and passes every check."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check, with_degrees
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.lines import LINES
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, Job, load_job

DEBUG = ["ddp", "fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]

ALL_LAYOUTS = ["fsdp_z2", "fsdp_z3", "hsdp_z2", "hsdp_z3"]
MODELS = {
    # The paper's Table 1: micro-batch, sequence length under FSDP and under HSDP, layouts.
    "qwen1.5b": ("qwen2_5", "1.5B", 6, 4096, 4096, ["fsdp_z2", "fsdp_z3", "hsdp_z2"]),
    "qwen7b": ("qwen2_5", "7B", 4, 2560, 2048, ["fsdp_z2", "fsdp_z3", "hsdp_z2"]),
    "qwen32b": ("qwen2_5", "32B", 4, 4096, 4096, ["fsdp_z3", "hsdp_z3"]),
    "qwen_moe": ("qwen_moe", "A2.7B", 4, 2560, 2048, ["fsdp_z3", "hsdp_z3"]),
    # Not in the paper.
    "llama3b": ("llama3", "3.2-3B", 4, 2560, 2560, ALL_LAYOUTS),
    "llama8b": ("llama3", "3.1-8B", 4, 2560, 2048, ALL_LAYOUTS),
}
RUNS = [(model, layout) for model, row in MODELS.items() for layout in row[5]]
TRAINED = [line for line in LINES if line != "D"]


def _on_cpu(job: Job) -> Job:
    """The job without what this machine lacks: GPUs and the model's tokenizer."""
    config = copy.deepcopy(job.config)
    config.device, config.hf_assets_path = "cpu", ""
    config.dataloader = dataclasses.replace(config.dataloader, dataset="random_tokens")
    return dataclasses.replace(job, config=config)


def test_no_file_is_left_out() -> None:
    """The shipped jobs are exactly the ones tested here and the debug jobs without owners."""
    names = {p.stem for p in CONFIG_FOLDER.glob("*.toml")}
    expected = {*MODELS, *(f"{model}_{layout}" for model, layout in RUNS)}
    expected |= {"pretrain", "debug", "debug_owner", "debug_qwen_moe", "bench_cpu"}
    expected |= {f"debug_{layout}" for layout in DEBUG}
    expected |= {f"debug_owner_{layout}" for layout in DEBUG}
    assert names == expected


@pytest.mark.parametrize("layout", DEBUG)
@pytest.mark.parametrize("line", TRAINED)
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
def test_full_size_jobs_are_what_their_names_say(model: str, layout: str) -> None:
    """Model, batch, sequence, mesh and resharding are those of the name and of Table 1."""
    name, flavor, batch, fsdp_seq_len, hsdp_seq_len, _ = MODELS[model]
    job = load_job(["--config", f"{model}_{layout}.toml"])
    c, p = job.config, job.config.parallelism
    hsdp = layout.startswith("hsdp")
    assert (c.model.name, c.model.flavor) == (name, flavor)
    assert c.training.local_batch_size == batch
    assert c.training.seq_len == (hsdp_seq_len if hsdp else fsdp_seq_len)
    assert c.training.mixed_precision_param == c.training.mixed_precision_reduce == "bfloat16"
    assert c.training.dtype == "float32"
    assert (c.activation_checkpoint.mode == "full") == (model == "qwen32b")
    assert p.fsdp_reshard_after_forward == ("always" if layout.endswith("z3") else "never")
    mesh = (p.data_parallel_replicate_degree, p.data_parallel_shard_degree)
    assert mesh == ((-1, 8) if hsdp else (1, -1))
    assert Path(c.dump_folder).name == f"{model}_{layout}"
    assert (c.line, c.device) == ("C", "cuda")


@pytest.mark.parametrize(("model", "layout"), RUNS)
@pytest.mark.parametrize("line", LINES)
def test_full_size_jobs_resolve_on_every_line(model: str, layout: str, line: str) -> None:
    """One key switches mode, optimizer and communication; on 24 ranks HSDP has three rows."""
    job = load_job(["--config", f"{model}_{layout}.toml", "--line", line])
    p, o = job.config.parallelism, job.config.optimizer
    wanted = LINES[line]  # type: ignore[index]
    assert (p.mode, o.name) == (wanted.mode, wanted.optimizer)
    assert p.communication == wanted.communication
    job = with_degrees(_on_cpu(job), 24)
    mesh = job.config.parallelism
    if layout.startswith("hsdp"):
        assert (mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree) == (3, 8)
    if (model, line) == ("qwen_moe", "torch"):
        with pytest.raises(ConfigError, match="keeps its experts in 3-D stacks"):
            check(job, 24, "cpu")
        return
    check(job, 24, "cpu")
    build(job, "cpu")
