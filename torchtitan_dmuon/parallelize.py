"""The parallelize step of every model: the seam at which `[parallelism] mode` takes effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_dmuon.config.schema import Parallelism


def parallelize(
    model: nn.Module,
    *,
    parallelism: Parallelism,
    titan_parallelize: Callable[..., nn.Module],
    **kwargs: Any,
) -> nn.Module:
    """Apply tensor, activation and data parallelism to a model on the meta device.

    Args:
        model: A decoder, not yet sharded.
        parallelism: The resolved section; its mode selects who holds the weight matrices.
        titan_parallelize: torchtitan's own function for this model.
        **kwargs: What torchtitan passes to that function: parallel_dims, training,
            compile_config, ac_config, dump_folder.

    Returns:
        The same model, sharded.
    """
    match parallelism.mode:
        case "fsdp":
            return titan_parallelize(model, parallelism=parallelism, **kwargs)
        case "gather" | "owner":
            raise NotImplementedError(f'parallelism.mode "{parallelism.mode}" is not there yet')


def with_modes(spec: ModelSpec) -> ModelSpec:
    """Route a model's parallelize step through `parallelize`; changes and returns the spec."""
    spec.parallelize_fn = functools.partial(parallelize, titan_parallelize=spec.parallelize_fn)
    return spec
