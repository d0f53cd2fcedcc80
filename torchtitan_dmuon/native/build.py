"""Compiles shared libraries from csrc/ and keeps them in the user's cache.

A library is compiled when it is first needed and found again by the digest of everything that went
into it: its sources, all headers, flags, compiler and processor. So a changed source is never run
from an old library, and machines that share a home folder do not share a library made for another
processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

_LOCK_SECONDS = 900
_PARTIAL = "partial-"
_HEADERS = (".h", ".cuh")  # any of them may be included


class NativeError(RuntimeError):
    """A library cannot be compiled or loaded; says what is missing, or quotes the compiler."""


def sources_folder() -> Path:
    """Return the folder csrc/, in the package where it is installed, else in the checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "core").is_dir():
            return folder
    raise NativeError(f"csrc/: not found beside {package}; the installation is incomplete")


def cache_folder() -> Path:
    """Return where compiled libraries are kept."""
    return Path(platformdirs.user_cache_dir("torchtitan_dmuon")) / "native"


def build(
    name: str,
    sources: Sequence[str],
    *,
    compiler: str = "g++",
    flags: Sequence[str] = ("-O3", "-march=native"),
    libraries: Sequence[str] = (),
    include: Sequence[Path] = (),
    headers: str = ".",
    folder: Path | None = None,
) -> Path:
    """Return a shared library made of `sources`, compiling it if the cache has none that is whole.

    Args:
        name: The library's file name, without suffix.
        sources: Files to compile, relative to csrc/, which is on the include path.
        compiler: Program; g++ or a path of nvcc. If there is none any more, what one has made of
            the same sources serves.
        flags: Added to what makes a C++17 shared library.
        libraries: Linker arguments, behind the sources.
        include: More include folders.
        headers: The folder in csrc/ of all of its headers that the sources include.
        folder: The cache; default `cache_folder()`.

    Processes may ask at the same time: one compiles, the others wait.

    Raises:
        NativeError: no compiler, it reported an error, or the cache cannot be written.
    """
    root, cache_root = sources_folder(), folder or cache_folder()
    position = ["-Xcompiler", "-fPIC"] if "nvcc" in Path(compiler).name else ["-fPIC"]
    arguments = ["-std=c++17", "-shared", *position, *flags, f"-I{root}"]
    arguments += [f"-I{path}" for path in include]
    digest = _digest(root, arguments, sources, libraries, root / headers)
    program = shutil.which(compiler)
    if program is None:
        for library in sorted(cache_root.glob(f"{digest}-*/{name}.so")):
            if _is_whole(library):
                return library
        raise NativeError(
            f"{name}: needs the compiler {compiler}, which is not on PATH (Debian, Ubuntu: "
            "apt install g++; Red Hat: dnf install gcc-c++)"
        )
    target = cache_root / f"{digest}-{_compiler_digest(name, program)}"
    library = target / f"{name}.so"
    command = [program, *arguments, *(str(root / source) for source in sources)]
    try:
        if not _is_whole(library):
            _compile_once(name, command, libraries, library)
    except OSError as error:
        raise NativeError(
            f"{name}: the cache {target} cannot be used: {error}; make it writable, or set "
            "XDG_CACHE_HOME to a folder that is"
        ) from error
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load a library that `build` returned.

    Raises:
        NativeError: it does not load.
    """
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(
            f"{library.stem}: does not load: {error}; if its files were damaged, remove "
            f"{library.parent}"
        ) from error


def _sum_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether a library is there with all the bytes that were once written."""
    try:
        return _sum_of(library).read_text() == _hash(library)
    except (OSError, UnicodeDecodeError):
        return False


def _hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _compile_once(name: str, command: list[str], libraries: Sequence[str], library: Path) -> None:
    """Compile a library unless another process does so first."""
    library.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(library.parent / ".lock", timeout=_LOCK_SECONDS):
            if not _is_whole(library):
                # Of compilations that were killed: who holds the lock is alone.
                for leftover in library.parent.glob(f"{_PARTIAL}*"):
                    leftover.unlink()
                _compile(name, command, libraries, library)
    except Timeout as error:
        raise NativeError(
            f"{name}: another process has compiled {library} for {_LOCK_SECONDS} s; "
            f"if none does, remove {library.parent}"
        ) from error


def _compile(name: str, command: list[str], libraries: Sequence[str], library: Path) -> None:
    # Written beside, then renamed: a killed compiler leaves no half library under the final name.
    handle, path = tempfile.mkstemp(prefix=_PARTIAL, suffix=".so", dir=library.parent)
    os.close(handle)
    partial = Path(path)
    try:
        done = subprocess.run(
            [*command, "-o", path, *libraries],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            (library.parent / "compiler.log").write_text(done.stdout + done.stderr)
            lines = (done.stderr + done.stdout).splitlines()
            shown = next((x for x in lines if "error" in x), lines[0] if lines else "no output")
            raise NativeError(
                f"{name}: {command[0]} failed: {shown} (all output: {library.parent}/compiler.log)"
            )
        if not partial.read_bytes().startswith(b"\x7fELF"):
            raise NativeError(f"{name}: {command[0]} reported no error, but wrote no library")
        if library.is_dir():
            raise NativeError(f"{name}: {library} is a folder; remove it")
        # Invariant: the sum is of what lies under the final name, or of nothing: a process that is
        # killed between the two leaves a library that is compiled again.
        _sum_of(library).unlink(missing_ok=True)
        digest = _hash(partial)
        os.replace(partial, library)
        _sum_of(library).write_text(digest)
    finally:
        partial.unlink(missing_ok=True)


def _digest(
    root: Path,
    arguments: Sequence[str],
    sources: Sequence[str],
    libraries: Sequence[str],
    headers: Path,
) -> str:
    """Return a name for all that goes into a library but the compiler."""
    digest = hashlib.sha256(repr((list(arguments), list(sources), list(libraries))).encode())
    digest.update(_processor())
    used = [root / source for source in sources]
    used += [path for path in headers.rglob("*") if path.suffix in _HEADERS]
    for path in sorted(used):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _compiler_digest(name: str, program: str) -> str:
    try:
        return hashlib.sha256(program.encode() + _version(program)).hexdigest()[:8]
    except OSError as error:
        raise NativeError(f"{name}: the compiler {program} does not run: {error}") from error


@cache
def _version(program: str) -> bytes:
    return subprocess.run([program, "--version"], check=False, capture_output=True).stdout


@cache
def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    wanted = [x for x in lines if x.startswith((b"model name", b"flags", b"Features"))]
    return platform.machine().encode() + b"".join(wanted[:2])
