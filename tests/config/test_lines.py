"""`line`, modes and optimizers: one key switches them, and what does not fit is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.lines import LINES
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, Job, load_job, print_config

JOB = f"""\
base = "{CONFIG_FOLDER}/debug_hsdp_z3.toml"
line = "C"

[optimizer]
lr = 0.02
weight_decay = 0.1
adamw_lr = 3e-4
adamw_betas = [0.9, 0.97]
adamw_weight_decay = 0.05
"""

TRAINED = list(LINES)

MODE = JOB.replace('line = "C"\n', "") + 'name = "DMuon"\n[parallelism]\nmode = "owner"\n'


@pytest.fixture
def write(tmp_path: Path):
    """Write a job file; returns its path."""

    def write_text(text: str, name: str = "job.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_text


def _load(path: str, *arguments: str) -> Job:
    job = load_job(["--config", path, *arguments])
    check(job, 4, "cpu")
    return job


def _message(path: str, *arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        job = _load(path, *arguments)
        build(job, "cpu")
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("line", TRAINED)
def test_a_line_sets_mode_and_optimizer(write, line: str) -> None:
    """The command line switches a job that is written for line C, whatever its base says."""
    config = _load(write(JOB), "--line", line).config
    mode, optimizer = LINES[line].mode, LINES[line].optimizer
    assert (config.parallelism.mode, config.optimizer.name) == (mode, optimizer)


def test_line_a_takes_the_adamw_settings(write) -> None:
    """AdamW on everything has the values that AdamW has beside Muon."""
    o = _load(write(JOB), "--line", "A").config.optimizer
    assert (o.lr, o.betas, o.eps, o.weight_decay) == (3e-4, (0.9, 0.97), 1e-8, 0.05)
    o = _load(write(JOB)).config.optimizer
    assert (o.lr, o.weight_decay, o.adamw_lr) == (0.02, 0.1, 3e-4)


@pytest.mark.parametrize("line", ["", *TRAINED])
def test_a_resolved_line_loads_back(write, tmp_path: Path, capsys, line: str) -> None:
    """--print-config of each line is a job that resolves to the same and passes every check."""
    text = JOB if line else MODE
    first = load_job(["--config", write(text), *(["--line", line] if line else [])]).config
    print_config(first)
    assert _load(write(capsys.readouterr().out, "printed.toml")).config == first


def test_line_d_is_owners_with_operators(write, tmp_path: Path, capsys) -> None:
    """It resolves, prints and loads back; the other lines have c10d."""
    text = JOB.replace('line = "C"', 'line = "D"')
    config = load_job(["--config", write(text)]).config
    p = config.parallelism
    assert (p.mode, p.communication, config.optimizer.name) == ("owner", "operators", "DMuon")
    print_config(config)
    assert load_job(["--config", write(capsys.readouterr().out, "printed.toml")]).config == config
    for line in set(TRAINED) - {"D"}:
        assert _load(write(text), "--line", line).config.parallelism.communication == "c10d"


def test_modes_without_a_line(write) -> None:
    """Mode and name can be set by hand, and an empty line switches a job's line off."""
    config = _load(write(MODE)).config
    assert (config.parallelism.mode, config.optimizer.name) == ("owner", "DMuon")
    assert config.parallelism.spmd_backend == "partial_dtensor"
    plain = write('base = "job.toml"\nline = ""\n', "plain.toml")
    write(JOB.replace("[optimizer]", '[parallelism]\nmode = "fsdp"\n[optimizer]\nname = "Muon"'))
    message = _message(write(JOB.replace("[optimizer]", '[optimizer]\nname = "Muon"')))
    assert 'job.toml:5: optimizer.name: "Muon" contradicts line = "C"' in message
    write(MODE)
    assert _load(plain).config.parallelism.mode == "owner"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallelism.mode", "fsdp"], r'^--parallelism.mode: "fsdp" contradicts line = "C"'),
        (["--optimizer.name", "AdamW"], r'^--optimizer.name: "AdamW" contradicts.*"DMuon"'),
        (
            ["--parallelism.communication", "operators"],
            r'^--parallelism.communication: "operators" contradicts line = "C", .* "c10d"',
        ),
        (["--line", "E"], r'--line: "E" .* is not one of "", "A", "B", "C", "D", "torch"'),
    ],
)
def test_a_contradicted_line_is_named(write, arguments: list[str], expected: str) -> None:
    """A mode or name beside the line, or above it, must be the line's."""
    assert re.search(expected, _message(write(JOB), *arguments))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('mode = "owner"', 'mode = "ownr"', r"job.toml:11: parallelism.mode.*did you mean 'owner'"),
        ('mode = "owner"', "", r'job.toml:9: optimizer.name: DMuon works in mode "owner" or "gath'),
        ('name = "DMuon"', "", r"AdamW works in mode .fsdp., but.*can be .DMuon."),
        (
            'name = "DMuon"',
            'name = "Muon"',
            r'Muon works in mode "fsdp", but.*:11',
        ),
        ('name = "DMuon"', 'name = "DMoun"', r"job.toml:9: optimizer.name: .*did you mean 'DMuon'"),
        ("lr = 0.02", "ns_steps = -1", r"job.toml:4: optimizer.ns_steps: expected 1 to 99, got -1"),
        ("lr = 0.02", "ns_steps = 0", r"job.toml:4: optimizer.ns_steps: expected 1 to 99, got 0"),
        ("lr = 0.02", "momentum = 1.0", r"job.toml:4: optimizer.momentum: expected 0 <= momentum"),
        ("lr = 0.02", "momentun = 0.9", r"job.toml:4: optimizer.momentun.*did you mean 'momentum'"),
        ("lr = 0.02", 'lr = "fast"', r"job.toml:4: optimizer.lr: expected a number, got .fast"),
        ("lr = 0.02", "lr = -0.1", r"job.toml:4: optimizer.lr: expected a number >= 0, got -0.1"),
        ("lr = 0.02", "lr = inf", r"job.toml:4: optimizer.lr: expected a number >= 0, got inf"),
        ("lr = 0.02", "ns_coefficients = [1.0]", r"ns_coefficients: expected one of .*or 3 values"),
        (
            "lr = 0.02",
            'algorithm = "soup"',
            r"job.toml:4: optimizer.algorithm: .*you mean 'soap'",
        ),
        ("lr = 0.02", 'algorithm = "no.such:X"', r"job.toml:4: optimizer.algorithm: cannot import"),
        (
            "lr = 0.02",
            "algorithm_options = { beta2 = 0.9 }",
            r"job.toml:4: optimizer.algorithm_options: options of algorithm muon are keys of \[opt",
        ),
        (
            "lr = 0.02",
            'algorithm = "soap"\nalgorithm_options = { precondition_frequncy = 5 }',
            r"job.toml:5: optimizer.algorithm_options: .*did you mean 'precondition_frequency'",
        ),
        (
            "lr = 0.02",
            'algorithm = "soap"\nalgorithm_options = { precondition_frequency = 0 }',
            r"job.toml:5: optimizer.algorithm_options: precondition_frequency: expected",
        ),
        (
            "lr = 0.02",
            'algorithm = "soap"\nmomentum = 0.9',
            r"job.toml:5: optimizer.momentum: nothing reads it with .* algorithm soap; its options",
        ),
        (
            "lr = 0.02",
            'algorithm = "soap"\nalgorithm_options = { lr = 1.0 }',
            r"job.toml:5: optimizer.algorithm_options: lr is a key of \[optimizer\]",
        ),
        ("lr = 0.02", 'ns_coefficients = "quintc"', r"ns_coefficients: .*did you mean 'quintic'"),
        ("lr = 0.02", "qk_clip = -1.0", r"job.toml:4: optimizer.qk_clip: expected a number >= 0"),
        ("lr = 0.02", "ns_restarts = [0]", r"job.toml:4: optimizer.ns_restarts: expected"),
        (
            "lr = 0.02",
            'ns_method = "grm"',
            r"job.toml:4: optimizer.ns_method: .*you mean 'gram'",
        ),
        ("lr = 0.02", 'ns_dtype = "float8"', r"job.toml:4: optimizer.ns_dtype: .*is not one of"),
        ("lr = 0.02", 'adjust_lr_fn = "orignal"', r"adjust_lr_fn: .*did you mean 'original'"),
        ("lr = 0.02", "betas = [0.8, 0.9]", r"job.toml:4: optimizer.betas: nothing.*'adamw_betas'"),
        (
            "adamw_lr = 3e-4",
            "adamw_lr = -1",
            r"job.toml:6: optimizer.adamw_lr: expected a number",
        ),
        ("0.97]", "1.0]", r"job.toml:7: optimizer.adamw_betas: expected 0 <= beta < 1, got 1.0"),
        ("[optimizer]", "[optimizr]", r"job.toml:3: optimizr: unknown .*did you mean 'optimizer'"),
        (
            'mode = "owner"',
            'mode = "owner"\nbyte_cap = -1',
            r"job.toml:12: .*byte_cap: expected",
        ),
        (
            'mode = "owner"',
            'mode = "owner"\nprefetch_depth = -1',
            r"job.toml:12: parallelism.prefetch_depth: expected 0 to",
        ),
        (
            'mode = "owner"',
            'mode = "owner"\nowner_cost = "modle"',
            r"job.toml:12: parallelism.owner_cost: .*did you mean 'model'",
        ),
        (
            'mode = "owner"',
            'mode = "owner"\ncommunication = "operator"',
            r"job.toml:12: parallelism.communication: .*not one of .c10d.*did you mean 'operators'",
        ),
        (
            'mode = "owner"',
            'mode = "gather"\ncommunication = "operators"',
            r'job.toml:12: parallelism.communication: mode gather, .* knows "c10d" only',
        ),
        (
            'mode = "owner"',
            'mode = "owner"\ndata_parallel_replicate_degree = 3',
            r"job.toml:10: parallelism: the degrees .3 replicate x 2 shard.*need 6 ranks.*has 4",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(write, old: str, new: str, expected: str) -> None:
    """File, line, key path and the nearest valid choice, before any process group."""
    assert old in MODE
    text = MODE.replace(old, new)
    assert re.search(expected, _message(write(text)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallelism.tensor_parallel_degree", "2"], r"does not go with tensor parallelism yet"),
        (["--parallelism.expert_parallel_degree", "2"], r"does not go with expert parallelism yet"),
        (
            ["--checkpoint.enable", "--checkpoint.last_save_model_only"]
            + ["--checkpoint.last_save_in_hf"],
            r"last_save_in_hf: expected false in mode owner; dmuon export",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"],
            r"initial_load_in_hf: expected false in mode owner; dmuon import",
        ),
        (["--training.enable_cpu_offload"], r"^--training.enable_cpu_offload: .*expected false"),
        (["--parallelism.spmd_backend", "spmd_types"], r'spmd_backend: .*"partial_dtensor"'),
        (["--optimizer.name", "AdamW"], r'AdamW works in mode "fsdp".*can be "DMuon"'),
        (["--parallelism.mode", "fsdp", "--optimizer.name", "Muon", "--optimizer.publish", "sync"],
         r"^--optimizer.publish: nothing reads it with Muon"),
        (["--parallelism.mode", "fsdp", "--line", "A", "--parallelism.byte_cap", "0.3"],
         r""),
    ],
)  # fmt: skip
def test_what_owners_cannot_do_yet_is_refused(write, arguments, expected: str) -> None:
    """Combinations that would fail, or silently do something else, name the option."""
    if not expected:  # the settings of other lines may stay
        _load(write(MODE), *arguments)
        return
    assert re.search(expected, _message(write(MODE), *arguments))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ('pattern = "("\noptimizer_name = "DMuon"', "pattern is not a regular expression"),
        (
            'pattern = "x"\noptimizer_name = "AdamW"',
            "unknown optimizer 'AdamW'; expected one of",
        ),
        ('pattern = "x"\noptimizer_name = "Dmuon"', "did you mean 'DMuon'?"),
        (
            'pattern = "x"\noptimizer_name = "DMuon"\noptimizer_kwargs = { betas = [0.9, 0.9] }',
            "unknown argument 'betas' of DMuon; did you mean 'adamw_betas'?",
        ),
        (
            'pattern = "x"\noptimizer_name = "DMuon"\noptimizer_kwargs = { momentum = "high" }',
            "momentum: expected 0 <= momentum < 1, got 'high'",
        ),
        (
            'pattern = "x"\noptimizer_name = "DMuon"\noptimizer_kwargs = { momentum = 1.5 }',
            "momentum: expected 0 <= momentum < 1, got 1.5",
        ),
    ],
)
def test_parameter_groups_are_checked(write, entry: str, expected: str) -> None:
    """A group names its own line and the option that is wrong."""
    message = _message(write(f"{MODE}\n[[optimizer.param_groups]]\n{entry}\n"))
    assert "job.toml:13: optimizer.param_groups[0]" in message and expected in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["quintic"], "quintic"),
        (["3", "-4.5", "2"], (3.0, -4.5, 2.0)),
        (["[[1, 2, 3], [4, 5, 6]]"], [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]),
    ],
    ids=["word", "three", "per step"],
)
def test_coefficients_on_the_command_line(write, values: list[str], expected: object) -> None:
    """A word, three numbers, or a list of three numbers for each step."""
    job = _load(write(MODE), "--optimizer.ns_coefficients", *values)
    assert job.config.optimizer.ns_coefficients == expected
    job = _load(write(MODE), "--optimizer.ns_restarts", "none")
    assert job.config.optimizer.ns_restarts is None


def test_line_d_takes_what_every_rank_can(write) -> None:
    """communication = "auto" may stand beside it, or come from the command line; C's is c10d."""
    text = JOB.replace('line = "C"', 'line = "D"')
    auto = ("--parallelism.communication", "auto")
    assert _load(write(text), *auto).config.parallelism.communication == "auto"
    assert _load(write(text)).config.parallelism.communication == "operators"
    with pytest.raises(ConfigError, match='"auto" contradicts line = "C"'):
        _load(write(JOB), *auto)
