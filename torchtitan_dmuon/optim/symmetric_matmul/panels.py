"""The lower triangle by panels of rows, mirrored: nearly half the multiplications.

With p panels (p + 1) / (2 p) of the product is computed. That pays where a panel is still large
enough for the library to run at full speed.
"""

from __future__ import annotations

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import Shape
from torchtitan_dmuon.optim.symmetric_matmul.plain import product

_ALIGNMENT = 16
# Panels start at multiples of it: rows of 16-bit numbers then start at 32 bytes, as kernels want.


class Panels:
    """Any dtype on CPUs and GPUs.

    Args:
        count: Panels, at least 2.
    """

    any_product = False
    made_of_plain = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"panels{count}"

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        if shape[1] <= _ALIGNMENT * (self.count - 1):
            return f"needs more than {_ALIGNMENT * (self.count - 1)} rows for {self.count} panels"
        return None

    def broken(self) -> str | None:
        return None

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        alpha: float,
        beta: float,
    ) -> torch.Tensor:
        m = a.size(-2)
        out = torch.empty((*a.shape[:-1], m), dtype=a.dtype, device=a.device)
        height = -(-m // (self.count * _ALIGNMENT)) * _ALIGNMENT
        for top in range(0, m, height):
            end = min(m, top + height)
            # The block on the diagonal is computed whole, so that every NaN of a row of `a` or a
            # column of `b` is in the result, whichever triangle it is in.
            part = out[..., top:end, :end]
            addend = None if c is None else c[..., top:end, :end]
            product(a[..., top:end, :], b[..., :end], addend, alpha, beta, out=part)
            out[..., :top, top:end] = part[..., :top].mT
        return out
