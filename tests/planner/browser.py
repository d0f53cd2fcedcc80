"""A headless Chromium, for what only a browser can tell about a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

# As Debian, Ubuntu, Fedora and Google name it.
NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
REMEDY = "scripts/install_browser.sh gets one"


class NoBrowser(Exception):
    """There is no browser here; the message says what is missing and how to get it."""


def find(playwright: Playwright) -> str:
    """Return a Chromium: playwright's own, else one on PATH. Raises NoBrowser."""
    own = Path(playwright.chromium.executable_path)
    shells = sorted(own.parents[2].glob("chromium_headless_shell-*/*/*headless*shell"))
    for path in (own, *shells):
        if path.is_file():
            return str(path)
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise NoBrowser(f"needs Chromium: {REMEDY}")


@contextmanager
def running() -> Iterator[Browser]:
    """Run a headless Chromium. Raises NoBrowser if it or playwright is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowser("needs playwright: scripts/setup_env.py --extra dev") from None
    with sync_playwright() as playwright:
        # The pages are this repository's own, and root, as in containers, has no sandbox.
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(
            executable_path=find(playwright), args=options, timeout=60_000
        )
        try:
            yield browser
        finally:
            browser.close()
