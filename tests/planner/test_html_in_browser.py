"""The report of a plan in a real headless Chromium: what a reader sees, hears and can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.planner import examples
from tests.planner.browser import NoBrowser, running
from torchtitan_dmuon.planner import html
from torchtitan_dmuon.planner.plan import LayerPlace, UnitPlace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE, DESKTOP = 360, 1280
SECTIONS = ("summary", "advice", "memory", "owners", "balance", "rails", "traffic", "assumptions")

# A layer with as many units as the large plan of experts, but few layers.
PLANS = {**examples.ALL, "few_experts": lambda: examples.experts(2)}
# The two plans that take a while to draw are opened on one screen each.
SCREENS = [
    (name, width)
    for name in examples.ALL
    for width in (PHONE, DESKTOP)
    if (name, width) not in (("experts", DESKTOP), ("large", PHONE))
]

# The least contrast of any visible text with what is behind it, as WCAG defines it.
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  let least = [21, ""];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !e.getClientRects().length) continue;
    const pair = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < least[0]) least = [ratio, texts.currentNode.data];
  }
  return least;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with running() as found:
            yield found
    except NoBrowser as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("reports")

    def file(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            html.write(PLANS[name](), path)
        return path

    return file


def in_column_0(layer: LayerPlace) -> list[UnitPlace]:
    """Return the units of the map's first cell, in order of rows."""
    return sorted((u for u in layer.units if u.column == 0), key=lambda u: u.row)


@contextmanager
def opened(browser: Browser, path: Path, width: int = DESKTOP, **options: Any) -> Iterator[Page]:
    """Open a file without a network; whatever it asks for or complains about fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 800}, offline=True, **options)
    context.set_default_timeout(20_000)
    try:
        page = context.new_page()
        asked: list[str] = []
        trouble: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(path.as_uri(), wait_until="load")
        yield page
        assert {x.split("#")[0] for x in asked if not x.startswith("data:")} == {path.as_uri()}
        assert not trouble
    finally:
        context.close()


@pytest.mark.parametrize(("name", "width"), SCREENS)
def test_a_page_opens_offline_and_fits_the_screen(
    browser: Browser, files: Callable[[str], Path], name: str, width: int
) -> None:
    """Every kind of plan, phone and desktop: sections visible, and no scrolling sideways."""
    with opened(browser, files(name), width) as page:
        for section in SECTIONS:
            assert page.locator(f"section#{section}").bounding_box()["height"] > 20, section
        widths = page.evaluate(
            "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert widths[0] <= widths[1] == width
        # Nothing is cut off at the right either, except in boxes that scroll by themselves.
        cut = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll")
              && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML)"""
        )
        assert not cut
        ready = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
        assert page.evaluate(ready) < 20_000


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_pointer_and_keyboard_show_the_numbers_of_a_unit(
    browser: Browser, files: Callable[[str], Path], width: int
) -> None:
    """Hover shows the row of the unit; Tab and arrow keys reach the others; Escape hides it."""
    first, second, *_ = in_column_0(examples.experts(2).layers[0])
    with opened(browser, files("few_experts"), width) as page:
        tip, tiles = page.locator("#tip"), page.locator(".map a")
        assert not tip.is_visible()
        tiles.nth(1).hover()
        said = tip.inner_text()
        for part in (second.name, "layers.0", f"{second.elements:,}", "Update time"):
            assert part in said
        box = tip.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        page.mouse.move(0, 0)
        assert not tip.is_visible()

        # One tab stop for the whole map; its first tile comes after the box that scrolls.
        assert page.locator(".map a[tabindex='0']").count() == 1
        page.locator(".scroll:has(.map)").focus()
        page.keyboard.press("Tab")
        assert first.name in tip.inner_text()
        assert page.locator("a[aria-describedby=tip]").get_attribute("href") == "#u0"
        page.keyboard.press("ArrowRight")
        assert second.name in tip.inner_text()
        page.keyboard.press("ArrowDown")
        assert "layers.1" in tip.inner_text()
        page.keyboard.press("Escape")
        assert not tip.is_visible()


def test_bars_and_memory_parts_show_their_numbers(
    browser: Browser, files: Callable[[str], Path]
) -> None:
    """Marks that are no links say the same to the eye as to a screen reader."""
    with opened(browser, files("small")) as page:
        tip = page.locator("#tip")
        page.locator(".stack .part").nth(2).hover()
        assert tip.inner_text() == "C, Optimizer state: 6.25 GiB, 7.9% of the GPU's memory"
        page.locator(".bars .bar").first.focus()
        assert tip.inner_text().startswith("rank 6: 140 µs; ")
        page.keyboard.press("End")
        assert tip.inner_text().startswith("rank 7: 50.0 µs; ")


def test_a_tile_leads_to_its_row(browser: Browser, files: Callable[[str], Path]) -> None:
    """Following the link unfolds the table and shows the unit's row."""
    with opened(browser, files("few_experts")) as page:
        row = page.locator(page.locator(".map a").nth(1).get_attribute("href"))
        assert not row.is_visible()
        page.locator(".map a").nth(1).click()
        row.wait_for(state="visible")
        box = row.bounding_box()
        assert 0 <= box["y"] <= 800


def test_everything_is_there_without_javascript(
    browser: Browser, files: Callable[[str], Path]
) -> None:
    """Sections and map are drawn, and tables unfold; numbers need no script."""
    plan = examples.small()
    with opened(browser, files("small"), java_script_enabled=False) as page:
        for section in SECTIONS:
            assert page.locator(f"section#{section}").inner_text().strip()
        assert page.locator(".map a").count() == plan.units
        assert page.locator(".bars .bar i").first.bounding_box()["height"] > 100
        page.locator("#owners summary").click()
        assert plan.layers[1].units[3].name in page.locator("#owners table").nth(1).inner_text()
        page.locator("#balance summary").click()
        assert page.locator("#balance tbody tr").count() == len(plan.ranks)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["small", "too_large"])
def test_text_is_readable_in_light_and_dark(
    browser: Browser, files: Callable[[str], Path], name: str, scheme: str
) -> None:
    """Contrast of all text at least 4.5 (WCAG AA), and dark is dark."""
    with opened(browser, files(name), color_scheme=scheme) as page:
        page.locator("#balance summary").click()
        ratio, text = page.evaluate(CONTRAST)
        assert ratio >= 4.5, f"{ratio:.2f}: {text}"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_memory_parts_differ_without_colour(browser: Browser, files: Callable[[str], Path]) -> None:
    """Printed in grey, the eight parts still have their letter, and patterns of their own."""
    with opened(browser, files("too_large")) as page:
        looks = page.evaluate(
            """() => [...document.querySelectorAll(".swatch")].map((e) => {
              const s = getComputedStyle(e);
              return [e.textContent, s.backgroundImage + s.backgroundColor + s.backgroundSize];
            })"""
        )
        assert [letter for letter, _ in looks] == list("ABCDEFGH")
        assert len({look for _, look in looks}) == 8
