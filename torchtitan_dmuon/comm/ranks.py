"""How ranks are named and ordered, and what they tell each other once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_dmuon.comm.streams import CommunicationError

_Value = TypeVar("_Value")


def gather_objects(group: dist.ProcessGroup, value: _Value, what: str) -> list[_Value]:
    """Return what every rank of a group gave, by the group's rank. Collective.

    Args:
        group: Ranks.
        value: Of this rank.
        what: Names the call in errors.

    Raises:
        CommunicationError: a rank did not come.
    """
    ranks = dist.get_process_group_ranks(group)
    values: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise CommunicationError(f"{where(group, what)}: {error}") from error
    return values


def where(group: dist.ProcessGroup, what: str) -> str:
    """Name a call, this rank and a group, for errors."""
    ranks = dist.get_process_group_ranks(group)
    return f"dmuon {what} (rank {dist.get_rank()} among {brief(ranks)})"


def brief(ranks: Sequence[int]) -> str:
    """`ranks 0-3`, or a list that names at most eight."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (", ..." if len(ranks) > 8 else "")


def local_ranks() -> int:
    """Ranks of this job on this machine, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))


def in_order_of(ranks: Sequence[int], values: Sequence[_Value]) -> list[_Value]:
    """Return what a process group of `ranks` gave, which sorts them, in their order."""
    by_rank = dict(zip(sorted(ranks), values, strict=True))
    return [by_rank[rank] for rank in ranks]
