"""Keeps environment variables and signal handlers separate for each simulated rank."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

from ringsim.errors import RingError
from ringsim.simulator.clock import Clock

_HARMLESS = (  # signals that do not end a process by default
    0,
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGSTOP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
)


class RankEnvironment(MutableMapping[str, str]):
    """A replacement for ``os.environ`` in which each rank sees only its own changes.

    Args:
        common: the process's variables, which all ranks see.
        clock: the clock of the ranks.

    Example:
        >>> from ringsim.simulator.isolation import Isolation
        >>> clock = Clock(Isolation(seed=0))
        >>> environment = RankEnvironment({"HOME": "/root"}, clock)
        >>> environment["RANK"] = "3"
        >>> sorted(environment), environment.get("RANK"), environment.copy()
        (['HOME', 'RANK'], '3', {'HOME': '/root', 'RANK': '3'})
    """

    def __init__(self, common: MutableMapping[str, str], clock: Clock) -> None:
        self._common, self._clock = common, clock

    def install(self) -> None:
        """Replaces ``os.environ`` with this object."""
        os.environ = self  # type: ignore[assignment]  # noqa: B003 - child processes get `_common`

    @property
    def _changes(self) -> dict[str, str | None]:
        """The variables that the calling rank has set, with None for removed variables."""
        return self._clock.own.variables

    def __getitem__(self, key: str) -> str:
        changes = self._changes
        value = changes[key] if key in changes else self._common[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError(f"str expected, not {type(value).__name__}")  # as os.environ does
        self._changes[key] = value

    def __delitem__(self, key: str) -> None:
        self[key]
        self._changes[key] = None

    def __iter__(self) -> Iterator[str]:
        variables = {**self._common, **self._changes}
        return (key for key, value in variables.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"environ({dict(self)!r})"

    def copy(self) -> dict[str, str]:
        """Returns the variables as a dict, as ``os.environ.copy`` does."""
        return dict(self)

    def __or__(self, other: Any) -> dict[str, str]:
        return {**self, **other}


class RankSignals:
    """Replaces signal functions, so that simulated ranks set handlers, receive signals, and die.

    Python sets handlers only in the main thread, and the process must outlive a rank that dies. A
    handler is therefore only stored, and is called if the rank sends the signal to itself.

    Args:
        clock: the clock of the ranks.
        die: a function that ends the calling rank with an exit code, or with the negative number of
            a signal.
    """

    def __init__(self, clock: Clock, die: Callable[[int], NoReturn]) -> None:
        self._clock, self._die, self._process = clock, die, os.getpid()
        self._ask, self._kill, self._exit = signal.getsignal, os.kill, os._exit

    def install(self) -> None:
        """Replaces functions of ``signal`` and ``os`` with methods of this object."""
        vars(signal).update(
            signal=self.signal,
            getsignal=self.getsignal,
            raise_signal=functools.partial(self.kill, self._process),
            alarm=self.refuse,
            setitimer=self.refuse,
        )
        vars(os).update(kill=self.kill, _exit=self.exit, abort=self.abort)

    def signal(self, number: int, handler: Any) -> Any:
        """Sets the handler for a signal, and returns the previous handler."""
        before = self.getsignal(number)
        self._handlers[number] = handler
        return before

    def getsignal(self, number: int) -> Any:
        """Returns the handler for a signal."""
        handlers = self._handlers
        return handlers[number] if number in handlers else self._ask(number)

    @property
    def _handlers(self) -> dict[int, Any]:
        """The handlers that the calling rank has set, by signal."""
        return self._clock.own.handlers

    def kill(self, pid: int, number: int) -> None:
        """Sends a signal, as ``os.kill`` does. A rank's signal to itself reaches no other rank."""
        if pid != self._process or number in _HARMLESS or not self._asked_by_rank():
            self._kill(pid, number)
            return
        handler = self.getsignal(number)
        if handler == signal.SIG_DFL:
            self._die(-number)
        if handler != signal.SIG_IGN:
            handler(number, sys._getframe(1))

    def exit(self, code: int) -> NoReturn:
        """Ends the calling rank in the way that ``os._exit`` ends a process."""
        if self._asked_by_rank():
            self._die(code)
        self._exit(code)

    def abort(self) -> NoReturn:
        """Ends the calling rank in the way that ``os.abort`` ends a process."""
        if self._asked_by_rank():
            self._die(-signal.SIGABRT)
        self._kill(os.getpid(), signal.SIGABRT)
        raise AssertionError  # the signal has ended the process

    def _asked_by_rank(self) -> bool:
        """Returns whether the caller is a rank's own thread, and not a process that it forked."""
        return os.getpid() == self._process and self._clock.is_rank()

    def refuse(self, *_: Any) -> NoReturn:
        """Raises an error for a timer, because real time does not pass on a virtual clock.

        Raises:
            RingError: always.
        """
        raise RingError(
            "signal.alarm and signal.setitimer need a process for each rank and do not work on "
            "simulated ranks. Run the program on real ranks with ringsim.trace."
        )
