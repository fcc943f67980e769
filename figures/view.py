"""Draws ``figures/view.png``, a screenshot of the interactive page, with Playwright and the Chromium that is installed.

    python figures/view.py

A browser draws letters its own way: the bytes differ from one to the next, and no test compares them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import ringsim

HERE = Path(__file__).resolve().parent
SETTLE_MS = 500


def main() -> None:
    """Opens the page of the recorded pipeline and points at a wait."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        page_file = Path(directory, "run.html")
        ringsim.load(HERE / "data" / "pipeline.ringtrace").to_html(page_file)
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(page_file.as_uri() + "#h=43200000")
        page.wait_for_timeout(SETTLE_MS)
        page.mouse.move(600, 130)
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=HERE / "view.png")
        browser.close()


if __name__ == "__main__":
    main()
