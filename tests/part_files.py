"""Parts of ranks written by hand, with records, names and facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from trace_file import NONE, OPS

# 72 bytes, little-endian; the status comes last because it makes a slot valid
RECORD: Final = np.dtype(
    [(name, "<i8") for name in ("post_ns", "wait_ns", "done_ns")]
    + [("thread", "<u8")]
    + [(name, "<i4") for name in ("group", "payload", "label", "file", "line")]
    + [(name, "<i4") for name in ("peer", "tag", "stage", "microbatch")]
    + [("op", "<u2"), ("status", "<u2")]
)
BILLION: Final = 1_000_000_000


def write(
    directory: Path,
    rank: int,
    records: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    *,
    room: int = 0,
) -> None:
    """Writes a rank's part, with ``room`` empty slots after its records."""
    rows = np.zeros(len(records) + room, dtype=RECORD)
    for slot, record in enumerate(records):
        known = dict.fromkeys(RECORD.names or (), NONE) | {"thread": 0, "status": 2} | record
        known["op"] = OPS.index(record["op"])
        for name, number in known.items():
            rows[name][slot] = number
    (directory / f"rank-{rank}.events").write_bytes(rows.tobytes())
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / f"rank-{rank}.names").write_text(text)


def meta(**facts: Any) -> list[dict[str, Any]]:
    return [{"table": "meta", "key": key, "value": fact} for key, fact in facts.items()]


def two_ranks(directory: Path) -> None:
    """Rank 0 sends 8 bytes to rank 1.

    Rank 1 numbers its names in another order and uses two threads.
    """
    label = {"table": "label", "id": 0, "name": "compute"}
    payload = {"table": "payload", "id": 0, "dtype": "float32", "shape": [2], "size_bytes": 8}
    file = {"table": "file", "id": 0, "name": "/home/student/ring.py"}
    world, own = ({"table": "group", "name": name, "ranks": [0, 1]} for name in ("world", "ring"))
    about = {"world_size": 2, "backend": "gloo", "host": "a", "num_threads": 1}
    about["not_recorded"] = ["C++"]
    shared = {"payload": 0, "tag": 7, "file": 0, "line": 12, "thread": 140_000_000_000_001}
    sent = {"op": "isend", "group": 0, "peer": 1, **shared, "post_ns": BILLION + 100}
    sent |= {"wait_ns": BILLION + 110, "done_ns": BILLION + 120}
    waiting = {"op": "irecv", "group": 1, "peer": 0, **shared, "post_ns": BILLION + 70, "status": 1}
    span = {"op": "span", "label": 0, "thread": 140_000_000_000_009, "post_ns": BILLION + 50}
    span["done_ns"] = BILLION + 60
    open_span = span | {"post_ns": BILLION + 200, "done_ns": NONE, "status": 1}
    first = meta(rank=0, pid=10, start_ns=BILLION, start_unix_ns=5000 * BILLION, **about)
    second = meta(rank=1, pid=11, start_ns=BILLION + 30, start_unix_ns=5000 * BILLION + 30, **about)
    write(directory, 0, [sent], [*first, world | {"id": 0}, payload, file], room=4)
    names = [own | {"id": 0}, payload, file, label, world | {"id": 1}]
    write(directory, 1, [span, waiting, open_span], [*second, *names])
