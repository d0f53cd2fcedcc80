"""Saving beside the training: a copy of the state on the host, and a writer that takes its time."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_dmuon.checkpoint.held import HeldTensor


class Stager(AsyncStager):
    """Copies what this rank holds of a state to host memory, which it keeps for the next copy.

    Args:
        pinned: Whether the memory is pinned, for faster copies from a GPU.

    Attributes:
        bytes: Host memory of the copies.
    """

    _synchronize_after_execute = False

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copies.values())

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that training does not change; a former one must have been written."""
        staged: dict[str, Any] = self._stage("", state_dict)
        if self.pinned:
            torch.accelerator.synchronize()
        return staged

    def _stage(self, path: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._stage(f"{path}/{key}", inner) for key, inner in value.items()}
        if isinstance(value, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                value.shape, value.device_mesh, value.placements
            )
            value = HeldTensor(value.shape, value.dtype, [(tuple(offsets), value.to_local())])
        if isinstance(value, HeldTensor):
            boxes = [(o, self._copy(f"{path}/{o}", tensor)) for o, tensor in value.boxes]
            return HeldTensor(value.shape, value.dtype, boxes)
        if isinstance(value, torch.Tensor):
            return self._copy(path, value)
        return copy.deepcopy(value)

    def _copy(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._copies.get(path)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
            self._copies[path] = kept
        return kept.copy_(tensor.detach(), non_blocking=self.pinned)

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""
        return

    def close(self) -> None:
        """Let the memory go."""
        self._copies.clear()


class Pace:
    """Rests between pieces of work, so that no step of the training bears all of a save.

    What matters is a small job on few cores: the work of a large one is mostly waiting for the
    disk, and all rests together are short beside it.

    Args:
        share: Of the time, that the work takes.
        at_most_seconds: All rests together.
    """

    def __init__(self, share: float = 0.025, at_most_seconds: float = 4.0) -> None:
        self.share = share
        self.left = at_most_seconds
        self._worked: float | None = None
        self._hurry = threading.Event()

    def rest(self) -> None:
        """Sleep in proportion to this thread's work since the last rest."""
        now = time.thread_time()
        if self._worked is not None:
            seconds = min(self.left, (now - self._worked) / self.share)
            self.left -= seconds
            self._hurry.wait(seconds)
        self._worked = time.thread_time()

    def hurry(self) -> None:
        """Rest no more: somebody waits."""
        self._hurry.set()
