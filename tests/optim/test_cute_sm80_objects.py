"""Where the sm_80 kernel can be used, which operands it takes, and its files on disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan_dmuon.optim.symmetric_matmul.cute_sm80 import geometry, launch, objects

_CUDA = torch.device("cuda", 0)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that looks as if it had an sm_80 GPU and the compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(objects.metadata, "version", lambda _: "4.8.1")
    launch._missing.cache_clear()
    yield
    launch._missing.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "reason"),
    [
        (_CUDA, torch.bfloat16, (1, 264, 168), None),
        (_CUDA, torch.float16, (65535, 8, 8), None),
        (torch.device("cpu"), torch.bfloat16, (1, 264, 168), "for CUDA GPUs only"),
        (_CUDA, torch.float32, (1, 264, 168), "for float16 and bfloat16 only"),
        (_CUDA, torch.bfloat16, (1, 260, 168), "needs m and k that 8 divides, got 260 and 168"),
        (_CUDA, torch.bfloat16, (1, 264, 161), "needs m and k that 8 divides, got 264 and 161"),
        (_CUDA, torch.bfloat16, (1, 264, 0), "needs m and k that 8 divides, got 264 and 0"),
        (_CUDA, torch.bfloat16, (65536, 8, 8), "batches up to 65535 only"),
        (_CUDA, torch.bfloat16, (1, 8, 2**22 + 8), "m and k up to 4194304"),
    ],
)
def test_says_why_it_can_not_be_used(
    ampere: None,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    reason: str | None,
) -> None:
    """Each limit is named; what fits is accepted."""
    said = launch.unavailable(device, dtype, shape)
    assert said == reason or (reason is not None and reason in str(said))


def test_needs_ampere_and_the_compiler(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older GPU and a missing package are told apart."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    said = launch.unavailable(_CUDA, torch.float16, (1, 8, 8))
    assert said == "needs a GPU of capability 8.0 or newer, this one has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    launch._missing.cache_clear()

    def missing(name: str) -> str:
        raise objects.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(objects.metadata, "version", missing)
    said = launch.unavailable(_CUDA, torch.float16, (1, 8, 8))
    assert said == "nvidia-cutlass-dsl is not installed: pip install nvidia-cutlass-dsl"


@pytest.mark.parametrize(
    ("b", "c", "complaint"),
    [
        (torch.zeros(16, 8).half(), None, r"b must be \(8, 16\), not \(16, 8\)"),
        (torch.zeros(8, 16), None, "b must be torch.float16 on cpu as a is, not torch.float32"),
        (torch.zeros(8, 16).half(), torch.zeros(8, 8).half(), r"c must be \(16, 16\)"),
        (torch.zeros(8, 16).half(), None, "for CUDA GPUs only"),
    ],
)
def test_wrong_operands_are_refused(
    b: torch.Tensor, c: torch.Tensor | None, complaint: str
) -> None:
    """One message per mistake; a CPU tensor is one."""
    with pytest.raises(ValueError, match=complaint):
        launch.symmetric_matmul(torch.zeros(16, 8).half(), b, c)


def test_operands_are_copied_only_if_need_be() -> None:
    """Rows of A and of B transposed are taken in place where they lie in order."""
    x = torch.randn(24, 16).half()
    rows, columns = launch._operands(x, x.mT)
    assert rows is x and columns is x
    tall, same = launch._operands(x.mT, x)
    assert tall is same and tall.is_contiguous() and torch.equal(tall, x.mT)

    s, t = (torch.randn(2, 16, 16).half() for _ in range(2))
    rows, columns = launch._operands(s, t)
    assert rows is s and columns is t
    rows, columns = launch._operands(s, t.mT)
    assert rows is s and columns.data_ptr() == t.data_ptr() and torch.equal(columns, t)

    apart = x.mT.contiguous()
    rows, columns = launch._operands(x, apart)
    assert rows is x and torch.equal(columns, x)
    shifted = torch.randn(24 * 16 + 1).half()[1:].view(24, 16)
    rows, columns = launch._operands(shifted, shifted.mT)
    assert rows is columns and rows.data_ptr() % 16 == 0 and torch.equal(rows, shifted)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, str]]:
    """Replace the compiler by one that is quick, and list what it was asked for."""
    asked: list[tuple[str, bool, str]] = []

    def compile_(dtype: str, has_c: bool, arch: str) -> objects.KernelObject:
        asked.append((dtype, has_c, arch))
        return objects.KernelObject(f"entry_{dtype}", f"cubin\n{dtype}{has_c}{arch}".encode())

    monkeypatch.setattr(objects, "_compile", compile_)
    monkeypatch.setattr(objects.metadata, "version", lambda _: "4.8.1")
    return asked


def test_second_start_reads_the_file(
    compilations: list[tuple[str, bool, str]], tmp_path: Path
) -> None:
    """A kernel is compiled once; each dtype, C and architecture has its own; files are private."""
    folder = tmp_path / "kernels"
    kinds = [("float16", True, "sm_80"), ("float16", False, "sm_80"), ("bfloat16", True, "sm_90")]
    first = [objects.load_or_compile(*kind, folder=folder) for kind in kinds]
    again = [objects.load_or_compile(*kind, folder=folder) for kind in kinds]
    assert first == again and compilations == kinds
    assert len({f.cubin for f in first}) == 3
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 3


def _flip_last(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _other_key(path: Path) -> None:
    line, _, cubin = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    header["key"]["nvidia-cutlass-dsl"] = "4.7.0"
    path.write_bytes(json.dumps(header).encode() + b"\n" + cubin)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip_last, "changed since it was written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "changed since it was written"),
        (lambda path: path.write_bytes(b""), "does not say what it was made for"),
        (lambda path: path.write_bytes(b"\x80\x04pickle\n"), "does not say what it was made for"),
        (lambda path: path.write_bytes(b"[1]\n"), "does not say what it was made for"),
        (_other_key, "does not say what it was made for"),
        (lambda path: path.chmod(0o620), "another user may write it"),
    ],
)
def test_damaged_file_is_replaced_with_one_warning(
    damage: object,
    reason: str,
    compilations: list[tuple[str, bool, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing that disagrees with its digest, key or owner is loaded; the next start is quiet."""
    made = objects.load_or_compile("float16", True, "sm_80", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    damage(path)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        assert objects.load_or_compile("float16", True, "sm_80", folder=tmp_path) == made
        assert objects.load_or_compile("float16", True, "sm_80", folder=tmp_path) == made
    assert len(compilations) == 2
    assert len(caplog.records) == 1 and reason in caplog.text and str(path) in caplog.text


def test_other_version_has_a_file_of_its_own(
    compilations: list[tuple[str, bool, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgraded compiler does not reuse what the old one made, and says nothing about it."""
    objects.load_or_compile("float16", True, "sm_80", folder=tmp_path)
    monkeypatch.setattr(objects.metadata, "version", lambda _: "4.9.0")
    objects.load_or_compile("float16", True, "sm_80", folder=tmp_path)
    assert len(compilations) == 2 and len(list(tmp_path.iterdir())) == 2


def test_folder_that_can_not_be_made_is_no_error(
    compilations: list[tuple[str, bool, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel is used all the same, with one warning that names the folder."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "torchtitan_dmuon"):
        made = objects.load_or_compile("float16", True, "sm_80", folder=tmp_path / "file" / "x")
    assert made.entry == "entry_float16"
    assert [r.levelname for r in caplog.records].count("WARNING") >= 1
    assert "can not be kept in" in caplog.text


def test_interrupted_write_leaves_nothing(
    compilations: list[tuple[str, bool, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it writes leaves no file that a later start could load."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        objects.load_or_compile("float16", True, "sm_80", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_grid_counts_the_lower_triangle() -> None:
    """One block per tile on or below the diagonal, one layer per matrix."""
    assert geometry.grid(8, 1) == (1, 1, 1)
    assert geometry.grid(128, 3) == (1, 3, 1)
    assert geometry.grid(136, 1) == (3, 1, 1)
    assert geometry.grid(640, 2) == (15, 2, 1)
