"""Finds the user's line for an operation that is passed directly to a thread.

An example is ``pool.submit(dist.recv, tensor, 0)``, in which no frame of the thread belongs to the
user. So during recording, ringsim remembers the line that starts a thread, or passes a library
function to a thread.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringsim.comm.torch_private import Hook, Replacements
from ringsim.traces.events import NONE
from ringsim.traces.sites import CallSites


def make_replacements(sites: CallSites) -> Replacements:
    """Creates functions that remember these lines, and makes ``sites`` use them."""
    start = threading.Thread.start
    submit: Hook = ThreadPoolExecutor.submit
    to_thread: Hook = asyncio.to_thread
    # by the id of a thread, because a subclass may redefine equality
    started: dict[int, int] = {}
    running = threading.local()  # `place` is the line that passed the thread its function

    def run(place: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        outer, running.place = getattr(running, "place", NONE), place
        try:
            return function(*args, **kwargs)
        finally:
            running.place = outer

    def noted(function: Any) -> Any:
        code, frame = getattr(function, "__code__", None), sites.find(sys._getframe(2))
        if frame is None or (code is not None and sites.kind(code.co_filename) >= 0):
            return function  # the user's own function, which has lines of its own
        return functools.partial(run, sites.place(frame), function)

    def find() -> int:
        place, me = getattr(running, "place", NONE), threading.get_ident()
        if place != NONE:
            return place
        return next(
            (
                started.get(id(thread), NONE)
                for thread in threading.enumerate()
                if thread.ident == me
            ),
            NONE,
        )

    @functools.wraps(start)
    def start_thread(self: threading.Thread) -> None:
        frame = sites.find(sys._getframe(1))
        started[id(self)] = NONE if frame is None else sites.place(frame)
        start(self)

    @functools.wraps(submit)
    def submit_noted(self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, noted(fn), *args, **kwargs)

    @functools.wraps(to_thread)
    def to_thread_noted(func: Any, /, *args: Any, **kwargs: Any) -> Any:
        return to_thread(noted(func), *args, **kwargs)

    sites.find_handed_over = find
    return {
        (threading.Thread, "start"): start_thread,
        (ThreadPoolExecutor, "submit"): submit_noted,
        (asyncio, "to_thread"): to_thread_noted,
    }
