"""The virtual clock: whose turn it is, and when.

Every rank is a greenlet: a function with a stack of its own, which gives way where it waits. One runs at a time, always the one that is due
first; what is due at the same moment runs in the order in which it was asked for. So nothing depends on the machine, and the clock stands
still while a rank runs::

    due        3.0 rank 2 | 3.0 rank 0 | 4.5 a message arrives | 7.0 rank 1
                  |
    now = 3.0     +--> runs until it waits, say for a message that comes at 5.0 --> 5.0 rank 2 is put among those due

Where nobody is due, nobody can ever go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final

from greenlet import getcurrent, greenlet

from ringsim.simulator.generators import Streams, seed_streams
from ringsim.simulator.modes import Modes

__all__ = ["Hub", "Runner"]

_LEAST_S: Final = 1e-6  # what asking once whether something is done takes


class Runner:
    """A rank as the clock sees it.

    Attributes:
        number: the rank.
        seed: of its random numbers.
        greenlet: its stack.
        modes: what it took out of torch when it gave way.
        states: of its random numbers, while it does not run; None before it has begun.
    """

    __slots__ = ("greenlet", "modes", "number", "seed", "states")

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.seed = seed
        self.greenlet: Any = None
        self.modes: Any = None
        self.states: Any = None


class Hub:
    """Runs ranks on a virtual clock.

    Attributes:
        now: the time, in seconds from the start of the run.
        current: the rank that runs.
        polls: how often in a row ranks have asked in vain whether something is done.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.polls = 0
        self._due: list[tuple[float, int, Any]] = []
        self._number = itertools.count().__next__
        self._streams = Streams()
        self._modes = Modes()
        self._outside = self.current = Runner(-1, 0)  # whoever calls `run`

    # -- the clock

    def now_s(self) -> float:
        """Returns the time, in seconds."""
        return self.now

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Calls ``call`` at a time, now at the earliest; it must not wait for anything."""
        heappush(self._due, (time_s if time_s > self.now else self.now, self._number(), call))

    def wake(self, runner: Runner, time_s: float) -> None:
        """Lets a rank that has given way go on at a time, now at the earliest."""
        heappush(self._due, (time_s, self._number(), runner))

    def advance(self, seconds: float) -> None:
        """Lets time pass on the calling rank; the others run meanwhile."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, time_s: float) -> None:
        """Lets the calling rank go on at a time; the others run until then."""
        due = self._due
        while self.now < time_s:
            if not due or due[0][0] > time_s:
                self.now = time_s
                return
            heappush(due, (time_s, self._number(), self.current))
            self.pause()

    def poll(self) -> None:
        """Gives way to the others until something happens."""
        self.polls += 1
        next_s = self._due[0][0] if self._due else 0.0
        self.sleep_until(max(next_s, self.now + _LEAST_S))

    # -- the ranks

    def run(self, runners: Iterable[tuple[Runner, Callable[[], None]]]) -> None:
        """Runs functions, each as a rank, until all have returned or nobody can go on.

        Args:
            runners: the ranks, and what each does. A function must not raise.
        """
        outside, modes, streams = self._outside, self._modes, self._streams
        outside.greenlet = getcurrent()
        outside.states = streams.take()
        outside.modes = modes.take()
        try:
            for runner, function in runners:
                runner.greenlet = greenlet(function)
                self.wake(runner, self.now)
            self.go_on()
        finally:
            streams.put(outside.states)
            modes.put(outside.modes)

    def go_on(self) -> None:
        """Lets the ranks run that are due; called by whoever called `run`, or within it."""
        due = self._due
        while due:
            self.now, _, what = heappop(due)
            if what.__class__ is Runner:
                self._enter(what)
                self.current = self._outside
            else:
                what()

    def throw(self, runner: Runner, error: BaseException) -> None:
        """Raises an error in a rank that has given way, and lets it run on until it gives way again."""
        if not runner.greenlet.dead:
            self._enter(runner, error)
            self.current = self._outside

    def leave(self) -> None:
        """Takes what a rank that has ended left in torch out; the last that a rank's function does.

        Raises:
            RingError: it has left something behind that cannot be taken out.
        """
        self._modes.take()

    def pause(self) -> None:
        """Gives way: returns when somebody has woken the calling rank and its time has come, or for no reason.

        Raises:
            RingError: the rank is in the midst of something that only threads of their own could bear.
        """
        me, due, modes = self.current, self._due, self._modes
        while due:
            what = due[0][2]
            if what.__class__ is not Runner:
                self.now = heappop(due)[0]
                what()
            elif what is me:
                self.now = heappop(due)[0]
                return
            else:
                me.modes = None if modes.are_common() else modes.take()
                me.states = self._streams.take()
                self.now = heappop(due)[0]
                self._enter(what)
                return
        me.modes = modes.take()
        me.states = self._streams.take()
        self._outside.greenlet.switch()  # nobody can go on

    def _enter(self, other: Runner, error: BaseException | None = None) -> None:
        if other.states is None:
            seed_streams(other.seed)
        else:
            self._streams.put(other.states)
        if other.modes is not None:
            self._modes.put(other.modes)
        self.current = other
        if error is None:
            other.greenlet.switch()
        else:
            other.greenlet.throw(error)
