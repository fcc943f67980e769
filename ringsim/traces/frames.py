"""A trace as pandas tables.

``events``, one row an event, and ``messages``, one row a message; the columns stand below, in order. Words are categoricals. What does
not apply, or has not come yet, is NA, never -1: a duration reckoned from it is NA too, not a wrong number. Times are ns from the start
of the run. ``message_id`` of an event is the row of its message in the other table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.traces.events import ANY_SOURCE, KIND_NAMES, NONE, OP_NAMES, STATUS_NAMES, Ints, Tables

if TYPE_CHECKING:
    import pandas as pd

    from ringsim.traces.value import Trace

__all__ = ["EVENT_COLUMNS", "MESSAGE_COLUMNS", "to_pandas"]

EVENT_COLUMNS: Final = (
    "run", "rank", "thread", "seq", "kind", "op", "group", "peer", "tag", "size_bytes", "dtype", "shape", "stage", "microbatch",
    "label", "file", "line", "post_ns", "wait_ns", "done_ns", "status", "message_id",
)  # fmt: skip
MESSAGE_COLUMNS: Final = (
    "src", "dst", "tag", "group", "size_bytes", "dtype", "shape", "send_post_ns", "send_done_ns", "recv_post_ns", "recv_done_ns",
    "late_sender_ns", "late_receiver_ns", "transfer_ns", "stage", "microbatch",
)  # fmt: skip


def to_pandas(trace: Trace, which: str = "events") -> pd.DataFrame:
    """Makes a table of a trace.

    Args:
        trace: the trace.
        which: "events" or "messages".

    Returns:
        A new DataFrame with the columns ``EVENT_COLUMNS`` or ``MESSAGE_COLUMNS``. ``shape`` reads "4x1024", and "" for a scalar.
        ``peer`` is NA for a recv from any source that has not met its sender. In the messages, ``late_sender_ns`` is how long the
        receiver was blocked before the send was posted, ``late_receiver_ns`` the reverse, and ``transfer_ns`` the time from the
        later of the two posts to the end of the recv, NA while it has not ended.

    Raises:
        ArgumentError: ``which`` names no table.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
        ...                       "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [2000, 3000]})
        >>> to_pandas(Trace(events, {}), "messages")[["src", "dst", "transfer_ns"]]
           src  dst  transfer_ns
        0    0    1         3000
    """
    if which == "events":
        return _events(trace)
    if which == "messages":
        return _messages(trace)
    raise ArgumentError(f'which must be "events" or "messages", got {which!r}. Choose one of the two tables.')


def _events(trace: Trace) -> pd.DataFrame:
    import pandas as pd

    events, messages, tables = trace.events, trace.messages, trace.events.tables
    message_id = np.full(len(events), NONE, dtype=np.int64)
    message_id[messages.send] = message_id[messages.recv] = np.arange(len(messages))
    peer = np.where(events.peer == ANY_SOURCE, NONE, events.peer)
    dtype, shape = _payload_words(tables)
    columns: dict[str, Any] = {
        "run": _words(np.zeros(len(events), dtype=np.int8), [str(trace.metadata.get("run_id", ""))]),
        "rank": events.rank,
        "thread": events.thread,
        "seq": events.seq,
        "kind": _words(events.kind, KIND_NAMES),
        "op": _words(events.op, OP_NAMES),
        "group": _words(events.group, [group.name for group in tables.groups]),
        "peer": _numbers(peer),
        "tag": _numbers(events.tag),
        "size_bytes": _numbers(events.size_bytes),
        "dtype": _words(events.payload, dtype),
        "shape": _words(events.payload, shape),
        "stage": _numbers(events.stage),
        "microbatch": _numbers(events.microbatch),
        "label": _words(events.label, tables.labels),
        "file": _words(events.file, tables.files),
        "line": _numbers(events.line),
        "post_ns": events.post_ns,
        "wait_ns": _numbers(events.wait_ns),
        "done_ns": _numbers(events.done_ns),
        "status": _words(events.status, STATUS_NAMES),
        "message_id": _numbers(message_id),
    }
    return pd.DataFrame({name: columns[name] for name in EVENT_COLUMNS}, copy=True)


def _messages(trace: Trace) -> pd.DataFrame:
    import pandas as pd

    events, messages, waits = trace.events, trace.messages, trace.waits
    send, recv = messages.send, messages.recv
    dtype, shape = _payload_words(events.tables)
    recv_done = events.done_ns[recv]
    both_posted = np.maximum(events.post_ns[send], events.post_ns[recv])
    columns: dict[str, Any] = {
        "src": messages.src,
        "dst": messages.dst,
        "tag": _numbers(messages.tag),
        "group": _words(messages.group, [group.name for group in events.tables.groups]),
        "size_bytes": _numbers(events.size_bytes[send]),
        "dtype": _words(messages.payload, dtype),
        "shape": _words(messages.payload, shape),
        "send_post_ns": events.post_ns[send],
        "send_done_ns": _numbers(events.done_ns[send]),
        "recv_post_ns": events.post_ns[recv],
        "recv_done_ns": _numbers(recv_done),
        "late_sender_ns": waits.late_sender_ns[recv],
        "late_receiver_ns": waits.late_receiver_ns[send],
        "transfer_ns": _numbers(np.where(recv_done == NONE, NONE, np.maximum(recv_done - both_posted, 0))),
        "stage": _numbers(messages.stage),
        "microbatch": _numbers(messages.microbatch),
    }
    return pd.DataFrame({name: columns[name] for name in MESSAGE_COLUMNS}, copy=True)


def _numbers(values: Ints) -> pd.api.extensions.ExtensionArray:
    """Makes a nullable column (Int32 or Int64) in which -1 is NA."""
    import pandas as pd

    return pd.arrays.IntegerArray(np.array(values), values == NONE)


def _words(codes: Ints, names: Any) -> pd.Categorical:
    """Makes a categorical of ``names[code]``, NA for -1 and for a name of None; names that several codes share become one category."""
    import pandas as pd

    unique = {name: number for number, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    number_of = np.array([unique.get(name, NONE) for name in names] + [NONE], dtype=np.int64)
    return pd.Categorical.from_codes(number_of[codes], categories=pd.Index(list(unique), dtype="str"))


def _payload_words(tables: Tables) -> tuple[list[str | None], list[str | None]]:
    """Returns the dtype and the shape of each payload as words, None for one that carries nothing (a barrier's)."""
    dtypes = [payload.dtype or None for payload in tables.payloads]
    return dtypes, ["x".join(map(str, payload.shape)) if payload.dtype else None for payload in tables.payloads]
