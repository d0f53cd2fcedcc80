"""scripts/compare_lines.py: how it reads and compares the losses of lines."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "compare_lines", ROOT / "scripts/compare_lines.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_differences_are_relative_to_the_first_line(script: Any) -> None:
    """Largest with its step, mean, first step that differs, last step."""
    losses = {"C": {1: 4.0, 2: 2.0, 3: 1.0, 4: 1.0}, "D": {1: 4.0, 2: 2.5, 3: 0.9, 4: 1.0}}
    (found,) = script.compare(losses)
    assert (found.first, found.second) == ("C", "D")
    assert (found.largest, found.at, found.begin, found.last) == (0.25, 2, 2, 0.0)
    assert found.mean == pytest.approx((0.25 + 0.1) / 4)


def test_every_two_lines_are_compared(script: Any) -> None:
    """Equal losses have no first step of difference."""
    found = script.compare({line: {1: 1.0, 2: 0.5} for line in "BCD"})
    assert [(d.first, d.second) for d in found] == [("B", "C"), ("B", "D"), ("C", "D")]
    assert all((d.largest, d.begin) == (0.0, 0) for d in found)


def test_a_loss_that_is_not_a_number_is_the_largest_difference(script: Any) -> None:
    """NaN must not look like agreement, wherever it stands."""
    for step in (1, 2, 3):
        losses = {"C": {1: 1.0, 2: 1.0, 3: 1.0}, "D": {1: 1.0, 2: 1.5, 3: 1.0}}
        losses["D"][step] = math.nan
        (found,) = script.compare(losses)
        assert math.isnan(found.largest)
        assert found.at == step


def test_other_steps_are_no_comparison(script: Any) -> None:
    """A line that stopped early is an error, not a shorter comparison."""
    with pytest.raises(ValueError, match=r"losses of 2 and of 1 steps"):
        script.compare({"C": {1: 1.0, 2: 1.0}, "D": {1: 1.0}})


def test_losses_come_from_tensorboard(script: Any, tmp_path: Path) -> None:
    """Of all curves below a folder the mean loss, at every step, in full float32 precision."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb" / "some_day")) as writer:
        for step in range(1, 2001):
            writer.add_scalar(script.LOSS, 1 / step, step)
            writer.add_scalar("grad_norm", 7.0, step)
    found = script.read_losses(tmp_path)
    assert len(found) == 2000
    assert found[3] == pytest.approx(1 / 3, rel=1e-7)


@pytest.mark.parametrize(("last", "status"), [(1.009, 0), (1.02, 1), (math.nan, 1)])
def test_the_bound_decides_the_exit_status(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float, status: int
) -> None:
    """1 if two lines differ by more than the bound at any step, or are not numbers."""
    losses = {"C": {1: 2.0, 2: 1.0}, "D": {1: 2.0, 2: last}}
    monkeypatch.setattr(script, "train", lambda options, line: losses[line])
    monkeypatch.setattr(
        sys, "argv", ["compare_lines.py", "--lines", "C,D", "--folder", str(tmp_path / "new")]
    )
    assert script.main() == status


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lines", "D"], "--lines D"),
        (["--lines", "C,C"], "--lines C,C"),
        (["--lines", "C,E"], "--lines C,E"),
        (["--steps", "0"], "--steps"),
        (["--folder", "."], "exists already"),
        (["--picture", "losses.txt"], ".png or .svg"),
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """Exit status 2, before anything is started."""
    folder = [] if "--folder" in arguments else ["--folder", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", ["compare_lines.py", *folder, *arguments])
    assert script.main() == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert words in text
