"""Measures what showing a run while it runs costs its ranks.

Two ranks send small messages to each other during one run, and the view is on and off alternately,
for two seconds each. The view encodes each piece like the page, but no browser asks for it. When
the view is on again, it also reads the records of the time before, so that the result is rather too
high than too low.

    python benchmarks/live_cost.py [--pairs 30]

Each pair of neighbouring windows gives three ratios of on to off: the time of a message, the CPU
time that the ranks use for it, and the same CPU time divided by the share of the cores that the
launcher leaves to other processes. The script prints medians with 95 % bootstrap intervals. On a
machine with other load, the first interval is wide. The last ratio is then the one to look at: it
is the ratio of the times if no core is idle.

The goal is a ratio of at most 1.05.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from paired import ratio_interval, where

from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.live import Follower, LiveTrace
from ringsim.launch.run import RunOptions, run
from ringsim.view.html import pack_all

GOAL_RATIO = 1.05
WINDOW_S = 2.0
WARM_UP_S = 4.0  # until the progress line is updated regularly
RANKS = 2


def ping_pong(seconds: float) -> list[tuple[float, float, int]]:
    """Sends 4 bytes back and forth.

    Returns a curve: points with the time, the process's CPU time, and the number of messages.
    """
    import torch
    import torch.distributed as dist

    message, rank, count = torch.zeros(1), dist.get_rank(), 0
    ends, curve = torch.zeros(1), []
    while not ends:
        for _ in range(20):
            for sender in (0, 1):
                if sender == rank:
                    dist.send(message, 1 - rank)
                else:
                    dist.recv(message, 1 - rank)
        count += 40
        curve.append((time.monotonic(), time.process_time(), count))
        if rank == 0:
            ends += float(curve[-1][0] - curve[0][0] > seconds)
        dist.broadcast(ends, 0)
    return curve


class Switch:
    """A view that is on in every second and third of four windows.

    Attributes:
        curve: points with the time and the launcher's CPU time.
        count, largest: the number of pieces, and the size of the largest in bytes.
    """

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []
        self.count, self.largest = 0, 0
        self._follow = Follower(self, RANKS)

    def __call__(self, directory: Path, words: str) -> str:
        """Shows the run if the view is on."""
        self._note()
        if is_on(time.monotonic()):
            self._follow(directory, words)
        self._note()
        return words

    def show(self, trace: LiveTrace) -> None:
        """Encodes a piece."""
        (piece,) = pack_all([trace])
        self.count, self.largest = self.count + 1, max(self.largest, len(piece))

    def _note(self) -> None:
        self.curve.append((time.monotonic(), time.process_time()))


def is_on(moment_s: float) -> bool:
    """Returns whether the view is on at a moment."""
    return int(moment_s / WINDOW_S) % 4 in (1, 2)


def measure(pairs: int) -> tuple[Switch, list[tuple[list[float], list[float]]]]:
    """Returns the switch, and for each kind of cost per message the values with and without."""
    switch = Switch()
    seconds = WARM_UP_S + (2 * pairs + 2) * WINDOW_S
    trace = run(
        pack_call(ping_pong, (seconds,), {}, seed=0),
        make_kind(RANKS, "cpu", 60, ring=True),
        RunOptions(doing=switch),
    )
    ranks = [np.array(curve).T for curve in trace.results]
    launcher = np.array(switch.curve).T
    first = np.ceil((ranks[0][0, 0] + WARM_UP_S) / WINDOW_S) * WINDOW_S
    edges = first + WINDOW_S * np.arange(2 * pairs + 1)

    def grow(curve: np.ndarray, row: int) -> np.ndarray:
        return np.diff(np.interp(edges, curve[0], curve[row]))

    messages = grow(ranks[0], 2)
    cpu = sum(grow(rank, 1) for rank in ranks)
    on = np.array([is_on(edge + WINDOW_S / 2) for edge in edges[:-1]])
    left = 1 - grow(launcher, 1) / WINDOW_S / (os.cpu_count() or 1)
    costs = [WINDOW_S / messages, cpu / messages, cpu / messages / left]
    return switch, [(cost[on].tolist(), cost[~on].tolist()) for cost in costs]


def main() -> None:
    """Prints the ratios, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30, help="pairs of windows (default: 30)")
    options = parser.parse_args()
    print(where(), flush=True)
    switch, costs = measure(options.pairs)
    print(f"{switch.count} pieces of at most {switch.largest:,} bytes")
    names = "time", "CPU time of the ranks", "time if no core is idle"
    for name, (on, off) in zip(names, costs, strict=True):
        # windows next to each other, so that changes of the other load matter little
        ratios = [one / other for one, other in zip(on, off, strict=True)]
        ratio, low, high = ratio_interval(ratios, [1.0])
        said = "met" if high <= GOAL_RATIO else "missed" if low > GOAL_RATIO else "undecided"
        print(
            f"  {name:25}{np.median(off) * 1e6:8.1f} us, on / off: {ratio:.3f} "
            f"({low:.3f} .. {high:.3f}), goal of {GOAL_RATIO:g}: {said}"
        )


if __name__ == "__main__":
    main()
