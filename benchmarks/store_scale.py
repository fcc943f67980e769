"""Simulates how ringsim's use of the store grows with the number of ranks.

SIMULATED, for worlds that do not fit on one machine.

    python benchmarks/store_scale.py [--ranks 1000 10000 100000] [--only roll-call gathering
    gathering-often clocks clocks-flat]

On ringsim's virtual clock, every rank carries out the operations of ``comm/bootstrap.py``,
``launch/gathering.py`` or ``launch/clocks.py`` at one store. The store serves them in order of
arrival. Each takes ``--serve-us`` (44,000 small operations per second were measured), one with a
chunk of 256 KiB takes ``--chunk-us``, and a request with its answer takes ``--trip-us`` without
other load. A host has 8 ranks and one clock. The simulation leaves out Gloo's operations at the
store, which are far more, and all other work of the ranks. Each time is printed with a lower bound:
the time that the busier of store and rank 0 would need for its own work.

A rank is a generator that yields the time at which it continues. A hundred thousand ranks that only
use a store take minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from ringsim.launch.block import longest_pause_s
from ringsim.launch.clocks import PATIENCE_WITH_OTHERS, ROUND_TRIPS, find_above
from ringsim.launch.gathering import AHEAD, WINDOW
from ringsim.simulator.clock import Clock
from ringsim.simulator.isolation import Isolation

HOST = 8  # ranks
CHUNKS = 16  # of a host's parts: 4 MiB
SHORT_S = 0.01  # the longest pause between two looks of a rank that is at work
# Operations of a rank at the roll-call: until it has counted itself in, the wait for the verdict,
# the same once its groups are built, and leaving.
ROLL_CALL = 5 + 2 + 2 + 2 + 1


@dataclass
class Store:
    """The store: its keys, and when it is free again. It serves requests in order of arrival."""

    serve_s: float
    chunk_s: float
    trip_s: float
    keys: set[object] = field(default_factory=set)
    free_s: float = 0.0
    busy_s: float = 0.0
    operations: int = 0
    # by clock that answers: who has the turn,
    taken: dict[int, Client] = field(default_factory=dict)
    waiting: dict[int, deque[Client]] = field(default_factory=dict)  # who waits for it,
    # and whose questions there are
    questions: dict[int, deque[Client]] = field(default_factory=dict)

    def book(self, now_s: float, *, chunk: bool = False) -> float:
        """Takes the next turn; returns when the answer comes."""
        serve_s = self.chunk_s if chunk else self.serve_s
        way_s = (self.trip_s - self.serve_s) / 2
        self.free_s = max(now_s + way_s, self.free_s) + serve_s
        self.busy_s += serve_s
        self.operations += 1
        return self.free_s + way_s


Steps = Generator[float, None, None]  # each the time at which a rank goes on
NEVER = float("inf")


class Client:
    """A rank at the store, which does one operation after the other."""

    def __init__(self, store: Store, clock: Clock, rank: int) -> None:
        self.store, self.clock, self.rank, self.now_s = store, clock, rank, 0.0
        self.shortest_s = NEVER  # of the round trips of its clock
        self._steps: Steps

    def begin(self, steps: Steps) -> None:
        """Begins to run."""
        self._steps = steps
        self.clock.at(0.0, self._go_on)

    def wake(self, time_s: float) -> None:
        """Goes on at a time, having yielded ``NEVER``."""
        self.now_s = max(self.now_s, time_s)
        self.clock.at(self.now_s, self._go_on)

    def _go_on(self) -> None:
        time_s = next(self._steps, NEVER)
        if time_s < NEVER:
            self.clock.at(time_s, self._go_on)

    def sleep(self, time_s: float) -> Steps:
        """Sleeps on the virtual clock."""
        self.now_s += time_s
        yield self.now_s

    def ask(self, *, chunk: bool = False) -> Steps:
        """Does an operation, and waits for its answer."""
        self.now_s = self.store.book(self.now_s, chunk=chunk)
        yield self.now_s

    def put(self, *key: object, chunk: bool = False) -> Steps:
        """Puts something under a key."""
        self.store.keys.add(key)
        yield from self.ask(chunk=chunk)

    def wait(self, *key: object, longest_s: float = SHORT_S, there: bool = True) -> Steps:
        """Looks until a key is there, or gone."""
        pause_s = 0.0002
        while True:
            found = key in self.store.keys  # what was asked before is done before
            yield from self.ask()
            if found == there:
                return
            yield from self.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def take(self, *key: object, longest_s: float = SHORT_S, chunk: bool = False) -> Steps:
        """Waits for a key, reads what is under it and deletes it."""
        yield from self.wait(*key, longest_s=longest_s)
        yield from self.ask(chunk=chunk)
        self.store.keys.remove(key)
        yield from self.ask()


def call_roll(client: Client, _: int) -> Steps:
    """A rank of ``initialize_distributed``."""
    for _ in range(ROLL_CALL):
        yield from client.ask()


def gather(client: Client, ranks: int, often: bool) -> Steps:
    """A rank that leaves a recorded block.

    Rank 0 fetches the parts of all other hosts, each from its first rank. ``often``: whether all
    check every 10 ms whether it is their turn, instead of waiting for a notice.
    """
    rank = client.rank
    if rank == 0:
        yield from fetch(client, ranks, often)
        return
    yield from client.put("at", rank)
    yield from client.put("left", rank)
    for _ in range(2 if rank < HOST else 4):  # where is rank 0?
        yield from client.ask()
    if rank < HOST:
        return
    first = rank % HOST == 0
    if first and not often:
        yield from client.wait("soon", rank, longest_s=longest_pause_s(ranks // HOST))
    yield from client.take(
        "wants", rank, longest_s=SHORT_S if first or often else longest_pause_s(ranks)
    )
    if first:
        yield from client.put("files", rank)
        for number in range(CHUNKS):
            if number >= WINDOW:
                yield from client.wait("chunk", rank, number - WINDOW, there=False)
            yield from client.put("chunk", rank, number, chunk=True)
        yield from client.take("receipt", rank, longest_s=longest_pause_s(ranks // HOST))


def fetch(client: Client, ranks: int, often: bool) -> Steps:
    """The work of rank 0.

    It reads who has left and where all are, fetches host by host, and waits until all know that it
    has done so.
    """
    for what in ("left", "at"):
        for other in range(1, ranks):
            yield from client.wait(what, other)
            yield from client.ask()
    senders = range(HOST, ranks, HOST)
    for turn, sender in enumerate(senders):
        for soon in (
            ()
            if often
            else senders[turn + AHEAD : turn + AHEAD + 1]
            if turn
            else senders[: AHEAD + 1]
        ):
            yield from client.put("soon", soon)
        for _ in range(sender, min(sender + HOST, ranks)):
            yield from client.ask()  # whether it has begun by itself
        yield from client.put("wants", sender)
        yield from client.take("files", sender)
        for number in range(CHUNKS):
            yield from client.take("chunk", sender, number, chunk=True)
        for other in range(sender + 1, min(sender + HOST, ranks)):
            yield from client.put("wants", other)
    for sender in senders:
        yield from client.put("receipt", sender)
    for what, others in (("wants", range(HOST, ranks)), ("receipt", senders)):
        for other in others:
            yield from client.wait(what, other, there=False)


def compare(client: Client, _: int, flat: bool) -> Steps:
    """One of the ranks that compare clocks, one for each host."""
    store = client.store
    if client.rank == 0:
        return
    above = 0 if flat else find_above(client.rank)
    yield from client.ask()  # for the turn
    waiting, questions = (
        store.waiting.setdefault(above, deque()),
        store.questions.setdefault(above, deque()),
    )
    if above in store.taken:
        waiting.append(client)
        client.clock.at(
            client.now_s + PATIENCE_WITH_OTHERS.total_seconds(), lambda: give_up(client, waiting)
        )
        yield NEVER
    else:
        store.taken[above] = client
    for _ in range(ROUND_TRIPS):
        began_s = client.now_s
        yield from client.ask()  # puts the question
        store.book(client.now_s)  # asks for the answer, which comes later
        questions.append(client)
        if questions[0] is not client:  # the thread that answers has others to answer before
            yield NEVER
        yield from client.ask()  # that thread gets the question
        yield from client.ask()  # and answers
        questions.popleft()
        if questions:
            questions[0].wake(client.now_s)
        client.shortest_s = min(client.shortest_s, client.now_s - began_s)
    if store.taken.get(above) is client:
        yield from client.ask()  # gives the turn back
        del store.taken[above]
        if waiting:
            store.taken[above] = waiting.popleft()
            store.taken[above].wake(client.now_s)


def give_up(client: Client, waiting: deque[Client]) -> None:
    """Lets a rank go on that has waited for its turn too long, if it still does."""
    if client in waiting:
        waiting.remove(client)
        client.wake(client.clock.now)


def least_s(store: Store, name: str, size: int) -> float:
    """Returns a lower bound of the time, by a formula."""
    if name == "roll-call":
        return ROLL_CALL * max(store.trip_s, size * store.serve_s)
    if name == "clocks":
        return ROUND_TRIPS * max(4 * store.trip_s, 4 * (size - 1) * store.serve_s)
    hosts, away = -(-size // HOST) - 1, size - HOST  # without rank 0's host; and their ranks
    looks = 4 * (size - 1) + hosts * (2 + 3 + 2 * CHUNKS + 2) + 3 * away - hosts
    rank_0_s = looks * store.trip_s + hosts * CHUNKS * (
        store.trip_s - store.serve_s + store.chunk_s
    )
    return max(rank_0_s, (looks + 9 * away) * store.serve_s + hosts * CHUNKS * 2 * store.chunk_s)


# Name, worker, its other arguments. One rank of each host compares clocks.
CASES: dict[str, tuple[str, Callable[..., Steps], tuple[bool, ...]]] = {
    "roll-call": ("roll-call", call_roll, ()),
    "gathering": ("gathering", gather, (False,)),
    "gathering-often": ("gathering, if all look every 10 ms", gather, (True,)),
    "clocks": ("clocks", compare, (False,)),
    "clocks-flat": ("clocks, all asking rank 0", compare, (True,)),
}


def main() -> None:
    """Prints a line for each size and case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=["roll-call", "gathering", "clocks"]
    )
    parser.add_argument("--serve-us", type=float, default=23.0)
    parser.add_argument("--chunk-us", type=float, default=700.0)
    parser.add_argument("--trip-us", type=float, default=57.0)
    options = parser.parse_args()
    for ranks in options.ranks:
        for case in options.only:
            name, worker, how = CASES[case]
            size = -(-ranks // HOST) if worker is compare else ranks
            store = Store(1e-6 * options.serve_us, 1e-6 * options.chunk_us, 1e-6 * options.trip_us)
            begin_s, clock = time.perf_counter(), Clock(Isolation(0))
            clients = [Client(store, clock, rank) for rank in range(size)]
            for client in clients:
                client.begin(worker(client, size, *how))
            clock.run([])
            last_s, bound_s = (
                max(client.now_s for client in clients),
                least_s(store, name.split(",")[0], size),
            )
            took_s = [client.shortest_s for client in clients if client.shortest_s < NEVER]
            print(
                f"simulated, {ranks:,} ranks: {name} {last_s:.2f} s, at least {bound_s:.2f} s; "
                f"{store.operations:,} operations at the store, which was busy for "
                f"{store.busy_s:.2f} s"
                + (
                    (
                        f"; {size:,} clocks, shortest round trip "
                        f"{1e6 * statistics.median(took_s):.0f} us (median)"
                    )
                    if took_s
                    else ""
                )
                + f" (simulating took {time.perf_counter() - begin_s:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
