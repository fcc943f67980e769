"""The messages that ranks and their watcher exchange.

They are sent over a channel in ranks started by ringsim (``supervisor``), and over named pipes in
others (``joined``)::

    watcher                                      rank
    -------                                      ----
    ASK, of ranks that seem stuck  ----------->  looks at its threads
                                   <-----------  ASK, a report on them
    WAKE, after a verdict          ----------->  shuts its connections, so that its wait ends
    SHUT                           ----------->  does the same without a wait: its next operation
                                                 fails
    OVER, the error was caught     ----------->  marks those operations as failed
    WHERE, before ranks are ended  ----------->  looks at its main thread
                                   <-----------  WHERE, the user's line
    STOP, when a call has failed   ----------->  shuts its connections, and interrupts the program
                                   <-----------  IDLE, at the end of a session's call
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ringsim.diagnose.failure import describe_unfinished
from ringsim.launch.system import look_at_living
from ringsim.launch.threads import Places, find_place, list_threads

Ends = list[dict[str, Any]]  # the ends or activities of ranks, as a trace stores them
ASK = "threads?"
WHERE = "where?"
WAKE = "wake"
SHUT = "shut"
OVER = "over"
STOP = "stop"
IDLE = "idle"
VARIABLES = "variables"

# time for ranks to report their places: the machine may be busy, and C++ may hold the interpreter
ANSWER_S = 1.0
WAKE_S = 2.0  # time for a rank to raise after its connections are shut


def answer(question: str) -> Any:
    """Returns a rank's answer to ``ASK`` or ``WHERE``, as plain data."""
    return tuple(list_threads()) if question == ASK else find_place()


def list_unfinished(
    pids: Mapping[int, int],
    tell: Callable[[int, str], None],
    hear: Callable[[float], Places],
) -> Ends:
    """Returns the activities of running ranks; blocks for at most ``ANSWER_S``.

    Args:
        pids: the processes by rank.
        tell: a function that sends a message to a rank.
        hear: a function that waits for answers, for at most the given seconds, and returns the
            places that have arrived.

    Returns:
        The activities, as returned by ``describe_unfinished``.
    """
    doing = {rank: process.doing for rank, pid in pids.items() if (process := look_at_living(pid))}
    asked = {rank for rank, word in doing.items() if word != "stopped"}
    for rank in asked:
        tell(rank, WHERE)
    places: Places = {}
    deadline = time.monotonic() + ANSWER_S
    while asked - places.keys() and (left_s := deadline - time.monotonic()) > 0:
        places |= hear(left_s)
    return [describe_unfinished(rank, word, places.get(rank)) for rank, word in doing.items()]
