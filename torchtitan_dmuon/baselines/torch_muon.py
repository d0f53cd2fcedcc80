"""The outside peer: torch.optim.Muon on the DTensors of FSDP2, AdamW for everything else.

Every rank holds a shard of each matrix and of its momentum; DTensor gathers what Newton-Schulz
needs, product by product. A parameter is one matrix here: torch's Muon has no notion of a fused
projection, and refuses anything that is not 2-D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.optimizer import (
    OptimizersContainer,
    ParamGroupConfig,
    register_optimizer,
)

MATRICES = r"^layers\.\d+\..*weight$"
"""Parameters that the matrix route takes if they are 2-D."""


class TorchMuonContainer(OptimizersContainer):  # type: ignore[type-arg, misc, unused-ignore]
    """torchtitan's container, with torch.optim.Muon among its optimizers.

    Of what an entry with the name Muon matches, parameters that are not 2-D go to the last entry,
    which must be AdamW.

    Raises:
        ValueError: an entry matches no parameter, or a Muon entry no 2-D one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Groups as in torchtitan; the name Muon stands for torch.optim.Muon."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        register_optimizer("Muon", torch.optim.Muon)
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        groups, patterns = OptimizersContainer._build_param_groups(
            model, param_group_configs, impl_kwargs
        )
        rest = groups["AdamW"][-1]
        for group, pattern in zip(groups["Muon"], patterns["Muon"], strict=True):
            for name in impl_kwargs:  # torch.optim.Muon is a loop over matrices
                del group[name]
            pairs = list(zip(group["params"], group["param_names"], strict=True))
            matrices = [(p, n) for p, n in pairs if p.ndim == 2]
            others = [(p, n) for p, n in pairs if p.ndim != 2]
            if not matrices:
                raise ValueError(f"Muon: no 2-D parameter matches '{pattern}'")
            group["params"], group["param_names"] = map(list, zip(*matrices, strict=True))
            rest["params"] += [p for p, _ in others]
            rest["param_names"] += [n for _, n in others]
        return groups, patterns
