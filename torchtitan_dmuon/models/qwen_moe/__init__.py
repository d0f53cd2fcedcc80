"""Qwen1.5-MoE in torchtitan's style; initialised as Qwen2.5 is here."""

from __future__ import annotations

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Embedding
from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec

from ..qwen_parts import INIT_STD, attention, linear, norm, normal
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


def _moe(size: QwenMoESize) -> Any:
    dim, experts = size.dim, size.n_experts
    return QwenMoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=QwenMoERouter.Config(
            num_experts=experts,
            gate=linear(dim, experts, std=INIT_STD),
            top_k=size.top_k,
            score_func="softmax",
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=QwenMoEExperts.Config(
                dim=dim,
                hidden_dim=size.expert_hidden_dim,
                num_experts=experts,
                param_init={
                    "w1_EFD": normal(INIT_STD),
                    "w2_EDF": normal(size.residual_std),
                    "w3_EFD": normal(INIT_STD),
                },
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=size.top_k),
        ),
        shared_experts=SigmoidGatedFeedForward.Config(
            w1=linear(dim, size.shared_hidden_dim, std=INIT_STD),
            w2=linear(size.shared_hidden_dim, dim, std=size.residual_std),
            w3=linear(dim, size.shared_hidden_dim, std=INIT_STD),
            gate=linear(dim, 1, std=INIT_STD),
        ),
    )


def _layer(size: QwenMoESize, attn_backend: str) -> Any:
    return QwenMoETransformerBlock.Config(
        attention_norm=norm(size),
        ffn_norm=norm(size),
        attention=attention(size, attn_backend),
        moe=_moe(size),
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
            param_init={"weight": normal(INIT_STD)},
        ),
        norm=norm(size),
        lm_head=linear(size.dim, size.vocab_size, std=INIT_STD),
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
