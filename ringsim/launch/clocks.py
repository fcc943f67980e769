"""Compares the clocks of several machines over the store while a recorded block runs.

One rank per clock asks, and rank 0 answers.

::

    the first rank of a clock, a thread              rank 0, a thread
    -----------------------------------              ----------------
    takes the turn
    reads its clock; asked <- its number   ------->  reads its clock
    reads its clock                        <-------  told/number <- its time

The clocks are read 32 times at the start of the block, at its end, and every minute. If there are
very many clocks, the asking ranks also answer others. No messages of the program are needed, no
rank waits for rank 0 at the start, and no new port is opened: both sides use queues in torch's
store, each on its own connection, because a wait on a connection blocks all other calls on it.

Only one rank asks at a time. If a request queued behind others, it would take longer on its way
there than on its way back, and the estimated offset would be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringsim.comm.bootstrap import leave_thread
from ringsim.state import start_thread
from ringsim.traces.clocks import DRIFT_PPM
from ringsim.traces.recorder import Recorder

ROUND_TRIPS = 32
EVERY_S = 60.0
PATIENCE = timedelta(seconds=5)  # for an answer
PATIENCE_WITH_OTHERS = timedelta(seconds=1)  # for the ranks that have the turn
MOST_ASKERS = 64  # of rank 0; further clocks ask others
FAN_OUT = 16  # askers of these others


def name_boot() -> str:
    """Returns this machine's boot id; ranks with the same id see the same file systems."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def name_clock() -> str:
    """Returns the id of this process's clock; a time namespace shifts CLOCK_MONOTONIC."""
    try:
        return f"{name_boot()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return name_boot()


class ClockComparison:
    """This rank's role in comparing the clocks, from its creation to ``stop``.

    Every rank of the block creates this object without waiting.

    Args:
        store: the block's store, one of torch's.
        recorder: this rank's recorder, whose part receives the comparisons.
        find_rank_0: a function that waits for rank 0 to enter the block, with the given patience,
            and returns the id of its clock, or None if the id is unknown.
    """

    _failed, _number = False, 0

    def __init__(
        self,
        store: Any,
        recorder: Recorder,
        find_rank_0: Callable[[Callable[[], bool]], str | None],
    ) -> None:
        self._store, self._recorder, self._find_rank_0 = store, recorder, find_rank_0
        self._stopped = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        clock, rank = name_clock(), recorder.rank
        recorder.set_meta("clock", clock)
        if rank == 0:
            recorder.set_meta("clock_number", 0)
            self._begin("answer", self._answer)
        elif store.compare_set(f"clock/{clock}", "", str(rank)) == str(rank).encode():
            self._begin("compare", lambda: self._compare(clock))

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            # the store is gone, or has no queues; or its data is invalid
            with contextlib.suppress(RuntimeError, ValueError):
                work()

        self._threads[name] = start_thread("clock", run)

    def stop(self, *, failed: bool) -> None:
        """Compares the clocks one last time, unless an error has ended the block.

        On rank 0, call this method after the ``stop`` of the other ranks.
        """
        self._failed = failed
        self._stopped.set()
        if "answer" in self._threads:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"clock/over/{self._number}", "")
                self._store.queue_push(f"clock/asked/{self._number}", "")
        for thread in [*self._threads.values()]:
            leave_thread(thread, 0 if failed else PATIENCE.total_seconds())

    def _answer(self) -> None:
        """Answers requests with this clock's time."""
        store = self._store.clone()
        store.set_timeout(timedelta(days=365))
        store.queue_push(f"clock/turn/{self._number}", "")
        while asker := store.queue_pop(f"clock/asked/{self._number}"):
            store.queue_push(f"clock/told/{asker.decode()}", str(time.monotonic_ns()))

    def _compare(self, clock: str) -> None:
        """Regularly requests the time from the clock above, unless rank 0 uses the same clock."""
        theirs = self._find_rank_0(lambda: not self._stopped.is_set())
        if theirs == clock:
            self._recorder.set_meta("clock_number", 0)
        if theirs in (None, clock):
            return
        self._number = self._store.add("clock/askers", 1)
        self._recorder.set_meta("clock_number", self._number)
        above = find_above(self._number)
        if find_above(self._recorder.world_size) > 0:
            self._begin("answer", self._answer)
        store = self._store.clone()
        for comparison in itertools.count():
            if store.check([f"clock/over/{above}"]):
                return
            self._recorder.set_meta(
                f"clock {comparison}", [above, *compare(store, self._number, above)]
            )
            if self._stopped.is_set() or (self._stopped.wait(EVERY_S) and self._failed):
                return


def find_above(number: int) -> int:
    """Returns the number of the clock above a given clock; rank 0's clock has number 0.

    Example:
        >>> [find_above(number) for number in (1, 64, 65, 80, 81)]
        [0, 0, 1, 1, 2]
    """
    return 0 if number <= MOST_ASKERS else (number - MOST_ASKERS - 1) // FAN_OUT + 1


def compare(store: Any, number: int, above: int) -> tuple[int, int, int]:
    """Compares this clock with the clock of a responding peer; blocks for several round trips.

    The other clock is read after the request and before the answer, so each round trip limits the
    offset. The intersection of all limits is more exact than the shortest round trip, because the
    fastest way there and the fastest way back may belong to different round trips.

    Args:
        store: the block's store, on an exclusive connection.
        number: the number of this clock.
        above: the number of the other clock.

    Returns:
        The midpoint of the comparison on this clock, the offset to add for the other clock's time,
        and the distance between the limits of the offset, in ns.

    Raises:
        RuntimeError: no answer arrives, or the store is gone.
    """
    store.set_timeout(PATIENCE_WITH_OTHERS)
    try:
        turn = [store.queue_pop(f"clock/turn/{above}")]
    except RuntimeError:  # the others are slow, or one died during its turn
        turn = []
    store.set_timeout(PATIENCE)
    first_ns, least, most = time.monotonic_ns(), -(2**61), 2**61
    for _ in range(ROUND_TRIPS):
        asked_ns = time.monotonic_ns()
        store.queue_push(f"clock/asked/{above}", str(number))
        told_ns = int(store.queue_pop(f"clock/told/{number}"))
        heard_ns = time.monotonic_ns()
        least, most = max(least, told_ns - heard_ns), min(most, told_ns - asked_ns)
    for word in turn:
        store.queue_push(f"clock/turn/{above}", word)
    drift_ns = round(1e-6 * DRIFT_PPM * (heard_ns - first_ns))  # of the clocks meanwhile
    return (first_ns + heard_ns) // 2, (least + most) // 2, max(most - least, 0) + 2 * drift_ns
