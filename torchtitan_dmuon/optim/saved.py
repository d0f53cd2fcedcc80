"""What an optimizer hands to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SavedState:
    """One entry of a parameter's state, and what this rank has of it.

    Attributes:
        parameter: Canonical name.
        key: Name of the entry: `momentum_buffer`, `exp_avg`, ...
        shape: The parameter's full shape.
        dtype: Of the entry.
        scalar: Whether it is one number for the parameter, not one for each element.
        stretches: (first element in the parameter, live tensor), as owners hold it: 1-D, or 0-D if
            it is scalar. Empty on the ranks that own nothing of the parameter.
        value: The live tensor of a parameter that has no owner; then there are no stretches.
    """

    parameter: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    scalar: bool
    stretches: Sequence[tuple[int, torch.Tensor]] = ()
    value: torch.Tensor | None = None
