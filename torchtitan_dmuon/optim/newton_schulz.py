"""Newton-Schulz: the orthogonal factor of a matrix by polynomial iteration (paper appendix C.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch

from torchtitan_dmuon.arguments import as_tuples
from torchtitan_dmuon.optim.symmetric_matmul import (
    HALF,
    MIN_SYMMETRIC_SIZE,
    matmul,
    product,
    symmetric_matmul,
)

Triple = tuple[float, float, float]
Coefficients = Literal["polar_express", "quintic"] | Triple | Sequence[Triple]
Method = Literal["auto", "gram", "standard"]

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)
"""The quintic of Muon's author, the same in every step; the default of `torch.optim.Muon`."""


def _with_margin(steps: Sequence[Triple], margin: float) -> tuple[Triple, ...]:
    """Return p(x / margin): rounding may then push a singular value above one by `margin`."""
    return tuple((a / margin, b / margin**3, c / margin**5) for a, b, c in steps)


POLAR_EXPRESS: tuple[Triple, ...] = _with_margin(
    [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ],
    1.05,
)
"""Polar Express for five steps (Amsel et al., arXiv:2505.16932), with the margin of 1.05 of Gram
Newton-Schulz's reference (Zhang et al., 2026).
"""

GRAM_MARGIN = 1.15
"""By what factor gram must need fewer operations: it has more, and smaller, products."""

BAND = (0.846, 1.124)
"""Where it takes singular values from `BAND_FLOOR` to 1."""
BAND_FLOOR = 2e-3

_NAMED: dict[str, tuple[Triple, ...]] = {"polar_express": POLAR_EXPRESS, "quintic": (QUINTIC,)}


def default_dtype(device: torch.device) -> torch.dtype:
    """Return what Newton-Schulz computes in unless told: float16 on GPUs, float32 on CPUs.

    float16 is the choice of Gram Newton-Schulz's reference: all values are of order one, so its
    range suffices, and it has eight times the precision of bfloat16. Most CPUs have no units for
    either.
    """
    return torch.float16 if device.type == "cuda" else torch.float32


def default_restarts(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the steps before which Gram Newton-Schulz starts anew, unless told.

    Rounding can make small eigenvalues of the Gram matrix negative, which the iteration then blows
    up. (2,) is the reference's choice for float16. bfloat16 needs one more: with (2,) singular
    values end as far off as 1.7 (tests/optim/test_newton_schulz.py).
    """
    return (2, 4) if dtype == torch.bfloat16 else (2,)


def per_step(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Return a, b, c of each step. Steps beyond a list repeat its last entry.

    Raises:
        ValueError: an unknown name, neither three numbers nor a list of such, or no step.
    """
    return _per_step(as_tuples(coefficients), steps)


@cache
def _per_step(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    if steps < 1:
        raise ValueError(f"ns_steps: expected a whole number of at least 1, got {steps}")
    if isinstance(coefficients, str):
        if coefficients not in _NAMED:
            raise ValueError(
                f"ns_coefficients: expected {' or '.join(_NAMED)}, three numbers or a list of "
                f"three numbers per step, got {coefficients!r}"
            )
        table: Sequence[Triple] = _NAMED[coefficients]
    elif not isinstance(coefficients, Sequence):
        table = ()
    elif coefficients and not isinstance(coefficients[0], Sequence):
        table = [coefficients]  # type: ignore[list-item]
    else:
        table = coefficients  # type: ignore[assignment]
    if not table or any(not isinstance(row, Sequence) or len(row) != 3 for row in table):
        raise ValueError(
            f"ns_coefficients: expected three numbers, or three for each step, got {coefficients!r}"
        )
    rows = [(float(a), float(b), float(c)) for a, b, c in table]
    return tuple(rows[min(i, len(rows) - 1)] for i in range(steps))


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Coefficients = "polar_express",
    eps: float = 1e-37,
    dtype: torch.dtype = torch.float16,
    method: Method = "auto",
    restarts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Approximate the orthogonal factor U V^T of matrices U S V^T.

    A step maps X to a X + (b A + c A^2) X with A = X X^T, from X = matrix / max(norm, eps), norm
    being Frobenius'. Tall matrices are iterated on as their transposes. "standard" does just that.
    "gram" iterates on A, collects the product Q of the polynomials, and multiplies Q X once at the
    end: the same in exact arithmetic, with m x m products where m is the smaller size. Before the
    steps of `restarts` it forms Q X and the Gram matrix anew. "auto" takes what needs fewer
    operations: gram, except for matrices that are square or nearly so.

    Args:
        matrix: (rows, columns), or (..., rows, columns) for several, floating point. Each is
            orthogonalised by itself; they are computed together.
        steps: Iterations, at least 1.
        coefficients: (a, b, c) of all steps, a list with those of each, or "polar_express" (the
            default) or "quintic" (torch's).
        eps: Smallest divisor. With the default the scale of the input does not matter for norms
            from 1e-37 to 1e38; with torch's 1e-7 matrices of a smaller norm give less.
        dtype: What the iteration computes in. The norm is float32's or better, products add up
            in float32 or better.
        method: "auto", "gram" or "standard".
        restarts: For gram; None: `default_restarts(dtype)`. Steps from 1; others never come.

    Returns:
        The shape of `matrix`, in `dtype`. Zero for a zero matrix. NaN for one with an infinity or
        NaN (or a norm beyond float32), which the caller is to find.

    Raises:
        ValueError: coefficients, steps, eps or method that there are not.
    """
    if not eps > 0:
        raise ValueError(f"eps: expected a number > 0, got {eps}")
    if not matrix.numel():
        return matrix.to(dtype)
    table = per_step(coefficients, steps)
    rows, columns = matrix.shape[-2:]
    x = _normalized(matrix, eps).to(dtype)
    if matrix.ndim > 3:
        x = x.flatten(0, -3)
    wide = x.mT if rows > columns else x
    few = wide.size(-2) < MIN_SYMMETRIC_SIZE and dtype not in HALF
    products = _PLAIN if few else _CHOSEN
    if uses_gram(rows, columns, method, steps=steps):
        starts = default_restarts(dtype) if restarts is None else restarts
        x, factor = _gram(wide, table, frozenset(starts), products)
        # Both ways give a row-major result, which is what it is added to. The factor is symmetric.
        result = products.general(x.mT, factor) if rows > columns else products.general(factor, x)
        return result.reshape(matrix.shape)
    wide = _standard(wide, table, products)
    return (wide.mT if rows > columns else wide).reshape(matrix.shape)


def _normalized(matrix: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by max(norm, eps); the norm is at least the largest singular value."""
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    # In float64 no square of a float32 leaves the range.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    norm = norm.to(x.dtype)
    # The second term is zero, or NaN if the norm is not finite: then so is all of the result.
    result: torch.Tensor = x / (norm.clamp(min=eps) + 0 * norm)
    return result


class _Products(NamedTuple):
    """How products of symmetric results and of others are computed: (a, b, c, alpha, beta)."""

    symmetric: Callable[..., torch.Tensor]
    general: Callable[..., torch.Tensor]


_CHOSEN = _Products(symmetric_matmul, matmul)
# Where there is nothing to choose, asking would take longer than a small product.
_PLAIN = _Products(product, product)


def _standard(x: torch.Tensor, table: Sequence[Triple], products: _Products) -> torch.Tensor:
    for a, b, c in table:
        gram = products.symmetric(x, x.mT)
        polynomial = products.symmetric(gram, gram, gram, alpha=c, beta=b)
        x = products.general(polynomial, x, x, beta=a)
    return x


def _gram(
    x: torch.Tensor, table: Sequence[Triple], restarts: frozenset[int], products: _Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """Iterate on R = X X^T. Invariant: after the steps since the last restart, X_now = factor x.

    Returns x and the factor of the last steps.

    All that is multiplied here are polynomials of one R: they commute and are symmetric, so that
    symmetric products may be used (C.3).
    """
    symmetric, general = products
    gram, factor = symmetric(x, x.mT), None
    for i, (a, b, c) in enumerate(table):
        if i in restarts and factor is not None:
            x = general(factor, x)
            gram, factor = symmetric(x, x.mT), None
        # X_next = (a + z) X, hence R_next = (a + z) R (a + z).
        z = symmetric(gram, gram, gram, alpha=c, beta=b)
        if factor is None:
            factor = z.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = symmetric(factor, z, factor, beta=a)
        if i + 1 < len(table) and i + 1 not in restarts:
            half = symmetric(gram, z, gram, beta=a)
            gram = symmetric(z, half, half, beta=a)
    assert factor is not None  # there is at least one step
    return x, factor


@cache
def uses_gram(rows: int, columns: int, method: Method = "auto", *, steps: int = 5) -> bool:
    """Return whether a matrix of this shape is iterated on by its Gram matrix."""
    if method not in get_args(Method):
        raise ValueError(f"method: expected {', '.join(get_args(Method))}, got {method!r}")
    if method != "auto":
        return method == "gram"
    one = flops(rows, columns, method="gram", steps=steps)
    return GRAM_MARGIN * one < flops(rows, columns, method="standard", steps=steps)


def flops(
    rows: int,
    columns: int,
    *,
    method: Method = "auto",
    steps: int = 5,
    restarts: Sequence[int] = (2,),
) -> int:
    """Return the floating-point operations of one orthogonalisation.

    Symmetric products count half where backends can save it: from `MIN_SYMMETRIC_SIZE` rows.
    """
    m, n = sorted((rows, columns))
    if method == "auto":
        method = "gram" if uses_gram(m, n, steps=steps) else "standard"
    share = 2 if m >= MIN_SYMMETRIC_SIZE else 1
    square, gram, whole = 2 * m**3 // share, 2 * m * m * n // share, 2 * m * m * n
    if method == "standard":
        return steps * (gram + square + whole)
    starts = {0} | {r for r in restarts if 0 < r < steps}
    carried = sum(1 for i in range(1, steps) if i not in starts)
    # Each step: z. Steps that go on from the one before: the product, and two for R.
    return len(starts) * (gram + whole) + (steps + 3 * carried) * square
