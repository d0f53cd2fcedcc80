"""Initialisation whose bits do not depend on how the parameters are sharded.

Weights at step 0 must be the same for any number of ranks, or runs on different clusters cannot be
compared. DTensor does not give that: on CPU its random operations draw every shard from the same
global stream, so all shards of a parameter are equal, and elsewhere the result is tied to the
device's generator and to DTensor's own bookkeeping of offsets.

Here every rank draws the full parameter as a plain tensor and keeps its own shard, or what it owns
of it. That needs the same seed on all ranks (torchtitan's ``set_determinism`` sees to it) and the
same parameters in the same order. Pipeline stages have neither: torchtitan seeds them differently
on purpose.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# Private, but the only name for the layout FSDP2 gives a tensor-parallel parameter.
from torch.distributed.tensor.placement_types import _StridedShard
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module

from torchtitan_dmuon.runtime.api import write_full
from torchtitan_dmuon.runtime.dedicate import runtime_of

__all__ = ["LayoutIndependentInit", "init_through_owners", "make_init_layout_independent"]


def make_init_layout_independent(model_config: Module.Config) -> None:
    """Wrap every ``param_init`` in the config tree, in place, so that sharding does not matter.

    Why: on CPU DTensor's random operations draw each shard from the same stream, so all shards of
    a parameter come out equal, and weights must not depend on the number of ranks. Call it before
    the model is built. Calling it twice changes nothing.

    ``skip_param_init`` stays as it is: no draw and no allocation. A module without ``param_init``
    falls back to its ``reset_parameters``, which this cannot reach; none of our models has one
    with parameters.
    """
    for _, config, _, _ in model_config.traverse(Module.Config, recurse=True):
        if config.param_init is not None:
            # A new dict: torchtitan shares one between configs, models even.
            config.param_init = {name: _wrap(init) for name, init in config.param_init.items()}


def init_through_owners(model: nn.Module) -> None:
    """Let the initialisation of a model hand owned parameters to their owners.

    Call it before `dedicate_params`, which changes the dtype that parameters have: weights are
    drawn in the one that they have now. The model's config stays as it is.
    """
    for module in model.modules():
        inits = getattr(module, "_param_init", None)
        if inits is not None:
            own = dict(module.named_parameters(recurse=False))
            module._param_init = {  # type: ignore[assignment]
                name: _Owned(init, model, own[name].dtype)
                if name in own and isinstance(init, LayoutIndependentInit)
                else init
                for name, init in inits.items()
            }


def _wrap(init: Callable[..., Any]) -> Callable[..., Any]:
    if init is skip_param_init or isinstance(init, LayoutIndependentInit):
        return init
    return LayoutIndependentInit(init)


class LayoutIndependentInit:
    """An initialiser that treats a DTensor as the full tensor it stands for.

    A plain tensor goes straight to ``init``. For a DTensor, ``init`` fills a plain tensor of the
    global shape, the parameter's dtype and the local shard's device; the local shard is then
    copied from it. No communication. The full tensor is freed on return, so at most one full
    parameter lives at a time.

    Raises:
        NotImplementedError: the DTensor has a placement other than replicate or shard, or is
            strided over more than one mesh axis.
        RuntimeError: the shard computed here and the local tensor differ in shape.
    """

    # Not a dataclass: torchtitan's Config.to_dict would take it apart instead of printing it.
    __slots__ = ("init",)

    def __init__(self, init: Callable[[torch.Tensor], Any]) -> None:
        self.init = init

    def __repr__(self) -> str:
        return f"LayoutIndependentInit({self.init!r})"

    def __call__(self, param: torch.Tensor) -> None:
        if not isinstance(param, DTensor):
            self.init(param)
            return
        with torch.no_grad():
            local = param.to_local()
            full = torch.empty(param.shape, dtype=param.dtype, device=local.device)
            self.init(full)
            coordinate = param.device_mesh.get_coordinate()
            if coordinate is None:  # This rank holds nothing, but its stream moved with the rest.
                return
            shard = _local_shard(full, param.device_mesh, param.placements, coordinate)
            if shard.shape != local.shape:
                raise RuntimeError(
                    f"shard of a {tuple(param.shape)} parameter with placements "
                    f"{param.placements} on mesh {tuple(param.device_mesh.shape)} should be "
                    f"{tuple(shard.shape)} but the local tensor is {tuple(local.shape)}"
                )
            local.copy_(shard)


class _Owned:
    """An initialiser that draws an owned parameter in full, and keeps what this rank owns of it."""

    __slots__ = ("dtype", "init", "model")

    def __init__(self, init: LayoutIndependentInit, model: nn.Module, dtype: torch.dtype) -> None:
        self.init = init
        self.model = model
        self.dtype = dtype

    def __call__(self, param: nn.Parameter) -> None:
        if isinstance(param, DTensor) or param not in runtime_of(self.model).owned_parameters():
            self.init(param)
            return
        with torch.no_grad():
            full = torch.empty(param.shape, dtype=self.dtype, device=param.device)
            self.init(full)
            write_full(self.model, param, full)


def _local_shard(
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """Return the view of ``full`` that the rank at ``coordinate`` holds.

    Shards are cut as ``torch.chunk`` does: ceil(n / ranks) rows each, the last ones short or empty.

    Plain shards are cut first, in mesh order, then the strided one: FSDP2 marks its axis strided
    when it cut a parameter that tensor parallelism had cut before. ``distribute_tensor`` would
    cut in mesh order, which gives other rows when the cuts are uneven (7 rows, 3 x 2 ranks).
    """
    strided = [isinstance(placement, _StridedShard) for placement in placements]
    if sum(strided) > 1:
        raise NotImplementedError(f"more than one strided placement: {tuple(placements)}")
    for axis in sorted(range(mesh.ndim), key=strided.__getitem__):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise NotImplementedError(
                f"cannot initialise a parameter with placement {placement}; "
                f"replicate and shard are supported"
            )
        length = full.size(placement.dim)
        chunk = -(-length // mesh.size(axis))
        start = min(coordinate[axis] * chunk, length)
        full = full.narrow(placement.dim, start, min(chunk, length - start))
    return full
