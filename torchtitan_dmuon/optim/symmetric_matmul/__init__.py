"""Products that are known to be symmetric, computed by whatever is fastest for their shape.

`symmetric_matmul` is the one interface. The first time a shape appears every backend is checked
and timed, and the winner is kept on disk for the device and its libraries (paper, appendix C.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchtitan_dmuon.optim.symmetric_matmul.backend import HALF, Backend, Problem
from torchtitan_dmuon.optim.symmetric_matmul.cute import CuteSm80
from torchtitan_dmuon.optim.symmetric_matmul.panels import Panels
from torchtitan_dmuon.optim.symmetric_matmul.plain import Plain, product
from torchtitan_dmuon.optim.symmetric_matmul.quack import Quack
from torchtitan_dmuon.optim.symmetric_matmul.selection import MIN_SYMMETRIC_SIZE, Selector
from torchtitan_dmuon.optim.symmetric_matmul.store import Choice
from torchtitan_dmuon.optim.symmetric_matmul.through_float32 import ThroughFloat32

__all__ = [
    "HALF",
    "MIN_SYMMETRIC_SIZE",
    "Choice",
    "backends",
    "calls",
    "configure",
    "matmul",
    "product",
    "selector",
    "symmetric_matmul",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def backends() -> tuple[Backend, ...]:
    """Return all backends, plain first, in the order in which they are tried."""
    panels = [Panels(4), Panels(8)]
    return (
        Plain(),
        *panels,
        ThroughFloat32(Plain(), "through_float32"),
        *(ThroughFloat32(p, f"through_float32_{p.name}") for p in panels),
        Quack(),
        CuteSm80(),
    )


_selector = Selector(backends())
_known: dict[object, Backend] = {}
_calls = _selector.calls


def selector() -> Selector:
    """Return what chooses in this process; `dmuon doctor` shows and asks it."""
    return _selector


def configure(*, folder: Path | None) -> None:
    """Keep choices in another folder, and forget those of this process.

    Args:
        folder: Made if absent; None: symmetric_matmul in the user's cache folder.
    """
    global _selector, _calls
    _selector = Selector(backends(), folder)
    _calls = _selector.calls
    _known.clear()


def calls() -> Mapping[str, int]:
    """Return how often each backend computed a symmetric product since the start or `configure`.

    Calls inside the replay of a CUDA graph are not seen.
    """
    return dict(_calls)


def symmetric_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return alpha * a @ b + beta * c, which the caller knows to be symmetric.

    Symmetric are a times its transpose, and the product of symmetric matrices that commute, such
    as polynomials of one matrix; `c` is symmetric itself. That is not checked: backends compute
    one triangle and mirror it. The result is symmetric up to rounding, not bit by bit.

    Every term of an element is summed in float32 or better and rounded once (on GPUs the plain
    product follows `torch.backends.cuda.matmul`). Not-a-number and infinity are where the plain
    product has them, if the operands are symmetric in them, too. The first call with a shape of at
    least 256 rows measures, for about a second on a CPU; later ones, in later runs also, look up.

    Args:
        a: (m, k) or (batch, m, k), float16, bfloat16, float32 or float64; row-major or a transposed
            view is fastest.
        b: (k, m) or (batch, k, m), of the same dtype and device.
        c: (m, m) or (batch, m, m), likewise; None: no third term.
        alpha: Factor of the product.
        beta: Factor of `c`.

    Returns:
        (m, m) or (batch, m, m), row-major, of the dtype of `a`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or gradients are asked for: the products
            are of optimizers, and are not differentiated.
        RuntimeError: a shape appears for the first time while a CUDA graph is captured.
    """
    backend = _backend(a, b, c, True)
    _calls[backend.name] += 1
    return backend(a, b, c, alpha, beta)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return alpha * a @ b + beta * c for matrices of any kind, rounded once.

    The plain product, except for 16-bit numbers on CPUs without units for them.

    Args, Returns, Raises: as for `symmetric_matmul`, with b (k, n) or (batch, k, n), and c and the
        result (m, n) or (batch, m, n).
    """
    return _backend(a, b, c, False)(a, b, c, alpha, beta)


def _backend(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, symmetric: bool) -> Backend:
    # All that decides, as it is cheapest to get: this runs some thirty times per matrix.
    key = (
        symmetric,
        a.shape,
        b.shape,
        a.stride(),
        b.stride(),
        a.dtype,
        b.dtype,
        a.device,
        a.data_ptr() == b.data_ptr(),
        None if c is None else (c.shape, c.dtype),
    )
    backend = _known.get(key)
    if backend is None:
        backend = _known[key] = _first(a, b, c, symmetric)
    if torch.is_grad_enabled():
        _refuse_gradients((a, b) if c is None else (a, b, c))
    return backend


def _first(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, symmetric: bool) -> Backend:
    """Check the operands of a shape that is new to this process, and return its backend."""
    operands = {"a": a, "b": b} | ({} if c is None else {"c": c})
    if a.ndim not in (2, 3):
        raise ValueError(f"a: expected (m, k) or (batch, m, k), got {tuple(a.shape)}")
    if a.dtype not in DTYPES:
        raise ValueError(f"a: expected float16, bfloat16, float32 or float64, got {a.dtype}")
    *batch, m, k = a.shape
    n = m if symmetric or b.ndim != a.ndim else b.size(-1)
    for name, shape in (("b", (*batch, k, n)), ("c", (*batch, m, n))):
        if name in operands and tuple(operands[name].shape) != shape:
            raise ValueError(
                f"{name}: expected {shape} for a of {tuple(a.shape)}, "
                f"got {tuple(operands[name].shape)}"
            )
    for name, x in operands.items():
        if x.dtype != a.dtype or x.device != a.device:
            raise ValueError(
                f"{name}: expected {a.dtype} on {a.device} as a is, got {x.dtype} on {x.device}"
            )
    return _selector.choose(Problem.of(a, b, c, symmetric), a.device)


def _refuse_gradients(operands: Sequence[torch.Tensor]) -> None:
    if any(x.requires_grad for x in operands):
        raise ValueError("symmetric_matmul is not differentiable: call it under torch.no_grad()")
