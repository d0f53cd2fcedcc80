#!/usr/bin/env python3
"""Picture the report of `dmuon plan` for the docs: docs/images/plan_report*.png.

Needs the extra `dev` and a Chromium (scripts/install_browser.sh). A tile of the
owner map has the focus, so that the box with its numbers shows.

    python scripts/plan_screenshot.py qwen32b_hsdp_z3.toml --nodes 16
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.planner.browser import NoBrowser, running  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PLAN_SECONDS = 300
# File, width of the screen, and what the picture begins and ends with: selectors, or None and a
# number of pixels for the page's upper part.
PICTURES = (
    ("plan_report.png", 1280, None, 2000),
    ("plan_report_loads.png", 1280, "#balance", "#traffic"),
    ("plan_report_phone.png", 360, None, 2600),
)


@dataclass
class Options:
    """Picture the report of a plan for the docs."""

    config: Annotated[str, tyro.conf.Positional] = "qwen32b_hsdp_z3.toml"
    """Job config: a path, or a file of train_configs/."""

    nodes: int = 16
    """Nodes of the plan."""

    output: Path = ROOT / "docs/images"
    """Folder of the pictures."""


def make_report(options: Options, path: Path) -> None:
    """Run `dmuon plan`; exit status 1 only says that the job does not fit."""
    command = [sys.executable, "-P", "-m", "torchtitan_dmuon.cli", "plan", options.config]
    command += ["--nodes", str(options.nodes), "--html", str(path)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=PLAN_SECONDS
    )
    if done.returncode not in (0, 1) or not path.exists():
        raise SystemExit(done.stderr.strip() or f"error: dmuon plan ended with {done.returncode}")


def take(
    browser: Browser, report: Path, path: Path, width: int, first: str | None, last: str | int
) -> None:
    """Write one picture of a part of the page; `first` and `last` as in `PICTURES`."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.as_uri(), wait_until="load")
    top, bottom = 0.0, last
    if first is not None:
        top = page.locator(first).bounding_box()["y"]
        box = page.locator(str(last)).bounding_box()
        bottom = box["y"] + box["height"] + 16
    elif page.locator(".map a").count() > 2:
        page.locator(".map a").nth(2).focus()
    clip = {"x": 0, "y": top, "width": width, "height": float(bottom) - top}
    page.screenshot(path=path, full_page=True, clip=clip)
    page.close()


def main() -> None:
    options = tyro.cli(Options)
    if not options.output.is_dir():
        raise SystemExit(f"error: --output: no such folder: {options.output}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "plan.html"
        make_report(options, report)
        try:
            with running() as browser:
                for name, *part in PICTURES:
                    take(browser, report, options.output / name, *part)
                    print(options.output / name)
        except NoBrowser as e:
            raise SystemExit(f"error: {e}") from None


if __name__ == "__main__":
    main()
