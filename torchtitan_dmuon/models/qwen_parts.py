"""What Qwen2.5 and Qwen1.5-MoE share: attention with biases, initialisation, names of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.models.common import CosSinRoPE, Linear
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.nn_modules import RMSNorm

INIT_STD = 0.02
_ROPE_THETA = 1_000_000.0

HF_TO_ROOT = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Hugging Face's names of what is outside the layers, and ours."""

HF_TO_LAYER = {
    "self_attn.q_proj.weight": "attention.qkv_linear.wq.weight",
    "self_attn.q_proj.bias": "attention.qkv_linear.wq.bias",
    "self_attn.k_proj.weight": "attention.qkv_linear.wk.weight",
    "self_attn.k_proj.bias": "attention.qkv_linear.wk.bias",
    "self_attn.v_proj.weight": "attention.qkv_linear.wv.weight",
    "self_attn.v_proj.bias": "attention.qkv_linear.wv.bias",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
"""The same inside a layer, without its feed-forward."""

HF_IGNORED_SUFFIX = "self_attn.rotary_emb.inv_freq"
"""Old checkpoints store the RoPE frequencies, which are computed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenSize:
    """Shape of what the models share.

    Raises:
        ValueError: ``n_heads`` does not divide ``dim``, ``n_kv_heads`` does not divide
            ``n_heads``, or the head dimension is odd (RoPE rotates pairs).
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    """Rows of the embedding, including the unused rows that pad the tokenizer's vocabulary."""
    max_seq_len: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must divide dim ({self.dim}) and be a multiple of "
                f"n_kv_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head dimension must be even, got {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def residual_std(self) -> float:
        """Std of what writes into the residual stream, a sum of ``2 * n_layers`` such outputs."""
        std: float = INIT_STD / (2 * self.n_layers) ** 0.5
        return std


def normal(std: float) -> Callable[..., Any]:
    """Return the initialiser of a weight."""
    return partial(nn.init.normal_, std=std)


def linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Any:
    """Return the config of a linear layer; biases begin as zeros."""
    return Linear.Config(
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        param_init={"weight": normal(std), "bias": nn.init.zeros_},
    )


def norm(size: QwenSize) -> Any:
    """Return the config of an RMSNorm."""
    return RMSNorm.Config(
        normalized_shape=size.dim, eps=size.norm_eps, param_init={"weight": nn.init.ones_}
    )


def attention(size: QwenSize, attn_backend: str) -> Any:
    """Return the config of a layer's attention: biases on Q, K and V, rotate-half RoPE."""
    dim, head_dim = size.dim, size.head_dim
    q_dim, kv_dim = size.n_heads * head_dim, size.n_kv_heads * head_dim
    return GQAttention.Config(
        dim=dim,
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        head_dim=head_dim,
        # Separate projections: a matrix optimizer must see Q, K and V as three matrices, and
        # torchtitan's fused layout interleaves their rows.
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=linear(dim, q_dim, std=INIT_STD, bias=True),
            wkv=linear(dim, kv_dim, std=INIT_STD, bias=True),
        ),
        wo=linear(q_dim, dim, std=size.residual_std),
        inner_attention=get_attention_config(attn_backend),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=size.max_seq_len, theta=_ROPE_THETA),
    )
