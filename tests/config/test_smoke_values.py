"""What `--smoke` makes of a job: small enough for four CPU ranks, and otherwise the same job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from torchtitan_dmuon.config.build import build
from torchtitan_dmuon.config.checks import check, with_degrees
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.manager import CONFIG_FOLDER, Job, load_job
from torchtitan_dmuon.launch import find_cluster
from torchtitan_dmuon.models.registry import get_model_spec, model_flavors, model_names, toy_flavor

NAMES = sorted(p.name for p in CONFIG_FOLDER.glob("*.toml"))


def _smoke(name: str, *arguments: str) -> Job:
    return load_job(["--config", name, "--smoke", *arguments])


def _job(tmp_path: Path, text: str, base: str = "qwen7b_fsdp_z2.toml") -> str:
    path = tmp_path / "job.toml"
    path.write_text(f'base = "{CONFIG_FOLDER}/{base}"\n{text}')
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_smokes_on_its_own_line(name: str) -> None:
    """Any file becomes a job that four CPU ranks can train, and keeps what decides its path."""
    full, job = load_job(["--config", name]).config, _smoke(name)
    check(job, 4, "cpu")
    build(job, "cpu")
    small = job.config
    for section, key in (
        ("parallelism", "mode"),
        ("parallelism", "communication"),
        ("parallelism", "fsdp_reshard_after_forward"),
        ("training", "mixed_precision_param"),
        ("training", "mixed_precision_reduce"),
        ("training", "dtype"),
        ("optimizer", "name"),
        ("optimizer", "lr"),
    ):
        assert getattr(getattr(small, section), key) == getattr(getattr(full, section), key)
    for section in ("activation_checkpoint", "loss", "compile"):
        assert getattr(small, section) == getattr(full, section)
    assert (small.line, small.model.name) == (full.line, full.model.name)
    assert small.dump_folder == f"./outputs/smoke/{Path(name).stem}"
    spec = get_model_spec(small.model.name, small.model.flavor, attn_backend="sdpa")
    assert spec.model.vocab_size == 2048 and len(spec.model.layers) <= 4


@pytest.mark.parametrize("line", ["A", "B", "C", "torch"])
@pytest.mark.parametrize("name", ["llama3b_hsdp_z3.toml", "qwen_moe_fsdp_z3.toml"])
def test_lines_go_with_smoke(name: str, line: str) -> None:
    """`--line` works on top of `--smoke`."""
    job = _smoke(name, "--line", line)
    assert job.config.line == line
    if (name, line) == ("qwen_moe_fsdp_z3.toml", "torch"):
        with pytest.raises(ConfigError, match=r"^--line: torch.optim.Muon takes 2-D weights"):
            check(job, 4, "cpu")
        return
    check(job, 4, "cpu")
    build(job, "cpu")


@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [
        ("1 -1", (1, 4)),
        ("1 64", (1, 4)),
        ("-1 8", (2, 2)),
        ("2 8", (2, 2)),
        ("4 1", (4, 1)),
        ("-1 1", (4, 1)),
    ],
)
def test_the_mesh_is_folded_to_four_ranks(
    tmp_path: Path, degrees: str, mesh: tuple[int, int]
) -> None:
    """Rows stay rows, FSDP stays FSDP and DDP stays DDP, without model parallelism."""
    replicate, shard = degrees.split()
    text = (
        f"[parallelism]\ndata_parallel_replicate_degree = {replicate}\n"
        f"data_parallel_shard_degree = {shard}\ntensor_parallel_degree = 8\n"
    )
    p = _smoke(_job(tmp_path, text), "--line", "A").config.parallelism
    assert (p.data_parallel_replicate_degree, p.data_parallel_shard_degree) == mesh
    assert p.tensor_parallel_degree == 1


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ("data_parallel_replicate_degree = 0", "replicate_degree: expected at least 1, or -1"),
        ("tensor_parallel_degree = -2", "tensor_parallel_degree: expected at least 1"),
        (
            "data_parallel_replicate_degree = -1\ndata_parallel_shard_degree = -1",
            "only one degree can be -1",
        ),
    ],
)
def test_degrees_that_cannot_be_are_not_hidden(tmp_path: Path, degrees: str, expected: str) -> None:
    """What runs nowhere is refused where the file says it, toy or not."""
    path = tmp_path / "job.toml"
    path.write_text(f"[parallelism]\n{degrees}\n")
    job = load_job(["--config", str(path), "--smoke"])
    with pytest.raises(ConfigError, match=f"job.toml:2: .*{expected}"):
        check(with_degrees(job, 4), 4, "cpu")


def test_the_command_line_wins_and_is_not_listed() -> None:
    """What the command line sets is as it says; the printed lines tell the rest, once each."""
    job = _smoke("qwen7b_fsdp_z2.toml", "--training.steps", "7", "--dump_folder", "here")
    assert (job.config.training.steps, job.config.dump_folder) == (7, "here")
    assert job.smoke is not None
    text = "\n".join(job.smoke)
    assert "steps" not in text.replace("warmup_steps", "") and "dump_folder" not in text
    assert "flavor 7B-toy (was 7B)" in text
    assert "dataset random_tokens (was fineweb_edu)" in text
    assert len(job.smoke) < 10


def test_mistakes_beside_smoke_are_named(tmp_path: Path) -> None:
    """A wrong model or data set is still the file's mistake, and so is a wrong option."""
    for text, expected in (
        ('[model]\nflavor = "7b"\n', r"job.toml:3: model.flavor: .*did you mean '7B'"),
        ('[dataloader]\ndataset = "fineweb"\n', r"job.toml:3: dataloader.dataset: .*fineweb_edu"),
    ):
        with pytest.raises(ConfigError, match=expected):
            check(_smoke(_job(tmp_path, text)), 4, "cpu")
    with pytest.raises(ConfigError, match="expected an option"):
        _smoke("debug.toml", "yes")


def _tokenizer(folder: Path, size: int) -> None:
    folder.mkdir()
    words = {f"w{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("section", "size", "dataset", "tokenizer"),
    [
        ('dataset = "python_stdlib"', 0, "python_stdlib", False),
        ('dataset = "./not/here"', 0, "random_tokens", False),
        ('dataset = "local_files"\ndataset_path = "not here"', 0, "random_tokens", False),
        ('dataset = "python_stdlib"', 2048, "python_stdlib", True),
        ('dataset = "python_stdlib"', 2049, "python_stdlib", False),
        ('dataset = "fineweb_edu"', 2048, "random_tokens", True),
    ],
)
def test_data_that_is_here_stays(
    tmp_path: Path, section: str, size: int, dataset: str, tokenizer: bool
) -> None:
    """Only what is streamed or missing becomes random; a tokenizer stays if the toy knows it."""
    folder = tmp_path / "assets"
    if size:
        _tokenizer(folder, size)
    text = f'hf_assets_path = "{folder}"\n[dataloader]\n{section}\n'
    job = _smoke(_job(tmp_path, text))
    check(job, 4, "cpu")
    assert job.config.dataloader.dataset == dataset
    assert job.config.hf_assets_path == (str(folder) if tokenizer else "")


def test_what_only_gpus_or_the_full_model_have_is_left_out(tmp_path: Path) -> None:
    """Values that four CPU ranks or a toy cannot take do not stop a smoke run."""
    text = (
        'max_restarts = 3\n[checkpoint]\nenable = true\ninitial_load_path = "not/here"\n'
        '[training]\nglobal_batch_size = 1024\n[parallelism]\nowner_cost = "h100"\n'
        '[model]\nattn_backend = "flex"\n'
        '[validator]\nenable = true\n[validator.data]\ndataset = "fineweb_edu"\n'
    )
    job = _smoke(_job(tmp_path, text))
    check(job, 4, "cpu")
    build(job, "cpu")
    c = job.config
    assert c.training.global_batch_size == 2 * 4 * c.training.local_batch_size
    assert c.validator.enable and c.validator.data.dataset == "random_tokens"


@pytest.mark.parametrize("ngpu", ["8", "", None])
def test_a_smoke_run_has_four_ranks(monkeypatch: Any, ngpu: str | None) -> None:
    """NGPU, which may be set for the job itself, does not matter; several nodes are refused."""
    for name in ("NGPU", "NNODES", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    if ngpu is not None:
        monkeypatch.setenv("NGPU", ngpu)
    cluster = find_cluster(_smoke("qwen32b_hsdp_z3.toml"))
    assert (cluster.world_size, cluster.device) == (4, "cpu")
    two = find_cluster(
        _smoke("qwen32b_fsdp_z3.toml", "--parallelism.data_parallel_shard_degree", "2")
    )
    assert two.world_size == 2
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match=re.escape("--smoke: runs on one node, but NNODES=2")):
        find_cluster(_smoke("debug.toml"))


@pytest.mark.parametrize(
    ("name", "flavor"), [(n, f) for n in model_names() for f in model_flavors(n)]
)
def test_toys_are_small_and_keep_the_structure(name: str, flavor: str) -> None:
    """The toys of our flavors have the kinds of parts of the full model, in its proportions."""
    toy = toy_flavor(name, flavor)
    assert toy_flavor(name, toy) == toy
    full, small = (get_model_spec(name, f, attn_backend="sdpa").model for f in (flavor, toy))
    assert 2 <= len(small.layers) <= 8 and small.dim <= 256 and small.vocab_size <= 2048
    if name == "qwen3" or (name == "llama3" and flavor not in ("3.2-3B", "3.1-8B")):
        return  # torchtitan's own debug models stand for these
    assert full.enable_weight_tying == small.enable_weight_tying
    a, b = full.layers[-1].attention, small.layers[-1].attention
    assert a.n_heads // a.n_kv_heads == b.n_heads // b.n_kv_heads
    assert type(a.qkv_linear) is type(b.qkv_linear)
    assert a.qkv_linear.wq.bias == b.qkv_linear.wq.bias
    assert a.rope.theta == b.rope.theta
    if name == "qwen_moe":
        moe = small.layers[-1].moe
        assert moe.num_experts > moe.router.top_k > 1
        return
    wide = full.layers[-1].feed_forward.w1.out_features / full.dim
    assert small.layers[-1].feed_forward.w1.out_features / small.dim == pytest.approx(wide, rel=0.1)


@pytest.mark.parametrize("name", ["qwen1.5b", "qwen7b", "qwen32b", "llama3b", "llama8b"])
def test_the_same_matrices_are_small(name: str) -> None:
    """The limit of small matrices shrinks with the model: owners get the same units of a layer."""
    jobs = load_job(["--config", name]).config, _smoke(name).config
    kinds = []
    for config in jobs:
        spec = get_model_spec(config.model.name, config.model.flavor, attn_backend="sdpa")
        layer, limit = spec.model.layers[-1], config.parallelism.small_matrix_numel
        qkv, f = layer.attention.qkv_linear, layer.feed_forward
        parts = (qkv.wq, qkv.wkv, layer.attention.wo, f.w1, f.w2)
        kinds.append([part.in_features * part.out_features < limit for part in parts])
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("chunks", [1, 5, 10, 64])
def test_the_chunks_of_the_loss_divide_the_short_sequence(tmp_path: Path, chunks: int) -> None:
    """A job whose loss has ten chunks stays one, on a sequence of 70 in place of 64."""
    job = _smoke(_job(tmp_path, f"[loss]\nnum_chunks = {chunks}\n"))
    check(job, 4, "cpu")
    assert job.config.training.seq_len == -(-64 // chunks) * chunks
