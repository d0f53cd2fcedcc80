"""Experts as grouped products: one 3-D tensor per projection, tokens sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.moe import GroupedExperts

__all__ = ["QwenMoEExperts", "grouped_linear"]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Apply to each group of rows the weight of its group: `x[group] @ weight[g].T`.

    CUDA takes torch's grouped GEMM. Elsewhere the groups are multiplied one after the other, with
    the same result: 16-bit inputs are multiplied in float32 and rounded once, and the gradient of
    a weight whose group is empty is zero.

    Args:
        x: (rows, in), sorted by group.
        weight: (groups, out, in), in the dtype of `x`.
        ends: (groups,) int32, the row behind each group's last; the last one is `rows`.

    Returns:
        (rows, out) in the dtype of `x`.
    """
    if x.is_cuda:
        result: torch.Tensor = torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
        return result
    result = _grouped_linear(x, weight, ends)
    return result


# Opaque to torch.compile, which must not look into how many rows each expert got.
@torch.library.custom_op("dmuon::grouped_linear", mutates_args=())
def _grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for g, rows in _groups(ends):
        _product(x[rows], weight[g].t(), out[rows])
    return out


@_grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("dmuon::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    to_x, to_weight = torch.empty_like(x), torch.zeros_like(weight)
    for g, rows in _groups(ends):
        _product(gradient[rows], weight[g], to_x[rows])
        _product(gradient[rows].t(), x[rows], to_weight[g])
    return to_x, to_weight


@_grouped_linear_backward.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    to_x, to_weight = _grouped_linear_backward(gradient, x, weight, ends)
    return to_x, to_weight, None


_grouped_linear.register_autograd(_backward, setup_context=_keep)


def _groups(ends: torch.Tensor) -> list[tuple[int, slice]]:
    """Return the groups that have rows."""
    bounds = enumerate(pairwise([0, *ends.tolist()]))
    return [(g, slice(start, end)) for g, (start, end) in bounds if end > start]


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if a.dtype in (torch.bfloat16, torch.float16):
        # CPUs without instructions for it take tens of times as long for 16-bit products.
        out.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=out)


class QwenMoEExperts(GroupedExperts):
    """torchtitan's experts in the dtype of their input, where torchtitan's compute in bfloat16.

    Parameters `w1_EFD` and `w3_EFD` are (experts, hidden, dim), `w2_EDF` is (experts, dim, hidden):
    each expert's matrices are contiguous slices.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As torchtitan's."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return each row's SwiGLU under its expert.

        Args:
            x_RD: (rows, dim), sorted by expert.
            num_tokens_per_expert_E: (experts,) integers, the rows of each expert.
        """
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate = F.silu(grouped_linear(x_RD, self.w1_EFD, ends))
        return grouped_linear(gate * grouped_linear(x_RD, self.w3_EFD, ends), self.w2_EDF, ends)
