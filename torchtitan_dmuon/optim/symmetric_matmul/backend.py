"""What a backend of `symmetric_matmul` is, and the problem it is chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Shape = tuple[int, int, int]
"""(batch, m, k) of a product of (batch, m, k) by (batch, k, m); 2-D operands have batch 1."""

HALF = (torch.float16, torch.bfloat16)
"""The 16-bit types: multiplied on matrix units where there are any, summed in float32."""


class Backend(Protocol):
    """One way to compute a symmetric product. Stateless; called on the caller's current stream."""

    @property
    def name(self) -> str:
        """What logs, counters and the cache file call it; never given to another backend."""
        ...

    @property
    def any_product(self) -> bool:
        """Whether it computes products that are not symmetric, too."""
        ...

    @property
    def made_of_plain(self) -> bool:
        """Whether it is plain products of parts, and can not be fast where those are not."""
        ...

    def unavailable(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        """Return why it can not be used for such operands, or None if it can."""
        ...

    def broken(self) -> str | None:
        """Return what is wrong with what is installed for it; None also if nothing is installed."""
        ...

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        alpha: float,
        beta: float,
    ) -> torch.Tensor:
        """Return alpha * a @ b + beta * c as a new row-major tensor; see `symmetric_matmul`."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """What decides which backend is fastest.

    Attributes:
        kind: "gram": b is a's transposed view, so one operand is read. "product": another symmetric
            product. "any": a product that need not be symmetric.
        with_c: A third matrix is added.
        batch: None for 2-D operands.
        m, k, n: a is (m, k), b is (k, n).
        layouts: Of a and b: "r" row-major, "c" column-major, "s" neither.
    """

    kind: Literal["gram", "product", "any"]
    with_c: bool
    batch: int | None
    m: int
    k: int
    n: int
    dtype: torch.dtype
    layouts: str

    @classmethod
    def of(
        cls, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, symmetric: bool
    ) -> Problem:
        """Describe a call. Does not check it."""
        kind: Literal["gram", "product", "any"] = "product" if symmetric else "any"
        if symmetric and a.data_ptr() == b.data_ptr() and a.stride() == b.mT.stride():
            kind = "gram"
        batch = a.size(0) if a.ndim == 3 else None
        m, k, n = a.size(-2), a.size(-1), b.size(-1)
        return cls(kind, c is not None, batch, m, k, n, a.dtype, layout(a) + layout(b))

    @property
    def shape(self) -> Shape:
        return (1 if self.batch is None else self.batch, self.m, self.k)

    @property
    def key(self) -> str:
        """The problem in words: unique, and the same in every run."""
        kind = self.kind + ("+c" if self.with_c else "")
        batch = "" if self.batch is None else f"{self.batch}x"
        n = f"x{self.n}" if self.kind == "any" else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{kind} {batch}{self.m}x{self.k}{n} {dtype} {self.layouts}"


def layout(x: torch.Tensor) -> str:
    """Return "r", "c" or "s"; see `Problem`."""
    return "r" if x.stride(-1) == 1 else "c" if x.stride(-2) == 1 else "s"
