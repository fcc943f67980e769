"""``ringsim watch``: shows a run of this user, started in another terminal, while it runs."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb
from ringsim.errors import ArgumentError, escape
from ringsim.launch.ends import is_gone
from ringsim.launch.live import Follower, show_live
from ringsim.launch.progress import Progress
from ringsim.traces.parts import PartReader
from ringsim.traces.run_parts import read_run
from ringsim.traces.value import Trace

_POLL_S = 0.05


def add_parser(verbs: Verbs) -> None:
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
    for directory, parts in find_runs().items():
        command = parts[0].meta.get("argv", [])
        pids = [str(part.meta["pid"]) for part in parts]
        listed += escape(f"\n{directory}: {' '.join(command)}")
        if options.name in (str(directory), *pids, *(Path(word).name for word in command)):
            found.append((directory, parts))
    if options.name is None:
        print(f"Your runs:{listed or ' none'}")
    elif len(found) == 1:
        ((directory, parts),) = found
        trace = show_live(partial(_watch, directory, parts), parts[0].meta["world_size"])
        print(f"The run has ended.\n{trace.summary()}")
    else:
        raise ArgumentError(
            f"RUN must name exactly one of your runs, got {options.name!r}. Your runs:"
            f"{listed or ' none'}"
        )
    return 0


def find_runs() -> dict[Path, list[PartReader]]:
    """Returns the parts of the running runs of this user (on Linux), by their directory."""
    found = defaultdict[Path, list[PartReader]](list)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            process, file = link.parents[1], Path(os.readlink(link))
            is_parked = (process / "comm").read_text() == "ringsim-parked\n"
            if file.match("rank-*.events") and not is_parked:
                part = PartReader(file.parent, int(file.stem.removeprefix("rank-")))
                part.read_names()
                if str(part.meta.get("pid")) == process.name:  # otherwise, it only reads the part
                    found[file.parent].append(part)
    return found


def _watch(directory: Path, found: list[PartReader], follow: Follower) -> Trace:
    """Follows a run until its processes end, and returns the whole run.

    The run does not notice, and may remove its records as soon as it has ended. This process can
    still read them, because it keeps them open.
    """
    (_, most) = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files are open for each rank
    with ExitStack() as stack:
        links = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringsim-watch-")))
        progress = Progress(found[0].meta["world_size"], live=True)
        stack.callback(progress.close)
        parts = [PartReader(links, part.rank) for part in found]
        while True:
            for name in ("rank-*.events", "rank-*.names", "run.json"):
                for path in directory.glob(name):
                    link = links / path.name
                    with suppress(FileNotFoundError):  # the run has just removed it
                        if not link.is_symlink():
                            file = stack.enter_context(path.open("rb"))
                            link.symlink_to(f"/proc/self/fd/{file.fileno()}")
            if all(is_gone(part) or "end_ns" in part.meta for part in parts):
                return Trace(*read_run(links))
            progress.update(0, lambda: follow(links, ""))
            time.sleep(_POLL_S)
