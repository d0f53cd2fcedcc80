"""Attention heads of real models: matrices of their own, and what QK-clip scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.models.heads import attentions, head_specs
from torchtitan_dmuon.models.matrices import model_matrices
from torchtitan_dmuon.models.registry import get_model_spec
from torchtitan_dmuon.optim.qk_clip import QKClip, largest_logits

MODELS = [("qwen2_5", "debug"), ("llama3", "debugmodel")]
"""Separate projections with biases, and one fused weight that interleaves heads."""


def build(name: str, flavor: str, device: str = "cpu") -> Any:
    spec = get_model_spec(name, flavor, attn_backend="sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        model = spec.model.build()
    if device != "meta":
        model.init_states()
    return model


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_each_head_is_a_matrix(name: str, flavor: str) -> None:
    """As many matrices of head size as there are heads of Q, K and V; the rest as it is."""
    spec = get_model_spec(name, flavor, attn_backend="sdpa")
    whole, heads = model_matrices(spec), model_matrices(spec, per_head=True)
    assert sum(m.numel for m in whole) == sum(m.numel for m in heads)
    attention = build(name, flavor, "meta").layers["0"].attention
    size = attention.qkv_linear.head_dim
    projections = [m for m in heads if ".qkv_linear." in m.parameter and "layers.0." in m.parameter]
    rows = sum(p.shape[0] for p in attention.qkv_linear.parameters() if p.ndim == 2)
    assert len(projections) == rows // size
    assert {m.rows for m in projections} == {size} and all(m.contiguous for m in projections)
    assert [m for m in heads if ".qkv_linear." not in m.parameter] == [
        m for m in whole if ".qkv_linear." not in m.parameter
    ]


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_clipped_heads_give_the_threshold_again(name: str, flavor: str) -> None:
    """The rows that are scaled are those that made the logits, with rotary embedding, biases and
    fused projections: the first layer, whose input stays, ends at the threshold."""
    model = build(name, flavor)
    with torch.no_grad():
        for layer in model.layers.values():
            for p in layer.attention.qkv_linear.parameters():
                p.normal_(std=0.5)
    dmuon.dedicate_params(
        model,
        hook_boundary_predicate=lambda _, module: module in set(model.layers.values()),
        matrix_specs=head_specs(model),
        cost="model",
    )
    first = attentions(model)[0]
    seen: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attention_masks"]
        seen.append(largest_logits(args[0], args[1], scale=kwargs["scale"], mask=mask))

    first.inner.register_forward_pre_hook(note, with_kwargs=True)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, -1) % 9  # two documents

    def run() -> torch.Tensor:
        model(tokens, positions, model.get_attention_masks(positions)).float().sum().backward()
        return seen[-1].detach()

    before = run()
    threshold = float(before.mean())
    optimizer = dmuon.Muon(
        model, lr=0.0, adamw_lr=0.0, qk_clip=QKClip(attentions(model), threshold, 0.3)
    )
    optimizer.zero_grad()
    assert torch.equal(run(), before)
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(run(), before.clamp(max=threshold), rtol=1e-4, atol=1e-4)
    assert (before > threshold).any() and (before < threshold).any()


def test_models_that_normalise_queries_and_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qk_clip: layers\.0\.attention normalises queries"):
        attentions(build("qwen3", "debugmodel", "meta"))
    with pytest.raises(ValueError, match="qk_clip: Linear has no attention that it knows"):
        attentions(torch.nn.Linear(2, 2))
