"""Which send became which recv.

The rules by hand, and against a matcher that does nothing clever; and why an operation was blocked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import events as any_events

from ringsim import Trace
from ringsim.traces.events import (
    ANY_SOURCE,
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    RECV,
    SEND,
    STATUS_NAMES,
    Events,
    Group,
    Payload,
    Tables,
    make_events,
)
from ringsim.traces.matching import (
    CollectiveCalls,
    describe_unmatched,
    match,
    split_waits,
    wait_for_last,
)

SEND_OPS = [OP_CODES[name] for name in ("send", "isend", "batch_isend", "send_object_list")]
RECV_OPS = [OP_CODES[name] for name in ("recv", "irecv", "batch_irecv", "recv_object_list")]


def program(*rows: tuple[int, str, int, int, int]) -> Events:
    """Events from (rank, op, peer, tag, group), in the order of posting on each rank."""
    rank, op, peer, tag, group = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    tables = Tables(
        groups=(Group("world", (0, 1)), Group("ring:0>1", (0, 1)), Group("ring:1>0", (0, 1)))
    )
    return make_events(
        {
            "rank": rank,
            "op": [OP_CODES[name] for name in op],
            "peer": peer,
            "tag": tag,
            "group": group,
        },
        tables,
    )


def pairs(events: Events, **options: Any) -> list[tuple[int, int]]:
    messages = match(events, **options)
    return sorted(zip(messages.send.tolist(), messages.recv.tolist(), strict=True))


# Rows of `program`, and which send became which recv, by the order of the rows.
PROGRAMS: dict[str, tuple[list[tuple[int, str, int, int, int]], list[tuple[int, int]]]] = {
    "messages of one tag keep their order, and tags do not wait for each other": (
        [
            *((0, "isend", 1, tag, 0) for tag in (7, 9, 7)),
            *((1, "irecv", 0, tag, 0) for tag in (9, 7, 7)),
        ],
        [(0, 4), (1, 3), (2, 5)],
    ),
    "groups over the same ranks are apart": (
        [(0, "send", 1, 0, 1), (0, "send", 1, 0, 2), (1, "recv", 0, 0, 2), (1, "recv", 0, 0, 1)],
        [(0, 3), (1, 2)],
    ),
    "opposite directions are apart": (
        [(0, "send", 1, 0, 0), (0, "recv", 1, 0, 0), (1, "send", 0, 0, 0), (1, "recv", 0, 0, 0)],
        [(0, 3), (2, 1)],
    ),
    "a rank may send to itself": ([(0, "isend", 0, 0, 0), (0, "irecv", 0, 0, 0)], [(0, 1)]),
    "collectives take no part": (
        [
            (0, "all_reduce", 1, 0, 0),
            (1, "barrier", 0, 0, 0),
            (1, "span", 0, 0, 0),
            (1, "mark", 0, 0, 0),
        ],
        [],
    ),
    "a source that is known": ([(0, "send", 1, 0, 0), (1, "recv", 0, 0, 0)], [(0, 1)]),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_which_send_became_which_recv(what: str) -> None:
    rows, expected = PROGRAMS[what]
    assert pairs(program(*rows)) == expected
    assert match(program(*rows)).unmatched.tolist() == []


def test_without_tags_the_order_alone_decides_and_messages_stand_by_the_time_of_sending() -> None:
    events = program(
        (0, "isend", 1, 1, 0), (0, "isend", 1, 2, 0), (1, "irecv", 0, 2, 0), (1, "irecv", 0, 1, 0)
    )
    assert pairs(events) == [(0, 3), (1, 2)]
    assert pairs(events, by_tag=False) == [(0, 2), (1, 3)]
    send, recv = OP_CODES["send"], OP_CODES["recv"]
    events = make_events(
        {
            "rank": [0, 0, 1, 1],
            "op": [send, recv, send, recv],
            "peer": [1, 1, 0, 0],
            "post_ns": [50, 60, 10, 20],
        }
    )
    assert match(events).src.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"), [(3, NONE, 3), (NONE, 5, 5), (3, 5, 3), (NONE, NONE, NONE)]
)
def test_stage_and_microbatch_are_the_senders_else_the_receivers(
    sender: int, receiver: int, expected: int
) -> None:
    columns = {"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0]}
    messages = match(
        make_events(columns | {"stage": [sender, receiver], "microbatch": [sender, receiver]})
    )
    assert (messages.stage.tolist(), messages.microbatch.tolist()) == ([expected], [expected])


def test_unmatched_operations_read_as_sentences() -> None:
    tables = Tables((Group("ring:2>3", (2, 3)),), (Payload("float32", (2,), 8),), (), ("ring.py",))
    columns = {
        "rank": [2],
        "op": [OP_CODES["isend"]],
        "peer": [3],
        "tag": [7],
        "group": [0],
        "payload": [0],
        "file": [0],
        "line": [12],
    }
    events = make_events(columns, tables)
    (operation,) = describe_unmatched(events, match(events))
    assert (
        repr(operation) == "rank 2: isend to 3 (ring:2>3, tag 7, 8 bytes) at ring.py:12 has no recv"
    )
    assert (operation.rank, operation.peer, operation.tag, operation.line, operation.status) == (
        2,
        3,
        7,
        12,
        "ok",
    )
    # until its source is known
    waiting = program((0, "send", 1, 0, 0), (1, "recv", ANY_SOURCE, 0, 0))
    assert (pairs(waiting), match(waiting).unmatched.tolist()) == ([], [0, 1])
    assert "from any rank" in repr(describe_unmatched(waiting, match(waiting))[1])


def test_a_message_never_meets_a_send_that_was_refused() -> None:
    """0.1.0 matched it: a caught send of a tensor that is not contiguous shifted all later ones."""
    columns = {
        "rank": [0, 0, 0, 1, 1],
        "op": [OP_CODES[name] for name in ("send", "send", "send", "recv", "recv")],
        "peer": [1, 1, 1, 0, 0],
        "tag": [0] * 5,
        "post_ns": [5, 300, 600, 0, 310],
        "wait_ns": [NONE, 300, 600, 0, 310],
        "done_ns": [6, 310, 610, 310, 610],
        "status": [STATUS_NAMES.index(name) for name in ("error", "ok", "ok", "ok", "ok")],
    }
    trace = Trace(make_events(columns), {"world_size": 2})
    assert list(zip(trace.messages.send.tolist(), trace.messages.recv.tolist(), strict=True)) == [
        (1, 3),
        (2, 4),
    ]
    assert trace.unmatched == []
    assert trace.waits.late_sender_ns.tolist() == [0, 0, 0, 300, 290]
    assert trace.filter(ranks=[0]).apart.tolist() == [1, 2]


def naive(events: Events, by_tag: bool) -> tuple[set[tuple[int, int]], list[int]]:
    """The rule, one event after the other.

    Each send joins its queue, each recv takes the first of its own. An operation that failed before
    its rank waited for it was refused when it was posted.
    """
    queues: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    found, alone = set(), []
    posted = [
        index
        for index in range(len(events))
        if STATUS_NAMES[events.status[index]] != "error" or events.wait_ns[index] >= 0
    ]
    for index in posted:
        if events.kind[index] == SEND:
            key = (
                events.group[index],
                events.rank[index],
                events.peer[index],
                events.tag[index] if by_tag else 0,
            )
            queues[key].append(index)
    for index in posted:
        if events.kind[index] == RECV:
            key = (
                events.group[index],
                events.peer[index],
                events.rank[index],
                events.tag[index] if by_tag else 0,
            )
            if events.peer[index] >= 0 and queues[key]:
                found.add((queues[key].popleft(), index))
            else:
                alone.append(index)
    return found, sorted([*alone, *(index for queue in queues.values() for index in queue)])


rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(SEND_OPS + RECV_OPS),
        st.integers(-2, 2),
        st.integers(-1, 1),
        st.integers(-1, 0),
        st.integers(1, 3),
        st.sampled_from([NONE, 0, 7]),
    ),
    max_size=60,
)


@given(rows, st.booleans())
def test_equals_the_naive_matcher(rows: list[tuple[int, ...]], by_tag: bool) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    names = ("rank", "op", "peer", "tag", "group", "status", "wait_ns")
    events = make_events({name: [row[column] for row in rows] for column, name in enumerate(names)})
    messages = match(events, by_tag=by_tag)
    found, alone = naive(events, by_tag)
    assert set(zip(messages.send.tolist(), messages.recv.tolist(), strict=True)) == found
    assert messages.unmatched.tolist() == alone
    assert np.array_equal(messages.src, events.rank[messages.send])
    assert np.array_equal(messages.dst, events.rank[messages.recv])


# (send), (recv) as (post, wait, done) -> late_sender and transfer of the recv, late_receiver and
# transfer of the send
CASES = {
    # send          10====50
    # recv  0=============50
    "late sender": ((10, 10, 50), (0, 0, 50), (10, 40, 0, 40)),
    # send  0=============50
    # recv          10====50
    "late receiver": ((0, 0, 50), (10, 10, 50), (0, 40, 10, 40)),
    # send  10====20
    # recv  0..........30=40     it computed while it could have waited
    "overlapped": ((10, 10, 20), (0, 30, 40), (0, 10, 0, 10)),
    # send  5..8====40
    # recv    20====30
    "posted early, waited for early": ((5, 8, 40), (20, 20, 30), (0, 10, 12, 20)),
    # send             30
    # recv  0=======20           it gave up before: the wait ends with it
    "done before the partner": ((30, 30, 40), (0, 0, 20), (20, 0, 0, 10)),
    "not done, and has waited for its late sender already": (
        (70, 70, NONE),
        (0, 20, NONE),
        (50, 0, 0, 0),
    ),
    "never waited, and was not blocked": ((70, NONE, NONE), (0, NONE, NONE), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_wait(case: str) -> None:
    send, recv, expected = CASES[case]
    post, wait, done = zip(send, recv, strict=True)
    columns = {"rank": [0, 1], "op": [OP_CODES["isend"], OP_CODES["irecv"]], "peer": [1, 0]}
    events = make_events(columns | {"post_ns": post, "wait_ns": wait, "done_ns": done})
    waits = split_waits(events, match(events))
    assert (
        waits.late_sender_ns[1],
        waits.transfer_ns[1],
        waits.late_receiver_ns[0],
        waits.transfer_ns[0],
    ) == expected
    assert (waits.late_receiver_ns[1], waits.late_sender_ns[0]) == (0, 0)
    assert waits.blocked_ns.tolist() == [
        NONE if end == NONE else end - begin for _, begin, end in (send, recv)
    ]


def test_without_a_partner_the_cause_is_unknown() -> None:
    events = make_events(
        {
            "rank": [0],
            "op": [OP_CODES["all_reduce"]],
            "post_ns": [0],
            "wait_ns": [5],
            "done_ns": [25],
        }
    )
    waits = split_waits(events, match(events))
    found = [waits.blocked_ns, waits.late_sender_ns, waits.late_receiver_ns, waits.transfer_ns]
    assert [column.tolist() for column in found] == [[20], [0], [0], [0]]


@given(any_events)
def test_the_parts_make_up_the_whole(events: Events) -> None:
    messages = match(events)
    waits = split_waits(events, messages)
    parts = waits.late_sender_ns + waits.late_receiver_ns + waits.transfer_ns
    assert min([0, *waits.late_sender_ns, *waits.late_receiver_ns, *waits.transfer_ns]) == 0
    matched = np.concatenate([messages.send, messages.recv])
    finished = matched[waits.blocked_ns[matched] != NONE]
    in_order = finished[events.done_ns[finished] >= events.wait_ns[finished]]
    assert np.array_equal(parts[in_order], waits.blocked_ns[in_order])
    assert not np.delete(parts, matched).any()


@pytest.mark.parametrize(
    ("done_ns", "early"), [(49, True), (50, False), (51, False), (NONE, False)]
)
def test_a_message_is_early_that_arrived_before_it_was_sent(done_ns: int, early: bool) -> None:
    columns = {"rank": [0, 1], "op": [OP_CODES["isend"], OP_CODES["irecv"]], "peer": [1, 0]}
    events = make_events(columns | {"post_ns": [50, 0], "done_ns": [90, done_ns]})
    assert match(events).early.tolist() == [early]


def calls_of_three(*rows: dict[str, Any]) -> Events:
    """Collectives posted, awaited and done at once.

    By default barriers of the world of ranks 0 to 2.
    """
    at = {"op": "barrier", "group": 0, "post_ns": 0, "status": OK}
    full = [{**at, "wait_ns": row.get("post_ns", 0), "done_ns": 100, **row} for row in rows]
    columns = {
        name: [OP_CODES[row[name]] if name == "op" else row[name] for row in full]
        for name in full[0]
    }
    tables = Tables(groups=(Group("world", (0, 1, 2)), Group("pair", (0, 1))))
    return make_events(columns, tables)


def test_which_collectives_are_one_call() -> None:
    refused = {"status": ERROR, "wait_ns": NONE}
    events = calls_of_three(
        {"rank": 0, "op": "barrier", "post_ns": 7},
        {"rank": 0, "op": "mark", "post_ns": 8},
        {"rank": 0, "group": 1, "post_ns": 9},
        {"rank": 0, "post_ns": 10},
        {"rank": 0, "group": NONE, "post_ns": 11},
        {"rank": 1, "post_ns": 1, **refused},
        {"rank": 1, "group": 1, "post_ns": 2},
        {"rank": 1, "post_ns": 3},
        {"rank": 1, "post_ns": 4, "status": IN_FLIGHT},
        {"rank": 2, "post_ns": 5},
    )
    calls = CollectiveCalls.of(events)
    members = {
        calls.events_of(call): (int(calls.last[call]), bool(calls.complete[call]))
        for call in range(len(calls.last))
    }
    assert members == {(0, 7, 9): (0, True), (3, 8): (3, False), (2, 6): (2, True)}
    assert calls.place.tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert [calls.call_of(one) for one in (1, 4, 5)] == [NONE] * 3
    assert calls.call_of(0) == calls.call_of(7) == calls.call_of(9) != calls.call_of(3)


def test_collectives_whose_call_was_left_out_take_no_part() -> None:
    events = calls_of_three(
        *({"rank": rank, "post_ns": turn} for rank in range(3) for turn in range(2))
    )
    assert len(CollectiveCalls.of(events).last) == 2
    calls = CollectiveCalls.of(events, apart=[0, 2, 4])
    assert (calls.event.tolist(), calls.place.tolist()) == ([1, 3, 5], [0, 0, 0])


@pytest.mark.parametrize(
    ("first", "length_ns"),
    [
        ({"post_ns": 10, "wait_ns": 30}, 20),  # from when it waited, until the last one came
        ({"post_ns": 10, "wait_ns": 30, "done_ns": 40}, 10),  # it was done before
        ({"post_ns": 10, "wait_ns": 70}, 0),  # the last one had come
        ({"post_ns": 10, "wait_ns": NONE}, 0),
        ({"post_ns": 10, "wait_ns": 30, "done_ns": NONE, "status": IN_FLIGHT}, 0),
    ],
)
def test_a_collective_waits_for_the_last_rank(first: dict[str, Any], length_ns: int) -> None:
    rows = ({"rank": 0, **first}, {"rank": 1, "post_ns": 50}, {"rank": 2, "post_ns": 20})
    assert wait_for_last(calls_of_three(*rows)).tolist() == [length_ns, 0, 30]
    assert wait_for_last(calls_of_three(*rows[:2])).tolist() == [0, 0]  # rank 2 never came
    assert wait_for_last(calls_of_three(*rows), apart=[0, 1, 2]).tolist() == [0, 0, 0]
