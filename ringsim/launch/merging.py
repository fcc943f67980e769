"""Ends a recorded block on rank 0: collects how the ranks ended, and writes the trace file."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringsim.diagnose.failure import read_verdict
from ringsim.errors import RingError
from ringsim.launch.block import BlockStore, lasts, never
from ringsim.launch.ends import find_ends, find_told, gather_ends, is_gone
from ringsim.traces.clocks import count_from, find_start, reference_ns
from ringsim.traces.events import NONE, Events
from ringsim.traces.files import save_pieces
from ringsim.traces.parts import PartReader
from ringsim.traces.run_parts import Parts, share_tables

WAIT_S = 30.0  # the time that rank 0 waits for the ends of the other ranks' blocks
# the same after rank 0's own block ended with an exception: other blocks may never end
WAIT_AFTER_ERROR_S = 2.0
LOOK_S = 0.1  # between two checks for ranks that are gone, or for the end of the time


def collect_announcements(
    keys: BlockStore,
    directory: Path,
    path: Path,
    world_size: int,
    *,
    failed: bool,
    hurry: threading.Event,
) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Returns the announcements by rank, and the ranks that are dead or late.

    Args:
        keys: the keys of the block.
        directory: the directory of the parts.
        path: the path of the file, which must be the same on all ranks.
        world_size: the number of ranks.
        failed: whether rank 0's own block ended with an exception.
        hurry: an event that is set when no time is left.
    """
    said: dict[int, dict[str, Any]] = {}
    late = []
    deadline = time.monotonic() + (WAIT_AFTER_ERROR_S if failed else WAIT_S)
    for rank in range(world_size):
        words = keys.read(f"left/{rank}", never)
        while words is None and time.monotonic() < deadline and not hurry.is_set():
            # a living rank that has recorded its end is about to announce it
            over = failed and is_gone(PartReader(directory, rank))
            words = keys.read(f"left/{rank}", lasts(LOOK_S))
            if over:
                break
        if words is None:
            late.append(rank)
            continue
        said[rank] = words
        if words["path"] != str(path):
            raise RingError(
                f"the path of a recording must be the same on every rank, got {path} "
                f"(rank 0) and {words['path']} "
                f"(rank {rank} of {world_size}). Use an absolute path."
            )
    return said, late


@dataclass(frozen=True)
class Merge:
    """The merge of all parts into one file, on rank 0.

    Attributes:
        directory: the directory of the parts.
        path: the path of the file.
        world_size: the number of ranks.
        start_ns: the time when rank 0 entered the block, on CLOCK_MONOTONIC.
        origin: the metadata about the run's origin.
        said: the announcement of each rank that has left.
        late: the ranks that announced nothing.
        others: the activities of ranks that had not left.
        missing: notes on the missing parts.
        notes: further notes.
        watched: whether ranks were watched.
    """

    directory: Path
    path: Path
    world_size: int
    start_ns: int
    origin: Mapping[str, Any]
    said: Mapping[int, Mapping[str, Any]]
    late: Sequence[int]
    others: Sequence[Mapping[str, Any]] = ()
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()
    watched: bool = True

    def write(self) -> tuple[bool, int]:
        """Writes the file; returns whether the parts are complete, and the number of events."""
        parts = Parts(self.directory, self.world_size)
        firsts: dict[int, int] = {}
        for events in self._read_inside(parts):
            if len(events):
                rank, post_ns = int(events.rank[0]), int(events.post_ns.min())
                firsts[rank] = min(post_ns, firsts.get(rank, post_ns))
        facts = parts.describe()
        clocks = facts.pop("clocks", [])
        # another rank may have begun earlier
        base_ns, moved, start_ns = find_start(firsts, clocks, self.start_ns)
        left = {
            rank: {**words["left"], "at_ns": reference_ns(clocks, rank, words["left"]["at_ns"])}
            for rank, words in self.said.items()
        }
        raised_ns = [end["at_ns"] for end in left.values() if end["raised"]]
        notes = [*facts["notes"], *self.missing, *self.notes]
        if self.late:
            notes.append(
                f"ranks {[*self.late]} had not left the recorded block when rank 0 wrote the file. "
                "The file contains their operations up to then."
            )
        whole = bool(facts["complete"]) and not self.late and not self.missing
        metadata = {
            **facts,
            **self.origin,
            "notes": notes,
            "complete": whole and not raised_ns,
            **({"clocks": moved} if moved else {}),
            **self._list_ends(left, start_ns),
        }
        if self.late or raised_ns:  # ranks that still wait have waited until then
            end_ns = time.monotonic_ns() if self.late else max(raised_ns)
            metadata["end_ns"] = end_ns - start_ns
        inside = (count_from(events, base_ns) for events in share_tables(self._read_inside(parts)))
        return whole, save_pieces(inside, metadata, self.path)

    def _list_ends(self, left: Mapping[int, Mapping[str, Any]], start_ns: int) -> dict[str, Any]:
        """Returns the metadata about how the ranks ended."""
        others = [
            *find_ends(self.directory, self.late),
            *find_told(self.directory, self.late, self.world_size),
            *(end for end in self.others if end["rank"] in self.late),
        ]
        ends, metadata = gather_ends(left, others, start_ns), dict[str, Any]()
        on_their_own = any(end["raised"] and not end["woken"] for end in left.values())
        woken = read_verdict(self.directory) if self.watched and not on_their_own else None
        if woken is not None:  # their later activity does not explain the wait
            metadata["given_up_ns"] = woken.at_ns - start_ns
            stood = {end["rank"]: end for end in woken.ends}
            ends = [*stood.values(), *(end for end in ends if end["rank"] not in stood)]
        if ends:
            metadata["ends"] = ends
        return metadata

    def _read_inside(self, parts: Parts) -> Iterator[Events]:
        """Yields the events posted within the block, in batches that fit into memory.

        For ranks that announced nothing, it yields all events.
        """
        for events in parts.read():
            rank = int(events.rank[0]) if len(events) else NONE
            first, last = self.said[rank]["span"] if rank in self.said else (0, math.inf)
            inside = (events.seq >= first) & (events.seq < last)
            within = events if inside.all() else events.select(inside)
            yield replace(within, seq=within.seq - first)
