"""The report: numbers that add up, and a table a person can read."""

from __future__ import annotations

import json

import pytest

from torchtitan_dmuon.ownership import (
    Assignment,
    CostTable,
    Layer,
    OwnerMesh,
    assign,
    build_units,
    summarize,
)

from .shapes import costs, matrix, qwen, vector


def test_numbers_of_a_small_case() -> None:
    layers = [
        Layer("a", (matrix("a.big", 4, 4), matrix("a.small", 2, 2), vector("a.norm", 3))),
        Layer("b", (matrix("b.big", 4, 4),)),
    ]
    units = build_units(layers, small_matrix_numel=10)
    cost = CostTable({(4, 4): 2.0, (2, 2): 1.0}, "measured")
    report = summarize(Assignment(units, (0, 0, 3), OwnerMesh(2, 2), cost), layers)
    assert (report.layers, report.units, report.matrices, report.ranks) == (2, 3, 3, 4)
    assert (report.numel, report.rider_numel) == (36, 3)
    assert (report.busiest_seconds, report.mean_seconds) == (3.0, 1.25)
    # The longest unit takes 2; no rank can be faster than that.
    assert (report.bound_seconds, report.busiest_over_bound) == (2.0, 1.5)
    assert report.heaviest_over_mean == 20 / 9
    # Two ranks own something: 20 + 3 and 16 elements.
    assert report.window_over_mean == 23 / 19.5
    assert (report.worst_layer_name, report.worst_layer_ratio) == ("a", 20 / 16)
    assert report.idle_ranks == 2
    assert [rail.bytes for rail in report.column_loads] == [46, 32]
    assert [rail.parameters for rail in report.column_loads] == [3, 1]
    assert [rail.largest_bytes for rail in report.column_loads] == [32, 32]


def test_bound_knows_that_units_are_whole() -> None:
    """Five equal units on two ranks: one rank has three, whatever one does."""
    layers = [Layer(f"l{i}", (matrix(f"l{i}.w", 2, 2),)) for i in range(5)]
    units = build_units(layers)
    found = assign(units, OwnerMesh(1, 2), CostTable({(2, 2): 1.0}, "x"))
    report = summarize(found, layers)
    assert (report.bound_seconds, report.busiest_over_bound) == (3.0, 1.0)


def test_dict_is_json() -> None:
    layers = qwen("1.5B")
    units = build_units(layers)
    report = summarize(assign(units, OwnerMesh(4, 8), costs(units)), layers)
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["matrices"] == 196 and len(data["rank_loads"]) == 32
    assert data["overruns"] and len(data["overruns"]) == len(data["overrun_layers"])


@pytest.mark.parametrize(
    ("mesh", "rows"), [(OwnerMesh(1, 1), 1), (OwnerMesh(2, 8), 16), (OwnerMesh(32, 8), 5)], ids=str
)
def test_table_fits_a_terminal(mesh: OwnerMesh, rows: int) -> None:
    layers = qwen("1.5B")
    units = build_units(layers)
    text = summarize(assign(units, mesh, costs(units)), layers).table()
    lines = text.splitlines()
    assert text.isascii() and max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("rank "))
    rest = lines[start + 1 :]
    assert (rest.index("") if "" in rest else len(rest)) == rows
    assert ("rails" in text) == (mesh.rows > 1)
    assert len(lines) < 45


def test_overruns_are_named_with_rank_and_layer() -> None:
    layers = qwen("1.5B")
    units = build_units(layers)
    found = assign(units, OwnerMesh(8, 8), costs(units))
    report = summarize(found, layers)
    text = report.table()
    first = found.overruns[0]
    assert f"  rank {first.rank}, layer layers.{first.layer}: {first.unit} makes" in text
    assert f"and {len(found.overruns) - 8} more" in text
    alone = summarize(assign(units, OwnerMesh(16, 8), costs(units)), layers).table()
    assert "the largest unit alone is 52.5 MiB" in alone


def test_layers_must_be_those_of_the_units() -> None:
    layers = qwen("1.5B")[:2]
    units = build_units(layers)
    with pytest.raises(ValueError, match="is of layer 1, of 1 given"):
        summarize(assign(units, OwnerMesh(1, 2), costs(units)), layers[:1])
