"""``ringsim watch``: shows a run of this user, started in another terminal, while it runs."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Final

from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import ArgumentError, escape
from ringsim.launch.live import Follower, open_viewer
from ringsim.launch.progress import Progress
from ringsim.traces.parts import PartReader

_POLL_S: Final = 0.05


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "watch",
        "show one of your runs while it runs, which was started in another terminal",
        "ringsim watch train.py",
        run_watch,
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="script, directory or process id of a rank (default: list your runs)",
    )


def run_watch(options: argparse.Namespace) -> int:
    """Lists the runs, or shows one until it ends; returns the exit code."""
    found, listed = [], ""
    for directory, pids in find_runs().items():
        command = _read_names(directory).meta["argv"]
        listed += escape(f"\n{directory}: {' '.join(command)}")
        if options.name in (str(directory), *pids, *(Path(word).name for word in command)):
            found.append(directory)
    if options.name is None:
        print(f"Your runs:{listed or ' none'}")
    elif len(found) == 1:
        watch(found[0])
    else:
        raise ArgumentError(
            f"RUN must name exactly one of your runs, got {options.name!r}. Your runs:"
            f"{listed or ' none'}"
        )
    return 0


def find_runs() -> dict[Path, set[str]]:
    """Returns the running runs of this user (on Linux), with the process ids of their ranks.

    The keys are the directories of their records.
    """
    found = defaultdict[Path, set[str]](set)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            process, file = link.parents[1], Path(os.readlink(link))
            is_parked = (process / "comm").read_text() == "ringsim-parked\n"
            if file.match("rank-*.events") and not is_parked:
                found[file.parent].add(process.name)
    return found


def _read_names(directory: Path) -> PartReader:
    """Returns a reader of rank 0's part that has read its metadata."""
    part = PartReader(directory, 0)
    part.read_names()
    return part


def watch(directory: Path) -> None:
    """Shows a run until it ends; the run does not notice."""
    part = _read_names(directory)
    size = part.meta["world_size"]
    viewer, progress = open_viewer(size), Progress(size, live=True)
    follow = Follower(viewer, size)
    with closing(progress), closing(viewer) if viewer else nullcontext():
        while part.is_live():
            progress.update(0, lambda: follow(directory, ""))
            time.sleep(_POLL_S)
    print("The run has ended.")
