"""Cost tables that come with the package: what they hold, and how they are found."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan_dmuon.models.qwen2_5.sizes import QWEN2_5_SIZES
from torchtitan_dmuon.ownership import CostTable, OwnerMesh, assign, build_units, shipped_tables

from .shapes import qwen, qwen_moe

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "torchtitan_dmuon" / "ownership" / "tables"

# Sizes of torchtitan_dmuon.models.qwen2_5 that each table must have.
SIZES = {
    "h100": ("debug", "bench", "0.5B", "1.5B", "7B", "32B"),
    "cpu": ("debug", "bench", "0.5B", "1.5B"),
}


def load_file(name: str, path: Path) -> ModuleType:
    """Import one file, without the package around it (which would import torchtitan)."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_file("fit_h100_costs", ROOT / "scripts" / "fit_h100_costs.py")


def test_the_h100_table_is_there() -> None:
    assert "h100" in shipped_tables()
    assert set(shipped_tables()) <= set(SIZES)


@pytest.mark.parametrize("name", shipped_tables())
def test_a_shipped_table_has_the_shapes_of_its_models(name: str) -> None:
    """Both ways round, from the models' own sizes; and it says where its numbers come from."""
    table = CostTable.load(name)
    for size in (QWEN2_5_SIZES[size] for size in SIZES[name]):
        key = size.n_kv_heads * size.head_dim
        shapes = {(size.dim, size.dim), (key, size.dim)}
        shapes |= {(size.dim, size.hidden_dim), (size.hidden_dim, size.dim)}
        if name == "h100":
            shapes.add((size.head_dim, size.dim))
        assert shapes <= table.seconds.keys()
    assert {"device", "dtype", "versions", "date", "method"} <= table.about.keys()
    assert table.algorithm == "muon"
    assert any(word in table.source for word in ("fitted to", "measured on"))


def test_the_h100_table_has_the_other_models() -> None:
    table = CostTable.load("h100")
    matrices = [m for layer in qwen_moe() for p in layer.parameters for m in p.matrices]
    table.check(matrices)
    llama = {(3072, 3072), (1024, 3072), (8192, 3072), (3072, 8192)}
    llama |= {(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)}
    assert llama <= table.seconds.keys()


def test_shipped_tables_are_package_data() -> None:
    """An installed package has them too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["torchtitan_dmuon"]
    for path in FOLDER.iterdir():
        name = str(path.relative_to(ROOT / "torchtitan_dmuon"))
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is a shipped table, whatever lies in the working folder; a path is a file."""
    monkeypatch.chdir(tmp_path)
    CostTable({(1, 1): 1.0}, "mine").save("h100.json")
    Path("h100").write_text("{}")
    assert CostTable.load("h100").source.startswith("h100, fitted to")
    Path("h100.json").rename("mine")
    CostTable.load("./mine").save("h100.json")
    for path in ("h100.json", "./h100.json", tmp_path / "h100.json", "./mine"):
        assert CostTable.load(path).source == "mine"
    with pytest.raises(ValueError, match=r"^no cost table 'h10'; did you mean 'h100'\? expected"):
        CostTable.load("h10")
    with pytest.raises(ValueError, match=r"'xyzzy'; expected measured, model, .*h100 or the path"):
        CostTable.load("xyzzy")
    with pytest.raises(OSError, match=r"missing\.json"):
        CostTable.load("missing.json")


def test_the_fit_is_what_is_shipped(script: ModuleType, tmp_path: Path) -> None:
    """No entry is set by hand: parameters give the file bit for bit, and are the best there are.

    A last round of the search from the shipped parameters must stay where it is.
    """
    shipped = (FOLDER / "h100.json").read_text()
    parameters = script.Parameters(**json.loads(shipped)["about"]["parameters"])
    script.cost_table(parameters).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == shipped
    found, least = script.fit(parameters, steps=(1.01,))
    assert found == parameters
    text = (ROOT / "docs" / "benchmarks" / "h100_cost_fit.md").read_text()
    assert text == script.document(parameters, least)


def test_the_h100_table_tells_what_the_paper_tells() -> None:
    """From the shipped file, apart from the script: k over gate, and the slowest rank's time."""
    table = CostTable.load("h100")
    assert 0.35 < table.seconds[256, 1536] / table.seconds[8960, 1536] < 0.5
    assert 0.75 < table.seconds[1536, 8960] / table.seconds[8960, 1536] < 0.85
    for nodes, milliseconds in ((2, 10.7), (4, 6.2), (16, 2.6), (32, 2.7)):
        found = assign(build_units(qwen("1.5B")), OwnerMesh(nodes, 8), table)
        assert 1e3 * max(found.rank_seconds) == pytest.approx(milliseconds, rel=0.1)
