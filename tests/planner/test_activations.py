"""Activations are counted as they live, not by a formula per model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from torchtitan_dmuon.config.manager import load_job
from torchtitan_dmuon.planner.activations import StorageMeter, measure_layer, measure_loss
from torchtitan_dmuon.planner.model import describe

B, L, D, F = 2, 16, 32, 96


class FeedForward(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)
        self.recompute = recompute

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


def test_what_is_saved_and_what_only_passes() -> None:
    """relu keeps its output, which is the input of `down`; what `up` made is free at once."""
    with torch.device("meta"):
        layer, x = FeedForward(), torch.empty(B, L, D)
    got = measure_layer(layer, x)
    token = 4 * B * L
    assert got.saved == token * (F + D)
    assert got.forward == token * max(F + F, F + D + D)
    # Gradients of the output and of relu's two sides, beside what was saved.
    assert got.backward >= token * (F + D) + token * (D + F)


def test_recomputation_keeps_the_input_alone() -> None:
    with torch.device("meta"):
        layer, x = FeedForward(recompute=True), torch.empty(B, L, D)
    got = measure_layer(layer, x)
    assert got.saved == 4 * B * L * D
    assert got.backward > 4 * B * L * (F + D)


def test_the_meta_device_counts_what_a_real_one_does() -> None:
    """The same layer with real tensors."""
    with torch.device("meta"):
        planned = measure_layer(FeedForward(), torch.empty(B, L, D))
    assert measure_layer(FeedForward(), torch.randn(B, L, D)) == planned


def test_views_and_parameters_are_not_counted() -> None:
    weight = torch.empty(8, 8, device="meta")
    meter = StorageMeter()
    meter.leave_out([weight])
    with meter:
        kept = weight.t(), (weight + 1).view(64)
    assert meter.live == 8 * 8 * 4 and len(kept) == 2


def test_the_loss_in_pieces_holds_less() -> None:
    """Of (B L) x V logits: with four pieces about a quarter."""
    vocabulary = 1000
    with torch.device("meta"):
        head, hidden = nn.Linear(D, vocabulary, bias=False), torch.empty(B, L, D)
        labels = torch.empty(B * L, dtype=torch.int64)

    def whole(h: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(h).flatten(0, 1), labels)

    got = measure_loss(whole, head, hidden)
    assert got >= 3 * B * L * vocabulary * 4


def _job(*arguments: str) -> Any:
    return load_job(["--config", *arguments]).config


def test_a_qwen_block_saves_what_its_operations_need() -> None:
    """By hand, per token in bfloat16: input of the block after this one, the sum in the middle, two
    norms, queries and attention's output (each D), keys and values, and four tensors of the
    feed-forward's width; in float32 a number per head, one per norm, and RoPE's table of a head."""
    config = _job("qwen1.5b_fsdp_z2.toml")
    got = describe(config).layer_bytes
    assert len(set(got)) == 1
    tokens = config.training.local_batch_size * config.training.seq_len
    width, inner, key, heads, head = 1536, 8960, 256, 12, 128
    by_hand = tokens * (2 * (6 * width + 2 * key + 4 * inner) + 4 * heads + 2 * 4 + 4 * head)
    assert got[0].saved == pytest.approx(by_hand, rel=1e-3)


def test_selective_recomputation_is_between_none_and_full() -> None:
    saved = {
        mode: describe(_job("qwen1.5b_fsdp_z2.toml", "--activation_checkpoint.mode", mode))
        .layer_bytes[0]
        .saved
        for mode in ("none", "selective", "full")
    }
    assert saved["full"] < saved["selective"] < saved["none"]
    assert saved["full"] == 6 * 4096 * 1536 * 2
