"""The interactive page: its size, how long writing it takes, when its first picture is there, and how long a frame takes.

    python benchmarks/view_page.py [--events 10000 100000 1000000] [--ranks 64]

Needs Playwright and Chromium. The trace is made up: spans, sends and recvs round a ring, with times that jitter as measured ones do. A
frame is drawing the timeline anew while it is zoomed, in the page's own time; the median of 40.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from paired import where
from playwright.sync_api import Browser, sync_playwright

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


def make_trace(events: int, ranks: int) -> Trace:
    """Returns a trace of about so many events."""
    rounds = events // (3 * ranks)
    rng = np.random.default_rng(0)
    ops = np.array([OP_CODES["span"], OP_CODES["isend"], OP_CODES["irecv"]])
    columns: dict[str, Any] = {"rank": np.repeat(np.arange(ranks), 3 * rounds), "op": np.tile(ops, ranks * rounds)}
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
    columns |= {"peer": np.where(is_span, -1, peer), "tag": np.where(is_span, -1, 0), "group": np.where(is_span, -1, 0)}
    columns |= {
        "payload": np.where(is_span, -1, 0),
        "label": np.where(is_span, 0, -1),
        "file": np.zeros(len(post), int),
        "line": 7 + np.arange(len(post)) % 3,
    }
    tables = Tables((Group("world", tuple(range(ranks))),), (Payload("float32", (1024,), 4096),), ("compute",), ("train.py",))
    return Trace(make_events(columns, tables), {"world_size": ranks, "source": "measured"})


def measure(browser: Browser, page_file: Path) -> tuple[float, float, float]:
    """Returns the seconds to the first picture, and the median and the longest milliseconds of a frame."""
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    begin_s = time.perf_counter()
    page.goto(page_file.as_uri(), wait_until="commit")
    while not page.evaluate("window.ringsim?.frame"):
        time.sleep(0.005)
    first_s = time.perf_counter() - begin_s
    frames = page.evaluate(ZOOM)
    page.close()
    return first_s, statistics.median(frames), max(frames)


def main() -> None:
    """Measures pages of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="how many, one page each")
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    print(where())
    print("     events  ranks  bytes/event  written s  first picture s (5)  frame ms  longest ms")
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for events in options.events:
            trace, page_file = make_trace(events, options.ranks), Path(directory, f"{events}.html")
            begin_s = time.perf_counter()
            to_html(trace, page_file)
            written_s = time.perf_counter() - begin_s
            runs = [measure(browser, page_file) for _ in range(5)]
            first, frame, longest = (statistics.median(column) for column in zip(*runs, strict=True))
            size = page_file.stat().st_size / len(trace.events)
            print(f"{len(trace.events):>11,}{options.ranks:>7}{size:>13.1f}{written_s:>11.2f}{first:>21.2f}{frame:>10.1f}{longest:>12.1f}")
        browser.close()


if __name__ == "__main__":
    main()
