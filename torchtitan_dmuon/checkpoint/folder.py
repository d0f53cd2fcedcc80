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

_STEP = re.compile(r"step-(\d+)")
_LEFT_OVER = re.compile(r"(saving|deleting|replaced)\.(\d+)")


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
        return [
            path
            for _, path in self._steps()
            if not (path / INDEX).is_file() and not any(path.glob("*.safetensors*"))
        ]

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
        is replaced; until the new one has its name the old one is there, as `replaced.N`.
        """
        final, replaced = self.at(step), self.path / f"replaced.{step}"
        if final.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            final.rename(replaced)
        self.saving(step).rename(final)
        sync(self.path)
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)

    def retire(self, keep: int) -> list[Path]:
        """Take all but the newest `keep` complete checkpoints out of use; return what to delete.

        A half-deleted checkpoint must not look complete, so they lose their names first.
        """
        retired = []
        for step in self.complete()[:-keep]:
            target = self.path / f"deleting.{step}"
            if target.exists():
                shutil.rmtree(target)
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
                shutil.rmtree(self.at(step), ignore_errors=True)
                path.rename(self.at(step))
                logger.warning("checkpoint step-%d restored; its replacement was lost", step)
            else:
                if match[1] == "saving":
                    logger.warning("step-%d was not saved whole; what there is is removed", step)
                shutil.rmtree(path, ignore_errors=True)

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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            if file is not None and not isinstance(e, PermissionError):
                file.close()
                logger.warning("%s: no lock against a second job: %s", self.path, e.strerror)
                return None
            raise CheckpointError(f"{self.path}: cannot be written: {e.strerror or e}") from None
        return file


def sync(folder: Path) -> None:
    """Have renames in a folder survive a crash of the machine."""
    with contextlib.suppress(OSError):  # some network file systems refuse it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
