"""This project's own kernel for Ampere and newer GPUs, `cute_sm80`, as a backend."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch

from torchtitan_dmuon.optim.symmetric_matmul import cute_sm80
from torchtitan_dmuon.optim.symmetric_matmul.backend import Shape

PACKAGE = "nvidia-cutlass-dsl"
"""What compiles the kernel, an optional package. Its import takes a second and is left to that."""


class CuteSm80:
    """float16 and bfloat16, m and k multiples of 8, on sm_80 or newer."""

    name = "cute_sm80"
    any_product = False
    made_of_plain = False

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        return cute_sm80.unavailable(device, dtype, shape)

    def broken(self) -> str | None:
        try:
            version = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:
            return None
        try:
            importlib.import_module("cutlass.cute")
        except Exception as error:  # It loads native libraries: anything can fail.
            text = " ".join(str(error).split())
            return f"{PACKAGE} {version} fails to import: {type(error).__name__}: {text}"
        return None

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        alpha: float,
        beta: float,
    ) -> torch.Tensor:
        return cute_sm80.symmetric_matmul(a, b, c, alpha, beta)
