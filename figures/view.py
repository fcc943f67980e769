"""Draws ``figures/view.png`` and ``figures/view_pipeline.png``: screenshots of the interactive page.

    python figures/view.py

Needs Playwright and Chromium. A browser draws letters its own way: the bytes differ from one to the next, and no test compares them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import ringsim
from ringsim.pipeline import Costs

HERE = Path(__file__).resolve().parent
SETTLE_MS = 500


def main() -> None:
    """Opens the page of the recorded pipeline and points at a wait; and that of a simulated schedule, with its critical path."""
    schedule = ringsim.simulate_schedule("interleaved_1f1b", Costs(latency=0.1), num_ranks=4, num_microbatches=8, num_chunks=2)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, trace, shown, points_at in (
            ("view", ringsim.load(HERE / "data" / "pipeline.ringtrace"), "h=43200000", (600, 160)),
            ("view_pipeline", schedule.trace(), "show=bubbles,path&tab=steps&by=stage", None),
        ):
            page_file = Path(directory, f"{name}.html")
            trace.to_html(page_file)
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            page.goto(f"{page_file.as_uri()}#{shown}")
            while not page.evaluate("window.ringsim?.frame"):
                page.wait_for_timeout(SETTLE_MS)
            page.wait_for_timeout(SETTLE_MS)
            if points_at:
                page.mouse.move(*points_at)
                page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=HERE / f"{name}.png")
        explorer_file = Path(directory, "explorer.html")
        ringsim.explore.schedule().to_html(explorer_file)
        page.goto(explorer_file.as_uri())
        page.get_by_role("combobox", name="A", exact=True).select_option("1f1b")
        page.get_by_role("combobox", name="B", exact=True).select_option("zb_h1")
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=HERE / "explore.png")
        browser.close()


if __name__ == "__main__":
    main()
