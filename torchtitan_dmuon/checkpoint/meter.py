"""Time and memory of a save or a load."""

from __future__ import annotations

import time

import torch

from torchtitan_dmuon.memory import status_bytes


class Meter:
    """Measures from its construction on.

    Args:
        device: Whose allocator is watched, if it is an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = time.monotonic()
        self._held = self._now()

    def _now(self) -> tuple[int, int]:
        host = status_bytes("VmRSS")
        if self.device.type == "cpu":
            return host, 0
        return host, torch.get_device_module(self.device).memory_allocated(self.device)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def retained(self) -> str:
        """Say how much more memory this rank holds than at the start."""
        host, device = (now - then for now, then in zip(self._now(), self._held, strict=True))
        text = f"{max(0, host) / 2**20:.1f} MiB of memory retained"
        more = "" if self.device.type == "cpu" else f", {max(0, device) / 2**20:.1f} on the GPU"
        return text + more
