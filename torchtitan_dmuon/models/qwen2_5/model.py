"""Qwen2.5: the Llama decoder block with biases on the query, key and value projections.

The differences from torchtitan's Llama 3 are all in the configuration (QKV biases, rotate-half
RoPE, RMSNorm eps), so the module classes are torchtitan's own. The subclass gives the family its
own type: a config of this class is what the state-dict adapter and the registry accept.
"""

from dataclasses import dataclass

from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.model import Llama3TransformerBlock

__all__ = ["Qwen2_5Model", "Qwen2_5TransformerBlock"]


class Qwen2_5TransformerBlock(Llama3TransformerBlock):  # type: ignore[misc, unused-ignore]
    """Pre-norm attention and SwiGLU with residuals; maps [B, L, D] to [B, L, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):  # type: ignore[misc, unused-ignore]
        """Config of one block; ``attention.qkv_linear`` carries the biases."""


class Qwen2_5Model(Llama3Model):  # type: ignore[misc, unused-ignore]
    """Decoder-only Qwen2.5: token ids [B, L] (int64) to logits [B, L, V] in the weights' dtype.

    ``Config.update_from_config`` (inherited) resizes the RoPE caches to the training sequence
    length and declares the tensor-parallel sharding of every sub-config: the column-wise plan
    shards the QKV biases with their weights. ``Config.get_nparams_and_flops`` (inherited) counts
    tied embeddings once.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):  # type: ignore[misc, unused-ignore]
        """Full model config; build one with ``qwen2_5_config``."""

        dim: int = 896
        vocab_size: int = 151936
