"""`dmuon export` and `dmuon import` of stacks of experts, which Hugging Face has one by one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.conftest import Dmuon
from tests.checkpoint.test_export import _refused, checkpoint, random_state, same, weights


def test_experts_are_one_stack_here(dmuon: Dmuon, tmp_path: Path) -> None:
    """What transformers saves of a model with experts comes back too, whatever the order and the
    files; a missing expert, or one in another dtype, is named."""
    state = random_state("qwen_moe", "debug")
    path = checkpoint(tmp_path / "jobs", "qwen_moe", "debug", state)
    options = ["--max_shard_size", "2MB"]
    assert dmuon("export", path, "--to", tmp_path / "hf", *options)[0] == 0
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    stored = load_file(tmp_path / "hf" / index["weight_map"][name])[name]
    assert torch.equal(stored, state["layers.1.moe.routed_experts.inner_experts.w3_EFD"][3])

    theirs, model = tmp_path / "theirs", ["--model.name", "qwen_moe"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(theirs)
    status, _, err = dmuon("import", theirs, "--to", tmp_path / "seed", *model)
    assert status == 0, err
    assert same(weights(tmp_path / "seed" / "step-0"), state)

    tensors = load_file(theirs / "model.safetensors")
    save_file({**tensors, name: tensors[name].bfloat16()}, theirs / "model.safetensors")
    to = ["--to", tmp_path / "x", *model]
    _refused(dmuon("import", theirs, *to), "w3_EFD are bfloat16 and float32; expected one dtype")
    del tensors[name]
    save_file(tensors, theirs / "model.safetensors")
    _refused(dmuon("import", theirs, *to), f"it lacks {name}")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    _refused(dmuon("import", theirs, *to), "norm_topk_prob is True there and False here")
