"""The job of scripts/soak.py: its judgement, and that a short soak finds what it should find."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from tests.operators import soaking
from tests.operators.soaking import (
    KINDS,
    OPENING,
    PLACES,
    PLAIN_STEPS,
    Mark,
    Naps,
    Record,
    Soak,
)
from tests.worlds import RankFailed, run_world
from torchtitan_dmuon.comm.publish import Publish

MIB = 2**20
SHORT = Soak((2, 2), steps=24, digest_at=24, check_every=8, marks=4, nap_share=0.1, long_share=0.2)
CALM = replace(SHORT, nap_share=0.0, long_share=0.0)

FIRST = Mark(10, 100 * MIB, MIB, 30, 50, 140, (100, 0, 0, 5, 0), 20.0)
LAST = replace(FIRST, step=100, resident=109 * MIB, gradients=(1099, 1, 1, 5, 0))


def record(first: Mark = FIRST, last: Mark = LAST) -> Record:
    return Record(losses=[2.0, 1.0], digests={2: "a"}, marks=[first, last])


def test_what_steps_do_depends_on_seed_and_step_alone() -> None:
    """Ranks, and runs with naps and without, take the same steps; every kind comes up early."""
    kinds = [soaking.kind_of(SHORT, step) for step in range(1, 301)]
    assert kinds == [soaking.kind_of(CALM, step) for step in range(1, 301)]
    assert kinds != [soaking.kind_of(replace(SHORT, seed=1), step) for step in range(1, 301)]
    assert set(kinds) == set(KINDS)
    assert set(kinds[:PLAIN_STEPS]) == {"plain"}


def naps_of(soak: Soak, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(soaking.time, "sleep", slept.append)
    naps = Naps(soak, rank)
    for step in range(200):
        naps.begin_step(step)
        for place in PLACES:
            naps.take(place)
    assert sum(naps.count.values()) == len(slept)
    return slept


def test_naps_follow_from_seed_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rank naps alike in every run; ranks nap at different moments; none at share 0."""
    one = naps_of(SHORT, 0, monkeypatch)
    assert one == naps_of(SHORT, 0, monkeypatch)
    assert one != naps_of(SHORT, 1, monkeypatch)
    assert len(one) > 100
    assert max(one) >= soaking.LONG_SECONDS[0]
    assert naps_of(CALM, 0, monkeypatch) == []


def test_what_stays_within_its_bounds_is_no_growth() -> None:
    """9 MiB more on 100 MiB is the limit; 1 miss of 1,000 is."""
    assert soaking.grown([record()]) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (replace(LAST, resident=109 * MIB + 1), "memory grew by 9.0 MiB"),
        (replace(LAST, shared=MIB + 1), "shared grew"),
        (replace(LAST, threads=31), "threads grew from 30 to 31"),
        (replace(LAST, descriptors=51), "descriptors grew"),
        (replace(LAST, tensors=141), "tensors grew"),
        (replace(LAST, gradients=(1097, 3, 3, 5, 0)), "99.7"),
        (replace(LAST, gradients=FIRST.gradients), "0.0000%"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_growth_is_named(last: Mark, words: str) -> None:
    """Each thing that grows, and gradients that are not born in their places, names its rank."""
    (failure,) = soaking.grown([record(), record(last=last)])
    assert failure.startswith("rank 1: ")
    assert words in failure


def test_one_bit_of_a_loss_is_a_difference() -> None:
    """Losses are compared by bits, in the steps that both runs took; so are the weights."""
    quiet, longer = [record()], replace(record(), losses=[2.0, 1.0, 0.5])
    assert soaking.different(quiet, [longer]) == []
    close = replace(longer, losses=[2.0, math.nextafter(1.0, 2.0), 0.5])
    assert "the loss of step 2" in soaking.different(quiet, [close])[0]
    other = replace(longer, digests={2: "b"})
    assert soaking.different(quiet, [other]) == ["rank 0: the weights differ after step 2"]
    none = replace(longer, digests={})
    assert soaking.different(quiet, [none]) == ["rank 0: no digest of the weights after step 2"]


def test_ranks_apart_are_named() -> None:
    """A rank with other full weights than rank 0, or with a loss that is not finite."""
    assert soaking.apart([record(), record()]) == []
    (failure,) = soaking.apart([record(), replace(record(), digests={2: "b"})])
    assert failure.startswith("rank 1: its full weights after step 2")
    (failure,) = soaking.apart([record(), replace(record(), losses=[math.nan])])
    assert failure == "rank 1: a loss is not finite"


@pytest.mark.usefixtures("rank_server")
def test_naps_change_nothing() -> None:
    """Line D with naps everywhere: the same bits, nothing grows, every place was napped at.

    Also while the pool opens: a rank whose copies moved there late would lose weights that others
    had published into them already.
    """
    quiet = run_world(4, soaking.run, CALM, timeout_seconds=120)
    records = run_world(4, soaking.run, SHORT, timeout_seconds=120)
    assert soaking.different(quiet, records) == []
    assert soaking.apart(records) == []
    assert soaking.grown(records) == []
    assert not quiet[0].naps
    napped = sum((r.naps for r in records), Counter())
    assert set(napped) == {*PLACES, OPENING}
    for one in records:
        assert one.comparisons == 3
        assert one.operated["publish"] > SHORT.steps - PLAIN_STEPS
        assert one.operated["reduce_scatter_v"] > 0


def deaf() -> None:
    """Gather without waiting for what the publish brings."""
    Publish.wait = lambda self, first, stop, step, name=None: None  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.usefixtures("rank_server")
def test_a_gather_that_does_not_wait_is_found() -> None:
    """Control: with naps, weights that are one step old change the losses of some rank, or its
    copies are found to be others than its peers'."""
    quiet = run_world(4, soaking.run, CALM, timeout_seconds=120)
    try:
        records = run_world(4, soaking.run, SHORT, deaf, timeout_seconds=120)
    except RankFailed as error:
        assert "replicas have drifted apart" in str(error)
        return
    assert any("the loss of step" in failure for failure in soaking.different(quiet, records))
