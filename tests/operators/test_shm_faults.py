"""Ranks that do not come or are killed, and what is left in /dev/shm."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import alone as _alone
from tests.operators.shm_cases import job_name, my_rank
from tests.worlds import World, run_world
from torchtitan_dmuon.comm import CommunicationError, shm
from torchtitan_dmuon.comm.binding import Library
from torchtitan_dmuon.comm.communicator import Run
from torchtitan_dmuon.comm.operators import Operators, Segment
from torchtitan_dmuon.comm.operators_communicator import OperatorsCommunicator
from torchtitan_dmuon.comm.window import Operation

pytestmark = pytest.mark.usefixtures("rank_server")

SHM = Path("/dev/shm")
LIMIT = 3.0
"""Seconds that operations of these tests wait."""


def _names(job: str) -> list[str]:
    return [p.name for p in SHM.glob(f"dmuon-{os.getuid()}-{job}-*")]


# -- opening --------------------------------------------------------------------------------------


def _lost_in_the_opening(job: str, victim: int, moment: str) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    if my_rank() == victim:
        opening, attaching = Library.open, shm._attach

        def open_and_die(*args: Any) -> None:
            if moment == "made":
                opening(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        def attach_and_die(*args: Any) -> None:
            attaching(*args)
            # As if it had not come to taking the name away.
            with (SHM / f"dmuon-{os.getuid()}-{job}-{victim}").open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                os.kill(os.getpid(), signal.SIGKILL)

        if moment == "mapped":
            shm._attach = attach_and_die
        else:
            Library.open = open_and_die  # type: ignore[assignment]
    with pytest.raises(CommunicationError) as error:
        Operators.shm(
            job,
            nodes=3,
            rails=1,
            rank=my_rank(),
            window_bytes=1 << 16,
            timeout=timedelta(seconds=LIMIT),
            group=dist.group.WORLD,
        )
    return str(error.value)


@pytest.mark.parametrize("moment", ["before its memory is made", "made", "mapped"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_it_opens_leaves_nothing(victim: int, moment: str) -> None:
    """What ranks have made has names until the end of the opening: with the error that names it
    these end, also that of a rank whose memory the others have mapped already."""
    job = job_name()
    texts = World(3, _lost_in_the_opening, job, victim, moment).survivors(victim, 30)
    assert len(texts) == 2
    assert all(
        re.match(r"dmuon opening of the pool \(rank \d among ranks 0-2\): ", t) for t in texts
    )
    assert _names(job) == []


def test_too_large_a_window_is_an_error() -> None:
    """Not a bus error at the first write; and nothing is left."""
    free = os.statvfs(SHM)
    job = job_name()
    with pytest.raises(OSError, match=r"rank 0 needs [\d.]+ MiB, [\d.]+ MiB are free"):
        Operators.shm(
            job, nodes=1, rails=1, rank=0, window_bytes=free.f_blocks * free.f_frsize + (1 << 30)
        )
    assert _names(job) == []


def test_a_rank_that_never_comes_is_named() -> None:
    """Opening ends in time, names the rank, and takes its memory with it."""
    job = job_name()
    limit = timedelta(seconds=0.2)
    with pytest.raises(CommunicationError, match=r"rank 0 waited 0.2 s for rank 1 to create"):
        Operators.shm(job, nodes=1, rails=2, rank=0, window_bytes=16, timeout=limit)
    assert _names(job) == []


def test_ranks_are_named_as_the_job_names_them() -> None:
    """A rank of a mesh in another order, or of a part of the job, is not known by its place."""
    job = job_name()
    limit = timedelta(seconds=0.2)
    with pytest.raises(CommunicationError, match=r"rank 7 waited 0.2 s for rank 5 to create"):
        Operators.shm(job, nodes=1, rails=2, rank=0, window_bytes=16, timeout=limit, names=[7, 5])
    with pytest.raises(ValueError, match="3 names, expected 1 x 2 ranks"):
        Operators.shm(job, nodes=1, rails=2, rank=0, window_bytes=16, names=[7, 5, 1])
    for wrong in (-1, 2**31, 1.5, "5"):
        with pytest.raises(
            ValueError, match=r"names: expected ranks, numbers from 0 to 2147483647"
        ):
            Operators.shm(job, nodes=1, rails=2, rank=0, window_bytes=16, names=[7, wrong])
    assert _names(job) == []


def _lost_on_a_permuted_mesh() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    limit = timedelta(seconds=LIMIT)
    communicator = OperatorsCommunicator([[2], [0], [1]], torch.device("cpu"), limit)
    memory = communicator.open(1 << 12).view(torch.float32)
    runs = [Run(64 * row, 64, row, 0) for row in range(3)]
    communicator.reduce("layer", memory, runs, [], lambda: None).wait()
    if my_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError) as error:
        communicator.reduce("layer", memory, runs, [], lambda: None).wait()
    return str(error.value)


def test_a_lost_rank_of_a_permuted_mesh_has_its_own_number() -> None:
    """Global rank 2 is at place 0: whoever waits for it says so, under its own number."""
    texts = World(3, _lost_on_a_permuted_mesh).survivors(2, 30)
    for rank, text in enumerate(texts):
        begin = rf"dmuon reduce_scatter_v of layer \(rank {rank} among ranks 2, 0, 1\): "
        assert re.match(begin + rf"rank {rank} waited 3\.0 s", text), text
    assert any(re.search(r"waited 3\.0 s for .*rank 2", text) for text in texts), texts


def _open_without_last(job: str, folder: str) -> str:
    cases.meet(folder, 3)
    with pytest.raises(CommunicationError) as caught:
        cases.open_operators(job, (2, 2), seconds=LIMIT, window_bytes=4096)
    return str(caught.value)


def test_a_rank_that_maps_nothing_is_named(tmp_path: Path) -> None:
    """Rank 0 does not reach rank 3, which is missing; it names who waits for that one."""
    job = job_name()
    texts = run_world(3, _open_without_last, job, str(tmp_path))
    begin = f"shared memory of job {job}: rank {{}} waited 3.0 s for rank {{}} to {{}}"
    assert texts == [
        begin.format(0, 2, "map its memory"),
        begin.format(1, 3, "create its own"),
        begin.format(2, 3, "create its own"),
    ]


def _open_with(job: str, folder: str, slots: list[int]) -> str:
    cases.meet(folder, 2)
    try:
        cases.open_operators(job, (1, 2), slots=slots[my_rank()], seconds=LIMIT, window_bytes=4096)
    except (OSError, CommunicationError) as error:
        return str(error)
    return "opened"


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    """Both settings are named."""
    job = job_name()
    first, second = run_world(2, _open_with, job, str(tmp_path), [2, 3])
    assert "2 slots" in first and "3 slots" in first and "rank 1 has" in first
    assert "opened" not in (first, second)
    assert _names(job) == []


@pytest.mark.parametrize(
    ("mode", "owner"),
    [(0o644, None), (0o660, None), (0o600, 12345)],
    ids=["readable", "writable", "other_user"],
)
def test_memory_of_others_is_not_mapped(mode: int, owner: int | None) -> None:
    """A file under a peer's name that another user owns, or may open, is refused by name."""
    if owner is not None and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    job = job_name()
    planted = SHM / f"dmuon-{os.getuid()}-{job}-1"
    with planted.open("wb") as file:
        try:
            # As long as a lock is held the file does not count as a dead job's.
            fcntl.flock(file, fcntl.LOCK_SH)
            file.truncate(1 << 20)
            planted.chmod(mode)
            if owner is not None:
                os.chown(planted, owner, -1)
            found = f"user {owner or os.geteuid()} with mode {mode:04o}"
            wanted = f"{planted}: belongs to {found}, expected user {os.geteuid()} with 0600"
            limit = timedelta(seconds=LIMIT)
            with pytest.raises(OSError, match=re.escape(wanted)):
                Operators.shm(job, nodes=1, rails=2, rank=0, window_bytes=16, timeout=limit)
        finally:
            planted.unlink()
    assert _names(job) == []


def _open_half(job: str) -> None:
    cases.open_operators(job, (1, 2), seconds=60, window_bytes=4096)


def _until(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_memory_of_a_killed_opener_is_private_and_removed() -> None:
    """While it has a name it is the user's alone; the next job removes a dead job's."""
    job = job_name()
    world = World(1, _open_half, job)  # rank 0 of two: waits for the other
    try:
        _until(lambda: _names(job))
        status = (SHM / _names(job)[0]).stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        # A living job's memory is left alone.
        _alone().close()
        assert _names(job)
        os.kill(world.ranks[0].pid, signal.SIGKILL)
        world.ranks[0].join(20)
        assert _names(job), "this test needs a leftover"
        _alone().close()
        assert _names(job) == []
    finally:
        world.end()


def test_others_remove_what_a_killed_opener_left() -> None:
    """Whoever fails to open, or closes, removes it on the way out: no later job has to come."""

    def leave() -> None:
        world = World(1, _open_half, job)
        try:
            _until(lambda: _names(job))
            os.kill(world.ranks[0].pid, signal.SIGKILL)
            world.ranks[0].join(20)
        finally:
            world.end()
        assert _names(job), "this test needs a leftover"

    job, limit = job_name(), timedelta(seconds=8)
    operators = _alone()
    leave()
    operators.close()
    del operators
    gc.collect()
    assert _names(job) == []

    def open_half() -> None:
        with pytest.raises(CommunicationError, match=r"rank 0 waited 8\.0 s for rank 1"):
            Operators.shm(job_name(), nodes=1, rails=2, rank=0, window_bytes=16, timeout=limit)

    opener = threading.Thread(target=open_half)
    opener.start()
    leave()
    opener.join(30)
    assert _names(job) == []


# -- killed in a call -----------------------------------------------------------------------------


def _call_until_it_fails(
    job: str, folder: str, mesh: tuple[int, int], victim: int, phase: str
) -> str:
    cases.meet(folder, 4)
    operators = cases.open_operators(job, mesh, seconds=LIMIT, window_bytes=4 * cases.MIB)
    mine = f"dmuon-{os.getuid()}-{job}-{my_rank()}"
    assert not (SHM / mine).exists(), "mapped memory still has a name"
    ranks = mesh[0] * mesh[1]
    table = cases.table([cases.MIB // ranks // 4 * 4] * ranks, list(range(ranks)), mesh[1])
    gather = operators.all_gather_v(table, label="layer.3")
    reduce = operators.reduce_scatter_v(table, torch.float32, label="layer.3")
    buffer, sums = (operators.empty(cases.MIB // 4, torch.float32) for _ in range(2))
    buffer.zero_()
    try:
        for call in range(10**6):
            if my_rank() == victim and call == 20:
                if phase == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                # Inside some call, whose thread is busy: the kernel stops it anywhere.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, 0.003)
            events = gather(buffer), reduce(sums, sums)
            for event in events:
                event.wait()
    except CommunicationError as error:
        reports = [operators.window.stuck(operation) for operation in Operation]
        assert any(r is not None and r.wait != "nothing" for r in reports)
        with pytest.raises(CommunicationError):
            gather(buffer).wait()
        return str(error)
    return "never failed"


@pytest.mark.parametrize(
    "mesh, phase",
    [((1, 4), "before"), ((2, 2), "inside"), ((4, 1), "inside")],
    ids=["1x4-before", "2x2-inside", "4x1-inside"],
)
def test_others_end_when_a_rank_is_killed(
    tmp_path: Path, mesh: tuple[int, int], phase: str
) -> None:
    """In time, with operation, group, what was awaited and from whom; nothing stays behind."""
    job, victim = job_name(), 1
    world = World(4, _call_until_it_fails, job, str(tmp_path), mesh, victim, phase)
    texts = world.survivors(victim, 90)
    for text in texts:
        assert re.search(
            r"(all_gather_v|reduce_scatter_v) of layer\.3: rank \d waited 3\.0 s for .*"
            r"\((entry|arrival|acknowledgement|put|exit)\)",
            text,
        ), text
        assert text.count("of layer.3") == 1, text
    assert any("for rank 1 to" in text or "from rank 1 " in text for text in texts), texts
    assert _names(job) == []


def _memory_outlives_close(job: str) -> list[int]:
    operators = cases.open_operators(job, (1, 2), window_bytes=4096)
    mine = operators.empty(64, torch.uint8)
    mine.fill_(my_rank())
    operators.close()
    del operators
    return mine.tolist()


def test_a_tensor_keeps_its_memory() -> None:
    """Unmapping under a tensor that is still held would end the process."""
    assert run_world(2, _memory_outlives_close, job_name()) == [[0] * 64, [1] * 64]


def _closed_behind_a_failure(job: str, folder: str) -> list[str]:
    texts = []
    for number, waits in enumerate((False, True)):
        meeting = Path(folder) / str(number)
        meeting.mkdir(exist_ok=True)
        cases.meet(str(meeting), 2)
        operators = cases.open_operators(f"{job}-{number}", (1, 2), seconds=LIMIT)
        event = None
        if my_rank() == 0:
            group = operators.all_gather_v([Segment(0, 64, 0)], label="layer.3")
            event = group(operators.empty(64, torch.uint8))
            if waits:
                with pytest.raises(CommunicationError):
                    event.wait()
        try:
            operators.close()
            texts.append("")
        except CommunicationError as error:
            texts.append(str(error))
    return texts


def test_closing_tells_of_a_failure_that_nobody_heard_of(tmp_path: Path) -> None:
    """And only of such a one."""
    texts = run_world(2, _closed_behind_a_failure, job_name(), str(tmp_path))
    assert "all_gather_v of layer.3: rank 0 waited 3.0 s for rank 1 to enter" in texts[0][0]
    assert [texts[0][1], *texts[1]] == ["", "", ""]
