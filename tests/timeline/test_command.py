"""`dmuon timeline`: figures, picture, JSON, and one line for each mistake."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.timeline.synthetic import backward, moves, optimizer, span, step, waits, write
from torchtitan_dmuon import cli
from torchtitan_dmuon.timeline.picture import COLOURS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "timeline.md"


def events(slower: float = 0.0) -> list[dict[str, Any]]:
    return [
        step(4, 0, 1000),
        span("aten::linear", 0, 250),
        step(5, 1000, 2000 + slower),
        span("aten::linear", 1100, 1300),
        waits("gather", 1300, 1400),
        moves("gather", 1150, 1390, 7),
        span("aten::linear", 1400, 1500),
        backward(1500, 1700),
        moves("reduce", 1600, 1750, 8),
        optimizer(1700, 1900 + slower),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return torchtitan's folder of traces, with two iterations of two ranks."""
    for number in (9, 10):
        inner = tmp_path / f"iteration_{number}"
        inner.mkdir()
        for rank in (0, 1):
            slower = 250.0 * rank + (500.0 if number == 9 else 0.0)
            write(inner / f"rank{rank}_trace.json.gz", events(slower), rank)
    (tmp_path / "iteration_x").mkdir()
    (tmp_path / "iteration_10" / ".rank3_trace.part.json.gz").write_bytes(b"half")
    return tmp_path


@pytest.fixture
def dmuon(monkeypatch: Any, capsys: Any) -> Any:
    """Return a function from arguments to status, stdout and stderr of `dmuon timeline`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dmuon", "timeline", *map(str, arguments)])
        try:
            status = cli.main()
        except SystemExit as e:
            status = int(e.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_figures_of_a_folder(folder: Path, dmuon: Any) -> None:
    """All ranks of the newest iteration, the last step."""
    status, out, _ = dmuon(folder)
    assert status == 0
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert lines[0][0] == "step 5 (cpu), milliseconds"
    assert lines[2] == ["0", "1.00", "0.30", "0.20", "0.20", "0.10", "0.00", "0.20"]
    assert lines[3] == ["1", "1.25", "0.30", "0.20", "0.45", "0.10", "0.00", "0.20"]
    assert lines[6] == ["0", "reduce", "0.15", "0.15", "0.00"]
    assert lines[7] == ["0", "gather", "0.24", "0.15", "0.10"]


def test_a_report_of_many_ranks_stays_short(tmp_path: Path, dmuon: Any) -> None:
    """Of a large job the text shows some ranks and says so; JSON has all."""
    for rank in range(20):
        write(tmp_path / f"rank{rank}_trace.json", events(), rank)
    out = dmuon(tmp_path)[1]
    assert "and 4 more ranks (--json has all)" in out
    assert len(out.splitlines()) < 60
    assert len(json.loads(dmuon(tmp_path, "--json")[1])["ranks"]) == 20


def test_json_is_the_documented_one(folder: Path, dmuon: Any) -> None:
    """The keys of docs/timeline.md and of the output are the same."""
    found = json.loads(dmuon(folder, "--json")[1])
    keys: set[str] = set(found) | {key for rank in found["ranks"] for key in rank}
    table = DOCS.read_text().split("## Keys of `--json`")[1].split("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.M))))
    assert documented == keys
    for key in ("exposed", "communication", "hidden"):
        assert list(found["ranks"][0][key]) == ["reduce", "gather", "publish", "other"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][1]["step_ms"] == 1.25
    assert found["ranks"][0]["hidden"]["gather"] == 0.15


def test_one_file_and_a_step(folder: Path, dmuon: Any) -> None:
    """`--step` chooses among the steps of a trace."""
    path = folder / "iteration_9" / "rank1_trace.json.gz"
    found = json.loads(dmuon(path, "--step", 4, "--json")[1])
    assert [(r["rank"], r["step"], r["idle_ms"]) for r in found["ranks"]] == [(1, 4, 0.75)]


def test_picture(folder: Path, dmuon: Any, tmp_path: Path) -> None:
    """Boxes are as wide as their times: a timeline of one rank, a bar for each."""
    out = tmp_path / "step.svg"
    assert dmuon(folder, "--out", out, "--rank", 1)[0] == 0
    root = ElementTree.fromstring(out.read_text())
    space = "{http://www.w3.org/2000/svg}"
    boxes = [
        (str(r.findtext(f"{space}title")), float(r.get("width", 0)), r.get("fill"))
        for r in root.iter(f"{space}rect")
        if r.find(f"{space}title") is not None
    ]
    rows = {title: (width, colour) for title, width, colour in boxes}
    whole = 1100.0 - 90 - 90
    assert rows["backward: 0.200 ms"] == (pytest.approx(whole * 0.2 / 1.25, abs=0.01), "#1f3a5f")
    assert rows["waits: gather: 0.100 ms"][1] == COLOURS["gather"]
    label = "dmuon gather of layers.0 (rank 0 among ranks 0, 1): 0.240 ms"
    assert rows[label] == (pytest.approx(whole * 0.24 / 1.25, abs=0.01), COLOURS["gather"])
    for rank, total in ((0, 1.0), (1, 1.25)):
        widths = [width for title, width, _ in boxes if title.startswith(f"rank {rank}, ")]
        assert sum(widths) == pytest.approx(whole * total / 1.25, abs=0.1)
    assert next(t.text for t in root.iter(f"{space}text")) == "step 5, rank 1 (cpu): 1.2 ms"


def test_names_cannot_become_markup(tmp_path: Path, dmuon: Any) -> None:
    """A trace is somebody else's text: in a page it stays text."""
    evil = "dmuon gather of <script>alert(1)</script> (rank 0 among ranks 0, 1)"
    path = write(tmp_path / "t.json", [*events(), span(evil, 1500, 1600, 9)])
    out = tmp_path / "step.html"
    assert dmuon(path, "--out", out)[0] == 0
    page = out.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "step 5 (cpu), milliseconds" in page


def test_many_events_make_a_small_picture(tmp_path: Path, dmuon: Any) -> None:
    """What nobody could tell apart is one box."""
    many = [
        x
        for i in range(5000)
        for x in (
            span("aten::mm", 1000 + i / 10, 1000.05 + i / 10),
            waits("gather", 1000.05 + i / 10, 1000.1 + i / 10),
            moves("gather", 1000 + i / 10, 1000.09 + i / 10, 9),
        )
    ]
    path, out = write(tmp_path / "t.json", [*events(), *many]), tmp_path / "step.svg"
    assert dmuon(path, "--out", out)[0] == 0
    assert out.stat().st_size < 2_000_000


def test_png(folder: Path, dmuon: Any, tmp_path: Path) -> None:
    """PNG is drawn by matplotlib; without it the message says what to do."""
    out = tmp_path / "step.png"
    status, _, err = dmuon(folder, "--out", out)
    if importlib.util.find_spec("matplotlib"):
        assert status == 0
        assert out.read_bytes().startswith(b"\x89PNG")
    else:
        assert status == 2
        assert "PNG needs matplotlib (pip install matplotlib); .svg and .html do not" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected a trace, or a folder of traces"),
        (["{0}/none.json"], "no such file or folder"),
        (["{0}/iteration_x"], "no trace in it"),
        (["{0}", "--step", "7"], "--step 7: not in {0}/iteration_10/rank0_trace.json.gz; nearest "
         "is 5 (it has 4 to 5)"),
        (["{0}", "--step", "-2"], "--step -2 --rank -1: expected at least 0, or -1"),
        (["{0}", "--rank", "2"], "--rank 2: no such rank in the traces; there are 0, 1"),
        (["{0}", "--out", "a.pdf"], "--out a.pdf: expected a name that ends in .svg, .html, .png"),
        (["{0}", "--out", "{0}/x/a.svg"], "--out: no such folder: {0}/x"),
        (["{0}", "--out", "{0}/d.svg"], "it is not a file"),
        (["{0}", "{0}"], "one argument too many"),
        (["{0}", "--training.steps", "3"], "dmuon timeline takes no job"),
        (["{0}", "--stp", "3"], "--stp"),
    ],
)  # fmt: skip
def test_mistakes(folder: Path, dmuon: Any, arguments: list[str], says: str) -> None:
    """One line, status 2, nothing else."""
    (folder / "d.svg").mkdir()
    status, out, err = dmuon(*(a.format(folder) for a in arguments))
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert says.format(folder) in err


def test_two_files_of_one_rank(tmp_path: Path, dmuon: Any) -> None:
    """Traces of different runs in one folder are not one step."""
    write(tmp_path / "a.json", events(), 1)
    write(tmp_path / "b.json", events(), 1)
    assert "b.json: rank 1 is in a.json too" in dmuon(tmp_path)[2]


def test_a_rank_without_the_step(tmp_path: Path, dmuon: Any) -> None:
    """Every rank must have the step that is shown: no bar may be of another."""
    write(tmp_path / "rank0.json", events(), 0)
    write(tmp_path / "rank1.json", events()[:2], 1)
    status, _, err = dmuon(tmp_path)
    assert status == 2
    assert "rank1.json; nearest is 4" in err


def test_help_shows_commands_that_can_be_copied(dmuon: Any) -> None:
    """Each example is a line of its own."""
    out = dmuon("--help")[1]
    assert re.search(
        r"^ *dmuon timeline outputs/debug_owner_hsdp_z3/profiling/traces *$", out, re.M
    )
    assert re.search(r"^ *dmuon timeline rank0_trace.json.gz --step 20 --json *$", out, re.M)
