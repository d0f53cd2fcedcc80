"""The report of a plan as text: whole, escaped, self-contained, every unit where it belongs."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.planner import examples
from torchtitan_dmuon.planner import html
from torchtitan_dmuon.planner.markup import MAX_BARS, Level, bars, duration, percent, size, table
from torchtitan_dmuon.planner.plan import Plan

VOID = {"meta", "link", "br", "img", "input"}
SECTIONS = {"summary", "advice", "memory", "owners", "balance", "rails", "traffic", "assumptions"}


class Page(HTMLParser):
    """What a page consists of; wrong nesting fails at once.

    Attributes:
        tags: How often each element occurs.
        attributes: (element, attribute, value) of all attributes.
        rows: Of each row of the owner map and each cell the (text, link) of its tiles.
        texts: Text of each element with an id.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[list[tuple[str, str]]]] = []
        self._parts: dict[str, list[str]] = {}
        self._open: list[tuple[str, str | None]] = []
        self._in_map = False
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        self.texts = {name: " ".join(parts) for name, parts in self._parts.items()}

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.tags[name] += 1
        self.attributes += [(name, key, value) for key, value in found.items()]
        if name not in VOID:
            self._open.append((name, found.get("id")))
        if "id" in found:
            assert found["id"] not in self._parts, f"two elements are called {found['id']}"
            self._parts[found["id"]] = []
        if name == "table":
            self._in_map = "map" in found.get("class", "").split()
        if self._in_map and name == "tr":
            self.rows.append([])
        if self._in_map and name == "td":
            self.rows[-1].append([])
        if self._in_map and name == "a":
            self.rows[-1][-1].append(("", found["href"]))

    def handle_endtag(self, name: str) -> None:
        opened, _ = self._open.pop()
        assert opened == name, f"<{opened}> closed by </{name}>"

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name is not None:
                self._parts[name].append(data)
        if self._in_map and self._open[-1][0] == "a":
            label, link = self.rows[-1][-1].pop()
            self.rows[-1][-1].append((label + data, link))

    def values(self, *keys: str) -> list[str]:
        """Return the values of some attributes."""
        return [value for _, key, value in self.attributes if key in keys]


@functools.cache
def made(name: str) -> tuple[Plan, str, Page]:
    """Return an example, its page, and what that consists of."""
    plan = examples.ALL[name]()
    text = html.render(plan)
    return plan, text, Page(text)


@pytest.mark.parametrize("name", examples.ALL)
def test_a_page_is_whole_and_small(name: str) -> None:
    """Whatever the plan: well-formed, all sections, links that lead somewhere, under 3 MB."""
    _, text, page = made(name)
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert page.tags["h1"] == page.tags["title"] == page.tags["main"] == 1
    assert page.texts.keys() >= SECTIONS
    links = [x.removeprefix("#") for x in page.values("href") if x.startswith("#")]
    assert set(links) <= page.texts.keys()
    assert len(text.encode()) < 3_000_000


@pytest.mark.parametrize("name", examples.ALL)
def test_a_page_needs_nothing_else(name: str) -> None:
    """No address of anything outside the file, and a policy that forbids to load or send."""
    _, text, page = made(name)
    assert not page.values("src", "srcset", "action", "ping", "background")
    assert {x for x in page.values("href") if not x.startswith("#")} == {"data:,"}
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", text)
    policy = next(x for x in page.values("content") if "default-src" in x)
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|\*|(connect|frame|font)-src", policy)


def test_text_of_a_plan_stays_text() -> None:
    """Names out of configs and models never become elements, attributes or scripts."""
    evil = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;"
    plain = examples.small()
    layer = plain.layers[0]
    units = tuple(replace(u, name=f"{evil}{u.name}") for u in layer.units)
    plan = replace(
        plain,
        **dict.fromkeys(("config", "line", "mode", "communication", "sharding"), evil),
        **dict.fromkeys(("algorithm", "recompute", "assignment"), evil),
        model=replace(plain.model, name=evil, flavor=evil),
        cluster=replace(plain.cluster, device_name=evil),
        ns_time=replace(plain.ns_time, source=evil),
        worst_layer=evil,
        advice=(evil,),
        assumptions=(evil,),
        layers=(replace(layer, name=evil, units=units), *plain.layers[1:]),
    )
    page, usual = Page(html.render(plan)), Page(html.render(plain))
    assert page.tags["script"] == usual.tags["script"] == 1
    assert page.tags["img"] == 0
    assert {x[1] for x in page.attributes} == {x[1] for x in usual.attributes}
    assert evil in page.texts["assumptions"]
    # Attributes are escaped too.
    assert evil in Page(table(evil, ("a",), [("b",)])).values("aria-label")


def column_of(plan: Plan, column: int) -> int:
    """Return the column of the map that shows a column of the mesh."""
    return column // -(-plan.cluster.columns // 64)


@pytest.mark.parametrize("name", ["small", "large", "experts", "one_row"])
def test_every_unit_is_in_its_layer_and_in_its_owners_column(name: str) -> None:
    """The map shows each unit once, where it belongs, with its owner, and links to its numbers."""
    plan, _, page = made(name)
    body = page.rows[1:-1]
    assert len(body) == len(plan.layers)
    number = 0
    for layer, row in zip(plan.layers, body, strict=True):
        seen = {link: (i, label) for i, cell in enumerate(row) for label, link in cell}
        assert len(seen) == len(layer.units) == sum(len(cell) for cell in row)
        for unit in layer.units:
            column, label = seen[f"#u{number}"]
            assert column == column_of(plan, unit.column)
            owner = unit.row if plan.cluster.rows > 1 else unit.rank
            assert re.search(r"\d+$", label)[0] == str(owner)
            words = page.texts[f"u{number}"].split()
            assert words[:5] == [
                unit.name, layer.name, str(unit.rank), str(unit.row), str(unit.column),
            ]  # fmt: skip
            number += 1


def test_columns_are_shared_when_ranks_are_many() -> None:
    """One row of 512 ranks: 64 columns at most, still with every unit."""
    plan = examples.one_row(512)
    page = Page(html.render(plan))
    assert {len(row) for row in page.rows[1:-1]} == {64}
    assert "0 to 7" in page.texts["owners"]
    assert "A column stands for 8 ranks" in page.texts["owners"]


def test_numbers_of_a_plan_are_in_the_page() -> None:
    """Verdict, memory, balance, rails and traffic say what the plan says, with units."""
    page = made("small")[2]
    for section, said in {
        "summary": ["Fits: peak 58.25 GiB of 79.25 GiB", "21.00 GiB to spare", "1.123", "1.750"],
        "memory": ["Optimizer state 6.25 7.9%", "Peak 58.25 73.5%", "6,710,886,400"],
        "balance": ["rank 6: 140 µs", "mean 90.0 µs", "Table of 8 ranks"],
        "rails": ["column 0 33.2 KiB 34,000 8 5 17.6 KiB 170 µs"],
        "traffic": ["Publish: new weights to leaders 0 B 238 MiB", "Sum 6.98 GiB 830 MiB"],
        "assumptions": ["One micro-batch is in flight."],
    }.items():
        text = " ".join(page.texts[section].split())
        for part in said:
            assert part in text, f"{section}: {part!r} is not in {text!r}"


def test_a_plan_that_does_not_fit_says_so() -> None:
    """The verdict is in words, with how much is too much and what to change."""
    page = made("too_large")[2]
    assert "Does not fit: peak 108.75 GiB of 79.25 GiB" in page.texts["summary"]
    assert "29.50 GiB too much" in page.texts["memory"]
    assert "Use ZeRO-3: saves 12.00 GiB." in page.texts["advice"]
    # The part of the stack beyond the GPU's memory is where the GPU's memory ends.
    beyond = [x for x in page.values("style") if x == "--l:71.4%;--t:26.6%"]
    assert len(beyond) == 1


def test_without_owners_nothing_is_made_up() -> None:
    """Mode fsdp: no map, balance or rails, and no ratio of something that does not exist."""
    page = made("without_owners")[2]
    for section in ("owners", "balance", "rails"):
        assert "in mode fsdp no rank owns whole matrices" in page.texts[section]
    assert "heaviest" not in page.texts["summary"].replace("heaviest GPU", "")
    assert not page.rows


def test_many_values_share_bars_and_the_largest_stays_visible() -> None:
    """4,096 ranks: at most `MAX_BARS` bars, the first as high as the busiest rank."""
    values = [(float(4096 - i), f"rank {i}") for i in range(4096)]
    text = bars(
        "Time", values, text=duration, noun="rank", ends=("a", "b"), levels=[Level(8192, "top")]
    )
    page = Page(text)
    said = [x for x in page.values("aria-label") if x != "Time"]
    assert len(said) == MAX_BARS
    assert said[0] == "64 ranks, 1 to 64 from the left: 4,033 s to 4,096 s"
    heights = page.values("style")
    assert heights[0] == "--t:50%" and heights[-1] == "--t:100%"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1024), "1.00 KiB"),
        (size(1.5 * 2**30), "1.50 GiB"),
        (size(2.0**52), "4,096 TiB"),
        (duration(0), "0.00 s"),
        (duration(2.5e-5), "25.0 µs"),
        (duration(0.123), "123 ms"),
        (duration(12.34), "12.3 s"),
        (percent(1, 3), "33.3%"),
        (percent(5, 4), "100%"),
        (percent(1, 0), "0%"),
    ],
)
def test_numbers_have_units(text: str, said: str) -> None:
    """Three or four digits and the unit; shares never leave 0 to 100 percent."""
    assert text == said


def test_a_failed_write_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers never see half a page, nothing is left behind, and the mode is that of any file."""
    path = tmp_path / "plan.html"
    before = os.umask(0o022)
    try:
        html.write(examples.small(), path)
    finally:
        os.umask(before)
    old = path.read_text(encoding="utf-8")
    assert old == html.render(examples.small())
    assert path.stat().st_mode & 0o777 == 0o644

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        html.write(examples.too_large(), path)
    assert path.read_text(encoding="utf-8") == old
    assert [x.name for x in tmp_path.iterdir()] == ["plan.html"]
