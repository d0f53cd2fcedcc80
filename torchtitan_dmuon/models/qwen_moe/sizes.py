"""The published size of Qwen1.5-MoE, and a small one for tests and CPU runs.

The published one follows the `config.json` of the base model on the Hugging Face hub.
"""

from dataclasses import dataclass

from ..qwen_parts import QwenSize

__all__ = ["QWEN_MOE_SIZES", "QwenMoESize"]

# Rows of what a grouped GEMM on CUDA reads must start at multiples of 16 bytes.
_ROW_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenMoESize(QwenSize):
    """Shape of one Qwen1.5-MoE model; every layer has experts.

    Raises:
        ValueError: what `QwenSize` refuses, more experts are chosen per token than there are, or a
            width that grouped products read is not a multiple of 8.
    """

    expert_hidden_dim: int
    """Inner width of each routed expert."""
    shared_hidden_dim: int
    """Inner width of the shared experts, which are one feed-forward."""
    n_experts: int
    top_k: int
    """Routed experts per token."""
    aux_loss_coef: float = 0.001
    """Weight of the load-balancing loss; 0 leaves it out."""

    def __post_init__(self) -> None:
        QwenSize.__post_init__(self)
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k must be 1 to n_experts ({self.n_experts}), got {self.top_k}")
        for name in ("dim", "expert_hidden_dim"):
            if getattr(self, name) % _ROW_MULTIPLE:
                raise ValueError(
                    f"{name} must be a multiple of {_ROW_MULTIPLE}, got {getattr(self, name)}"
                )


QWEN_MOE_SIZES: dict[str, QwenMoESize] = {
    # 1.5M parameters, 0.6M of them in experts: four ranks on two CPU cores train 16 sequences of
    # 256 tokens in a few seconds.
    "debug": QwenMoESize(
        dim=128,
        n_layers=3,
        n_heads=4,
        n_kv_heads=4,
        expert_hidden_dim=64,
        shared_hidden_dim=128,
        n_experts=8,
        top_k=2,
        vocab_size=2048,
        max_seq_len=8192,
    ),
    "A2.7B": QwenMoESize(
        dim=2048,
        n_layers=24,
        n_heads=16,
        n_kv_heads=16,
        expert_hidden_dim=1408,
        shared_hidden_dim=5632,
        n_experts=60,
        top_k=4,
        vocab_size=151936,
        max_seq_len=8192,
    ),
}
