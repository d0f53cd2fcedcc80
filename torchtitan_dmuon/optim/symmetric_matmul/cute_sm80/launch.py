"""The kernel as a function of torch tensors: when it can be used, and how it is launched."""

from __future__ import annotations

import ctypes
import functools
from importlib import metadata
from typing import Any

import torch

from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.geometry import (
    MAX_BATCH,
    MAX_EXTENT,
    SHARED_BYTES,
    THREADS,
    VECTOR,
    grid,
)
from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.objects import PACKAGE, load_or_compile

ARGUMENT_TYPES = (
    *(ctypes.c_uint64,) * 4,  # a, b transposed, c, d
    *(ctypes.c_int32,) * 2,  # m, k
    *(ctypes.c_float,) * 2,  # alpha, beta
)
"""C types of the kernel's parameters, in order."""

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_ALIGNMENT_BYTES = 16


def unavailable(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> str | None:
    """Return why the kernel can not make such a product, or None if it can.

    Args:
        device: Where the operands are.
        dtype: Of operands and result.
        shape: (batch, m, k) of A.
    """
    batch, m, k = shape
    if device.type != "cuda":
        return "for CUDA GPUs only"
    if dtype not in _DTYPES:
        return "for float16 and bfloat16 only"
    if min(batch, m, k) < 1 or m % VECTOR or k % VECTOR:
        return f"needs m and k that {VECTOR} divides, got {m} and {k}"
    if max(m, k) > MAX_EXTENT or batch > MAX_BATCH:
        return f"for m and k up to {MAX_EXTENT} and batches up to {MAX_BATCH} only"
    return _missing(device)


@functools.cache
def _missing(device: torch.device) -> str | None:
    """What this device or this installation lacks; looked up once, since every call asks."""
    if not torch.cuda.is_available():
        return "for CUDA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"needs a GPU of capability 8.0 or newer, this one has {major}.{minor}"
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}"
    return None


def symmetric_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return alpha * a @ b + beta * c, which the caller knows to be symmetric.

    Products are summed in float32 and rounded once. The result is exactly symmetric: what lies
    above the diagonal is a copy of what lies below it. NaN and infinity spread as in a plain
    product, except that those of C's upper half are not read.

    Launched on torch's current stream, without waiting for the device; a CUDA graph can capture
    it once the kernel has been loaded by a first call for the device, dtype and presence of c.

    Operands are read row by row. One that is not contiguous or not aligned to 16 bytes is copied
    first: the product of a tall X, a = X.mT and b = X, costs one copy of X.

    Args:
        a: (m, k) or (batch, m, k), float16 or bfloat16, on a CUDA GPU that `unavailable` accepts.
        b: (k, m) or (batch, k, m), like a. Either a's transposed view, or, where k = m and b is
            contiguous, a symmetric matrix: its rows are read in place of its columns. Any other
            b is transposed, by a copy if need be.
        c: None, or a symmetric (m, m) or (batch, m, m), like a. Its lower half is read.
        alpha, beta: Passed by value; beta is ignored without c.

    Returns:
        A new contiguous tensor (m, m) or (batch, m, m).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `unavailable` says why not.
        RuntimeError: The CUDA driver refuses the kernel or the launch.
    """
    shape = _check(a, b, c)
    batch, m, k = shape
    rows, columns = _operands(a, b)
    added = None if c is None else _row_major(c)
    result = torch.empty((*a.shape[:-1], m), dtype=a.dtype, device=a.device)
    values = (
        rows.data_ptr(),
        columns.data_ptr(),
        0 if added is None else added.data_ptr(),
        result.data_ptr(),
        m,
        k,
        alpha,
        beta,
    )
    _launch(a.device, _function(a.device, a.dtype, c is not None), grid(m, batch), values)
    return result


def _check(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> tuple[int, int, int]:
    if a.ndim not in (2, 3):
        raise ValueError(f"a must be (m, k) or (batch, m, k), not {tuple(a.shape)}")
    batch = a.size(0) if a.ndim == 3 else 1
    m, k = a.shape[-2:]
    wanted = {"b": (b, (*a.shape[:-2], k, m))}
    if c is not None:
        wanted["c"] = (c, (*a.shape[:-2], m, m))
    for name, (tensor, expected) in wanted.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must be {expected}, not {tuple(tensor.shape)}")
        if tensor.dtype != a.dtype or tensor.device != a.device:
            raise ValueError(
                f"{name} must be {a.dtype} on {a.device} as a is, not {tensor.dtype} on "
                f"{tensor.device}"
            )
    reason = unavailable(a.device, a.dtype, (batch, m, k))
    if reason is not None:
        raise ValueError(f"The sm_80 kernel can not multiply {tuple(a.shape)} {a.dtype}: {reason}")
    return batch, m, k


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A, and B transposed, both row-major."""
    rows = _row_major(a)
    transposed = b.mT
    if transposed.data_ptr() == a.data_ptr() and transposed.stride() == a.stride():
        return rows, rows
    if b.is_contiguous() and b.size(-1) == b.size(-2):
        # Symmetric by the contract: b[k, j] = b[j, k], so that b is its own transpose.
        transposed = b
    return rows, _row_major(transposed)


def _row_major(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _function(device: torch.device, dtype: torch.dtype, has_c: bool) -> Any:
    """The kernel, loaded on a device; kept for the life of the process, as its module is."""
    major, minor = torch.cuda.get_device_capability(device)
    kernel = load_or_compile(_DTYPES[dtype], has_c, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        module = _driver_call("cuModuleLoadData", kernel.cubin)
        function = _driver_call("cuModuleGetFunction", module, kernel.entry.encode())
        attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver_call("cuFuncSetAttribute", function, attribute, SHARED_BYTES)
    return function


def _launch(
    device: torch.device, function: Any, blocks: tuple[int, int, int], values: tuple[Any, ...]
) -> None:
    # The driver takes the context that torch has made current for the device.
    with torch.cuda.device(device):
        _driver_call(
            "cuLaunchKernel",
            function,
            *blocks,
            *(THREADS, 1, 1),
            SHARED_BYTES,
            torch.cuda.current_stream(device).cuda_stream,
            (values, ARGUMENT_TYPES),
            0,
        )


def _driver_call(name: str, *arguments: Any) -> Any:
    status, *results = getattr(_driver(), name)(*arguments)
    if int(status):
        raise RuntimeError(f"{name} failed: {status.name}")
    return results[0] if results else None


@functools.cache
def _driver() -> Any:
    """The CUDA driver's functions, from a package that nvidia-cutlass-dsl depends on."""
    import cuda.bindings.driver

    return cuda.bindings.driver
