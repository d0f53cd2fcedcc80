"""Routing, shared experts, and the loss that keeps experts equally busy.

The loss is transformers' `load_balancing_loss_func` (Switch Transformers, arXiv:2101.03961,
equations 4 to 6): with f_e the fraction of choices and p_e the mean probability of expert e over
all layers and tokens of one forward pass, it is `experts * sum_e f_e p_e`. Only p has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

__all__ = ["Load", "QwenMoE", "QwenMoERouter", "add_load_balancing", "load_balancing_loss"]


class Load(NamedTuple):
    """How busy the experts of one layer are.

    Attributes:
        choices: (experts,) float32, how often each was chosen.
        probabilities: (experts,) float32, sum over tokens of the router's probabilities.
    """

    choices: torch.Tensor
    probabilities: torch.Tensor


class QwenMoERouter(TokenChoiceTopKRouter):
    """torchtitan's router with logits and softmax in float32 on every device.

    torchtitan leaves the precision to autocast, which CPUs do not have for float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """As torchtitan's; groups of experts are not used."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose experts.

        Args:
            x_BLD: (batch, length, dim).
            expert_bias_E: Must be None: this family balances by a loss.

        Returns:
            Of the chosen experts probabilities, float32, and indices, both (batch, length, top_k);
            and all probabilities, (batch, length, experts).
        """
        assert expert_bias_E is None
        scores = F.softmax(F.linear(x_BLD.float(), self.gate.weight.float()), dim=-1)
        if self._debug_force_load_balance:
            chosen, values = self._debug_force_load_balance_routing(scores)
        else:
            values, chosen = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        if self.route_norm:
            values = values / values.sum(dim=-1, keepdim=True)
        return values * self.route_scale, chosen, scores


class QwenMoE(MoE):
    """torchtitan's mixture of experts, which also tells the load of its experts.

    torchtitan's own counter `tokens_per_expert_E` serves its balancing by biases and stays zero.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        """As torchtitan's; `load_balance_coeff` must be None."""

    def forward(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, Load]:  # type: ignore[override]
        """Return the output, (batch, length, dim), and the load.

        Args:
            x_BLD: (batch, length, dim).
        """
        values, chosen, scores = self.router(x_BLD)
        # One place per token and expert, as torchtitan counts: the same bits on every run.
        choices = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        counts = choices.sum(dim=(0, 1))
        out = self.routed_experts(x_BLD, values, chosen, counts)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x_BLD)
        return out, Load(counts.float(), scores.sum(dim=(0, 1)))


def load_balancing_loss(loads: list[Load], tokens: int) -> torch.Tensor:
    """Return the loss, 0-D float32, at least top_k where the choices follow the probabilities.

    Args:
        loads: Of each layer.
        tokens: Of one layer.
    """
    choices, probabilities = _total(loads)
    rows = tokens * len(loads)
    return choices.numel() * (choices / rows * (probabilities / rows)).sum()


def add_load_balancing(
    hidden: torch.Tensor, loads: list[Load], tokens: int, weight: float
) -> torch.Tensor:
    """Return `hidden`, behind which backward also has the gradient of the weighted loss.

    So the loss takes part wherever backward passes through `hidden`, whoever computes the loss of
    the outputs and in whatever way. It enters as if added to that loss: the gradient that arrives
    does not scale it.

    Args:
        hidden: The output of the last layer, any shape.
        loads: Of each layer.
        tokens: Of one layer.
        weight: Of the loss.
    """
    choices, probabilities = _total(loads)
    rows = tokens * len(loads)
    slope = choices * (weight * choices.numel() / rows**2)
    result: torch.Tensor = _WithGradient.apply(hidden, probabilities, slope)  # type: ignore[no-untyped-call]
    return result


def _total(loads: list[Load]) -> Load:
    choices, probabilities = zip(*loads, strict=True)
    return Load(torch.stack(choices).sum(0), torch.stack(probabilities).sum(0))


class _WithGradient(torch.autograd.Function):
    """Hands `hidden` through; `other` gets the gradient `slope`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, other: torch.Tensor, slope: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return gradient, slope, None
