"""What line C passes holds on line D: gathers and reductions in the pool, over the operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.runtime import reference
from tests.runtime.harness import Case, Outcome, open_world, run_case
from tests.runtime.models import FIXTURES
from tests.runtime.reference import distance
from tests.worlds import pack, run_world, unpack
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.streams import Event
from torchtitan_dmuon.comm.window import Operation

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.slow]

TOLERANCE = 1e-4
CLIP = 0.5
CALLS: Counter[str] = Counter()
"""On a rank: operator calls of the present case."""


class Counting(OperatorsCommunicator):
    """Counts the calls that reached the operators."""

    def _run(self, operation: Operation, *args: Any) -> Event:
        CALLS[operation.name.lower()] += 1
        return super()._run(operation, *args)


def open_operators(
    ranks: Sequence[Sequence[int]],
    device: torch.device,
    timeout: timedelta | None,
    *,
    ranks_per_node: int,
) -> OperatorsCommunicator:
    return Counting(ranks, device, timeout, ranks_per_node=ranks_per_node)


def _case(
    fixture: str, mesh: tuple[int, int], ranks_per_node: int, zero: int, **options: Any
) -> Case:
    dedicate = {
        "reshard_after_forward": zero == 3,
        "communication": partial(open_operators, ranks_per_node=ranks_per_node),
        **options.pop("dedicate", {}),
    }
    name = f"{fixture}-{mesh[0]}x{mesh[1]}-node{ranks_per_node}-zero{zero}"
    # The pool opens in the first step behind the second micro-batch.
    return Case(name, fixture, mesh, steps=5, dedicate=dedicate, **options)


CASES = [
    # FSDP: on one node, and on two virtual ones.
    _case("heads", (1, 4), 4, 3),
    _case("fused", (1, 4), 2, 2, accumulate=3, clip=CLIP),
    _case("decoder", (1, 4), 1, 3, clip=CLIP),
    # DDP.
    _case("heads", (4, 1), 2, 3),
    _case("decoder", (4, 1), 1, 3, clip=CLIP),
    # HSDP: a row is one node, or two.
    _case("heads", (2, 2), 2, 2),
    _case("fused", (2, 2), 2, 3, accumulate=3, clip=CLIP, defer=True),
    _case("decoder", (2, 2), 1, 3, accumulate=3),
]
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
BITS = {
    name: replace(_case("deep", (2, 2), 2, zero, dedicate={**BF16, **more}), name=name)
    for name, zero, more in [
        ("bf16-zero3", 3, {}),
        ("bf16-zero2", 2, {}),
        ("bf16-depth3", 3, {"prefetch_depth": 3}),
        ("bf16-again", 3, {}),
    ]
}


def _run(cases: list[Case]) -> bytes:
    open_world()
    results = []
    for case in cases:
        CALLS.clear()
        outcome = run_case(case)
        results.append((outcome, dict(CALLS)))
    return pack(results)


@cache
def _all() -> dict[str, list[tuple[Outcome, dict[str, int]]]]:
    cases = [*CASES, *BITS.values()]
    ranks = [unpack(data) for data in run_world(4, _run, cases, timeout_seconds=240)]
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_updates_are_those_of_one_process(case: Case) -> None:
    """Every parameter's update in every step, as tests/runtime/test_equivalence.py for line C."""
    expected = reference.train(
        FIXTURES[case.fixture],
        ranks=case.size,
        micro_batches=case.accumulate,
        clip=case.clip,
        steps=case.steps,
    )
    results = [outcome for outcome, _ in _all()[case.name]]
    for name in expected.weights[0]:
        for step in range(case.steps):
            off = distance(results[0].update(step, name), expected.update(step, name))
            assert off <= TOLERANCE, f"step {step}: {name} is off by {off:.1e}"
    for r in results:
        assert r.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert r.norms == pytest.approx(expected.norms, rel=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_operators_were_used(case: Case) -> None:
    """Transport that was chosen but never called would pass every other test."""
    for _, calls in _all()[case.name]:
        assert calls["reduce_scatter_v"] > 0
        # One column holds everything: nothing is gathered.
        assert (calls.get("all_gather_v", 0) > 0) == (case.mesh[1] > 1)


@pytest.mark.parametrize("name", [name for name in BITS if name != "bf16-zero3"])
def test_bf16_sums_do_not_depend_on_timing(name: str) -> None:
    """ZeRO-2, ZeRO-3, prefetch depth and repetition change no bit (invariant I5)."""
    for (one, _), (other, _) in zip(_all()[name], _all()["bf16-zero3"], strict=True):
        assert one.losses == other.losses
        for weights, base in zip(one.weights, other.weights, strict=True):
            assert [n for n in weights if not torch.equal(weights[n], base[n])] == []
        assert one.state.keys() == other.state.keys()
        assert [n for n in one.state if not torch.equal(one.state[n], other.state[n])] == []


def test_the_runs_train() -> None:
    """Control: equal bits mean nothing if nothing changes."""
    result = _all()["bf16-zero3"][0][0]
    for name, first in result.weights[0].items():
        assert torch.isfinite(result.weights[-1][name]).all()
        assert first.ndim == 1 or not torch.equal(result.weights[-1][name], first), name
