"""docs/optimizers.md: the optimizer of one's own works as shown, and the figures are the code's."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchtitan_dmuon.optim.matrix_optimizer import find, registered

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/optimizers.md").read_text()
SHAPES = ((1536, 8960), (4096, 4096))


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("own_optimizer")


def test_the_page_shows_the_example(example: ModuleType) -> None:
    """The class of the file, verbatim and of at most 30 lines, with all the imports it needs."""
    source = inspect.getsource(example.RowAdam).strip()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class " in b]
    imports, shown = block.split("\n\n\n")
    assert shown.strip() == source
    assert len(source.splitlines()) <= 30
    names: dict[str, object] = {}
    exec(imports, names)
    assert all(
        names[n] is getattr(example, n) for n in ("dataclass", "MatrixOptimizer", "register")
    )


def test_the_example_trains(example: ModuleType) -> None:
    """Loss falls; the options are the rule's; state is there by the name of the rule."""
    losses = example.train()
    assert losses[-1] < losses[0] / 3
    torch.manual_seed(0)
    model = example.Model()
    optimizer = example.OwnerOptimizer(model, algorithm="row_adam", beta2=0.9, lr=0.01)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    parameter = model.layers[0].weight
    shapes = {k: tuple(v.shape) for k, v in optimizer.state[parameter].items()}
    assert shapes == {
        "row_adam_step": (),
        "row_adam_exp_avg": (32, 32),
        "row_adam_exp_avg_sq": (32, 1),
    }
    with pytest.raises(ValueError, match=r"beta3.* of row_adam.*beta"):
        example.OwnerOptimizer(example.Model(), algorithm="row_adam", beta3=0.9)


def test_the_example_is_found_by_module_and_class(example: ModuleType) -> None:
    """What the page writes in TOML."""
    assert find("own_optimizer:RowAdam") is example.RowAdam
    assert 'algorithm = "own_optimizer:RowAdam"' in PAGE


def _rows(heading: str) -> dict[str, list[str]]:
    table = PAGE.split(heading, 1)[1].split("\n\n", 1)[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name.strip("`"): rest for name, *rest in cells}


def test_costs_on_the_page_are_those_of_the_code() -> None:
    """Each figure of the cost table, with default options."""
    rows = _rows("| algorithm | 1536 x 8960: operations")
    assert rows.keys() == {"muon", "normuon", "soap", "shampoo"}
    for name, cells in rows.items():
        rule = find(name)()
        for i, (m, n) in enumerate(SHAPES):
            flops, shapes = rule.flops(m, n), rule.state_shapes(m, n).values()
            numbers = sum(m * n if s == "elementwise" else prod(s) for s in shapes)
            expected = [
                f"{flops / 1e12:.3f}e12",
                f"{flops / find('muon')().flops(m, n):.2f}",
                f"{numbers / (m * n):.2f}",
            ]
            assert cells[3 * i : 3 * i + 3] == expected, name


def test_options_on_the_page_are_those_of_the_code() -> None:
    """No option is missing, none is made up, and numbers are the defaults."""
    rows = _rows("| algorithm | state of an m x n matrix")
    assert set(rows) == {
        n for n in registered() if find(n).__module__.startswith("torchtitan_dmuon")
    }
    known: dict[str, object] = {}
    for name, (_, text) in rows.items():
        defaults = {f.name: f.default for f in fields(find(name))}
        shown = dict(re.findall(r"`(\w+)` (\([^)]*\)|[^,;]+)", text))
        if name == "normuon":
            # Those of Muon are in Muon's row.
            defaults = {k: v for k, v in defaults.items() if k in shown or k not in known}
        assert shown.keys() == defaults.keys(), name
        for option, value in shown.items():
            default = defaults[option]
            if isinstance(default, bool):
                assert value == str(default).lower(), option
            elif isinstance(default, float | int):
                assert float(value) == default, option
            elif isinstance(default, tuple):
                assert value == str(default), option
            elif isinstance(default, str):
                assert value.startswith(f'"{default}"'), option
        known |= defaults
