"""What ranks and their watcher tell each other.

Over a channel in ranks that ringsim starts (``supervisor``), over named pipes in others
(``joined``). The words are the same::

    watcher                                      rank
    -------                                      ----
    ASK, of ranks that seem stuck  ----------->  looks at its threads
                                   <-----------  ASK, what they do
    WAKE, after a verdict          ----------->  shuts its connections, so that its wait ends
    SHUT                           ----------->  the same, though it does not wait: its next
                                                 operation ends it
    OVER, the program caught that  ----------->  those operations have failed
    WHERE, before ranks are ended  ----------->  looks at its main thread
                                   <-----------  WHERE, the user's line
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringsim.diagnose.failure import describe_unfinished
from ringsim.launch.system import look_at_living
from ringsim.launch.threads import Place, find_place, list_threads

ASK: Final = "threads?"
WHERE: Final = "where?"
WAKE: Final = "wake"
SHUT: Final = "shut"
OVER: Final = "over"

# how long ranks have to say where they are: the machine may be busy, and C++ may hold the
# interpreter
ANSWER_S: Final = 1.0
WAKE_S: Final = 2.0  # how long a rank has to raise after its connections are shut


def answer(question: str) -> Any:
    """Returns a rank's answer to ``ASK`` or ``WHERE``, as plain data."""
    return tuple(list_threads()) if question == ASK else find_place()


def list_unfinished(
    pids: Mapping[int, int],
    tell: Callable[[int, str], None],
    hear: Callable[[float], Mapping[int, Place | None]],
) -> list[dict[str, Any]]:
    """Returns what ranks are doing that are still running; blocks for ``ANSWER_S`` at most.

    Args:
        pids: by rank, its process.
        tell: sends a word to a rank.
        hear: waits for answers, for so many seconds at most; returns the places that have come.

    Returns:
        As ``describe_unfinished`` says it.
    """
    looked = {rank: look_at_living(pid) for rank, pid in pids.items()}
    doing = {rank: process.doing for rank, process in looked.items() if process is not None}
    asked = {rank for rank, word in doing.items() if word != "stopped"}
    for rank in asked:
        tell(rank, WHERE)
    places: dict[int, Place | None] = {}
    deadline = time.monotonic() + ANSWER_S
    while asked - places.keys() and (left_s := deadline - time.monotonic()) > 0:
        places |= hear(left_s)
    return [describe_unfinished(rank, word, places.get(rank)) for rank, word in doing.items()]
