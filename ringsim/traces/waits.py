"""Why an operation was blocked: its partner came late, or the bytes were on their way.

The time from wait to done of a matched operation splits in two::

    recv   post ...... wait =================== done
    send                       post                     the receiver waited for a late sender until here;
                                |---------------|       from here on it is transfer

A send that waits for its recv to be posted splits in the same way, into late receiver and transfer.

On NCCL wait and done are those of the program's stream, and post is the program's own: the transfer then includes the time in which the
partner's GPU had other work to do before it came to what its program had posted.

Source:
    F. Wolf et al., "Usage of the SCALASCA toolset for scalable performance analysis of large-scale parallel applications", 2008: the
    wait states "late sender" and "late receiver". ringsim counts from the moment at which the program began to wait (Scalasca's enter),
    so that time in which an asynchronous operation overlapped with computing is no wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringsim.traces.events import NONE, Events, Ints
from ringsim.traces.matching import Messages

__all__ = ["Waits", "split_waits"]


@dataclass(frozen=True, eq=False)
class Waits:
    """How long each event was blocked, and why: int64 columns in ns, as long as the events.

    For a matched operation that is done, ``late_sender_ns + late_receiver_ns + transfer_ns == blocked_ns``. Operations without a
    partner, collectives, spans and marks have 0 in the three parts: nothing is known of their causes here.

    Attributes:
        blocked_ns: from wait to done; -1 while it is not done, and where nobody waited.
        late_sender_ns: of a recv, how long it was blocked before its send was posted.
        late_receiver_ns: of a send, how long it was blocked before its recv was posted.
        transfer_ns: the rest; 0 while it is not done.
    """

    blocked_ns: Ints
    late_sender_ns: Ints
    late_receiver_ns: Ints
    transfer_ns: Ints


def split_waits(events: Events, messages: Messages) -> Waits:
    """Splits the blocked time of every event.

    Args:
        events: the events.
        messages: their messages, as ``match(events)`` returns them.

    Returns:
        The parts, one row an event.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.matching import match
        >>> events = make_events({
        ...     "rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0], "group": [0, 0], "tag": [0, 0],
        ...     "post_ns": [500, 100], "wait_ns": [500, 100], "done_ns": [900, 950],
        ... })
        >>> waits = split_waits(events, match(events))
        >>> waits.late_sender_ns.tolist(), waits.transfer_ns.tolist()  # rank 1 waited 400 ns for rank 0 to begin
        ([0, 400], [400, 450])

    Source:
        Scalasca's patterns "late sender" and "late receiver", see the module.
    """
    waited = events.wait_ns != NONE
    blocked = np.where(waited & (events.done_ns != NONE), np.maximum(events.done_ns - events.wait_ns, 0), NONE)
    late_sender = np.zeros(len(events), dtype=np.int64)
    late_receiver = np.zeros(len(events), dtype=np.int64)
    transfer = np.zeros(len(events), dtype=np.int64)
    late_sender[messages.recv] = _late(events, messages.recv, messages.send)
    late_receiver[messages.send] = _late(events, messages.send, messages.recv)
    matched = np.concatenate([messages.send, messages.recv])
    transfer[matched] = np.maximum(blocked[matched] - late_sender[matched] - late_receiver[matched], 0)
    return Waits(blocked, late_sender, late_receiver, transfer)


def _late(events: Events, waiter: Ints, partner: Ints) -> Ints:
    """How long each ``waiter`` was blocked before its ``partner`` was posted, in ns; one that is not done may be blocked still."""
    wait, done = events.wait_ns[waiter], events.done_ns[waiter]
    posted = events.post_ns[partner]
    until = np.where(done == NONE, posted, np.minimum(posted, done))
    return np.where(wait == NONE, 0, np.maximum(until - wait, 0))
