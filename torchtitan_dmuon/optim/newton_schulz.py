"""Newton-Schulz: the orthogonal factor of a matrix by polynomial iteration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

# The quintic of Muon's author; also the default of torch.optim.Muon.
DEFAULT_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return what Newton-Schulz computes in unless told: bfloat16 on GPUs, float32 on CPUs.

    bfloat16 is Muon's choice, and enough. Most CPUs have no units for it: without AMX or AVX-512
    its products take many times as long as those of float32.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def newton_schulz(
    matrix: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: Sequence[float] = DEFAULT_COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Approximate the orthogonal factor U V^T of a matrix U S V^T.

    X <- a X + (b A + c A^2) X with A = X X^T, from X = matrix / max(norm, eps), on the transpose of
    a tall matrix. With the default coefficients singular values end near one, not at one. Matches
    `torch.optim.Muon` in bfloat16 up to the order of additions.

    Args:
        matrix: (rows, columns), floating point.
        steps: Iterations, at least 1.
        coefficients: a, b, c.
        eps: Smallest divisor.
        dtype: What the iteration computes in.

    Returns:
        (rows, columns) in `dtype`; zero for a zero matrix.
    """
    a, b, c = coefficients
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    # Frobenius norm at least the spectral norm: singular values start in [0, 1].
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def measure_seconds(
    rows: int,
    columns: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    steps: int = 5,
    repeats: int = 3,
) -> float:
    """Return the median time of one Newton-Schulz of a shape on `device`, in seconds."""
    dtype = dtype or default_dtype(device)
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(rows, columns, device=device, generator=generator)

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        newton_schulz(matrix, steps=steps, dtype=dtype)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()  # Libraries choose and load kernels at the first call.
    return statistics.median(once() for _ in range(repeats))
