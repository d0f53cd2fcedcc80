"""`dmuon costs` and `parallelism.owner_cost`: what they take, and what they say of mistakes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan_dmuon.config.errors import ConfigError
from torchtitan_dmuon.costs import Options, check_options, measure_table, parse_shapes, run
from torchtitan_dmuon.optim.algorithms import MuonRule
from torchtitan_dmuon.ownership import CostTable

JOB = """\
base = "debug_owner.toml"
[parallelism]
owner_cost = "{}"
"""


def message(tmp_path: Path, cost: str, *arguments: str) -> str:
    """Return what the check of a job with this owner_cost says; "" if it passes."""
    from torchtitan_dmuon.config.checks import check
    from torchtitan_dmuon.config.manager import load_job

    (tmp_path / "job.toml").write_text(JOB.format(cost))
    job = load_job(["--config", str(tmp_path / "job.toml"), *arguments])
    try:
        check(job, 4, "cpu")
    except ConfigError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("options", "job", "expected"),
    [
        ({}, [], "--shapes: expected shapes, e.g. 1536x8960"),
        ({"shapes": ["1x2"]}, ["--model.flavor", "7B"], "--model.flavor: changes a job; give its"),
        ({"shapes": ["1x2"], "repeats": 0}, [], "--repeats: expected at least 1, got 0"),
        ({"shapes": ["1x2"], "output": "costs"}, [], '.json, got "costs"'),
        ({"shapes": ["1x2"], "output": "no/such.json"}, [], "--output: no such folder: .*no$"),
    ],
)
def test_mistakes_in_the_options(options: dict[str, object], job: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_options(Options(**{"output": "costs.json", **options}), job)  # type: ignore[arg-type]


def test_shapes_and_models_are_told_apart() -> None:
    found = parse_shapes(["1536x8960", "qwen2_5:1.5B"])
    assert found == ([(1536, 8960)], [("qwen2_5", "1.5B")])
    for bad in ("1536", "0x3", "3x", "-1x2", "qwen2_5"):
        with pytest.raises(ConfigError, match=f'"{bad}" is neither ROWSxCOLUMNS'):
            parse_shapes([bad])


def test_each_shape_is_the_median_and_progress_ends_at_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has every shape once, says what was measured, and progress names the time left."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 60).__next__)
    monkeypatch.setattr("torchtitan_dmuon.costs.time", clock)
    table = measure_table([(4, 4), (4, 8)], MuonRule(ns_steps=2), torch.device("cpu"), 1)
    assert list(table.seconds) == [(4, 4), (4, 8)] and table.algorithm == "muon"
    assert table.source == f"measured on {table.about['device']}"
    assert table.about["dtype"] == "float32" and table.about["options"]["ns_steps"] == "2"
    lines = capsys.readouterr().err.splitlines()
    # Two steps of the standard iteration on 4 x 4 take less than half of all operations.
    assert lines[0].startswith("[  60 s] 1 of 2: 4 x 4: ")
    assert 60 < int(lines[0].split()[-3]) < 240
    assert lines[1].startswith("[ 120 s] 2 of 2") and lines[1].endswith("about 0 s left")


def test_the_command_writes_a_table_that_a_job_takes(tmp_path: Path) -> None:
    """From shapes to owners: what `dmuon costs` writes for a model passes the job's check."""
    path = str(tmp_path / "costs.json")
    run(Options(shapes=["qwen2_5:debug"], output=path, repeats=1), [], [])
    assert len(CostTable.load(path).seconds) == 4
    assert message(tmp_path, path) == ""


def test_mistakes_in_owner_cost_are_named_before_any_process_group(tmp_path: Path) -> None:
    """Line and key of the job, then what is wrong and the way out."""
    where = f"{tmp_path}/job.toml:3: parallelism.owner_cost: "
    assert message(tmp_path, "h100") == message(tmp_path, "model") == ""
    text = message(tmp_path, "h10")
    assert text.startswith(f"{where}no cost table 'h10'; did you mean 'h100'? expected measured,")
    assert "No such file" in message(tmp_path, f"{tmp_path}/missing.json")
    small = CostTable({(128, 128): 1.0}, "by hand")
    small.save(tmp_path / "small.json")
    text = message(tmp_path, f"{tmp_path}/small.json")
    assert text.startswith(
        f"{where}the cost table (by hand) has no entry for layers.0.attention.qkv_linear.wk.weight "
        "of shape 64 x 128 (and for 2 more); use cost 'measured'"
    )
    assert "dmuon costs --shapes 64x128,128x128,128x352,352x128 --output" in text
    CostTable(small.seconds, "by hand", "soap").save(tmp_path / "soap.json")
    text = message(tmp_path, f"{tmp_path}/soap.json")
    assert "is for algorithm 'soap', but the job has 'muon'" in text
