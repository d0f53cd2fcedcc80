"""Compiled kernels, kept on disk.

Compiling takes about three seconds, reading the result a millisecond. CuTe DSL can export a
compiled function, but what it exports holds a Python pickle that loading would execute. So only
the cubin is kept, with the name of its entry: `launch` needs no more.

One file per kernel: a line of JSON, then the cubin. The line holds the key that the file was made
for and the digest of the cubin; a file that disagrees with either is not loaded. There is no lock:
ranks that start together compile at the same time and replace each other's equal files whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs

from torchtitan_dmuon.log import logger

PACKAGE = "nvidia-cutlass-dsl"
"""What compiles the kernel; its version is a part of the key."""

_FORMAT = 1
_SOURCES = ("kernel.py", "geometry.py")


@dataclass(frozen=True)
class KernelObject:
    """A compiled kernel: the symbol of its entry, and the cubin that holds it."""

    entry: str
    cubin: bytes


def default_folder() -> Path:
    """Where compiled kernels are kept: a folder in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("torchtitan_dmuon")) / "cute_sm80"


def load_or_compile(
    dtype: str, has_c: bool, arch: str, *, folder: Path | None = None
) -> KernelObject:
    """Return the kernel from its file, or compile it and write the file.

    A file that is damaged, of another format or not this user's alone is reported once and
    replaced. A folder that can not be written is reported once; the kernel is used all the same.

    Args:
        dtype: "float16" or "bfloat16".
        has_c: Whether the kernel adds C.
        arch: Target as CuTe DSL names it, for example "sm_80".
        folder: Made with mode 0700 if absent; None for `default_folder`.

    Raises:
        ImportError: The package nvidia-cutlass-dsl is missing or does not work, and no file holds
            the kernel.
    """
    key = _key(dtype, has_c, arch)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{arch}_{dtype}{'_c' if has_c else ''}_{digest}.kernel"
    path = (folder or default_folder()) / name
    try:
        return _read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning(f"Compiled kernel {path} is not used and made again: {error}")
    made = _compile(dtype, has_c, arch)
    try:
        _write(path, key, made)
    except OSError as error:
        logger.warning(
            f"The compiled kernel can not be kept in {path.parent} ({error.strerror}); every "
            "start of a job takes some seconds longer."
        )
    return made


def _compile(dtype: str, has_c: bool, arch: str) -> KernelObject:
    # Imported here: it takes a second, which a start that finds its kernels on disk saves.
    from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80.kernel import compile_kernel

    compiled = compile_kernel(dtype, has_c, arch)
    return KernelObject(compiled.entry, compiled.cubin)


def _key(dtype: str, has_c: bool, arch: str) -> dict[str, Any]:
    """Everything that the cubin depends on; tile sizes are in the sources."""
    sources = hashlib.sha256()
    for name in _SOURCES:
        sources.update((Path(__file__).parent / name).read_bytes())
    return {
        "format": _FORMAT,
        "sources": sources.hexdigest(),
        PACKAGE: metadata.version(PACKAGE),
        "arch": arch,
        "dtype": dtype,
        "has_c": has_c,
    }


def _read(path: Path, key: dict[str, Any]) -> KernelObject:
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        # The digest finds accidents. Who may write the file could write a fitting digest, too.
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("another user may write it")
        line, newline, cubin = file.read().partition(b"\n")
    try:
        header = json.loads(line) if newline else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("key") != key:
        raise ValueError("its first line does not say what it was made for")
    if header.get("cubin_sha256") != hashlib.sha256(cubin).hexdigest():
        raise ValueError("its content has changed since it was written")
    entry = header.get("entry")
    if not isinstance(entry, str):
        raise ValueError("its first line does not name the kernel")
    return KernelObject(entry, cubin)


def _write(path: Path, key: dict[str, Any], made: KernelObject) -> None:
    header = {
        "key": key,
        "entry": made.entry,
        "cubin_sha256": hashlib.sha256(made.cubin).hexdigest(),
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp makes the file with mode 0600.
    handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + made.cubin)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
