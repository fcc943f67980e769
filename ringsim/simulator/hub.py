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

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any, Final

from greenlet import getcurrent, greenlet

from ringsim.computing import stretch
from ringsim.errors import Deadlock
from ringsim.simulator.cores import Cores
from ringsim.simulator.generators import Streams, seed_streams
from ringsim.simulator.modes import Modes

__all__ = ["Hub", "Runner"]

_STARTING: Final = object()  # the first that is due until all ranks have begun
_MOST_POLLS: Final = 100_000
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
        cores: what the ranks share, None where each has its own.
        polls: how often ranks have asked in vain whether something is done, since an operation was posted.
        pause: ``pause()`` gives way: it returns when somebody has woken the calling rank and its time has come, or for no reason. It
            raises a RingError where the rank is in the midst of something that only threads of their own could bear.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.polls = 0
        self.cores: Cores | None = None
        self._resumed_s = 0.0  # thread time when a rank went on, where computing is measured
        self._asking: set[Runner] = set()
        # What is due now; and later, in the order in which it was asked for, by its time. Ranks that do alike are due at the same times.
        self._ready: deque[Any] = deque()
        self._later: dict[float, list[Any]] = {}
        self._times: list[float] = []  # a heap of those in `_later`
        self._streams = Streams()
        self._modes = Modes()
        self._outside = self.current = Runner(-1, 0)  # whoever calls `run`
        self.pause = self._make_pause()

    # -- the clock

    def now_s(self) -> float:
        """Returns the time, in seconds."""
        return self.now

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Calls ``call`` at a time, now at the earliest; it must not wait for anything."""
        self.wake(call, time_s)

    def wake(self, what: Any, time_s: float) -> None:
        """Lets a rank that has given way go on at a time, now at the earliest."""
        if time_s <= self.now:
            self._ready.append(what)
            return
        due = self._later.get(time_s)
        if due is None:
            self._later[time_s] = [what]
            heappush(self._times, time_s)
        else:
            due.append(what)

    def advance(self, seconds: float) -> None:
        """Lets time pass on the calling rank; the others run meanwhile."""
        self.sleep_until(self.now + seconds)

    def work(self, seconds: float) -> None:
        """Lets time pass for which the calling rank needs a core."""
        self.sleep_until(self.now + seconds if self.cores is None else self.cores.book(self.now, seconds))

    def sleep_until(self, time_s: float) -> None:
        """Lets the calling rank go on at a time; the others run until then."""
        while self.now < time_s:
            if not self._ready and (not self._times or self._times[0] > time_s):
                self.now = time_s
                return
            self.wake(self.current, time_s)
            self.pause()

    def measure(self) -> None:
        """Makes the computing of ranks take the time that this thread takes for it, from now on: see ``pay``."""
        give_way = self.pause

        def pause() -> None:
            give_way()
            self._resumed_s = time.thread_time()

        self.pause = pause

    def pay(self) -> None:
        """Lets as much time pass on the calling rank as it has computed since it went on; where that is measured."""
        spent_s = stretch(time.thread_time() - self._resumed_s)
        self._resumed_s = time.thread_time()
        self.advance(spent_s)
        self._resumed_s = time.thread_time()

    def poll(self) -> None:
        """Gives way until one of those that do not merely ask has been at work.

        Raises:
            Deadlock: nothing has happened for a long time but that ranks asked.
        """
        me, asking = self.current, self._asking
        self.polls += 1
        if self.polls > _MOST_POLLS:
            raise Deadlock(
                f"a rank that asks is_completed must be answered, got {_MOST_POLLS:,} questions in a row while nobody did anything else "
                f"(rank {me.number}). Look at what it waits for, or use wait(), which knows who is missing."
            )
        due = self._later.items()
        working_s = 0.0
        if asking.issuperset(self._ready):
            working_s = min((time_s for time_s, those in due if not asking.issuperset(those)), default=0.0)
        asking.add(me)
        self.sleep_until(max(working_s, self.now + _LEAST_S))
        asking.discard(me)

    # -- the ranks

    def run(self, runners: Iterable[tuple[Runner, Callable[[], None]]]) -> None:
        """Runs functions, each as a rank, until all have returned or nobody can go on.

        Args:
            runners: the ranks, and what each does. A function must not raise.
        """
        outside, modes, streams = self._outside, self._modes, self._streams
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()  # what there is already needs no looking at each time that garbage is collected
        outside.greenlet = getcurrent()
        outside.states = streams.take()
        outside.modes = modes.take()
        try:
            # A greenlet counts its depth from that of whoever starts it: one rank must not start another.
            self._ready.appendleft(_STARTING)
            for runner, function in runners:
                runner.greenlet = greenlet(function)
                self._resumed_s = time.thread_time()
                self._enter(runner)
                self.current = outside
            self._ready.popleft()
            self.go_on()
        finally:
            streams.put(outside.states)
            modes.put(outside.modes)
            if freezes:
                gc.unfreeze()

    def go_on(self) -> None:
        """Lets the ranks run that are due; called by whoever called `run`, or within it."""
        while self._ready or self._times:
            what = self._pop()
            if what.__class__ is Runner:
                self._enter(what)
                self.current = self._outside
            else:
                what()

    def throw(self, runner: Runner, error: BaseException) -> None:
        """Raises an error in a rank that has given way, and lets it run on until it gives way again."""
        if runner.greenlet.dead:
            return
        outside = self._outside
        outside.modes, outside.states = self._modes.take(), self._streams.take(outside.states)
        try:
            self._enter(runner, error)
        finally:
            self.current = outside
            self._streams.put(outside.states)
            self._modes.put(outside.modes)

    def leave(self) -> None:
        """Takes what a rank that has ended left in torch out; the last that a rank's function does.

        Raises:
            RingError: it has left something behind that cannot be taken out.
        """
        self._modes.take()

    def _pop(self) -> Any:
        """Returns what is due first, and lets the clock go to its time."""
        if not self._ready:
            self.now = heappop(self._times)
            self._ready.extend(self._later.pop(self.now))
        return self._ready.popleft()

    def _make_pause(self) -> Callable[[], None]:
        """Makes ``pause``, through which every wait goes: names that do not change are looked up once."""
        ready, later, times, outside, pop = self._ready, self._later, self._times, self._outside, self._pop
        are_common, take_modes, put_modes = self._modes.are_common, self._modes.take, self._modes.put
        take_states, put_states = self._streams.take, self._streams.put

        def pause() -> None:
            me = self.current
            while ready or times:
                other = ready[0] if ready else later[times[0]][0]
                if other.__class__ is not Runner:
                    if other is _STARTING:
                        break
                    pop()()
                elif other is me:
                    pop()
                    return
                else:
                    me.modes = None if are_common() else take_modes()
                    me.states = take_states(me.states)
                    if ready:
                        ready.popleft()
                    else:
                        pop()
                    put_states(other.states)
                    if other.modes is not None:
                        put_modes(other.modes)
                    self.current = other
                    other.greenlet.switch()
                    return
            me.modes = take_modes()
            me.states = take_states(me.states)
            outside.greenlet.switch()  # nobody can go on, or not all have begun

        return pause

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
