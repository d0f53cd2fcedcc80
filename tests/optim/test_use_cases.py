"""What people who train with Muon need, on several ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn as nn

import torchtitan_dmuon as dmuon
from tests.runtime import reference
from tests.runtime.harness import Case, dedicate, make_mesh, open_world, outcomes
from tests.runtime.models import FIXTURES
from tests.runtime.reference import distance
from tests.worlds import run_world

ONE_STEP = [(1, 1), (1, 2), (2, 2), (1, 4)]

# One batch whole, in four micro-batches, and in four with synchronisation put off.
CUTS = {"whole": (1, False), "cut": (4, False), "deferred": (4, True)}
ACCUMULATION = {
    (mesh, cut): Case(f"uc05-{mesh}-{cut}", "heads", mesh, accumulate=n, defer=defer)
    for mesh in ONE_STEP
    for cut, (n, defer) in CUTS.items()
}
# A limit that is never reached, one that always is, and one for the AdamW route only.
LIMITS = {"wide": 1e9, "tight": 1e-2}
CLIPPING = {
    (mesh, limit): Case(f"uc06-{mesh}-{limit}", "decoder", mesh, steps=1, clip=LIMITS[limit])
    for mesh in ONE_STEP
    for limit in LIMITS
}
# Fewer matrices than ranks.
FEW = {
    (mesh, n): Case(f"uc09-{mesh}-{n}", f"heads{n}", mesh, steps=2, clip=1.0)
    for mesh in [(1, 4), (2, 2)]
    for n in (1, 2, 3)
}
CASES = [*ACCUMULATION.values(), *CLIPPING.values(), *FEW.values()]


@pytest.mark.parametrize("mesh", ONE_STEP, ids=str)
def test_accumulation_is_a_detail_of_the_batch(mesh: tuple[int, int]) -> None:
    """Gradients of F1 are exact, so weights and momenta agree to the last bit."""
    whole = outcomes(ACCUMULATION[mesh, "whole"], CASES)
    matrices = whole[0].num_matrices
    assert matrices == 3 + 5 + 9
    for cut in ("cut", "deferred"):
        results = outcomes(ACCUMULATION[mesh, cut], CASES)
        for step in range(3):
            assert sum(r.orthogonalized[step] for r in results) == matrices
            for name, weight in whole[0].weights[step + 1].items():
                assert torch.equal(results[0].weights[step + 1][name], weight), name
        for result, expected in zip(results, whole, strict=True):
            assert result.state.keys() == expected.state.keys()
            assert all(torch.equal(result.state[k], v) for k, v in expected.state.items())


@cache
def _clipped(ranks: int, limit: float) -> reference.Trace:
    return reference.train(FIXTURES["decoder"], ranks=ranks, steps=1, clip=limit)


@pytest.mark.parametrize("mesh", ONE_STEP, ids=str)
def test_clipping_acts_on_gradients_never_on_the_update(mesh: tuple[int, int]) -> None:
    """The norm is that of raw gradients, matrices move alike, AdamW's momentum scales."""
    names = reference.matrix_names(FIXTURES["decoder"].build())
    results = {limit: outcomes(CLIPPING[mesh, limit], CASES) for limit in LIMITS}
    for limit, ranks in results.items():
        expected = _clipped(mesh[0] * mesh[1], LIMITS[limit])
        for result in ranks:
            assert result.norms == pytest.approx(expected.norms, rel=1e-6)
    wide, tight = results["wide"], results["tight"]
    for name in names:
        assert distance(tight[0].update(0, name), wide[0].update(0, name)) <= 1e-3, name
    scale = LIMITS["tight"] / wide[0].norms[0]
    assert scale < 0.1, "nothing is clipped"
    compared = set()
    for one, other in zip(tight, wide, strict=True):
        for key in one.state:
            if key.endswith(("exp_avg", "momentum_buffer")) and one.state[key].numel():
                assert distance(one.state[key], scale * other.state[key]) <= 1e-4, key
                compared.add(key)
    assert len(compared) == len(tight[0].weights[0])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=str)
def test_more_ranks_than_matrices(mesh: tuple[int, int], n: int) -> None:
    """Ranks that own nothing take part, and the update is the same."""
    expected = reference.train(FIXTURES[f"heads{n}"], ranks=4, steps=2, clip=1.0)
    results = outcomes(FEW[mesh, n], CASES)
    for step in range(2):
        assert sorted(r.orthogonalized[step] for r in results) == [0] * (4 - n) + [1] * n
        for name in expected.weights[0]:
            assert distance(results[0].update(step, name), expected.update(step, name)) <= 1e-4
    assert all(r.norms == pytest.approx(expected.norms, rel=1e-6) for r in results)


def _report(mesh: tuple[int, int], fixture: str) -> tuple[int, str, list[str]]:
    open_world()
    model = FIXTURES[fixture].build()
    owned = dedicate(model, make_mesh(mesh), FIXTURES[fixture])
    holders = [row.holder for row in dmuon.Muon(model).routing().rows]
    return owned.summary().idle_ranks, owned.table(), holders


def test_the_report_shows_idle_ranks() -> None:
    found = run_world(4, _report, (2, 2), "heads2")
    idle, table, holders = found[0]
    assert all(rank == found[0] for rank in found)
    assert idle == 2 and "2 ranks without a unit" in table
    assert len(set(holders)) == 2


def test_replicas_share_the_work() -> None:
    """With as many matrices as ranks and more, every rank of the 2 x 2 mesh owns some."""
    results = outcomes(ACCUMULATION[(2, 2), "whole"], CASES)
    for step in range(3):
        counts = [r.orthogonalized[step] for r in results]
        assert min(counts) >= 1 and sum(counts) == results[0].num_matrices


def _nothing(name: str, parameter: nn.Parameter) -> bool:
    return False


def _select_nothing() -> str:
    open_world(20)
    with pytest.raises(ValueError) as caught:
        dedicate(FIXTURES["decoder"].build(), make_mesh((1, 2)), predicate=_nothing)
    return str(caught.value)


def test_a_predicate_that_matches_nothing_raises_on_all_ranks() -> None:
    """At once, naming the predicate, so that nobody waits for a rank that left."""
    assert all("_nothing" in message for message in run_world(2, _select_nothing))


def _scaled_matrices(scale: bool) -> dict[str, float]:
    model = FIXTURES["decoder"].build()
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    FIXTURES["decoder"].loss(model, 0, 0, 1, 1).backward()
    dmuon.clip_grad_norm_(model, 1e-2, scale_matrices=scale)
    optimizer.step()
    state = optimizer.state
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            key = "momentum_buffer" if group["route"] == "matrix" else "exp_avg"
            found[name] = float(state[parameter][key].norm())
    return found


def test_scaling_of_matrix_gradients_is_a_choice() -> None:
    """`scale_matrices=False` keeps matrices out of the scaling, and nothing else."""
    scaled, kept = _scaled_matrices(True), _scaled_matrices(False)
    for name in reference.matrix_names(FIXTURES["decoder"].build()):
        assert kept[name] > 10 * scaled[name], name
    assert kept["embedding.weight"] == scaled["embedding.weight"]
    assert kept["layers.0.ffn_norm.weight"] == scaled["layers.0.ffn_norm.weight"]
