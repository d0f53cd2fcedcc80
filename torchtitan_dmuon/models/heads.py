"""Attention heads of torchtitan's decoders: matrices of their own, and what QK-clip scales."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear

from torchtitan_dmuon.optim.qk_clip import Attention, Rows
from torchtitan_dmuon.ownership import MatrixSpec
from torchtitan_dmuon.runtime.site import canonical_name


def head_specs(model: nn.Module) -> dict[str, MatrixSpec]:
    """Return specs by which each head's rows of Q, K and V are a matrix.

    Returns:
        Pattern for a weight's canonical name -> its matrices, one per head.
    """
    specs = {}
    for name, module in model.named_modules():
        prefix = canonical_name(name)
        if isinstance(module, QKVLinear | FusedQKVLinear):
            for kind, linear in module.named_children():
                heads = linear.weight.shape[0] // module.head_dim
                pattern = f"^{re.escape(f'{prefix}.{kind}.weight')}$"
                specs[pattern] = MatrixSpec(rows=(module.head_dim,) * heads)
    return specs


def attentions(model: nn.Module) -> list[Attention]:
    """Return the attention modules of a decoder for QK-clip.

    Raises:
        ValueError: there is none, or one normalises queries and keys, which bounds their products:
            scaling the weights before the norm would change nothing.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, GQAttention):
            continue
        prefix = canonical_name(name)
        if module.q_norm is not None:
            raise ValueError(
                f"qk_clip: {prefix} normalises queries and keys, so their weights have no scale "
                "that could be clipped; expected qk_clip = 0"
            )
        heads = tuple(map(tuple, _heads(module.qkv_linear, f"{prefix}.qkv_linear")))
        found.append(Attention(prefix, module.inner_attention, heads))
    if not found:
        raise ValueError(f"qk_clip: {type(model).__name__} has no attention that it knows")
    return found


def _heads(projection: Any, prefix: str) -> Iterator[list[Rows]]:
    """Yield for each key head its rows, and those of the query heads that share it."""
    size: int = projection.head_dim
    if isinstance(projection, FusedQKVLinear):
        shared, block = projection.heads_per_kv, projection.r_dim * size
        for head in range(projection.wqkv.weight.shape[0] // block):
            yield [
                part
                for kind, _ in projection.wqkv.named_parameters(recurse=False)
                for part in (
                    Rows(f"{prefix}.wqkv.{kind}", head * block, shared * size, True),
                    Rows(f"{prefix}.wqkv.{kind}", head * block + shared * size, size, False),
                )
            ]
        return
    assert isinstance(projection, QKVLinear)
    keys = projection.wk.weight.shape[0] // size
    shared = projection.wq.weight.shape[0] // size // keys
    for head in range(keys):
        yield [
            part
            for kind, _ in projection.wq.named_parameters(recurse=False)
            for part in (
                Rows(f"{prefix}.wq.{kind}", head * shared * size, shared * size, True),
                Rows(f"{prefix}.wk.{kind}", head * size, size, False),
            )
        ]
