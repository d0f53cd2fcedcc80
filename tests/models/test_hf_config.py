"""What `config.json` says of a model, and whether a published one is of it."""

from __future__ import annotations

import pytest

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.models.hf_config import hf_config, hf_differences
from torchtitan_dmuon.models.registry import get_model_spec


def test_configs_that_compute_something_else_differ() -> None:
    """What names and shapes do not show is compared, in the forms of transformers 4 and 5."""
    ours = hf_config("llama3", get_model_spec("llama3", "3.1-8B", attn_backend="sdpa").model)
    scaling = ours["rope_scaling"]
    published = {**ours, "max_position_embeddings": 8192, "eos_token_id": 1}
    v5 = {k: v for k, v in published.items() if not k.startswith("rope")}
    v5["rope_parameters"] = {"rope_theta": 500000.0, **scaling}
    old = {**published, "rope_scaling": {"type": scaling["rope_type"], **scaling}}
    del old["rope_scaling"]["rope_type"]
    for config in (published, v5, old):
        assert hf_differences(ours, config) == []
    for changes in (
        {"rope_theta": 1e4},
        {"rope_scaling": None},
        {"rope_scaling": {**scaling, "factor": 32.0}},
        {"num_key_value_heads": 32},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 64},
    ):
        (difference,) = hf_differences(ours, {**published, **changes})
        assert difference.startswith(f"{next(iter(changes))} is ")


def test_models_without_a_hugging_face_form_are_refused() -> None:
    """Experts are said to be the reason."""
    with pytest.raises(ConfigError, match="of models with experts only qwen_moe"):
        hf_config("qwen3", get_model_spec("qwen3", "debugmodel_moe", attn_backend="sdpa").model)


def test_experts_are_compared_as_published() -> None:
    """The config on the hub is that of A2.7B; how experts are chosen shows in no shape."""
    ours = hf_config("qwen_moe", get_model_spec("qwen_moe", "A2.7B", attn_backend="sdpa").model)
    published = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert hf_differences(ours, published) == []
    assert {k: ours[k] for k in published.keys() - {"intermediate_size"}} == {
        k: v for k, v in published.items() if k != "intermediate_size"
    }
    for changes in (
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"use_sliding_window": True},
        {"qkv_bias": False},
    ):
        (difference,) = hf_differences(ours, {**published, **changes})
        assert difference.startswith(f"{next(iter(changes))} is ")
