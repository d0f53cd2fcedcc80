"""The matrix optimizer of a job, from its `[optimizer]` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchtitan_dmuon.config.schema import Optimizer
from torchtitan_dmuon.optim.algorithms.muon import MuonRule
from torchtitan_dmuon.optim.container import typed
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, find

MUON_KEYS = tuple(f.name for f in fields(MuonRule) if f.name not in ("lr", "weight_decay", "eps"))
"""Keys of the section that are options of algorithm "muon" alone (`eps` there is AdamW's)."""


def options_of(o: Optimizer) -> dict[str, Any]:
    """Return the options of the section's algorithm, as TOML has them.

    "muon" has keys of its own in the section; all others take theirs from `algorithm_options`.
    """
    options: dict[str, Any] = {"lr": o.lr, "weight_decay": o.weight_decay}
    if o.algorithm == "muon":
        options |= {key: getattr(o, key) for key in MUON_KEYS}
    return options | o.algorithm_options


def rule_of(o: Optimizer, overrides: Mapping[str, Any] | None = None) -> MatrixOptimizer:
    """Return the matrix optimizer that the section describes.

    Args:
        o: The section.
        overrides: Options of a parameter group, as TOML has them.

    Raises:
        ValueError: there is no such algorithm or option, or a value is out of range.
    """
    return find(o.algorithm).from_options(typed({**options_of(o), **(overrides or {})}))
