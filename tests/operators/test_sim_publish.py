"""What the simulator says of a publish: the command, and the paper's table 7."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.operators.published_publish import PublishRow, publish_rows
from tests.operators.test_sim_operator import dmuon_simulate, expect_one_line
from torchtitan_dmuon.native.segments import Segment
from torchtitan_dmuon.simulator.cluster import shipped
from torchtitan_dmuon.simulator.operator import predict_publish

MIB = 2**20
ARGUMENTS = ("operator", "--op", "publish", "--gpus", "64", "--bytes", str(256 * MIB))


def _json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, object]:
    assert dmuon_simulate(monkeypatch, *ARGUMENTS, *arguments, "--json") == 0
    table: dict[str, object] = json.loads(capsys.readouterr().out)
    return table


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One rail of the cluster, one thread block; tasks are dealt to the nodes in turn."""
    table = _json(monkeypatch, capsys, "--tasks", "45")
    assert (table["operation"], table["segments"], table["blocks"]) == ("publish", 45, 1)
    assert (table["gpus"], table["nodes"], table["bytes"]) == (64, 8, 256 * MIB)
    ranks = table["ranks"]
    assert isinstance(ranks, list) and len(ranks) == 8
    # All but the own tasks pass a NIC: the bytes over 7 of 8 nodes, at 48 GB/s, are the bound.
    bound = 256 * MIB * 7 / 8 / 48e9 * 1e3
    assert isinstance(table["ms"], float) and bound < table["ms"] < 1.4 * bound
    padding = sum(rank["nic_in"] for rank in ranks) - 7 * 256 * MIB
    assert 0 <= padding < 7 * 45 * 16


def test_one_owner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The owner's NIC sends all, once; the last node of its chain sends nothing."""
    ranks = _json(monkeypatch, capsys, "--owners", "one")["ranks"]
    assert isinstance(ranks, list)
    assert [rank["nic_out"] // MIB for rank in ranks] == [256] * 7 + [0]


def test_updates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --update_ms the transfer runs beside the update; the text says what is left after it."""
    status = dmuon_simulate(monkeypatch, *ARGUMENTS, "--tasks", "80", "--update_ms", "20")
    text = capsys.readouterr().out
    assert status == 0
    assert "80 tasks of one rail on 64 GPUs" in text and "1 thread block per GPU" in text
    left = float(text.split(" ms after the last update")[0].split()[-1])
    assert 0 < left < 1.5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["operator", "--tasks", "3"], "--tasks: only a publish has it"),
        (["operator", "--update_ms", "3"], "--update_ms: only a publish has it"),
        ([*ARGUMENTS, "--tasks", "65537"], "--tasks: expected 0 to 65536"),
        ([*ARGUMENTS, "--update_ms", "-1"], "--update_ms: expected 0 to 10000"),
        ([*ARGUMENTS, "--lengths", "1:0"], "task 1: 0 bytes, expected 1 or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_cost_one_line(
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2 and one line that says what was expected."""
    expect_one_line(monkeypatch, capsys, arguments, expected)


def test_bad_tasks_are_named() -> None:
    """The core's own checks."""
    with pytest.raises(ValueError, match="task 1: owner node 2, expected 0 to 1"):
        predict_publish(shipped("h100_400g"), 2, [Segment(0, 16, 0), Segment(16, 16, 2)])


def _errors(rows: list[PublishRow]) -> list[float]:
    cluster = shipped("h100_400g")
    return [abs(row.predict(cluster).ms / row.ms - 1) for row in rows]


def test_the_papers_rail_without_a_config() -> None:
    """Nothing was fitted to table 7; where the tasks are not known, it is within a third."""
    rows = [row for row in publish_rows() if not row.config]
    assert len(rows) == 5
    assert max(_errors(rows)) < 0.35


@pytest.mark.slow
def test_the_papers_rails() -> None:
    """All of table 7: median within 10 percent, and 32B, which fills its links, within 6."""
    rows = list(publish_rows())
    errors = _errors(rows)
    assert len(rows) == 15
    assert statistics.median(errors) < 0.10 and max(errors) < 0.35
    large = [error for row, error in zip(rows, errors, strict=True) if "32B" in row.model]
    assert len(large) == 5 and max(large) < 0.06
