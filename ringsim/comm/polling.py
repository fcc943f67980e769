"""Notices a program that asks ``is_completed()`` of a message of Gloo again and again.

It stays False until somebody calls ``wait()``. A loop that nothing else can end is refused: at
once, or after a while where another thread might still wait for the message. Where the program may
turn to something else, it is warned.
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
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Work

from ringsim.comm.torch_private import is_message
from ringsim.state import OUR_THREADS
from ringsim.traces.sites import CallSites

__all__ = ["make_is_completed"]

_WARN_S: Final = 1.0
_THREADS_S: Final = 3.0  # for another thread to wait in
_RULE: Final = (
    "is_completed() of a message on Gloo must not be waited for, "
    "since it becomes true only in wait()"
)
_CURE: Final = "Call wait(), or wait(timedelta(...)) to give up after a while"
_ASKS: Final = re.compile(
    r"not [\w.\[\]]+\.is_completed\(\)|not all\(\(?(\w+)\.is_completed\(\) for \1 in [\w.]+\)?\)"
)
# and can end no loop
_IDLES: Final = re.compile(r"pass|\.\.\.|(time\.)?sleep\([\w.]+\)|\w+ \+= \d+|print\([^()]*\)")


def make_is_completed(
    sites: CallSites,
    pending: Container[Work],
    finish: Callable[[Work], None],
    refuse: Callable[[str, str], None] | None,
) -> Callable[[Work], bool]:
    """Makes the hook for ``Work.is_completed``.

    Args:
        sites: finds the user's line.
        pending: handles of operations of the host that nobody has waited for.
        finish: is called with a handle that is completed.
        refuse: raises an error, given the rule with what was got, and what to do; None where
            nothing is to be refused.
    """
    call = Work.is_completed
    asked: WeakKeyDictionary[Work, float] = WeakKeyDictionary()  # since when
    endless: dict[tuple[str, int], bool] = {}  # by the user's line
    # Python's own memory of warnings: one for each line
    warned: dict[str | tuple[str, type[Warning], int], int] = {}

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
            # an alarm is its limit
            if (
                endless[place]
                and (alone or asked_s > _THREADS_S)
                and not signal.getitimer(signal.ITIMER_REAL)[0]
            ):
                refuse(f"{_RULE}, got a loop that nothing else ends", _CURE)
            elif asked_s > _WARN_S:
                warnings.warn_explicit(
                    f"{_RULE}, got asked for {_WARN_S:.0f} s. {_CURE}.",
                    UserWarning,
                    *place,
                    registry=warned,
                )
        return False

    return is_completed


def _never_ends(file: str, line: int) -> bool:
    """Returns whether a line is the condition of a loop that only asks for completed messages.

    Such a loop may also sleep, count or print.
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
