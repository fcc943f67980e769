"""``ringsim watch``: shows a run of this user, started in another terminal, while it runs."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import ArgumentError, escape
from ringsim.launch.live import Follower, open_viewer
from ringsim.launch.progress import Progress
from ringsim.launch.system import look_at_living
from ringsim.traces.parts import PartReader

_POLL_S = 0.05


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
    for directory, ranks in find_runs().items():
        (meta, *_) = ranks.values()
        command = meta.get("argv", [])
        listed += escape(f"\n{directory}: {' '.join(command)}")
        if options.name in (str(directory), *ranks, *(Path(word).name for word in command)):
            found.append((directory, ranks.keys(), meta["world_size"]))
    if options.name is None:
        print(f"Your runs:{listed or ' none'}")
    elif len(found) == 1:
        watch(*found[0])
    else:
        raise ArgumentError(
            f"RUN must name exactly one of your runs, got {options.name!r}. Your runs:"
            f"{listed or ' none'}"
        )
    return 0


def find_runs() -> dict[Path, dict[str, dict[str, Any]]]:
    """Returns the running runs of this user (on Linux), by the directory of their records.

    The values are the metadata of the ranks on this machine, by process id.
    """
    found = defaultdict[Path, dict[str, Any]](dict)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            process, file = link.parents[1], Path(os.readlink(link))
            is_parked = (process / "comm").read_text() == "ringsim-parked\n"
            if file.match("rank-*.events") and not is_parked:
                part = PartReader(file.parent, int(file.stem.removeprefix("rank-")))
                part.read_names()
                found[file.parent][process.name] = part.meta
    return found


def watch(directory: Path, pids: Collection[str], world_size: int) -> None:
    """Shows a run until its processes end; the run does not notice."""
    viewer, progress = open_viewer(world_size), Progress(world_size, live=True)
    follow = Follower(viewer, world_size)
    with closing(progress), closing(viewer) if viewer else nullcontext():
        while any(look_at_living(int(pid)) for pid in pids):
            progress.update(0, lambda: follow(directory, ""))
            time.sleep(_POLL_S)
    print("The run has ended.")
