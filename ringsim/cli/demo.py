"""``ringsim demo``: a small transformer learns on four real ranks, and two pictures show how."""

from __future__ import annotations

import argparse
from pathlib import Path

import ringsim
from ringsim.cli.verb import Verbs, add_verb, write_pictures
from ringsim.errors import RingError
from ringsim.traces.value import count

CHECKED_STEPS, TOLERANCE = 3, 1e-3  # as many steps are done again in one process; by then rounding has not grown


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    help_text = "train a small transformer on Shakespeare's sonnets, cut into stages on real ranks; record it and draw it"
    parser = add_verb(verbs, "demo", help_text, "ringsim demo -n 4 -o demo", run)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks, one stage each (default: 4)")
    parser.add_argument("-o", "--out", type=Path, default=Path("demo"), metavar="DIR", help="where trace and pictures go (default: demo)")


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    import torch

    from ringsim import demo
    from ringsim.pipeline import compare_losses

    print(f"starting {count(options.ranks, 'rank')} (Gloo, joined in a ring), a stage of the transformer each ...", flush=True)
    trace = ringsim.trace(demo.worker, world_size=options.ranks)
    losses, lines = trace.results[0]
    torch.set_num_threads(1)  # as on the ranks
    expected = demo.expected_losses(CHECKED_STEPS)
    if compare_losses(losses[:CHECKED_STEPS], expected, tolerance=TOLERANCE).first_step is not None:
        raise RingError(
            f"the ring must learn what one process learns, losses {expected}, got {losses[:CHECKED_STEPS]}. Please report this."
        )
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}; the first {CHECKED_STEPS} steps lose as much in one process. It writes now:\n")
    print("\n".join(f"    {line}" for line in lines))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "run.ringtrace"
    trace.save(file)
    print(f"\n{trace.summary()}\n")
    for written in (file, *write_pictures(trace, options.out)):
        print(f"wrote {written}")
    print(f"\nlook again with: ringsim show {file}")
    return 0
