"""``ringsim demo``: four real ranks, one ring, two pictures."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import ringsim
from ringsim.cli.verb import Verbs, add_verb, write_pictures
from ringsim.errors import RingError
from ringsim.traces.summary import count


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "demo", "run a small pipeline on real ranks, record it and draw it", "ringsim demo -n 4 -o demo", run)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("-o", "--out", type=Path, default=Path("demo"), metavar="DIR", help="where trace and pictures go (default: demo)")


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    from ringsim import demo

    print(f"starting {count(options.ranks, 'rank')} (Gloo, joined in a ring) ...", flush=True)
    trace = ringsim.trace(demo.worker, world_size=options.ranks)
    expected = demo.expected(options.ranks)
    if not math.isclose(trace.results[0], expected, rel_tol=1e-3, abs_tol=1e-3):
        raise RingError(f"the ring must compute what one process computes, {expected}, got {trace.results[0]}. Please report this.")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "run.ringtrace"
    trace.save(file)
    print(trace.summary())
    print(f"\nresult {trace.results[0]:.4f}, as computed in one process: {expected:.4f}\n")
    for written in (file, *write_pictures(trace, options.out)):
        print(f"wrote {written}")
    print(f"\nlook again with: ringsim show {file}")
    return 0
