"""The product that torch computes whole: cuBLAS on GPUs, MKL or oneDNN on CPUs. The reference."""

from __future__ import annotations

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import Shape


class Plain:
    """Every dtype, device and shape that torch has."""

    name = "plain"
    any_product = True
    made_of_plain = True

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
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
        return product(a, b, c, alpha, beta)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return alpha * a @ b + beta * c, rounded once.

    Args:
        a: (m, k) or (batch, m, k).
        b: (k, n) or (batch, k, n).
        c: (m, n) or (batch, m, n), or None for no third term.
        alpha: Factor of the product.
        beta: Factor of `c`.
        out: Where to write, any strides; a new tensor if None.
    """
    if a.ndim == 2 and out is None and c is not None:  # the quick way, for small matrices
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    if c is None and alpha == 1:
        multiply = torch.mm if a.ndim == 2 else torch.bmm
        return multiply(a, b, out=out)
    multiply_add = torch.addmm if a.ndim == 2 else torch.baddbmm
    if c is None:
        # With beta = 0 the addend is not read; a scaled copy of a @ b would be rounded twice.
        c, beta = a.new_empty((1,) * a.ndim), 0
    return multiply_add(c, a, b, beta=beta, alpha=alpha, out=out)
