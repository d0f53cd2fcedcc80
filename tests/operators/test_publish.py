"""The publish over shared memory: owners' tasks reach every row's copy, whole and of their step."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import job_name, my_rank
from tests.worlds import World, run_world
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.operators import Operators, ReduceScatterV, Segment, place
from torchtitan_dmuon.comm.publish import Publish
from torchtitan_dmuon.comm.window import PUBLISH

pytestmark = pytest.mark.usefixtures("rank_server")

UNTOUCHED = 0xEE
CHUNK = 64
GAP = 32
LIMIT = 3.0
"""Seconds that operations of the tests with a fault wait."""


def _tasks(rows: int, rail: int, seed: int) -> list[Segment]:
    """Return tasks of one rail: some of a byte, some of more tiles than may be on their way."""
    chance = random.Random(seed * 100 + rail)
    lengths = [chance.choice((1, 15, CHUNK, CHUNK + 16, 40 * CHUNK, 70 * CHUNK)) for _ in range(14)]
    offsets, _ = place([length + GAP for length in lengths])
    # The last row may own nothing.
    owners = [chance.randrange(max(1, rows - seed % 2)) for _ in lengths]
    return [Segment(o, n, row, rail) for o, n, row in zip(offsets, lengths, owners, strict=True)]


def _bytes(task: Segment, number: int, step: int) -> torch.Tensor:
    return cases.payload(task.bytes, 1 + (step * 31 + number * 7 + task.rail) % 997)


class _Rank:
    """One rank of a training loop: updates, publishes, gathers its row and checks it.

    Args:
        mesh: Rows, nodes of a row, ranks of a node.
        skew: Most microseconds that it sleeps now and then.
    """

    def __init__(self, job: str, mesh: tuple[int, int, int], seed: int, skew: int) -> None:
        rows, row_nodes, rails = mesh
        self.skew = skew
        self.chance = random.Random(seed * 64 + my_rank())
        self.operators = Operators.shm(
            job,
            nodes=rows * row_nodes,
            rails=rails,
            rank=my_rank(),
            gather_nodes=row_nodes,
            window_bytes=cases.MIB,
            timeout=timedelta(seconds=40),
            chunk_bytes=CHUNK,
            slots=2,
        )
        self.row, column = divmod(my_rank(), row_nodes * rails)
        # Every column has its own tasks, one behind the other in the buffer.
        self.columns: list[list[Segment]] = []
        offset = 0
        for other in range(row_nodes * rails):
            tasks = [
                Segment(s.offset + offset, s.bytes, s.node, other % rails)
                for s in _tasks(rows, other, seed)
            ]
            self.columns.append(tasks)
            offset = max(s.offset + s.bytes for s in tasks) // 16 * 16 + 64
        self.tasks = self.columns[column]
        self.buffer = self.operators.empty(offset + 64, torch.uint8)
        self.buffer.fill_(UNTOUCHED)
        self.publish = self.operators.publish(self.tasks, self.buffer, label="weights")
        led = [
            Segment(s.offset, s.bytes, *divmod(column, rails))
            for column, tasks in enumerate(self.columns)
            for s in tasks
        ]
        self.gather = self.operators.all_gather_v(led, label="row")
        self.meeting, self.sums = _meeting(self.operators, mesh)
        # Nobody publishes into a copy that is still to be filled.
        self.meet()

    def meet(self) -> None:
        """Return when every rank has come."""
        self.meeting.run(self.sums, self.sums)

    def sleep(self) -> None:
        if self.skew and self.chance.random() < 0.3:
            time.sleep(self.chance.random() * self.skew * 1e-6)

    def update(self, step: int) -> None:
        for i, task in enumerate(self.tasks):
            if task.node != self.row:
                continue
            self.sleep()
            self.buffer[task.offset : task.offset + task.bytes] = _bytes(task, i, step)
            self.publish.release(i)

    def step(self, step: int) -> list[str]:
        """Return what is wrong in the row's gathered copies."""
        late = self.chance.random() < 0.3
        if late:  # Releases may come before the call is started.
            self.update(step)
        self.sleep()
        ended = self.publish.start(step)
        if not late:
            self.update(step)
        first = self.chance.randrange(len(self.tasks))
        self.publish.wait(first, len(self.tasks), step)
        self.publish.wait(0, first, step)
        self.sleep()
        self.gather.run(self.buffer)
        wrong = []
        for column, tasks in enumerate(self.columns):
            for i, task in enumerate(tasks):
                got = self.buffer[task.offset : task.offset + task.bytes]
                if not torch.equal(got, _bytes(task, i, step)):
                    wrong.append(f"step {step}, column {column}, task {i}")
                end = task.offset + -(-task.bytes // 16) * 16
                if (self.buffer[end : end + 16] != UNTOUCHED).any():
                    wrong.append(f"step {step}, behind task {i} of column {column}")
        ended.wait()
        self.meet()
        return wrong


def _meeting(
    operators: Operators, mesh: tuple[int, int, int]
) -> tuple[ReduceScatterV, torch.Tensor]:
    """A reduction of which every rank owns a part ends on a rank when all have come."""
    rows, row_nodes, rails = mesh
    parts = [
        Segment(16 * rank, 16, *divmod(rank, rails), home=16 * rank)
        for rank in range(rows * row_nodes * rails)
    ]
    sums = operators.empty(4 * len(parts), torch.float32)
    sums.zero_()
    return operators.reduce_scatter_v(parts, torch.float32, label="meeting"), sums


def _train(job: str, mesh: tuple[int, int, int], seed: int, steps: int, skew: int) -> list[str]:
    rank = _Rank(job, mesh, seed, skew)
    wrong = [text for step in range(1, steps + 1) for text in rank.step(step)]
    rank.operators.close()
    return wrong


MESHES = [(2, 1, 1), (2, 1, 2), (4, 1, 2), (8, 1, 1), (2, 2, 1), (1, 1, 2)]


def _ids(mesh: tuple[int, int, int]) -> str:
    return "{}x{}x{}".format(*mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=_ids)
def test_every_row_gathers_the_new_weights(mesh: tuple[int, int, int]) -> None:
    """Each byte is the step's, and none beside the tasks is touched; streams are longer than what
    may be on its way, so arrival words are used again. A mesh is rows x nodes of a row x ranks of
    a node."""
    rows, row_nodes, rails = mesh
    for text in run_world(rows * row_nodes * rails, _train, job_name(), mesh, 1, 6, 0):
        assert text == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [MESHES[0], *(pytest.param(mesh, marks=pytest.mark.long) for mesh in MESHES[1:4])],
    ids=_ids,
)
def test_a_thousand_steps_with_skew(mesh: tuple[int, int, int]) -> None:
    """An old version is never gathered, however late a rank is."""
    ranks = mesh[0] * mesh[1] * mesh[2]
    for text in run_world(ranks, _train, job_name(), mesh, 2, 1000, 300, timeout_seconds=400):
        assert text == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=_ids)
@pytest.mark.parametrize("seed", [3, 4])
def test_thousands_of_steps_with_skew(mesh: tuple[int, int, int], seed: int) -> None:
    """The same for longer, with other tables."""
    ranks = mesh[0] * mesh[1] * mesh[2]
    for text in run_world(ranks, _train, job_name(), mesh, seed, 4000, 500, timeout_seconds=1700):
        assert text == []


# -- one rank -------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Operators]:
    operators = Operators.shm(
        job_name(), nodes=1, rails=1, rank=0, window_bytes=1 << 16, timeout=timedelta(seconds=0.3)
    )
    yield operators
    operators.close()


def _pair(operators: Operators) -> Publish:
    tasks = [Segment(0, 4096, 0), Segment(4096, 100, 0)]
    buffer = operators.empty(8192, torch.uint8)
    return operators.publish(tasks, buffer, label="weights", names=["wq", "wk"])


@pytest.mark.parametrize(
    "tasks, message",
    [
        (
            [Segment(0, 16, 0), Segment(24, 16, 0)],
            "task 1: offset 24 is not a multiple of 16 bytes",
        ),
        ([Segment(0, 40, 0), Segment(32, 8, 0)], "task 1: offset 32 lies inside task 0"),
        ([Segment(0, 16, 0), Segment(16, 16, 1)], "task 1: owner node 1, expected 0 to 0"),
        ([Segment(0, 16, 0), Segment(16, 16, 0, 1)], "task 1: owner rail 1, expected 0 to 0"),
        ([Segment(0, 16, 0), Segment(16, 0, 0)], "task 1: 0 bytes, expected 1 or more"),
    ],
    ids=["aligned", "overlap", "node", "rail", "empty"],
)
def test_bad_tables_are_refused(alone: Operators, tasks: list[Segment], message: str) -> None:
    """At construction, with the task's number and name."""
    buffer = alone.empty(8192, torch.uint8)
    expected = r"publish of weights: " + re.escape(message) + r".* \(wk\)$"
    with pytest.raises(ValueError, match=expected):
        alone.publish(tasks, buffer, label="weights", names=["wq", "wk"])


def _other_rail(job: str) -> str:
    operators = cases.open_operators(job, (1, 2), window_bytes=4096)
    buffer = operators.empty(64, torch.uint8)
    try:
        operators.publish([Segment(0, 16, 0, 1 - my_rank())], buffer)
    except ValueError as error:
        return str(error)
    return "made"


def test_tasks_of_another_rail_are_refused() -> None:
    """A rank cannot reach them: it would wait for ever."""
    for rank, text in enumerate(run_world(2, _other_rail, job_name())):
        assert f"task 0: owner rail {1 - rank}, expected this rank's, {rank}" in text


def test_bad_arguments_are_refused(alone: Operators) -> None:
    """What is not in the table or the window, with what is accepted; nothing is broken by it."""
    buffer = alone.empty(64, torch.uint8)
    with pytest.raises(ValueError, match="1 names for 2 tasks"):
        alone.publish([Segment(0, 16, 0), Segment(16, 16, 0)], buffer, names=["wq"])
    with pytest.raises(ValueError, match=r"task 0: offset -16, expected 0 to"):
        alone.publish([Segment(-16, 16, 0)], buffer)
    with pytest.raises(ValueError, match="weights: the tensor is not in the window"):
        alone.publish([Segment(0, 16, 0)], torch.zeros(16, dtype=torch.uint8), label="weights")
    with pytest.raises(ValueError, match="needs a contiguous tensor of 128 bytes"):
        alone.publish([Segment(0, 128, 0)], buffer)
    publish = _pair(alone)
    with pytest.raises(ValueError, match="publish of weights: task 2, expected 0 to 1"):
        publish.wait(0, 3, 1)
    with pytest.raises(ValueError, match="expected 0 or more"):
        publish.wait(1, 0, 1)
    with pytest.raises(ValueError, match="task 2, expected 0 to 1"):
        publish.release(2)
    with pytest.raises(ValueError, match=r"task 1 \(wk\): released before task 0 \(wq\)"):
        publish.release(1)
    publish.release(0)
    with pytest.raises(ValueError, match=r"task 0 \(wq\): released again .* task 1 \(wk\)"):
        publish.release(0)
    publish.release(1)
    with pytest.raises(ValueError, match=r"task 0 \(wq\): released for step 2 before .* step 1"):
        publish.release(0)
    publish.start(1).wait()
    publish.wait(0, 2, 1)
    publish.close()
    with pytest.raises(CommunicationError, match="publish of weights: it is closed"):
        publish.release(0)


def test_a_wrong_step_is_an_error(alone: Operators) -> None:
    """Flags carry step numbers, so none may be left out."""
    publish = _pair(alone)
    with pytest.raises(ValueError, match="publish of weights: step 2, expected 1"):
        publish.start(2)
    with pytest.raises(ValueError, match="publish of weights: step 2, expected 1"):
        publish._publish.run(2)


def test_a_task_that_does_not_come_is_named(alone: Operators) -> None:
    """The wait ends in time and says which task, of which step and source."""
    publish = _pair(alone)
    publish.release(0)
    publish.wait(0, 1, 1)
    begin = time.monotonic()
    expected = r"waited 0\.3 s for task 1 \(wk\) of step 1 from rank 0 \(source node 0\)"
    with pytest.raises(CommunicationError, match=expected):
        publish.wait(0, 2, 1)
    assert time.monotonic() - begin < 5


def test_a_release_that_does_not_come_is_named(alone: Operators) -> None:
    """The call ends in time, as do those who wait for its tasks; what comes later is refused."""
    publish = _pair(alone)
    event = publish.start(1)
    publish.release(0)
    expected = r"waited 0\.3 s for its own update .*\(release\); task 1 \(wk\) .*step 1"
    with pytest.raises(CommunicationError, match=expected):
        event.wait()
    with pytest.raises(CommunicationError, match=r"after a failed call: .*task 1"):
        publish.wait(0, 2, 1)
    with pytest.raises(CommunicationError, match=r"after a failed call: .*task 1"):
        publish.release(1)
    report = alone.window.stuck(PUBLISH)
    assert report is not None and (report.wait, report.number) == ("release", 1)


def test_progress_puts_the_limit_off(alone: Operators) -> None:
    """Updates may take longer than the limit, all in all; and whoever waits does not hold Python
    up: another thread releases meanwhile."""
    publish = _pair(alone)
    ended = publish.start(1)

    def update() -> None:
        for task in range(2):
            time.sleep(0.2)
            publish.release(task)

    thread = threading.Thread(target=update)
    begin = time.monotonic()
    thread.start()
    publish.wait(0, 2, 1)
    assert time.monotonic() - begin > 0.35
    ended.wait()
    thread.join()


def test_closing_ends_a_call_without_releases() -> None:
    """An update that failed must not keep its process until the limit."""
    operators = Operators.shm(job_name(), nodes=1, rails=1, rank=0, window_bytes=1 << 16)
    publish = _pair(operators)
    event = publish.start(1)
    publish.release(0)
    begin = time.monotonic()
    operators.close()
    assert time.monotonic() - begin < 20
    with pytest.raises(CommunicationError, match="closed before all tasks of rank 0 were released"):
        event.wait()


# -- a rank that dies -----------------------------------------------------------------------------


@cache
def _pattern(length: int) -> torch.Tensor:
    return cases.payload(length, 5)


def _publish_until_it_fails(job: str, folder: str, victim: int, phase: str) -> list[str]:
    cases.meet(folder, 4)
    operators = Operators.shm(
        job,
        nodes=4,
        rails=1,
        rank=my_rank(),
        gather_nodes=1,
        window_bytes=4 * cases.MIB,
        timeout=timedelta(seconds=LIMIT),
    )
    size = cases.MIB // 2
    tasks = [Segment(size * row, size, row) for row in range(4)]
    names = [f"wq{row}" for row in range(4)]
    buffer = operators.empty(4 * size, torch.uint8)
    publish = operators.publish(tasks, buffer, label="weights", names=names)
    meeting, sums = _meeting(operators, (4, 1, 1))
    texts = []
    for step in range(1, 10**6):
        if my_rank() == victim and step == 20:
            if phase == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.003)
        event = publish.start(step)
        buffer[size * my_rank() : size * (my_rank() + 1)] = _pattern(size)
        try:
            publish.release(my_rank())
            event.wait()
            meeting.run(sums, sums)
        except CommunicationError as error:
            texts.append(str(error))
            try:
                publish.wait(0, 4, step)
            except CommunicationError as again:
                texts.append(str(again))
            return texts
    return ["never failed"]


@pytest.mark.parametrize("phase", ["before", "inside"])
def test_others_end_when_a_rank_is_killed(tmp_path: Path, phase: str) -> None:
    """In time, with the task, its source and what was awaited from whom; nothing stays behind."""
    job, victim = job_name(), 1
    world = World(4, _publish_until_it_fails, job, str(tmp_path), victim, phase)
    texts = [text for texts in world.survivors(victim, 60) for text in texts]
    if phase == "before":
        named = [
            x for x in texts if re.search(r"publish of weights: rank \d waited 3\.0 s for ", x)
        ]
        assert any("task 1 (wq1) of source node 1" in x for x in named), texts
        assert any("from rank 1" in x or "rank 1 to take" in x for x in named), texts
    assert all("waited 3.0 s" in x or "after a failed call" in x for x in texts), texts
    assert not list(Path("/dev/shm").glob(f"dmuon-{os.getuid()}-{job}-*"))
