"""Implements the virtual clock, which decides when each rank runs.

Every rank has a stack, and only one rank runs at a time: the rank that holds the baton. A rank that
waits hands the baton to the rank that is due first. Ranks due at the same time run in the order in
which they were scheduled. Nothing depends on the machine, and the clock does not move while a rank
runs::

    due        3.0 rank 2 | 3.0 rank 0 | 4.5 a message arrives | 7.0 rank 1
                  |
    now = 3.0     +--> runs until it waits, say for a message that arrives at 5.0
                       --> rank 2 is scheduled again, for 5.0

If nothing is due, no rank can ever continue, and the baton returns to the thread that called
``run``.
"""

from __future__ import annotations

import _thread
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from ringsim.compute_costs import stretch
from ringsim.errors import LONGEST_S, ArgumentError, Deadlock, RingError
from ringsim.simulator.cores import Cores
from ringsim.simulator.isolation import Isolated, Isolation
from ringsim.simulator.stacks import ThreadStack
from ringsim.traces.recorder import Recorder

_MOST_POLLS = 100_000
_MOST_HALTED_POLLS = 20
_LEAST_S = 1e-6  # the virtual time that one call of is_completed takes


class Ended(BaseException):
    """Unwinds the stack of a rank that can never continue."""


class Rank:
    """A rank as the clock sees it. Number -1 is the caller of ``Clock.run``.

    Attributes:
        ended: whether the rank's function has returned.
        errands: calls that the rank makes as soon as it runs again.
        thread: Python's identifier of the rank's thread; ``native_thread`` is the system's
            identifier.
        stack: the object that keeps the rank's stack while other ranks run.
    """

    recorder: Recorder

    def __init__(self, number: int, seed: int, clock: Clock) -> None:
        self.number, self.clock, self.own = number, clock, Isolated(seed)
        self.ended = False
        self.errands: list[Callable[[], object]] = []
        self.thread = self.native_thread = 0
        self.stack = clock.kind(None if number < 0 else self._live)
        self._thrown: BaseException | None = None

    def here(self) -> str:
        """Returns the name of this rank for error messages."""
        return f"rank {self.number} of {len(self.clock.ranks)}"

    def wake(self, error: BaseException | None = None) -> None:
        """Gives the rank the baton. The rank then raises ``error``, if any, from its wait.

        The first call starts the rank's stack. If all stacks started together, thousands of threads
        would compete for the interpreter.
        """
        self._thrown = error
        self.stack.wake()

    def _live(self) -> None:
        """Runs the rank on its own stack."""
        self.thread, self.native_thread = _thread.get_ident(), _thread.get_native_id()
        try:
            if self._thrown is None:
                self.clock.go_on(self)
                self.clock.live(self)
        finally:  # in any case, a different rank gets the baton
            self.clock.leave(self)
            self.stack.end(self.clock.current.stack)

    def wait_for_baton(self) -> None:
        """Suspends the calling rank until it has the baton."""
        self.stack.wait(self.clock.current.stack)

    def raise_thrown(self) -> None:
        """Raises the error that came with the baton, if there is one."""
        error, self._thrown = self._thrown, None
        if error is not None:
            raise error


Due = Rank | Callable[[], object]  # a rank that continues, or a function to call


class Clock:
    """Runs ranks on a virtual clock.

    Args:
        isolation: the object that keeps the ranks apart while they run.
        kind: the kind of stack that ranks use.
        measures: whether computing takes as long as on the rank's thread; see ``pay``.

    Attributes:
        now: the time in seconds from the start of the run.
        now_ns: the time since the last ``begin_again`` in nanoseconds, the unit of traces.
        ended_ns: the time at which the last rank ended, in the same unit.
        current: the running rank.
        ranks: all ranks.
        live: the function that each rank calls.
        cores: the cores that ranks share, or None if each rank has its own.
        until_s: the time at which the run ends, even if something is due later.
        polls: the number of times, since the last post, that a rank asked whether an operation was
            done, and it was not.
        switches: the number of times the baton has changed hands.
        give_up: the function to call from a different thread, with the reason, if the running rank
            can never give way.
        refuse_thread: the function to call if a thread that does not belong to a rank tries to
            wait.
        in_order: whether a rank's operations on a group are carried out one after another.
        choose: the function to call if nothing is due; returns a suspended rank that continues, or
            None to end the run.
        halt_poll: the function in which a rank waits for its turn if it asks whether an operation
            is done, or None to let it wait until another rank has done something.
    """

    def __init__(
        self, isolation: Isolation, kind: type[ThreadStack] = ThreadStack, *, measures: bool = False
    ) -> None:
        self.kind = kind
        self.now, self.switches = 0.0, 0
        self.cores: Cores | None = None
        self.measures = measures
        self.in_order = False
        self.give_up: Callable[[str], None] = lambda _: None
        self.refuse_thread: Callable[[], None] = lambda: None
        self.choose: Callable[[], Rank | None] = lambda: None
        self.halt_poll: Callable[[Any], None] | None = None
        self.current = self._outside = Rank(-1, 0, self)
        self.ranks: list[Rank] = []
        self._isolation = isolation
        self._refusal: RuntimeError | None = None  # the error if no thread could be started
        self._resumed_s = 0.0  # the thread time when a rank continued, if computing is measured
        self._asking: set[Rank] = set()
        # Everything that is due now, and everything that is due later, by time, in the order of
        # scheduling. Ranks that do the same things are due at the same times.
        self._ready: deque[Due] = deque()
        self._later: dict[float, list[Due]] = {}
        self._times: list[float] = []  # a heap of the keys of `_later`
        self.begin_again()

    # -- time

    def now_s(self) -> float:
        """Returns the time in seconds."""
        return self.now

    def set(self, time_s: float) -> None:
        """Sets the clock to a time."""
        self.now = time_s
        self.now_ns = round((time_s - self._began_s) * 1e9)

    def at(self, time_s: float, *due: Due) -> None:
        """Schedules ranks, or functions that must not wait, for a given time or for now."""
        if time_s <= self.now:
            self._ready += due
            return
        known = self._later.get(time_s)
        if known is None:
            if time_s > LONGEST_S:
                self._refuse(time_s)
            self._later[time_s] = [*due]
            heappush(self._times, time_s)
        else:
            known += due

    def cancel(self, time_s: float, due: Due) -> None:
        """Cancels a scheduled call, so that the clock need not move to its time."""
        known = self._later.get(time_s, [])
        if due in known:
            known.remove(due)

    def _refuse(self, time_s: float) -> None:
        raise ArgumentError(
            f"a time must be at most {LONGEST_S:g} s (285 years, the most that a trace can span), "
            f"got {time_s:g} s (rank {self.current.number}). Check the units: ringsim.compute, "
            "links and costs take seconds."
        )

    def advance(self, seconds: float) -> None:
        """Lets time pass on the calling rank. The other ranks run in the meantime."""
        self.sleep_until(self.now + seconds)

    def work(self, seconds: float) -> None:
        """Lets time pass while the calling rank occupies a core."""
        self.sleep_until(self.book(seconds))

    def book(self, seconds: float) -> float:
        """Reserves a core for the calling rank, and returns the time at which it is released."""
        if self.cores is None:
            return self.now + seconds
        return self.cores.book(self.now, seconds)

    def sleep_until(self, time_s: float) -> None:
        """Suspends the calling rank until a given time. The other ranks run in the meantime."""
        if time_s > LONGEST_S:
            self._refuse(time_s)
        while self.now < time_s:
            alone = not self._ready and (not self._times or self._times[0] > time_s)
            if alone and time_s <= self.until_s and not self._stands:
                self.set(time_s)
                return
            self.at(time_s, self.current)
            self.pause()

    def pay(self) -> None:
        """Charges the calling rank for the time it has computed since it last continued."""
        spent_s = stretch(time.thread_time() - self._resumed_s)
        self._resumed_s = time.thread_time()
        self.advance(spent_s)
        self._resumed_s = time.thread_time()

    def pause(self) -> None:
        """Gives way until the calling rank is woken, possibly spuriously."""
        self.check_thread()
        me = self.current
        me.stack.check()
        to = self._next()
        if to is not me:
            self._hand_to(to)
            me.wait_for_baton()
            self.go_on(me)
        me.raise_thrown()
        while me.errands:
            me.errands.pop(0)()

    def poll(self, asked: Any) -> None:
        """Gives way until a rank does something other than ask whether an operation is done.

        Raises:
            Deadlock: all ranks keep asking.
        """
        me, asking = self.current, self._asking
        self.polls += 1
        most = _MOST_POLLS if self.halt_poll is None else _MOST_HALTED_POLLS
        if self.polls > most:
            raise Deadlock(
                f"rank {me.number} keeps calling is_completed on an operation that no rank can "
                f"complete: {most:,} calls in a row while no rank did anything else. Look "
                "for the missing operation, or use wait(), which reports the missing rank."
            )
        if self.halt_poll is not None:
            self.halt_poll(asked)
            return
        working_s = 0.0
        if asking.issuperset(self._ready):
            times = (at_s for at_s, due in self._later.items() if not asking.issuperset(due))
            working_s = min(times, default=0.0)
        asking.add(me)
        self.sleep_until(max(working_s, self.now + _LEAST_S))
        asking.discard(me)

    # -- ranks

    def is_rank(self) -> bool:
        """Returns whether the calling thread belongs to the running rank."""
        return _thread.get_ident() == self.current.thread

    @property
    def own(self) -> Isolated:
        """The state of the calling rank, or the state that all other threads share."""
        return (self.current if self.is_rank() else self._outside).own

    def check_thread(self) -> None:
        """Raises an error if the calling thread was started by a worker."""
        if _thread.get_ident() != self.current.thread:
            self.refuse_thread()

    def run(self, ranks: Sequence[Rank], live: Callable[[Any], None]) -> None:
        """Runs a function that never raises on each rank, until no rank can continue.

        Raises:
            RingError: the machine cannot start enough threads.
        """
        self.ranks, self.live = [*ranks], live
        for rank in ranks:
            rank.ended = False
        self._ready += ranks
        to = self._next()
        if to is not self._outside:
            self._hand_to(to)
            self._outside.wait_for_baton()
            self.go_on(self._outside)
        if self._refusal is not None:
            started = sum(rank.thread > 0 for rank in self.ranks)
            raise RingError(
                f"cannot start a thread for each simulated rank: {self._refusal} after "
                f"{started:,} threads. "
                "Simulate fewer ranks, or raise the limits (ulimit -u, pids.max)."
            )

    def rest(self) -> None:
        """Ends the calling rank's part in a run; returns in the next run."""
        rank = self.current
        self.leave(rank)
        rank.wait_for_baton()
        self.go_on(rank)

    def begin_again(self) -> None:
        """Prepares for the next run: forgets what is due, and begins to count ``now_ns`` again."""
        for due in self._ready, self._later, self._times, self._asking:
            due.clear()
        self._stands = False  # whether every rank that gives way returns the baton to `run`
        self.until_s, self._began_s = math.inf, self.now
        self.now_ns = self.ended_ns = self.polls = 0

    def throw(self, rank: Rank, error: BaseException) -> None:
        """Raises an error in a rank, and lets the rank run until it gives way again."""
        if rank.ended:
            return
        self._stands = True
        self._hand_to(rank, error)
        self._outside.wait_for_baton()
        self.go_on(self._outside)

    def leave(self, rank: Rank) -> None:
        """Marks a rank as ended and passes on the baton. This is the last call of every rank."""
        rank.ended = True
        self.ended_ns = self.now_ns
        self._hand_to(self._next())

    def _next(self) -> Rank:
        """Makes the calls that are due. Returns the first due rank, or ``_outside`` if none is."""
        if self._stands:
            return self._outside
        ready, times, later = self._ready, self._times, self._later
        while True:
            while ready:
                due = ready.popleft()
                if not isinstance(due, Rank):
                    due()
                elif not due.ended:
                    return due
            while times and not later[times[0]]:  # everything at this time was canceled
                del later[heappop(times)]
            if not times:
                return self.choose() or self._outside
            if times[0] > self.until_s:
                self.set(self.until_s)
                return self._outside
            self.set(heappop(times))
            ready.extend(later.pop(self.now))

    def _hand_to(self, to: Rank, error: BaseException | None = None) -> None:
        """Passes the baton to another rank."""
        self.switches += 1
        self.current = to
        try:
            to.wake(error)
        except RuntimeError as refusal:  # no room for one more thread
            self._refusal, self.current = refusal, self._outside
            self._outside.wake()

    def go_on(self, me: Rank) -> None:
        """Restores the state of the rank that has just received the baton."""
        if me is not self._outside:
            self._isolation.put(me.own)
        if self.measures:
            self._resumed_s = time.thread_time()
