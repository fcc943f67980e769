"""Matching of sends and recvs, and the causes of blocked time, by hand and by a simple matcher."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from trace_file import ANY_SOURCE, NONE, OPS, STATUS, load_columns, make_trace

from ringsim import Trace

SENDS = ("send", "isend", "batch_isend", "send_object_list")
RECVS = ("recv", "irecv", "batch_irecv", "recv_object_list")
ROW = ("rank", "op", "peer", "tag", "group")
Rows = list[tuple[int, str, int, int, str]]


def program(rows: Rows, **metadata: Any) -> Trace:
    """Returns a trace of (rank, op, peer, tag, group), in posting order on each rank."""
    return make_trace([dict(zip(ROW, row, strict=True)) for row in rows], **metadata)


def pairs(trace: Trace) -> list[tuple[int, int]]:
    messages = trace.messages
    return sorted(zip(messages.send.tolist(), messages.recv.tolist(), strict=True))


def test_messages_of_one_tag_keep_their_order_and_groups_over_the_same_ranks_are_apart() -> None:
    sends: Rows = [(0, "isend", 1, tag, "world") for tag in (7, 9, 7)]
    recvs: Rows = [(1, "irecv", 0, tag, "world") for tag in (9, 7, 7)]
    assert pairs(trace := program(sends + recvs)) == [(0, 4), (1, 3), (2, 5)]
    assert trace.unmatched == []
    sends = [(0, "send", 1, 0, group) for group in ("ring:0>1", "ring:1>0")]
    recvs = [(1, "recv", 0, 0, group) for group in ("ring:1>0", "ring:0>1")]
    assert pairs(program(sends + recvs)) == [(0, 3), (1, 2)]


def test_nccl_ignores_tags_and_messages_stand_by_the_time_of_sending() -> None:
    rows = [(0, "isend", 1, tag, "world") for tag in (1, 2)]
    rows += [(1, "irecv", 0, tag, "world") for tag in (2, 1)]
    assert pairs(program(rows, backend="gloo")) == [(0, 3), (1, 2)]
    assert pairs(program(rows, backend="nccl")) == [(0, 2), (1, 3)]
    late, early = ({"rank": rank, "op": "send", "peer": 1 - rank} for rank in (0, 1))
    recvs = [{"rank": rank, "op": "recv", "peer": 1 - rank} for rank in (0, 1)]
    trace = make_trace([late | {"post_ns": 50}, early | {"post_ns": 10}, *recvs])
    assert trace.messages.src.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"), [(3, NONE, 3), (NONE, 5, 5), (3, 5, 3), (NONE, NONE, None)]
)
def test_stage_and_microbatch_are_the_senders_else_the_receivers(
    sender: int, receiver: int, expected: int | None
) -> None:
    send = {"rank": 0, "op": "send", "peer": 1, "stage": sender, "microbatch": sender}
    recv = {"rank": 1, "op": "recv", "peer": 0, "stage": receiver, "microbatch": receiver}
    (message,) = make_trace([send, recv]).messages
    assert (message.stage, message.microbatch) == (expected, expected)


def test_unmatched_operations_read_as_sentences() -> None:
    where = {"tag": 7, "group": "ring:2>3", "size_bytes": 8, "file": "ring.py", "line": 12}
    (lost,) = make_trace([{"rank": 2, "op": "isend", "peer": 3, **where}]).unmatched
    assert repr(lost) == "rank 2: isend to 3 (ring:2>3, tag 7, 8 bytes) at ring.py:12 has no recv"
    assert (lost.rank, lost.peer, lost.tag, lost.line, lost.status) == (2, 3, 7, 12, "ok")
    # until its source is known
    rows: Rows = [(0, "send", 1, 0, "world"), (1, "recv", ANY_SOURCE, 0, "world")]
    waiting = program(rows)
    assert (len(waiting.messages), [one.index for one in waiting.unmatched]) == (0, [0, 1])
    assert "from any rank" in repr(waiting.unmatched[1])


def test_a_message_never_meets_a_send_that_was_refused() -> None:
    """0.1.0 matched it: a caught send of a non-contiguous tensor shifted all later messages."""
    sends = [(5, NONE, 6), (300, 300, 310), (600, 600, 610)]
    rows = [{"rank": 0, "op": "send", "peer": 1, "times": times} for times in sends]
    rows[0]["status"] = "error"
    recvs = [(0, 0, 310), (310, 310, 610)]
    rows += [{"rank": 1, "op": "recv", "peer": 0, "times": times} for times in recvs]
    trace = make_trace(rows, world_size=2)
    assert (pairs(trace), trace.unmatched) == ([(1, 3), (2, 4)], [])
    assert trace.waits.late_sender_ns.tolist() == [0, 0, 0, 300, 290]
    assert trace.filter(ranks=[0]).apart.tolist() == [1, 2]


def naive(trace: Trace, by_tag: bool) -> tuple[set[tuple[int, int]], list[int]]:
    """Each send joins its queue, and each recv takes the first send of its own queue.

    An operation that failed before its rank waited for it was refused when it was posted.
    """
    queues: dict[tuple[object, ...], deque[int]] = defaultdict(deque)
    found, alone = set(), []
    posted = [
        (index, event, int(trace.events.peer[index]))
        for index, event in enumerate(trace)
        if event.status != "error" or event.wait_ns is not None
    ]
    for index, event, peer in posted:
        if event.kind == "send":
            key = (event.group, event.rank, peer, event.tag if by_tag else 0)
            queues[key].append(index)
    for index, event, peer in posted:
        if event.kind == "recv":
            mine = queues[event.group, peer, event.rank, event.tag if by_tag else 0]
            if peer >= 0 and mine:
                found.add((mine.popleft(), index))
            else:
                alone.append(index)
    return found, sorted([*alone, *(index for queue in queues.values() for index in queue)])


rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(SENDS + RECVS).map(OPS.index),
        st.integers(-2, 2),
        st.integers(-1, 1),
        st.integers(-1, 0),
        st.sampled_from(sorted(STATUS.values())),
        st.sampled_from([NONE, 0, 7]),
    ),
    min_size=1,
    max_size=60,
)


@given(rows, st.booleans())
def test_equals_the_naive_matcher(rows: list[tuple[int, ...]], by_tag: bool) -> None:
    columns = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    trace = load_columns(
        dict(zip((*ROW, "status", "wait_ns"), columns, strict=True)),
        {"groups": [{"name": "world", "ranks": [0, 1, 2]}]},
        backend="gloo" if by_tag else "nccl",
    )
    found, alone = naive(trace, by_tag)
    assert (set(pairs(trace)), trace.messages.unmatched.tolist()) == (found, alone)


# send and recv as (post, wait, done); then late_sender and transfer of the recv, late_receiver and
# transfer of the send
CASES = {
    "late sender": ((10, 10, 50), (0, 0, 50), (10, 40, 0, 40)),
    "late receiver": ((0, 0, 50), (10, 10, 50), (0, 40, 10, 40)),
    "overlapped with computing": ((10, 10, 20), (0, 30, 40), (0, 10, 0, 10)),
    "posted early, waited for early": ((5, 8, 40), (20, 20, 30), (0, 10, 12, 20)),
    "given up before the partner": ((30, 30, 40), (0, 0, 20), (20, 0, 0, 10)),
    "in flight, after a late sender": ((70, 70, NONE), (0, 20, NONE), (50, 0, 0, 0)),
    "never waited, and not blocked": ((70, NONE, NONE), (0, NONE, NONE), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_wait(case: str) -> None:
    send, recv, expected = CASES[case]
    row = {"rank": 0, "op": "isend", "peer": 1, "times": send}
    waits = make_trace([row, {"rank": 1, "op": "irecv", "peer": 0, "times": recv}]).waits
    of_recv = waits.late_sender_ns[1], waits.transfer_ns[1]
    assert (*of_recv, waits.late_receiver_ns[0], waits.transfer_ns[0]) == expected
    assert (waits.late_receiver_ns[1], waits.late_sender_ns[0]) == (0, 0)
    lasted = [NONE if done == NONE else done - wait for _, wait, done in (send, recv)]
    assert waits.blocked_ns.tolist() == lasted


@given(traces)
def test_the_parts_make_up_the_whole(trace: Trace) -> None:
    events, messages, waits = trace.events, trace.messages, trace.waits
    parts = np.stack([waits.late_sender_ns, waits.late_receiver_ns, waits.transfer_ns])
    assert (parts >= 0).all()
    matched = np.concatenate([messages.send, messages.recv])
    finished = matched[waits.blocked_ns[matched] != NONE]
    in_order = finished[events.done_ns[finished] >= events.wait_ns[finished]]
    assert np.array_equal(parts.sum(axis=0)[in_order], waits.blocked_ns[in_order])
    assert not np.delete(parts.sum(axis=0), matched).any(), "unmatched: no cause"


@pytest.mark.parametrize(
    ("done_ns", "early"), [(49, True), (50, False), (51, False), (NONE, False)]
)
def test_a_message_is_early_that_arrived_before_it_was_sent(done_ns: int, early: bool) -> None:
    send = {"rank": 0, "op": "isend", "peer": 1, "times": (50, NONE, 90)}
    recv = {"rank": 1, "op": "irecv", "peer": 0, "times": (0, NONE, done_ns)}
    assert make_trace([send, recv]).messages.early.tolist() == [early]
