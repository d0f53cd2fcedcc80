"""Qwen1.5-MoE in torchtitan's style; initialised as Qwen2.5 is here."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn as nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec

from .experts import QwenMoEExperts
from .model import QwenMoEModel, QwenMoETransformerBlock
from .moe import QwenMoE, QwenMoERouter
from .sizes import QWEN_MOE_SIZES, QwenMoESize
from .state_dict_adapter import QwenMoEStateDictAdapter

__all__ = [
    "QWEN_MOE_SIZES",
    "QwenMoEModel",
    "QwenMoESize",
    "QwenMoEStateDictAdapter",
    "QwenMoETransformerBlock",
    "model_registry",
    "qwen_moe_config",
]

_INIT_STD = 0.02
_ROPE_THETA = 1_000_000.0


def _linear(in_features: int, out_features: int, *, std: float, bias: bool = False) -> Any:
    return Linear.Config(
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        param_init={"weight": _normal(std), "bias": nn.init.zeros_},
    )


def _normal(std: float) -> Any:
    return partial(nn.init.normal_, std=std)


def _norm(size: QwenMoESize) -> Any:
    return RMSNorm.Config(
        normalized_shape=size.dim, eps=size.norm_eps, param_init={"weight": nn.init.ones_}
    )


def _attention(size: QwenMoESize, *, attn_backend: str, residual_std: float) -> Any:
    dim, head_dim = size.dim, size.head_dim
    q_dim, kv_dim = size.n_heads * head_dim, size.n_kv_heads * head_dim
    return GQAttention.Config(
        dim=dim,
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        head_dim=head_dim,
        # Separate projections, as in qwen2_5: Q, K and V are three matrices.
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=_linear(dim, q_dim, std=_INIT_STD, bias=True),
            wkv=_linear(dim, kv_dim, std=_INIT_STD, bias=True),
        ),
        wo=_linear(q_dim, dim, std=residual_std),
        inner_attention=get_attention_config(attn_backend),
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=size.max_seq_len, theta=_ROPE_THETA),
    )


def _moe(size: QwenMoESize, *, residual_std: float) -> Any:
    dim, experts = size.dim, size.n_experts
    return QwenMoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=QwenMoERouter.Config(
            num_experts=experts,
            gate=_linear(dim, experts, std=_INIT_STD),
            top_k=size.top_k,
            score_func="softmax",
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=QwenMoEExperts.Config(
                dim=dim,
                hidden_dim=size.expert_hidden_dim,
                num_experts=experts,
                param_init={
                    "w1_EFD": _normal(_INIT_STD),
                    "w2_EDF": _normal(residual_std),
                    "w3_EFD": _normal(_INIT_STD),
                },
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=size.top_k),
        ),
        shared_experts=SigmoidGatedFeedForward.Config(
            w1=_linear(dim, size.shared_hidden_dim, std=_INIT_STD),
            w2=_linear(size.shared_hidden_dim, dim, std=residual_std),
            w3=_linear(dim, size.shared_hidden_dim, std=_INIT_STD),
            gate=_linear(dim, 1, std=_INIT_STD),
        ),
    )


def _layer(size: QwenMoESize, attn_backend: str) -> Any:
    residual_std = _INIT_STD / (2 * size.n_layers) ** 0.5
    return QwenMoETransformerBlock.Config(
        attention_norm=_norm(size),
        ffn_norm=_norm(size),
        attention=_attention(size, attn_backend=attn_backend, residual_std=residual_std),
        moe=_moe(size, residual_std=residual_std),
    )


def qwen_moe_config(size: QwenMoESize, *, attn_backend: str) -> Any:
    """Build a `QwenMoEModel.Config` of the given size; nothing in it is shared between calls.

    Args:
        size: The shape, one of `QWEN_MOE_SIZES` or your own.
        attn_backend: Passed to torchtitan's `get_attention_config`.

    Raises:
        ValueError: torchtitan does not know the backend, or this machine cannot run it.
    """
    return QwenMoEModel.Config(
        dim=size.dim,
        vocab_size=size.vocab_size,
        aux_loss_coef=size.aux_loss_coef,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab_size,
            embedding_dim=size.dim,
            param_init={"weight": _normal(_INIT_STD)},
        ),
        norm=_norm(size),
        lm_head=_linear(size.dim, size.vocab_size, std=_INIT_STD),
        layers=[_layer(size, attn_backend) for _ in range(size.n_layers)],
    )


def model_registry(flavor: str, attn_backend: str = "flex") -> ModelSpec:
    """Return the `ModelSpec` of a Qwen1.5-MoE flavor.

    Raises:
        KeyError: unknown flavor (`registry.get_model_spec` explains; use that from user code).
        ValueError: see `qwen_moe_config`.
    """
    return ModelSpec(
        name="qwen_moe",
        flavor=flavor,
        model=qwen_moe_config(QWEN_MOE_SIZES[flavor], attn_backend=attn_backend),
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=QwenMoEStateDictAdapter,
    )
