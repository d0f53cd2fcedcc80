"""Qwen1.5-MoE: Qwen2.5's attention, and experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from torchtitan_dmuon.config.errors import ConfigError

from .moe import Load, add_load_balancing, load_balancing_loss

__all__ = ["QwenMoEModel", "QwenMoETransformerBlock"]


class QwenMoETransformerBlock(TransformerBlock):  # type: ignore[misc, unused-ignore]
    """Pre-norm attention and experts with residuals.

    Attributes:
        moe_enabled: True, by which torchtitan's FSDP knows a block with experts.
    """

    moe_enabled = True

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):  # type: ignore[misc, unused-ignore]
        """Config of one block; `moe` is a `QwenMoE.Config`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.moe is not None
        self.attention = config.attention.build()
        self.moe = config.moe.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Load]:
        """Map (batch, length, dim) to the same, and tell the load of the experts."""
        x = x + self.attention(self.attention_norm(x), attention_masks, positions)
        out, load = self.moe(self.ffn_norm(x))
        return x + out, load


class QwenMoEModel(Decoder):  # type: ignore[misc, unused-ignore]
    """Decoder-only Qwen1.5-MoE: token ids (batch, length) to logits (batch, length, vocabulary).

    In training the load-balancing loss takes part in every backward pass. It is no part of what the
    trainer reports as loss.

    Attributes:
        load_balancing: The loss of the last forward in training mode with gradients, 0-D float32
            without gradient and without its coefficient; None before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):  # type: ignore[misc, unused-ignore]
        """Full model config; build one with `qwen_moe_config`.

        Attributes:
            aux_loss_coef: Weight of the load-balancing loss against the mean loss per token.
            aux_loss_share: Factor for how gradients are combined. 1 where they are averaged over
                ranks and micro-batches; where they are summed, one over the number of both.
        """

        dim: int = 2048
        vocab_size: int = 151936
        aux_loss_coef: float = 0.001
        aux_loss_share: float = 1.0

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Adapt to a job: sequence length, and the share of one micro-batch in a step.

            torchtitan's trainer divides the loss by all tokens of a step and sums gradients, so a
            micro-batch's load-balancing loss counts with its share of the tokens.

            Raises:
                ConfigError: a form of parallelism that this model is not made for.
            """
            p = config.parallelism
            for name in ("tensor", "context", "pipeline", "expert"):
                degree = getattr(p, f"{name}_parallel_degree")
                if degree > 1:
                    raise ConfigError(
                        f"parallelism.{name}_parallel_degree: qwen_moe trains with data "
                        f"parallelism only; expected 1, got {degree}"
                    )
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            training = getattr(config, "training", None)
            if training is not None:
                local, total = training.local_batch_size, training.global_batch_size
                ranks = dist.get_world_size() if dist.is_initialized() else 1
                self.aux_loss_share = local / total if total > 0 else 1 / ranks

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return all parameters, and operations per token of those that a token meets."""
            attention = self.layers[0].attention
            numbers: tuple[int, int] = get_moe_model_nparams_and_flops(
                self, model, attention.n_heads, 2 * attention.head_dim, seq_len
            )
            return numbers

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.load_balancing: torch.Tensor | None = None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
    ) -> torch.Tensor:
        """Return logits, or what the head would get where the loss applies it.

        Args:
            tokens: (batch, length) int64.
            positions: (batch, length) int64, restarting with each document.
            attention_masks: From `get_attention_masks`.
        """
        h = self.tok_embeddings(tokens)
        loads = []
        for layer in self.layers.values():
            h, load = layer(h, attention_masks, positions)
            loads.append(load)
        weight = self.config.aux_loss_coef * self.config.aux_loss_share
        if weight and self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.load_balancing = load_balancing_loss(loads, tokens.numel())
            h = add_load_balancing(h, loads, tokens.numel(), weight)
        h = self.norm(h)
        result: torch.Tensor = h if self._skip_lm_head else self.lm_head(h)
        return result
