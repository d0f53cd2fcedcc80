"""QK-clip: logits are seen as they are, and clipped weights give the threshold again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import torchtitan_dmuon as dmuon
from tests.runtime.communication import chosen, each_communication_at_length, run_world
from tests.runtime.heads import as_lists, full_weights
from tests.runtime.plain import dedicate, open_world
from torchtitan_dmuon.optim.qk_clip import Attention, QKClip, Rows, largest_logits

WIDTH, HEADS, SHARED, SIZE, LENGTH = 16, 4, 2, 4, 12
THRESHOLD = 0.5


class Inner(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )


class Block(nn.Module):
    """Attention with grouped heads and biases, whose logits differ a lot from head to head."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, SHARED * SIZE)
        self.wv, self.wo = nn.Linear(WIDTH, SHARED * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.inner = Inner()
        with torch.no_grad():
            self.wk.weight[SIZE:] *= 0.05
            self.wk.bias[SIZE:] *= 0.05
            self.wq.weight[:SIZE] *= 8

    def queries_and_keys(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.wq(x).view(*x.shape[:2], HEADS, SIZE),
            self.wk(x).view(*x.shape[:2], SHARED, SIZE),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.queries_and_keys(x)
        v = self.wv(x).view(*x.shape[:2], SHARED, SIZE)
        return x + self.wo(self.inner(q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def attentions(model: Model) -> list[Attention]:
    def heads(prefix: str) -> tuple[tuple[Rows, ...], ...]:
        query = HEADS // SHARED * SIZE
        return tuple(
            tuple(
                part
                for kind in ("weight", "bias")
                for part in (
                    Rows(f"{prefix}.wq.{kind}", g * query, query, True),
                    Rows(f"{prefix}.wk.{kind}", g * SIZE, SIZE, False),
                )
            )
            for g in range(SHARED)
        )

    return [
        Attention(f"layers.{i}", layer.inner, heads(f"layers.{i}"))
        for i, layer in enumerate(model.layers)
    ]


def inputs(rank: int, ranks: int) -> torch.Tensor:
    x = torch.randn(8, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    return x.tensor_split(ranks)[rank]


def textbook(q: torch.Tensor, k: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Return the largest logit of each key head, by loops in float64."""
    batch, length, heads, size = q.shape
    result = torch.full((k.shape[2],), -torch.inf, dtype=torch.float64)
    for h in range(heads):
        g = h // (heads // k.shape[2])
        for b in range(batch):
            logits = q[b, :, h].double() @ k[b, :, g].double().T / size**0.5
            for i in range(length):
                seen = logits[i, : i + 1] if causal else logits[i]
                result[g] = max(result[g], seen.max())
    return result


@pytest.mark.parametrize("length", [1, 7, 256, 300])
@pytest.mark.parametrize("shape", [(2, 4, 2), (1, 3, 3), (1, 4, 1)], ids=str)
def test_the_largest_logit_is_found(length: int, shape: tuple[int, int, int]) -> None:
    """Over query heads that share a key head, causal pairs only, across chunks of queries."""
    batch, heads, shared = shape
    torch.manual_seed(length)
    q, k = torch.randn(batch, length, heads, 8), torch.randn(batch, length, shared, 8)
    k[:, -1] *= 100  # seen by the last query alone
    found = largest_logits(q, k)
    torch.testing.assert_close(found.double(), textbook(q, k), rtol=1e-5, atol=1e-6)
    if length > 7:
        assert not torch.allclose(found.double(), textbook(q, k, causal=False), rtol=1e-3)
    everything = torch.ones(batch, 1, length, length, dtype=torch.bool)
    full = largest_logits(q, k, mask=everything, scale=2.0)
    expected = textbook(q, k, causal=False) * 8**0.5 * 2
    torch.testing.assert_close(full.double(), expected, rtol=1e-5, atol=1e-6)


def clipped(shape: tuple[int, int], mode: str, balance: float) -> dict[str, Any]:
    """One step without any update but the clip."""
    mesh = open_world(shape) if shape != (1, 1) else None
    rank, size = (torch.distributed.get_rank(), shape[0] * shape[1]) if mesh else (0, 1)
    torch.manual_seed(0)
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    dedicate(model, mesh, mode=mode, small_matrix_numel=1)
    clip = QKClip(attentions(model), THRESHOLD, balance)
    optimizer = dmuon.Muon(model, lr=0.0, adamw_lr=0.0, qk_clip=clip)
    for part in inputs(rank, size).split(2):
        model(part).square().mean().backward()
    model.eval()
    with torch.no_grad():
        model(100 * inputs(rank, size))  # evaluation is not training
    model.train()
    optimizer.step()
    result = {"maximum": float(clip.maximum), "clipped": int(clip.clipped)}
    after = full_weights(model)
    again = inputs(rank, size)
    optimizer.zero_grad()
    model(again).square().mean().backward()
    optimizer.step()
    result["again"] = float(clip.maximum)
    # Where a rank has one micro-batch only the operators begin here.
    model(again).square().mean().backward()
    return {**result, "before": as_lists(before), "after": as_lists(after)}


@each_communication_at_length
@pytest.mark.usefixtures("communication")
@pytest.mark.parametrize(
    ("shape", "mode", "balance"),
    [
        ((1, 1), "owner", 1.0),
        ((1, 2), "owner", 0.5),
        ((2, 2), "owner", 0.2),
        ((1, 2), "gather", 0.5),
    ],
    ids=str,
)
def test_clipped_weights_give_the_threshold(
    shape: tuple[int, int], mode: str, balance: float
) -> None:
    """Only heads above the threshold change, queries and keys with their biases by the published
    factors; the largest logit is that over all ranks and micro-batches."""
    if mode == "gather" and chosen() == "operators":
        pytest.skip("the baseline knows collectives only")
    torch.manual_seed(0)
    model, x = Model(), inputs(0, 1)
    largest = []
    for layer in model.layers:
        largest.append(textbook(*layer.queries_and_keys(x)).tolist())
        x = layer(x)
    assert largest[0][0] > 2 * THRESHOLD and 0 < largest[0][1] < THRESHOLD, "no power"
    if shape == (1, 1):
        results = [clipped(shape, mode, balance)]
    else:
        results = run_world(shape[0] * shape[1], clipped, shape, mode, balance, timeout_seconds=60)
    for result in results:
        flat = [s for layer in largest for s in layer]
        assert result["maximum"] == pytest.approx(max(flat), rel=1e-5)
        assert result["clipped"] == sum(s > THRESHOLD for s in flat)
        # Biases do not scale the input, so the second layer's input has changed: the first's holds.
        for name, values in result["before"].items():
            old, new = torch.tensor(values), torch.tensor(result["after"][name])
            factors = torch.ones(old.shape[0])
            kind = name.split(".")[2]
            for g, s in enumerate(largest[int(name.split(".")[1])]):
                ratio = min(1.0, THRESHOLD / s)
                if kind == "wq":
                    rows = HEADS // SHARED * SIZE
                    factors[g * rows : (g + 1) * rows] = ratio**balance
                elif kind == "wk":
                    factors[g * SIZE : (g + 1) * SIZE] = ratio ** (1 - balance)
            expected = old * factors.view(-1, *[1] * (old.ndim - 1))
            torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-7, msg=name)
    assert len({result["again"] for result in results}) == 1
    assert results[0]["again"] < 0.6 * results[0]["maximum"]


def test_a_step_that_is_skipped_clips_nothing_and_forgets() -> None:
    torch.manual_seed(0)
    model = Model()
    clip = QKClip(attentions(model), THRESHOLD)
    optimizer = dmuon.Muon(model, lr=0.0, adamw_lr=0.0, qk_clip=clip)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (model(inputs(0, 1)) * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.last_step.skipped
    optimizer.zero_grad()
    model(1e-3 * inputs(0, 1)).sum().backward()
    for layer in model.layers:  # what was seen in the skipped step would have clipped
        assert layer.wq.weight.grad is None
    optimizer.step()
    assert int(clip.clipped) == 0
    after = dict(model.named_parameters())
    assert all(torch.equal(before[n], after[n].detach()) for n in before)


def test_wrong_arguments_are_named() -> None:
    model = Model()
    with pytest.raises(ValueError, match="threshold: expected a finite number > 0, got 0"):
        QKClip(attentions(model), 0)
    with pytest.raises(ValueError, match="balance: expected a number from 0 to 1"):
        QKClip(attentions(model), 1.0, 2.0)
    with pytest.raises(ValueError, match="attentions: expected at least one"):
        QKClip([])
    other = QKClip([Attention("x", model.layers[0].inner, ((Rows("nope", 0, 1, True),),))])
    with pytest.raises(ValueError, match="qk_clip: nope is not an owned parameter"):
        dmuon.Muon(model, qk_clip=other)
