"""Options of the optimizer: of its matrix optimizer and of AdamW, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
import torch.nn as nn

from torchtitan_dmuon.arguments import expect, is_size
from torchtitan_dmuon.optim.matrix_optimizer import MatrixOptimizer, find

Algorithm = str | type[MatrixOptimizer]


def class_of(algorithm: Algorithm) -> type[MatrixOptimizer]:
    """Return a matrix optimizer's class.

    Raises:
        ValueError: there is none of that name.
    """
    return find(algorithm) if isinstance(algorithm, str) else algorithm


def defaults(algorithm: type[MatrixOptimizer]) -> dict[str, Any]:
    """Return the options of a matrix optimizer with their defaults."""
    values = {}
    for f in fields(algorithm):
        if f.default is MISSING:
            raise ValueError(f"algorithm: option '{f.name}' of {algorithm.__name__} has no default")
        values[f.name] = f.default
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
