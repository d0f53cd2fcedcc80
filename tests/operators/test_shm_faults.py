"""Bad tables, ranks that do not come or are killed, and what is left in /dev/shm."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.operators import shm_cases as cases
from tests.operators.shm_cases import job_name, my_rank
from tests.worlds import World, run_world
from torchtitan_dmuon.comm import CommunicationError
from torchtitan_dmuon.comm.binding import Operation
from torchtitan_dmuon.comm.operators import Operators, Segment, place

pytestmark = pytest.mark.usefixtures("rank_server")

SHM = Path("/dev/shm")
LIMIT = 3.0
"""Seconds that operations of these tests wait."""


def _names(job: str) -> list[str]:
    return [p.name for p in SHM.glob(f"dmuon-{os.getuid()}-{job}-*")]


def _alone(**options: object) -> Operators:
    arguments = {"nodes": 1, "rails": 1, "rank": 0, "window_bytes": 1 << 16, **options}
    return Operators.shm(job_name(), **arguments)  # type: ignore[arg-type]


# -- bad tables -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[Operators]:
    operators = _alone()
    yield operators
    operators.close()


@pytest.mark.parametrize(
    "segments, message",
    [
        ([Segment(0, 16, 0, 0), Segment(24, 16, 0, 0)], "segment 1: offset 24 is not a multiple"),
        (
            [Segment(0, 40, 0, 0), Segment(32, 8, 0, 0)],
            "segment 1: offset 32 lies inside segment 0",
        ),
        # The padding of a segment is moved, so it belongs to it.
        (
            [Segment(0, 33, 0, 0), Segment(32, 8, 0, 0)],
            "segment 1: offset 32 lies inside segment 0",
        ),
        ([Segment(0, 16, 1, 0)], "segment 0: owner node 1, expected 0 to 0"),
        ([Segment(0, 16, 0, -1)], "segment 0: owner rail -1, expected 0 to 0"),
        ([Segment(0, 16, 0, 1 << 32)], "segment 0: owner rail 4294967296 is no rank"),
        ([Segment(-16, 16, 0, 0)], "segment 0: offset -16, expected 0 to"),
        ([Segment(16 * i, 16, 0, 0) for i in range(65537)], "segment 65536: a group holds at most"),
    ],
    ids=["aligned", "overlap", "padding", "node", "rail", "wide_rail", "negative", "many"],
)
def test_bad_tables_are_refused(alone: Operators, segments: list[Segment], message: str) -> None:
    """At construction, with the segment's number."""
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        alone.all_gather_v(segments, label="layer.3")
    assert "layer.3" in str(error.value)


def test_bad_reductions_are_refused(alone: Operators) -> None:
    """What only a reduction has: homes, elements, dtype."""
    cases_and_messages = [
        ([Segment(0, 16, 0, 0, home=8)], torch.float32, "segment 0: home 8 is not a multiple"),
        (
            [Segment(0, 16, 0, 0, home=0), Segment(16, 16, 0, 0, home=0)],
            torch.float32,
            "segment 1: home 0 lies inside segment 0",
        ),
        ([Segment(0, 6, 0, 0)], torch.float32, "segment 0: 6 bytes are no whole elements of 4"),
        ([Segment(0, 16, 0, 0)], torch.float64, "cannot reduce torch.float64, expected"),
    ]
    for segments, dtype, message in cases_and_messages:
        with pytest.raises(ValueError, match=re.escape(message)):
            alone.reduce_scatter_v(segments, dtype)


def test_bad_buffers_are_refused(alone: Operators) -> None:
    """A call on memory that others cannot reach, or on too little of it."""
    group = alone.all_gather_v([Segment(0, 4096, 0, 0)], label="layer.3")
    buffer = alone.empty(4096, torch.uint8)
    with pytest.raises(ValueError, match=r"layer\.3: the tensor is not in the window"):
        group(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"layer\.3: needs a contiguous tensor of 4096 bytes"):
        group(buffer[16:])
    with pytest.raises(ValueError, match=r"layer\.3: needs a contiguous tensor"):
        group(buffer.view(64, 64).t())
    uneven = alone.empty(4112, torch.uint8)[8:]
    with pytest.raises(ValueError, match=r"layer\.3: the tensor begins at byte 4104 .*of 16"):
        group(uneven)
    with pytest.raises(ValueError, match="buffer at 8 with 4096 bytes, expected a multiple of 16"):
        group._group.call(8)
    with pytest.raises(ValueError, match="an end inside the window's 65536 bytes"):
        group._group.call(65536 - 4080)
    with pytest.raises(ValueError, match="no room for 65536 bytes, 57328 of 65536 are left"):
        alone.empty(65536, torch.uint8)
    group.run(buffer)  # The window still works.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rails": 0}, "ranks per node is 0, expected 1 to 72"),
        ({"nodes": 1025}, "nodes is 1025, expected 1 to 1024"),
        ({"rank": 1}, "rank is 1, expected 0 to nodes * ranks per node - 1"),
        ({"nodes": 4, "gather_nodes": 3}, "nodes of a gather is 3, expected a divisor"),
        ({"chunk_bytes": 24}, "chunks of 24 bytes, expected a multiple of 16"),
        ({"timeout": timedelta(0)}, "timeout of 0.0"),
        # C's integers would wrap around to good numbers.
        ({"nodes": (1 << 32) + 1}, "nodes is 4294967297, expected a number from -2147483648 to"),
        ({"rank": 1 << 32}, "rank is 4294967296, expected a number from"),
        ({"window_bytes": (1 << 64) + 16}, "user_bytes is 18446744073709551632, expected"),
        ({"chunk_bytes": -(1 << 32) + 64}, "chunk_bytes is -4294967232, expected a number from 0"),
        ({"slots": 1 << 32}, "slots is 4294967296, expected a number from"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_meshes_are_refused(options: dict[str, object], message: str) -> None:
    """Before any memory is taken, with what was given and what is accepted."""
    with pytest.raises(ValueError, match=re.escape(message)):
        _alone(**options)


@pytest.mark.parametrize("job", ["", "a/b", "a" * 65])
def test_bad_job_names_are_refused(job: str) -> None:
    """They become file names."""
    with pytest.raises(ValueError, match="expected 1 to 64 letters, digits or hyphens"):
        Operators.shm(job, nodes=1, rails=1, rank=0, window_bytes=16)


# -- opening --------------------------------------------------------------------------------------


def test_too_large_a_window_is_an_error() -> None:
    """Not a bus error at the first write; and nothing is left."""
    free = os.statvfs(SHM)
    job = job_name()
    with pytest.raises(OSError, match=r"/dev/shm: rank 0 needs \d+ MiB, \d+ MiB are free"):
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
    try:
        texts = []
        for rank, pipe in enumerate(world.pipes):
            if rank == victim:
                continue
            assert pipe.poll(90), f"rank {rank} still waits"
            kind, value = pipe.recv()
            assert kind == "result", value
            texts.append(value)
    finally:
        world.end()
    for text in texts:
        assert re.search(
            r"(all_gather_v|reduce_scatter_v) of layer\.3: rank \d waited 3\.0 s for .*"
            r"\((entry|arrival|acknowledgement|put|exit)\)",
            text,
        ), text
        assert text.count("of layer.3") == 1, text
    assert any("for rank 1 to" in text or "from rank 1 " in text for text in texts), texts
    assert _names(job) == []


def test_laying_out_any_lengths() -> None:
    """Offsets are aligned, in order, and leave room for each length."""
    assert place([]) == ([], 0)
    assert place([0, 1, 16, 17]) == ([0, 0, 16, 32], 64)


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
