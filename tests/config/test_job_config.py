"""Job configs: precedence, round trip, and one clear error for each mistake a user can make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check, with_degrees
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, load_job, print_config
from torchtitan_dmuon.config.schema import torch_knows_spmd_types

JOB = f"""\
base = "{CONFIG_FOLDER}/debug.toml"

[model]
name = "qwen2_5"
flavor = "debug"

[training]
steps = 20
seq_len = 64

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2

[optimizer]
lr = 3e-3
weight_decay = 0.1
"""


@pytest.fixture
def write(tmp_path: Path):
    """Write a job file; returns its path."""

    def write_text(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write_text


def _resolve(path: str, *arguments: str, world_size: int = 4) -> None:
    job = load_job(["--config", path, *arguments])
    check(job, world_size, "cpu")
    build(job, "cpu")


def _message(path: str, *arguments: str, world_size: int = 4) -> str:
    with pytest.raises(ConfigError) as error:
        _resolve(path, *arguments, world_size=world_size)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configs_load(path: Path) -> None:
    """Every file of train_configs/ resolves and round-trips; the debug jobs pass every check."""
    job = load_job(["--config", str(path)])
    if path.name.startswith("debug"):
        check(job, 4, "cpu")
        build(job, "cpu")


def test_command_line_wins_over_file_over_base_over_default(write) -> None:
    """Each layer overrides the one below it, key by key."""
    config = load_job(["--config", write(JOB), "--training.seq_len", "32"]).config
    assert config.training.seq_len == 32  # command line
    assert config.training.steps == 20  # file
    assert config.training.local_batch_size == 4  # base
    assert config.training.gc_freq == 50  # torchtitan's default


def test_print_config_loads_back_to_the_same(write, tmp_path: Path, capsys) -> None:
    """--print-config is complete: what it prints resolves to an equal config, unset keys too."""
    arguments = ["--parallelism.context_parallel_load_balancer", "None", "--compile.enable"]
    arguments += ["--compile.components", "model", "--optimizer.betas", "0.8", "0.9"]
    text = JOB + '[[optimizer.param_groups]]\npattern = "norm"\noptimizer_name = "AdamW"\n'
    text += "optimizer_kwargs = { lr = 1e-3, betas = [0.9, 0.99] }\n"
    first = load_job(["--config", write(text), *arguments]).config
    print_config(first)
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert load_job(["--config", str(printed)]).config == first


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (4, 2), (10, 5)])
def test_the_rows_of_hsdp_follow_the_cluster(write, ranks: int, rows: int) -> None:
    """A replicate degree of -1 is all that is left beside the shard degree, as torchtitan needs it;
    ranks that do not divide are refused, and a job without -1 stays as it is."""
    path = write(JOB.replace("replicate_degree = 2", "replicate_degree = -1"))
    job = with_degrees(load_job(["--config", path]), ranks)
    check(job, ranks, "cpu")
    assert job.config.parallelism.data_parallel_replicate_degree == rows
    assert build(job, "cpu").parallelism.data_parallel_replicate_degree == rows
    job = with_degrees(load_job(["--config", path]), ranks + 1)
    with pytest.raises(ConfigError, match="ranks are not a multiple of 2, the product of"):
        check(job, ranks + 1, "cpu")
    fixed = load_job(["--config", write(JOB)])
    assert with_degrees(fixed, ranks) is fixed


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr = 3e-3", "momentun = 0.9", r"job.toml:16: optimizer.momentun: unknown key"),
        ("weight_decay", "wieght_decay", r"optimizer.wieght_decay.*did you mean 'weight_decay'"),
        ("[optimizer]", "[optimiser]", r"job.toml:15: optimiser.*did you mean 'optimizer'"),
        ("lr = 3e-3", 'lr = "fast"', r"job.toml:16: optimizer.lr: expected a number, got .fast"),
        ("steps = 20", "steps = -1", r"job.toml:8: training.steps: expected at least 1, got -1"),
        ("steps = 20", "steps = 1.5", r"training.steps: expected a whole number, got 1.5"),
        ("steps = 20", "steps = true", r"training.steps: expected a whole number, got true"),
        ("steps = 20", "steps =", r"job.toml:8: not valid TOML"),
        ('"debug"', '"debgu"', r"job.toml:5: model.flavor.*did you mean 'debug'.*1.5B"),
        ('"qwen2_5"', '"qwen25"', r"job.toml:4: model.name.*did you mean 'qwen2_5'"),
        ("[model]", "steps = 3\n[model]", r"job.toml:3: steps: .*belongs in \[training\]"),
        ("[model]", "[model.extra]\nx = 1\n[model]", r"job.toml:3: model.extra: unknown section"),
        ("seq_len = 64", "seq_len = 99999", r"training.seq_len: 99999 is more than the 32768"),
        ("degree = 2", "degree = 0", r"expected at least 1, or -1 for all that is left, got 0"),
        (
            "degree = 2",
            "degree = -1",
            r"job.toml:12: .*replicate_degree: only one degree can be -1",
        ),
        ("replicate_degree = 2", "replicate_degree = 3", r"need 6 ranks.*job has 4.*NGPU=6"),
        ("lr = 3e-3", "betas = [0.9]", r"optimizer.betas: expected 2 values, got 1"),
        ("lr = 3e-3", "betas = [0.9, 1.0]", r"optimizer.betas: expected 0 <= beta < 1, got 1.0"),
        ("lr = 3e-3", "lr = nan", r"optimizer.lr: expected a number >= 0, got nan"),
    ],
)
def test_a_mistake_in_the_file_is_named(write, old: str, new: str, expected: str) -> None:
    """The message has file, line, key, what was expected and the nearest valid name."""
    assert re.search(expected, _message(write(JOB.replace(old, new))))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.global_batch_size", "7"], r"--training.global_batch_size: .*16.*got 7"),
        (["--dataloader.dataset", "python_stdlb"], r"did you mean 'python_stdlib'"),
        (["--dataloader.dataset", "/nope/x.jsonl"], r"--dataloader.dataset: .*does not exist"),
        (["--dataloader.dataset", "nosuch.txt"], r"--dataloader.dataset: .*nosuch.txt does not"),
        (["--dataloader.dataset", "fineweb_edu"], r"hf_assets_path .default.*fineweb_edu"),
        (["--hf_assets_path", "/nope"], r"--hf_assets_path: no such folder: /nope"),
        (["--model.attn_backend", "flex"], r"--model.attn_backend: .*does not train on a CPU"),
        (["--training.disable_cuda_graphs=false"], r"--training.disable_cuda_graphs: .*on a CPU"),
        (["--activation_checkpoint.mode", "memory_budget"], r"compile.enable"),
        (["--checkpoint.create_seed_checkpoint"], r"create_seed_checkpoint: .*NGPU=1"),
        (["--checkpoint.initial_load_path", "/nope"], r"initial_load_path: no such folder"),
        (["--device", "cuda"], r"--device: .*run on cpu"),
        (["--tokenizer.vocab_size", "5000"], r"tokenizer of 5000 tokens is more than the 2048"),
        (["--loss.name", "chunked_cross_entropy", "--loss.num_chunks", "7"], r"7 chunks do not"),
        (["--parallelism.tensor_parallel_degree", "3"], r"training.seq_len: 64 is not a multiple"),
        (["--parallelism.pipeline_parallel_degree", "2"], r"pipeline_parallel_degree: expected 1"),
        (["--compile.components", "modle"], r"'modle' is not one of model.*'model'"),
        (["--activation_checkpoint.determinism_check", "x"], r"determinism_check: 'x' is not one"),
        (["--lr_scheduler.total_steps", "-4"], r"total_steps: expected 1 to .*, got -4"),
        (["--debug.seed", "-1"], r"debug.seed: expected 0 to"),
        (["--optimizer.implementation", "fused_opt_states_bf16"], r"no kernel on a CPU"),
        (["--comm.mode", "fake_backend"], r"comm.mode: 'fake_backend' is not one of"),
        (["--override.imports", "nope.x"], r"override.imports: nope.x: No module named 'nope'"),
        (["--checkpoint.enable", "--checkpoint.folder", "s3://b/c"], r"object stores cannot"),
        (["--checkpoint.enable", "--dump_folder", "s3://b/c"], r"^--dump_folder: .*object stores"),
        (
            ["--checkpoint.enable", "--checkpoint.exclude_from_loading", "optimiser"],
            r"unknown part 'optimiser'; did you mean 'optimizer'\? expected some of",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.async_mode", "async_with_pinned_mem"],
            r'async_mode: .*expected "async" or "disabled" on CPUs',
        ),
        (["--checkpoint.enable", "--checkpoint.load_step", "9"], r"no step-9 in .*found none"),
        (["--validator.enable"], r"validator.data.dataset .default.*held-out data"),
        (["--parallelism.spmd_backend", "full_dtensor"], r"spmd_backend: .*is not one of"),
        (["--loss.num_chunks", "0"], r"--loss.num_chunks: expected at least 1, got 0"),
        (
            ["--profiler.enable_profiling", "--profiler.profile_freq", "3"],
            r"profile_freq: expected at least 4 \(profiler_warmup \+ profiler_active\), got 3",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_named(write, arguments, expected: str) -> None:
    """Values that only a check across keys can refuse name the option that set them."""
    assert re.search(expected, _message(write(JOB), *arguments))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--training.stepz", "3"],
            "--training.stepz: unknown option; did you mean '--training.steps'?",
        ),
        (["--steps", "3"], "--steps: unknown option; did you mean '--training.steps'?"),
        (["--trainer.steps", "3"], "did you mean '--training.steps'?"),
        (
            ["--training", "3"],
            "--training: is a section; expected one of its keys, e.g. --training.",
        ),
        (["--training.steps", "five"], '--training.steps: expected a whole number, got "five"'),
        (["--training.steps"], "--training.steps: expected one value, got none"),
        (["--training.steps", "3", "4"], '--training.steps: expected one value, got "3 4"'),
        (
            ["--parallelism.mode", "ownr"],
            '--parallelism.mode: "ownr" (a string) is not one of "fsdp"',
        ),
        (["--compile.enable", "maybe"], '--compile.enable: expected true or false, got "maybe"'),
        (["--optimizer.betas", "0.9"], "--optimizer.betas: expected 2 values, got 1"),
        (["--optimizer.param_groups", "x"], "--optimizer.param_groups: unknown option"),
        (["steps=3"], '"steps=3": expected an option'),
        (["--config"], "--config: expected a value"),
        (["--config", ""], "--config: expected a value"),
        (["--print-confg"], "--print_confg: unknown option"),
    ],
)
def test_a_malformed_option_is_named(write, arguments: list[str], expected: str) -> None:
    """Unknown options and bad values on the command line are one line with the nearest name."""
    assert expected in _message(write(JOB), *arguments)


def test_ways_to_write_options(write) -> None:
    """Values after a space or `=`, dashes for underscores, flags, lists; the last one wins."""
    arguments = ["--training.steps=5", "--training.seq-len", "16", "--training.steps", "6"]
    arguments += ["--compile.enable", "--metrics.enable_tensorboard", "false"]
    arguments += ["--checkpoint.enable=True", "--optimizer.betas", "0.8", "0.9"]
    arguments += ["--compile.components", "model", "--checkpoint.load_step", "-1"]
    arguments += ["--checkpoint.exclude_from_loading=dataloader,lr_scheduler"]
    arguments += ["--parallelism.context_parallel_load_balancer", "none"]
    config = load_job(["--config", write(JOB), *arguments]).config
    assert (config.training.steps, config.training.seq_len) == (6, 16)
    assert config.compile.enable and config.checkpoint.enable
    assert not config.metrics.enable_tensorboard
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.compile.components == ["model"]
    assert config.checkpoint.exclude_from_loading == ["dataloader", "lr_scheduler"]
    assert config.checkpoint.load_step == -1
    assert config.parallelism.context_parallel_load_balancer is None


def test_a_tokenizer_folder_is_checked(write, tmp_path: Path) -> None:
    """A folder without a tokenizer, a broken one, or one too large for the model is named."""
    folder = tmp_path / "assets"
    folder.mkdir()
    option = ["--hf_assets_path", str(folder)]
    assert "no tokenizer can be read there" in _message(write(JOB), *option)
    (folder / "tokenizer.json").write_text("{")
    assert "no tokenizer can be read there" in _message(write(JOB), *option)
    words = {f"w{i}": i for i in range(3000)}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"[UNK]": 3000, **words}))
    assert "3001 tokens is more than the 2048" in _message(write(JOB), *option)


@pytest.mark.skipif(torch_knows_spmd_types(), reason="this torch supports spmd_types")
def test_spmd_types_needs_a_newer_torch(write) -> None:
    """On torch 2.13 asking for spmd_types is an error up front, not a crash inside FSDP2."""
    assert "2.14" in _message(write(JOB), "--parallelism.spmd_backend", "spmd_types")


def test_where_to_start_from_is_relative_to_where_one_is(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """initial_load_path as a user types it, on the command line and in a file."""
    monkeypatch.chdir(tmp_path)
    dcp.save({"x": torch.ones(1)}, checkpoint_id="seed/step-0", no_dist=True)
    arguments = ["--checkpoint.enable", "--checkpoint.initial_load_path", "seed/step-0"]
    _resolve(write(JOB), *arguments)
    job = load_job(["--config", write(JOB), *arguments])
    assert job.config.checkpoint.initial_load_path == str(tmp_path / "seed" / "step-0")


def test_an_export_is_not_resumed_from(write, tmp_path: Path) -> None:
    """A model-only export that is newer than the last full checkpoint is refused, with the step
    that can be continued; asking for that step is accepted."""
    steps = tmp_path / "dump" / "checkpoint"
    dcp.save({"x": torch.ones(1)}, checkpoint_id=steps / "step-10", no_dist=True)
    (steps / "step-14").mkdir()
    (steps / "step-14" / "model.safetensors.index.json").write_text("")
    arguments = ["--dump_folder", str(tmp_path / "dump"), "--checkpoint.enable"]
    arguments += ["--training.steps", "20"]
    message = _message(write(JOB), *arguments)
    assert "step-14 is a model-only export" in message
    assert message.endswith("use --checkpoint.load_step 10")
    _resolve(write(JOB), *arguments, "--checkpoint.load_step", "10")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ('pattern = "("\noptimizer_name = "AdamW"', "pattern is not a regular expression"),
        ('pattern = "x"\noptimizer_name = "AdamQ"', "unknown optimizer 'AdamQ'; did you mean"),
        ('pattern = "x"', "missing optimizer_name"),
        (
            'pattern = "x"\noptimizer_name = "AdamW"\noptimizer_kwargs = { lrr = 1 }',
            "unknown argument 'lrr' of AdamW; did you mean 'lr'?",
        ),
    ],
)
def test_parameter_groups_are_checked(write, entry: str, expected: str) -> None:
    """A group that would fail, or silently train with defaults, is refused up front."""
    message = _message(write(f"{JOB}\n[[optimizer.param_groups]]\n{entry}\n"))
    assert "param_groups[0]" in message and expected in message


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file names the nearest; folders, binaries and loops of `base` are refused."""
    with pytest.raises(ConfigError, match=r"did you mean 'debug_hsdp_z2.toml'"):
        load_job(["--config", "debug_hsdp_z2x.toml"])
    with pytest.raises(ConfigError, match="is a folder"):
        load_job(["--config", str(tmp_path)])
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a UTF-8 text file"):
        load_job(["--config", str(binary)])
    loop = tmp_path / "loop.toml"
    loop.write_text('base = "loop.toml"\n')
    with pytest.raises(ConfigError, match=r"loop.toml:1: base: .*builds on itself"):
        load_job(["--config", str(loop)])
    loop.write_text("base = 3\n")
    with pytest.raises(ConfigError, match=r"loop.toml:1: base: expected the name of a file"):
        load_job(["--config", str(loop)])


def test_bare_names_and_missing_values() -> None:
    """--config takes a file name from train_configs/ with or without .toml, and needs a value."""
    with_suffix = load_job(["--config", "debug_ddp.toml"]).config
    assert load_job(["--config=debug_ddp"]).config == with_suffix
    with pytest.raises(ConfigError, match="--config: expected a value"):
        load_job(["--config"])


def test_help_lists_every_key_with_its_default(capsys) -> None:
    """--help is complete: each key of each section, its meaning and its default."""
    with pytest.raises(SystemExit) as status:
        load_job(["--help"])
    assert status.value.code == 0
    text = capsys.readouterr().out
    for key in ("training.local_batch_size", "optimizer.lr", "parallelism.mode", "model.flavor"):
        assert f"--{key}" in text
    assert "Sequence length (default: 256)" in text  # the value of the file that would run
