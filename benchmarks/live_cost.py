"""Measures what showing a run while it runs costs its ranks.

Two ranks send small messages to each other, and train two stages of a pipeline, with and without a
view. The view encodes each piece like the page, but no browser asks for it.

    python benchmarks/live_cost.py [--rounds 15] [--parts message step-2]

The goal is a ratio of at most 1.05. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from paired import against_itself, ratio_interval, where
from watcher_cost import PARTS

from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.live import Follower, LiveTrace
from ringsim.launch.run import RunOptions, run
from ringsim.view.html import pack_all

GOAL_RATIO = 1.05
MODES = ("off", "off again", "live")


class Encoder:
    """A viewer that encodes each piece, and counts the pieces."""

    def __init__(self) -> None:
        self.count, self.largest = 0, 0

    def show(self, trace: LiveTrace) -> None:
        """Encodes a piece."""
        (piece,) = pack_all([trace])
        self.count, self.largest = self.count + 1, max(self.largest, len(piece))


def measure(part: str, rounds: int) -> dict[str, list[float]]:
    """Runs the worker of a part in all modes alternately; returns rank 0's results by mode."""
    worker, size, count, title = PARTS[part]
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    viewer = Encoder()
    for turn in range(rounds + 1):
        for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
            live: dict[str, Any] = {}
            if mode == "live":
                live = {"doing": Follower(viewer, size), "live": True}
            kind = make_kind(size, "cpu", 60, ring=True)
            trace = run(pack_call(worker, (count,), {}, seed=0), kind, RunOptions(**live))
            if turn:  # the first round warms up
                found[mode].append(trace.results[0])
        print(f"{part}: round {turn} of {rounds}", file=sys.stderr, flush=True)
    print(f"{title}: {viewer.count} pieces of at most {viewer.largest:,} bytes")
    return found


def main() -> None:
    """Prints the medians, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds per part (default: 15)")
    parts = ["message", "step-2"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: both")
    options = parser.parse_args()
    print(where(), flush=True)
    for part in options.parts:
        times = measure(part, options.rounds)
        ratio, low, high = ratio_interval(times["live"], times["off"] + times["off again"])
        for mode in MODES:
            print(f"  {mode:10}{statistics.median(times[mode]):12.1f} us")
        print(f"  live / off: {ratio:.3f} ({low:.3f} .. {high:.3f})")
        pairs = zip(times["off"], times["off again"], strict=True)
        print(f"  {against_itself([value for pair in pairs for value in pair])}")
        said = "met" if ratio <= GOAL_RATIO else "missed"
        print(f"  the goal of a ratio of {GOAL_RATIO:g} was {said}", flush=True)


if __name__ == "__main__":
    main()
