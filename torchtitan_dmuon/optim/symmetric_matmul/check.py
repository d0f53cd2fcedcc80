"""Whether a backend computes the product: seeded data, and its error without a second product.

The whole product in float64 would cost more time and memory than all candidates together. Instead
both sides are applied to a few random sign vectors: for an error matrix E and a vector v of signs
the expected square of a row of E v is the squared norm of that row of E. So every element of the
result counts, at the price of a few matrix-vector products in float64.
"""

from __future__ import annotations

import math

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import HALF, Problem

ERROR_FACTOR = 4.0
"""Largest error of a candidate, as a multiple of the plain product's own error.

Another order of additions changes the error by a factor of at most two or so; a stale tile, a
missing mirror or a forgotten factor by tens or hundreds.
"""

ALPHA, BETA = 1.5, -0.75
"""Factors of the checked and timed product: neither zero nor one, so that no term is left out."""

TRIAL_ROWS = 64
"""Rows of a plain 16-bit product on a CPU that are computed before all are; see `selection`."""

_VECTORS = 8
_CHUNK_BYTES = 64 * 2**20  # Operands are widened to float64 in pieces of at most this size.


class Operands:
    """Seeded operands of a problem, scaled as Newton-Schulz scales them: spectral norm about one.

    The exact product of the operands as rounded is symmetric: a times its transpose, or a
    symmetric matrix times itself. So whichever triangle a backend computes is right.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        (batch, m, k), n = problem.shape, problem.n

        def normal(rows: int, columns: int) -> torch.Tensor:
            x = torch.randn(batch, rows, columns, generator=generator, device=device)
            return x.div_(math.sqrt(rows) + math.sqrt(columns))

        def symmetric() -> torch.Tensor:
            x = normal(m, m)
            return x.add_(x.mT.clone()).mul_(math.sqrt(0.5))

        def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
            x = x.to(problem.dtype)
            x = x if problem.batch is not None else x[0]
            if layout == "c":
                return x.mT.contiguous().mT
            if layout == "s":
                return x.repeat_interleave(2, dim=-1)[..., ::2]
            return x.contiguous()

        values = symmetric() if problem.kind == "product" and m == k else normal(m, k)
        self.a = laid_out(values, problem.layouts[0])
        if problem.kind == "gram":
            self.b = self.a.mT
        else:
            other = normal(k, n) if problem.kind == "any" else values.mT.clone()
            self.b = laid_out(other, problem.layouts[1])
        self.c = None
        if problem.with_c:
            self.c = laid_out(normal(m, n) if problem.kind == "any" else symmetric(), "r")

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the operands of the first rows of the result, of the first matrix of a batch."""
        a, b, c = (x if x is None or x.ndim == 2 else x[:1] for x in (self.a, self.b, self.c))
        assert a is not None and b is not None
        return a[..., :count, :], b, None if c is None else c[..., :count, :]


class Reference:
    """The right result, as seen by the vectors."""

    def __init__(self, operands: Operands) -> None:
        a, b, c = operands.a, operands.b, operands.c
        generator = torch.Generator().manual_seed(1)
        signs = (
            torch.randint(2, (b.size(-1), _VECTORS), generator=generator, device="cpu") * 2.0 - 1.0
        )
        self._vectors = signs.to(a.device, torch.float64)
        self._expected = _apply(a, _apply(b, self._vectors)).mul_(ALPHA)
        if c is not None:
            self._expected.add_(_apply(c, self._vectors), alpha=BETA)
        self._norms = self._expected.square().mean(-1).sqrt()

    def error(self, result: torch.Tensor) -> float:
        """Return the largest error of a row, relative to the norm of the row.

        Args:
            result: All of it, or the first rows, of the first matrix of a batch.

        Returns:
            The error; infinity if anything is not finite.
        """
        seen = _apply(result, self._vectors)
        if seen.ndim == 3:
            expected, norms = self._expected[: seen.size(0)], self._norms[: seen.size(0)]
        else:
            expected, norms = self._expected, self._norms
        rows = seen.size(-2)
        errors = (seen - expected[..., :rows, :]).square().mean(-1).sqrt() / norms[..., :rows]
        worst = float(errors.max())
        return worst if math.isfinite(worst) else math.inf


def error_limit(plain_error: float, dtype: torch.dtype) -> float:
    """Return the largest error that a candidate may have, given that of the plain product.

    float32 and float64 products sum in their own precision, and so does the reference of a float64
    product: an error of a few roundings can not be told from none.
    """
    floor = 0.0 if dtype in HALF else torch.finfo(dtype).eps
    return ERROR_FACTOR * max(plain_error, floor)


def _apply(matrix: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return matrix @ vectors in float64, (..., rows, vectors)."""
    *batch, rows, columns = matrix.shape
    out = vectors.new_empty(*batch, rows, vectors.size(-1))
    flat, target = matrix.reshape(-1, rows, columns), out.view(-1, rows, vectors.size(-1))
    vectors = vectors.expand(flat.size(0), *vectors.shape[-2:])
    height = max(1, _CHUNK_BYTES // (8 * columns))
    for i in range(flat.size(0)):
        for top in range(0, rows, height):
            end = min(rows, top + height)
            target[i, top:end] = flat[i, top:end].double() @ vectors[i]
    return out
