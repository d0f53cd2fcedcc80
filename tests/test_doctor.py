"""`dmuon doctor` tells what is installed, what is off and why, and what was chosen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_dmuon import cli, doctor
from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.optim import symmetric_matmul
from torchtitan_dmuon.optim.symmetric_matmul.quack import Quack
from torchtitan_dmuon.patching import PatchError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Choices of a test stay with it. One thread: small products wait for busy cores otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    symmetric_matmul.configure(folder=tmp_path)
    yield tmp_path
    symmetric_matmul.configure(folder=None)
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of the command line."""
    monkeypatch.setattr(sys, "argv", ["dmuon", "doctor", *arguments])
    try:
        return cli.main()
    except SystemExit as end:
        return int(end.code or 0)


def report(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> dict[str, Any]:
    assert run(monkeypatch, "--json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_what_is_here(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Versions, devices, and for every backend whether it is on, by dtype, with the reason."""
    found = report(monkeypatch, capsys)
    software = found["software"]
    assert software["torch"] == torch.__version__ and software["torchtitan"] == "0.3.0"
    assert software["torchtitan patched"] is True and set(doctor.OPTIONAL_PACKAGES) <= set(software)
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["threads"] == torch.get_num_threads()
    rows = {(row["backend"], row["device"]): row["off"] for row in found["backends"]}
    assert {name for name, _ in rows} == {b.name for b in symmetric_matmul.backends()}
    assert rows["plain", "cpu"] == {"float32": None, "bfloat16": None, "float16": None}
    assert rows["quack", "cpu"]["float16"] == "for CUDA GPUs only"
    assert rows["through_float32", "cpu"]["float32"] == "for float16 and bfloat16 only"
    assert rows["through_float32", "cpu"]["bfloat16"] is None
    assert {"muon", "soap"} <= set(found["matrix_optimizers"])
    assert found["cost_tables"] and found["problems"] == []


def test_measuring_chooses_as_training_would(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path
) -> None:
    """The products of a Newton-Schulz, under the keys it will ask for; its first step is fast."""
    monkeypatch.setattr("torchtitan_dmuon.optim.symmetric_matmul.timing.BUDGET_SECONDS", 0.001)
    found = report(monkeypatch, capsys, "--measure", "256x300,512x264,2x256x300,280x280,40x50")
    (kept,) = [x for x in found["choices"] if x["device"] == "cpu"]
    assert kept["state"] == "ok" and Path(kept["file"]).parent == folder
    keys = set(kept["choices"])
    assert all(entry["backend"] in entry["seconds"] for entry in kept["choices"].values())

    from torchtitan_dmuon.optim.newton_schulz import newton_schulz
    from torchtitan_dmuon.optim.symmetric_matmul import selection

    symmetric_matmul.configure(folder=folder)
    monkeypatch.setattr(selection, "measure", None)  # A key that is missing would raise.
    for shape in ((256, 300), (512, 264), (2, 256, 300), (280, 280)):
        newton_schulz(torch.randn(shape), dtype=torch.float32)
    assert set(symmetric_matmul.selector().choices(CPU)) == keys


def test_the_text_shows_choices_and_their_file(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path
) -> None:
    """For people: reason, time, ratio to plain, and progress on stderr while it measures."""
    assert run(monkeypatch, "--measure", "256x256", "--dtype", "bfloat16") == 0
    out, err = capsys.readouterr()
    assert "256x256 bfloat16 on cpu ... " in err and "  gram 256x256 bfloat16 rc: " in err
    assert str(folder) in out and "(ok)" in out and "gram 256x256 bfloat16 rc: " in out
    assert "for CUDA GPUs only" in out and out.rstrip().endswith("no problems")
    next(folder.glob("*.json")).write_text("{")
    symmetric_matmul.configure(folder=folder)
    assert run(monkeypatch) == 0
    assert "(corrupt or foreign: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measure", "12"), "--measure: expected ROWSxCOLUMNS such as 1536x8960, or BATCHx"),
        (("--measure", "0x5"), 'with sizes from 1 to 1048576, got "0x5"'),
        (("--measure", "256x256,9999999x5"), 'got "9999999x5"'),
        (("--measure", "2x2x2x2"), 'got "2x2x2x2"'),
        (("--mesure", "3x3"), "did you mean '--measure'?"),
        (("--dtype", "int8"), "--dtype: expected one of"),
        (("--model.name", "x"), "--model.name: doctor has no job"),
    ],
)
def test_a_bad_argument_is_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Exit status 2, no traceback, nothing printed or measured."""
    assert run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_shapes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are a matrix, three a batch."""
    assert doctor.parse_shape(" 1536x8960 ") == (None, 1536, 8960)
    assert doctor.parse_shape("60x1408x2048") == (60, 1408, 2048)
    with pytest.raises(ConfigError):
        doctor.parse_shape("³x4")


def test_what_is_broken_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A script finds out that a package fails to import, or that torchtitan lacks its patches."""
    monkeypatch.setattr(Quack, "broken", lambda self: "quack-kernels 9 fails to import: boom")
    assert run(monkeypatch) == 1
    assert "problems\n  quack: quack-kernels 9 fails to import: boom" in capsys.readouterr().out

    def unpatched() -> None:
        raise PatchError("torchtitan lacks this version's patches: run it")

    monkeypatch.undo()
    monkeypatch.setattr(doctor, "require_patched_torchtitan", unpatched)
    assert run(monkeypatch, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == ["torchtitan lacks this version's patches: run it"]
    assert found["software"]["torchtitan patched"] is False


def test_it_says_which_operators_can_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Shared memory works on CPUs; without a GPU the cluster's fabric is off, and why."""
    off = report(monkeypatch, capsys)["operators"]
    assert off["shm"] is None
    assert torch.cuda.is_available() or off["gin"] == "no CUDA GPU here"


def test_a_jobs_pool(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """The parts of the pool of a job, and their sum."""
    (tmp_path / "pool.json").write_text('{"bytes": {"parameters": 1048576, "rings": 524288}}')
    job = ("--job", str(tmp_path))
    assert report(monkeypatch, capsys, *job)["pool"] == {"parameters": 1048576, "rings": 524288}
    assert run(monkeypatch, *job) == 0
    assert re.search(r"rings +0\.50 MiB\n +all +1\.50 MiB", capsys.readouterr().out)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[]", '{"bytes": 3}', '{"bytes": {"rings": "x"}}'),
        *('{"bytes": {"rings": Infinity}}', '{"bytes": {"rings": -5}}'),
    ],
)
def test_no_pool_is_one_line(tmp_path: Path, text: str | None) -> None:
    """Without a file, or with one that holds something else."""
    if text is not None:
        (tmp_path / "pool.json").write_text(text)
    expected = "in their second step" if text is None else "is damaged"
    with pytest.raises(ConfigError, match=expected):
        doctor.read_pool(tmp_path)
