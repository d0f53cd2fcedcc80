"""A small model of the kernels of Gram Newton-Schulz on an H100, which `fit_h100_costs.py` fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

# NVIDIA H100 SXM5 80GB, data sheet: dense 16-bit FLOP/s, bytes/s of HBM3, multiprocessors.
PEAK_FLOPS = 989e12
HBM_BYTES = 3.35e12
MULTIPROCESSORS = 132

# A thread block computes 128 x 128 of a product. Filling and draining its pipeline (four stages of
# 64) costs about as much as 256 more terms of the sum.
TILE = 128
PIPELINE_TERMS = 256

# Symmetric kernels are used above this many rows (gram-newton-schulz, SYMMETRIC_KERNEL_TILE_SIZE).
LEAST_SYMMETRIC = 256

# Elementwise kernels: two of the norm, scaling, conversion before and after, update; with the Gram
# iteration two more, which add a multiple of the identity.
ELEMENTWISE_KERNELS = 6
IDENTITY_KERNELS = 2
# Norm reads fp32; scaling and conversion read fp32, write fp16; the result is read and written.
ELEMENTWISE_BYTES = 14
# A tall matrix is transposed on the way in (reads fp32, writes fp16) and out (the other way round).
TRANSPOSED_BYTES = 12


@dataclass(frozen=True)
class Parameters:
    """What is fitted.

    Attributes:
        kernel_seconds: Of each kernel, whatever its size: launch, start, end.
        efficiency: Share of the peak that a full wave of tiles reaches.
        transpose_bytes: Bytes per second of a transposing copy.
        gather_seconds: Of line B's gathers and write-back, per element of the matrices.
    """

    kernel_seconds: float = 1.8e-5
    efficiency: float = 0.5
    transpose_bytes: float = 6e11
    gather_seconds: float = 1.5e-11


def product_seconds(p: Parameters, rows: int, columns: int, terms: int, symmetric: bool) -> float:
    """Return the time of one product (rows, terms) x (terms, columns).

    The fastest of what a library can choose from: a grid of tiles, the sum split over several
    blocks where a wave would be half empty, or for a symmetric result the lower tiles alone.
    """
    down, across = math.ceil(rows / TILE), math.ceil(columns / TILE)
    rate = p.efficiency * PEAK_FLOPS / MULTIPROCESSORS

    def compute(tiles: int, split: int) -> float:
        waves = math.ceil(tiles * split / MULTIPROCESSORS)
        return waves * 2 * TILE * TILE * (terms / split + PIPELINE_TERMS) / rate

    splits = [s for s in (2, 4, 8) if down * across * s <= MULTIPROCESSORS and terms >= s * TILE]
    best = min(compute(down * across, s) for s in (1, *splits))
    if symmetric and rows > LEAST_SYMMETRIC:
        best = min(best, compute(down * (down + 1) // 2, 1))
    traffic = 2 * (rows * terms + terms * columns + rows * columns)
    return p.kernel_seconds + max(best, traffic / HBM_BYTES)


def kernels(rows: int, columns: int) -> int:
    """Return the number of kernels of one Newton-Schulz."""
    square = rows == columns
    return ELEMENTWISE_KERNELS + (15 if square else 18 + IDENTITY_KERNELS)


def newton_schulz_seconds(p: Parameters, rows: int, columns: int) -> float:
    """Return the time of five Polar Express steps, restarted after the second.

    Two Gram matrices, 14 products of symmetric m x m matrices and two products with the m x n
    matrix; for a square matrix the standard iteration, as in the reference.
    """
    m, n = sorted((rows, columns))
    gram = product_seconds(p, m, m, n, True)
    square = product_seconds(p, m, m, m, True)
    whole = product_seconds(p, m, n, m, False)
    products, counts = (gram, square, whole), (5, 5, 5) if m == n else (2, 14, 2)
    total = sum(count * seconds for count, seconds in zip(counts, products, strict=True))
    total += (kernels(rows, columns) - sum(counts)) * p.kernel_seconds
    total += ELEMENTWISE_BYTES * rows * columns / HBM_BYTES
    if rows > columns:
        total += TRANSPOSED_BYTES * rows * columns / p.transpose_bytes
    return total
