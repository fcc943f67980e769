"""Detects loops that poll a Gloo message's ``is_completed()``.

For such a message, ``is_completed()`` returns False until the program calls ``wait()``. A loop that
cannot end in any other way raises an error, either immediately, or after a while if another thread
might still wait for the message. Other programs get a warning.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Container
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Work

from ringsim.comm.torch_private import is_message
from ringsim.state import OUR_THREADS
from ringsim.traces.sites import CallSites

_WARN_S = 1.0
_THREADS_S = 3.0  # the time for another thread to begin its wait
_RULE = "with Gloo, a message's is_completed() becomes true only in wait()"
_CURE = "Call wait(), or wait(timedelta(...)) to give up after a while"
_ASKS = re.compile(
    r"not [\w.\[\]]+\.is_completed\(\)|not all\(\(?(\w+)\.is_completed\(\) for \1 in [\w.]+\)?\)"
)
# statements that cannot end a loop
_IDLES = re.compile(r"pass|\.\.\.|(time\.)?sleep\([\w.]+\)|\w+ \+= \d+|print\([^()]*\)")


def make_is_completed(
    sites: CallSites,
    pending: Container[Work],
    finish: Callable[[Work], None],
    refuse: Callable[[str, str], None] | None,
) -> Callable[[Work], bool]:
    """Creates the hook for ``Work.is_completed``.

    Args:
        sites: the finder of the user's line.
        pending: the handles of the host's operations that have not been waited for.
        finish: a function that is called with a completed handle.
        refuse: a function that raises an error, given the message and the remedy; None if nothing
            is checked.
    """
    call = Work.is_completed
    asked: WeakKeyDictionary[Work, float] = WeakKeyDictionary()  # the time of the first call
    endless: dict[tuple[str, int], bool] = {}  # by the user's line
    # Python's registry of warnings: one warning per line
    warned: dict[Any, int] = {}

    @functools.wraps(call)
    def is_completed(self: Work) -> bool:
        if call(self):
            finish(self)
            return True
        since_s = asked.get(self)
        if since_s is None:
            asked[self] = time.monotonic()
        elif (
            refuse is not None
            and (self in pending and is_message(self) and "gloo" in dist.get_backend())
            and sites.kind(sys._getframe(1).f_code.co_filename) >= 0
        ):
            place = sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno
            if place not in endless:
                endless[place] = _never_ends(*place)
            asked_s = time.monotonic() - since_s
            alone = (
                sum(not thread.name.startswith(OUR_THREADS) for thread in threading.enumerate())
                == 1
            )
            # an alarm would end the loop
            if (
                endless[place]
                and (alone or asked_s > _THREADS_S)
                and not signal.getitimer(signal.ITIMER_REAL)[0]
            ):
                refuse(f"{_RULE}, so this loop never ends", _CURE)
            elif asked_s > _WARN_S:
                warnings.warn_explicit(
                    f"{_RULE}, and this line has been polling for {_WARN_S:.0f} s. {_CURE}.",
                    UserWarning,
                    *place,
                    registry=warned,
                )
        return False

    return is_completed


def _never_ends(file: str, line: int) -> bool:
    """Returns whether a line is the condition of a loop that does nothing but poll messages.

    The loop may also sleep, count or print.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return False
    loops = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and node.test.lineno <= line <= (node.test.end_lineno or 0)
    )
    return any(
        _ASKS.fullmatch(ast.unparse(loop.test))
        and all(_IDLES.fullmatch(ast.unparse(one)) for one in loop.body)
        for loop in loops
    )
