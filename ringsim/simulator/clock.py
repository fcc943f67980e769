"""The virtual clock: whose turn it is, and when.

Every rank is a greenlet: a function with a stack of its own, which gives way where it waits. One
runs at a time, always the one that is due first; what is due at the same moment runs in the order
in which it was asked for. So nothing depends on the machine, and the clock stands still while a
rank runs::

    due        3.0 rank 2 | 3.0 rank 0 | 4.5 a message arrives | 7.0 rank 1
                  |
    now = 3.0     +--> runs until it waits, say for a message that comes at 5.0 --> 5.0 rank 2 is
                  put among those due

Where nobody is due, nobody can ever go on.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final

from greenlet import getcurrent, greenlet

from ringsim.compute_costs import stretch
from ringsim.errors import LONGEST_S, ArgumentError, Deadlock
from ringsim.simulator.isolation import Isolated, Isolation, ask_modes
from ringsim.simulator.links import Cores
from ringsim.traces.recorder import Recorder

__all__ = ["Clock", "Rank"]

_MOST_POLLS: Final = 100_000
# new objects: what ranks hold on their stacks is no garbage, and need not be looked through all the
# time
_COLLECT_AFTER: Final = 10_000
_LEAST_S: Final = 1e-6  # what asking once whether something is done takes


class Rank:
    """A rank as the clock sees it, and whoever carries its operations.

    -1 is whoever calls ``Clock.run``.
    """

    recorder: Recorder
    greenlet: Any  # its stack
    resume: Callable[[], object]  # lets it go on

    def __init__(self, number: int, seed: int, clock: Clock) -> None:
        self.number, self.clock, self.own = number, clock, Isolated(seed)

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return f"rank {self.number}"


class Clock:
    """Runs ranks on a virtual clock.

    Args:
        isolation: keeps the ranks apart; in force while they run.
        measures: whether computing takes the time that this thread takes for it: see ``pay``.

    Attributes:
        now: the time, in seconds from the start of the run.
        now_ns: the same in nanoseconds, as a trace counts it.
        ended_ns: when the latest rank ended.
        current: the rank that runs.
        cores: what the ranks share, None where each has its own.
        until_s: the time at which the run ends, whatever is due later.
        polls: how often ranks have asked in vain whether something is done, since an operation was
            posted.
    """

    def __init__(self, isolation: Isolation, *, measures: bool = False) -> None:
        self.now, self.now_ns, self.ended_ns, self.polls = 0.0, 0, 0, 0
        self.until_s = math.inf
        self.cores: Cores | None = None
        self.measures = measures
        self.current = self._outside = Rank(-1, 0, self)
        self._isolation = isolation
        self._switch: Callable[[], object] = getcurrent  # to the greenlet of `run`
        self._resumed_s = 0.0  # thread time when a rank went on, where computing is measured
        self._asking: set[Callable[[], object]] = set()
        # What to call now; and later, in the order in which it was asked for, by time. Ranks that
        # do alike are due at the same times.
        self._ready: deque[Callable[[], object]] = deque()
        self._later: dict[float, list[Callable[[], object]]] = {}
        self._times: list[float] = []  # a heap of those in `_later`

    # -- time

    def now_s(self) -> float:
        """Returns the time, in seconds."""
        return self.now

    def set(self, time_s: float) -> None:
        """Lets the clock go to a time."""
        self.now = time_s
        self.now_ns = round(time_s * 1e9)

    def at(self, time_s: float, *calls: Callable[[], object]) -> None:
        """Calls ``calls`` at a time, now at the earliest; they must not wait for anything."""
        if time_s <= self.now:
            self._ready += calls
            return
        due = self._later.get(time_s)
        if due is None:
            if time_s > LONGEST_S:
                self._refuse(time_s)
            self._later[time_s] = [*calls]
            heappush(self._times, time_s)
        else:
            due += calls

    def cancel(self, time_s: float, call: Callable[[], object]) -> None:
        """Takes back a call for a later time: the clock need not go there for it."""
        due = self._later.get(time_s, [])
        if call in due:
            due.remove(call)

    def _refuse(self, time_s: float) -> None:
        raise ArgumentError(
            f"a time must be at most {LONGEST_S:g} s: a trace, which counts ns, holds 285 years, "
            f"got {time_s:g} s (rank "
            f"{self.current.number}). Look at the units: ringsim.compute, "
            "links and costs are in seconds."
        )

    def advance(self, seconds: float) -> None:
        """Lets time pass on the calling rank; the others run meanwhile."""
        self.sleep_until(self.now + seconds)

    def work(self, seconds: float) -> None:
        """Lets time pass for which the calling rank needs a core."""
        self.sleep_until(self.book(seconds))

    def book(self, seconds: float) -> float:
        """Takes a core for the calling rank, from now on or as soon as one is free.

        Returns when it is done with it.
        """
        return self.now + seconds if self.cores is None else self.cores.book(self.now, seconds)

    def sleep_until(self, time_s: float) -> None:
        """Lets the calling rank go on at a time, which a trace must be able to hold.

        The others run until then.
        """
        if time_s > LONGEST_S:
            self._refuse(time_s)
        while self.now < time_s:
            if (
                not self._ready
                and (not self._times or self._times[0] > time_s)
                and time_s <= self.until_s
            ):
                self.set(time_s)
                return
            self.at(time_s, self.current.resume)
            self.pause()

    def pay(self) -> None:
        """Lets as much time pass on the calling rank as it has computed since it went on.

        Where that is measured.
        """
        spent_s = stretch(time.thread_time() - self._resumed_s)
        self._resumed_s = time.thread_time()
        self.advance(spent_s)
        self._resumed_s = time.thread_time()

    def pause(self) -> None:
        """Gives way.

        It returns when somebody has woken the calling rank and its time has come, or for no reason.
        """
        me, isolation = self.current, self._isolation
        if ask_modes() != isolation.common:
            isolation.take(me.own)
        try:
            self._switch()
        finally:  # an error may be thrown in
            self.current = me
            isolation.put(me.own)
            if self.measures:
                self._resumed_s = time.thread_time()

    def poll(self) -> None:
        """Gives way until one of those that do not merely ask has been at work.

        Raises Deadlock where nobody ever is.
        """
        me, asking = self.current, self._asking
        self.polls += 1
        if self.polls > _MOST_POLLS:
            raise Deadlock(
                f"a rank that asks is_completed must be answered, got {_MOST_POLLS:,} questions "
                "in a row while nobody did anything else "
                f"(rank {me.number}). Look at what it waits for, or use wait(), "
                "which knows who is missing."
            )
        working_s = 0.0
        if asking.issuperset(self._ready):
            working_s = min(
                (time_s for time_s, due in self._later.items() if not asking.issuperset(due)),
                default=0.0,
            )
        asking.add(me.resume)
        self.sleep_until(max(working_s, self.now + _LEAST_S))
        asking.discard(me.resume)

    # -- ranks

    def run(self, lives: Iterable[tuple[Rank, Callable[[], None]]]) -> None:
        """Runs functions, each as a rank, until all have returned or nobody can go on.

        None of them may raise.
        """
        self._switch = getcurrent().switch
        freezes, thresholds = gc.get_freeze_count() == 0, gc.get_threshold()
        gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
        if freezes:
            # the garbage collector need not look again and again at what was there before
            gc.freeze()
        try:
            for rank, function in lives:
                self._add(rank, function)
            self._go_on()
        finally:
            self.current = self._outside
            gc.set_threshold(*thresholds)
            if freezes:
                gc.unfreeze()

    def _add(self, rank: Rank, function: Callable[[], None]) -> None:
        def live() -> None:
            self.current = rank
            self._isolation.put(rank.own)
            self._resumed_s = time.thread_time()
            function()
            self.ended_ns = self.now_ns

        rank.greenlet = greenlet(live)
        rank.resume = rank.greenlet.switch
        self._ready.append(rank.resume)

    def _go_on(self) -> None:
        """Calls whatever is due."""
        ready, times, later = self._ready, self._times, self._later
        while True:
            while ready:
                ready.popleft()()
            while times and not later[times[0]]:  # all was taken back
                del later[heappop(times)]
            if not times:
                return
            if times[0] > self.until_s:
                self.set(self.until_s)
                return
            self.set(heappop(times))
            ready.extend(later.pop(self.now))

    def throw(self, rank: Rank, error: BaseException) -> None:
        """Raises an error in a rank that has given way.

        Lets it run on until it gives way again.
        """
        if not rank.greenlet.dead:
            rank.greenlet.throw(error)
            self.current = self._outside
