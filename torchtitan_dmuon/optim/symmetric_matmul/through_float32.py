"""16-bit products on CPUs without units for them: multiplied in float32, rounded once.

With AVX2 alone torch's 16-bit products take tens of times as long as float32 ones. With AMX they
are the faster ones: measuring decides. The result is at least as accurate as the plain product.
"""

from __future__ import annotations

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import HALF, Backend, Shape


class ThroughFloat32:
    """float16 and bfloat16 on CPUs.

    Args:
        inner: The backend that multiplies in float32.
        name: Of the pair.
    """

    made_of_plain = False

    def __init__(self, inner: Backend, name: str) -> None:
        self._inner = inner
        self.any_product = inner.any_product
        self.name = name

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        if device.type != "cpu":
            return "for CPUs only"
        if dtype not in HALF:
            return "for float16 and bfloat16 only"
        return self._inner.unavailable(device, torch.float32, shape)

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
        wide = a.float()
        transposed = a.data_ptr() == b.data_ptr() and a.stride() == b.mT.stride()
        other = wide.mT if transposed else b.float()
        addend = None if c is None else c.float()
        return self._inner(wide, other, addend, alpha, beta).to(a.dtype)
