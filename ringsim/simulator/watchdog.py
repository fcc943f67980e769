"""Detects simulated ranks that wait inside C++ for other ranks, and so cannot give way.

Such a wait would silently stop the clock and all ranks forever. A thread therefore watches the rank
that holds the baton. If the rank's thread has slept for some seconds without using the CPU, the
process reports the rank and ends. This applies to sleeping in torch code, on a lock, or for a
different thread although the worker has no other thread. It does not apply to a worker that sleeps
in ``time.sleep``, or that waits for its own thread or process.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from ringsim.launch.threads import waits_without_end
from ringsim.simulator.clock import Clock, Rank
from ringsim.state import OUR_THREADS, start_thread
from ringsim.traces.frames import current_frames

_LOOK_S = 0.5
_ASLEEP_S = 4.0
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_PYTHON = os.path.dirname(os.__file__) + os.sep


def watch(clock: Clock) -> Callable[[], None]:
    """Starts watching a clock's ranks, and returns a function that stops watching."""
    over = threading.Event()
    start_thread("watchdog", _look, clock, over)
    return over.set


def _look(clock: Clock, over: threading.Event) -> None:
    before, since_s = None, time.monotonic()
    while not over.wait(_LOOK_S):
        rank = clock.current
        now = clock.switches, _used_time(rank.native_thread)
        if now != before or not _is_stuck(rank):
            before, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > _ASLEEP_S:
            _report(clock)


def _used_time(thread: int) -> tuple[str, ...]:
    """Returns a thread's CPU time in ticks, or () if the system hides it."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()
    return tuple(fields[11:13])


def _frame_of(thread: int) -> FrameType | None:
    return current_frames().get(thread)


def _is_stuck(rank: Rank) -> bool:
    """Returns whether a rank's thread is sleeping in a place where the rank cannot give way."""
    frame = _frame_of(rank.thread)
    if frame is None:
        return False
    file = frame.f_code.co_filename
    if file.startswith(_OF_TORCH):
        return True
    if file.startswith(_OF_PYTHON):
        return waits_without_end(rank.native_thread) is True and not _has_threads(rank.clock)
    return "futex" in _channel_of(rank.native_thread)


def _has_threads(clock: Clock) -> bool:
    """Returns whether workers have started threads that are still alive."""
    ranks = {rank.thread for rank in clock.ranks}
    return any(
        thread.ident not in ranks
        and thread is not threading.main_thread()
        and not thread.name.startswith(OUR_THREADS)
        for thread in threading.enumerate()
    )


def _channel_of(thread: int) -> str:
    """Returns the kernel function in which a thread is sleeping, or "" if the system hides it."""
    try:
        return Path(f"/proc/self/task/{thread}/wchan").read_text()
    except OSError:
        return ""


def _report(clock: Clock) -> None:
    rank = clock.current
    frame = _frame_of(rank.thread)
    stack = traceback.extract_stack(frame)
    libraries = _OF_TORCH, _OF_PYTHON
    users = [place for place in stack if not place.filename.startswith(libraries)]
    where, user = stack[-1], (users or stack)[-1]
    called = "" if where is user else f", called by {_name(user)}"
    clock.give_up(
        f"rank {rank.number} waits in {_name(where)}{called}, where a simulated rank cannot let "
        "the other ranks run. Run the program on real ranks with ringsim.trace."
    )


def _name(place: traceback.FrameSummary) -> str:
    return f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
