"""The vocabulary of a trace: events and names, both in memory and in a rank's files.

An event is one operation (a send, a recv or a collective), one span or one mark. A rank writes each
event as a ``RECORD`` of fixed size. Groups, shapes and names do not fit into a record, so they are
numbered and written once to a second file. ``Events`` holds the events of all ranks as columns, and
``Tables`` holds the names that the numbers refer to.

Times of an operation::

    post_ns          wait_ns                 done_ns
      |  (the program   |  blocked in wait()    |
      |   continues)    |                       |
      +-----------------+-----------------------+--> time

A span has post_ns (its start) and done_ns (its end), and a mark has only post_ns. A time that has
not been reached is -1.

If ringsim finds a mistake while the program runs, it writes a mark into the trace, so that the
mistake is still reported when the file is loaded later. The mark belongs to the rank that found the
mistake. It directly follows the operation's record, carries the user's line, and repeats the
operation's group, peer, tag and payload. Its label has the form ``! kind: message``, where ``kind``
is one of ``ringsim.traces.findings.KINDS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringsim.errors import escape

IN_FLIGHT = 1
OK = 2
ERROR = 3
STATUS_NAMES = ("", "in_flight", "ok", "error")  # status 0: the slot is empty

SEND, RECV, COLLECTIVE, SPAN, MARK = range(5)
KIND_NAMES = ("send", "recv", "collective", "span", "mark")

NONE = -1  # "does not apply" in every column, and "not yet" in the time columns
ANY_SOURCE = -2  # the peer of a recv from any source, until the message has arrived

# Operations as torch.distributed spells them. The order is part of the file format: append new
# operations, and never reorder them.
OPS = {
    "span": SPAN,
    "mark": MARK,
    "send": SEND,
    "isend": SEND,
    "recv": RECV,
    "irecv": RECV,
    "batch_isend": SEND,  # an isend or irecv posted by batch_isend_irecv
    "batch_irecv": RECV,
    "send_object_list": SEND,
    "recv_object_list": RECV,
    "broadcast": COLLECTIVE,
    "all_reduce": COLLECTIVE,
    "all_reduce_coalesced": COLLECTIVE,
    "reduce": COLLECTIVE,
    "all_gather": COLLECTIVE,
    "all_gather_into_tensor": COLLECTIVE,
    "all_gather_coalesced": COLLECTIVE,
    "gather": COLLECTIVE,
    "scatter": COLLECTIVE,
    "reduce_scatter": COLLECTIVE,
    "reduce_scatter_tensor": COLLECTIVE,
    "all_to_all": COLLECTIVE,
    "all_to_all_single": COLLECTIVE,
    "barrier": COLLECTIVE,
    "monitored_barrier": COLLECTIVE,
    "all_gather_single": COLLECTIVE,
    "reduce_scatter_single": COLLECTIVE,
    "new_group": COLLECTIVE,  # its shape lists the members of the new group
}
OP_NAMES = tuple(OPS)
OP_KINDS = np.array([*OPS.values()], dtype=np.int8)
OP_CODES = {name: code for code, name in enumerate(OP_NAMES)}

# One event in a rank's memory-mapped file: 72 bytes, little-endian. `status` is written last,
# because it makes the slot valid.
RECORD = np.dtype(
    [
        ("post_ns", "<i8"),  # CLOCK_MONOTONIC
        ("wait_ns", "<i8"),
        ("done_ns", "<i8"),
        ("thread", "<u8"),  # threading.get_ident()
        ("group", "<i4"),  # an index into Tables.groups; the next three index the other tables
        ("payload", "<i4"),
        ("label", "<i4"),
        ("file", "<i4"),
        ("line", "<i4"),
        ("peer", "<i4"),  # global rank
        ("tag", "<i4"),
        ("stage", "<i4"),
        ("microbatch", "<i4"),
        ("op", "<u2"),
        ("status", "<u2"),
    ]
)

# The labels of marks that count the bytes of a rank's tensors, in a block and at the block's end.
# The shape of their payload lists the bytes of each kind, and the size is their sum.
BYTES = "bytes of tensors"
LAST_BYTES = "bytes of tensors at the end"
BYTE_KINDS = ("parameters", "gradients", "optimizer", "activations")

# Separates a line that calls a wrapper from the wrapper's file in a file name, such as
# "/home/me/train.py:40 > /home/me/messages.py".
CALLS = " > "


class Group(NamedTuple):
    """A process group: its name and its members.

    The name is "world", "ring:2>3", and so on. The members are global ranks in the group's order.
    ``world`` counts how often the process groups were created again since the recording began.
    Names repeat in a new world, but messages in different worlds never match.
    """

    name: str
    ranks: tuple[int, ...]
    world: int = 0


class Payload(NamedTuple):
    """The data that an operation carries.

    A payload has a dtype (such as "float32"), a shape, and a size in bytes, from which bandwidths
    are computed. ``reduction`` is the name of the reduction that combines the ranks' values, such
    as "SUM"; it is empty for operations that combine nothing, and in files from ringsim 0.1.0.
    ``strides`` are the strides of non-contiguous tensors, for collectives that depend on the memory
    layout. For an all_to_all, ``splits`` are the bytes sent to each rank of the group, and the
    bytes received from each rank.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    reduction: str = ""
    strides: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()


class Tables(NamedTuple):
    """The names that the numbers in the columns of ``Events`` refer to.

    For example, the number n in the column ``group`` refers to ``groups[n]``.
    """

    groups: tuple[Group, ...] = ()
    payloads: tuple[Payload, ...] = ()
    labels: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


Ints = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Events:
    """The events of a run, stored as columns.

    The columns are numpy arrays of equal length, ordered by rank, then in posting order. Times are
    in ns from the start of the run (int64). In the time columns, -1 means "not yet"; in all other
    columns, -1 means "does not apply". ``thread`` numbers a rank's threads from 0, in the order of
    their first events.
    """

    rank: Ints
    thread: Ints
    seq: Ints
    op: Ints
    group: Ints
    peer: Ints
    tag: Ints
    payload: Ints
    stage: Ints
    microbatch: Ints
    label: Ints
    file: Ints
    line: Ints
    post_ns: Ints
    wait_ns: Ints
    done_ns: Ints
    status: Ints
    tables: Tables = Tables()

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self.rank)

    @property
    def kind(self) -> Ints:
        """The kind of each event: SEND, RECV, COLLECTIVE, SPAN or MARK (int8)."""
        return OP_KINDS[self.op]

    @property
    def size_bytes(self) -> Ints:
        """The size of each event in bytes (int64), or -1 for spans and marks."""
        sizes = np.array(
            [payload.size_bytes for payload in self.tables.payloads] + [NONE], dtype=np.int64
        )
        return sizes[self.payload]  # -1 selects the last entry, which is NONE

    def spans(self, named: Callable[[str], bool]) -> Ints:
        """Returns a mask of the spans whose names satisfy ``named``."""
        labels = [number for number, label in enumerate(self.tables.labels) if named(label)]
        mask: Ints = (self.kind == SPAN) & np.isin(self.label, labels)
        return mask

    @property
    def counts_bytes(self) -> Ints:
        """A mask of the marks that count the bytes of tensors."""
        labels = np.array([label in (BYTES, LAST_BYTES) for label in (*self.tables.labels, "")])
        mask: Ints = (self.kind == MARK) & labels[self.label] & (self.payload != NONE)
        return mask

    @property
    def program_marks(self) -> Ints:
        """A mask of the marks that do not count bytes."""
        mask: Ints = (self.kind == MARK) & ~self.counts_bytes
        return mask

    def by_thread(self) -> Iterator[tuple[int, int, Ints]]:
        """Yields each rank and thread that has events, in order, with the indices of its events."""
        ranks, starts = np.unique(self.rank, return_index=True)
        # not strict, because np.split returns one empty part even if there are no events
        for rank, mine in zip(
            ranks.tolist(), np.split(np.arange(len(self)), starts[1:]), strict=False
        ):
            for thread in np.unique(self.thread[mine]).tolist():
                yield rank, thread, mine[self.thread[mine] == thread]

    def select(self, where: Ints) -> Events:
        """Returns the events selected by ``where`` (a mask or indices), with the same tables."""
        return Events(
            **{name: getattr(self, name)[where] for name in COLUMN_DTYPES}, tables=self.tables
        )


COLUMN_DTYPES: dict[str, str] = {
    field.name: "<i4" for field in fields(Events) if field.name != "tables"
}
COLUMN_DTYPES.update(
    dict.fromkeys(("seq", "post_ns", "wait_ns", "done_ns"), "<i8"), op="<u2", status="<u1"
)


def make_events(columns: dict[str, Any], tables: Tables = Tables()) -> Events:
    """Creates events from columns, each of which is converted to its dtype.

    Args:
        columns: arrays or lists of equal length, or single numbers, by name. ``rank``, which is no
            single number, and ``op`` are required.
            ``seq`` defaults to the order within each rank, ``status`` to OK, ``thread`` to 0, and
            all others to -1.
        tables: the names that the numbers in ``group``, ``payload``, ``label`` and ``file`` refer
            to.

    Example:
        >>> events = make_events(
        ...     {"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0]}
        ... )
        >>> len(events), [KIND_NAMES[kind] for kind in events.kind]
        (2, ['send', 'recv'])
    """
    count = len(columns["rank"])
    full: dict[str, Ints] = {}
    for name, dtype in COLUMN_DTYPES.items():
        default = OK if name == "status" else 0 if name == "thread" else NONE
        full[name] = np.full(count, columns.get(name, default), dtype=dtype)
    if "seq" not in columns:
        order = np.argsort(full["rank"], kind="stable")
        starts = np.searchsorted(full["rank"][order], full["rank"][order])
        full["seq"][order] = np.arange(count) - starts
    return Events(**full, tables=tables)


def concatenate(parts: Sequence[Events]) -> Events:
    """Concatenates parts of the same run.

    ``parts`` must not be empty. The tables of the last part apply to all parts.

    Example:
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]]})
        >>> concatenate([events.select([0]), events.select([1])]).rank.tolist()
        [0, 1]
    """
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_DTYPES
    }
    return Events(**columns, tables=parts[-1].tables)


# -- tables as JSON, in a rank's names file and in a saved trace; unexpected forms are refused

_INT64_MAX = 2**63 - 1


def write_tables(tables: Tables) -> dict[str, Any]:
    """Returns the tables as plain data for JSON.

    Example:
        >>> tables = Tables(
        ...     groups=(Group("world", (0, 1)),), payloads=(Payload("float32", (2,), 8),)
        ... )
        >>> read_tables(write_tables(tables)) == tables
        True
    """
    return {
        "groups": list(map(write_group, tables.groups)),
        "payloads": [write_payload(payload) for payload in tables.payloads],
        "labels": list(tables.labels),
        "files": list(tables.files),
    }


def write_payload(payload: Payload) -> dict[str, Any]:
    """Returns a payload as plain data for JSON, omitting optional entries that are empty."""
    entry = {"dtype": payload.dtype, "shape": list(payload.shape), "size_bytes": payload.size_bytes}
    return entry | {
        name: said
        for name in ("reduction", "strides", "splits")
        if (said := getattr(payload, name))
    }


def read_tables(value: Any) -> Tables:
    """Returns tables written by ``write_tables``.

    Raises:
        ValueError: ``value`` does not have this form.
    """
    if not isinstance(value, dict) or set(value) != set(Tables._fields):
        raise ValueError("the names are not in the four tables of a trace")
    for name, entries in value.items():
        if not isinstance(entries, list):
            raise ValueError(f"the table of {name} is not a list")
    return Tables(
        *(
            tuple(map(read, value[name]))
            for name, read in zip(Tables._fields, _READERS, strict=True)
        )
    )


def write_group(group: Group) -> dict[str, Any]:
    """Returns a group as plain data for JSON, omitting ``world`` if it is 0."""
    world = {"world": group.world} if group.world else {}
    return {"name": group.name, "ranks": list(group.ranks), **world}


def read_group(entry: Any) -> Group:
    """Returns the group described by ``{"name": ..., "ranks": [...], "world": ...}``.

    ``world`` may be missing, and other keys are ignored.

    Raises:
        ValueError: ``entry`` does not describe a group.
    """
    if not isinstance(entry, dict):
        raise ValueError("a group is not an object")
    (world,) = _naturals([entry.get("world", 0)], "a group's world")
    ranks = _naturals(entry.get("ranks"), "a group's ranks")
    return Group(read_word(entry.get("name")), ranks, world)


def read_payload(entry: Any) -> Payload:
    """Returns the payload described by a dictionary.

    The dictionary looks like ``{"dtype": ..., "shape": [...], "size_bytes": ..., "reduction":
    ...}``. ``reduction`` may be missing, and other keys are ignored.

    Raises:
        ValueError: ``entry`` does not describe a payload.
    """
    if not isinstance(entry, dict):
        raise ValueError("a payload is not an object")
    size_bytes = entry.get("size_bytes")
    if type(size_bytes) is not int or not NONE <= size_bytes <= _INT64_MAX:
        raise ValueError("a payload's size is not a number of bytes")
    what = "a payload's strides or splits"
    rows = [entry.get(name, []) for name in ("strides", "splits")]
    if not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{what} are not lists")
    return Payload(
        read_word(entry.get("dtype")),
        _naturals(entry.get("shape"), "a payload's shape"),
        size_bytes,
        read_word(entry.get("reduction", "")),
        *(tuple(_naturals(one, what) for one in row) for row in rows),
    )


def readable(value: Any, *, lines: bool = False) -> Any:
    r"""Returns JSON data with ``ringsim.errors.escape`` applied to every string.

    Args:
        value: any JSON data.
        lines: whether strings may contain line breaks; under the keys "ends", "caught" and "notes",
            strings always may.

    Example:
        >>> readable({"label": ["one", "red \x1b[31m\n"], "ends": [{"error": "two\nlines"}]})
        {'label': ['one', 'red \\x1b[31m\\n'], 'ends': [{'error': 'two\nlines'}]}
    """
    if isinstance(value, str):
        return escape(value, lines=lines)
    if isinstance(value, list):
        return [readable(one, lines=lines) for one in value]
    if isinstance(value, dict):
        return {
            readable(key): readable(one, lines=lines or key in ("ends", "caught", "notes"))
            for key, one in value.items()
        }
    return value


def read_word(value: Any) -> str:
    """Returns ``value`` with unprintable characters escaped.

    Raises:
        ValueError: ``value`` is not a string.
    """
    if not isinstance(value, str):
        raise ValueError("a name is not a string")
    return escape(value, lines=False)


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(one) is int and 0 <= one <= _INT64_MAX for one in value
    ):
        raise ValueError(f"{what} must consist of non-negative whole numbers")
    return tuple(value)


# the reader for each table, in the order of Tables
_READERS: tuple[Callable[[Any], Any], ...] = (read_group, read_payload, read_word, read_word)


# -- marks written by the recorder itself

# the labels of the marks that a rank writes when it destroys the world, and with it all groups, and
# when it creates the world again
DESTROYED = "process groups destroyed"
MADE_ANEW = "process groups created again"
# the last label occurs in files from ringsim 0.2
WORLD_LABELS = (DESTROYED, MADE_ANEW, "process groups made anew")

_NOTICE = re.compile(r"! ([a-z_]+): (.*)", re.DOTALL)


# a notice of this kind is a finding only if a rank waits for the thread
THREAD_FAILED = "thread_failed"


def word_notice(kind: str, message: str) -> str:
    """Returns the label for a mark that reports a mistake.

    Args:
        kind: the kind of the finding, such as "message_mismatch".
        message: a sentence.

    Example:
        >>> word_notice("buffer_hazard", "two buffers overlap.")
        '! buffer_hazard: two buffers overlap.'
    """
    return f"! {kind}: {message}"


def read_notice(label: str) -> tuple[str, str] | None:
    """Returns the kind and message in a label from ``word_notice``, or None for any other label.

    Example:
        >>> read_notice("! buffer_hazard: two buffers overlap."), read_notice("warm-up is over")
        (('buffer_hazard', 'two buffers overlap.'), None)
    """
    match = _NOTICE.fullmatch(label)
    return (match[1], match[2]) if match else None
