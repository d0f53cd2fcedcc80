"""The devices that a job can be planned for."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from torchtitan_dmuon.config.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU and what surrounds it.

    Attributes:
        key: Value of `--device`.
        name: Name.
        memory_gib: Memory as nvidia-smi shows it.
        context_gib: Assumed: CUDA context, library workspaces, and the buffers of NCCL's channels;
            on CPUs Python with its libraries.
        peer_mib: Line D: memory of GIN contexts for each other rank. Estimated from Table 2(b): the
            distance of line D from C, less the owner window, grows by 6.6 to 9.8 MiB a rank from 16
            to 256 GPUs.
        cost: Name of the cost table that `ownership` ships for it; "model" if there is none.
    """

    key: str
    name: str
    memory_gib: float
    context_gib: float = 2.0
    peer_mib: float = 8.0
    cost: str = "model"


DEVICES = {
    device.key: device
    for device in (
        Device(key="h100-80g", name="NVIDIA H100 80GB", memory_gib=79.6, cost="h100"),
        Device(key="h200-141g", name="NVIDIA H200 141GB", memory_gib=140.4),
        Device(key="b200-180g", name="NVIDIA B200 180GB", memory_gib=179.1),
        Device(key="a100-80g", name="NVIDIA A100 80GB", memory_gib=80.0),
        Device(key="a100-40g", name="NVIDIA A100 40GB", memory_gib=40.0),
    )
}


def this_device(kind: str, ranks: int) -> Device:
    """Return what a job on this machine runs on.

    Args:
        kind: "cuda" or "cpu".
        ranks: Ranks of this machine, which share its memory if they run on CPUs.
    """
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        known = next((d for d in DEVICES.values() if d.name in properties.name), None)
        memory = properties.total_memory / 2**30
        cost = known.cost if known else "model"
        return Device(key="cuda", name=properties.name, memory_gib=memory, cost=cost)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Device(
        key="cpu",
        name="CPU (a share of the memory)",
        memory_gib=total / ranks,
        context_gib=0.6,
        cost="cpu",
    )


def find_device(key: str) -> Device:
    """Return a device by its key.

    Raises:
        ConfigError: there is none; the message names the nearest and lists all.
    """
    if key not in DEVICES:
        known = ", ".join(DEVICES)
        raise ConfigError(f'--device: "{key}" is not one of {known}{nearest(key, DEVICES)}')
    return DEVICES[key]
