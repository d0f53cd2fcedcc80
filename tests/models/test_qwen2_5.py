"""Qwen2.5 against transformers' Qwen2: forward, gradients, names and sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchtitan_dmuon.models.qwen2_5 import (
    QWEN2_5_SIZES,
    Qwen2_5Size,
    Qwen2_5StateDictAdapter,
    qwen2_5_config,
)
from torchtitan_dmuon.models.registry import get_model_spec

ATOL = 1e-5
BATCH, LENGTH = 2, 24


def _tiny(tied: bool) -> Qwen2_5Size:
    """Grouped queries, and widths that all differ, so that a wrong reshape cannot pass."""
    return Qwen2_5Size(
        dim=48,
        n_layers=3,
        n_heads=6,
        n_kv_heads=2,
        hidden_dim=88,
        vocab_size=101,
        tied=tied,
        max_seq_len=64,
    )


def _reference(size: Qwen2_5Size) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        hidden_size=size.dim,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_kv_heads,
        intermediate_size=size.hidden_dim,
        vocab_size=size.vocab_size,
        tie_word_embeddings=size.tied,
        max_position_embeddings=size.max_seq_len,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights and biases too: at their usual ones and zeros they would test nothing.
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=spread)
    return model


def _ours(size: Qwen2_5Size) -> tuple[Any, Qwen2_5StateDictAdapter]:
    config = qwen2_5_config(size, attn_backend="sdpa")
    model = config.build()
    model.init_states()
    return model, Qwen2_5StateDictAdapter(config, None)


def _forward(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, positions, model.get_attention_masks(positions))
    return logits


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # The mean per sequence, summed: gradients of order one, for which an absolute bound is sharp.
    return BATCH * F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_match_transformers(tied: bool) -> None:
    """The model computes what Hugging Face's Qwen2 computes, forwards and backwards."""
    size = _tiny(tied)
    reference = _reference(size)
    model, adapter = _ours(size)
    model.load_state_dict(adapter.from_hf(reference.state_dict()))
    tokens, labels = torch.randint(0, size.vocab_size, (2, BATCH, LENGTH))

    logits = _forward(model, tokens, torch.arange(LENGTH).expand(BATCH, -1))
    expected = reference(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)

    torch.autograd.backward(_loss(logits, labels))
    torch.autograd.backward(_loss(expected, labels))
    gradients = adapter.to_hf({name: p.grad for name, p in model.named_parameters()})
    expected_gradients = {name: p.grad for name, p in reference.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert gradient is not None and gradient.abs().max() > 1e-2, (
            f"{name}: too small for the bound to mean much"
        )
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=ATOL, msg=name)


def test_packed_documents_match_transformers_one_by_one() -> None:
    """Documents packed into one sequence do not see each other, and positions restart."""
    size = _tiny(tied=False)
    reference = _reference(size)
    model, adapter = _ours(size)
    model.load_state_dict(adapter.from_hf(reference.state_dict()))
    documents = [torch.randint(0, size.vocab_size, (1, length)) for length in (5, 1, 9)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    logits = _forward(model, torch.cat(documents, dim=1), positions)
    expected = torch.cat([reference(input_ids=d).logits for d in documents], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("tied", [False, True])
def test_adapter_round_trips_exactly(tied: bool) -> None:
    """No key or bit is lost from Hugging Face and back, nor from here to there and back."""
    size = _tiny(tied)
    model, adapter = _ours(size)
    hf_names = set(dict(_reference(size).named_parameters()))
    state_dict = model.state_dict()
    there = adapter.to_hf(state_dict)
    assert set(there) == hf_names
    back = adapter.from_hf(there)
    assert set(there) == hf_names, "the argument of from_hf was changed"
    assert back.keys() == state_dict.keys()
    assert all(torch.equal(back[name], value) for name, value in state_dict.items())
    again = adapter.to_hf(back)
    assert again.keys() == there.keys()
    assert all(torch.equal(again[name], value) for name, value in there.items())


def test_adapter_accepts_both_forms_of_a_tied_checkpoint() -> None:
    """Tied checkpoints come with and without the head, and old ones with RoPE frequencies."""
    size = _tiny(tied=True)
    model, adapter = _ours(size)
    checkpoint = _reference(size).state_dict()
    assert "lm_head.weight" in checkpoint
    checkpoint["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    full = adapter.from_hf(checkpoint)
    del checkpoint["lm_head.weight"]
    short = adapter.from_hf(checkpoint)
    for state_dict in (full, short):
        model.load_state_dict(state_dict, strict=True)
        assert state_dict["lm_head.weight"] is not None
    assert torch.equal(full["lm_head.weight"], short["lm_head.weight"])
    del checkpoint["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="neither"):
        adapter.from_hf(checkpoint)


@pytest.mark.parametrize(
    ("direction", "key"),
    [
        ("from_hf", "model.layers.0.self_attn.q_norm.weight"),
        ("from_hf", "model.layers.0.self_attn.o_proj.bias"),
        ("from_hf", "model.layers.3.self_attn.q_proj.weight"),
        ("from_hf", "transformer.wte.weight"),
        ("to_hf", "layers.0.attention.wo.bias"),
        ("to_hf", "layers.3.attention.wo.weight"),
        ("to_hf", "output.weight"),
    ],
)
def test_adapter_names_an_unknown_key(direction: str, key: str) -> None:
    """A checkpoint of another model is refused with the key, not loaded in part."""
    _, adapter = _ours(_tiny(tied=False))
    with pytest.raises(ValueError, match="unknown key") as error:
        getattr(adapter, direction)({key: torch.zeros(1)})
    assert repr(key) in str(error.value)


@pytest.mark.parametrize(
    ("flavor", "count"),
    [
        ("debug", 1_263_744),
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("7B", 7_615_616_512),
        ("32B", 32_763_876_352),
    ],
)
def test_parameter_counts_are_the_published_ones(flavor: str, count: int) -> None:
    """The flavors have exactly the sizes of the released checkpoints; tied weights count once."""
    with torch.device("meta"):
        model = get_model_spec("qwen2_5", flavor, attn_backend="flex").model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    num_parameters, flops_per_token = model.config.get_nparams_and_flops(model, 4096)
    size = QWEN2_5_SIZES[flavor]
    embedding = 0 if size.tied else size.vocab_size * size.dim
    attention = 12 * size.n_layers * size.dim * 4096
    assert num_parameters == count
    assert flops_per_token == 6 * (count - embedding) + attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "must divide dim"),
        ({"n_kv_heads": 4}, "multiple of"),
        ({"dim": 18}, "even"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    """A size that cannot be split into heads fails when stated, not in the first forward."""
    fields = {name: getattr(_tiny(False), name) for name in Qwen2_5Size.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        Qwen2_5Size(**{**fields, **changes})


@pytest.mark.parametrize("tied", [False, True])
def test_initialisation_is_qwens(tied: bool) -> None:
    """Std 0.02, residual outputs 0.02 / sqrt(2 layers), biases 0, norms 1, tied or not."""
    size = Qwen2_5Size(
        dim=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=256,
        vocab_size=512,
        tied=tied,
        max_seq_len=16,
    )
    torch.manual_seed(3)
    model, _ = _ours(size)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("wo.weight", "w2.weight"))
            std = 0.01 if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
