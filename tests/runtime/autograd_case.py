"""What a case of `test_autograd_shapes` is; see `plain.py` for what a script is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from tests.runtime.plain import Run

Script = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    script: Script
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(build: Callable[[], nn.Module], **options: Any) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        CASES[script.__name__] = Case(build, script, options)
        return script

    return add


def loss_of(output: torch.Tensor, k: int = 0) -> torch.Tensor:
    return (output * output.roll(1 + k, -1)).sum() + output.sum()


def groups_of(run: Run) -> Any:
    """Return the model's groups; none without owners."""
    return run.model._dmuon_site.runtime.groups if run.owned else ()
