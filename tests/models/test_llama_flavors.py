"""Llama 3.1 and 3.2 flavors: published sizes, published RoPE, torchtitan's checkpoint layout."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchtitan_dmuon.models.registry import get_model_spec


def _on_meta(flavor: str) -> Any:
    with torch.device("meta"):
        return get_model_spec("llama3", flavor, attn_backend="flex").model.build()


@pytest.mark.parametrize(
    ("flavor", "count"), [("3.2-3B", 3_212_749_824), ("3.1-8B", 8_030_261_248)]
)
def test_parameter_counts_are_the_published_ones(flavor: str, count: int) -> None:
    """The flavors have exactly the sizes of the released checkpoints."""
    model = _on_meta(flavor)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    num_parameters, _ = model.config.get_nparams_and_flops(model, 4096)
    assert num_parameters == count


@pytest.mark.parametrize(("flavor", "factor"), [("3.2-3B", 32.0), ("3.1-8B", 8.0)])
def test_rope_frequencies_match_transformers(flavor: str, factor: float) -> None:
    """RoPE is scaled by the published factor; torchtitan's default of 8 is wrong for 3.2."""
    model_config = get_model_spec("llama3", flavor, attn_backend="flex").model
    attention = model_config.layers[-1].attention
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=model_config.dim,
            num_attention_heads=attention.n_heads,
            max_position_embeddings=131072,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
    )
    # Row 1 of the cache is the rotation at position 1: its angles are the frequencies.
    attention.rope.max_seq_len = 2
    frequencies = attention.rope.build().cache[1].angle()
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=1e-6, atol=1e-6)
    # The frequencies that the factor touches are below the absolute tolerance: compare them too.
    assert frequencies[-1].item() == pytest.approx(reference.inv_freq[-1].item(), rel=1e-6)


def test_torchtitan_flavor_has_another_rope_than_llama_3_2() -> None:
    """The comparison above has power: torchtitan's "3B" differs from the published 3.2-3B."""
    ours = get_model_spec("llama3", "3.2-3B", attn_backend="flex").model
    theirs = get_model_spec("llama3", "3B", attn_backend="flex").model
    angles = []
    for config in (ours, theirs):
        rope = config.layers[0].attention.rope
        rope.max_seq_len = 2
        angles.append(rope.build().cache[1].angle()[-1].item())
    assert angles[1] == pytest.approx(4 * angles[0], rel=1e-5)


@pytest.mark.parametrize(("flavor", "base"), [("3.2-3B", "3B"), ("3.1-8B", "8B")])
def test_checkpoint_layout_is_torchtitans(flavor: str, base: str) -> None:
    """Separate QKV projections keep torchtitan's names and shapes, so checkpoints interchange."""
    ours, theirs = _on_meta(flavor).state_dict(), _on_meta(base).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


def test_queries_keys_and_values_are_separate_matrices() -> None:
    """A matrix optimizer finds Q, K and V as parameters of their own, initialised as torchtitan's.

    torchtitan's fused module draws q, k and v one after the other, so with the same seed its saved
    state must equal ours bit for bit.
    """
    states = []
    for flavor in ("3.2-3B", "3B"):
        model_config = get_model_spec("llama3", flavor, attn_backend="flex").model
        attention = model_config.layers[0].attention
        attention.rope.max_seq_len = 2
        module = attention.qkv_linear.build()
        torch.manual_seed(0)
        module.init_states()
        states.append(module.state_dict())
        names = [name for name, _ in module.named_parameters()]
        assert names == (
            ["wq.weight", "wk.weight", "wv.weight"] if flavor == "3.2-3B" else ["wqkv.weight"]
        )
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
