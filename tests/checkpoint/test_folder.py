"""The folder of a job's checkpoints: the newest complete one is found, and none is ever lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint.jobs import Job, Layout, Lines, open_world, stored
from tests.worlds import run_world
from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import INDEX, CheckpointFolder, remove

ONE = Layout("owner", (1, 1))


def _make(path: Path, *files: str) -> None:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text(str(path.name))


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def _bits(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job on one process, with a checkpoint of step 2."""
    job = Job(ONE, tmp_path / "c", interval=1)
    job.train(2, (2,))
    yield job
    job.close()


# -- which one is loaded ---------------------------------------------------------------------


def test_the_newest_complete_one_is_loaded(job: Job) -> None:
    """Numbers are compared as numbers. A folder without .metadata (torn by a crash, or half
    copied) is not used, and a warning names it; neither is what is being written or deleted."""
    folder = job.manager.checkpoints.path
    job.step = 10
    job.manager.save(10)
    _make(folder / "step-11", "__0_0.distcp")
    _make(folder / "saving.12", "__0_0.distcp", INDEX)
    _make(folder / "deleting.13", "__0_0.distcp", INDEX)
    _make(folder / "old-step-14", "__0_0.distcp", INDEX)
    job.step = 0
    with Lines() as lines:
        assert job.manager.load()
    assert job.step == 10
    assert [line for line in lines if "not complete" in line and "step-11" in line]
    assert job.manager.load(2) and job.step == 2


def test_going_back_leaves_the_other_course_aside(job: Job) -> None:
    """A job that goes on from an earlier step keeps what it saves, although later steps are there;
    those are set aside, not deleted, and a start goes on from its own newest one."""
    for step in (4, 6):
        job.step = step
        job.manager.save(step)
    job.manager.keep_latest_k = 2
    assert job.manager.load(2)
    folder = job.manager.checkpoints
    job.step = 3
    job.manager.save(3)
    assert folder.complete() == [2, 3]
    assert {"aside.4.1", "aside.6.1"} <= set(_names(folder.path))
    assert job.manager.load() and job.step == 3


def test_leftovers_do_not_get_into_a_checkpoint(job: Job) -> None:
    """What another job left of the same step, with more ranks, is not taken along."""
    folder = job.manager.checkpoints
    _make(folder.saving(3), "__7_0.distcp", ".probe")
    job.step = 3
    job.manager.save(3)
    assert not (folder.at(3) / "__7_0.distcp").exists()
    assert job.manager.load(3)


def test_only_names_that_saves_give_count(job: Job) -> None:
    """Copies and exports beside the checkpoints, whatever they are called, are left alone."""
    folder = job.manager.checkpoints
    for name in ("step-007", "step-4-hf", "step-4.partial", "step-best", "step-\u0663"):
        _make(folder.path / name, INDEX, "model.safetensors")
    assert folder.complete() == [2]
    assert folder.torn() == []
    assert folder.exports() == {}
    assert job.manager.load() and job.step == 2


def test_a_checkpoint_that_is_a_link_is_replaced_and_deleted(job: Job, tmp_path: Path) -> None:
    """One that was moved to another disk, with a link in its place, is as good as any."""
    folder = job.manager.checkpoints
    folder.at(2).rename(tmp_path / "disk")
    folder.at(2).symlink_to(tmp_path / "disk")
    assert job.manager.load(2)
    job.step = 2
    job.manager.save(2)
    assert not folder.at(2).is_symlink() and job.manager.load(2)
    assert _names(folder.path) == ["step-2"]
    folder.at(2).rename(tmp_path / "disk2")
    folder.at(2).symlink_to(tmp_path / "disk2")
    job.step = 5
    job.manager.save(5)
    for path in folder.retire(1):
        remove(path)
    assert _names(folder.path) == ["step-5"]
    assert not (tmp_path / "disk2").exists()


def test_a_step_that_is_not_there_is_said(job: Job) -> None:
    """The error lists the steps that are; a torn one is none of them."""
    _make(job.manager.checkpoints.path / "step-7", "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no complete step-7; there are: step-2$"):
        job.manager.load(7)


def test_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    """An empty folder, and one with a torn checkpoint alone."""
    job = Job(ONE, tmp_path / "c")
    assert not job.manager.load()
    _make(tmp_path / "c" / "step-1", "__0_0.distcp")
    assert not job.manager.load()
    job.close()


# -- keeping the last ones --------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    """keep_latest_k = 2 leaves the two newest; they can be loaded."""
    job = Job(ONE, tmp_path / "c", interval=1, keep_latest_k=2)
    job.train(5, (1, 2, 3, 4, 5))
    job.close()
    assert _names(tmp_path / "c") == ["step-4", "step-5"]
    job = Job(ONE, tmp_path / "c", interval=1, keep_latest_k=2, load_only=True)
    assert job.manager.load(4) and job.step == 4


def test_the_only_complete_one_is_never_deleted(tmp_path: Path) -> None:
    """Torn checkpoints do not count as kept ones, however many and new they are."""
    folder = CheckpointFolder(tmp_path)
    _make(folder.at(1), INDEX)
    for step in (2, 3, 4):
        _make(folder.at(step), "__0_0.distcp")
    assert folder.retire(1) == folder.retire(2) == []
    assert folder.complete() == [1]


def test_what_is_half_deleted_never_looks_complete(tmp_path: Path) -> None:
    """Before anything of it is deleted, a checkpoint has lost its name; a job that was killed in
    between leaves what the next one clears up."""
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        _make(folder.at(step), INDEX, "__0_0.distcp")
    assert [p.name for p in folder.retire(2)] == ["deleting.1"]
    assert folder.complete() == [2, 3] and folder.torn() == []
    folder.recover()
    assert _names(tmp_path) == ["step-2", "step-3"]


# -- replacing one ----------------------------------------------------------------------------


def test_a_step_is_saved_again(job: Job) -> None:
    """A run that goes on from an earlier step replaces what an abandoned one had saved."""
    path = job.manager.checkpoints.at(2)
    before = stored(path)
    job.train(3)
    job.step = 2
    job.manager.save(2)
    after = stored(path)
    assert not torch.equal(before["norm.weight"], after["norm.weight"])
    assert _names(path.parent) == ["step-2"]


@pytest.mark.parametrize("renamed", [0, 1, 2], ids=["before", "between", "after"])
def test_a_crash_while_replacing_loses_nothing(
    renamed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, between or after the two renames: the next job finds one complete checkpoint
    of the step, the old or the new one, and nothing else is left."""
    folder = CheckpointFolder(tmp_path)
    _make(folder.at(5), INDEX, "old")
    _make(folder.saving(5), INDEX, "new")
    left, rename, rmtree = [renamed], Path.rename, shutil.rmtree

    def rename_or_die(path: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, target)

    def remove_or_die(path: Path, **options: bool) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        rmtree(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename_or_die)
        patch.setattr(shutil, "rmtree", remove_or_die)
        folder.commit(5)
    with Lines() as lines:
        folder.recover()
    assert _names(tmp_path) == ["step-5"] and folder.complete() == [5]
    assert (folder.at(5) / ("new" if renamed == 2 else "old")).exists()
    assert ("restored" in " ".join(lines)) == (renamed == 1)


def test_a_torn_folder_of_the_name_does_not_stop_the_old_one(tmp_path: Path) -> None:
    """If something unfinished has taken the name meanwhile, the complete one still comes back."""
    folder = CheckpointFolder(tmp_path)
    _make(tmp_path / "replaced.5", INDEX, "old")
    _make(folder.at(5), "__0_0.distcp")
    folder.recover()
    assert folder.complete() == [5]


def test_the_next_job_clears_up(tmp_path: Path) -> None:
    """What a killed job has left is removed or restored before anything is loaded."""
    first = Job(ONE, tmp_path / "c", interval=1)
    first.train(2, (2,))
    first.close()
    shutil.copytree(tmp_path / "c" / "step-2", tmp_path / "c" / "deleting.1")
    (tmp_path / "c" / "step-2").rename(tmp_path / "c" / "replaced.2")
    _make(tmp_path / "c" / "saving.2", "__0_0.distcp")
    job = Job(ONE, tmp_path / "c", interval=1, seed=5)
    assert _names(tmp_path / "c") == ["step-2"]
    assert job.manager.load() and job.step == 2
    job.close()


# -- who may write ----------------------------------------------------------------------------


def test_two_jobs_in_one_folder_are_refused(tmp_path: Path) -> None:
    """The second is told of the first; it changes nothing, reading stays allowed, and the end of
    the first frees the folder."""
    first = Job(ONE, tmp_path / "c")
    _make(tmp_path / "c" / "saving.7", "__0_0.distcp")
    with pytest.raises(CheckpointError, match=rf"in use by another job \(process {os.getpid()} on"):
        Job(ONE, tmp_path / "c")
    assert _names(tmp_path / "c") == ["saving.7"]
    Job(ONE, tmp_path / "c", load_only=True).close()
    first.close()
    Job(ONE, tmp_path / "c").close()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    """Before a step is trained."""
    (tmp_path / "c").write_text("a file")
    with pytest.raises(CheckpointError, match=r"/c: cannot be written: \w+") as caught:
        Job(ONE, tmp_path / "c")
    assert "\n" not in str(caught.value)


def save_read_only(folder: str) -> list[str]:
    """Save into a folder that this rank may not write, both before the start and in the middle."""
    path, errors = Path(folder), []
    job = Job(ONE, path / "c", interval=1)
    job.train(1, (1,))
    for p in (path / "c", path):
        p.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)  # nobody: root may write anywhere
    try:
        job.train(2, (2,))
    except CheckpointError as e:
        errors.append(str(e))
    for name in ("c", "other"):
        try:
            Job(ONE, path / name)
        except CheckpointError as e:
            errors.append(str(e))
    return errors


def test_a_read_only_folder_is_one_line() -> None:
    """At the start of a job and at a save; what was saved before stays."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        ((saving, starting, making),) = run_world(1, save_read_only, str(folder))
        assert "step-2 failed" in saving and "Permission denied" in saving
        assert saving.endswith("step-1 is kept")
        assert starting.endswith("/c: cannot be written: Permission denied")
        assert making.endswith("/other: cannot be written: Permission denied")
        assert not any("\n" in text for text in (saving, starting, making))
        assert _names(folder / "c") == ["step-1"]
    finally:
        for path in (folder, folder / "c"):
            path.chmod(0o755)
        shutil.rmtree(folder)


# -- a full disk ------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_before_it_is_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with what is needed and what is free; what was saved before stays as it is."""
    folder = job.manager.checkpoints.path
    before = _bits(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"step-3 needs .* are free; nothing was") as caught:
        job.train(3, (3,))
    assert "\n" not in str(caught.value)
    assert _names(folder) == ["step-2"] and _bits(folder) == before


def save_on_full_disk(folder: str, mode: str) -> tuple[str, list[str], int]:
    """Save twice; the second time a rank cannot write as much as it wants to."""
    open_world()
    job = Job(Layout("owner", (1, 2)), folder, interval=1, async_mode=mode)
    job.train(1, (1,))
    job.manager.maybe_wait_for_saving()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    error = ""
    try:
        job.train(2, (2,))
        job.manager.maybe_wait_for_saving()
    except CheckpointError as e:
        error = str(e)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    names = _names(Path(folder))
    # There is room again: the job could go on.
    job.manager.save_future = None
    job.train(3, (3,))
    job.close()
    torch.distributed.barrier()
    return error, names, CheckpointFolder(Path(folder)).complete()[-1]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_that_fills_up_costs_the_new_one_only(mode: str, tmp_path: Path) -> None:
    """One rank fails to write: all ranks say which and why, nothing is left under the step's name
    or another, the checkpoint before is as it was, and the next save goes well."""
    results = run_world(2, save_on_full_disk, str(tmp_path / "c"), mode)
    assert results[0] == results[1]
    error, names, last = results[0]
    assert "step-2 failed: rank 1: File too large" in error
    assert error.endswith("step-1 is kept") and "\n" not in error
    assert names == ["step-1"] and last == 3
