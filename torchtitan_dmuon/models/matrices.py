"""The matrices of a model that owners are assigned to, known before any weight exists."""

from __future__ import annotations

from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_dmuon.models.fused_qkv import fused_qkv_specs
from torchtitan_dmuon.models.heads import head_specs
from torchtitan_dmuon.ownership import Matrix
from torchtitan_dmuon.runtime.select import find_layers, select


def model_matrices(spec: ModelSpec, *, per_head: bool = False) -> list[Matrix]:
    """Return every matrix inside the blocks of a decoder, in the model's order.

    They are those that `parallelize` gives owners to. Builds the model on the meta device.
    """
    with torch.device("meta"):
        model: Any = spec.model.build()
    blocks = set(model.layers.values())
    layers = find_layers(model, lambda name, module: module in blocks)
    specs = head_specs(model) if per_head else fused_qkv_specs(model)
    selected = select(model, layers, None, specs)
    return [m for layer in selected for p in layer.parameters for m in p.matrices]
