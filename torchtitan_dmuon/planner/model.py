"""What a plan has to know of a model: its layers, what is outside them, and its activations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_dmuon.config.build import build_activation_checkpoint, build_loss
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.config.schema import JobConfig
from torchtitan_dmuon.models.fused_qkv import fused_qkv_specs
from torchtitan_dmuon.models.heads import head_specs
from torchtitan_dmuon.models.registry import get_model_spec
from torchtitan_dmuon.ownership import Layer
from torchtitan_dmuon.planner.activations import (
    FusedAttention,
    LayerBytes,
    measure_layer,
    measure_loss,
)
from torchtitan_dmuon.runtime.select import find_layers, select


@dataclass(frozen=True, slots=True)
class Description:
    """A model on one GPU, for one micro-batch.

    Attributes:
        layers: The layers' owned parameters.
        layer_bytes: Of each layer, its activations.
        hidden_bytes: A hidden state: (batch, sequence, width) in the compute dtype.
        loss_bytes: Most that the output head and the loss hold at once.
        rest: Elements of each parameter outside the layers; tied ones once.
        head_elements: Elements of the output head.
        embedding_elements: Elements of the embedding.
        tied: Whether the two are one parameter.
        parameters: Elements of all parameters.
    """

    layers: tuple[Layer, ...]
    layer_bytes: tuple[LayerBytes, ...]
    hidden_bytes: int
    loss_bytes: int
    rest: dict[str, int]
    head_elements: int
    embedding_elements: int
    tied: bool
    parameters: int


def describe(config: JobConfig) -> Description:
    """Build a job's model on the meta device and read it.

    Raises:
        ConfigError: there is no such model, or its layers do not run on the meta device.
    """
    name, flavor = config.model.name, config.model.flavor
    spec = get_model_spec(name, flavor, attn_backend="sdpa")
    with torch.device("meta"):
        model: Any = spec.model.build()
    blocks = set(model.layers.values())
    found = find_layers(model, lambda _, module: module in blocks)
    specs = head_specs(model) if config.optimizer.per_head else fused_qkv_specs(model)
    layers = tuple(layer.as_layer() for layer in select(model, found, None, specs))
    owned = {p.name for layer in layers for p in layer.parameters}
    every = {n: p.numel() for n, p in model.named_parameters()}
    rest = {n: numel for n, numel in every.items() if n not in owned}
    kinds = [_kind(block) for block in model.layers.values()]
    try:
        layer_bytes, hidden, loss = _activations(model, config, kinds)
    # Whatever a model's own layers raise without data.
    except Exception as e:
        text = " ".join(str(e).split())
        raise ConfigError(
            f"model {name} {flavor}: its layers cannot be counted without running them: "
            f"{type(e).__name__}: {text}"
        ) from e
    return Description(
        layers=layers,
        layer_bytes=layer_bytes,
        hidden_bytes=hidden,
        loss_bytes=loss,
        rest=rest,
        head_elements=model.lm_head.weight.numel(),
        embedding_elements=model.tok_embeddings.weight.numel(),
        tied=bool(model.enable_weight_tying),
        parameters=sum(every.values()),
    )


def _kind(block: nn.Module) -> str:
    """Return a text that is equal for layers with the same activations."""
    shapes = [(n, tuple(p.shape)) for n, p in block.named_parameters()]
    return f"{type(block).__qualname__} {shapes}"


def _activations(
    model: Any, config: JobConfig, kinds: list[str]
) -> tuple[tuple[LayerBytes, ...], int, int]:
    training = config.training
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    batch, length = training.local_batch_size, training.seq_len
    width = model.tok_embeddings.weight.shape[1]
    model.to(dtype)
    for module in list(model.modules()):
        if hasattr(module, "inner_attention"):
            module.inner_attention = FusedAttention()
    checkpointing = build_activation_checkpoint(config)
    if checkpointing is not None and config.activation_checkpoint.mode != "memory_budget":
        copy.deepcopy(checkpointing).build(dump_folder="").apply(model)
    hidden = torch.empty(batch, length, width, dtype=dtype, device="meta")
    positions = torch.empty(batch, length, dtype=torch.int64, device="meta")
    measured: dict[str, LayerBytes] = {}
    for kind, block in zip(kinds, model.layers.values(), strict=True):
        if kind not in measured:
            measured[kind] = measure_layer(block, hidden, None, positions)
    loss = measure_loss(_loss(model, config), model.lm_head, hidden)
    return tuple(measured[kind] for kind in kinds), hidden.nbytes, loss


def _loss(model: Any, config: JobConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    loss = build_loss(config, model.lm_head.weight.shape[0]).build()
    training = config.training
    labels = torch.empty(
        training.local_batch_size, training.seq_len, dtype=torch.int64, device="meta"
    )
    tokens = torch.empty((), device="meta")
    if config.loss.name == "chunked_cross_entropy":
        loss.set_lm_head(model.lm_head)
        return lambda hidden: loss(hidden, labels, tokens)[0]
    return lambda hidden: loss(model.lm_head(hidden), labels, tokens)[0]
