"""The owner map of a report: layers by columns of the mesh, a tile for every unit."""

from __future__ import annotations

import re

from .markup import (
    Markup,
    count,
    details,
    duration,
    join,
    percent,
    scrolling,
    several,
    table,
    tag,
)
from .plan import LayerPlace, Plan, UnitPlace

# Columns of the map; more ranks than that share columns.
MAX_COLUMNS = 64
# Up to so many columns and tiles in a cell, a tile has room for the name of its unit.
WIDE_COLUMNS, WIDE_TILES = 16, 4


def owner_map(plan: Plan) -> Markup:
    """Return the map, what its marks mean, and the folded table of all units.

    Every tile links to its unit's row in that table, which is where the numbers are: for a reader
    without JavaScript by following the link, else in the box that opens beside the tile.

    Args:
        plan: A plan with layers.
    """
    rows, columns = plan.cluster.rows, plan.cluster.columns
    each = -(-columns // MAX_COLUMNS)
    noun = "column" if rows > 1 else "rank"
    layers, first = [], 0
    for layer in plan.layers:
        layers.append(_cells(layer, first, columns, each))
        first += len(layer.units)
    most_tiles = max(len(cell) for layer in layers for cell in layer)
    longest = max((u.seconds for x in plan.layers for u in x.units), default=0.0)
    wide = columns <= WIDE_COLUMNS and most_tiles <= WIDE_TILES
    body = []
    for layer, cells in zip(plan.layers, layers, strict=True):
        tiles = (tag("td", *(_tile(n, u, rows, longest, wide) for n, u in x)) for x in cells)
        body.append(tag("tr", tag("th", layer.name, scope="row"), *tiles))
    starts = range(0, columns, each)
    names = [f"{noun} {s}" if each == 1 else f"{s} to {min(s + each, columns) - 1}" for s in starts]
    totals = [sum(len(layer[i]) for layer in layers) for i in range(len(names))]
    grid = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", x, scope="col") for x in ("layer", *names)))),
        tag("tbody", *body),
        tag("tfoot", tag("tr", tag("th", "units"), *(tag("td", count(x)) for x in totals))),
        cls="map wide" if wide else "map dense" if most_tiles > WIDE_TILES and each == 1 else "map",
        data_roving=True,
        aria_label=f"Owner of each unit: layers by {noun}s",
    )
    return join(
        (tag("p", _legend(plan, each, wide)), scrolling("Owner map", grid), _table_of_units(plan))
    )


def _legend(plan: Plan, each: int, wide: bool) -> str:
    if plan.cluster.rows > 1:
        says = "A tile is a unit, in its layer's row and its owner's column. Its number is the row"
        says += " (the node) of the owner" + (", after r." if wide else ".")
    else:
        says = "The mesh has one row, so columns are ranks. A tile is a unit, below its owner."
        if each > 1:
            says += f" A column stands for {each} ranks."
        if not wide:
            says += " Its number is the rank."
    if wide:
        says += " +1 means one more matrix in the unit."
    return (
        f"{says} The line in it is its update time as a share of the longest. Pointing at a tile, "
        "or arrow keys, show its numbers; its link leads to them in the table."
    )


def _cells(
    layer: LayerPlace, first: int, columns: int, each: int
) -> list[list[tuple[int, UnitPlace]]]:
    """Return a layer's units, numbered from `first`, by column of the map, in order of rank."""
    cells: list[list[tuple[int, UnitPlace]]] = [[] for _ in range(0, columns, each)]
    for number, unit in sorted(enumerate(layer.units, first), key=lambda x: x[1].rank):
        cells[unit.column // each].append((number, unit))
    return cells


def _tile(number: int, unit: UnitPlace, rows: int, longest: float, wide: bool) -> Markup:
    style = f"--t:{percent(unit.seconds, longest)}"
    return tag("a", _label(unit, rows, wide), href=f"#u{number}", style=style)


def _label(unit: UnitPlace, rows: int, wide: bool) -> str:
    """Return what stands in a tile: who owns it, and with enough room what it is."""
    if not wide:
        return str(unit.row if rows > 1 else unit.rank)
    more = f" +{unit.matrices - 1}" if unit.matrices > 1 else ""
    return f"{_kind(unit.name)}{more}" + (f" r{unit.row}" if rows > 1 else "")


def _kind(name: str) -> str:
    """Return the part of a unit's name that tells units of a layer apart: wq, w1."""
    parts = [re.sub(r"\[\d+\]$", "", x) for x in name.split(".")]
    telling = [x for x in parts if x not in ("weight", "bias") and not x.isdigit()]
    return telling[-1] if telling else name


def _table_of_units(plan: Plan) -> Markup:
    head = (
        "Unit", "Layer", "Owner rank", "Row", "Column", "Update time", "Elements", "Matrices",
        "Norms and biases",
    )  # fmt: skip
    rows = [
        (
            u.name, layer.name, u.rank, u.row, u.column, duration(u.seconds), count(u.elements),
            u.matrices, u.parameters,
        )
        for layer in plan.layers
        for u in layer.units
    ]  # fmt: skip
    ids = [f"u{i}" for i in range(len(rows))]
    what = f"Table of {several(len(rows), 'unit')} and their owners"
    return details(what, table(f"{what}.", head, rows, ids=ids))
