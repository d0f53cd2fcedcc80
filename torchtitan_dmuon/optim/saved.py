"""What an optimizer hands to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_dmuon.ownership import Matrix


@dataclass(frozen=True, slots=True)
class SavedState:
    """One entry of a parameter's state, and what this rank has of it.

    Attributes:
        parameter: Canonical name.
        key: Name of the entry: `momentum_buffer`, `exp_avg`, ...
        shape: The entry's full shape: the parameter's if it is elementwise.
        dtype: Of the entry.
        stretches: Elementwise: (first element in the parameter, live 1-D tensor), as owners hold
            it. Empty on the ranks that own nothing of the parameter.
        tensors: Not elementwise: the live tensor, on its owner alone. One number for the parameter
            may be here several times, if the parameter has several owners.
        matrix: The matrix that it belongs to; None if it belongs to the parameter.
        value: The live tensor of a parameter that has no owner; then there is nothing else.
    """

    parameter: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    stretches: Sequence[tuple[int, torch.Tensor]] | None = None
    tensors: Sequence[torch.Tensor] = ()
    matrix: Matrix | None = None
    value: torch.Tensor | None = None
