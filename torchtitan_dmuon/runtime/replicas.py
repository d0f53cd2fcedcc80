"""Whether all rows of an HSDP mesh hold the same weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_dmuon.runtime.dedicate import runtime_of


@torch.no_grad()
def check_replicas(model: nn.Module) -> None:
    """Compare what is held once per row, bit by bit, between rows. Collective.

    Covers the leaders' copies of owned parameters and the replicas of sharded ones; sends one
    integer per parameter. Waits for the publishes of the last step.

    Raises:
        RuntimeError: rows differ; it names the parameters. Raised on the ranks of the columns that
            hold them.
    """
    runtime = runtime_of(model)
    runtime.wait_for_publish()
    names: list[str] = []
    digests: list[torch.Tensor] = []
    for group in runtime.groups:
        held = group.copies or group.masters
        for s, value in held.items():
            if group.rows > 1:
                names.append(group.parameters[s.parameter].name)
                digests.append(_digest(value))
    communicator = runtime.communicator
    if communicator is not None and communicator.mesh.rows > 1:
        differing = _differing(communicator.collect_column(_stack(digests, runtime.device)), names)
        if differing:
            _report(differing)
    by_mesh: dict[object, list[tuple[str, torch.Tensor, dist.ProcessGroup]]] = {}
    for name, parameter in runtime.other_parameters():
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                mesh = parameter.device_mesh
                if isinstance(placement, Replicate) and mesh.size(axis) > 1:
                    entry = (name, _digest(parameter.to_local()), mesh.get_group(axis))
                    by_mesh.setdefault((mesh, axis), []).append(entry)
    for entries in by_mesh.values():
        mine = _stack([digest for _, digest, _ in entries], runtime.device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(entries[0][2]))]
        dist.all_gather(rows, mine, group=entries[0][2])
        differing = _differing(torch.stack(rows), [name for name, _, _ in entries])
        if differing:
            _report(differing)


def _digest(value: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum of the bits, weighted by position so that swapped elements show."""
    flat = value.detach().contiguous().view(-1)
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()]).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return (bits * (2 * weights + 1)).sum()


def _stack(digests: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not digests:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack(digests)


def _differing(rows: torch.Tensor, names: list[str]) -> list[str]:
    same = (rows == rows[:1]).all(dim=0).tolist()
    return list(dict.fromkeys(name for name, ok in zip(names, same, strict=True) if not ok))


def _report(names: list[str]) -> None:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise RuntimeError(f"replicas have drifted apart: {shown} differ between rows of the mesh")
