"""The logs of all ranks brought together at rank 0, and the table sent back to all.

It goes over the store of the default group, so no operation is posted on the groups whose operations are logged: a rank may have done
more than another, or hang, and the others' log is still to be had::

    rank r                      store                         rank 0
      |-- set its operations -->|-----------------------------> wait for each, some seconds
      |                         |<-- set the table -------------|  compute it
      |<-- get the table -------|
      |-- add 1 to "read" ----->|-----------------------------> wait: the store may live in this process
"""

from __future__ import annotations

import io
import json
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringsim.comm.backend import Backend
from ringsim.comm.fallbacks import find
from ringsim.comm.log_records import Segment
from ringsim.traces.events import COLUMN_DTYPES, Events, Ints, make_events, read_tables, write_tables
from ringsim.traces.log_rows import make_rows
from ringsim.traces.log_table import LogTable
from ringsim.traces.parts import join_events

__all__ = ["gather", "gather_by_objects", "make_own_table", "make_table"]

WAIT_S: Final = 30.0  # how long rank 0 waits for the logs of the others
_MARGIN_S: Final = 10.0  # the others wait so much longer, for rank 0 computes
_READERS_S: Final = 5.0  # how long rank 0 stays for the others to read the table
_COLUMNS: Final = [name for name in COLUMN_DTYPES if name not in ("thread", "stage", "microbatch", "file", "line", "seq")]


def gather(segment: Segment, rank: int, world_size: int, *, wait_s: float = WAIT_S) -> LogTable:
    """Makes the table of all ranks. Every rank calls it; it blocks until all have, ``wait_s`` and some seconds at most.

    Args:
        segment: this rank's operations.
        rank: this rank.
        world_size: how many ranks there are.
        wait_s: how long to wait for the others' logs.

    Returns:
        The table, the same on every rank. Where a rank did not come in time, a note says so.
    """
    default = distributed_c10d._get_default_store()
    entered = default.add(f"ringsim/log/entered/{rank}", 1)  # the n-th summary of this rank is the n-th of every rank
    store: Any = dist.PrefixStore(f"ringsim/log/{entered}", default)  # type: ignore[attr-defined]  # torch has it, and does not list it
    mine = _pack(segment, rank)
    if rank == 0:
        packed, late = _wait_for_all(store, mine, world_size, wait_s)
        table = make_table([_unpack(each) for each in packed], world_size)
        if late:
            table = replace(table, notes=(*table.notes, f"ranks {late} had not called log_summary {wait_s:g} s after rank 0"))
        store.set("table", table.to_json())
        deadline = time.monotonic() + _READERS_S
        while (read := store.add("read", 0)) < world_size - 1 - len(late) and time.monotonic() < deadline:
            time.sleep(0.001)
        if read == world_size - 1:
            store.delete_key("table")
            store.delete_key("read")
        return table
    store.set(str(rank), mine)
    try:
        store.wait(["table"], timedelta(seconds=wait_s + _MARGIN_S))
    except (RuntimeError, dist.DistStoreError):
        table = make_table([_unpack(mine)], world_size)
        return replace(
            table, notes=(*table.notes, f"rank 0 did not call log_summary in {wait_s:g} s: this is the log of rank {rank} alone")
        )
    table = LogTable.from_json(store.get("table"))
    store.add("read", 1)
    return table


def gather_by_objects(backend: Backend, segment: Segment, rank: int, world_size: int) -> LogTable:
    """Does the same on a backend that has no store, by ``all_gather_object``, or by its method ``share``: all compute the same table."""
    packed: list[Any] = [None] * world_size
    share = getattr(backend, "share", None)  # simulated ranks live in one process, and how many bytes this is depends on the machine
    if share is None:
        find(backend, "all_gather_object")(packed, _pack(segment, rank))
    else:
        packed = share(_pack(segment, rank))
    return make_table([_unpack(each) for each in packed], world_size)


def _wait_for_all(store: Any, mine: bytes, world_size: int, wait_s: float) -> tuple[list[bytes], list[int]]:
    """Returns what the ranks have put into the store, in order of ranks, and the ranks that have not in time."""
    packed, late = [mine], []
    deadline = time.monotonic() + wait_s
    for rank in range(1, world_size):
        try:
            store.wait([str(rank)], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except (RuntimeError, dist.DistStoreError):
            late.append(rank)
            continue
        packed.append(store.get(str(rank)))
        store.delete_key(str(rank))
    return packed, late


def make_table(logs: list[tuple[Events, Ints, dict[str, Any]]], world_size: int) -> LogTable:
    """Computes the table from the operations of some ranks.

    Args:
        logs: for each rank, in order: its operations, whether each is a first one, and ``rank``, ``host``, ``backend`` and ``notes``.
        world_size: how many ranks there are.
    """
    facts = [each for _, _, each in logs]
    one_clock = len({each["host"] for each in facts}) == 1
    rows = make_rows(
        join_events([events for events, _, _ in logs]),
        np.concatenate([first for _, first, _ in logs]),
        one_clock=one_clock,
        by_tag=facts[0]["backend"] != "nccl",
    )
    notes = list(dict.fromkeys(note for each in facts for note in each["notes"]))
    if not one_clock:
        notes.append("the ranks ran on several hosts, whose clocks are not aligned: no straggler time")
    return LogTable(rows, world_size, tuple(each["rank"] for each in facts), tuple(notes))


def _pack(segment: Segment, rank: int) -> bytes:
    """Returns a rank's operations as bytes: arrays of numbers and JSON, nothing that could be executed."""
    facts = {
        "rank": rank,
        "host": socket.gethostname(),
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "notes": segment.notes,
        "tables": write_tables(segment.events.tables._replace(files=())),
    }
    columns = {name: getattr(segment.events, name) for name in _COLUMNS}
    columns["rank"] = np.full(len(segment.events), rank)
    text = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **columns, first=segment.first, facts=text)
    return buffer.getvalue()


def _unpack(data: bytes) -> tuple[Events, Ints, dict[str, Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        facts = json.loads(arrays["facts"].tobytes())
        columns = {name: arrays[name] for name in _COLUMNS}
        return make_events(columns, read_tables(facts["tables"])), arrays["first"], facts


def make_own_table(segment: Segment, rank: int, world_size: int) -> LogTable:
    """Computes the table of this rank alone."""
    return make_table([_unpack(_pack(segment, rank))], world_size)
