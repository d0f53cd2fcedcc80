"""A model as `config.json` of a Hugging Face folder says it, and whether one fits a model here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_dmuon.config.errors import ConfigError

__all__ = ["hf_config", "hf_differences"]

# Class and type in transformers, and what such a config has on top of the common fields.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("LlamaForCausalLM", "llama", {"attention_bias": False, "mlp_bias": False}),
    "qwen2_5": ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"attention_bias": False, "use_sliding_window": False}),
    "qwen_moe": (
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {"qkv_bias": True, "use_sliding_window": False, "decoder_sparse_step": 1},
    ),
}

# What transformers takes where `config.json` does not say: the same in all families that have it.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
_COMPARED = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    *_DEFAULTS,
)


def hf_config(name: str, model_config: Any) -> dict[str, Any]:
    """Return the `config.json` with which transformers computes what a model here computes.

    Neither the dtype nor the tokenizer's ids are part of it.

    Args:
        name: Of the family, as in `registry.model_names()`.
        model_config: Of the model, as its spec has it.

    Raises:
        ConfigError: transformers' model of this family cannot compute the same.
    """
    if name not in _FAMILIES:
        raise ConfigError(f"{name}: no Hugging Face form is known (known: {', '.join(_FAMILIES)})")
    architecture, model_type, more = _FAMILIES[name]
    layer = model_config.layers[0]
    if model_type == "qwen2_moe":
        more = {**more, **_experts(model_config)}
    elif any(getattr(layer, "moe", None) is not None for layer in model_config.layers):
        raise ConfigError(
            f"{name} with experts (MoE): no Hugging Face form is known; of models with experts "
            "only qwen_moe has one here"
        )
    else:
        more = {**more, "intermediate_size": layer.feed_forward.w1.out_features}
    attention, rope = layer.attention, layer.attention.rope
    if not model_type.startswith("qwen2"):  # whose heads always are the width over their number
        more = {**more, "head_dim": attention.head_dim or model_config.dim // attention.n_heads}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model_config.vocab_size,
        "hidden_size": model_config.dim,
        "num_hidden_layers": len(model_config.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model_config.norm.eps,
        "max_position_embeddings": rope.max_seq_len,
        "rope_theta": float(rope.theta),
        "rope_scaling": _scaling(name, rope),
        "tie_word_embeddings": model_config.enable_weight_tying,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **more,
    }


def _experts(model_config: Any) -> dict[str, Any]:
    moe = model_config.layers[0].moe
    return {
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
        "shared_expert_intermediate_size": moe.shared_experts.w1.out_features,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.route_norm,
        "router_aux_loss_coef": model_config.aux_loss_coef,
        "output_router_logits": False,
        "mlp_only_layers": [],
    }


def _scaling(name: str, rope: Any) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling != "llama":
        raise ConfigError(f"{name}: RoPE scaling '{rope.scaling}' has no Hugging Face form here")
    return {
        "rope_type": "llama3",
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def hf_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return in what a published `config.json` computes something else, as `key there, here`.

    Numbers of heads, RoPE and norms do not show in names and shapes of weights. What only limits
    lengths or guides training is left out.

    Args:
        ours: What `hf_config` returns.
        theirs: The content of a `config.json`.
    """
    there = {**_DEFAULTS, **theirs}
    there.setdefault("num_key_value_heads", there.get("num_attention_heads"))
    pairs = [(k, there[k], ours[k]) for k in _COMPARED if k in ours and there.get(k) is not None]
    pairs += [(k, v, _rope(ours)[k]) for k, v in _rope(theirs).items()]
    return [f"{key} is {old} there and {new} here" for key, old, new in pairs if old != new]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return theta and scaling, which transformers 5 writes into one table."""
    table = config.get("rope_parameters") or {}
    scaling = {k: v for k, v in table.items() if k != "rope_theta"}
    scaling = scaling or dict(config.get("rope_scaling") or {})
    if "type" in scaling:  # its name before `rope_type`
        scaling.setdefault("rope_type", scaling.pop("type"))
    default = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": float(table.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope_scaling": None if default else scaling,
    }
