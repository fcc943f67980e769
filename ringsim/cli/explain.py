"""``ringsim explain``: why a run ended as it did, of a trace file or of a script that is run for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ringsim
from ringsim.cli.script import add_rank_options, run_script
from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import Interrupted, RingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringsim.traces.findings import Diagnosis
    from ringsim.traces.value import Trace


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "explain",
        "say why a run ended as it did, or what made it slow",
        "ringsim explain run.ringtrace\n  ringsim explain -n 4 -o waits.png train.py --steps 10",
        run,
    )
    add_rank_options(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="PNG", help="draw who waits for whom into this file")
    parser.add_argument("script", metavar="FILE|SCRIPT", help="a trace file, or a script (.py) to run; what follows are its own arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code: 1 where a script failed."""
    failed = False
    if Path(options.script).suffix == ".py":
        try:
            trace = run_script(options)
        except (RingError, Interrupted) as error:
            if error.trace is None:
                raise
            trace, failed = error.trace, True
    else:
        trace = ringsim.load(options.script)
    print(say(trace))
    if options.out is not None:
        draw(trace.explain(), options.out)
        print(f"wrote {options.out}")
    return 1 if failed else 0


def say(trace: Trace) -> str:
    """Returns the diagnosis of a trace as a terminal shows it: a blank line between findings."""
    diagnosis = trace.explain()
    return "\n\n".join(f"{finding.kind}: {finding}" for finding in diagnosis.findings) or str(diagnosis)


def draw(diagnosis: Diagnosis, path: Path) -> None:
    """Draws a diagnosis into a file.

    Raises:
        RingError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    figure = cast("Figure", diagnosis.plot().figure)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RingError(f"the picture must be writable to {path}, got {error}. Choose another file, such as waits.png.") from None
    finally:
        plt.close(figure)
