"""Which exception made a rank fail, of those that hang together by ``__cause__`` and ``__context__``.

Oldest first, a chain may read in three ways::

    connection lost -> step failed                the rank suffers from another's failure, whatever it made of it: an echo
    nan loss -> step failed                       it failed by itself
    nan loss -> connection lost, or a verdict     it failed, and a ``finally`` on the way out waited in vain: what failed comes first

An error of torch is told from one of the user's that says the same by where it was raised, not by its text alone.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from ringsim.errors import RingError
from ringsim.traces.lost_peers import LOST_PEER
from ringsim.traces.tables import readable

__all__ = ["OWN", "PEER", "WAIT", "Cause", "find_cause", "is_internal", "text_of"]

OWN: Final = ""
PEER: Final = "peer"  # others failed, or can never go on, and that ended a wait of this rank
WAIT: Final = "wait"  # a wait ended at its limit: what it was for says more than that it ended
_TIMED_OUT: Final = "Timed out waiting"  # how Gloo words that
_PASSED_ON: Final = "Caught "  # how torch begins what it passes on of another process or thread: an error of whatever that ran
_OURS: Final = Path(__file__).parent.parent


@dataclass(frozen=True)
class Cause:
    """Why a rank failed.

    Attributes:
        error: the exception that says so.
        echo: what it is an echo of: ``OWN``, nothing; ``PEER``; ``WAIT``.
        after: the exception that came before it and led to it, if any.
        pending: whether it was on its way out when a wait that came in between ended in vain.
    """

    error: BaseException
    echo: str = OWN
    after: BaseException | None = None
    pending: bool = False


def find_cause(error: BaseException) -> Cause:
    """Returns why a rank failed.

    Args:
        error: what came out of its worker, with its traceback.

    Example:
        >>> def fail():
        ...     try:
        ...         raise KeyError("w")
        ...     except KeyError as missing:
        ...         raise ValueError("no such layer") from missing
        >>> try:
        ...     fail()
        ... except ValueError as error:
        ...     find_cause(error)
        Cause(error=ValueError('no such layer'), echo='', after=KeyError('w'), pending=False)
    """
    chain = _chain(error)
    place = next((index for index, one in enumerate(chain) if _echo_of(one)), None)
    if place is None:
        return Cause(error, after=_root(error))
    before = chain[place - 1] if place else None
    if before is not None and _was_on_its_way(before, chain[place:]):
        return Cause(before, after=_root(before), pending=True)
    echo = _echo_of(chain[place])
    if echo == WAIT and any(_raised_inside(one) and _echo_of(one) == OWN for one in chain[place:]):
        return Cause(error, after=_root(error))  # it was caught, and something else went wrong with the next operation
    return Cause(error, echo, after=before if before is not None and not _raised_inside(before) else None)


def text_of(error: BaseException) -> str:
    """Returns what an exception says, as a terminal and a file can take it; of one that cannot say it, that."""
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"  # Python's own words for it
    shown: str = readable(text)
    return shown


def is_internal(filename: str) -> bool:
    """Tells whether a frame's file is one of ringsim or torch, or of Python's own start.

    Example:
        >>> is_internal(__file__), is_internal("/home/me/torch/train.py")
        (True, False)
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return filename.startswith("<frozen ") or filename.startswith((f"{_OURS}{os.sep}", f"{os.path.dirname(torch or __file__)}{os.sep}"))


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an exception and those before it, oldest first."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is other for other in chain):
        chain.append(one)
        one = one.__cause__ if one.__cause__ is not None else one.__context__
    return chain[::-1]


def _root(error: BaseException) -> BaseException | None:
    """Returns the first of the exceptions that a traceback shows before an error, None where it shows none."""
    chain = [error]
    while True:
        last = chain[-1]
        before = last.__cause__ if last.__cause__ is not None or last.__suppress_context__ else last.__context__
        if before is None or any(before is one for one in chain):
            return last if last is not error else None
        chain.append(before)


def _echo_of(error: BaseException) -> str:
    """Returns what one exception is the echo of."""
    if isinstance(error, BaseExceptionGroup):
        kinds = [_echo_of(_chain(one)[0]) for one in error.exceptions]
        return kinds[0] if all(kinds) else OWN
    if isinstance(error, RingError):
        return PEER if error.imposed else OWN
    if not isinstance(error, RuntimeError) or not (type(error).__module__.startswith("torch.") or _raised_inside(error)):
        return OWN
    text = text_of(error)
    if text.startswith(_PASSED_ON):
        return OWN
    if any(words in text for words in LOST_PEER):
        return PEER
    return WAIT if _TIMED_OUT in text else OWN


def _raised_inside(error: BaseException) -> bool:
    """Tells whether an exception was raised by ringsim or torch, rather than by what called them or was called by them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and is_internal(frames[-1].f_code.co_filename)


def _was_on_its_way(error: BaseException, later: list[BaseException]) -> bool:
    """Tells whether an exception was passing through a ``finally`` or an ``__exit__`` when later ones were raised.

    An ``except`` clause that raises nothing would have kept it: there it was dealt with.
    """
    caught: TracebackType | None = error.__traceback__
    if caught is None or isinstance(error, GeneratorExit):  # which ends a generator that is no longer wanted: no failure
        return False
    frames = [pair for one in later for pair in traceback.walk_tb(one.__traceback__)]
    line = next((line for frame, line in frames if frame is caught.tb_frame), None)
    return line is not None and not _is_kept(caught.tb_frame.f_code.co_filename, caught.tb_lineno, line)


def _is_kept(filename: str, raised_at: int, line: int) -> bool:
    """Tells whether a line is in an ``except`` clause that keeps what is raised at another; also where the source is not there to say."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar) and node.body[0].lineno <= raised_at <= (node.body[-1].end_lineno or 0):
            for handler in node.handlers:
                raises = any(isinstance(part, ast.Raise) for part in ast.walk(handler))
                if handler.lineno <= line <= (handler.end_lineno or 0) and not raises:
                    return True
    return not source
