"""Collects how each rank ended in a recorded block, in the form that a trace stores.

Each rank announces its end, if it can. The ends of other ranks follow from their records, or from
the end of their process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringsim.diagnose.failure import describe_end, report_exception
from ringsim.errors import RingError
from ringsim.launch.protocol import Ends
from ringsim.launch.system import has_proc, look_at_living
from ringsim.traces.events import readable
from ringsim.traces.findings import LEFT_BLOCK
from ringsim.traces.parts import PartReader
from ringsim.traces.run_parts import told_ends


def tell_end(rank: int, error: BaseException | None) -> dict[str, Any]:
    """Describes how this rank leaves its block, as plain data for JSON.

    Returns:
        A dictionary: "at_ns" is the time, on CLOCK_MONOTONIC; "raised" is whether an exception
        ended the block; "woken" is whether a watcher raised the exception; "lost" is whether the
        exception only reports a lost peer; "end" is the rank's end, as a trace stores it for
        ``explain``, or None if the rank did not fail.

    Example:
        >>> end = tell_end(1, ValueError("no such layer"))["end"]
        >>> end["state"], end["about"]
        ('failed', 'raised ValueError: no such layer')
    """
    left = {"raised": error is not None, "woken": False, "lost": False, "end": None}
    if error is not None and not isinstance(error, KeyboardInterrupt):
        report = report_exception(rank, error)
        left["woken"] = isinstance(error, RingError) and error.imposed
        left["lost"] = report.is_consequence and not isinstance(error, RingError)
        left["end"] = readable(describe_end(report), lines=True)
    return {**left, "at_ns": time.monotonic_ns()}


def find_ends(directory: Path, ranks: Sequence[int]) -> Ends:
    """Finds how some ranks ended, from their records or because their processes are gone.

    Returns:
        The ends, as a trace stores them for ``explain``, except for ranks that are still in the
        block or on another machine.
    """
    ends = []
    for rank in ranks if has_proc() else ():
        part = PartReader(directory, rank)
        gone = is_gone(part)
        part.read_names()  # its last records
        said = [end for end in part.meta.get("ends", ()) if end["rank"] == rank]
        if said:
            ends += said
        elif "end_ns" in part.meta:  # by itself, or because it lost a peer, which it then names
            ends += [] if "ends" in part.meta else [_left(rank)]
        elif gone:
            about = (
                "died inside the recorded block, from a signal or os._exit(): its process is gone"
            )
            ends.append({"rank": rank, "state": "killed", "about": about, "error": ""})
    return ends


def is_gone(part: PartReader) -> bool:
    """Returns whether the process that wrote a part has ended, or False if it ran elsewhere."""
    part.read_names()
    pid = part.meta.get("pid")
    if pid is None or part.meta.get("host") != socket.gethostname() or not has_proc():
        return False
    return look_at_living(pid) is None


def find_told(directory: Path, ranks: Sequence[int], world_size: int) -> Ends:
    """Returns some ranks' ends, as recorded by other ranks.

    Only ranks on the same machine may know a rank's end.
    """
    metas = {}
    for rank in range(world_size):
        part = PartReader(directory, rank)
        part.read_names()
        metas[rank] = part.meta
    return [
        end for end in told_ends(metas) if end["rank"] in ranks and end.get("state") != "running"
    ]


def find_culprits(directory: Path, rank: int, world_size: int) -> Ends:
    """Returns the ends of ranks that may be the peer that a rank lost; see ``find_ends``."""
    ends = find_ends(directory, [other for other in range(world_size) if other != rank])
    return [end for end in ends if not _has_left(end)] or ends


def _left(rank: int) -> dict[str, Any]:
    about = "has left the recorded block"
    return {"rank": rank, "state": "exited", "about": about, "error": "", "how": LEFT_BLOCK}


def _has_left(end: Mapping[str, Any]) -> bool:
    return end.get("how") == LEFT_BLOCK


def gather_ends(
    said: Mapping[int, Mapping[str, Any]], others: Sequence[Mapping[str, Any]], start_ns: int
) -> Ends:
    """Combines the announced ends (``tell_end``) with the ends of the other ranks.

    The ends are sorted by rank, for a trace's metadata. A rank that left without an error is listed
    only if another rank lost a peer: otherwise, the rank may still do its part.

    Example:
        >>> (end,) = gather_ends(
        ...     {
        ...         0: {"raised": True, "lost": True, "end": None},
        ...         1: {"raised": False, "lost": False, "end": None},
        ...     },
        ...     [],
        ...     0,
        ... )
        >>> end["rank"], end["state"], end["about"]
        (1, 'exited', 'has left the recorded block')
    """
    lost = any(words["lost"] for words in said.values())
    ends = [
        {**words["end"], "at_ns": words["at_ns"] - start_ns}
        for words in said.values()
        if words["end"] is not None
    ]
    if lost:
        ends += [_left(rank) for rank, words in said.items() if not words["raised"]]
    by_rank = {int(end["rank"]): end for end in ends}
    # A rank that was running a moment ago was killed because of the others.
    for end in sorted(others, key=lambda end: bool(end["state"] == "killed")):
        if lost or not _has_left(end):
            by_rank.setdefault(int(end["rank"]), dict(end))
    return [by_rank[rank] for rank in sorted(by_rank)]
