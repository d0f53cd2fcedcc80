"""Qwen1.5-MoE against transformers' Qwen2-MoE: forward, gradients, load balancing, names, sizes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.models.matrices import model_matrices
from torchtitan_dmuon.models.qwen_moe import (
    QWEN_MOE_SIZES,
    QwenMoESize,
    QwenMoEStateDictAdapter,
    qwen_moe_config,
)
from torchtitan_dmuon.models.qwen_moe.experts import QwenMoEExperts, grouped_linear
from torchtitan_dmuon.models.qwen_moe.moe import QwenMoERouter
from torchtitan_dmuon.models.registry import get_model_spec

ATOL = 1e-5
BATCH, LENGTH = 2, 24
COEF = 0.5
"""Large, so that the loss of the load is no rounding error beside the other."""

# Widths that all differ, so that a wrong reshape cannot pass.
TINY = QwenMoESize(
    dim=48,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    expert_hidden_dim=40,
    shared_hidden_dim=88,
    n_experts=5,
    top_k=3,
    vocab_size=101,
    max_seq_len=64,
    aux_loss_coef=COEF,
)


def reference_model(size: QwenMoESize) -> Qwen2MoeForCausalLM:
    """Return transformers' model of a size, with random norms and biases too."""
    config = Qwen2MoeConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_kv_heads,
        moe_intermediate_size=size.expert_hidden_dim,
        shared_expert_intermediate_size=size.shared_hidden_dim,
        num_experts=size.n_experts,
        num_experts_per_tok=size.top_k,
        vocab_size=size.vocab_size,
        max_position_embeddings=size.max_seq_len,
        router_aux_loss_coef=size.aux_loss_coef,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = Qwen2MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights and biases too: at their usual ones and zeros they would test nothing.
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=spread)
    return model


def hub_state(model: Qwen2MoeForCausalLM, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors of transformers' model under the names that files on the hub have."""
    result = {}
    for name, value in values.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, both in enumerate(value):
                result[f"{prefix}.{e}.gate_proj.weight"] = both.chunk(2)[0]
                result[f"{prefix}.{e}.up_proj.weight"] = both.chunk(2)[1]
        elif last == "down_proj":
            result |= {f"{prefix}.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            result[name] = value
    return result


def _ours(size: QwenMoESize) -> tuple[Any, QwenMoEStateDictAdapter]:
    config = qwen_moe_config(size, attn_backend="sdpa")
    model = config.build()
    model.init_states()
    return model, QwenMoEStateDictAdapter(config, None)


def _pair(size: QwenMoESize = TINY) -> tuple[Any, QwenMoEStateDictAdapter, Qwen2MoeForCausalLM]:
    reference = reference_model(size)
    model, adapter = _ours(size)
    model.load_state_dict(adapter.from_hf(hub_state(reference, reference.state_dict())))
    return model, adapter, reference


def _forward(model: Any, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    return model(tokens, positions, model.get_attention_masks(positions))


def _gradients(
    model: Any, adapter: QwenMoEStateDictAdapter, reference: Any
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    ours = adapter.to_hf({name: p.grad for name, p in model.named_parameters()})
    theirs = hub_state(reference, {n: p.grad for n, p in reference.named_parameters()})
    assert ours.keys() == theirs.keys()
    return [(name, ours[name], value) for name, value in theirs.items()]


@pytest.mark.parametrize("coef", [0.0, COEF])
def test_logits_and_gradients_match_transformers(coef: float) -> None:
    """The model computes what Hugging Face's Qwen2-MoE computes, forwards and backwards, with and
    without the loss that balances the load of all layers."""
    size = QwenMoESize(**{f: getattr(TINY, f) for f in TINY.__dataclass_fields__} | {
        "aux_loss_coef": coef
    })  # fmt: skip
    model, adapter, reference = _pair(size)
    tokens, labels = torch.randint(0, size.vocab_size, (2, BATCH, LENGTH))
    output = reference(input_ids=tokens, output_router_logits=True)
    logits = _forward(model, tokens)
    torch.testing.assert_close(logits, output.logits, rtol=0, atol=ATOL)

    # The mean per sequence, summed: gradients of order one, for which an absolute bound is sharp.
    torch.autograd.backward(BATCH * F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    expected = BATCH * F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.autograd.backward(expected + coef * output.aux_loss)
    if coef:
        torch.testing.assert_close(model.load_balancing, output.aux_loss.detach())
    for name, gradient, other in _gradients(model, adapter, reference):
        assert other.abs().max() > 1e-3, f"{name}: too small for the bound to mean much"
        torch.testing.assert_close(gradient, other, rtol=0, atol=ATOL, msg=name)


@pytest.mark.parametrize("how", ["sum", "chunked", "recomputed"])
def test_load_balancing_counts_once(how: str) -> None:
    """A step of two micro-batches, with torchtitan's summed or chunked loss or with recomputed
    layers, has the mean of the load-balancing losses of its micro-batches, as transformers."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC

    model, adapter, reference = _pair()
    model.config.aux_loss_share = 1 / 2
    tokens, labels = torch.randint(0, TINY.vocab_size, (2, 2, BATCH, LENGTH))
    for part, label in zip(tokens, labels, strict=True):
        output = reference(input_ids=part, output_router_logits=True)
        loss = F.cross_entropy(output.logits.flatten(0, 1), label.flatten())
        torch.autograd.backward((loss + COEF * output.aux_loss) / 2)

    loss_fn: Any = CrossEntropyLoss.Config().build()
    if how == "chunked":
        loss_fn = ChunkedLossWrapper.Config(num_chunks=4).build()
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    if how == "recomputed":
        FullAC.Config().build(dump_folder="").apply(model)
    for part, label in zip(tokens, labels, strict=True):
        loss_fn(_forward(model, part), label, torch.tensor(labels.numel()))[0].backward()
    renamed = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
    found = adapter.to_hf({n: p.grad for n, p in renamed.items()})
    theirs = hub_state(reference, {n: p.grad for n, p in reference.named_parameters()})
    for name, gradient in theirs.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=ATOL / 2, msg=name)


def test_evaluation_leaves_the_load_alone() -> None:
    """Neither evaluation nor a coefficient of zero has a trace of the loss in its graph."""
    model, _, _ = _pair()
    tokens = torch.randint(0, TINY.vocab_size, (BATCH, LENGTH))
    trained = _forward(model, tokens)
    model.eval()
    torch.testing.assert_close(_forward(model, tokens), trained, rtol=0, atol=0)
    torch.autograd.backward(_forward(model, tokens).sum() * 0)
    assert not model.layers["0"].moe.router.gate.weight.grad.any()
    model.train()
    torch.autograd.backward(_forward(model, tokens).sum() * 0)
    assert model.layers["0"].moe.router.gate.weight.grad.any()


def test_packed_documents_match_transformers_one_by_one() -> None:
    """Documents packed into one sequence do not see each other, and positions restart."""
    model, _, reference = _pair()
    documents = [torch.randint(0, TINY.vocab_size, (1, length)) for length in (5, 1, 9)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    logits = _forward(model, torch.cat(documents, dim=1), positions)
    expected = torch.cat([reference(input_ids=d).logits for d in documents], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=ATOL)


# -- experts -----------------------------------------------------------------------------------

COUNTS = [(7, 0, 12, 5), (0, 0, 24, 0), (0, 11, 0, 0), (3, 9, 1, 2)]


def _rows(counts: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Any:
    """Return rows, weights, ends and the gradient of the products, for these counts."""
    torch.manual_seed(3)
    x = torch.randn(sum(counts), 32, device=device).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), 24, 32, device=device).to(dtype).requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    return x, weight, ends, torch.randn(sum(counts), 24, device=device).to(dtype)


def _check_products(counts: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, weight, ends, gradient = _rows(counts, dtype, device)
    out = grouped_linear(x, weight, ends)
    out.backward(gradient)
    # In float64, rounded once at the end.
    wide_x, wide_w = x.detach().double(), weight.detach().double()
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start := start + count)
        wide = gradient[rows].double()
        for found, exact in (
            (out[rows], wide_x[rows] @ wide_w[e].T),
            (x.grad[rows], wide @ wide_w[e]),
            (weight.grad[e], wide.T @ wide_x[rows]),
        ):
            assert found.dtype == dtype
            error = (found.double() - exact).norm()
            assert error <= rounding * exact.norm(), f"expert {e}"
        if not count:
            assert not weight.grad[e].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_products_are_each_experts_own(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Forward and both gradients, within one rounding of the result; experts without tokens, first,
    last or next to each other, get a gradient of zeros."""
    _check_products(counts, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_gemm_is_each_experts_own(counts: tuple[int, ...]) -> None:
    """The same of torch's grouped GEMM on CUDA."""
    _check_products(counts, torch.bfloat16, "cuda")


def test_compiled_products_are_the_same() -> None:
    """torch.compile takes the products as one operation, whatever the counts are."""
    x, weight, ends, gradient = _rows(COUNTS[0], torch.float32)
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    compiled(x, weight, ends).backward(gradient)
    again = _rows(COUNTS[0], torch.float32)
    grouped_linear(*again[:3]).backward(gradient)
    assert torch.equal(x.grad, again[0].grad) and torch.equal(weight.grad, again[1].grad)


def test_experts_keep_the_dtype_of_their_input() -> None:
    """float32 is not rounded to bfloat16 on the way, as torchtitan's experts would."""
    torch.manual_seed(0)
    experts: Any = QwenMoEExperts.Config(dim=16, hidden_dim=8, num_experts=2).build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 16)
    out = experts(x, torch.tensor([0, 5]))
    w1, w2, w3 = experts.w1_EFD[1], experts.w2_EDF[1], experts.w3_EFD[1]
    torch.testing.assert_close(out, (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
    assert experts.bfloat16()(x.bfloat16(), torch.tensor([2, 3])).dtype == torch.bfloat16


def test_router_computes_in_float32() -> None:
    """With bfloat16 weights logits are not rounded before the softmax, on any device."""
    torch.manual_seed(0)
    config = qwen_moe_config(TINY, attn_backend="sdpa").layers[0].moe.router
    router: Any = config.build()
    assert isinstance(router, QwenMoERouter)
    torch.nn.init.normal_(router.gate.weight)
    router.bfloat16()
    x = torch.randn(2, 3, TINY.dim).bfloat16()
    values, chosen, scores = router(x)
    exact = (x.double() @ router.gate.weight.double().T).softmax(-1)
    assert values.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(values, scores.gather(-1, chosen))


def test_even_load_has_the_least_loss() -> None:
    """torchtitan's switch for tests, which spreads tokens evenly, reaches the loss: it is top_k."""
    model, _, _ = _pair()
    for layer in model.layers.values():
        layer.moe.router._debug_force_load_balance = True
    _forward(model, torch.randint(0, TINY.vocab_size, (5, 5)))
    torch.testing.assert_close(model.load_balancing, torch.tensor(float(TINY.top_k)))


# -- names and sizes ---------------------------------------------------------------------------


def test_adapter_round_trips_exactly() -> None:
    """No key or bit is lost from the hub's files and back, nor from here to there and back."""
    model, adapter = _ours(TINY)
    reference = reference_model(TINY)
    names = set(hub_state(reference, reference.state_dict()))
    state = model.state_dict()
    there = adapter.to_hf(state)
    assert set(there) == names
    back = adapter.from_hf(there)
    assert set(there) == names, "the argument of from_hf was changed"
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("direction", "key", "message"),
    [
        ("from_hf", "model.layers.0.mlp.gate_proj.weight", "unknown key"),
        ("from_hf", "model.layers.3.self_attn.q_proj.weight", "has 3 layers"),
        ("from_hf", "model.layers.0.mlp.experts.5.up_proj.weight", "has 5 experts"),
        ("from_hf", "model.layers.0.mlp.experts.4.up_proj.weight", "no tensor of expert 0"),
        ("to_hf", "layers.0.feed_forward.w1.weight", "unknown key"),
        ("to_hf", "layers.3.attention.wo.weight", "has 3 layers"),
        ("to_hf", "output.weight", "unknown key"),
    ],
)
def test_adapter_names_what_does_not_fit(direction: str, key: str, message: str) -> None:
    """A checkpoint of another model is refused with the key, not loaded in part."""
    _, adapter = _ours(TINY)
    with pytest.raises(ValueError, match=message):
        getattr(adapter, direction)({key: torch.zeros(5, 2, 2)})


def test_the_published_model_is_all_there() -> None:
    """14.3 billion parameters, 2.7 of them at work (without embeddings 2.4), 4536 matrices."""
    spec = get_model_spec("qwen_moe", "A2.7B", attn_backend="sdpa")
    with torch.device("meta"):
        model: Any = spec.model.build()
    count, flops = spec.model.get_nparams_and_flops(model, 2560)
    assert count == sum(p.numel() for p in model.parameters()) == 14_315_784_192
    expert, embedding = 3 * 1408 * 2048, 151936 * 2048
    active = count - embedding - 24 * (60 - 4) * expert
    assert flops == 6 * active + 12 * 24 * 2048 * 2560
    matrices = model_matrices(spec)
    assert len(matrices) == 24 * (180 + 4 + 3 + 1 + 1) == 4536
    assert sum(m.stacked and {*m.shape} == {1408, 2048} for m in matrices) == 4320
    attention = model.layers["0"].attention
    biases = {n for n, p in attention.named_parameters() if n.endswith("bias")}
    assert biases == {f"qkv_linear.w{k}.bias" for k in "qkv"}
    assert model.layers["23"].moe.shared_experts.gate.weight.shape == (1, 2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 5}, "must divide dim"),
        ({"n_kv_heads": 4}, "multiple of"),
        ({"dim": 44, "n_heads": 2}, "dim must be a multiple of 8"),
        ({"expert_hidden_dim": 20}, "expert_hidden_dim must be a multiple of 8"),
        ({"n_heads": 16, "n_kv_heads": 16}, "even"),
        ({"top_k": 6}, "top_k must be 1 to n_experts"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    """A size that cannot be built or multiplied fails when stated, not in the first forward."""
    fields = {name: getattr(TINY, name) for name in TINY.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        QwenMoESize(**{**fields, **changes})


def test_initialisation_is_qwens() -> None:
    """Std 0.02, residual outputs 0.02 / sqrt(2 layers), each expert's too, biases 0, norms 1."""
    size = QWEN_MOE_SIZES["debug"]
    torch.manual_seed(3)
    model, _ = _ours(size)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("wo.weight", "w2.weight", "w2_EDF"))
            std = 0.02 / 6**0.5 if residual else 0.02
            for one in parameter if parameter.ndim == 3 else [parameter]:
                few = 0.2 if one.numel() < 5000 else 0.05
                assert one.std().item() == pytest.approx(std, rel=few), name


@pytest.mark.parametrize(("batch", "share"), [("-1", 1.0), ("32", 4 / 32)])
def test_share_of_a_micro_batch(batch: str, share: float) -> None:
    """In a job, whose gradients are summed, a micro-batch's loss of the load counts with its part
    of the step's tokens: local_batch_size = 4 of the global one, or of all ranks'."""
    from torchtitan_dmuon.config.build import build
    from torchtitan_dmuon.config.manager import load_job

    options = ["--config", "debug_qwen_moe.toml", "--training.global_batch_size", batch]
    config = build(load_job(options), "cpu")
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    assert model.aux_loss_coef == 0.001
    model.update_from_config(config=config)
    assert model.aux_loss_share == share
    assert model.layers[0].attention.rope.max_seq_len == 256


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline", "expert"])
def test_other_parallelism_is_refused(name: str) -> None:
    """What the model is not made for is said in one line, before anything is built."""
    degrees = {f"{n}_parallel_degree": 1 for n in ("tensor", "context", "pipeline", "expert")}
    degrees[f"{name}_parallel_degree"] = 2
    job = types.SimpleNamespace(parallelism=types.SimpleNamespace(**degrees))
    config = qwen_moe_config(TINY, attn_backend="sdpa")
    with pytest.raises(ConfigError, match=f"{name}_parallel_degree: qwen_moe .* got 2"):
        config.update_from_config(config=job)
