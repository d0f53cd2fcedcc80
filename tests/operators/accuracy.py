"""How exact the operators' sums are: against float64, and against a ring reduction's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import my_rank
from torchtitan_dmuon.comm.operators import Operators

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SAMPLES = 6000
"""Elements of each segment whose error is measured."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the sums that one rank owns.

    Attributes:
        of_bound: Largest error of an element, as a part of what one rounding per level allows.
        operator: Relative error of all, |sum - exact| / |exact|.
        ring: The same for a ring over all ranks, from the same addends.
    """

    of_bound: float
    operator: float
    ring: float


def _rounding(mesh: tuple[int, int], inputs: list[torch.Tensor], node: int) -> torch.Tensor:
    """Bound of the error of sums at owners in `node`: half an ulp of what is rounded, per level.

    On the chain each node rounds what it passes on; on the star path each node rounds its own sum
    and the owner's node the whole. Float32's own roundings come on top.
    """
    unit = torch.finfo(inputs[0].dtype).eps / 2
    exact = [x.double() for x in inputs]
    sums = [sum(exact[n * mesh[1] : (n + 1) * mesh[1]]) for n in range(mesh[0])]
    order = [(node + 1 + hop) % mesh[0] for hop in range(mesh[0])]
    total: Any = torch.zeros_like(exact[0])
    chain: Any = torch.zeros_like(exact[0])
    for n in order:
        total = total + sums[n]
        chain = chain + total.abs()
    star = total.abs() + sum(sums[n].abs() for n in order[:-1])
    single = sum(x.abs() for x in exact) * len(inputs) * torch.finfo(torch.float32).eps
    return unit * 1.02 * torch.maximum(chain, torch.as_tensor(star)) + single


def _ring(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Reduce as a ring over all ranks does: rounded to the payload's dtype at every hop."""
    total = inputs[0]
    for x in inputs[1:]:
        total = (total.float() + x.float()).to(total.dtype)
    return total


def measure(operators: Operators, mesh: tuple[int, int], dtype: torch.dtype) -> Accuracy:
    """Reduce normal numbers, of which each rank owns an equal share, and compare with float64.

    Called by every rank of the mesh (nodes, ranks per node).
    """
    ranks = range(mesh[0] * mesh[1])
    nbytes = SAMPLES * dtype.itemsize
    segments = cases.table([nbytes] * len(ranks), list(ranks), mesh[1])
    numel = cases.size_of(segments) // dtype.itemsize
    buffer = operators.empty(numel, dtype)
    buffer.copy_(cases.normal(my_rank(), numel, dtype))
    operators.reduce_scatter_v(segments, dtype, label="accuracy")(buffer, buffer).wait()
    mine = segments[my_rank()]
    begin = mine.offset // dtype.itemsize
    inputs = [cases.normal(r, numel, dtype)[begin : begin + SAMPLES] for r in ranks]
    exact: Any = sum(x.double() for x in inputs)
    error = buffer[begin : begin + SAMPLES].double() - exact
    bound = _rounding(mesh, inputs, mine.node)
    return Accuracy(
        of_bound=float((error.abs() / bound.clamp(min=1e-30)).max()),
        operator=float(error.norm() / exact.norm()),
        ring=float((_ring(inputs).double() - exact).norm() / exact.norm()),
    )


def measure_all(job: str, mesh: tuple[int, int]) -> dict[str, Accuracy]:
    """Measure every dtype, by its name. Called by every rank of the mesh."""
    operators = cases.open_operators(job, mesh)
    found = {name: measure(operators, mesh, dtype) for name, dtype in DTYPES.items()}
    operators.close()
    return found
