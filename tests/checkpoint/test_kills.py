"""Lost ranks: whoever is killed or hangs, and when, no checkpoint is lost and no torn one is used.

`scripts/kill_loop.py` does the same with a real job and its launcher.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.checkpoint.kills import LIMIT, SLOW, Kill, Plan, contents, kill_once, train
from tests.worlds import run_world
from torchtitan_dmuon.lost_rank import TIMED_OUT, is_lost

AWAITED = re.compile(
    r"dmuon \w+ of .+ \(rank \d"  # an operation, of what, between whom
    r"|(saving|loading) \S+step-\d+ failed: waiting for the other ranks"
    r"|waiting for the first rank's choice"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The last checkpoint of a job that nothing happened to."""
    plan = Plan(str(tmp_path_factory.mktemp("undisturbed")), steps=20)
    run_world(2, train, plan, timeout_seconds=120)
    return contents(Path(plan.folder, "step-20"))


def _named(kill: Kill) -> bool:
    return all(AWAITED.search(words) for words in kill.words.values())


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_random_kills_lose_nothing(
    mode: str, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """kill -9 of a random rank at random moments of steps and saves: the other rank ends at once
    and says what it waited for, every checkpoint in the folder is whole, what was complete stays,
    and the job that went on from there ends with the bytes of one that nothing happened to."""
    draw = random.Random(mode)
    plan = Plan(str(tmp_path), mode=mode, steps=20)
    aims = ["step", "save", "commit", "delete"]
    draw.shuffle(aims)
    newest = 0
    for aim in aims:
        kill = Kill(aim, draw.randrange(2))
        kill_once(plan, kill, newest, draw)
        assert _named(kill), kill
        assert kill.seconds < SLOW, kill
        newest = kill.newest or 0
    assert run_world(2, train, plan, timeout_seconds=60) == [newest, newest]
    assert contents(tmp_path / "step-20") == undisturbed


def test_a_kill_while_loading_loses_nothing(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """A rank that dies with the folder claimed, or in the middle of reading, leaves the folder as
    it was, and free for the next attempt."""
    draw = random.Random(0)
    plan = Plan(str(tmp_path), steps=20)
    first = Kill("step", 1)
    kill_once(plan, first, 0, draw)
    newest = first.newest
    assert newest is not None
    for rank in (0, 1):
        kill = Kill("load", rank)
        kill_once(plan, kill, newest, draw)
        assert _named(kill), kill
        newest = kill.newest or 0
    assert run_world(2, train, plan, timeout_seconds=60) == [newest, newest]
    assert contents(tmp_path / "step-20") == undisturbed


@pytest.mark.parametrize("aim", ["step", "save"])
def test_a_hung_rank_is_waited_for_no_longer_than_the_limit(aim: str, tmp_path: Path) -> None:
    """A rank that stops answering, in a step or in the middle of a save, ends the others within the
    time-out, with a word on what they waited for; the save that it broke off is not there."""
    kill = Kill(aim, 2, hang=True)
    kill_once(Plan(str(tmp_path), mesh=(1, 3)), kill, 0, random.Random(1))
    assert _named(kill), kill
    assert any(TIMED_OUT in words for words in kill.words.values()), kill
    # The first to give up ends, so that another may lose that one before its own limit.
    assert all(is_lost(words) for words in kill.words.values()), kill
    # A rank may wait one limit for a rank that itself waits for another.
    assert LIMIT / 2 < kill.seconds < 3 * LIMIT + SLOW, kill
