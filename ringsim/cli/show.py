"""``ringsim show``: what a trace file says, in words, in pictures and in the files of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import ringsim
from ringsim.cli.verb import Verbs, add_verb, write_pictures
from ringsim.errors import ArgumentError

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# The method of Trace, by the ending of the path; .chakra and .otf2 are directories.
EXPORTS: Final = {
    ".pftrace": "to_perfetto", ".json": "to_chrome", ".goal": "to_goal", ".chakra": "to_chakra", ".otf2": "to_otf2",
}  # fmt: skip


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "show", "summarise a trace file, and draw it", "ringsim show demo/run.ringtrace -o pictures", run)
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace file (.ringtrace)")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="draw ring.png and timeline.png into this directory")
    parser.add_argument(
        "--export",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help=f"write it for another tool, which the ending says: {', '.join(EXPORTS)}",
    )


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    trace = ringsim.load(options.file)
    print(trace.summary())
    if options.out is not None:
        for written in write_pictures(trace, options.out):
            print(f"wrote {written}")
    for path in options.export:
        export(trace, path)
        print(f"wrote {path}")
    return 0


def export(trace: Trace, path: Path) -> None:
    """Writes a trace for the tool that the ending of the path names.

    Raises:
        ArgumentError: it names none.
        TraceFileError: the file cannot be written.
    """
    if path.suffix not in EXPORTS:
        raise ArgumentError(f"The ending of --export must be one of {', '.join(EXPORTS)}, got {path.suffix!r} ({path}). Choose one.")
    getattr(trace, EXPORTS[path.suffix])(path)
