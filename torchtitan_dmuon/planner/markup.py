"""HTML from values: escaping by default, numbers with units, tables and bar charts.

Text becomes markup in one place only: `tag` and `table` escape every child and attribute that is
not already `Markup`, so that a name out of a config file can never become part of the page's code.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

# Bars of one chart: what still has a few pixels each on a phone.
MAX_BARS = 64


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Return a value as HTML: text escaped, `Markup` as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def join(parts: Iterable[object]) -> Markup:
    """Return parts one after another, each escaped."""
    return Markup("".join(escape(x) for x in parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Element.
        children: Content; escaped unless it is `Markup`.
        attributes: `cls` stands for `class`, `_` for `-`; None leaves one out, True has no value.
    """
    text = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        spelled = "class" if key == "cls" else key.replace("_", "-")
        text.append(spelled if value is True else f'{spelled}="{html.escape(str(value))}"')
    return Markup(f"<{' '.join(text)}>{join(children)}</{name}>")


def count(n: int) -> str:
    """Return a number with separators: 1,234."""
    return f"{n:,}"


def several(n: int, noun: str) -> str:
    """Return a number with its noun: 1 unit, 2 units, 3 matrices."""
    if n == 1:
        return f"1 {noun}"
    return f"{count(n)} {noun[:-2] + 'ices' if noun.endswith('ix') else noun + 's'}"


def ratio(value: float) -> str:
    """Return a plain number with three decimals."""
    return f"{value:.3f}"


def gib(value: float) -> str:
    """Return GiB with two decimals."""
    return f"{value:.2f} GiB"


def size(value: float) -> str:
    """Return bytes in a binary unit with three or four digits: 512 B, 1.50 GiB."""
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1024 or unit == "TiB":
            break
    return f"{_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """Return seconds in s, ms or µs with three or four digits."""
    if seconds == 0 or abs(seconds) >= 1:
        return f"{_digits(seconds)} s"
    if abs(seconds) >= 1e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(part: float, whole: float) -> str:
    """Return a share as a CSS length, 0% to 100%; 0% of nothing."""
    share = part / whole if whole > 0 else 0.0
    return f"{100 * min(max(share, 0.0), 1.0):.1f}".removesuffix(".0") + "%"


@dataclass(frozen=True, slots=True)
class Share:
    """A table cell: text, and its value for a line that shows its share of the column's largest."""

    text: str
    value: float


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    foot: Sequence[object] = (),
    ids: Sequence[str] = (),
) -> Markup:
    """Return a table in a box that scrolls sideways by itself.

    Args:
        caption: What it shows, with units.
        head: Column titles.
        rows: Cells; the first of each row is the row's title. `Share` cells get a line below.
        foot: A last row, of totals.
        ids: `id` of each row, to link to.
    """
    columns = range(len(head))
    largest = [
        max((c.value for r in rows if isinstance(c := r[i], Share)), default=0.0) for i in columns
    ]
    body = [
        tag("tr", *(_cell(c, largest[i], i == 0) for i, c in enumerate(row)), id=name)
        for row, name in zip(rows, ids or repeat(None, len(rows)), strict=True)
    ]
    parts = [
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", x, scope="col") for x in head))),
        tag("tbody", *body),
    ]
    if foot:
        parts.append(tag("tfoot", tag("tr", *(_cell(c, 0, i == 0) for i, c in enumerate(foot)))))
    return scrolling(caption, tag("table", *parts))


def _cell(cell: object, largest: float, first: bool) -> Markup:
    if first:
        return tag("th", cell, scope="row")
    if isinstance(cell, Share):
        return tag("td", cell.text, cls="share", style=f"--t:{percent(cell.value, largest)}")
    return tag("td", cell)


def scrolling(label: str, content: Markup) -> Markup:
    """Return content in a box that scrolls sideways, by keyboard too."""
    return tag("div", content, cls="scroll", role="region", aria_label=label, tabindex=0)


def details(summary: str, *content: object) -> Markup:
    """Return a part that is folded until it is opened."""
    return tag("details", tag("summary", summary), *content)


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line in a chart: its value, its label, and whether it is a limit."""

    value: float
    label: str
    limit: bool = False


def bars(
    label: str,
    values: Sequence[tuple[float, str]],
    *,
    text: Callable[[float], str],
    noun: str,
    ends: tuple[str, str],
    levels: Sequence[Level] = (),
) -> Markup:
    """Return a bar chart; more than `MAX_BARS` values share bars, each as high as its largest.

    Args:
        label: Title, with the unit.
        values: Value and its own description (`rank 3: 1.2 ms`), in drawing order.
        text: Function from a value to text with its unit.
        noun: What a value belongs to, for bars of several: `rank`.
        ends: What stands below the left and the right end.
        levels: Lines across; one above the highest bar raises the chart.
    """
    top = max([v for v, _ in values] + [level.value for level in levels], default=0.0)
    each = -(-len(values) // MAX_BARS) or 1
    marks = []
    for start in range(0, len(values), each):
        group = values[start : start + each]
        most = max(v for v, _ in group)
        if len(group) == 1:
            says = group[0][1]
        else:
            least = min(v for v, _ in group)
            says = (
                f"{several(len(group), noun)}, {start + 1} to {start + len(group)} "
                f"from the left: {text(least)} to {text(most)}"
            )
        bar = tag("i", style=f"--t:{percent(most, top)}")
        marks.append(tag("span", bar, cls="bar", role="img", aria_label=says))
    for level in levels:
        style = f"--t:{percent(level.value, top)}"
        name = "level cap" if level.limit else "level"
        marks.append(tag("span", tag("b", level.label), cls=name, style=style))
    return tag(
        "figure",
        tag("figcaption", label),
        tag("div", *marks, cls="bars", role="group", aria_label=label, data_roving=True),
        tag("div", tag("span", ends[0]), tag("span", ends[1]), cls="ends"),
    )
