"""A trace as tables: the columns that the design names, in order, and NA wherever a value does not apply."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from random_traces import traces

from ringsim.errors import ArgumentError
from ringsim.traces.events import NONE, OP_CODES, Group, Payload, Tables, make_events
from ringsim.traces.value import Trace

EVENT_COLUMNS = """run rank thread seq kind op group peer tag size_bytes dtype shape stage microbatch label file line
post_ns wait_ns done_ns status message_id""".split()
MESSAGE_COLUMNS = """src dst tag group size_bytes dtype shape send_post_ns send_done_ns recv_post_ns recv_done_ns
late_sender_ns late_receiver_ns transfer_ns stage microbatch""".split()


def one_of_each() -> Trace:
    """A send that met its recv, a recv in flight from any source, a span."""
    tables = Tables((Group("ring:0>1", (0, 1)),), (Payload("float32", (4, 2), 32), Payload("int64", (), 8)), ("compute",), ("ring.py",))
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


def test_event_columns_are_the_designs() -> None:
    assert list(one_of_each().to_pandas()) == EVENT_COLUMNS
    assert list(Trace(make_events({"rank": [], "op": []}), {}).to_pandas("events")) == EVENT_COLUMNS


def test_message_columns_are_the_designs() -> None:
    assert list(one_of_each().to_pandas("messages")) == MESSAGE_COLUMNS
    assert list(Trace(make_events({"rank": [], "op": []}), {}).to_pandas("messages")) == MESSAGE_COLUMNS


def test_events_say_what_happened() -> None:
    rows = one_of_each().to_pandas().astype(object)
    rows = rows.where(rows.notna(), None).values.tolist()
    assert rows == [
        ["a", 0, 0, 0, "span", "span", None, None, None, None, None, None, 2, None, "compute", None, None, 0, None, 90, "ok", None],
        ["a", 0, 0, 1, "send", "isend", "ring:0>1", 1, 7, 32, "float32", "4x2", 2, 5, None, "ring.py", 12, 100, 110, 200, "ok", 0],
        ["a", 1, 0, 0, "recv", "irecv", "ring:0>1", 0, 7, 32, "float32", "4x2", None, None, None, "ring.py", 14, 40, 50, 250, "ok", 0],
        [
            "a",
            1,
            0,
            1,
            "recv",
            "recv",
            "ring:0>1",
            None,
            0,
            8,
            "int64",
            "",
            None,
            None,
            None,
            None,
            None,
            300,
            300,
            None,
            "in_flight",
            None,
        ],
    ]


def test_messages_say_who_was_late() -> None:
    (row,) = one_of_each().to_pandas("messages").to_dict("records")
    expected = [0, 1, 7, "ring:0>1", 32, "float32", "4x2", 100, 200, 40, 250, 50, 0, 150, 2, 5]
    assert row == dict(zip(MESSAGE_COLUMNS, expected, strict=True))


def test_a_message_on_its_way_has_no_transfer_time() -> None:
    events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0], "post_ns": [0, 5], "wait_ns": [0, 5]})
    table = Trace(events, {}).to_pandas("messages")
    assert table[["transfer_ns", "send_done_ns", "recv_done_ns"]].isna().all(axis=None)


def test_types_of_the_columns() -> None:
    table = one_of_each().to_pandas()
    assert {name: str(table[name].dtype) for name in ("rank", "post_ns", "done_ns", "peer", "kind", "message_id")} == {
        "rank": "int32", "post_ns": "int64", "done_ns": "Int64", "peer": "Int32", "kind": "category", "message_id": "Int64",
    }  # fmt: skip


def test_a_duration_of_what_has_not_ended_is_missing_and_not_negative() -> None:
    table = one_of_each().to_pandas()
    assert (table.done_ns - table.post_ns).tolist()[-1] is pd.NA


def test_names_that_two_numbers_share_are_one_category() -> None:
    tables = Tables(groups=(Group("pair", (0, 1)), Group("pair", (1, 2))))
    events = make_events({"rank": [0, 1], "op": [OP_CODES["send"]] * 2, "group": [0, 1]}, tables)
    assert Trace(events, {}).to_pandas().group.cat.categories.tolist() == ["pair"]


def test_what_carries_nothing_has_no_dtype_and_no_shape() -> None:
    events = make_events({"rank": [0], "op": [OP_CODES["barrier"]], "payload": [0]}, Tables(payloads=(Payload("", (), 0),)))
    table = Trace(events, {}).to_pandas()
    assert table[["dtype", "shape"]].isna().all(axis=None)
    assert table.size_bytes.tolist() == [0]


def test_a_table_belongs_to_its_owner() -> None:
    trace = one_of_each()
    table = trace.to_pandas()
    table["rank"] = 9
    table.loc[0, "post_ns"] = 77
    table.loc[:, "tag"] = 3
    assert trace.events.rank.tolist() == [0, 0, 1, 1]
    assert trace.events.post_ns[0] == 0
    assert trace.to_pandas().tag.tolist() == [pd.NA, 7, 7, 0]


@pytest.mark.parametrize("which", ["message", "", None, 3])
def test_unknown_table(which: object) -> None:
    with pytest.raises(ArgumentError, match='which must be "events" or "messages", got'):
        one_of_each().to_pandas(which)  # type: ignore[arg-type]


@given(traces)
def test_message_id_is_the_row_of_the_message(trace: Trace) -> None:
    events, messages = trace.to_pandas(), trace.to_pandas("messages")
    assert len(events) == len(trace.events)
    for row, (src, dst, tag) in enumerate(zip(messages.src, messages.dst, messages.tag, strict=True)):
        ends = events[events.message_id == row]
        assert sorted(ends.kind.astype(str)) == ["recv", "send"]
        sender = ends[ends.kind == "send"].iloc[0]
        assert (sender["rank"], sender.peer) == (src, dst)
        assert pd.isna(sender.tag) if pd.isna(tag) else sender.tag == tag
    assert events.message_id.notna().sum() == 2 * len(messages)
