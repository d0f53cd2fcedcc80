"""The state of a model with owned parameters and of its optimizer, as a checkpoint names it.

Keys are canonical parameter names. Neither owners nor ranks, groups, wrappers or the way in which
matrices share a parameter are part of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan_dmuon.checkpoint.held import HeldTensor, Part
from torchtitan_dmuon.optim.owner_optimizer import OwnerOptimizer
from torchtitan_dmuon.optim.saved import SavedState
from torchtitan_dmuon.runtime.dedicate import runtime_of
from torchtitan_dmuon.runtime.site import canonical_name

Parts = Mapping[str, Sequence[Part]]
"""The parts of parameters that the checkpoint has as several tensors, by canonical name."""


class ModelState:
    """The weights of a model with owned parameters; DCP's `Stateful`.

    Each owned weight is what its owner holds of it: the FP32 master. What `fully_shard` holds is as
    FSDP2 saves it, with persistent buffers. Loading writes in place; copies follow their masters
    before the next forward.

    Args:
        model: That `dedicate_params` was called on.
        parts: Parameters that the checkpoint has under other names.
    """

    def __init__(self, model: nn.Module, parts: Parts | None = None) -> None:
        self.model = model
        self.parts = parts or {}
        runtime_of(model)

    def state_dict(self) -> dict[str, Any]:
        """Return live tensors, without communication."""
        runtime = runtime_of(self.model)
        owned = {e.parameter: (g, i) for g in runtime.groups for i, e in enumerate(g.parameters)}
        result: dict[str, Any] = {}
        for long, parameter in self.model.named_parameters(remove_duplicate=False):
            name = canonical_name(long)
            if parameter not in owned:
                result[name] = parameter.detach()
                continue
            group, index = owned[parameter]
            mine = [(s.start, group.masters[s]) for s in group.owned if s.parameter == index]
            for part in _parts(self.parts, name, group.parameters[index].shape):
                result[part.name] = part.hold(group.precision.master, mine)
        result.update(_buffers(self.model))
        result.update({key: m.get_extra_state() for key, m in _with_extra_state(self.model)})
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note that masters were written: nothing computes before the copies have followed."""
        for key, module in _with_extra_state(self.model):
            module.set_extra_state(state_dict[key])
        runtime_of(self.model).mark_stale()


class OptimizerState:
    """The state of optimizers; DCP's `Stateful`.

    Settings (learning rates, weight decay, ...) are saved where `state_dict` of the optimizers has
    them, and never loaded: those of the running job hold.

    Args:
        read: Returns the state by flat name (`state.<parameter>.<key>`), made if need be.
        parts: As for `ModelState`.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], parts: Parts | None = None) -> None:
        self.read = read
        self.parts = parts or {}

    def state_dict(self) -> dict[str, Any]:
        """Return live tensors, without communication."""
        result: dict[str, Any] = {}
        for key, value in self.read().items():
            name, _, entry = key.removeprefix("state.").rpartition(".")
            split = self.parts.get(name, ()) if key.startswith("state.") else ()
            whole = not isinstance(value, torch.Tensor) or not value.ndim
            stretches = None if whole or not split else _stretches(value)
            if stretches is None and not (whole and split):
                result[key] = value
                continue
            for part in split:
                result[f"state.{part.name}.{entry}"] = (
                    value if stretches is None else part.hold(value.dtype, stretches)
                )
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: loading has written in place."""


def owner_state(optimizer: OwnerOptimizer, parts: Parts | None = None) -> dict[str, Any]:
    """Return an optimizer's state as a checkpoint names it: `state.<parameter>.<key>`.

    The same names on every rank; owned state is a `HeldTensor`.
    """
    result: dict[str, Any] = {}
    for saved in optimizer.saved_state():
        if saved.value is not None:
            result[f"state.{saved.parameter}.{saved.key}"] = saved.value
            continue
        split = (parts or {}).get(saved.parameter, ())
        if saved.stretches is not None:
            for part in split or [Part.whole(saved.parameter, saved.shape)]:
                held = part.hold(saved.dtype, saved.stretches)
                result[f"state.{part.name}.{saved.key}"] = held
            continue
        origin = (0,) * len(saved.shape)
        for name in _names(saved, split):
            held = HeldTensor(saved.shape, saved.dtype, [(origin, t) for t in saved.tensors[:1]])
            result[f"state.{name}.{saved.key}"] = held
    return result


def _names(saved: SavedState, split: Sequence[Part]) -> list[str]:
    """Return what state that is not elementwise belongs to in the checkpoint.

    A matrix that the checkpoint has as a tensor of its own (Q of a fused QKV) goes by that name.
    """
    matrix = saved.matrix
    if matrix is None:
        return [part.name for part in split] or [saved.parameter]
    for part in split:
        if part.shape == matrix.shape and part.runs[0][0] == matrix.offset:
            return [part.name]
    return [matrix.name]


class RandomState:
    """The random generators of this rank; DCP's `Stateful`.

    A rank continues with what was saved for its number; one without keeps what it was seeded with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the states of torch's, Python's and numpy's generators."""
        version, words, gauss = random.getstate()
        algorithm, keys, position, has_gauss, cached = np.random.get_state()
        key_words = np.asarray(keys).tolist()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": [version, list(words), gauss],
            "numpy": [algorithm, key_words, int(position), int(has_gauss), float(cached)],
        }
        if self.device.type != "cpu":
            state["device"] = torch.get_device_module(self.device).get_rng_state()
        return {f"rank_{self.rank}": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators."""
        state = state_dict[f"rank_{self.rank}"]
        torch.set_rng_state(state["torch"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(state["numpy"]))
        if "device" in state:
            torch.get_device_module(self.device).set_rng_state(state["device"])


def _parts(parts: Parts, name: str, shape: Sequence[int]) -> Sequence[Part]:
    return parts.get(name) or [Part.whole(name, shape)]


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield canonical_name(f"{prefix}._extra_state" if prefix else "_extra_state"), module


def _stretches(value: torch.Tensor) -> list[tuple[int, torch.Tensor]] | None:
    """Return what this rank holds of a tensor as stretches, or None if it holds no such."""
    if not isinstance(value, DTensor):
        return [(0, value.detach().view(-1))]
    if any(not isinstance(p, Replicate) and p != Shard(0) for p in value.placements):
        return None  # tensor parallelism cuts otherwise
    _, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    local = value.to_local().detach()
    width = value.shape[1:].numel()
    return [(offsets[0] * width, local.view(-1))] if local.numel() else []
