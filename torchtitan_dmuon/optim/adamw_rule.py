"""AdamW's update, by torch's own functional form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

State = dict[str, Any]


def new_state(like: torch.Tensor, dtype: torch.dtype) -> State:
    """Return zero state for a parameter like `like` (a DTensor gives DTensors)."""
    # On the parameter's device: torch's fused kernel reads the step there.
    device = like.device
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(like, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(like, dtype=dtype),
    }


def apply_adamw(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    group: dict[str, Any],
) -> None:
    """Update plain local tensors of one parameter group, in place."""
    used = [i for i, w in enumerate(weights) if w.numel()]
    # A rank may hold an empty shard; its step counts all the same, so that ranks save equal state.
    for i in set(range(len(weights))) - set(used):
        steps[i].add_(1)
    if not used:
        return
    beta1, beta2 = group["betas"]
    adamw(
        [weights[i] for i in used],
        [gradients[i] for i in used],
        [moments[i] for i in used],
        [squares[i] for i in used],
        [],
        [steps[i] for i in used],
        foreach=False,
        fused=all(weights[i].device.type in ("cpu", "cuda") for i in used),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
