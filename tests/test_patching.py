"""The patch set applies to the released wheel, undoes exactly, and refuses what is not its own."""

from __future__ import annotations

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from torchtitan_dmuon.patching import (
    RECORD_NAME,
    Installation,
    PatchError,
    PatchSet,
    main,
    require_patched_torchtitan,
)


def _hashes(site: Path) -> dict[str, str]:
    return {
        str(p.relative_to(site)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(site.rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    """A folder with torchtitan exactly as its wheel has it (checked against the wheel's hashes)."""
    installed = metadata.distribution("torchtitan")
    source, site = Path(str(installed.locate_file(""))), tmp_path / "site"
    site.mkdir()
    skip = shutil.ignore_patterns("__pycache__")
    info = source / "torchtitan-0.3.0.dist-info"
    shutil.copytree(source / "torchtitan", site / "torchtitan", ignore=skip)
    shutil.copytree(info, site / info.name)
    if (source / RECORD_NAME).exists():
        shutil.copy(source / RECORD_NAME, site)
        Installation(site).reverse()
    with (site / info.name / "RECORD").open() as record:
        for name, wanted, _ in csv.reader(record):
            if name.startswith("torchtitan/") and wanted:
                digest = hashlib.sha256((site / name).read_bytes()).digest()
                assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == wanted[7:], name
    return site


def test_apply_twice_and_reverse_byte_for_byte(pristine: Path) -> None:
    """Applying is idempotent; reversing leaves every file of the folder as it was."""
    before, patches = _hashes(pristine), PatchSet.load()
    assert Installation(pristine).apply(patches)
    after = _hashes(pristine)
    changed = {n for n in before if before[n] != after[n]}
    assert changed == set(patches.files)
    assert not Installation(pristine).apply(patches)
    assert _hashes(pristine) == after
    assert Installation(pristine).is_patched(patches)
    assert Installation(pristine).reverse()
    assert _hashes(pristine) == before
    assert not Installation(pristine).reverse()


def test_patched_files_compile(pristine: Path) -> None:
    """Every patched file is valid Python."""
    Installation(pristine).apply(PatchSet.load())
    files = [str(pristine / f) for f in PatchSet.load().files]
    subprocess.run([sys.executable, "-m", "py_compile", *files], check=True)


@pytest.mark.parametrize("patch", PatchSet.load().patches, ids=lambda p: p.name)
def test_each_patch_says_why(patch: Path) -> None:
    """A patch has a subject and a body of its own before the diff, and no project names."""
    header, _, diff = patch.read_text().partition("\ndiff --git ")
    subject, _, body = header.partition("\n")
    assert subject.startswith("Subject: ")
    assert len(body.split()) > 15
    assert "dmuon" not in diff


def test_an_older_set_is_replaced(pristine: Path, tmp_path: Path) -> None:
    """Applying a newer set over an older one gives the same files as applying it to the wheel."""
    folder = tmp_path / "old"
    folder.mkdir()
    patches = PatchSet.load()
    for patch in patches.patches[:3]:
        shutil.copy(patch, folder)
    old = PatchSet.load(folder)
    Installation(pristine).apply(old)
    assert not Installation(pristine).is_patched(patches)
    Installation(pristine).apply(patches)
    over_old = _hashes(pristine)
    Installation(pristine).reverse()
    Installation(pristine).apply(patches)
    assert _hashes(pristine) == over_old


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_killed_apply_is_finished_by_the_next(pristine: Path, written: int) -> None:
    """After a kill between two files every file is original or patched, and apply completes it."""
    before, patches = _hashes(pristine), PatchSet.load()
    Installation(pristine).apply(patches)
    after = _hashes(pristine)
    originals = {f: Installation(pristine)._original(f, _record(pristine)) for f in patches.files}
    for name in patches.files[written:]:
        (pristine / name).write_bytes(originals[name])
    assert Installation(pristine).apply(patches)
    assert _hashes(pristine) == after
    Installation(pristine).reverse()
    assert _hashes(pristine) == before


def _record(site: Path):
    from torchtitan_dmuon.patching import Record

    return Record.read(site / RECORD_NAME)


def test_somebody_elses_change_is_never_overwritten(pristine: Path, capsys) -> None:
    """A file that is neither the wheel's nor ours stops apply and reverse, with the remedy."""
    target = pristine / "torchtitan" / "trainer.py"
    for prepare in (lambda: None, lambda: Installation(pristine).apply(PatchSet.load())):
        prepare()
        original = target.read_bytes()
        target.write_bytes(original + b"# mine\n")
        assert main(["--site", str(pristine)]) == 2
        assert main(["--site", str(pristine), "--reverse"]) in (0, 2)
        assert target.read_bytes() == original + b"# mine\n"
        target.write_bytes(original)
    assert "pip install --force-reinstall" in capsys.readouterr().err


def test_another_version_is_refused_by_name(pristine: Path, capsys) -> None:
    """Version 0.4.0 is not patched; the message names both versions."""
    info = pristine / "torchtitan-0.3.0.dist-info"
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace("Version: 0.3.0", "Version: 0.4.0", 1))
    info.rename(pristine / "torchtitan-0.4.0.dist-info")
    assert main(["--site", str(pristine)]) == 2
    message = capsys.readouterr().err
    assert "torchtitan 0.4.0 is installed" in message and "0.3.0" in message


def test_a_missing_torchtitan_and_a_damaged_record(tmp_path: Path, pristine: Path, capsys) -> None:
    """Nothing installed, or an unreadable record: one line with the remedy, status 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["--site", str(empty)]) == 2
    assert "pip install torchtitan==0.3.0" in capsys.readouterr().err
    (pristine / RECORD_NAME).write_text("{")
    assert main(["--site", str(pristine)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_check_tells_patched_from_unpatched(pristine: Path) -> None:
    """--check is 1 before and 0 after."""
    assert main(["--site", str(pristine), "--check"]) == 1
    assert main(["--site", str(pristine)]) == 0
    assert main(["--site", str(pristine), "--check"]) == 0


def test_the_environment_of_the_tests_is_patched() -> None:
    """What the package asks of its environment at start-up holds here."""
    require_patched_torchtitan()


def test_error_when_unpatched(monkeypatch: pytest.MonkeyPatch, pristine: Path) -> None:
    """An unpatched torchtitan is reported with the command that patches it."""
    monkeypatch.setattr(sys, "path", [str(pristine)])
    with pytest.raises(PatchError, match=r"lacks this version's patches: .*apply_patches.py"):
        require_patched_torchtitan()
