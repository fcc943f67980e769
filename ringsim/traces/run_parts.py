"""Joins a run's parts with the metadata from the ranks and the process that started them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ringsim.errors import TraceFileError, name_ranks
from ringsim.traces.clocks import UNKNOWN, Clocks, align_run, count_from, find_clocks, reference_ns
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import (
    NO_EVENTS,
    NONE,
    RECORD,
    Events,
    Ints,
    Tables,
    concatenate,
    make_events,
    number_places,
    readable,
)
from ringsim.traces.parts import FILE_NAME, TABLE_OF, PartReader

_MAX_RANKS = 10**6  # file names have six digits, so a larger number is a sign of damage
# the entries about each rank that metadata["ranks"] keeps
_PER_RANK = ("pid", "host", "num_threads", "cost_ns_per_op")
_LIMITS = {"world_size": range(1, _MAX_RANKS + 1)} | dict.fromkeys(
    ("start_ns", "start_unix_ns", "end_ns"), range(2**63)
)


def read_run(directory: Path) -> tuple[Events, JsonObject]:
    """Reads a whole run: the ranks' parts and the file from the process that started the run.

    Args:
        directory: the directory that holds the parts; ``run.json`` may be missing.

    Returns:
        The events, and the metadata for a trace.

    Raises:
        TraceFileError: the directory or a file in it cannot be read.
    """
    said = _read_run_file(directory / "run.json")
    start_ns = _first([said], "start_ns")
    said.pop("start_ns", None)
    parts = Parts(directory, _first([said], "world_size"))
    events = parts.join(start_ns)
    pieces, metas = parts.describe(), parts.metas
    metadata = {
        "format": 1,
        "run_id": _first(metas.values(), "run_id") or "",
        "source": "measured",
        **said,
        **pieces,
    }
    if ends := told_ends(metas):
        metadata["ends"] = ends
    clocks, begun_ns = pieces.get("clocks", []), 0
    ended_ns = [
        reference_ns(clocks, rank, at_ns - parts.start_ns)
        for rank, meta in metas.items()
        for at_ns in _valid([meta], "end_ns")
    ]
    if clocks:
        given_ns = None if start_ns is None else start_ns - parts.start_ns
        events, metadata["clocks"], begun_ns = align_run(events, clocks, given_ns)
    if ended_ns:
        metadata["end_ns"] = max(max(ended_ns) - begun_ns, 0)
    for key in ("notes", "not_recorded"):
        metadata[key] = _sentences([said, pieces], key)
    metadata["complete"] = (
        all("end_ns" in meta for meta in metas.values())
        and pieces["complete"]
        and said.get("complete", True) is True
    )
    start_unix_ns = _first([said, pieces], "start_unix_ns")
    if start_unix_ns is not None:
        metadata["start_unix_ns"] = start_unix_ns
        if not isinstance(said.get("date"), str):
            date = datetime.fromtimestamp(start_unix_ns * 1e-9, tz=UTC).date()
            metadata["date"] = date.isoformat()
    return events, readable(metadata)


def _read_run_file(path: Path) -> JsonObject:
    """Returns the metadata that the starting process wrote, without malformed entries."""
    try:
        run = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        run = None  # the file is missing or damaged, but the parts contain most of the metadata
    said = run if isinstance(run, dict) else {}
    for key in ("machine", "versions"):
        if not isinstance(said.get(key), dict):
            said.pop(key, None)
    return said


def read_parts(
    directory: Path,
    *,
    start_ns: int | None = None,
    world_size: int | None = None,
    only_rank: int | None = None,
) -> tuple[Events, JsonObject]:
    """Reads the parts of all ranks, or of one rank.

    The ranks' tables are merged, threads are numbered from 0 within each rank, and times count from
    the start of the run. If a rank is still writing, its events so far are read.

    Args:
        directory: the directory that holds the parts.
        start_ns: the start of the run on CLOCK_MONOTONIC, or None for the earliest start of any
            rank. If an event is earlier, it becomes the start, so that no time is negative.
        world_size: the number of ranks in the run, or None for the number that the ranks recorded.
        only_rank: the only rank to read, or None to read all ranks.

    Returns:
        The events, by rank and then in posting order, and the metadata from the ranks. The metadata
        always contains ``world_size``, ``ranks``, ``not_recorded``, ``notes`` and ``complete``
        (whether every rank left a fully readable part and recorded to its end). If a rank recorded
        them, it also contains ``backend``, ``start_unix_ns``, ``not_checked`` (the operations that
        were not compared with their other side) and ``used_before`` (the names of groups on which
        some operations were not recorded).

    Raises:
        TraceFileError: the directory or a file in it cannot be read.
    """
    parts = Parts(directory, world_size, only_rank)
    return parts.join(start_ns), parts.describe()


class Parts:
    """The parts of all ranks, or of one rank; see ``read_parts``.

    Attributes:
        metas: the metadata of each rank.
        world_size: the number of ranks in the run.
        start_ns: the time from which times count, or 0 before ``join`` is called.
    """

    def __init__(
        self, directory: Path, world_size: int | None, only_rank: int | None = None
    ) -> None:
        self._directory = directory
        self.start_ns = 0
        self.metas: dict[int, JsonObject] = {}
        self._damaged: set[int] = set()
        with self._told():
            names = [FILE_NAME.fullmatch(entry.name) for entry in directory.iterdir()]
            found = {int(name[1]) for name in names if name}
            for rank in sorted(found if only_rank is None else found & {only_rank}):
                reader = PartReader(directory, rank, cells=False)
                reader.read_names()
                self.metas[rank] = reader.meta
        said = [*_valid(self.metas.values(), "world_size"), *(rank + 1 for rank in self.metas)]
        self.world_size = max(said, default=0) if world_size is None else world_size

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TraceFileError(
                f"cannot read the parts of a run in {self._directory}: "
                f"{error.strerror or error}. "
                "Check that the ranks began to record."
            ) from error

    def read(self) -> Iterator[Events]:
        """Yields the events rank by rank, in pieces of a few thousand.

        Each rank's times are those of its own clock.
        """
        for rank in self.metas:
            with self._told():
                reader = PartReader(self._directory, rank, self.world_size, cells=False)
                threads: dict[int, int] = {}
                count = 0
                for records in reader.read_pieces():
                    yield make_piece(rank, records, reader.names, count, threads)
                    count += len(records)
                if reader.is_damaged():
                    self._damaged.add(rank)
            self.metas[rank] = reader.meta

    def join(self, start_ns: int | None = None) -> Events:
        """Returns the events of all ranks.

        Times count from the start of the run, which by default is the earliest start of any rank.
        """
        events = join_events(list(self.read()))
        metas = self.metas.values()
        starts = _valid(metas, "start_ns") if start_ns is None else [start_ns]
        if len(events):
            starts.append(int(events.post_ns.min()))  # so that no time is negative
        self.start_ns = min(starts, default=0)
        return count_from(events, self.start_ns) if self.start_ns else events

    def describe(self) -> JsonObject:
        """Returns the metadata from the ranks."""
        ranks, metas = self.metas.items(), self.metas.values()
        missing = [rank for rank in range(self.world_size) if rank not in self.metas]
        stopped = [rank for rank, meta in ranks if meta.get("stopped_at_max")]
        hosts = set(_valid(metas, "host"))
        clocks = find_clocks(self.metas, self.start_ns)
        not_checked = _sentences(metas, "not_checked")
        if len(hosts) > 1:
            not_checked.append(
                f"The ranks ran on {len(hosts)} hosts. The two sides of operations between "
                "different hosts were not compared."
            )
        starts = [
            meta["start_unix_ns"] + self.start_ns - meta["start_ns"]
            for meta in metas
            if _valid([meta], "start_ns") and _valid([meta], "start_unix_ns")
        ]
        told = {
            "not_checked": not_checked,
            "used_before": _sentences(metas, "used_before"),
            "backend": _first(metas, "backend"),
            "start_unix_ns": next(iter(starts), None),
            "clocks": clocks,
        }
        return {
            "world_size": self.world_size,
            "ranks": [
                {"rank": rank, **{key: meta[key] for key in _PER_RANK if key in meta}}
                for rank, meta in ranks
            ],
            "not_recorded": _sentences(metas, "not_recorded"),
            "notes": self._note(missing, stopped, len(hosts), clocks),
            "complete": not (missing or stopped or self._damaged),
            **{key: value for key, value in told.items() if value not in ([], None)},
        }

    def _note(
        self, missing: list[int], stopped: list[int], hosts: int, clocks: Clocks
    ) -> list[str]:
        """Returns the ranks' notes along with notes about damaged or missing parts."""
        metas = self.metas.values()
        notes = _valid(metas, "note")
        silent = [rank for rank in stopped if "note" not in self.metas[rank]]
        for concerned, what in (
            (missing, "left no record"),
            (silent, "stopped recording after reaching the maximum number of records"),
            (sorted(self._damaged), "left unreadable records, which were skipped"),
        ):
            if concerned:
                notes.append(f"{name_ranks(concerned)} {what}")
        # relevant only if there are no entries in `clocks`: the ranks then share this clock
        one_clock = all(isinstance(meta.get("clock"), str) for meta in metas)
        unknown = any(entry["how"] == UNKNOWN for entry in clocks)
        if unknown or (hosts > 1 and not clocks and not one_clock):
            notes.append(
                f"the clocks of the {max(hosts, len(clocks))} hosts were not compared; compare "
                "times only within a host"
            )
        return notes


def make_piece(
    rank: int,
    records: Ints,
    names: Mapping[str, Mapping[int, Any]],
    first: int,
    threads: dict[int, int],
) -> Events:
    """Returns a rank's records as events with their own tables.

    ``first`` is the number of the first record. New threads are added to ``threads``.
    """
    columns = {name: records[name] for name in RECORD.names or ()} | {
        "rank": np.full(len(records), rank)
    }
    idents, places, numbers = np.unique(records["thread"], return_index=True, return_inverse=True)
    for place in np.argsort(places).tolist():
        threads.setdefault(int(idents[place]), len(threads))
    columns["thread"] = np.array([threads[ident] for ident in idents.tolist()], dtype=np.int32)[
        numbers
    ]
    columns["seq"] = np.arange(first, first + len(records))
    tables = {}
    for column, table in TABLE_OF.items():
        known = sorted(names[column])
        tables[table] = tuple(map(names[column].__getitem__, known))
        columns[column] = _close_gaps(records[column], known)
    return make_events(columns, Tables(**tables))


def _close_gaps(numbers: Ints, known: list[int]) -> Ints:
    """Converts a rank's numbers to indices into the known names, with -1 for each missing name."""
    place = np.searchsorted(known, numbers)
    there = np.array([*known, NONE])[place] == numbers
    return np.where(there & (numbers >= 0), place, NONE)


def _valid(metas: Iterable[JsonObject], key: str) -> list[Any]:
    """Returns the values of ``key`` that are valid: numbers within their limits, or strings."""
    values = [meta.get(key) for meta in metas]
    if key in _LIMITS:
        return [value for value in values if type(value) is int and value in _LIMITS[key]]
    return [value for value in values if isinstance(value, str)]


def _first(metas: Iterable[JsonObject], key: str) -> Any:
    """Returns the first valid value of ``key``, or None if there is none."""
    return next(iter(_valid(metas, key)), None)


def _sentences(metas: Iterable[JsonObject], key: str) -> list[str]:
    lists = [found for meta in metas if isinstance(found := meta.get(key), list)]
    sentences = (one for found in lists for one in found if isinstance(one, str))
    return list(dict.fromkeys(sentences))


def told_ends(metas: Mapping[int, JsonObject]) -> list[JsonObject]:
    """Returns each rank's end, as recorded by the rank itself or by other ranks.

    A rank that did not finish its part counts as running.
    """
    ends = {
        rank: {"rank": rank, "state": "running", "about": "was still running", "error": ""}
        for rank, meta in metas.items()
        if "end_ns" not in meta
    }
    told = [
        (rank, end)
        for rank, meta in metas.items()
        for key in ("deaths", "ends")
        if isinstance(found := meta.get(key), list)
        for end in found
        if isinstance(end, dict) and type(end.get("rank")) is int
    ]
    ends |= {end["rank"]: end for _, end in told}
    ends |= {rank: end for rank, end in told if end["rank"] == rank}  # a rank's own record wins
    return [ends[rank] for rank in sorted(ends)]


def join_events(parts: Sequence[Events]) -> Events:
    """Concatenates the events of several parts, merging equal names.

    Args:
        parts: the parts, each with its own tables. Parts of one rank must be in recording order.

    Returns:
        The events of all parts, with ``seq`` counted from 0 within each rank.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Group
        >>> one = make_events(
        ...     {"rank": [0], "op": [OP_CODES["send"]], "group": [0]},
        ...     Tables(groups=(Group("world", (0, 1)),)),
        ... )
        >>> joined = join_events([one, one])
        >>> joined.group.tolist(), joined.seq.tolist(), len(joined.tables.groups)
        ([0, 0], [0, 1], 1)
    """
    joined = concatenate([NO_EVENTS, *share_tables(parts)])
    return replace(joined, seq=number_places(joined.rank))


def share_tables(parts: Iterable[Events]) -> Iterator[Events]:
    """Yields the parts of a run; the parts share tables, which grow from one part to the next.

    Only the last part's tables contain all names.
    """
    merged: dict[str, dict[Any, int]] = {column: {} for column in TABLE_OF}
    for part in parts:
        columns = {}
        for column, table in TABLE_OF.items():
            numbers = [
                merged[column].setdefault(entry, len(merged[column]))
                for entry in getattr(part.tables, table)
            ]
            # -1 selects the last entry
            columns[column] = np.array([*numbers, NONE], dtype=np.int32)[getattr(part, column)]
        yield replace(
            part,
            **columns,
            tables=Tables(**{table: tuple(merged[column]) for column, table in TABLE_OF.items()}),
        )
