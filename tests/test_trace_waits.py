"""Why an operation was blocked, as staircases: each case draws its times and says what each part must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from random_traces import events as any_events

from ringsim.traces.events import NONE, OP_CODES, Events, make_events
from ringsim.traces.matching import Waits, match, split_waits


def message(send: tuple[int, int, int], recv: tuple[int, int, int]) -> Events:
    """One message from rank 0 to rank 1; each side as (post, wait, done)."""
    post, wait, done = zip(send, recv, strict=True)
    return make_events(
        {"rank": [0, 1], "op": [OP_CODES["isend"], OP_CODES["irecv"]], "peer": [1, 0], "post_ns": post, "wait_ns": wait, "done_ns": done}
    )


def split(events: Events) -> Waits:
    return split_waits(events, match(events))


# (send), (recv) -> late_sender of the recv, its transfer, late_receiver of the send, its transfer
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
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_wait(case: str) -> None:
    send, recv, expected = CASES[case]
    waits = split(message(send, recv))
    assert (waits.late_sender_ns[1], waits.transfer_ns[1], waits.late_receiver_ns[0], waits.transfer_ns[0]) == expected
    assert (waits.late_receiver_ns[1], waits.late_sender_ns[0]) == (0, 0)


def test_a_recv_that_is_not_done_has_waited_for_its_late_sender_already() -> None:
    waits = split(message((70, 70, NONE), (0, 20, NONE)))
    assert waits.blocked_ns.tolist() == [NONE, NONE]
    assert waits.late_sender_ns.tolist() == [0, 50]
    assert waits.transfer_ns.tolist() == [0, 0]


def test_who_never_waited_was_not_blocked() -> None:
    waits = split(message((70, NONE, NONE), (0, NONE, NONE)))
    assert waits.late_sender_ns.tolist() == [0, 0]
    assert waits.blocked_ns.tolist() == [NONE, NONE]


def test_without_a_partner_the_cause_is_unknown() -> None:
    events = make_events({"rank": [0], "op": [OP_CODES["all_reduce"]], "post_ns": [0], "wait_ns": [5], "done_ns": [25]})
    waits = split(events)
    assert waits.blocked_ns.tolist() == [20]
    assert (waits.late_sender_ns.tolist(), waits.late_receiver_ns.tolist(), waits.transfer_ns.tolist()) == ([0], [0], [0])


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
