"""torchtitan's fused QKV weight: its matrices, and the tensors that a checkpoint has instead.

The fused weight has, for each KV head in turn, the rows of its query heads, then those of its key,
then those of its value.
"""

from __future__ import annotations

import re

import torch.nn as nn
from torchtitan.models.common.attention import FusedQKVLinear

from torchtitan_dmuon.checkpoint.held import Part
from torchtitan_dmuon.ownership import MatrixSpec
from torchtitan_dmuon.runtime.site import canonical_name


def fused_qkv_specs(model: nn.Module) -> dict[str, MatrixSpec]:
    """Return what a model's fused QKV weights hold: three matrices each.

    Returns:
        Pattern for the weight's canonical name -> its matrices Q, K and V.
    """
    specs = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedQKVLinear):
            rows = _rows(module)
            weight = re.escape(f"{canonical_name(name)}.wqkv.weight")
            blocks = module.wqkv.weight.shape[0] // sum(rows)
            specs[f"^{weight}$"] = MatrixSpec(rows=rows, blocks=blocks)
    return specs


def fused_qkv_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Return the tensors wq, wk and wv that checkpoints have instead of a fused one.

    torchtitan saves weights so; here it holds for the optimizer's state too.

    Returns:
        Canonical name of each fused weight and bias -> its parts.
    """
    result = {}
    for name, module in model.named_modules():
        if not isinstance(module, FusedQKVLinear):
            continue
        for kind, parameter in module.wqkv.named_parameters(recurse=False):
            prefix = canonical_name(name)
            result[f"{prefix}.wqkv.{kind}"] = _parts(
                prefix, kind, tuple(parameter.shape), _rows(module)
            )
    return result


def _rows(module: FusedQKVLinear) -> tuple[int, int, int]:
    head = module.head_dim
    return module.heads_per_kv * head, head, head


def _parts(
    prefix: str, kind: str, shape: tuple[int, ...], rows: tuple[int, int, int]
) -> list[Part]:
    width = 1 if len(shape) == 1 else shape[1]
    block = sum(rows)
    blocks = shape[0] // block
    parts, start = [], 0
    for name, count in zip(("wq", "wk", "wv"), rows, strict=True):
        runs = tuple(
            ((b * block + start) * width, count * width, b * count * width) for b in range(blocks)
        )
        parts.append(Part(f"{prefix}.{name}.{kind}", (blocks * count, *shape[1:]), runs))
        start += count
    return parts
