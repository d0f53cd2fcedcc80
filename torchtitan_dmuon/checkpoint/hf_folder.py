"""A folder that appears whole or not at all, and what writing it took."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_dmuon.checkpoint.errors import CheckpointError
from torchtitan_dmuon.checkpoint.folder import claim, sync
from torchtitan_dmuon.memory import settle, status_bytes

_MIB = 2**20


class Usage:
    """Time and host memory of a command, from its construction on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # a container may not allow it
            settle()
        self._memory = status_bytes("VmRSS")
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def peak_bytes(self) -> int:
        """Largest growth of the process's resident set since the start."""
        return max(0, status_bytes("VmHWM") - self._memory)


def refuse_existing(target: Path) -> None:
    """Raise CheckpointError if something would be overwritten."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        what = "is not empty" if target.is_dir() else "exists"
        raise CheckpointError(f"{target}: {what}; nothing is overwritten: name another folder")


@contextmanager
def whole_folder(target: Path, needed: int) -> Iterator[Path]:
    """Give a folder beside `target` to write into; at the end it gets the name `target`.

    What a killed process left of an earlier try is replaced. After an error nothing is left.

    Args:
        target: A folder that does not exist, or is empty.
        needed: Bytes that will be written.

    Raises:
        CheckpointError: `target` is taken, being written by another process, or does not fit.
    """
    refuse_existing(target)
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = _claim(partial)
        try:
            _clear(partial)
            free = shutil.disk_usage(partial).free
            if needed > free:
                raise CheckpointError(
                    f"{target}: {needed / _MIB:,.0f} MiB are needed there and {free / _MIB:,.0f} "
                    "MiB are free; nothing was written"
                )
            yield partial
            sync(partial)
            partial.rename(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as e:
        file = e.filename or target
        raise CheckpointError(f"{file}: cannot be written: {e.strerror or e}") from e


def _claim(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        claim(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: another process is writing it") from None
    return descriptor


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
