"""``sys.exit`` in a job of MPI: a rank that ends with a code other than 0 ends all ranks, as one that raises does.

Python calls no hook for SystemExit, and tells no handler of ``atexit`` with which code the process ends. But the interpreter reads the
attribute ``code`` of the exception that has reached it, and then no frame of Python is below that look. Whoever catches it has one.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

__all__ = ["watch_exit"]

_CODE: Final[Any] = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """What ``sys.exit`` raises while the job lasts."""

    on_end: Callable[[Any], None]

    @property
    def code(self) -> Any:  # type: ignore[override]
        """The status, for whoever caught this; the interpreter, which ends the process with it, is overheard."""
        status = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            self.on_end(status)
        return status


def watch_exit(abort: Callable[[int], Any]) -> Callable[[], None]:
    """Calls ``abort(code)`` when ``sys.exit`` ends this process with a code other than 0, its message shown; returns what undoes it.

    Args:
        abort: ends all ranks.

    Example:
        >>> undo = watch_exit(print)
        >>> try:
        ...     sys.exit(3)
        ... except SystemExit as error:
        ...     error.code
        3
        >>> undo()
    """
    before = sys.exit
    statuses: list[Any] = []

    def exit_in_job(status: Any = None, /) -> NoReturn:
        error = _Exit() if status is None else _Exit(status)
        error.on_end = statuses.append
        raise error

    def end() -> None:
        if statuses and statuses[-1] not in (None, 0):
            abort(statuses[-1] if isinstance(statuses[-1], int) else 1)

    def undo() -> None:
        if sys.exit is exit_in_job:
            sys.exit = before
        atexit.unregister(end)

    sys.exit = exit_in_job
    atexit.register(end)
    return undo
