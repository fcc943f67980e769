"""``ringsim show``: what a trace file says."""

from __future__ import annotations

import argparse
from pathlib import Path

import ringsim
from ringsim.cli.verb import Verbs, add_verb, write_pictures


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(verbs, "show", "summarise a trace file, and draw it", "ringsim show demo/run.ringtrace -o pictures", run)
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace file (.ringtrace)")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="draw ring.png and timeline.png into this directory")


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code."""
    trace = ringsim.load(options.file)
    print(trace.summary())
    if options.out is not None:
        for written in write_pictures(trace, options.out):
            print(f"wrote {written}")
    return 0
