"""``ringsim trace``: an unmodified script of ``torch.distributed`` on N ranks, recorded."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import ArgumentError, Interrupted, RingError
from ringsim.launch.config import CHECKS

if TYPE_CHECKING:
    from ringsim.traces.value import Trace


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "trace",
        "run a torch.distributed script on N ranks, as torchrun would, and record it",
        "ringsim trace -n 4 -o run.ringtrace train.py --steps 10",
        run,
    )
    add_rank_options(parser)
    parser.add_argument("-o", "--out", type=Path, default=None, metavar="FILE", help="trace file to write (default: SCRIPT.ringtrace)")
    parser.add_argument("script", metavar="SCRIPT", help="the script; what follows are its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the ranks that a script runs on."""
    parser.add_argument("-n", "--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="what the ranks compute on (default: cpu)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end the run after this long")
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="basic",
        help="which mistakes raise an error; full: also buffers used too early and handles never waited for (default: basic)",
    )


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    out: Path = options.out or Path(Path(options.script).stem + ".ringtrace")
    try:
        trace = run_script(options, keep_at=out.with_name(out.name + ".parts"))
    except (RingError, Interrupted) as error:
        if error.trace is not None:
            error.trace.save(out)
            print(f"what was recorded until then: {out}")
        raise
    trace.save(out)
    print(trace.summary())
    print(f"wrote {out}")
    return 0


def run_script(options: argparse.Namespace, *, keep_at: Path | None = None) -> Trace:
    """Runs ``options.script`` with ``options.arguments`` on the ranks that ``add_rank_options`` describes.

    Args:
        options: the parsed command line.
        keep_at: where the ranks' records go, None for a directory that is removed.

    Raises:
        ArgumentError: there is no such script, or what an earlier run left is in the way.
        RingError: the run failed; ``error.trace`` is what was recorded until then.
    """
    from ringsim.launch.api import make_kind
    from ringsim.launch.job import pack_script
    from ringsim.launch.run import RunOptions
    from ringsim.launch.run import run as run_job

    script = Path(options.script)
    if not script.is_file():
        raise ArgumentError(f"SCRIPT must be a Python file, got {options.script!r}, which is not there.")
    if keep_at is not None and keep_at.exists():
        file = keep_at.with_suffix("")
        raise ArgumentError(
            f"{keep_at} must not exist before the run: an earlier run left it. Look at it with: ringsim show {file}. Then remove it."
        )
    kind = make_kind(options.ranks, options.device, 1800, ring=False)  # torch's own limit: the script sets what it wants
    job = replace(pack_script(str(script), options.arguments, seed=0), check=options.check)
    return run_job(job, kind, RunOptions(limit_s=options.limit, keep_at=keep_at))
