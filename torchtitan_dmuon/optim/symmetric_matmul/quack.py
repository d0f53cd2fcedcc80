"""QuACK's symmetric product for Hopper and newer GPUs (optional package quack-kernels).

Facts from quack-kernels 0.6.5, `quack.gemm_interface.gemm_symmetric(A, B, C=None, out=None,
out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0, ...)`: A (L, M, K) or (M, K) and B
(L, K, M) or (K, M) on GPUs of capability 9, 10, 11 or 12; operands row- or column-major with
16-byte aligned bases and rows; float32 accumulation. It multiplies float32 operands as TF32, so
they are not given to it. `alpha` and `beta` must be Python floats here: a tensor selects another
kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import HALF, Shape, layout

PACKAGE = "quack-kernels"
MIN_SIZE = 256
"""Smallest m and k: below a tile the public `gram-newton-schulz` uses cuBLAS, too."""

_CAPABILITIES = (9, 10, 11, 12)
_ALIGNMENT_BYTES = 16


class Quack:
    """float16 and bfloat16, m and k multiples of 8 and at least 256, on sm_90 or newer."""

    name = "quack"
    any_product = False
    made_of_plain = False

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        if device.type != "cuda":
            return "for CUDA GPUs only"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in _CAPABILITIES:
            return f"needs a GPU of capability 9.0 or newer, this one has {major}.{minor}"
        if dtype not in HALF:
            return "for float16 and bfloat16 only"
        _, m, k = shape
        if min(m, k) < MIN_SIZE or m % 8 or k % 8:
            return f"needs m and k of at least {MIN_SIZE} that 8 divides, got {m} and {k}"
        return _load()[1]

    def broken(self) -> str | None:
        try:
            metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:
            return None
        return _load()[1]

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        alpha: float,
        beta: float,
    ) -> torch.Tensor:
        function, reason = _load()
        if function is None:
            raise RuntimeError(reason)
        result: torch.Tensor = function(
            _aligned(a),
            _aligned(b),
            C=None if c is None else _aligned(c),
            alpha=float(alpha),
            beta=float(beta),
        )
        return result


@functools.cache
def _load() -> tuple[Callable[..., Any] | None, str | None]:
    """Return QuACK's function, or None and why there is none. Imported once, and only if asked."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None, f"{PACKAGE} is not installed: pip install {PACKAGE}"
    try:
        return importlib.import_module("quack.gemm_interface").gemm_symmetric, None
    except Exception as error:  # Its import compiles and registers kernels: anything can fail.
        text = " ".join(str(error).split())
        return None, f"{PACKAGE} {version} fails to import: {type(error).__name__}: {text}"


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a row-major copy where its base or its rows are not 16-byte aligned."""
    pitches = x.stride()[:-2] + (x.stride(-2 if layout(x) == "r" else -1),)
    fits = layout(x) != "s" and x.data_ptr() % _ALIGNMENT_BYTES == 0
    if fits and all(pitch * x.element_size() % _ALIGNMENT_BYTES == 0 for pitch in pitches):
        return x
    return x.clone(memory_format=torch.contiguous_format)
