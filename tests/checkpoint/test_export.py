"""`dmuon export` and `dmuon import`: transformers computes the same, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import qwen3_configs
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.checkpoint.conftest import Dmuon
from tests.worlds import RankFailed, run_world
from torchtitan_dmuon.checkpoint.archive import Archive, ArchiveReader, ArchiveWriter
from torchtitan_dmuon.checkpoint.export import find_archive, parse_size
from torchtitan_dmuon.checkpoint.folder import CheckpointFolder
from torchtitan_dmuon.checkpoint.hf_export import export, plan
from torchtitan_dmuon.checkpoint.hf_model import HFModel
from torchtitan_dmuon.checkpoint.planners import LoadPlanner
from torchtitan_dmuon.checkpoint.transfer import write
from torchtitan_dmuon.models.qwen2_5 import QWEN2_5_SIZES, Qwen2_5Size
from torchtitan_dmuon.models.registry import get_model_spec

ATOL = 1e-5
TEXT = "def f(x):\n    return x <|endoftext|> # ü"

TIED = Qwen2_5Size(
    dim=48,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    hidden_dim=88,
    vocab_size=101,
    tied=True,
    max_seq_len=64,
)
MANY = Qwen2_5Size(
    dim=512,
    n_layers=20,
    n_heads=8,
    n_kv_heads=4,
    hidden_dim=1024,
    vocab_size=512,
    tied=False,
    max_seq_len=64,
)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more sizes of Qwen2.5, and two layers of torchtitan's debug models."""
    for configs in (llama3_configs, qwen3_configs):
        debug = configs["debugmodel"]

        def small(debug: Any = debug, **options: Any) -> Any:
            config = debug(**options)
            config.layers = config.layers[:2]
            return config

        monkeypatch.setitem(configs, "small", small)
    monkeypatch.setitem(QWEN2_5_SIZES, "tied", TIED)
    monkeypatch.setitem(QWEN2_5_SIZES, "many", MANY)


def build_trainer(arguments: list[str]) -> Any:
    """Build the trainer of a job on this rank, the way train.py does."""
    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.manager import load_job

    return build(load_job(arguments), "cpu").build()


def train(arguments: list[str]) -> None:
    trainer = build_trainer(arguments)
    trainer.train()
    trainer.close()


def loaded(arguments: list[str]) -> dict[str, Any]:
    """Return the weights with which a job on one rank starts, as arrays."""
    trainer = build_trainer(arguments)
    assert trainer.checkpointer.load(step=-1)
    states = trainer.checkpointer.states["model"].state_dict()
    trainer.close()
    result = {}
    for name, value in states.items():
        if isinstance(value, torch.Tensor):
            result[name] = getattr(value, "full_tensor", lambda v=value: v)().numpy()
        else:
            result[name] = (
                torch.cat([t.flatten() for _, t in value.boxes]).view(value.shape).numpy()
            )
    return result


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job with owners, on two ranks."""
    dump = tmp_path_factory.mktemp("job")
    options = "--training.seq_len 32 --training.local_batch_size 1 --training.steps 2"
    options += " --optimizer.ns_dtype float32 --parallelism.owner_cost model"
    options += " --lr_scheduler.warmup_steps 0 --checkpoint.enable --checkpoint.interval 1"
    arguments = ["--config", "debug_owner.toml", "--dump_folder", str(dump), *options.split()]
    run_world(2, train, arguments, timeout_seconds=120)
    return dump / "checkpoint"


def random_state(name: str, flavor: str) -> dict[str, torch.Tensor]:
    """Return weights of a model, norms and biases too; what is tied is equal."""
    torch.manual_seed(5)
    model = HFModel.of(name, flavor)
    state = {
        key: torch.randn(meta.shape) * meta.shape[-1] ** -0.5
        if meta.ndim > 1
        else torch.randn(meta.shape) * 0.3 + (1 if "norm" in key else 0)
        for key, meta in model.tensors.items()
    }
    if model.tied:
        state["lm_head.weight"] = state["tok_embeddings.weight"].clone()
    return state


def checkpoint(folder: Path, name: str, flavor: str, state: dict[str, torch.Tensor]) -> Path:
    """Write weights as a checkpoint of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"model": {"name": name, "flavor": flavor}}
    write(dict(state), ArchiveWriter(CheckpointFolder(folder), 7, facts))
    return folder / "step-7"


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint's model, past the code under test."""
    archive = Archive.open(path)
    found: dict[str, Any] = archive.index.state_dict_metadata
    keys = [k for k in found if re.match(r"layers\.|norm\.|tok_embeddings\.|lm_head\.", k)]
    state = {k: torch.empty(found[k].size, dtype=found[k].properties.dtype) for k in keys}
    planner = LoadPlanner(archive, {k.split(".")[0] for k in found if k not in keys}, print)
    planner.set_up_planner(state, archive.index, True)
    reader = ArchiveReader(archive)
    reader.set_up_storage_reader(archive.index, True)
    reader.read_data(planner.create_local_plan(), planner)
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


def logits(name: str, flavor: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what our model makes of fixed tokens."""
    model: Any = get_model_spec(name, flavor, attn_backend="sdpa").model.build()
    model.init_states()
    model.load_state_dict(state, strict=True)
    tokens = _tokens(model.config.vocab_size)
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        result: torch.Tensor = model(tokens, positions, model.get_attention_masks(positions))
    return result


def hf_logits(folder: Path) -> torch.Tensor:
    """Return what transformers' model makes of the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=_tokens(model.config.vocab_size)).logits
    return result


def _tokens(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))


def test_a_job_with_owners_goes_to_transformers_and_back(
    job: Path, dmuon: Dmuon, tmp_path: Path
) -> None:
    """Shards, index, config and tokenizer load in transformers, which computes the same; imported,
    the tensors are bit-identical, and jobs of other modes start from them."""
    to, seed = tmp_path / "new" / "hf", tmp_path / "seed"
    status, out, err = dmuon("export", "--to", to, job, "--max_shard_size", "2MB", "--json")
    assert status == 0, err
    assert err.count("MB of 5.1 MB") == 3 and "s left" in err
    result = json.loads(out)
    assert result["checkpoint"].endswith("step-2") and result["files"] == sorted(os.listdir(to))
    original = weights(job / "step-2")
    assert result["bytes"] == sum(4 * t.numel() for t in original.values())

    index = json.loads((to / "model.safetensors.index.json").read_text())
    shards = sorted(to.glob("*.safetensors"))
    assert [s.name for s in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    contents = {s.name: load_file(s) for s in shards}
    assert index["weight_map"] == {k: f for f, tensors in contents.items() for k in tensors}
    assert index["metadata"]["total_size"] == result["bytes"]
    for tensors in contents.values():
        assert sum(4 * t.numel() for t in tensors.values()) <= 2_000_000
    assert all(s.stat().st_mode == (to / "config.json").stat().st_mode for s in shards)

    torch.testing.assert_close(
        hf_logits(to), logits("qwen2_5", "debug", original), rtol=0, atol=ATOL
    )
    assert "PreTrainedTokenizerFast" in err
    ids = Tokenizer.from_file(str(job / "step-2" / "tokenizer" / "tokenizer.json")).encode(TEXT).ids
    assert PreTrainedTokenizerFast.from_pretrained(to)(TEXT)["input_ids"] == ids
    tokenizer = AutoTokenizer.from_pretrained(to)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.eos_token_id == json.loads((to / "config.json").read_text())["eos_token_id"]

    status, out, err = dmuon("import", to, "--to", seed, "--config", "debug_owner_ddp.toml")
    assert status == 0, err
    assert f"--checkpoint.initial_load_path {seed}/step-0" in out
    assert same(weights(seed / "step-0"), original)
    assert (seed / "step-0" / "tokenizer" / "tokenizer.json").is_file()
    for line in "ABC":
        arguments = ["--config", "debug_owner.toml", "--line", line, "--checkpoint.enable"]
        arguments += ["--checkpoint.initial_load_path", f"{seed}/step-0"]
        arguments += ["--parallelism.owner_cost", "model", "--dump_folder", f"{tmp_path}/{line}"]
        (started,) = run_world(1, loaded, arguments)
        assert same({k: torch.from_numpy(v) for k, v in started.items()}, original), line


@pytest.mark.parametrize(
    ("name", "flavor"),
    [("llama3", "small"), ("qwen3", "small"), ("qwen2_5", "tied"), ("qwen_moe", "debug")],
)
def test_every_family_round_trips(name: str, flavor: str, dmuon: Dmuon, tmp_path: Path) -> None:
    """Fused, permuted, tied and stacked weights: transformers has the same logits, and the same
    bits come back."""
    state = random_state(name, flavor)
    path = checkpoint(tmp_path / "jobs", name, flavor, state)
    assert dmuon("export", path, "--to", tmp_path / "hf")[0] == 0
    assert ("lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")) == (
        name in ("llama3", "qwen_moe")
    )
    ours = logits(name, flavor, state)
    assert ours.std() > 0.1
    torch.testing.assert_close(hf_logits(tmp_path / "hf"), ours, rtol=0, atol=ATOL)
    model = ["--model.name", name, "--model.flavor", flavor]
    status, _, err = dmuon("import", "--to", tmp_path / "seed", *model, tmp_path / "hf")
    assert status == 0, err
    assert same(weights(tmp_path / "seed" / "step-0"), state)


def test_a_tied_head_may_be_there_or_not(dmuon: Dmuon, tmp_path: Path) -> None:
    """Files hold embedding, head or both; a head of its own is another model."""
    state = random_state("qwen2_5", "tied")
    path = checkpoint(tmp_path / "jobs", "qwen2_5", "tied", state)
    assert dmuon("export", path, "--to", tmp_path / "hf")[0] == 0
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors.pop("model.embed_tokens.weight")
    old = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    for number, form in enumerate((both | old, {"lm_head.weight": embedding})):
        save_file(tensors | form, file)
        seed = tmp_path / f"seed{number}"
        status, _, err = dmuon("import", tmp_path / "hf", "--to", seed, "--model.flavor", "tied")
        assert status == 0, err
        assert same(weights(seed / "step-0"), state)
    both["lm_head.weight"] = embedding + 1
    save_file(tensors | both, file)
    _refused(dmuon("import", tmp_path / "hf", "--to", tmp_path / "x", "--model.flavor", "tied"),
             "lm_head.weight is not the embedding")  # fmt: skip
    save_file(tensors, file)
    _refused(dmuon("import", tmp_path / "hf", "--to", tmp_path / "x", "--model.flavor", "tied"),
             "lacks model.embed_tokens.weight")  # fmt: skip


def test_another_dtype(dmuon: Dmuon, tmp_path: Path) -> None:
    """bfloat16 is each weight rounded; import keeps it; float16 refuses what it cannot hold."""
    state = random_state("qwen2_5", "tied")
    state["norm.weight"][3] = 1e5
    path = checkpoint(tmp_path / "jobs", "qwen2_5", "tied", state)
    assert dmuon("export", path, "--dtype", "bfloat16", "--to", tmp_path / "hf")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    seed = tmp_path / "seed"
    assert dmuon("import", tmp_path / "hf", "--to", seed, "--model.flavor", "tied")[0] == 0
    assert same(weights(seed / "step-0"), {k: v.bfloat16() for k, v in state.items()})
    refused = dmuon("export", path, "--dtype", "float16", "--to", tmp_path / "half")
    _refused(refused, "norm.weight: has values beyond the range of float16; use --dtype bfloat16")
    assert not list(tmp_path.glob("half*"))


def test_a_checkpoint_of_torchtitan_needs_the_job_config(dmuon: Dmuon, tmp_path: Path) -> None:
    """Without a manifest the model is asked for; what is no model's is not exported."""
    state = random_state("qwen2_5", "tied")
    optimizer = {f"optimizer.state.{k}.exp_avg": v for k, v in state.items()}
    path = tmp_path / "step-3"
    save({**state, **optimizer, "train_state.step": 3},
         storage_writer=FileSystemWriter(path), no_dist=True)  # fmt: skip
    _refused(dmuon("export", path, "--to", tmp_path / "hf"), "does not say which model it is of")
    config = tmp_path / "job.toml"
    config.write_text('base = "debug.toml"\n[model]\nflavor = "tied"\n')
    status, out, err = dmuon("export", path, "--to", tmp_path / "hf", "--config", config)
    assert status == 0, err
    assert "no tokenizer" in out
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {
        name for parts in HFModel.of("qwen2_5", "tied").hf.values() for name in parts
    }
    _refused(
        dmuon("export", path, "--to", tmp_path / "x", "--config", "debug.toml"),
        "layers.0.attention.qkv_linear.wk.weight is (16, 48) there and (64, 128) here",
    )


def test_peak_memory_is_one_shard(dmuon: Dmuon, tmp_path: Path) -> None:
    """Of 190 MB, an export holds a shard of 20 MB and a few tensors of 2 MB; an import those."""
    path = checkpoint(tmp_path / "jobs", "qwen2_5", "many", random_state("qwen2_5", "many"))
    _, out, err = dmuon("export", path, "--to", tmp_path / "hf", "--max_shard_size", "20MB",
                        "--json")  # fmt: skip
    result = json.loads(out)
    assert result["bytes"] > 190e6
    assert 15e6 < result["peak_bytes"] < 40e6, err
    _, out, err = dmuon("import", tmp_path / "hf", "--to", tmp_path / "seed", "--json",
                        "--model.flavor", "many")  # fmt: skip
    result = json.loads(out)
    assert result["bytes"] > 190e6
    assert result["peak_bytes"] < 20e6, err


def _export_and_die(path: Path, to: Path, shards_first: int) -> None:
    model = HFModel.of("qwen2_5", "debug")
    archive = find_archive(path)
    written = 0

    def progress(*_: object) -> None:
        nonlocal written
        written += 1
        if written == shards_first:
            os.kill(os.getpid(), signal.SIGKILL)

    export(archive, model, plan(archive, model, None, 2_000_000), to, None, progress)


@pytest.mark.parametrize("shards_first", [1, 3])
def test_killed_in_the_middle(job: Path, dmuon: Dmuon, tmp_path: Path, shards_first: int) -> None:
    """Nothing has the folder's name; the next export replaces what was left."""
    to = tmp_path / "hf"
    with pytest.raises(RankFailed, match="rank 0 died"):
        run_world(1, _export_and_die, job, to, shards_first)
    assert not to.exists()
    assert len(list((tmp_path / "hf.partial").glob("*.safetensors"))) == shards_first
    assert dmuon("export", job, "--to", to)[0] == 0
    assert not (tmp_path / "hf.partial").exists()
    assert sorted(p.name for p in to.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip


def _refused(result: tuple[int, str, str], message: str) -> None:
    status, out, err = result
    assert (status, out) == (2, ""), err
    lines = [line for line in err.splitlines() if not re.match(r"\[ *\d+ s\]", line)]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], err


def test_mistakes_of_an_export_are_one_line(
    job: Path, dmuon: Dmuon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says what and where, and leaves everything as it was."""
    to = tmp_path / "hf"
    _refused(dmuon("export"), "expected CKPT: dmuon export CKPT --to DIR")
    _refused(dmuon("export", job), "expected --to")
    _refused(dmuon("export", job, "x", "--to", to), '"x": one argument too many')
    _refused(dmuon("export", job, "--to", to, "--max_shard_size", "5XB"), "such as 500MB")
    _refused(dmuon("export", job, "--to", to, "--dtype", "int8"), '"bfloat16"')
    _refused(dmuon("export", job, "--dtpye", "x"), "did you mean '--dtype'?")
    _refused(dmuon("export", job / "step-9", "--to", to), "are: step-1, step-2")
    _refused(dmuon("export", job.parent, "--to", to), f"did you mean {job}?")
    _refused(
        dmuon("export", job, "--to", to, "--config", "debug.toml", "--model.flavor", "7B"),
        "is of the model qwen2_5 debug, not of qwen2_5 7B",
    )
    to.mkdir()
    (to / "mine").write_text("kept")
    _refused(dmuon("export", job, "--to", to), "is not empty; nothing is overwritten")
    assert (to / "mine").read_text() == "kept"
    _refused(dmuon("export", job, "--to", to / "mine"), "exists; nothing is overwritten")
    _refused(dmuon("export", job, "--to", to / "mine" / "x"), "cannot be written: Not a directory")

    damaged = tmp_path / "damaged"
    shutil.copytree(job, damaged)
    for index, info in Archive.open(damaged / "step-2").index.storage_data.items():
        if index.fqn == "layers.3.attention.wo.weight":
            file = damaged / "step-2" / info.relative_path
            data = bytearray(file.read_bytes())
            data[info.offset + info.length // 2] ^= 1
            file.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    _refused(dmuon("export", damaged, "--to", "new"), "damaged in layers.3.attention.wo.weight")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1000))
    _refused(dmuon("export", job, "--to", "new"), "5 MiB are needed there and 0 MiB are free")
    assert not list(tmp_path.glob("new*"))


def test_mistakes_of_an_import_are_one_line(
    dmuon: Dmuon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, missing or damaged files, pickles: nothing is written, nothing is run."""
    path = checkpoint(tmp_path / "jobs", "qwen2_5", "tied", random_state("qwen2_5", "tied"))
    hf, to = tmp_path / "hf", tmp_path / "seed"
    assert dmuon("export", path, "--to", hf, "--max_shard_size", "50KB")[0] == 0
    shards = sorted(hf.glob("*.safetensors"))
    model = ["--model.flavor", "tied"]

    def refused(message: str, *arguments: object) -> None:
        _refused(dmuon("import", *(arguments or (hf, "--to", to, *model))), message)
        assert not (to / "step-0").exists() and not (to / "saving.0").exists()

    refused("expected HF_DIR", "--to", to)
    refused("which model is it? add --config", hf, "--to", to)
    refused("no such folder", tmp_path / "hg", "--to", to, *model)
    refused("hidden_size is 48 there and 128 here", hf, "--to", to, "--model.flavor", "debug")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_attention_heads": 12}))
    refused("num_attention_heads is 12 there and 6 here")
    (hf / "config.json").unlink()
    refused("embed_tokens.weight is (101, 48) there", hf, "--to", to, "--model.flavor", "debug")
    refused("which that has not", hf, "--to", to, "--model.name", "llama3",
            "--model.flavor", "small")  # fmt: skip

    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-5])
    refused(f"{shards[1].name}: truncated or damaged")
    shards[1].write_bytes(b"\xff" * 8 + whole[8:])
    refused(f"{shards[1].name}: truncated or damaged")
    tensors = load_file(shards[0])
    shards[1].unlink()
    refused(f"{shards[1].name}: missing; model.safetensors.index.json names it")
    save_file(tensors, shards[1])
    refused("names what is not there")
    (hf / "model.safetensors.index.json").unlink()
    refused("it lacks model.layers.")
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, shards[1])
    refused("a is I8; expected one of")
    for shard in shards:
        shard.unlink()
    refused("holds no safetensors files")
    (hf / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(tmp_path / "ran")))
    refused("holds pickled weights (pytorch_model.bin), which can run code and are never loaded")
    assert not (tmp_path / "ran").exists()
    refused("has step-7 already; nothing is overwritten", hf, "--to", path.parent, *model)


class _Bomb:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("7", 7), ("2kb", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    """Powers of ten and of two, as they are written everywhere."""
    assert parse_size(text) == size
