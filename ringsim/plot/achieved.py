"""What the messages of a trace achieved: a bandwidth for each, and whether it could have been more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.traces.events import NONE, OK

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["Achieved", "achieved"]

LATE: Final = 0.05  # of a message's time: with so much of it unwatched, the bandwidth may be that much higher
STEPS: Final = 100  # to a factor of ten in time: points that are closer are one point in a picture


@dataclass(frozen=True, eq=False)
class Achieved:
    """What messages achieved: numpy arrays of one length.

    A message's time is from the moment at which both sides have posted it to the moment at which the receiver knows that it is there. Where
    the receiver began to wait only later, the message may have arrived in between: its bandwidth is a lower bound.

    Attributes:
        size_bytes: size of each message (int64).
        time_us: how long it took (float64).
        gb_per_s: size by time (float64).
        is_bound: whether that is only a lower bound (bool).
        empty: messages of 0 bytes, which have no bandwidth and are left out.
        unfinished: messages that never arrived, left out, too.
        queued: messages of NCCL, left out: a wait on them ends when the GPU has been told, and says nothing of the bytes.
    """

    size_bytes: Any
    time_us: Any
    gb_per_s: Any
    is_bound: Any
    empty: int
    unfinished: int
    queued: int

    def __len__(self) -> int:
        """Returns the number of messages."""
        return len(self.size_bytes)

    def points(self) -> Achieved:
        """Returns each point of the picture once, however many messages lie on it."""
        step = np.round(np.log10(self.time_us) * STEPS).astype(np.int64) + 2**11  # 10**-20 to 10**20 us
        _, first = np.unique((self.size_bytes << 13) + (step << 1) + self.is_bound, return_index=True)
        return Achieved(self.size_bytes[first], self.time_us[first], self.gb_per_s[first], self.is_bound[first], 0, 0, 0)


def achieved(trace: Trace) -> Achieved:
    """Reckons what the messages of a trace achieved.

    Args:
        trace: any trace.

    Returns:
        One row a message that arrived.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events({
        ...     "rank": [0, 1], "op": [OP_CODES["isend"], OP_CODES["irecv"]], "peer": [1, 0], "group": [0, 0], "tag": [0, 0],
        ...     "payload": [0, 0], "post_ns": [0, 1000], "wait_ns": [0, 9000], "done_ns": [11000, 11000],
        ... }, Tables(payloads=(Payload("uint8", (20_000,), 20_000),)))
        >>> found = achieved(Trace(events, {}))  # both had posted it at 1 us; from 9 us on the receiver watched
        >>> found.gb_per_s.tolist(), found.is_bound.tolist()
        ([2.0], [True])
    """
    events, messages = trace.events, trace.messages
    send, recv = messages.send, messages.recv
    start, end, watched = np.maximum(events.post_ns[send], events.post_ns[recv]), events.done_ns[recv], events.wait_ns[recv]
    sizes = events.size_bytes[send]
    queued = trace.metadata.get("backend") == "nccl"
    arrived = (events.status[recv] == OK) & (end != NONE) & (watched != NONE) & (end > start)
    drawn = arrived & (sizes > 0) & (not queued)
    time_ns = (end - start)[drawn]
    unwatched_ns = np.maximum(watched - start, 0)[drawn]
    return Achieved(
        sizes[drawn], time_ns * 1e-3, sizes[drawn] / time_ns, unwatched_ns > LATE * time_ns,
        0 if queued else int(np.count_nonzero(arrived & (sizes <= 0))), 0 if queued else int(np.count_nonzero(~arrived)),
        len(messages) if queued else 0,
    )  # fmt: skip
