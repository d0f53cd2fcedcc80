"""Llama 3.1 and 3.2 flavors on torchtitan's Llama 3.

torchtitan's own "3B" and "8B" stay as they are. Both scale RoPE with factor 8, the default of its
``RoPE.Config``: right for Llama 3.1, wrong for Llama 3.2, which publishes 32. The flavors here
state every published RoPE value and use separate Q, K and V projections.

Separate, because a matrix optimizer must see Q, K and V as three matrices, and torchtitan's fused
weight interleaves their rows per KV head. The state dict is the same (torchtitan's fused module
saves ``wq``, ``wk`` and ``wv``), so checkpoints move freely between the two.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.models.common import ComplexRoPE, Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.llama3 import llama3_configs, model_registry
from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["LLAMA_FLAVORS", "TOY", "LlamaFlavor", "llama_flavors", "llama_model_spec"]

TOY = "-toy"
"""Ends the name of the toy of one of ``LLAMA_FLAVORS``: ``3.1-8B-toy``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFlavor:
    """A published Llama model as a torchtitan flavor plus its RoPE scaling factor."""

    base: str
    """torchtitan flavor with the same shapes."""
    rope_factor: float
    """``rope_scaling.factor`` of the published ``config.json``."""


LLAMA_FLAVORS: dict[str, LlamaFlavor] = {
    "3.2-3B": LlamaFlavor(base="3B", rope_factor=32.0),
    "3.1-8B": LlamaFlavor(base="8B", rope_factor=8.0),
}

# torchtitan's Llama 3 initialisation of Q, K and V; its fused config hides it in a closure.
_QKV_INIT: dict[str, Callable[..., Any]] = {
    "weight": partial(nn.init.trunc_normal_, std=0.02),
    "bias": nn.init.zeros_,
}


def _with_published_attention(attention: Any, rope_factor: float) -> Any:
    """Copy a ``GQAttention.Config`` with separate QKV and the published RoPE."""
    dim, n_heads = attention.dim, attention.n_heads
    head_dim = attention.head_dim or dim // n_heads
    n_kv_heads = attention.n_kv_heads or n_heads

    def projection(heads: int) -> Any:
        return Linear.Config(
            in_features=dim, out_features=heads * head_dim, param_init=dict(_QKV_INIT)
        )

    return dataclasses.replace(
        attention,
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim, wq=projection(n_heads), wkv=projection(n_kv_heads)
        ),
        rope=ComplexRoPE.Config(
            dim=head_dim,
            max_seq_len=131072,
            theta=500000.0,
            scaling="llama",
            scaling_factor=rope_factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    )


def _make_toy(model: Any) -> None:
    """Shrink a ``Llama3Model.Config`` to two layers with heads of 8 and a vocabulary of 2048.

    Query heads per KV head, the width of the feed-forward in units of the model's, and tied or not
    stay. Attention gets widths only: ``_with_published_attention`` makes its projections.
    """
    attention, hidden_dim = model.layers[0].attention, model.layers[0].feed_forward.w1.out_features
    heads, dim, vocab_size = 2 * attention.n_heads // attention.n_kv_heads, model.dim, 2048
    toy_dim = 8 * heads
    widths = {dim: toy_dim, hidden_dim: round(toy_dim * hidden_dim / dim / 8) * 8}

    def narrow(linear: Any) -> Any:
        return dataclasses.replace(
            linear,
            in_features=widths[linear.in_features],
            out_features=widths[linear.out_features],
        )

    def narrow_norm(norm: Any) -> Any:
        return dataclasses.replace(norm, normalized_shape=toy_dim)

    model.layers = model.layers[:2]
    for layer in model.layers:
        f = layer.feed_forward
        layer.feed_forward = dataclasses.replace(
            f, w1=narrow(f.w1), w2=narrow(f.w2), w3=narrow(f.w3)
        )
        layer.attention_norm = narrow_norm(layer.attention_norm)
        layer.ffn_norm = narrow_norm(layer.ffn_norm)
        a = layer.attention
        layer.attention = dataclasses.replace(
            a, dim=toy_dim, n_heads=heads, n_kv_heads=2, wo=narrow(a.wo)
        )
    model.norm = narrow_norm(model.norm)
    model.lm_head = dataclasses.replace(model.lm_head, in_features=toy_dim, out_features=vocab_size)
    model.tok_embeddings = dataclasses.replace(
        model.tok_embeddings, num_embeddings=vocab_size, embedding_dim=toy_dim
    )
    model.dim, model.vocab_size = toy_dim, vocab_size


def llama_model_spec(flavor: str, attn_backend: str) -> ModelSpec:
    """Return the ``ModelSpec`` of a torchtitan flavor, of one of ``LLAMA_FLAVORS``, or its toy.

    Raises:
        KeyError: unknown flavor (``registry.get_model_spec`` explains; use that from user code).
        ValueError: torchtitan does not know the attention backend, or cannot run it here.
    """
    published = LLAMA_FLAVORS.get(flavor.removesuffix(TOY))
    if published is None:
        return model_registry(flavor, attn_backend=attn_backend)
    spec = model_registry(published.base, attn_backend=attn_backend)
    if flavor.endswith(TOY):
        _make_toy(spec.model)
    for layer in spec.model.layers:
        layer.attention = _with_published_attention(layer.attention, published.rope_factor)
    return dataclasses.replace(spec, flavor=flavor)


def llama_flavors() -> list[str]:
    """Return torchtitan's Llama 3 flavors followed by ours."""
    return [*llama3_configs, *LLAMA_FLAVORS]
