"""Options of the optimizer: of its matrix optimizer and of AdamW, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
import torch.nn as nn

from torchtitan_dmuon.arguments import expect, is_size
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, find

Algorithm = str | type[MatrixOptimizer] | MatrixOptimizer

# What a parameter group says of itself; AdamW's options begin with adamw_.
_RESERVED = ("params", "param_names", "route")


def class_of(algorithm: Algorithm) -> type[MatrixOptimizer]:
    """Return a matrix optimizer's class.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(algorithm, str):
        return find(algorithm)
    return algorithm if isinstance(algorithm, type) else type(algorithm)


def defaults(algorithm: Algorithm) -> dict[str, Any]:
    """Return the options of a matrix optimizer: an instance's, or the defaults of its class.

    Raises:
        ValueError: an option has no default, or a name that parameter groups use.
    """
    cls = class_of(algorithm)
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in _RESERVED or f.name.startswith("adamw_"):
            raise ValueError(
                f"algorithm: option '{f.name}' of {cls.label()} has a name of parameter groups"
            )
        if isinstance(algorithm, MatrixOptimizer):
            values[f.name] = getattr(algorithm, f.name)
        elif f.default is not MISSING:
            values[f.name] = f.default
        elif f.default_factory is not MISSING:
            values[f.name] = f.default_factory()
        else:
            raise ValueError(f"algorithm: option '{f.name}' of {cls.label()} has no default")
    return values


def check_adamw(options: Mapping[str, Any]) -> None:
    """Check the options of the AdamW route.

    Raises:
        ValueError: a value out of range; it names the option, with `adamw_` before it.
    """
    number = "a finite number >= 0"
    for key, valid, wanted in (
        ("lr", is_size, number),
        ("eps", is_size, number),
        ("weight_decay", is_size, number),
        (
            "betas",
            lambda v: len(v) == 2 and all(is_size(b) and b < 1 for b in v),
            "two numbers with 0 <= beta < 1",
        ),
    ):
        expect(f"adamw_{key}", options[key], valid, wanted)


def listed(group: dict[str, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group as torch takes it: one, several, or (name, parameter)s."""
    expect("param_groups", group, lambda g: "params" in g, "dicts with the key params")
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    return [p[1] if isinstance(p, tuple) else p for p in params]
