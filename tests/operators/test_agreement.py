"""Ranks that do not mean the same call: one error that names them, instead of wrong data."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import my_rank
from tests.worlds import run_world
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.operators import Operators, Segment

pytestmark = pytest.mark.usefixtures("rank_server")

UNTOUCHED = 0xEE
SECONDS = 20.0
"""Limit of waits: long enough that an error before it is none of time."""


def _buffers(operators: Operators) -> tuple[torch.Tensor, torch.Tensor]:
    buffers = operators.empty(256, torch.uint8), operators.empty(256, torch.uint8)
    for buffer in buffers:
        buffer.fill_(UNTOUCHED)
    return buffers


def _order(operators: Operators) -> None:
    """Two gathers of one owner, swapped on rank 1."""
    groups = [operators.all_gather_v([Segment(0, 64, 0)], label=label) for label in "AB"]
    calls = list(zip(groups, _buffers(operators), strict=True))
    for group, buffer in calls if my_rank() == 0 else reversed(calls):
        group.run(buffer)


def _places(operators: Operators) -> None:
    """Another buffer on rank 1."""
    buffers = _buffers(operators)
    operators.all_gather_v([Segment(0, 64, 0)], label="A").run(buffers[my_rank()])


def _homes(operators: Operators) -> None:
    """Another reduced buffer on rank 1."""
    buffers = [operators.empty(16, torch.float32) for _ in range(3)]
    group = operators.reduce_scatter_v([Segment(0, 64, 0)], torch.float32, label="A")
    group.run(buffers[0], buffers[1 + my_rank()])


def _tables(operators: Operators) -> None:
    """A longer segment on rank 1."""
    buffer, _ = _buffers(operators)
    segments = [Segment(0, 64 if my_rank() == 0 else 80, 0)]
    operators.all_gather_v(segments, label="A").run(buffer)


def _dtypes(operators: Operators) -> None:
    """Another dtype on rank 1."""
    dtype = torch.float32 if my_rank() == 0 else torch.bfloat16
    buffer = operators.empty(64 // dtype.itemsize, dtype)
    operators.reduce_scatter_v([Segment(0, 64, 0)], dtype, label="A").run(buffer, buffer)


def _stale(operators: Operators) -> None:
    """Rank 1 leaves out a gather of rank 0, whose data waits for its next one."""
    buffer, other = _buffers(operators)
    left_out = operators.all_gather_v([Segment(0, 64, 0)], label="A")
    mine = operators.all_gather_v([Segment(0, 64, 1)], label="B")
    if my_rank() == 0:
        left_out.run(buffer)
    else:
        mine.run(other)
    left_out.run(buffer)


# What a rank must be told of the other one, by case.
CASES: dict[str, tuple[Callable[[Operators], None], str]] = {
    "order": (_order, "calls [AB]"),
    "places": (_places, "has its buffer at byte (0|256) of the window, not (0|256)"),
    "homes": (_homes, r"has its reduced buffer at byte (64|128) of the window, not (64|128)"),
    "tables": (_tables, "has made it of other segments or sizes"),
    "dtypes": (_dtypes, "has made it for another dtype"),
    "stale": (_stale, "(made it as call 1|calls [AB])"),
}


def _world(job: str, mesh: tuple[int, int]) -> dict[str, str]:
    texts = {}
    for name, (call, _) in CASES.items():
        if name == "stale" and mesh[0] == 1:
            continue  # rank 1 of the node does not exist as a node
        operators = cases.open_operators(
            f"{job}-{name}", mesh, seconds=SECONDS, window_bytes=1 << 14
        )
        texts[name] = "no error"
        try:
            call(operators)
        except CommunicationError as error:
            texts[name] = str(error)
            with pytest.raises(CommunicationError, match="after a failed call"):
                call(operators)
        if name == "places" and mesh == (1, 2):
            assert (operators.memory[:512] == UNTOUCHED).all(), "a buffer was written"
        operators.close()
    return texts


@cache
def _texts(mesh: tuple[int, int]) -> list[dict[str, str]]:
    return run_world(2, _world, cases.job_name(), mesh, timeout_seconds=100)


def _words(rank: int, words: str) -> str:
    return (
        rf"(all_gather_v|reduce_scatter_v) of [AB]: rank {rank} and rank {1 - rank} disagree about "
        rf"call \d: rank {1 - rank} {words}; all ranks make the same calls"
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "stale"])
def test_ranks_of_a_node_hear_that_they_disagree(name: str) -> None:
    """Each names the other, and what differs; before any byte is written."""
    for rank, texts in enumerate(_texts((1, 2))):
        assert re.fullmatch(_words(rank, CASES[name][1]) + ".*", texts[name]), texts


@pytest.mark.parametrize("name", CASES)
def test_receivers_hear_that_the_sender_is_in_another_call(name: str) -> None:
    """Between nodes a put carries its call: who gets it does not take it for another's.

    The sender's call may have ended: it hears nothing of its receivers.
    """
    receiver = 0 if name in ("homes", "dtypes") else 1
    texts = _texts((2, 1))[receiver]
    assert re.fullmatch(_words(receiver, CASES[name][1]) + ".*", texts[name]), texts


def _labels(job: str) -> str:
    operators = cases.open_operators(job, (1, 2), seconds=SECONDS, window_bytes=4096)
    buffer = operators.empty(64, torch.uint8)
    group = operators.all_gather_v([Segment(0, 64, 0)], label=f"of rank {my_rank()}")
    try:
        group.run(buffer)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_group_that_nobody_here_made_is_said_to_be_one() -> None:
    """A label is a part of what is compared; only this rank's own ones can be named."""
    texts = run_world(2, _labels, cases.job_name())
    assert all("calls a group that this rank has not made" in text for text in texts), texts
