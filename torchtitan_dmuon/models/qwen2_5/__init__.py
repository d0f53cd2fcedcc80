"""Qwen2.5 for torchtitan: configs, flavors and the model spec.

Initialisation is Qwen's normal distribution with std 0.02 (``initializer_range``), zeros for
biases and ones for norms. The two projections that write into the residual stream (attention
output and MLP down) use ``0.02 / sqrt(2 * n_layers)``: the stream sums ``2 * n_layers`` such
outputs, so its variance at step 0 does not grow with depth. Megatron and torchtitan's models
scale the same way; loading a checkpoint overwrites it.
"""

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Embedding, FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec

from ..qwen_parts import INIT_STD, attention, linear, norm, normal
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


def _layer(size: Qwen2_5Size, attn_backend: str) -> Any:
    return Qwen2_5TransformerBlock.Config(
        attention_norm=norm(size),
        ffn_norm=norm(size),
        attention=attention(size, attn_backend),
        feed_forward=FeedForward.Config(
            w1=linear(size.dim, size.hidden_dim, std=INIT_STD),
            w2=linear(size.hidden_dim, size.dim, std=size.residual_std),
            w3=linear(size.dim, size.hidden_dim, std=INIT_STD),
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
    embedding_init = skip_param_init if size.tied else normal(INIT_STD)
    return Qwen2_5Model.Config(
        dim=size.dim,
        vocab_size=size.vocab_size,
        enable_weight_tying=size.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocab_size,
            embedding_dim=size.dim,
            param_init={"weight": embedding_init},
        ),
        norm=norm(size),
        lm_head=linear(size.dim, size.vocab_size, std=INIT_STD),
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
