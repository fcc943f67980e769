"""Which send became which recv.

A message is a send and a recv that met. On one group, from one source to one destination and under one tag, messages do not overtake
each other, so the k-th send meets the k-th recv::

    rank 0 posts  send#0(tag 7)  send#1(tag 7)  send#2(tag 9)
                       |              |              |
    rank 1 posts  recv#0(tag 7)  recv#1(tag 7)       x          tag 9: nobody received it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_NAMES, RECV, SEND, STATUS_NAMES, Events, Ints

__all__ = ["Messages", "Unmatched", "describe_unmatched", "match", "number_places", "number_rows", "refused"]


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of a run as columns: numpy arrays of one length, ordered by the time at which the send was posted.

    Attributes:
        src: global rank of the sender (int32).
        dst: global rank of the receiver (int32).
        tag: tag of the message, as the sender gave it (int32).
        group: number in ``events.tables.groups`` (int32).
        payload: number in ``events.tables.payloads``, the sender's (int32).
        stage: pipeline stage, the sender's where it has one, else the receiver's; -1 for none (int32).
        microbatch: the same for the microbatch (int32).
        send: index of the send among the events (int64).
        recv: index of the recv among the events (int64).
        unmatched: indices of the sends and recvs that have no partner, ascending (int64).
    """

    src: Ints
    dst: Ints
    tag: Ints
    group: Ints
    payload: Ints
    stage: Ints
    microbatch: Ints
    send: Ints
    recv: Ints
    unmatched: Ints

    def __len__(self) -> int:
        """Returns the number of messages."""
        return len(self.src)


@dataclass(frozen=True, repr=False)
class Unmatched:
    """One operation whose other side was never seen; printing it gives a sentence.

    Attributes:
        index: its place among the events.
        rank: who posted it.
        op: as torch spells it.
        peer: the global rank at the other side, -2 for "from any source".
        group: name of the group.
        tag: tag of the message.
        size_bytes: size of the message.
        file: source file, empty where unknown.
        line: source line, -1 where unknown.
        status: "ok", "in_flight" or "error".
    """

    index: int
    rank: int
    op: str
    peer: int
    group: str
    tag: int
    size_bytes: int
    file: str
    line: int
    status: str

    def __repr__(self) -> str:
        """Returns a sentence such as ``rank 2: isend to 3 (ring:2>3, tag 7, 8 bytes) at ring.py:12 has no recv``."""
        sends = "send" in self.op
        peer = "any rank" if self.peer == ANY_SOURCE else str(self.peer)
        place = f" at {self.file}:{self.line}" if self.file else ""
        where = f"{self.group}, " if self.group else ""
        what = f"{self.op} {'to' if sends else 'from'} {peer} ({where}tag {self.tag}, {self.size_bytes} bytes){place}"
        return f"rank {self.rank}: {what} has no {'recv' if sends else 'send'}"


def match(events: Events, *, by_tag: bool = True) -> Messages:
    """Pairs sends with recvs.

    Per (group, source, destination, tag) the k-th send meets the k-th recv, in the order in which each rank posted them. A recv from
    any source takes part once its source is known, that is when it is done; until then it is unmatched.

    Args:
        events: events in the order of posting, as ``Events`` promises.
        by_tag: False for a backend that ignores tags (NCCL): there the order alone decides.

    Returns:
        The messages, and the indices of the operations without a partner.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> send, recv = OP_CODES["isend"], OP_CODES["irecv"]
        >>> events = make_events(
        ...     {"rank": [0, 0, 1], "op": [send, send, recv], "group": [0, 0, 0], "peer": [1, 1, 0], "tag": [7, 9, 9]}
        ... )
        >>> messages = match(events)
        >>> messages.send.tolist(), messages.recv.tolist(), messages.unmatched.tolist()
        ([1], [2], [0])
    """
    kind = events.kind
    sends = np.flatnonzero(kind == SEND)
    recvs = np.flatnonzero(kind == RECV)
    known = events.peer[recvs] >= 0
    recvs, unknown = recvs[known], recvs[~known]

    key = number_rows(
        np.concatenate([events.group[sends], events.group[recvs]]),
        np.concatenate([events.rank[sends], events.peer[recvs]]),
        np.concatenate([events.peer[sends], events.rank[recvs]]),
        np.concatenate([events.tag[sends], events.tag[recvs]]) if by_tag else None,
    )
    send_key, recv_key = key[: len(sends)], key[len(sends) :]
    count = int(key.max(initial=-1)) + 1
    send_order, send_meets = _first_of_each(send_key, np.bincount(recv_key, minlength=count))
    recv_order, recv_meets = _first_of_each(recv_key, np.bincount(send_key, minlength=count))
    # Both sides are now sorted by key and then by posting, and hold equally many of each key: they pair off one by one.
    send = sends[send_order[send_meets]]
    recv = recvs[recv_order[recv_meets]]
    alone = np.concatenate([sends[send_order[~send_meets]], recvs[recv_order[~recv_meets]], unknown])

    by_time = np.lexsort((send, events.post_ns[send]))
    send, recv = send[by_time], recv[by_time]
    stage = np.where(events.stage[send] != NONE, events.stage[send], events.stage[recv])
    microbatch = np.where(events.microbatch[send] != NONE, events.microbatch[send], events.microbatch[recv])
    return Messages(
        src=events.rank[send],
        dst=events.rank[recv],
        tag=events.tag[send],
        group=events.group[send],
        payload=events.payload[send],
        stage=stage,
        microbatch=microbatch,
        send=send,
        recv=recv,
        unmatched=np.sort(alone),
    )


def describe_unmatched(events: Events, messages: Messages) -> list[Unmatched]:
    """Returns the operations without a partner, in the order of the events, in readable form."""
    tables, sizes = events.tables, events.size_bytes
    return [
        Unmatched(
            index=index,
            rank=int(events.rank[index]),
            op=OP_NAMES[events.op[index]],
            peer=int(events.peer[index]),
            group=tables.groups[events.group[index]].name if events.group[index] != NONE else "",
            tag=int(events.tag[index]),
            size_bytes=int(sizes[index]),
            file=tables.files[events.file[index]] if events.file[index] != NONE else "",
            line=int(events.line[index]),
            status=STATUS_NAMES[events.status[index]],
        )
        for index in messages.unmatched.tolist()
    ]


def number_rows(*columns: Ints | None) -> Ints:
    """Numbers the distinct rows of ``columns`` from 0 (int64); a column of None is left out.

    Example:
        >>> import numpy as np
        >>> number_rows(np.array([5, 5, 2]), np.array([1, 1, 1])).tolist()
        [1, 1, 0]
    """
    key = np.zeros(0, dtype=np.int64)
    for column in columns:
        if column is None:
            continue
        values, codes = np.unique(column, return_inverse=True)
        if len(key) == 0:
            key = codes.astype(np.int64)
        else:  # both factors are at most the number of rows, so their product cannot overflow
            _, key = np.unique(key * len(values) + codes, return_inverse=True)
    return key


def number_places(key: Ints) -> Ints:
    """Numbers equal keys 0, 1, 2, ... in the order in which they stand.

    Example:
        >>> number_places(np.array([7, 7, 4, 7])).tolist()
        [0, 1, 0, 2]
    """
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    places = np.empty(len(key), dtype=np.int64)
    places[order] = np.arange(len(key)) - np.searchsorted(ordered, ordered)
    return places


def refused(events: Events) -> Ints:
    """Marks the operations that raised when they were posted: they never reached the wire, and take no place among the others."""
    mask: Ints = (events.status == ERROR) & (events.wait_ns == NONE)
    return mask


def _first_of_each(key: Ints, allowed: Ints) -> tuple[Ints, Ints]:
    """Sorts ``key`` stably and marks, of each key k, the first ``allowed[k]``: returns the order and the marks in that order."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    place = np.arange(len(key)) - np.searchsorted(ordered, ordered)  # 0, 1, 2, ... within each key
    return order, place < allowed[ordered]
