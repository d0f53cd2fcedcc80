"""Folders that are made once, complete or absent, however many processes start together.

A cached folder is built under a lock in a temporary folder beside it and renamed into place, so a
process killed half-way leaves nothing that is later taken for the finished thing. The last file
written, ``complete.json``, records size and digest of every other file; a folder that no longer
agrees with it is built again.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from torchtitan_dmuon.log import logger

LOCK_TIMEOUT_SECONDS = 1800.0
"""Longest wait for another process that is building the same folder."""

_RECORD = "complete.json"
_RECORD_FORMAT = 1
_WAIT_REPORT_SECONDS = 30.0
# A file up to this size is digested whole; a larger one by evenly spaced blocks that add up to
# it, so that opening a corpus of any size costs well under a second.
_WHOLE_DIGEST_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20


def cache_root(cache_folder: str) -> Path:
    """The folder that holds all caches, created if absent.

    Args:
        cache_folder: A path (``~`` is expanded), or "" for the user's cache folder.

    Raises:
        OSError: The folder can not be created; the message names it and the config field.
    """
    if cache_folder:
        root = Path(cache_folder).expanduser()
    else:
        root = Path(platformdirs.user_cache_dir("torchtitan_dmuon"))
    _make_private(root)
    return root


def cached_folder(
    parent: Path,
    key: str,
    build: Callable[[Path], None],
    *,
    what: str,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Path:
    """Return ``parent / key``, building it first if it is absent or damaged.

    Safe with many processes of one machine (or of one file system with working locks): one
    builds, the others wait and then use what it built.

    Args:
        parent: Folder of folders of one kind; created with mode 0700 if absent.
        key: Name of the folder: a digest of everything its content depends on.
        build: Called with an empty temporary folder that it fills with plain files.
        what: What is built, for messages, for example "tokens of 'python_stdlib'".
        lock_timeout_seconds: Longest wait for another process.

    Raises:
        TimeoutError: Another process held the lock for longer than the bound.
        Exception: Whatever ``build`` raises; nothing is left behind then.
    """
    folder = parent / key
    if _damage(folder) is None:
        return folder
    _make_private(parent)
    lock = FileLock(parent / f"{key}.lock", mode=0o600)
    _acquire(lock, what, lock_timeout_seconds)
    try:
        damage = _damage(folder)
        if damage is None:
            return folder
        if folder.exists():
            logger.warning(f"Cached {what} in {folder} is damaged ({damage}); building it again.")
        for leftover in parent.glob(f"{key}.tmp-*"):
            # Only the holder of this lock writes such folders: this one's builder is dead.
            shutil.rmtree(leftover)
        _build(folder, build)
    finally:
        lock.release()
    return folder


def file_digest(path: Path) -> str:
    """Hex digest (BLAKE2b, 16 bytes) of a file's size and content.

    Above 64 MiB the content is 64 evenly spaced blocks of 1 MiB, the first and the last among
    them: that finds truncation and lost writes, not a single changed byte.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    num_blocks = _WHOLE_DIGEST_BYTES // _BLOCK_BYTES
    with path.open("rb") as file:
        if size <= _WHOLE_DIGEST_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        else:
            for index in range(num_blocks):
                file.seek(index * (size - _BLOCK_BYTES) // (num_blocks - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"Cannot create the cache folder ({error.strerror}); "
            "set cache_folder to a folder that this user may write",
            str(folder),
        ) from error


def _acquire(lock: FileLock, what: str, timeout_seconds: float) -> None:
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            lock.acquire(timeout=max(0.0, min(_WAIT_REPORT_SECONDS, timeout_seconds - waited)))
            return
        except Timeout:
            waited = time.monotonic() - start
            if waited >= timeout_seconds:
                raise TimeoutError(
                    f"Waited {waited:.0f} s for another process that is making the {what} and "
                    f"holds {lock.lock_file}. If it is alive, start again once it is done; if "
                    "none is, this file system does not release locks of dead processes: "
                    "set cache_folder to a local disk."
                ) from None
            logger.info(f"Waiting {waited:.0f} s for another process that is making the {what}.")


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        build(temporary)
        record = {
            "format": _RECORD_FORMAT,
            "files": {
                path.name: {"bytes": path.stat().st_size, "digest": file_digest(path)}
                for path in sorted(temporary.iterdir())
            },
        }
        (temporary / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None when it is complete."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        files = record["files"]
        if record["format"] != _RECORD_FORMAT:
            return f"{_RECORD} has format {record['format']}, this version reads {_RECORD_FORMAT}"
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, {expected['bytes']} were written"
            if file_digest(folder / name) != expected["digest"]:
                return f"the content of {name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_RECORD} is unreadable ({type(error).__name__}: {error})"
    return None
