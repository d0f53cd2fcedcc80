"""Compiles shared libraries from csrc/ and keeps them in the user's cache.

A library is compiled when it is first needed and found again by the digest of everything that went
into it: its sources, all headers, flags, compiler and processor. So a changed source is never run
from an old library, and machines that share a home folder do not share a library made for another
processor.
"""

from __future__ import annotations

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
    """Return a shared library made of `sources`, compiling it if the cache has none.

    Args:
        name: The library's file name, without suffix.
        sources: Files to compile, relative to csrc/, which is on the include path.
        compiler: Program; g++ or a path of nvcc.
        flags: Added to what makes a C++17 shared library.
        libraries: Linker arguments, behind the sources.
        include: More include folders.
        headers: The folder in csrc/ of all of its headers that the sources include.
        folder: The cache; default `cache_folder()`.

    Processes may ask at the same time: one compiles, the others wait.

    Raises:
        NativeError: no compiler, or it reported an error.
    """
    program = shutil.which(compiler)
    if program is None:
        raise NativeError(
            f"{name}: needs the compiler {compiler}, which is not on PATH (Debian, Ubuntu: "
            "apt install g++; Red Hat: dnf install gcc-c++)"
        )
    root = sources_folder()
    position = ["-Xcompiler", "-fPIC"] if "nvcc" in Path(program).name else ["-fPIC"]
    command = [program, "-std=c++17", "-shared", *position, *flags, f"-I{root}"]
    command += [f"-I{path}" for path in include]
    target_folder = (folder or cache_folder()) / _digest(
        root, command, sources, libraries, root / headers
    )
    library = target_folder / f"{name}.so"
    if library.exists():
        return library
    target_folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(target_folder / ".lock", timeout=_LOCK_SECONDS):
            if not library.exists():
                command += [str(root / source) for source in sources]
                _compile(name, command, libraries, library)
    except Timeout as error:
        raise NativeError(
            f"{name}: another process has compiled {library} for {_LOCK_SECONDS} s; "
            f"if none does, remove {target_folder}"
        ) from error
    return library


def _compile(name: str, command: list[str], libraries: Sequence[str], library: Path) -> None:
    # Written beside, then renamed: a killed compiler leaves no half library under the final name.
    handle, partial = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, "-o", partial, *libraries],
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
        os.replace(partial, library)
    finally:
        Path(partial).unlink(missing_ok=True)


def _digest(
    root: Path,
    command: Sequence[str],
    sources: Sequence[str],
    libraries: Sequence[str],
    headers: Path,
) -> str:
    digest = hashlib.sha256(repr((list(command), list(sources), list(libraries))).encode())
    digest.update(_version(command[0]) + _processor())
    used = [root / source for source in sources]
    used += [path for path in headers.rglob("*") if path.suffix in _HEADERS]
    for path in sorted(used):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


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
