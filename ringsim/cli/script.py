"""``ringsim trace``: an unmodified script of ``torch.distributed`` on N ranks, recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import ArgumentError, Interrupted, RingError


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "trace",
        "run a torch.distributed script on N ranks, as torchrun would, and record it",
        "ringsim trace -n 4 -o run.ringtrace train.py --steps 10",
        run,
    )
    parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("-o", "--out", type=Path, default=None, metavar="FILE", help="trace file to write (default: SCRIPT.ringtrace)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="what the ranks compute on (default: cpu)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end the run after this long")
    parser.add_argument("script", metavar="SCRIPT", help="the script; what follows are its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    from ringsim.launch.api import make_kind
    from ringsim.launch.job import pack_script
    from ringsim.launch.run import RunOptions
    from ringsim.launch.run import run as run_job

    script = Path(options.script)
    if not script.is_file():
        raise ArgumentError(f"SCRIPT must be a Python file, got {options.script!r}, which is not there.")
    out: Path = options.out or Path(script.stem + ".ringtrace")
    parts = out.with_name(out.name + ".parts")
    if parts.exists():
        raise ArgumentError(
            f"{parts} must not exist before the run: an earlier run left it. Look at it with: ringsim show {out}. Then remove it."
        )
    kind = make_kind(options.ranks, options.device, 1800, ring=False)  # torch's own limit: the script sets what it wants
    job = pack_script(str(script), options.arguments, seed=0)
    try:
        trace = run_job(job, kind, RunOptions(limit_s=options.limit, keep_at=parts))
    except (RingError, Interrupted) as error:
        if error.trace is not None:
            error.trace.save(out)
            print(f"what was recorded until then: {out}")
        raise
    trace.save(out)
    print(trace.summary())
    print(f"wrote {out}")
    return 0
