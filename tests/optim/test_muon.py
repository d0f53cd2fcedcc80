"""Muon in one process: options, groups and schedules act as in torch.optim."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime.harness import full_weights, local_state
from tests.runtime.models import FIXTURES, Heads, build_heads, heads_loss
from tests.runtime.reference import distance
from torchtitan_dmuon import MatrixSpec

PLAIN = ((48, 32), (33, 64), (96, 48))


def _updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[dict[str, torch.Tensor]]:
    """Train F1 and return each step's change of each weight."""

    def weights() -> dict[str, torch.Tensor]:
        if isinstance(optimizer, dmuon.Muon):
            return full_weights(model)
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    changes, before = [], weights()
    for step in range(steps):
        optimizer.zero_grad()
        heads_loss(model, step, 0, 1, 1).backward()
        optimizer.step()
        after = weights()
        changes.append({name: after[name] - before[name] for name in after})
        before = after
    return changes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1},
        {"weight_decay": 0.0},
        {"weight_decay": 2.0, "lr": 0.05},
        {"momentum": 0.5},
        {"nesterov": False},
        {"ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        {"eps": 1e6},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
    ids=str,
)
def test_each_option_means_what_it_means_in_torch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to torch.optim.Muon, kept from rounding to bfloat16, and no option is ignored."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.float().clone())
    peer = build_heads(PLAIN)
    expected = _updates(peer, torch.optim.Muon(peer.parameters(), **{"lr": 0.02, **options}))
    model = build_heads(PLAIN)
    same = {"lr": 0.02, "ns_coefficients": "quintic"}
    found = _updates(model, dmuon.Muon(model, **{**same, **options}))
    for one, other in zip(found, expected, strict=True):
        for name in one:
            assert distance(one[name], other[name]) <= 1e-4, name
    # "original" is the default under its name; every other option must change something.
    if options and options != {"adjust_lr_fn": "original"}:
        model = build_heads(PLAIN)
        default = _updates(model, dmuon.Muon(model, **same))[-1]
        name = "heads.2.weight"
        assert distance(found[-1][name], default[name]) > 0.02


def test_options_of_a_group_act_on_that_group_only() -> None:
    def updates(**options: Any) -> dict[str, torch.Tensor]:
        model = build_heads(PLAIN)
        dmuon.dedicate_params(model)
        groups = [{"params": [model.heads[1].weight], **options}] if options else None
        return _updates(model, dmuon.Muon(model, lr=0.02, weight_decay=0.0, param_groups=groups))[0]

    base, faster = updates(), updates(lr=0.06)
    assert distance(faster["heads.1.weight"], 3 * base["heads.1.weight"]) <= 1e-4
    assert torch.equal(faster["heads.0.weight"], base["heads.0.weight"])
    decayed = updates(weight_decay=1.0)
    weight = build_heads(PLAIN).heads[1].weight.detach()
    shrunk = decayed["heads.1.weight"] - base["heads.1.weight"]
    torch.testing.assert_close(shrunk, -0.02 * weight, rtol=1e-3, atol=1e-6)
    plain = updates(nesterov=False, momentum=0.5)
    assert torch.equal(plain["heads.2.weight"], base["heads.2.weight"])


def test_every_trainable_parameter_is_in_one_group_and_frozen_ones_in_none() -> None:
    model = FIXTURES["fused"].build()
    model.layers[0].ffn.w1.weight.requires_grad_(False)  # type: ignore[union-attr, index]
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.3, adamw_lr=1e-3, adamw_betas=(0.8, 0.9))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    expected = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(names) == sorted(expected)
    for group in optimizer.param_groups:
        matrix = group["route"] == "matrix"
        assert (group["lr"], group["weight_decay"]) == ((0.02, 0.3) if matrix else (1e-3, 0.0))
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert (parameter.ndim > 1 and name.startswith("layers.")) == matrix, name
    rows = {row.name: row for row in optimizer.routing().rows}
    assert rows["layers.0.ffn.w1.weight"].route == "frozen"
    assert rows["embedding.weight"].route == rows["head.weight"].route == "adamw"


def test_schedules_keep_the_ratio_of_the_rates() -> None:
    """Warm-up, then cosine; one shape for all groups, each with its own base rate."""
    model = FIXTURES["decoder"].build()
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-4)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, 4),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        milestones=[4],
    )
    seen = []
    for step in range(12):
        rates = {group["route"]: group["lr"] for group in optimizer.param_groups}
        assert rates["matrix"] / rates["adamw"] == pytest.approx(0.02 / 3e-4)
        seen.append(rates["matrix"])
        optimizer.zero_grad()
        FIXTURES["decoder"].loss(model, step, 0, 12, 1).backward()
        optimizer.step()
        schedule.step()
    assert seen[0] == pytest.approx(0.005) and seen[4] == pytest.approx(0.02)
    assert len(set(seen)) > 8, "the schedule does nothing"


def test_a_rate_that_changes_between_steps_takes_effect() -> None:
    def last(rates: list[float]) -> torch.Tensor:
        model = build_heads(PLAIN)
        optimizer = dmuon.Muon(model, lr=1.0, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
        heads_loss(model, 0, 0, 1, 1).backward()
        optimizer.step()
        schedule.step()
        before = full_weights(model)["heads.0.weight"]
        optimizer.step()
        return full_weights(model)["heads.0.weight"] - before

    assert distance(last([0.02, 0.04]), 2 * last([0.02, 0.02])) <= 1e-4
    assert not last([0.02, 0.0]).any()


# -- what takes the matrix route ------------------------------------------------------------------


def _matches_nothing(name: str, parameter: nn.Parameter) -> bool:
    return False


def test_a_predicate_that_matches_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"_matches_nothing .*selects no matrix"):
        dmuon.dedicate_params(FIXTURES["decoder"].build(), predicate=_matches_nothing)


def test_muon_without_a_trainable_matrix_is_an_error() -> None:
    model = build_heads(PLAIN)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter takes the matrix route"):
        dmuon.Muon(model)


def test_the_counter_counts_matrices_that_changed() -> None:
    """A matrix without gradient is not orthogonalized; the report says what a full step does."""
    model = build_heads(PLAIN)
    optimizer = dmuon.Muon(model)
    assert optimizer.routing().num_matrices == 3
    inputs = [torch.randn(4, 32), torch.randn(4, 64), torch.randn(4, 48)]
    model(inputs)[1].sum().backward()
    optimizer.step()
    assert optimizer.last_step.orthogonalized == 1
    optimizer.zero_grad()
    sum(out.sum() for out in model(inputs)).backward()
    optimizer.step()
    assert optimizer.last_step.orthogonalized == 3


def test_the_report_of_a_step_says_where_its_time_went() -> None:
    """Four parts without gaps. Of ten steps the least disturbed one counts."""
    model = FIXTURES["decoder"].build()
    optimizer = dmuon.Muon(model)
    shares = []
    for step in range(10):
        FIXTURES["decoder"].loss(model, step, 0, 12, 1).backward()
        start = time.perf_counter()
        optimizer.step()
        elapsed = time.perf_counter() - start
        seconds = optimizer.last_step.seconds
        assert set(seconds) == {"reduce", "orthogonalize", "elementwise", "publish"}
        assert seconds["orthogonalize"] > 0 and seconds["elementwise"] > 0
        shares.append(sum(seconds.values()) / elapsed)
        optimizer.zero_grad()
    assert max(shares) >= 0.9 and max(shares) <= 1


# -- fused and stacked weights ---------------------------------------------------------------------


def test_rows_that_do_not_add_up_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"heads\.2\.weight .*64, 16, 15.*95.*96"):
        dmuon.dedicate_params(
            build_heads(PLAIN), matrix_specs={r"heads\.2": MatrixSpec(rows=(64, 16, 15))}
        )


def test_stored_weight_and_momentum_keep_the_fused_shape() -> None:
    model = FIXTURES["heads"].build()
    dmuon.dedicate_params(model, matrix_specs=FIXTURES["heads"].specs)
    optimizer = dmuon.Muon(model)
    _updates(model, optimizer, 1)
    weights = full_weights(model)
    assert weights["heads.3.weight"].shape == (96, 48)
    assert weights["heads.4.weight"].shape == (5, 24, 16)
    momenta: dict[str, int] = {}
    for key, value in local_state(optimizer).items():
        name = key.split("/")[0]
        momenta[name] = momenta.get(name, 0) + value.numel()
    assert momenta == {name: value.numel() for name, value in weights.items()}


def test_each_block_has_the_rate_of_its_own_shape() -> None:
    """(64, 16, 16) rows of 48 columns: only the first is taller than wide."""
    model = FIXTURES["heads"].build()
    dmuon.dedicate_params(model, matrix_specs=FIXTURES["heads"].specs)
    rows = {row.name: row for row in dmuon.Muon(model, lr=0.3).routing().rows}
    fused = rows["heads.3.weight"]
    assert (fused.matrices, fused.lr) == (3, pytest.approx((0.3 * (64 / 48) ** 0.5, 0.3, 0.3)))
    stack = rows["heads.4.weight"]
    assert (stack.matrices, stack.lr) == (5, pytest.approx((0.3 * (24 / 16) ** 0.5,) * 5))


def test_how_a_stack_is_read_is_declared() -> None:
    """Flattened it is one matrix of 5 x 384, stacked five: other updates."""

    def update(spec: MatrixSpec) -> tuple[int, torch.Tensor]:
        model = Heads(((5, 24, 16),))
        with torch.no_grad():
            model.heads[0].weight.fill_(0.5)
        dmuon.dedicate_params(model, matrix_specs={"weight": spec})
        optimizer = dmuon.Muon(model, lr=0.02)
        change = _updates(model, optimizer, 1)[0]["heads.0.weight"]
        return optimizer.last_step.orthogonalized, change

    (stacked, five), (flat, one) = update(MatrixSpec()), update(MatrixSpec(flatten=True))
    assert (stacked, flat) == (5, 1)
    assert distance(five, one) > 0.1
