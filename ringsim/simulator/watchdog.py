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

from ringsim.comm.torch_private import OF_TORCH
from ringsim.launch.threads import waits_without_end
from ringsim.simulator.clock import Clock, Rank
from ringsim.state import OUR_THREADS
from ringsim.traces.frames import current_frames
from ringsim.traces.sites import PYTHON

_LOOK_S = 0.5
_ASLEEP_S = 4.0


def watch(clock: Clock) -> Callable[[], None]:
    """Starts watching a clock's ranks, and returns a function that stops watching."""
    over = threading.Event()
    threading.Thread(target=_look, args=(clock, over), name="ringsim-watchdog", daemon=True).start()
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


def _used_time(thread: int) -> list[str]:
    """Returns a thread's CPU time in ticks, or [] if the system hides it."""
    return _read(thread, "stat").rpartition(")")[2].split()[11:13]


def _read(thread: int, name: str) -> str:
    """Returns a file about a thread, or "" if the system hides it."""
    try:
        return Path(f"/proc/self/task/{thread}/{name}").read_text()
    except OSError:
        return ""


def _is_stuck(rank: Rank) -> bool:
    """Returns whether a rank's thread is sleeping in a place where the rank cannot give way."""
    frame = current_frames().get(rank.thread)
    if frame is None:
        return False
    file = frame.f_code.co_filename
    if file.startswith(OF_TORCH):
        return True
    if file.startswith(PYTHON):
        return waits_without_end(rank.native_thread) is True and not _has_threads(rank.clock)
    return "futex" in _read(rank.native_thread, "wchan")  # the kernel function where it sleeps


def _has_threads(clock: Clock) -> bool:
    """Returns whether workers have started threads that are still alive."""
    ranks = {rank.thread for rank in clock.ranks}
    return any(
        thread.ident not in ranks
        and thread is not threading.main_thread()
        and not thread.name.startswith(OUR_THREADS)
        for thread in threading.enumerate()
    )


def _report(clock: Clock) -> None:
    rank = clock.current
    stack = traceback.extract_stack(current_frames().get(rank.thread))
    libraries = OF_TORCH, PYTHON
    users = [place for place in stack if not place.filename.startswith(libraries)]
    where, user = stack[-1], (users or stack)[-1]
    called = "" if where is user else f", called by {_name(user)}"
    clock.give_up(
        f"rank {rank.number} waits in {_name(where)}{called}, where a simulated rank cannot let "
        "the other ranks run. Run the program on real ranks with ringsim.trace."
    )


def _name(place: traceback.FrameSummary) -> str:
    return f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
