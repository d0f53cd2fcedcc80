"""The published sizes of Qwen2.5, and a small one for tests and CPU runs.

Each entry follows the ``config.json`` of the *base* model on the Hugging Face hub. The instruct
models have the same shapes but all publish ``max_position_embeddings = 32768``, and the 32B one
publishes ``rms_norm_eps = 1e-6``.
"""

from dataclasses import dataclass, replace

from ..qwen_parts import QwenSize

__all__ = ["QWEN2_5_SIZES", "TOY", "Qwen2_5Size", "size_of"]

TOY = "-toy"
"""Ends the name of the toy of a published size: `7B-toy`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2_5Size(QwenSize):
    """Shape of one Qwen2.5 model."""

    hidden_dim: int
    """Inner width of the SwiGLU feed-forward."""
    tied: bool
    """Whether the embedding and the output head are one parameter."""


QWEN2_5_SIZES: dict[str, Qwen2_5Size] = {
    # 1.26M parameters: four CPU ranks on two cores train it in well under a second per step.
    "debug": Qwen2_5Size(
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=352,
        vocab_size=2048,
        tied=False,
        max_seq_len=32768,
    ),
    # 1.5M parameters, for `dmuon bench` on CPUs: with a small batch, orthogonalizing its matrices
    # in bfloat16 costs more than a forward and backward pass.
    "bench": Qwen2_5Size(
        dim=192,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=512,
        vocab_size=2048,
        tied=False,
        max_seq_len=32768,
    ),
    "0.5B": Qwen2_5Size(
        dim=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        hidden_dim=4864,
        vocab_size=151936,
        tied=True,
        max_seq_len=32768,
    ),
    "1.5B": Qwen2_5Size(
        dim=1536,
        n_layers=28,
        n_heads=12,
        n_kv_heads=2,
        hidden_dim=8960,
        vocab_size=151936,
        tied=True,
        max_seq_len=131072,
    ),
    "7B": Qwen2_5Size(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        hidden_dim=18944,
        vocab_size=152064,
        tied=False,
        max_seq_len=131072,
    ),
    "32B": Qwen2_5Size(
        dim=5120,
        n_layers=64,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=27648,
        vocab_size=152064,
        tied=False,
        max_seq_len=131072,
        # The base 14B, 32B and 72B models publish 1e-5 where the smaller ones publish 1e-6.
        norm_eps=1e-5,
    ),
}


def size_of(flavor: str) -> Qwen2_5Size:
    """Return the size of a flavor, or of its toy where the name ends in `TOY`.

    Raises:
        KeyError: there is no such flavor.
    """
    size = QWEN2_5_SIZES[flavor.removesuffix(TOY)]
    return _toy(size) if flavor.endswith(TOY) else size


def _toy(size: Qwen2_5Size) -> Qwen2_5Size:
    """Shrink to two layers with heads of 8, a vocabulary of 2048, and the proportions of `size`.

    Query heads per KV head, the width of the feed-forward in units of the model's, tied or not, and
    epsilon stay. Two KV heads: one would leave nothing to split.
    """
    heads = 2 * size.n_heads // size.n_kv_heads
    dim = 8 * heads
    return replace(
        size,
        dim=dim,
        n_layers=2,
        n_heads=heads,
        n_kv_heads=2,
        hidden_dim=round(dim * size.hidden_dim / size.dim / 8) * 8,
        vocab_size=2048,
    )
