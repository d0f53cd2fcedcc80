"""Muon on owned matrices, with the signature of `torch.optim.Muon`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from torchtitan_dmuon.optim.algorithms.muon import AdjustLr, MuonRule
from torchtitan_dmuon.optim.newton_schulz import Coefficients
from torchtitan_dmuon.optim.owner_optimizer import OwnerOptimizer


class Muon(OwnerOptimizer):
    """Muon for a model's matrices, on their owners; AdamW for everything else.

    The matrix route is `torch.optim.Muon`'s update, run once per matrix and step by its owner on
    the reduced gradient. See `OwnerOptimizer` for state, groups, and what `step` does.

    Args:
        model: What `dedicate_params` was called on (called here if there is only one process).
        lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: As in `torch.optim.Muon`.
        ns_coefficients: "polar_express" (five steps with their own coefficients), "quintic" or
            (3.4445, -4.7750, 2.0315) as in `torch.optim.Muon`, or one triple for each step.
        ns_dtype: What Newton-Schulz computes in. None: float16 on GPUs, float32 on CPUs.
        others: `ns_method`, `ns_restarts`, and what `OwnerOptimizer` takes: `adamw_lr`,
            `adamw_betas`, `adamw_eps`, `adamw_weight_decay`, `publish`, `nonfinite`,
            `param_groups`.

    Raises:
        ValueError: as `OwnerOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "polar_express",
        eps: float = 1e-37,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            model,
            MuonRule,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            **others,
        )
