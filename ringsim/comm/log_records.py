"""Where the log's operations are recorded: by the recorder that is at work, or by one of the log's own in a private directory."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ringsim.comm import torch_hooks
from ringsim.errors import RingError
from ringsim.state import get_state
from ringsim.traces.events import NONE, RECV, SEND, SPAN, Events, Group, Ints
from ringsim.traces.log_rows import is_operation
from ringsim.traces.parts import join_events, read_parts
from ringsim.traces.recorder import Recorder

__all__ = ["Connection", "Records", "Segment", "begin_records", "end_records", "join_segments", "read_segment"]

_ANY_WORLD: Final = 1 << 16  # a recorder of our own may begin before this rank knows how many there are
Connection = tuple[Group | None, int | str]  # a group, and the peer there; NONE for its collectives, a name for calls under timed_op


@dataclass(frozen=True)
class Records:
    """Where the log is recorded now.

    Attributes:
        recorder: who records.
        first: how many records it had when the log began, or was reset.
        directory: of a recorder of the log's own, None for one that was at work already.
        pid: the process that records; one that is forked from it leaves the directory alone.
    """

    recorder: Recorder
    first: int
    directory: str | None
    pid: int


@dataclass(frozen=True, eq=False)
class Segment:
    """What one recorder saw for the log.

    Attributes:
        events: the operations to log, of this rank.
        first: bool, as long: whether it is the first with that peer on that group.
        met: the connections that were seen.
        notes: what the recorder had to say, that it stopped for example.
    """

    events: Events
    first: Ints
    met: frozenset[Connection] = frozenset()
    notes: tuple[str, ...] = ()


def begin_records() -> Records:
    """Begins to record for the log: shares the recorder at work, or starts one in a private directory, which goes with the process.

    Raises:
        RingError: the rank is simulated, and nothing of it is recorded.
    """
    recorder, directory = get_state().recorder, None
    if recorder is None and get_state().clock is not None:
        raise RingError("the log of ringsim.comm must have records on a simulated rank, got record=False. Leave record=False out.")
    if recorder is None:
        directory = tempfile.mkdtemp(prefix="ringsim-log-")
        recorder = Recorder(directory, 0, _ANY_WORLD)
        weakref.finalize(recorder, _remove, directory, os.getpid())
    if directory is not None or recorder.users:  # another backend's recorder needs no hooks in torch
        torch_hooks.install(recorder)
    return Records(recorder, recorder.count, directory, os.getpid())


def end_records(records: Records) -> None:
    """Ends what ``begin_records`` began."""
    if records.recorder.users:
        torch_hooks.uninstall(records.recorder)
    if records.directory is not None:
        records.recorder.close()
        _remove(records.directory, records.pid)


def _remove(directory: str, pid: int) -> None:
    if pid == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)


def read_segment(records: Records, periods: tuple[tuple[int, int], ...], met: frozenset[Connection]) -> Segment:
    """Reads what was recorded for the log until now.

    Args:
        records: where.
        periods: when all operations were to be logged, from and to, as counts of records; at other times those with a label were. Counts,
            for a virtual clock may stand still.
        met: connections of earlier segments.

    Returns:
        The operations since the log began, or was reset.
    """
    recorder = records.recorder
    if get_state().clock is None:
        recorder.complete_times()
        everything, facts = read_parts(Path(recorder.directory), start_ns=0, world_size=recorder.world_size, only_rank=recorder.rank)
    else:
        simulated: Any = recorder  # a RankRecorder, which writes no parts
        everything, facts = simulated.read(), {"notes": ()}
    operations = everything.select(is_operation(everything))
    connections, first = _find_first(operations, met)
    chosen = operations.label != NONE
    for begin, end in periods:
        chosen |= (operations.seq >= begin) & (operations.seq < end)
    chosen &= operations.seq >= records.first
    notes = tuple(note for note in facts["notes"] if note.startswith("Recording of rank"))
    return Segment(operations.select(chosen), first[chosen], met | connections, notes)


def _find_first(events: Events, met: frozenset[Connection]) -> tuple[frozenset[Connection], Ints]:
    """Returns the connections that the events used, and marks the first operation on each that is not in ``met``."""
    kind = events.kind
    other = np.where((kind == SEND) | (kind == RECV), events.peer.astype(np.int64), NONE)
    other = np.where(kind == SPAN, -10 - events.label.astype(np.int64), other)  # numbers that no peer has
    pairs, places = np.unique(np.stack([events.group.astype(np.int64), other]), axis=1, return_index=True)
    first = np.zeros(len(events), dtype=bool)
    found = set()
    for group, number, place in zip(*pairs.tolist(), places.tolist(), strict=True):
        name = None if group == NONE else events.tables.groups[group]
        connection = name, (number if number > -10 else events.tables.labels[-10 - number])
        found.add(connection)
        first[place] = connection not in met
    return frozenset(found), first


def join_segments(segments: list[Segment]) -> Segment:
    """Puts the segments of one rank together, oldest first."""
    first = [np.zeros(0, dtype=bool), *(segment.first for segment in segments)]
    notes = tuple(dict.fromkeys(note for segment in segments for note in segment.notes))
    return Segment(join_events([segment.events for segment in segments]), np.concatenate(first), notes=notes)
