"""A trace shows itself.

A summary in a terminal, pictures with their text in a notebook, tables for pandas.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import types

import pandas as pd
import pytest
from hypothesis import given
from random_traces import traces

from ringsim import Trace
from ringsim.errors import ArgumentError
from ringsim.traces import lazy
from ringsim.traces.events import NONE, OP_CODES, Group, Payload, Tables, make_events
from ringsim.traces.items import Event

TABLES = Tables(
    (Group("world", (0, 1, 2)),), (Payload("float32", (1024,), 4096),), (), ("ring.py",)
)


def trace_of(**metadata: object) -> Trace:
    """Rank 0 sends twice to 1 and once to 2, late; a last isend of rank 2 finds nobody."""
    send, recv = OP_CODES["isend"], OP_CODES["recv"]
    columns = {
        "rank": [0, 0, 0, 1, 1, 2, 2],
        "op": [send, send, send, recv, recv, recv, send],
        "group": [0] * 7,
        "payload": [0] * 7,
        "peer": [1, 1, 2, 0, 0, 0, 1],
        "tag": [0] * 7,
        "file": [0] * 7,
        "line": [5, 6, 7, 8, 9, 10, 11],
        "post_ns": [3_000_000, 3_100_000, 3_200_000, 1_000_000, 3_500_000, 2_500_000, 4_000_000],
        "wait_ns": [3_000_000, 3_100_000, 3_200_000, 1_000_000, 3_500_000, 2_500_000, NONE],
        "done_ns": [3_400_000, 3_600_000, 3_700_000, 3_400_000, 3_600_000, 3_700_000, NONE],
        "status": [2] * 6 + [1],
    }
    return Trace(make_events(columns, TABLES), {"world_size": 3, **metadata})


def test_summary_and_description() -> None:
    notes = [f"note {number}" for number in range(9)]
    trace = trace_of(
        source="measured",
        backend="gloo",
        date="2026-11-20",
        notes=notes,
        not_recorded=["collectives issued from C++"],
    )
    assert repr(trace) == str(trace) == trace.summary()
    assert trace.summary().splitlines() == [
        "Trace of 3 ranks (measured, gloo, 2026-11-20)",
        "  messages      3 messages, 12 KiB, 7 events in 3 ms",
        "  busiest edge  0 -> 1: 2 messages, 8 KiB",
        "  longest wait  rank 1 waited 2 ms in recv (ring.py:8) for rank 0 to send",
        "  unmatched     1 operation",
        "    rank 2: isend to 1 (world, tag 0, 4096 bytes) at ring.py:11 has no recv",
        *("  note: note 0", "  note: note 1", "  note: note 2", "    ... and 6 more"),
        "  not recorded: collectives issued from C++",
    ]
    assert trace.describe() == (
        "Trace of 3 ranks that exchanged 3 messages in 3 ms, most bytes from rank 0 to rank 1; "
        "the longest wait: rank 1 waited 2 ms in recv (ring.py:8) for rank 0 to send; 1 "
        "operation without a partner."
    )


def test_summary_of_nothing_of_a_late_receiver_and_of_edges_alike() -> None:
    nothing = Trace(make_events({"rank": [], "op": []}), {"world_size": 4})
    assert nothing.summary().splitlines()[1:] == [
        "  messages      0 messages, 0 B, 0 events in 0 ns",
        "  unmatched     none",
    ]
    assert nothing.makespan_s == 0
    columns = {
        "rank": [0, 1],
        "op": [OP_CODES["send"], OP_CODES["recv"]],
        "peer": [1, 0],
        "post_ns": [0, 700],
        "wait_ns": [0, 700],
    }
    late = Trace(make_events(columns | {"done_ns": [900, 900]}), {})
    assert "rank 0 waited 700 ns in send for rank 1 to receive" in late.summary()
    alike = Trace(
        make_events(
            {
                "rank": [0, 0, 1, 1],
                "op": [OP_CODES["send"], OP_CODES["recv"]] * 2,
                "peer": [1, 1, 0, 0],
            }
        ),
        {},
    )
    assert "busiest edge  0 -> 1 and 1 other alike: 1 message, 0 B" in alike.summary()
    assert alike.describe() == "Trace of 2 ranks that exchanged 2 messages in 0 ns."


@given(traces)
def test_events_and_messages_one_by_one_say_what_the_tables_say(trace: Trace) -> None:
    table = trace.to_pandas().drop(columns=["run", "message_id"]).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    events = list(trace)
    said = [
        event._asdict()
        | {"shape": None if event.shape is None else "x".join(map(str, event.shape))}
        for event in events
    ]
    assert (said, len(trace)) == (rows, len(rows))
    pairs = [(message.src, message.dst, message.send, message.recv) for message in trace.messages]
    assert pairs == [(send.rank, recv.rank, send, recv) for send, recv in _ends(trace, events)]
    assert all(repr(one) for one in (*events, *trace.messages))


def _ends(trace: Trace, events: list[Event]) -> list[tuple[Event, Event]]:
    return [
        (events[send], events[recv])
        for send, recv in zip(trace.messages.send, trace.messages.recv, strict=True)
    ]


def test_events_and_messages_read_as_sentences() -> None:
    trace = trace_of()
    assert repr(trace[3]) == (
        "rank 1: recv from 0 (world, tag 0, float32[1024], 4,096 bytes) "
        "at ring.py:8 from 1 ms to 3.4 ms"
    )
    assert repr(trace[-1]).endswith(" at ring.py:11 from 4 ms, in flight")
    words = (
        "rank 0 -> 1: isend to 1 (world, tag 0, float32[1024], 4,096 bytes) at ring.py:5, posted "
        "at 3 ms, received at 3.4 ms"
    )
    assert repr(trace.messages[0]) == words
    names = Tables(labels=("forward",))
    columns = {
        "rank": [0, 0],
        "op": [OP_CODES["span"], OP_CODES["mark"]],
        "label": [0, -1],
        "stage": [1, -1],
        "post_ns": [0, 5],
    }
    span = Trace(make_events(columns | {"done_ns": [2000, 5]}, names), {})
    assert [*map(repr, span)] == [
        "rank 0: span 'forward' (stage 1) from 0 ns to 2 µs",
        "rank 0: mark '' at 5 ns",
    ]
    with pytest.raises(IndexError):
        trace.messages[3]


def test_a_trace_is_a_value() -> None:
    trace = trace_of(backend="gloo")
    assert trace.makespan_s == pytest.approx(3e-3)  # from the first post to the last moment
    # ranks without events count
    assert [
        Trace(trace.events, {"world_size": size} if size else {}).world_size for size in (8, 0)
    ] == [8, 3]
    assert trace == Trace(trace.events, {"backend": "gloo", "world_size": 3}, results=[1, 2, 3])
    assert trace not in (
        trace_of(backend="nccl"),
        Trace(trace.events.select([0, 1]), trace.metadata),
        "a trace",
    )
    with pytest.raises(AttributeError):
        trace.events = None  # type: ignore[misc]
    # NCCL ignores tags
    columns = {
        "rank": [0, 1],
        "op": [OP_CODES["send"], OP_CODES["recv"]],
        "peer": [1, 0],
        "tag": [1, 2],
    }
    assert [
        len(Trace(make_events(columns), {"backend": name}).messages) for name in ("gloo", "nccl")
    ] == [0, 1]


def test_a_notebook_gets_picture_text_and_alternative_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of()
    monkeypatch.setattr(
        lazy,
        "resolve",
        lambda name: lambda shown: b"the picture" if name == "png" and shown is trace else b"",
    )
    data, metadata = trace._repr_mimebundle_()
    assert (base64.b64decode(data["image/png"]), data["text/plain"]) == (
        b"the picture",
        trace.summary(),
    )
    assert metadata == {"image/png": {"alt": trace.describe()}}
    # IPython in a terminal draws nothing
    for active, drawn in ((["text/plain"], False), (["text/plain", "image/png"], True)):
        shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(active_types=active))
        monkeypatch.setitem(
            sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        )
        assert ("image/png" in trace._repr_mimebundle_()[0]) is drawn
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(lazy, "resolve", lambda name: __import__("matplotlib"))
    assert trace._repr_mimebundle_() == ({"text/plain": trace.summary()}, {})


def test_every_reached_name_exists() -> None:
    for name in lazy.NAMES:
        assert callable(lazy.resolve(name))


def test_reading_and_matching_and_the_command_line_import_nothing_heavy() -> None:
    code = """
import sys
import ringsim.cli
from ringsim.traces.events import OP_CODES, make_events
from ringsim.traces.files import load, save
from ringsim.traces.value import Trace
trace = Trace(make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [1]}), {})
trace.summary(), trace.describe(), trace.waits
assert not {"torch", "pandas", "pyarrow", "matplotlib"} & set(sys.modules), "before"
import tempfile
with tempfile.TemporaryDirectory() as directory:
    trace.save(directory + "/x.ringtrace")
    assert load(directory + "/x.ringtrace") == trace
assert not {"torch", "pandas", "matplotlib"} & set(sys.modules), "after"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


EVENT_COLUMNS = """run rank thread seq kind op group peer tag size_bytes dtype shape stage microbatch label file line
post_ns wait_ns done_ns status message_id""".split()  # noqa: E501
MESSAGE_COLUMNS = """src dst tag group size_bytes dtype shape send_post_ns send_done_ns recv_post_ns recv_done_ns
late_sender_ns late_receiver_ns transfer_ns stage microbatch""".split()  # noqa: E501


def one_of_each() -> Trace:
    """A send that met its recv, a recv in flight from any source, a span."""
    tables = Tables(
        (Group("ring:0>1", (0, 1)),),
        (Payload("float32", (4, 2), 32), Payload("int64", (), 8)),
        ("compute",),
        ("ring.py",),
    )
    columns = {
        "rank": [0, 0, 1, 1],
        "op": [OP_CODES[name] for name in ("span", "isend", "irecv", "recv")],
        "group": [NONE, 0, 0, 0],
        "peer": [NONE, 1, 0, -2],
        "tag": [NONE, 7, 7, 0],
        "payload": [NONE, 0, 0, 1],
        "stage": [2, 2, NONE, NONE],
        "microbatch": [NONE, 5, NONE, NONE],
        "label": [0, NONE, NONE, NONE],
        "file": [NONE, 0, 0, NONE],
        "line": [NONE, 12, 14, NONE],
        "post_ns": [0, 100, 40, 300],
        "wait_ns": [NONE, 110, 50, 300],
        "done_ns": [90, 200, 250, NONE],
        "status": [2, 2, 2, 1],
    }
    return Trace(make_events(columns, tables), {"run_id": "a", "world_size": 2})


@pytest.mark.parametrize(
    ("which", "columns"), [("events", EVENT_COLUMNS), ("messages", MESSAGE_COLUMNS)]
)
def test_columns_are_the_designs(which: str, columns: list[str]) -> None:
    assert (
        list(one_of_each().to_pandas(which))
        == list(Trace(make_events({"rank": [], "op": []}), {}).to_pandas(which))
        == columns
    )


def test_events_say_what_happened() -> None:
    rows = one_of_each().to_pandas().astype(object)
    span, send, irecv, recv = rows.where(rows.notna(), None).to_dict("records")
    none = dict.fromkeys(EVENT_COLUMNS)
    first = {"run": "a", "rank": 0, "thread": 0, "stage": 2, "status": "ok"}
    assert span == none | first | {
        "seq": 0,
        "kind": "span",
        "op": "span",
        "label": "compute",
        "post_ns": 0,
        "done_ns": 90,
    }
    message = {
        "group": "ring:0>1",
        "tag": 7,
        "size_bytes": 32,
        "dtype": "float32",
        "shape": "4x2",
        "file": "ring.py",
        "message_id": 0,
    }
    posted = {"seq": 1, "kind": "send", "op": "isend", "peer": 1, "microbatch": 5, "line": 12}
    assert send == none | first | message | posted | {
        "post_ns": 100,
        "wait_ns": 110,
        "done_ns": 200,
    }
    assert (
        irecv.items()
        >= (
            message
            | {"kind": "recv", "op": "irecv", "peer": 0, "line": 14, "post_ns": 40, "done_ns": 250}
        ).items()
    )
    assert (
        recv.items()
        >= {
            "peer": None,
            "shape": "",
            "dtype": "int64",
            "done_ns": None,
            "status": "in_flight",
            "message_id": None,
        }.items()
    )


def test_messages_say_who_was_late() -> None:
    (row,) = one_of_each().to_pandas("messages").to_dict("records")
    expected = [0, 1, 7, "ring:0>1", 32, "float32", "4x2", 100, 200, 40, 250, 50, 0, 150, 2, 5]
    assert row == dict(zip(MESSAGE_COLUMNS, expected, strict=True))
    on_its_way = make_events(
        {
            "rank": [0, 1],
            "op": [OP_CODES["send"], OP_CODES["recv"]],
            "peer": [1, 0],
            "post_ns": [0, 5],
        }
    )
    table = Trace(on_its_way, {}).to_pandas("messages")
    assert table[["transfer_ns", "send_done_ns", "recv_done_ns"]].isna().all(axis=None)


def test_types_of_the_columns_and_what_is_missing() -> None:
    table = one_of_each().to_pandas()
    assert {name: str(table[name].dtype) for name in ("rank", "post_ns", "done_ns", "peer", "kind",
                                                      "message_id")} == {
        "rank": "int32", "post_ns": "int64", "done_ns": "Int64", "peer": "Int32",
        "kind": "category", "message_id": "Int64",
    }  # fmt: skip
    # of what has not ended, and not negative
    assert (table.done_ns - table.post_ns).tolist()[-1] is pd.NA
    tables = Tables((Group("pair", (0, 1)), Group("pair", (1, 2))), (Payload("", (), 0),))
    barriers = make_events(
        {"rank": [0, 1], "op": [OP_CODES["barrier"]] * 2, "group": [0, 1], "payload": [0, 0]},
        tables,
    )
    table = Trace(barriers, {}).to_pandas()
    assert table.group.cat.categories.tolist() == ["pair"], (
        "names that two numbers share are one category"
    )
    assert table[["dtype", "shape"]].isna().all(axis=None)
    assert table.size_bytes.tolist() == [0, 0]


def test_a_table_belongs_to_its_owner() -> None:
    trace = one_of_each()
    table = trace.to_pandas()
    table["rank"] = 9
    table.loc[0, "post_ns"] = 77
    table.loc[:, "tag"] = 3
    assert (trace.events.rank.tolist(), trace.events.post_ns[0]) == ([0, 0, 1, 1], 0)
    assert trace.to_pandas().tag.tolist() == [pd.NA, 7, 7, 0]
    for which in ("message", "", None, 3):
        with pytest.raises(ArgumentError, match='which must be "events" or "messages", got'):
            trace.to_pandas(which)  # type: ignore[arg-type]


@given(traces)
def test_message_id_is_the_row_of_the_message(trace: Trace) -> None:
    events, messages = trace.to_pandas(), trace.to_pandas("messages")
    assert len(events) == len(trace.events)
    for row, (src, dst, tag) in enumerate(
        zip(messages.src, messages.dst, messages.tag, strict=True)
    ):
        ends = events[events.message_id == row]
        assert sorted(ends.kind.astype(str)) == ["recv", "send"]
        sender = ends[ends.kind == "send"].iloc[0]
        assert (sender["rank"], sender.peer) == (src, dst)
        assert pd.isna(sender.tag) if pd.isna(tag) else sender.tag == tag
    assert events.message_id.notna().sum() == 2 * len(messages)
