"""Models whose updates are compared, with their data and what the reference must know of them.

F1: heads side by side with small integer inputs, so that gradients are exact whatever the order of
additions. F2: a tiny decoder. F2 fused: the same with one fused and one interleaved query-key-value
weight and with experts. All gradients have full rank: Newton-Schulz turns the null space of a
rank-deficient one into noise.

Matrices are given to the product as `MatrixSpec` and to the reference as lists of rows, so neither
reads the other's description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchtitan_dmuon.ownership import MatrixSpec

VOCABULARY = 97

RowBlocks = tuple[tuple[int, ...], ...]
"""For each matrix of a parameter, its rows; the parameter is read as (rows, columns)."""


@dataclass(frozen=True)
class Fixture:
    """A model with its data.

    Attributes:
        build: Makes the model with the same weights every time.
        loss: (model, step, part, parts, micro_batches) -> loss on one part of the step's batch; the
            batch is the same however it is cut.
        matrix_rows: Names of parameters that hold several matrices -> rows of each.
        specs: The same for `dedicate_params`.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, int, int], torch.Tensor]
    matrix_rows: Mapping[str, RowBlocks] = field(default_factory=dict)
    specs: Mapping[str, MatrixSpec] = field(default_factory=dict)


# -- F1 ----------------------------------------------------------------------------------------

UNEVEN = ((7, 5), (1, 40), (40, 1), (3, 200), (200, 3), (72, 24))
"""Shapes of No world size divides them all."""

SHAPES = ((48, 32), (33, 64), (96, 96), (96, 48), (5, 24, 16), *UNEVEN)
FUSED_INDEX, STACK_INDEX = 3, 4
FUSED_ROWS = (64, 16, 16)
SAMPLES = 240


class Head(nn.Module):
    """`x @ weight.mT`, for a matrix or a stack of them; no bias."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mT


class Heads(nn.Module):
    """F1: heads that share nothing."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(shape) for shape in shapes)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [head(x) for head, x in zip(self.heads, inputs, strict=True)]


def build_heads(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Heads:
    torch.manual_seed(0)
    return Heads(shapes)


def heads_batch(
    shapes: tuple[tuple[int, ...], ...], step: int, part: int, parts: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (x, c) of every head: integers in [-3, 3], the part's share of SAMPLES rows."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = slice(part * SAMPLES // parts, (part + 1) * SAMPLES // parts)
    inputs, factors = [], []
    for shape in shapes:
        *stack, out, width = shape
        x = torch.randint(-3, 4, (*stack, SAMPLES, width), generator=generator)
        c = torch.randint(-3, 4, (*stack, SAMPLES, out), generator=generator)
        inputs.append(x[..., rows, :].float())
        factors.append(c[..., rows, :].float())
    return inputs, factors


def heads_loss(
    model: nn.Module, step: int, part: int, parts: int, micro_batches: int
) -> torch.Tensor:
    shapes = tuple(tuple(head.weight.shape) for head in model.heads)  # type: ignore[union-attr]
    inputs, factors = heads_batch(shapes, step, part, parts)
    outputs = model(inputs)
    return torch.stack([(c * o).sum() for c, o in zip(factors, outputs, strict=True)]).sum()


# -- F2 ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with separate, fused or interleaved projections.

    Fused rows are all queries, all keys, all values. Interleaved rows repeat, for each key-value
    head, its queries, its key, its value.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, layout: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.layout = heads, kv_heads, layout
        self.size = width // heads
        kv = kv_heads * self.size
        if layout == "split":
            self.wq = nn.Linear(width, width, bias=False)
            self.wk = nn.Linear(width, kv, bias=False)
            self.wv = nn.Linear(width, kv, bias=False)
        else:
            self.wqkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        kv = self.kv_heads * self.size
        if self.layout == "split":
            q, k, v = self.wq(x), self.wk(x), self.wv(x)
        elif self.layout == "fused":
            q, k, v = self.wqkv(x).split((width, kv, kv), dim=-1)
        else:
            each = width // self.kv_heads
            rows = self.wqkv(x).view(batch, length, self.kv_heads, each + 2 * self.size)
            q, k, v = rows.split((each, self.size, self.size), dim=-1)
        q = q.reshape(batch, length, self.heads, self.size).transpose(1, 2)
        k = k.reshape(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = v.reshape(batch, length, self.kv_heads, self.size).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Gated feed-forward with a bias at its end."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """All experts run on all tokens, mixed by sigmoid gates (a softmax's gradient lacks a rank)."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(1, -1, x.size(-1))
        hidden = F.silu(tokens @ self.up.mT) @ self.down.mT
        gates = torch.sigmoid(self.router(tokens[0])).t().unsqueeze(-1)
        return (gates * hidden).sum(0).view_as(x)


class Block(nn.Module):
    """A decoder layer. `recompute` is None or "inside": recompute its feed-forward."""

    def __init__(
        self, width: int, hidden: int, heads: int, kv_heads: int, layout: str, experts: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, layout)
        self.ffn_norm = nn.RMSNorm(width)
        self.ffn = Experts(width, hidden, experts) if experts else FeedForward(width, hidden)
        self.recompute: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        if self.recompute == "inside":
            return x + checkpoint(self.ffn, self.ffn_norm(x), use_reentrant=False)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """F2: embedding, two blocks, final norm, untied head.

    Attributes:
        recompute: None, "blocks" (checkpoint around each block) or "inside" (in each block).
    """

    def __init__(self, layouts: tuple[tuple[str, int, int, int], ...], width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            Block(width, hidden, 4, kv_heads, layout, experts)
            for layout, kv_heads, hidden, experts in layouts
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.recompute: str | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            layer.recompute = self.recompute  # type: ignore[assignment]
            if self.recompute == "blocks":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        # Layers may compute in another dtype than what fully_shard holds.
        return self.head(self.norm(x.to(self.norm.weight.dtype)))


PLAIN_LAYOUT = (("split", 4, 160, 0), ("split", 4, 160, 0))
FUSED_LAYOUT = (("fused", 2, 160, 0), ("interleaved", 2, 48, 3))
SEQUENCES, LENGTH = 24, 12


def build_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(PLAIN_LAYOUT)


def build_fused_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(FUSED_LAYOUT)


def build_deep_decoder() -> Decoder:
    """Return six small blocks of all kinds: enough for prefetching far ahead."""
    torch.manual_seed(0)
    kinds = (("split", 4, 40, 0), ("fused", 2, 40, 0), ("interleaved", 2, 24, 2))
    return Decoder(kinds * 2, width=32)


def decoder_loss(
    model: nn.Module, step: int, part: int, parts: int, micro_batches: int
) -> torch.Tensor:
    """Cross-entropy of a fixed permutation of the token before: it can be learnt."""
    generator = torch.Generator().manual_seed(200 + step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    tokens = tokens[part * SEQUENCES // parts : (part + 1) * SEQUENCES // parts]
    logits = model(tokens)
    targets = tokens * 7 % VOCABULARY
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / micro_batches


def _ranges(*bounds: tuple[int, int]) -> tuple[int, ...]:
    return tuple(row for start, stop in bounds for row in range(start, stop))


def _stack(count: int, rows: int) -> RowBlocks:
    return tuple(_ranges((i * rows, (i + 1) * rows)) for i in range(count))


HEADS_ROWS: Mapping[str, RowBlocks] = {
    f"heads.{FUSED_INDEX}.weight": (
        _ranges((0, 64)),
        _ranges((64, 80)),
        _ranges((80, 96)),
    ),
    f"heads.{STACK_INDEX}.weight": _stack(5, 24),
}

FIXTURES: Mapping[str, Fixture] = {
    "heads": Fixture(
        build_heads,
        heads_loss,
        HEADS_ROWS,
        {rf"^heads\.{FUSED_INDEX}\.weight$": MatrixSpec(rows=FUSED_ROWS)},
    ),
    **{
        f"heads{n}": Fixture(partial(build_heads, ((48, 32), (33, 64), (96, 48))[:n]), heads_loss)
        for n in (1, 2, 3)
    },
    "decoder": Fixture(build_decoder, decoder_loss),
    # Compared with itself only, so the reference is told nothing of its matrices.
    "deep": Fixture(
        build_deep_decoder,
        decoder_loss,
        specs={
            r"layers\.[14]\..*wqkv": MatrixSpec(rows=(32, 16, 16)),
            r"layers\.[25]\..*wqkv": MatrixSpec(rows=(16, 8, 8), blocks=2),
        },
    ),
    "fused": Fixture(
        build_fused_decoder,
        decoder_loss,
        {
            # 4 query heads and 2 key-value heads of 16 rows.
            "layers.0.attention.wqkv.weight": (
                _ranges((0, 64)),
                _ranges((64, 96)),
                _ranges((96, 128)),
            ),
            "layers.1.attention.wqkv.weight": (
                _ranges((0, 32), (64, 96)),
                _ranges((32, 48), (96, 112)),
                _ranges((48, 64), (112, 128)),
            ),
            "layers.1.ffn.up": _stack(3, 48),
            "layers.1.ffn.down": _stack(3, 64),
        },
        {
            r"layers\.0\..*wqkv": MatrixSpec(rows=(64, 32, 32)),
            r"layers\.1\..*wqkv": MatrixSpec(rows=(32, 16, 16), blocks=2),
        },
    ),
}
