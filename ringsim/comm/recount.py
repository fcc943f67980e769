"""Counts both sides of a channel anew before two operations are called a mismatch: a wrong accusation would end a correct program.

Which operation of the other rank belongs to which of this one is told by counting, while the other rank goes on. What it has posted may
still be refused, by the library or by a check, and then never was: the program may catch the error, and try again::

    other rank   all_gather (wrong list): posted ... refused     all_gather (right list): posted ...
    this rank                  looks here ^                      and again here ^: one operation too many was counted
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

import numpy as np

from ringsim.traces.events import COLLECTIVE, ERROR, IN_FLIGHT, NONE, OP_KINDS, RECORD, RECV, SEND
from ringsim.traces.parts import WORDS, Neighbour

__all__ = ["count_operations", "was_refused"]

# A refusal by the library comes 20 ms after the posting, the first in a process: it looks up the names of all functions on the stack. That
# takes longer where memory has to be read for it; waiting for a processor does not count. A message may be posted, and not waited for in a
# long time, without any refusal.
_PATIENCE_S: Final = {SEND: 0.5, RECV: 0.5, COLLECTIVE: 2.0}
_LOOK_EVERY_S: Final = 0.0005
_FOLLOWING: Final = 256  # records that are looked at


def was_refused(neighbour: Neighbour, at: int, kind: int) -> bool:
    """Tells whether an operation never reached the library; waits for what becomes of it where that is not decided yet.

    Args:
        neighbour: the rank that posted it.
        at: where its record begins.
        kind: SEND, RECV or COLLECTIVE.
    """
    since_s = time.monotonic() - neighbour.starved_s()
    while True:
        waited_s = time.monotonic() - neighbour.starved_s() - since_s  # before the records are read: this rank may be starved in between
        records = np.frombuffer(neighbour.view, RECORD)[at // WORDS : at // WORDS + _FOLLOWING]
        own = records["thread"] == records["thread"][0]
        # Its thread has posted more: the call has returned. That is looked at before the status, which a refusal writes first.
        goes_on = np.count_nonzero(own & (records["status"] != 0)) > 1
        waits, status = records["wait_ns"][0] != NONE, int(records["status"][0])
        if waits or goes_on or status != IN_FLIGHT or waited_s > _PATIENCE_S[kind]:
            return status == ERROR and not waits
        time.sleep(_LOOK_EVERY_S)


def count_operations(
    part: Neighbour, groups: Collection[int], kind: int, peer: int | None, tag: int | None, last: int | None = None
) -> int:
    """Counts the operations of a channel that were not refused.

    Args:
        part: of the rank that posted them.
        groups: that rank's numbers of the group.
        kind: SEND, RECV or COLLECTIVE.
        peer: the other side's global rank; None for collectives.
        tag: the messages' tag; None for collectives.
        last: where the record of the last one begins that counts; None for all there are.
    """
    records = np.frombuffer(part.view, RECORD)[: None if last is None else last // WORDS + 1]
    counts = (records["status"] != 0) & ~((records["status"] == ERROR) & (records["wait_ns"] == NONE))
    counts &= (OP_KINDS[records["op"]] == kind) & np.isin(records["group"], list(groups))
    if peer is not None:
        counts &= (records["peer"] == peer) & (records["tag"] == tag)
    return int(np.count_nonzero(counts))
