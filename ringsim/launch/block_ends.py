"""How ranks left a recorded block: what each says of itself, and what the system says of one that says nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringsim.diagnose.failure import describe_end, report_exception
from ringsim.errors import RingError
from ringsim.launch.live_part import LivePart
from ringsim.launch.watcher import has_proc, look_at
from ringsim.traces.events import readable

__all__ = ["find_culprits", "find_ends", "gather_ends", "hold_back_sigterm", "tell_end"]


def tell_end(rank: int, error: BaseException | None) -> dict[str, Any]:
    """Says how this rank leaves its block, JSON-able.

    Args:
        rank: this rank.
        error: what ends the block, None where it ends by itself.

    Returns:
        "at_ns": when, on CLOCK_MONOTONIC; "raised": whether an exception ended it; "lost": whether that only says that a peer is gone;
        "end": how the rank ended, as a trace keeps it for ``explain``, None where something else than the rank itself is to blame.

    Example:
        >>> tell_end(1, ValueError("no such layer"))["end"]
        {'rank': 1, 'state': 'failed', 'about': 'raised ValueError: no such layer', 'error': 'ValueError'}
        >>> tell_end(1, None)["raised"]
        False
    """
    if error is None or isinstance(error, KeyboardInterrupt):
        return {"at_ns": time.monotonic_ns(), "raised": error is not None, "lost": False, "end": None}
    report = report_exception(rank, error)
    end = describe_end(report)
    return {
        "at_ns": time.monotonic_ns(),
        "raised": True,
        "lost": end is None and report.is_consequence and not isinstance(error, RingError),
        "end": readable(end),
    }


def find_ends(directory: Path, ranks: Sequence[int], world_size: int) -> list[dict[str, Any]]:
    """Finds out how some ranks left the block: by what each wrote of itself, or because its process on this machine is gone.

    Args:
        directory: of the parts.
        ranks: whom to look at.
        world_size: number of ranks.

    Returns:
        How they ended, as a trace keeps it for ``explain``; nothing of those that are still within the block, or on another machine.
    """
    ends = []
    for rank in ranks if has_proc() else ():
        part = LivePart(directory, rank, world_size)
        part.read_names()
        pid, ended = part.process
        process = look_at(pid) if pid is not None else None
        said = [end for end in part.meta.get("ends", ()) if end["rank"] == rank]
        if said:
            ends += said
        elif ended:  # by itself, or because it lost a peer: then it says whom
            ends += [] if "ends" in part.meta else [_left(rank)]
        elif pid is not None and (process is None or process.state in "ZX"):
            about = "died within the recorded block, by a signal or os._exit(): its process is gone"
            ends.append({"rank": rank, "state": "killed", "about": about, "error": ""})
    return ends


def find_culprits(directory: Path, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Returns how those ended of whom one may have been the peer that a rank lost; see ``find_ends``."""
    ends = find_ends(directory, [other for other in range(world_size) if other != rank], world_size)
    return [end for end in ends if end != _left(end["rank"])] or ends


def _left(rank: int) -> dict[str, Any]:
    return {"rank": rank, "state": "exited", "about": "has left the recorded block", "error": ""}


def gather_ends(said: Mapping[int, Mapping[str, Any]], others: Sequence[Mapping[str, Any]], start_ns: int) -> list[dict[str, Any]]:
    """Puts together how the ranks of a block ended.

    Who left it in peace stands there only where somebody lost a peer: else it may still do all that others wait for.

    Args:
        said: by rank, what ``tell_end`` told of it.
        others: how those ended, or what they do, that said nothing.
        start_ns: start of the trace, on CLOCK_MONOTONIC.

    Returns:
        The ends, by rank, for a trace's metadata.

    Example:
        >>> gather_ends({0: {"raised": True, "lost": True, "end": None}, 1: {"raised": False, "lost": False, "end": None}}, [], 0)
        [{'rank': 1, 'state': 'exited', 'about': 'has left the recorded block', 'error': ''}]
    """
    lost = any(words["lost"] for words in said.values())
    ends = [{**words["end"], "at_ns": words["at_ns"] - start_ns} for words in said.values() if words["end"] is not None]
    if lost:
        ends += [_left(rank) for rank, words in said.items() if not words["raised"]]
    by_rank = {int(end["rank"]): end for end in ends}
    # Who was at work a moment ago was killed because of the rest.
    for end in sorted(others, key=lambda end: bool(end["state"] == "killed")):
        if lost or end != _left(end["rank"]):
            by_rank.setdefault(int(end["rank"]), dict(end))
    return [by_rank[rank] for rank in sorted(by_rank)]


@contextmanager
def hold_back_sigterm() -> Iterator[threading.Event]:
    """Puts off a SIGTERM until the end of the block; what is yielded is set from the moment at which it came.

    A launcher such as torchrun sends it to the ranks that are left as soon as one has failed: while the trace is written that tells why.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:  # nobody here may set it, or could set it back
        yield came
        return
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
        if came.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
