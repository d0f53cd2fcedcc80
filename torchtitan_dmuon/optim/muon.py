"""Muon on owned matrices, with the signature of `torch.optim.Muon`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn as nn

from torchtitan_dmuon.optim.algorithms.muon import AdjustLr, MuonRule
from torchtitan_dmuon.optim.newton_schulz import Coefficients, Method
from torchtitan_dmuon.optim.owner_optimizer import OwnerOptimizer
from torchtitan_dmuon.optim.qk_clip import QKClip


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
        ns_method, ns_restarts: How; see `newton_schulz`.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay, publish, nonfinite, qk_clip,
            param_groups: As in `OwnerOptimizer`.

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
        ns_method: Method = "auto",
        ns_restarts: tuple[int, ...] | None = None,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        publish: Literal["async", "sync"] = "async",
        nonfinite: Literal["skip", "error"] = "skip",
        qk_clip: QKClip | None = None,
        param_groups: Sequence[dict[str, Any]] | None = None,
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
            ns_method=ns_method,
            ns_restarts=ns_restarts,
            adamw_lr=adamw_lr,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            adamw_weight_decay=adamw_weight_decay,
            publish=publish,
            nonfinite=nonfinite,
            qk_clip=qk_clip,
            param_groups=param_groups,
        )
