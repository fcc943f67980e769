"""Trace files written by hand, using only their published format (docs/decisions/0003).

They are for traces whose exact times or states no program produces.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ringsim
from ringsim import Trace

NONE: Final = -1
ANY_SOURCE: Final = -2  # the peer of a recv from any source
STATUS: Final = {"in_flight": 1, "ok": 2, "error": 3}
# a file stores the index of a name in this list, so it may only grow at its end
OPS: Final = tuple(
    """span mark send isend recv irecv batch_isend batch_irecv send_object_list recv_object_list
    broadcast all_reduce all_reduce_coalesced reduce all_gather all_gather_into_tensor
    all_gather_coalesced gather scatter reduce_scatter reduce_scatter_tensor all_to_all
    all_to_all_single barrier monitored_barrier all_gather_single reduce_scatter_single
    new_group""".split()
)
TIMES: Final = ("post_ns", "wait_ns", "done_ns")
COLUMNS: Final = dict.fromkeys(
    """rank thread seq op group peer tag payload stage microbatch label file line
    post_ns wait_ns done_ns status""".split(),
    "<i4",
) | dict.fromkeys(("seq", *TIMES), "<i8") | {"op": "<u2", "status": "<u1"}  # fmt: skip


def put_together(meta: bytes, events: bytes) -> bytes:
    """Makes a file of the two members, with correct checksums."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("meta.json", meta)
        archive.writestr("events.parquet", events)
    return sink.getvalue()


def take_apart(path: Path) -> tuple[bytes, bytes]:
    """Returns the two members of a file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read("meta.json"), archive.read("events.parquet")


def write_columns(columns: Mapping[str, Any]) -> bytes:
    """Writes columns in the form of a trace's Parquet file."""
    fields, arrays = [], []
    for name, dtype in COLUMNS.items():
        values = np.asarray(columns[name], dtype=dtype)
        nullable = name in ("wait_ns", "done_ns")
        arrays.append(pa.array(values, mask=values == NONE if nullable else None))
        fields.append(pa.field(name, arrays[-1].type, nullable=nullable))
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), sink)
    return sink.getvalue()


@lru_cache(maxsize=64)
def load_names(tables: str) -> Any:
    """Returns the events of a file that has names but no events."""
    no_names = {"groups": [], "payloads": [], "labels": [], "files": []}
    meta = {"format": 1, "needs": "0.1.0", "events": 0, "metadata": {}}
    meta["tables"] = no_names | json.loads(tables)
    with TemporaryDirectory() as directory:
        path = Path(directory, "x")
        columns = dict.fromkeys(COLUMNS, ())
        path.write_bytes(put_together(json.dumps(meta).encode(), write_columns(columns)))
        return ringsim.load(path).events


def load_columns(columns: Mapping[str, Any], tables: Mapping[str, Any], **metadata: Any) -> Trace:
    """Returns the trace with these columns; a missing column is -1 throughout."""
    rank = np.asarray(columns["rank"])
    full = dict.fromkeys(COLUMNS, NONE) | {"thread": 0, "post_ns": 0, "status": STATUS["ok"]}
    full |= {"seq": np.arange(len(rank)) - np.searchsorted(rank, rank), **columns}
    typed = {
        name: np.array(np.broadcast_to(full[name], len(rank)), dtype=dtype)
        for name, dtype in COLUMNS.items()
    }
    return Trace(replace(load_names(json.dumps(tables)), **typed), metadata)


PAYLOAD: Final = ("dtype", "shape", "size_bytes", "reduction", "strides", "splits")


def make_trace(
    rows: Iterable[Mapping[str, Any]],
    *,
    groups: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]] = (),
    **metadata: Any,
) -> Trace:
    """Makes a trace of events that are given one by one, by name.

    Args:
        rows: the events by their columns. ``op``, ``group``, ``label``, ``file`` and ``status`` are
            strings; a ``payload`` is its values in the order of ``PAYLOAD``, or ``size_bytes``,
            ``dtype`` and ``shape``; ``times`` are those of post, wait and done.
        groups: the members of each group; may be left out.
        **metadata: the metadata of the trace.
    """
    known_groups = [*(groups.items() if isinstance(groups, Mapping) else groups)]
    numbers: dict[str, dict[Any, int]] = {
        name: {} for name in ("group", "payload", "label", "file")
    }
    for place, (group, _) in enumerate(known_groups):
        numbers["group"].setdefault(group, place)
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS if name != "seq"}
    for row in sorted(rows, key=lambda row: row["rank"]):
        known: dict[str, Any] = {"thread": 0, "post_ns": 0, **row}
        known["op"] = OPS.index(row["op"]) if row["op"] in OPS else row["op"]
        known |= zip(TIMES, row.get("times", ()), strict=False)
        known["status"] = STATUS.get(row.get("status", "ok"), row.get("status"))
        if "size_bytes" in row:
            shape = tuple(row.get("shape", (row["size_bytes"] // 4,)))
            known["payload"] = (row.get("dtype", "float32"), shape, row["size_bytes"])
        if isinstance(known.get("group"), str) and known["group"] not in numbers["group"]:
            known_groups.append((known["group"], ()))
            numbers["group"][known["group"]] = len(known_groups) - 1
        for name, of_name in numbers.items():
            if not isinstance(known.get(name, 0), int):
                known[name] = of_name.setdefault(known[name], len(of_name))
        for name, column in columns.items():
            column.append(known.get(name, NONE))
    tables = {
        "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in known_groups],
        "payloads": [dict(zip(PAYLOAD, one, strict=False)) for one in numbers["payload"]],
        "labels": list(numbers["label"]),
        "files": list(numbers["file"]),
    }
    return load_columns(columns, tables, **metadata)
