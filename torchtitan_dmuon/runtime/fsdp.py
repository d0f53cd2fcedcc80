"""What FSDP2 has no public call for: a backward that one rank does not run.

The only place that uses its internals; they are those of torch 2.13 and 2.14, and checked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

_GROUP_PARTS = ("pre_backward", "post_backward", "reduce_scatter_unused_params", "comm_ctx")


def forward_order(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups that ran forward and not backward, last first.

    Raises:
        NotImplementedError: this torch's FSDP2 is a different one.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [g for m in modules for g in getattr(m._get_fsdp_state(), "_fsdp_param_groups", [])]
    if not groups:
        return []
    if any(not hasattr(groups[0], part) for part in _GROUP_PARTS):
        raise NotImplementedError(
            "this torch's FSDP2 cannot leave a backward out on one rank; let every rank run its "
            "backward, on a loss times zero if need be"
        )
    return list(dict.fromkeys(reversed(groups[0].comm_ctx.post_forward_order)))


@contextmanager
def leave_out_backward(model: nn.Module, groups: Sequence[Any]) -> Iterator[None]:
    """Run the collectives of a backward over `groups`, in its order, with zero gradients.

    They run beside the body of the context, which ends when they have ended.
    """
    if not groups:
        yield
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    with ThreadPoolExecutor(1, "fsdp_backward") as pool:
        running = pool.submit(_backward, model, groups, device)
        yield
        running.result()


def _backward(model: nn.Module, groups: Sequence[Any], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    with torch.no_grad():
        for group in groups:
            before = group.reduce_scatter_unused_params
            group.reduce_scatter_unused_params = True
            group.pre_backward(True)
            group.post_backward()
            group.reduce_scatter_unused_params = before
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        root = next(m._get_fsdp_state() for m in modules if m._get_fsdp_state()._is_root)
        root._root_post_backward_final_callback()
