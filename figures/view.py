"""Takes screenshots of the interactive page.

The screenshots are ``view``, ``view_pipeline``, ``view_runs``, ``view_ranks``, ``view_code`` and
``explore``. The script also records the animation ``playing``.

    python figures/view.py

The script needs Playwright and Chromium. Each browser draws fonts differently, so no test compares
the bytes.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright

import ringsim
from ringsim import comm as dist
from ringsim.pipeline import Costs

HERE = Path(__file__).resolve().parent
SETTLE_MS = 500
FRAMES, FRAME_MS = 48, 150
LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)


def exchange_halos(columns: int, rounds: int = 6) -> None:
    """Exchanges 64 KiB with the neighbours on a grid with ``columns`` columns, and computes.

    One rank computes for longer than the others.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    row, column = divmod(rank, columns)
    beside = [row * columns + near for near in (column - 1, column + 1) if 0 <= near < columns]
    neighbours = beside + [other for other in (rank - columns, rank + columns) if 0 <= other < size]
    edge = torch.zeros(16384)
    for _ in range(rounds):
        ringsim.compute(0.002 if rank == 27 else 0.001)
        handles = [dist.irecv(torch.empty_like(edge), other) for other in neighbours]
        handles += [dist.isend(edge, other) for other in neighbours]
        for handle in handles:
            handle.wait()


def exchange_with_neighbours() -> None:
    """Sends before it receives, on every rank, which is a deadlock."""
    ring = ringsim.current_ring()
    mine, received = torch.zeros(1024), torch.zeros(1024)
    ringsim.compute(0.001 * (1 + ring.rank))
    dist.send(mine, ring.succ, group=ring.succ_group)
    dist.recv(received, ring.pred, group=ring.pred_group)


def find_deadlock() -> ringsim.Trace:
    """Returns the trace of a simulated run in which all ranks wait for each other."""
    try:
        return ringsim.simulate(exchange_with_neighbours, world_size=4, link=LINK)
    except ringsim.errors.Deadlock as error:
        trace: ringsim.Trace = error.trace
        return trace


def write_film(page: Page, file: Path) -> None:
    """Plays a page frame by frame, and writes the animation."""
    page.set_viewport_size({"width": 800, "height": 450})
    page.mouse.move(0, 0)
    page.wait_for_timeout(SETTLE_MS)
    pictures = []
    for number in range(FRAMES):
        page.evaluate(
            (
                "(share) => { const v = window.ringsim; v.timeline.head = share "
                "* v.timeline.end; v.draw(); }"
            ),
            number / FRAMES,
        )
        page.wait_for_timeout(FRAME_MS)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        pictures.append(picture.quantize(24, dither=Image.Dither.NONE))
    pictures[0].save(
        file, save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0, optimize=True
    )


def main() -> None:
    """Takes all screenshots.

    They show the recorded pipeline with the pointer at a wait, one simulated schedule, two
    compared schedules, the code of a deadlock, and an explorer.
    """
    schedule = ringsim.simulate_schedule(
        "interleaved_1f1b", Costs(latency=0.1), num_ranks=4, num_microbatches=8, num_chunks=2
    )
    gpipe, one_f_one_b = (
        ringsim.simulate_schedule(name, Costs(latency=0.1), num_ranks=4, num_microbatches=8).trace()
        for name in ("gpipe", "1f1b")
    )
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, trace, shown, points_at, is_dark in (
            (
                "view",
                ringsim.load(HERE / "data" / "pipeline.ringtrace"),
                "h=43200000",
                (600, 160),
                False,
            ),
            (
                "view_pipeline",
                schedule.trace(),
                "hide=&tab=steps&by=stage",
                None,
                False,
            ),
            (
                "view_runs",
                ringsim.compare(gpipe, one_f_one_b),
                "tab=steps",
                None,
                True,
            ),
            (
                "view_ranks",
                ringsim.simulate(exchange_halos, world_size=64, args=(8,), link=LINK),
                "tab=statistics",
                (1050, 220),
                False,
            ),
            ("view_code", find_deadlock(), "tab=code", None, False),
        ):
            page_file = Path(directory, f"{name}.html")
            more = {"source": True} if name == "view_code" else {}
            trace.to_html(page_file, **more)
            page = browser.new_page(
                viewport={"width": 1280, "height": 720}, color_scheme="dark" if is_dark else "light"
            )
            page.add_init_script("try { localStorage.setItem('ringsim-hint', 'read'); } catch {}")
            page.goto(f"{page_file.as_uri()}#{shown}")
            while not page.evaluate("window.ringsim?.frame"):
                page.wait_for_timeout(SETTLE_MS)
            page.wait_for_timeout(SETTLE_MS)
            if points_at:
                page.mouse.move(*points_at)
                page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=HERE / f"{name}.png")
            if name == "view":
                write_film(page, HERE / "playing.gif")
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
