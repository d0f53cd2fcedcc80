"""The folder of a job's checkpoints: which are complete, which step next, and never a torn one.

A checkpoint is written as `saving.N` and becomes `step-N` by one rename, after every rank has
written and the index is on disk. What takes its place or is deleted is renamed away first. So a
folder named `step-N` is whole whenever a process or the machine dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.log import logger

INDEX = ".metadata"
"""DCP's index of a checkpoint, the last file that it writes."""

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT_OVER = re.compile(r"(saving|deleting|replaced)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one job.

    Attributes:
        path: The folder; it need not exist yet.
    """

    path: Path

    def at(self, step: int) -> Path:
        """Return the folder of a complete checkpoint of a step."""
        return self.path / f"step-{step}"

    def saving(self, step: int) -> Path:
        """Return the folder in which a checkpoint of a step is being written."""
        return self.path / f"saving.{step}"

    def _steps(self) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        found = [(_STEP.fullmatch(p.name), p) for p in self.path.iterdir()]
        return sorted((int(m[1]), p) for m, p in found if m and p.is_dir())

    def complete(self) -> list[int]:
        """Return the steps that can be loaded, oldest first."""
        return [step for step, path in self._steps() if (path / INDEX).is_file()]

    def torn(self) -> list[Path]:
        """Return folders named like a checkpoint that were never finished, or never copied whole.

        Exports for other programs are none.
        """
        exports = self.exports().values()
        return [p for _, p in self._steps() if not (p / INDEX).is_file() and p not in exports]

    def exports(self) -> dict[int, Path]:
        """Return, by step, models that were saved for other programs and cannot be continued."""
        return {
            step: path
            for step, path in self._steps()
            if not (path / INDEX).is_file() and any(path.glob("*.safetensors*"))
        }

    def lost_names(self) -> list[int]:
        """Return the steps whose checkpoint is whole but has lost its name, until `recover`."""
        found = [_LEFT_OVER.fullmatch(p.parent.name) for p in self.path.glob(f"replaced.*/{INDEX}")]
        steps = {int(m[2]) for m in found if m}
        return sorted(steps - set(self.complete()))

    def choose(self, step: int | None = None) -> int | None:
        """Return the step to load: the given one, or the newest; None if there is none yet.

        Raises:
            CheckpointError: there is no complete checkpoint of the given step.
        """
        complete = self.complete()
        for path in self.torn():
            logger.warning("%s is not complete and is not used", path)
        if step is not None and step not in complete:
            there = ", ".join(f"step-{s}" for s in complete) or "none"
            raise CheckpointError(f"{self.path}: no complete step-{step}; there are: {there}")
        return step if step is not None else complete[-1] if complete else None

    def commit(self, step: int) -> None:
        """Make what was written as `saving` the checkpoint of its step.

        A checkpoint of that step that is there already (of a run that went on from an earlier one)
        is replaced; until the new one has its name the old one is there, as `replaced.N`. Those of
        later steps are then of another course of the job, and are set aside.
        """
        final, replaced = self.at(step), self.path / f"replaced.{step}"
        if final.exists():
            if replaced.exists():
                remove(replaced)
            final.rename(replaced)
        self.saving(step).rename(final)
        sync(self.path)
        if replaced.exists():
            remove(replaced)
        self._set_aside_later(step)

    def _set_aside_later(self, step: int) -> None:
        """Take the checkpoints behind a step that was just saved out of use.

        They are of another course of the job, which went on from an earlier one; it would take
        them for its newest ones, and delete its own.
        """
        for later in self.complete():
            if later > step:
                number = 1
                while (target := self.path / f"aside.{later}.{number}").exists():
                    number += 1
                self.at(later).rename(target)
                logger.warning(
                    "step-%d is of another course of this job and is kept as %s", later, target
                )

    def retire(self, keep: int) -> list[Path]:
        """Take all but the newest `keep` complete checkpoints out of use; return what to delete.

        A half-deleted checkpoint must not look complete, so they lose their names first.
        """
        retired = []
        for step in self.complete()[:-keep]:
            target = self.path / f"deleting.{step}"
            if target.exists():
                remove(target)
            self.at(step).rename(target)
            retired.append(target)
        return retired

    def recover(self) -> None:
        """Clear up after a process that died here. Only who holds the lock may call it."""
        if not self.path.is_dir():
            return
        for path in sorted(self.path.iterdir()):
            match = _LEFT_OVER.fullmatch(path.name)
            if not match:
                continue
            step = int(match[2])
            if match[1] == "replaced" and not (self.at(step) / INDEX).is_file():
                # Died between the two renames of `commit`.
                remove(self.at(step))
                path.rename(self.at(step))
                logger.warning("checkpoint step-%d restored; its replacement was lost", step)
            else:
                if match[1] == "saving":
                    logger.warning("step-%d was not saved whole; what there is is removed", step)
                remove(path)

    def lock(self) -> IO[str] | None:
        """Make the folder, and claim it until the returned file is closed or the process dies.

        Returns:
            None where the file system knows no locks.

        Raises:
            CheckpointError: another job has it, or it cannot be written.
        """
        file = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
            if not claim(file.fileno()):
                logger.warning("%s: the file system has no locks against a second job", self.path)
                file.close()
                return None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        except BlockingIOError:
            assert file is not None
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise CheckpointError(
                f"{self.path}: in use by another job ({holder}); stop it, or set another "
                "dump_folder"
            ) from None
        except OSError as e:
            if file is not None:
                file.close()
            raise CheckpointError(f"{self.path}: cannot be written: {e.strerror or e}") from None
        return file


def claim(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; whether the file system knows locks.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint as far as can be; of one that is a link, the link and what it holds."""
    path = Path(path)
    target = path.resolve()
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(target, ignore_errors=True)


def sync(folder: Path) -> None:
    """Have renames in a folder survive a crash of the machine."""
    with contextlib.suppress(OSError):  # some network file systems refuse it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
