"""What all ranks must know of a step's gradients before anything is updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_dmuon.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Gradients:
    """The agreed facts about the reduced gradients.

    Attributes:
        norm: 2-norm over all parameters, owned and sharded, each counted once.
        present: Owned parameters that had a gradient on some rank.
        nonfinite: Parameters with an infinity or a NaN, owned and sharded.
        spoiled: Owned parameters whose last update was not finite (`Runtime.suspects`).
        others: Parameters without owners that have a gradient on this rank.
    """

    norm: float
    present: frozenset[str]
    nonfinite: tuple[str, ...]
    spoiled: tuple[str, ...] = ()
    others: tuple[torch.nn.Parameter, ...] = ()


@torch.profiler.record_function("dmuon agree on gradients")
def agree_on_gradients(runtime: Runtime, *, reuse: bool) -> Gradients:
    """Find norm, presence and non-finite values; one small exchange between all ranks.

    Waits for the reductions of the backwards so far. Collective.

    Args:
        runtime: Of the model.
        reuse: Take what the last call found, once, if no backward came since: so a step shares
            what clipping found. Whether it does depends on the calls before, which are the same on
            every rank, and not on what one rank did to its `.grad`s.
    """
    runtime.settle()
    known, runtime.known_gradients = runtime.known_gradients, None
    if reuse and known is not None and known[0] == runtime.gradient_version:
        kept: Gradients = known[1]
        return kept
    registered = list(runtime.other_parameters())
    others = [(name, p) for name, p in registered if p.grad is not None]
    owned = [e.name for g in runtime.groups for e in g.parameters]
    # Names of every rank, whether or not it has a gradient here: positions must agree.
    names = owned + [name for name, _ in registered]
    index = {name: i for i, name in enumerate(names)}
    total, bad, spoiled = _local(runtime, others)
    values = [total] + [0.0] * (2 * len(owned) + len(names))
    for group in runtime.groups:
        for name in group.present:
            values[1 + index[name]] = 1.0
    for name in bad:
        values[1 + len(owned) + index[name]] = 1.0
    for name in spoiled:
        values[1 + len(owned) + len(names) + index[name]] = 1.0
    if runtime.communicator is not None:
        vector = torch.tensor(values, dtype=torch.float64, device=runtime.device)
        runtime.communicator.exchange(vector)
        values = vector.tolist()
    result = Gradients(
        norm=max(values[0], 0.0) ** 0.5 if values[0] == values[0] else float("nan"),
        present=frozenset(n for n, v in zip(owned, values[1:], strict=False) if v),
        nonfinite=tuple(n for n, v in zip(names, values[1 + len(owned) :], strict=False) if v),
        spoiled=tuple(n for n, v in zip(owned, values[-len(owned) :], strict=True) if v),
        others=tuple(parameter for _, parameter in others),
    )
    runtime.known_gradients = (runtime.gradient_version, result)
    return result


# Elements that are float64 at a time: 256 KiB on a CPU, which its allocator keeps at hand, and
# 128 MiB on a GPU.
_AT_A_TIME = {"cpu": 1 << 15, "cuda": 1 << 24}


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's 2-norm, float64; without a float64 copy of all of it.

    In float64 no finite float32 gradient overflows, so a non-finite norm proves a bad value.
    """
    most = _AT_A_TIME.get(gradient.device.type, gradient.numel())
    if gradient.numel() <= most:
        whole: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return whole
    parts = gradient.reshape(-1).split(most)
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return joined


def _local(
    runtime: Runtime, others: list[tuple[str, torch.nn.Parameter]]
) -> tuple[float, set[str], set[str]]:
    """Return this rank's share of the squared norm, and the names with non-finite values here:
    of gradients, and of the updates of the last step."""
    names: list[str] = []
    counted: list[bool] = []
    norms: list[torch.Tensor] = []

    def add(name: str, gradient: torch.Tensor, count: bool) -> None:
        names.append(name)
        counted.append(count)
        norms.append(_norm(gradient))

    for group in runtime.groups:
        for s, gradient in group.gradients.items():
            # In line B every row holds the same shards; one counts.
            add(group.parameters[s.parameter].name, gradient, s.row >= 0 or group.row == 0)
    for name, parameter in others:
        sharded = parameter.grad
        if isinstance(sharded, DTensor):
            coordinate = sharded.device_mesh.get_coordinate() or ()
            replicas = zip(coordinate, sharded.placements, strict=True)
            first = all(c == 0 for c, p in replicas if isinstance(p, Replicate))
            add(name, sharded.to_local(), first)
        elif sharded is not None:
            add(name, sharded, True)
    suspects, runtime.suspects = runtime.suspects, []
    finite = [f.to(torch.float64) for _, f in suspects]
    if not norms and not finite:
        return 0.0, set(), set()
    # One transfer for all: each would make the host wait for the device.
    flags = torch.stack([*norms, *finite]).tolist()
    values = flags[: len(norms)]
    spoiled = {n for (n, _), v in zip(suspects, flags[len(norms) :], strict=True) if not v}
    bad = {n for n, v in zip(names, values, strict=True) if not v < float("inf")}
    return sum(v * v for v, count in zip(values, counted, strict=True) if count), bad, spoiled
