"""Qwen2.5 for torchtitan: configs, flavors and the model spec.

Initialisation is Qwen's normal distribution with std 0.02 (``initializer_range``), zeros for
biases and ones for norms. The two projections that write into the residual stream (attention
output and MLP down) use ``0.02 / sqrt(2 * n_layers)``: the stream sums ``2 * n_layers`` such
outputs, so its variance at step 0 does not grow with depth. Megatron and torchtitan's models
scale the same way; loading a checkpoint overwrites it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, FeedForward, Linear
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec

from .model import Qwen2_5Model, Qwen2_5TransformerBlock
from .sizes import QWEN2_5_SIZES, TOY, Qwen2_5Size, size_of
from .state_dict_adapter import Qwen2_5StateDictAdapter

__all__ = [
    "QWEN2_5_SIZES",
    "TOY",
    "Qwen2_5Model",
    "Qwen2_5Size",
    "Qwen2_5StateDictAdapter",
    "Qwen2_5TransformerBlock",
    "model_registry",
    "qwen2_5_config",
]

_INIT_STD = 0.02
_ROPE_THETA = 1_000_000.0

_ParamInit = dict[str, Callable[..., Any]]


def _normal_init(std: float) -> _ParamInit:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


def _linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Any:
    return Linear.Config(
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        param_init=_normal_init(std),
    )


def _norm(size: Qwen2_5Size) -> Any:
    return RMSNorm.Config(
        normalized_shape=size.dim, eps=size.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _attention(size: Qwen2_5Size, *, attn_backend: str, residual_std: float) -> Any:
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
            wq=_linear(dim, q_dim, std=_INIT_STD, bias=True),
            wkv=_linear(dim, kv_dim, std=_INIT_STD, bias=True),
        ),
        wo=_linear(q_dim, dim, std=residual_std),
        inner_attention=get_attention_config(attn_backend),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=size.max_seq_len, theta=_ROPE_THETA),
    )


def _layer(size: Qwen2_5Size, attn_backend: str) -> Any:
    residual_std = _INIT_STD / (2 * size.n_layers) ** 0.5
    return Qwen2_5TransformerBlock.Config(
        attention_norm=_norm(size),
        ffn_norm=_norm(size),
        attention=_attention(size, attn_backend=attn_backend, residual_std=residual_std),
        feed_forward=FeedForward.Config(
            w1=_linear(size.dim, size.hidden_dim, std=_INIT_STD),
            w2=_linear(size.hidden_dim, size.dim, std=residual_std),
            w3=_linear(size.dim, size.hidden_dim, std=_INIT_STD),
        ),
    )


def qwen2_5_config(size: Qwen2_5Size, *, attn_backend: str) -> Any:
    """Build a ``Qwen2_5Model.Config`` of the given size; nothing in it is shared between calls.

    Args:
        size: the shape, one of ``QWEN2_5_SIZES`` or your own.
        attn_backend: passed to torchtitan's ``get_attention_config``.

    Raises:
        ValueError: torchtitan does not know the backend, or this machine cannot run it.
    """
    # With tied weights the head initialises the one parameter; without the skip it would be
    # drawn twice.
    embedding_init = skip_param_init if size.tied else partial(nn.init.normal_, std=_INIT_STD)
    return Qwen2_5Model.Config(
        dim=size.dim,
        vocab_size=size.vocab_size,
        enable_weight_tying=size.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab_size,
            embedding_dim=size.dim,
            param_init={"weight": embedding_init},
        ),
        norm=_norm(size),
        lm_head=_linear(size.dim, size.vocab_size, std=_INIT_STD),
        layers=[_layer(size, attn_backend) for _ in range(size.n_layers)],
    )


def model_registry(flavor: str, attn_backend: str = "flex") -> ModelSpec:
    """Return the ``ModelSpec`` of a Qwen2.5 flavor, or of its toy (``7B-toy``).

    Raises:
        KeyError: unknown flavor (``registry.get_model_spec`` explains; use that from user code).
        ValueError: see ``qwen2_5_config``.
    """
    return ModelSpec(
        name="qwen2_5",
        flavor=flavor,
        model=qwen2_5_config(size_of(flavor), attn_backend=attn_backend),
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen2_5StateDictAdapter,
    )
