"""Cost tables: exact round trips, medians, and errors that name the shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_dmuon.ownership import CostTable, Layer, build_units, measure, median, model_cost

from .shapes import gram_flops, matrix


def test_saved_table_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Also what it says of itself."""
    about = {"device": 'a "quoted" µ', "versions": {"torch": "2.13"}}
    table = CostTable({(3, 2): 0.1 + 0.2, (2, 3): 1e-7 / 3}, "measured", "soap", about)
    table.save(tmp_path / "costs.json")
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


HEAD = '{"version": 2, "algorithm": "muon", "source": "x", "about": {}, '


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", HEAD + '"seconds": [{"rows": 1}]}',
        HEAD + '"seconds": [{"rows": 1, "columns": 1, "seconds": -1}]}',
        HEAD.replace('"muon"', "null") + '"seconds": 1}',
        '{"version": 1, "source": "x", "seconds": []}',
        HEAD.replace("2", "3") + '"seconds": [{"rows": 1, "columns": 1, "seconds": 1}]}',
    ],
)  # fmt: skip
def test_files_that_are_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json is .*a cost table"):
        CostTable.load(tmp_path / "costs.json")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.mkdir()
    with pytest.raises(OSError):
        CostTable({(1, 1): 1.0}, "x").save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_shapes_are_exact_and_missing_ones_are_named() -> None:
    wide, tall = matrix("wide", 2, 3).matrices[0], matrix("tall", 3, 2).matrices[0]
    table = CostTable({(2, 3): 1.0}, "measured")
    assert table.of(wide) == 1.0
    with pytest.raises(ValueError, match="no entry for tall of shape 3 x 2"):
        table.of(tall)
    table.check([wide])
    with pytest.raises(ValueError) as error:
        table.check([wide, tall, *matrix("other", 4, 4).matrices])
    assert str(error.value) == (
        "the cost table (measured) has no entry for tall of shape 3 x 2 (and for 1 more); use "
        "cost 'measured' or 'model', or make a table with dmuon costs --shapes 2x3,3x2,4x4 "
        "--output costs.json"
    )
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cost of 2 x 3"):
            CostTable({(2, 3): bad}, "measured")


def test_measure_runs_each_shape_once_in_order() -> None:
    ran = []

    def run(rows: int, columns: int) -> float:
        ran.append((rows, columns))
        return float(rows)

    table = measure([(3, 1), (1, 2), (3, 1)], run, "soap")
    assert ran == [(1, 2), (3, 1)] and table.algorithm == "soap"
    assert table.seconds == {(1, 2): 1.0, (3, 1): 3.0}


def test_median_over_ranks() -> None:
    tables = [CostTable({(1, 1): s, (2, 2): 5.0}, "measured") for s in (1.0, 9.0, 2.0)]
    assert median(tables).seconds == {(1, 1): 2.0, (2, 2): 5.0}
    with pytest.raises(ValueError, match="tables 0 and 1 list different shapes"):
        median([tables[0], CostTable({(1, 1): 1.0}, "measured")])
    with pytest.raises(ValueError, match="at least one"):
        median([])
    soap = CostTable(tables[0].seconds, "measured", "soap")
    assert median([soap, soap]).algorithm == "soap"
    with pytest.raises(ValueError, match="different algorithms: 'muon' and 'soap'"):
        median([tables[0], soap])


def test_a_table_for_another_algorithm_is_refused() -> None:
    """Times of Muon say nothing of SOAP: no silent substitution."""
    table = CostTable({(2, 3): 1.0}, "costs.json", "soap")
    table.check(matrix("wide", 2, 3).matrices, "soap")
    with pytest.raises(ValueError, match=r"\(costs.json\) is for algorithm 'soap', but"):
        table.check(matrix("wide", 2, 3).matrices)


def test_model_cost_grows_slower_than_elements() -> None:
    shapes = [(256, 1536), (8960, 1536), (1536, 8960), (1536, 1536), (256, 1536)]
    table = model_cost(shapes, gram_flops, "shampoo")
    assert (table.source, table.algorithm) == ("model", "shampoo")
    seconds = table.seconds
    assert seconds[256, 1536] < seconds[1536, 1536] < seconds[8960, 1536] == seconds[1536, 8960]
    # The overhead keeps a small matrix from being nearly free.
    assert seconds[256, 1536] / seconds[8960, 1536] > 4 * (256 / 8960)


def test_unit_seconds_add_the_matrices() -> None:
    (unit,) = build_units([Layer("l", (matrix("a", 2, 2), matrix("b", 2, 3)))])
    table = CostTable({(2, 2): 0.25, (2, 3): 0.5}, "x")
    assert table.unit_seconds(unit) == 0.75
