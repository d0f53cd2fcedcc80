"""What only moves work in time changes no bit of weights or state (invariant I5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.communication import each_communication_at_length
from tests.runtime.harness import Case, outcomes

# What every case of a mesh has in common: HSDP with bf16 compute and copies apart from masters,
# FSDP in fp32 with clipping.
BASES: dict[tuple[int, int], dict[str, Any]] = {
    (2, 2): {"accumulate": 2, "dedicate": {"param_dtype": torch.bfloat16}},
    (1, 2): {"clip": 0.5, "accumulate": 2, "defer": True},
}
# What differs from ZeRO-3, async publish, prefetch depth 1, no recomputation.
VARIANTS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "again": {},
    "zero2": {"reshard_after_forward": False},
    "sync": {"publish": "sync"},
    "depth0": {"prefetch_depth": 0},
    "depth2": {"prefetch_depth": 2},
    "depth5": {"prefetch_depth": 5},
    "recompute_blocks": {"recompute": "blocks"},
    "recompute_inside": {"recompute": "inside"},
    "zero2_recompute_blocks": {"reshard_after_forward": False, "recompute": "blocks"},
    "zero2_depth5_sync": {
        "reshard_after_forward": False,
        "prefetch_depth": 5,
        "publish": "sync",
    },
    "depth0_recompute_inside": {"prefetch_depth": 0, "recompute": "inside"},
    "depth2_recompute_blocks": {"prefetch_depth": 2, "recompute": "blocks"},
    "gather": {"mode": "gather"},
    "gather_zero2_depth0": {
        "mode": "gather",
        "reshard_after_forward": False,
        "prefetch_depth": 0,
    },
    "gather_depth2_recompute": {"mode": "gather", "prefetch_depth": 2, "recompute": "blocks"},
}


def _case(mesh: tuple[int, int], name: str) -> Case:
    variant, base = dict(VARIANTS[name]), dict(BASES[mesh])
    recompute, publish = variant.pop("recompute", None), variant.pop("publish", "async")
    return Case(
        f"bits-{mesh[0]}x{mesh[1]}-{name}",
        "deep",
        mesh,
        recompute=recompute,
        muon={"publish": publish},
        **{**base, "dedicate": {**base.get("dedicate", {}), **variant}},
    )


CASES = {(mesh, name): _case(mesh, name) for mesh in BASES for name in VARIANTS}


@each_communication_at_length
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("zero3", "gather")])
@pytest.mark.parametrize("mesh", BASES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_same_bits(mesh: tuple[int, int], name: str) -> None:
    base = "gather" if name.startswith("gather") else "zero3"
    cases = list(CASES.values())
    expected = outcomes(CASES[mesh, base], cases)
    for rank, (one, other) in enumerate(
        zip(outcomes(CASES[mesh, name], cases), expected, strict=True)
    ):
        assert one.losses == other.losses, f"rank {rank}"
        assert one.norms == other.norms, f"rank {rank}"
        for step, (weights, reference) in enumerate(zip(one.weights, other.weights, strict=True)):
            _assert_same(weights, reference, f"rank {rank}, after {step} steps")
        assert one.state, f"rank {rank} has no state at all"
        _assert_same(one.state, other.state, f"rank {rank}, state")


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    assert one.keys() == other.keys(), where
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, f"{where}: {differing}"


@each_communication_at_length
@pytest.mark.parametrize("mesh", BASES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_the_runs_train(mesh: tuple[int, int]) -> None:
    """Control: equal bits mean nothing if nothing changes."""
    result = outcomes(CASES[mesh, "zero3"], list(CASES.values()))[0]
    for name, first in result.weights[0].items():
        assert torch.isfinite(result.weights[-1][name]).all()
        # A norm's gain of one moves by less than one bfloat16 step in three steps of AdamW.
        if first.ndim > 1:
            for step in range(3):
                assert not torch.equal(result.weights[step + 1][name], result.weights[step][name])
