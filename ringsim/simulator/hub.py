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
from typing import TYPE_CHECKING, Any, Final

from greenlet import getcurrent, greenlet

from ringsim.computing import stretch
from ringsim.errors import ArgumentError, Deadlock
from ringsim.simulator.cores import Cores
from ringsim.simulator.generators import seed_streams
from ringsim.simulator.modes import Modes
from ringsim.simulator.streams import Streams

if TYPE_CHECKING:
    from ringsim.simulator.tape import Tape

__all__ = ["Hub", "Runner"]

_STARTING: Final = object()  # the first that is due until all ranks have begun
_MOST_POLLS: Final = 100_000
_LAST_S: Final = 9.2e9  # of which a trace can say how many nanoseconds they are
_LEAST_S: Final = 1e-6  # what asking once whether something is done takes


class Runner:
    """A rank as the clock and its operations see it.

    Args:
        number: the rank, -1 for whoever calls ``Hub.run``.
        seed: of its random numbers.

    Attributes:
        hub: its clock.
        tape: where it is recorded.
        greenlet: its stack.
        modes: what it took out of torch when it gave way.
        states: of its random numbers, while it does not run; None before it has begun.
    """

    __slots__ = ("greenlet", "hub", "modes", "number", "seed", "states", "tape")

    hub: Hub
    tape: Tape

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
        measures: whether computing takes the time that this thread takes for it: see ``pay``.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.polls = 0
        self.cores: Cores | None = None
        self.measures = False
        self._resumed_s = 0.0  # thread time when a rank went on, where computing is measured
        self._asking: set[Runner] = set()
        # What is due now; and later, in the order in which it was asked for, by its time. Ranks that do alike are due at the same times.
        self._ready: deque[Any] = deque()
        self._later: dict[float, list[Any]] = {}
        self._times: list[float] = []  # a heap of those in `_later`
        self._streams = Streams()
        self._modes = Modes()
        self._outside = self.current = Runner(-1, 0)  # whoever calls `run`

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
            if time_s > _LAST_S:
                self._refuse(time_s)
            self._later[time_s] = [what]
            heappush(self._times, time_s)
        else:
            due.append(what)

    def _refuse(self, time_s: float) -> None:
        raise ArgumentError(
            f"a time must fit into a trace, which counts 2**63 nanoseconds from the start, 292 years, got {time_s:g} s (rank "
            f"{self.current.number}). Look at the units: ringsim.compute, links and costs are in seconds."
        )

    def advance(self, seconds: float) -> None:
        """Lets time pass on the calling rank; the others run meanwhile."""
        self.sleep_until(self.now + seconds)

    def work(self, seconds: float) -> None:
        """Lets time pass for which the calling rank needs a core."""
        self.sleep_until(self.now + seconds if self.cores is None else self.cores.book(self.now, seconds))

    def sleep_until(self, time_s: float) -> None:
        """Lets the calling rank go on at a time; the others run until then.

        Raises:
            ArgumentError: no trace can say when that is.
        """
        if time_s > _LAST_S:
            self._refuse(time_s)
        while self.now < time_s:
            if not self._ready and (not self._times or self._times[0] > time_s):
                self.now = time_s
                return
            self.wake(self.current, time_s)
            self.pause()

    def pay(self) -> None:
        """Lets as much time pass on the calling rank as it has computed since it went on; where that is measured."""
        spent_s = stretch(time.thread_time() - self._resumed_s)
        self._resumed_s = time.thread_time()
        self.advance(spent_s)
        self._resumed_s = time.thread_time()

    def pause(self) -> None:
        """Gives way: it returns when somebody has woken the calling rank and its time has come, or for no reason.

        Raises:
            RingError: the rank is in the midst of something that only threads of their own could bear.
        """
        self._give_way()
        if self.measures:
            self._resumed_s = time.thread_time()

    def _give_way(self) -> None:
        me = self.current
        while self._ready or self._times:
            other = self._ready[0] if self._ready else self._later[self._times[0]][0]
            if other is me:
                self._pop()
                return
            if isinstance(other, Runner):
                self._switch(me, other)
                return
            if other is _STARTING:
                break
            self._pop()()
        me.modes = self._modes.take()
        me.states = self._streams.take(me.states)
        self._outside.greenlet.switch()  # nobody can go on, or not all have begun

    def _switch(self, me: Runner, other: Runner) -> None:
        """Lets the rank go on that is due first, in the place of the one that runs."""
        me.modes = None if self._modes.are_common() else self._modes.take()
        me.states = self._streams.take(me.states)
        self._pop()
        self._streams.put(other.states)
        if other.modes is not None:
            self._modes.put(other.modes)
        self.current = other
        other.greenlet.switch()

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
            modes.leave()
            modes.put(outside.modes)
            if freezes:
                gc.unfreeze()

    def go_on(self) -> None:
        """Lets the ranks run that are due; called by whoever called `run`, or within it."""
        while self._ready or self._times:
            what = self._pop()
            if isinstance(what, Runner):
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
        """Takes out what a rank that has ended has left in torch and Python; the last that a rank's function does."""
        self._modes.leave()

    def _pop(self) -> Any:
        """Returns what is due first, and lets the clock go to its time."""
        if not self._ready:
            self.now = heappop(self._times)
            self._ready.extend(self._later.pop(self.now))
        return self._ready.popleft()

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
