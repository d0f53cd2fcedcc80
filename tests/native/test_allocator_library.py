"""The allocator's C++: its table under sanitizers, its library's key, its CUDA part."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.operators.stressing import TRIES, finds_race
from torchtitan_dmuon.native import NativeError, sources_folder, torch_library

FOLDER = sources_folder() / "allocator"
SANITIZERS = {
    "thread": ("-O1", "-g", "-fsanitize=thread"),
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def _compile(folder: Path, table: str, flags: tuple[str, ...]) -> Path:
    """Return the stress program with `table` as signatures.cpp."""
    source = folder / "signatures.cpp"
    source.write_text(table.replace('"signatures.h"', f'"{FOLDER / "signatures.h"}"'))
    program = folder / "stress"
    stress = sources_folder() / "tests" / "allocator_stress.cpp"
    command = ["g++", "-std=c++17", *flags, "-pthread", str(stress), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=200)
    return program


def _run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), "20"], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_table_under_threads(tmp_path: Path, sanitizer: str) -> None:
    """Backwards of three tables at once, freed by other threads: no race, no bad access, every
    gradient in its place after the first micro-batch, and no table in a thread without a scope."""
    done = _run(_compile(tmp_path, (FOLDER / "signatures.cpp").read_text(), SANITIZERS[sanitizer]))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.slow
def test_a_table_without_its_lock_is_caught(tmp_path: Path) -> None:
    """The stress program finds a ticket that is ended without the lock. Where its threads have to
    take turns on a core they may happen to be in order, so it has several tries."""
    text = (FOLDER / "signatures.cpp").read_text()
    line = "  const std::lock_guard lock(ticket->table->mutex_);\n"
    assert text.count(line) == 1
    program = _compile(tmp_path, text.replace(line, ""), SANITIZERS["thread"])
    assert any(finds_race(_run(program)) for _ in TRIES)


def test_the_library_is_of_one_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch version, commit or string ABI is another library, never an old one."""
    keys: list[tuple[str, ...]] = []

    def build(name: str, sources: tuple[str, ...], **arguments: tuple[str, ...]) -> Path:
        keys.append((name, *sources, *arguments["flags"]))
        return Path(name)

    monkeypatch.setattr(torch_library, "build", build)
    torch_library.build_allocator()
    monkeypatch.setattr(torch, "__version__", "2.13.9")
    torch_library.build_allocator()
    monkeypatch.setattr(torch.version, "git_version", "0123")
    torch_library.build_allocator()
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
    torch_library.build_allocator()
    assert len(set(keys)) == 4


def test_the_cuda_wrapper_hands_on_every_function() -> None:
    """Each virtual function of torch's CUDA allocator classes is overridden: one that is not would
    quietly be torch's default instead of the allocator's own."""
    include = Path(torch.__file__).parent / "include" / "c10"
    classes = {
        "core/Allocator.h": r"struct C10_API Allocator \{(.*?)\n\};",
        "core/CachingDeviceAllocator.h": r"struct C10_API DeviceAllocator [^{]*\{(.*?)\n\};",
        "cuda/CUDACachingAllocator.h": r"class CUDAAllocator [^{]*\{(.*?)\n\};",
    }
    wanted = set()
    for file, pattern in classes.items():
        body = re.search(pattern, (include / file).read_text(), re.DOTALL)
        assert body is not None, file
        text = re.sub(r"//.*", "", body[1])
        wanted |= set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\(", text))
    wanted.discard("Allocator")  # destructors
    wanted.discard("DeviceAllocator")
    assert {"allocate", "emptyCache", "createOrIncrefPool"} <= wanted
    shim = (FOLDER / "cuda_shim.cpp").read_text()
    handed_on = set(re.findall(r"(\w+)\([^;{}]*?\)\s*(?:const\s*)?override", shim))
    assert wanted - handed_on == set()


@pytest.mark.slow
def test_the_cuda_wrapper_compiles() -> None:
    """The CUDA part compiles against the headers of the torch at hand, also of a CPU build."""
    try:
        torch_library.cuda_include()
    except NativeError as error:
        pytest.skip(str(error))
    assert torch_library.build_cuda_shim().exists()
