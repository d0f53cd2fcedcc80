"""Layers built from the shapes of public models; nothing here is measured."""

from __future__ import annotations

from torchtitan_dmuon.ownership import (
    CostTable,
    Layer,
    LayerParameter,
    MatrixSpec,
    Unit,
    model_cost,
)

SPEC = MatrixSpec()
QWEN2_5 = {
    "1.5B": {"hidden": 1536, "kv": 256, "ffn": 8960, "layers": 28},
    "7B": {"hidden": 3584, "kv": 512, "ffn": 18944, "layers": 28},
    "32B": {"hidden": 5120, "kv": 1024, "ffn": 27648, "layers": 64},
}


def matrix(name: str, *shape: int, spec: MatrixSpec = SPEC) -> LayerParameter:
    return LayerParameter(name, shape, spec.matrices(name, shape))


def vector(name: str, size: int) -> LayerParameter:
    return LayerParameter(name, (size,))


def qwen(size: str) -> list[Layer]:
    """Return the decoder layers of a Qwen2.5 model, parameters in the published order."""
    h, kv, ffn = (QWEN2_5[size][key] for key in ("hidden", "kv", "ffn"))
    return [
        Layer(
            p := f"layers.{i}",
            (
                matrix(f"{p}.self_attn.q_proj.weight", h, h),
                vector(f"{p}.self_attn.q_proj.bias", h),
                matrix(f"{p}.self_attn.k_proj.weight", kv, h),
                vector(f"{p}.self_attn.k_proj.bias", kv),
                matrix(f"{p}.self_attn.v_proj.weight", kv, h),
                vector(f"{p}.self_attn.v_proj.bias", kv),
                matrix(f"{p}.self_attn.o_proj.weight", h, h),
                matrix(f"{p}.mlp.gate_proj.weight", ffn, h),
                matrix(f"{p}.mlp.up_proj.weight", ffn, h),
                matrix(f"{p}.mlp.down_proj.weight", h, ffn),
                vector(f"{p}.input_layernorm.weight", h),
                vector(f"{p}.post_attention_layernorm.weight", h),
            ),
        )
        for i in range(QWEN2_5[size]["layers"])
    ]


def qwen_moe() -> list[Layer]:
    """Return the layers of Qwen1.5-MoE-A2.7B with the experts of a layer stacked."""
    return [
        Layer(
            p := f"layers.{i}",
            (
                *(matrix(f"{p}.self_attn.{n}_proj.weight", 2048, 2048) for n in "qkvo"),
                matrix(f"{p}.mlp.gate.weight", 60, 2048),
                matrix(f"{p}.mlp.experts.gate_proj", 60, 1408, 2048),
                matrix(f"{p}.mlp.experts.up_proj", 60, 1408, 2048),
                matrix(f"{p}.mlp.experts.down_proj", 60, 2048, 1408),
                matrix(f"{p}.mlp.shared_expert.gate_proj.weight", 5632, 2048),
                matrix(f"{p}.mlp.shared_expert.up_proj.weight", 5632, 2048),
                matrix(f"{p}.mlp.shared_expert.down_proj.weight", 2048, 5632),
                matrix(f"{p}.mlp.shared_expert_gate.weight", 1, 2048),
                vector(f"{p}.input_layernorm.weight", 2048),
                vector(f"{p}.post_attention_layernorm.weight", 2048),
            ),
        )
        for i in range(24)
    ]


def gram_flops(rows: int, columns: int) -> float:
    """Five steps of Gram Newton-Schulz with one restart, symmetric products at half the work."""
    m, n = sorted((rows, columns))
    return 6.0 * m * m * n + 14.0 * m**3


def costs(units: tuple[Unit, ...]) -> CostTable:
    return model_cost((m.shape for unit in units for m in unit.matrices), gram_flops)
