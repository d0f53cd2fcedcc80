"""Compiling the C++ part on first use."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_dmuon import native
from torchtitan_dmuon.native import NativeError, build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = 'extern "C" int answer() { return VALUE; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder csrc/ of one file."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text(SOURCE.replace("VALUE", "41"))
    # The package's `build` is the function, which hides its module.
    module = sys.modules["torchtitan_dmuon.native.build"]
    monkeypatch.setattr(module, "sources_folder", lambda: folder)
    return folder


def test_a_changed_source_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    """The same sources give the same file without compiling; changed ones, or flags, another."""
    first = build("one", ["one.cpp"], folder=tmp_path / "cache")
    assert ctypes.CDLL(str(first)).answer() == 41
    stamp = first.stat().st_mtime_ns
    assert build("one", ["one.cpp"], folder=tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    (sources / "one.cpp").write_text(SOURCE.replace("VALUE", "42"))
    second = build("one", ["one.cpp"], folder=tmp_path / "cache")
    assert second != first
    assert ctypes.CDLL(str(second)).answer() == 42
    assert build("one", ["one.cpp"], flags=["-O0"], folder=tmp_path / "cache") != second


def test_errors_are_one_line(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler's error is quoted and kept whole; a missing compiler is named, with its package;
    neither leaves a library."""
    (sources / "one.cpp").write_text("int broken = ;\n")
    with pytest.raises(NativeError, match=r"one: .*g\+\+ failed: .*one.cpp:1:14: error") as caught:
        build("one", ["one.cpp"], folder=tmp_path / "cache")
    log = Path(str(caught.value).rsplit("all output: ", 1)[1].rstrip(")"))
    assert "broken" in log.read_text()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeError, match=r"one: needs the compiler g\+\+.*apt install"):
        build("one", ["one.cpp"], folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.parametrize("damage", ["cut", "empty", "random", "foreign", "unsigned", "folder"])
def test_a_damaged_library_is_compiled_again(sources: Path, tmp_path: Path, damage: str) -> None:
    """A library in the cache is loaded only if it has the bytes that were written; loading half a
    one would end the process."""
    cache = tmp_path / "cache"
    library = build("one", ["one.cpp"], folder=cache)
    good = library.read_bytes()
    library.unlink()
    if damage == "folder":
        library.mkdir()
        with pytest.raises(NativeError, match=r"one: .*one\.so is a folder; remove it"):
            build("one", ["one.cpp"], folder=cache)
        return
    library.write_bytes(
        {
            "cut": good[: len(good) // 2],
            "empty": b"",
            "random": os.urandom(3000),
            "foreign": good[:-1] + bytes([good[-1] ^ 1]),
            "unsigned": good,
        }[damage]
    )
    if damage == "unsigned":
        library.with_suffix(".sha256").unlink()
    assert build("one", ["one.cpp"], folder=cache) == library
    assert ctypes.CDLL(str(library)).answer() == 41
    assert {p.name for p in library.parent.iterdir()} == {"one.so", "one.sha256", ".lock"}


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    """With the folder to remove."""
    library = tmp_path / "one.so"
    library.write_bytes(b"no library")
    with pytest.raises(NativeError, match=f"one: does not load: .*remove {tmp_path}"):
        native.load(library)


def _fake_compiler(folder: Path, script: str) -> str:
    """Write a compiler into a folder of its own; return a PATH that finds it first."""
    folder.mkdir()
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_compilers_that_do_nothing_are_named(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that reports no error and writes no library; one that is no program."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PATH", _fake_compiler(tmp_path / "lazy", "#!/bin/sh\nexit 0\n"))
    with pytest.raises(NativeError, match=r"one: .*g\+\+ reported no error, but wrote no library"):
        build("one", ["one.cpp"], folder=cache)
    assert not list(cache.rglob("*.so"))
    monkeypatch.setenv("PATH", _fake_compiler(tmp_path / "text", "not a program"))
    with pytest.raises(NativeError, match=r"one: the compiler .*g\+\+ does not run: "):
        build("one", ["one.cpp"], folder=cache)


def test_a_cached_library_needs_no_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without one uses what another has compiled of the same sources."""
    library = build("one", ["one.cpp"], folder=tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build("one", ["one.cpp"], folder=tmp_path / "cache") == library
    (sources / "one.cpp").write_text(SOURCE.replace("VALUE", "42"))
    with pytest.raises(NativeError, match=r"needs the compiler g\+\+"):
        build("one", ["one.cpp"], folder=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    """With the folder, and how to have another."""
    (tmp_path / "file").touch()
    with pytest.raises(NativeError, match=f"one: the cache {tmp_path}/file/.* XDG_CACHE_HOME"):
        build("one", ["one.cpp"], folder=tmp_path / "file" / "cache")


def test_a_killed_compilation_leaves_nothing_for_ever(sources: Path, tmp_path: Path) -> None:
    """The next one removes its half library."""
    library = build("one", ["one.cpp"], folder=tmp_path / "cache")
    library.unlink()
    (library.parent / "partial-killed.so").touch()
    build("one", ["one.cpp"], folder=tmp_path / "cache")
    assert not list(library.parent.glob("partial-*"))


def test_processes_compile_once(tmp_path: Path) -> None:
    """Four processes that ask at once get one library, compiled once."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    real = shutil.which("g++")
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {tmp_path}/runs\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    program = (
        "import pathlib, sys; from torchtitan_dmuon.native import build;"
        "print(build('core', ['core/table.cpp'], folder=pathlib.Path(sys.argv[1])))"
    )
    path = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "cache")],
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    found = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(found) == 1
    assert (tmp_path / "runs").read_text() == "x\n"


def test_wheels_hold_the_sources(tmp_path: Path) -> None:
    """What a wheel is made of has csrc/, where the package looks for it first."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run(
        [*command, "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    there = tmp_path / "lib" / "torchtitan_dmuon" / "csrc"
    want = {p.relative_to(ROOT / "csrc") for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert {p.relative_to(there) for p in there.rglob("*") if p.is_file()} == want
    assert native.sources_folder() == ROOT / "csrc"
