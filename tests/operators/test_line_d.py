"""Line D's pool, signatures and publish under training: what only they promise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.operators.line_d_cases import OPENED, RUNS, STEPS, run_cases
from tests.runtime.models import FIXTURES
from tests.worlds import run_world, unpack
from torchtitan_dmuon.runtime.pool import Space

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.slow]


@cache
def _ranks() -> list[dict[str, Any]]:
    return [unpack(data) for data in run_world(4, run_cases, tuple(RUNS), timeout_seconds=280)]


def _same(one: str, other: str) -> bool:
    weights, others = _ranks()[0][one][1], _ranks()[0][other][1]
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_every_gradient_is_born_in_its_place() -> None:
    """From the second step with a pool on, autograd allocates every owned gradient in the pool."""
    for rank in _ranks():
        facts, _ = rank["in_pool"]
        last = facts["count"]
        assert all(facts["gradients"][-last:])
        assert all(facts["parameters"][-last:])
        assert not any(facts["gradients"][: OPENED * last])
        hits, misses, _ = facts["hits"]
        assert (hits, misses) == ((STEPS - OPENED) * last, 0)


@pytest.mark.parametrize("name", ["recompute", "accumulate", "zero2", "depth"])
def test_no_signature_misses(name: str) -> None:
    """Recomputation, accumulation and the order of gathers do not confuse the signatures."""
    for rank in _ranks():
        hits, misses, _ = rank[name][0]["hits"]
        assert hits > 0
        assert misses == 0


@pytest.mark.parametrize("other", ["copied", "zero2", "depth", "in_pool", "late"])
def test_the_pool_changes_no_bit(other: str) -> None:
    """Where gradients are born, ZeRO-2 and prefetch depth change nothing (invariant I5)."""
    assert _same("plain", other)


def test_without_signatures_gradients_are_copied() -> None:
    """Control: the switch is really off, and the operators run all the same."""
    facts, _ = _ranks()[0]["copied"]
    assert facts["hits"] is None
    assert facts["operated"] == _ranks()[0]["plain"][0]["operated"]


def test_gathers_reductions_and_publishes_use_the_operators() -> None:
    """Every layer's gather (twice, ZeRO-3) and reduction, and one publish per step."""
    facts, _ = _ranks()[0]["plain"]
    layers = len(FIXTURES["deep"].build().layers)  # type: ignore[arg-type]
    operated = facts["operated"]
    assert operated["reduce_scatter_v"] == layers * (STEPS - OPENED)
    assert operated["all_gather_v"] >= (2 * layers - 1) * (STEPS - OPENED)
    assert operated["publish"] == STEPS - OPENED + 1
    assert facts["places"] == 2 * layers


def test_zero3_needs_less_of_the_pool() -> None:
    """Places are shared by layers that are never in use together; ZeRO-2 keeps all of them."""
    zero3, zero2 = (_ranks()[0][name][0]["bytes"] for name in ("plain", "zero2"))
    assert zero3["parameters"] < zero2["parameters"]


def test_accumulation_is_the_same_deferred_or_not() -> None:
    """Sums of micro-batches: reduced one by one, or once at the end, within float32 rounding."""
    one, other = (_ranks()[0][name][1] for name in ("accumulate", "defer"))
    for name, weights in one.items():
        torch.testing.assert_close(weights, other[name], rtol=1e-4, atol=1e-6)


def test_evaluation_failures_and_new_weights_between_steps() -> None:
    """Everything is still finite, learned and on the operators after them."""
    for rank in _ranks():
        facts, weights = rank["interrupted"]
        assert all(torch.isfinite(value).all() for value in weights.values())
        assert facts["operated"]["reduce_scatter_v"] > 0
    facts = _ranks()[0]["interrupted"][0]
    assert facts["operated"]["publish"] == STEPS - OPENED + 2, "new weights are published once more"


def test_a_checkpoint_goes_on_in_another_job() -> None:
    """Loaded into the job itself it goes on bit for bit as without; into a new one, which sums its
    first micro-batches over collectives, within float32 rounding."""
    facts, weights = _ranks()[0]["resumed"]
    plain_weights = _ranks()[0]["plain"][1]
    for name, value in weights.items():
        assert torch.equal(value, plain_weights[name]), name
        torch.testing.assert_close(facts["other"][name], value, rtol=1e-4, atol=1e-5)


def test_an_order_that_was_not_recorded() -> None:
    """What does not fit the plan lives elsewhere for that time; the sums are those of line C."""
    facts, weights = _ranks()[0]["reordered"]
    others = _ranks()[0]["reordered_c10d"][1]
    assert facts["operated"]["reduce_scatter_v"] > 0
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("uneven_recorded", "uneven_later", "skipping", "replaced", "small"),
        *("arrays", "reversed", "repeated", "unsummed", "attached"),
    ],
)
def test_what_ranks_do_differently_changes_no_sum(name: str) -> None:
    """One rank leaves a backward out; ranks skip other layers; hooks keep and replace gradients; a
    column owns nothing; arrays of numpy's; layers in reverse, or several times; a backward that is
    not summed behind one that is; a layer that now passes a gradient on: the weights are those of
    line C."""
    for rank in _ranks():
        _, weights = rank[f"{name}_operators"]
        _, others = rank[f"{name}_c10d"]
        for key, value in weights.items():
            torch.testing.assert_close(value, others[key], rtol=1e-4, atol=1e-5)


def test_a_layer_that_was_left_out_gets_no_place() -> None:
    """Its gradients are already being summed when autograd tells of it."""
    for rank in _ranks():
        _, misses, _ = rank["skipping_operators"][0]["hits"]
        assert misses == 0


def test_ranks_that_recorded_different_orders_record_again() -> None:
    """The pool opens with the first micro-batch that was the same on every rank."""
    for rank in _ranks():
        facts, weights = rank["differing"]
        assert facts["operated"]["publish"] == STEPS - 3, "opened in the fourth step"
        for name, value in weights.items():
            torch.testing.assert_close(value, rank["c10d"][1][name], rtol=1e-4, atol=1e-5)


def test_ranks_that_never_agree_go_on_without_a_pool() -> None:
    """After some attempts; they train over collectives, with the bits of line C."""
    for rank in _ranks():
        facts, weights = rank["always_differing"]
        assert (facts["operated"], facts["parts"], facts["hits"]) == ({}, {}, None)
        assert all(torch.equal(weights[name], rank["c10d"][1][name]) for name in weights)


def test_no_room_for_the_pool() -> None:
    """Found when its size is known: `auto` goes on over collectives, on every rank, with line C's
    bits; "operators" ends, and says why."""
    for rank in _ranks():
        facts, weights = rank["crowded_auto"]
        assert (facts["operated"], facts["parts"]) == ({}, {})
        assert all(torch.equal(weights[name], rank["c10d"][1][name]) for name in weights)
        assert "rank 1: no room" in rank["crowded_operators"][0]["text"]


def test_gradients_of_all_layers_are_never_in_the_pool_together() -> None:
    """At most two sums on their way and two layers beside them have places of their own."""
    parts = _ranks()[0]["plain"][0]["parts"]
    layers = sorted(_ranks()[0]["plain"][0]["gradient_bytes"])
    assert parts["gradients"] <= sum(layers[-4:]) < sum(layers)


def test_an_update_that_failed_does_not_make_the_next_step_wait() -> None:
    """It ends at once, and says that the publish was left."""
    rank: dict[str, Any]
    for rank in [
        unpack(data) for data in run_world(4, run_cases, ("failing",), timeout_seconds=100)
    ]:
        facts, _ = rank["failing"]
        assert facts["seconds"] < 10
        assert facts["text"].startswith("an update failed midway")


def test_kept_gradients_keep_their_values() -> None:
    """A gradient that a hook keeps is moved out of the pool before its place is used again."""
    for rank in _ranks():
        facts, _ = rank["held"]
        assert facts["same"] == [True] * facts["count"]


def test_arrays_of_gradients_keep_their_values() -> None:
    """An array cannot move: what a later sum writes over is put back behind it."""
    for rank in _ranks():
        facts, _ = rank["arrays_operators"]
        assert facts["same"] is True


def test_a_layer_that_is_used_again_later_changes_no_bit() -> None:
    """Its first gradient is put back behind the sums of others that need the place, so that ZeRO-2
    and ZeRO-3, which order things differently, agree."""
    assert _same("repeated_operators", "repeated_zero2")


def test_the_pools_parts_are_told() -> None:
    """All that a rank's pool takes, the fabric's rings and words too, the same on every rank."""
    facts, _ = _ranks()[0]["plain"]
    parts = facts["parts"]
    assert list(parts) == [
        *(space.value for space in Space), "owner window", "copies", "rings", "control"
    ]  # fmt: skip
    assert all(n > 0 for n in parts.values())
    assert sum(parts.values()) == facts["memory"]
    assert all(rank["plain"][0]["parts"] == parts for rank in _ranks())
