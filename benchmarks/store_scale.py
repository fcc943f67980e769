"""Simulates how ringsim's use of the store grows with the number of ranks.

All results are SIMULATED, because worlds of this size do not fit on one machine.

    python benchmarks/store_scale.py [--ranks 1000 10000 100000] [--only roll-call gathering
    gathering-often clocks clocks-flat]

On ringsim's virtual clock, every rank runs the operations of ``comm/bootstrap.py``,
``launch/gathering.py`` or ``launch/clocks.py`` on a single store. The store serves the requests in
their order of arrival. Serving a request takes ``--serve-us`` (on a real store, 44,000 small
operations per second were measured), or ``--chunk-us`` if the request carries a chunk of 256 KiB. A
request and its answer take ``--trip-us`` without other load. Each host has 8 ranks and one clock.
The simulation omits all other work of the ranks, and Gloo's operations on the store, although these
are far more numerous. Next to each time, the script prints a lower bound: the time that the store
or rank 0, whichever is busier, needs for its own work.

Each rank is a generator that yields the time at which it continues. Simulating a hundred thousand
ranks takes minutes, even though they only use a store.
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

HOST = 8  # ranks per host
CHUNKS = 16  # in the parts of a host, which have 4 MiB
SHORT_S = 0.01  # the longest pause between two polls of a busy rank
# A rank's operations in the roll call: counting itself in, waiting for the verdict, doing both
# again when its groups are built, and leaving.
ROLL_CALL = 5 + 2 + 2 + 2 + 1


@dataclass
class Store:
    """A store, with its keys and the time at which it is free again.

    It serves requests in their order of arrival.
    """

    serve_s: float
    chunk_s: float
    trip_s: float
    keys: set[object] = field(default_factory=set)
    free_s: float = 0.0
    busy_s: float = 0.0
    operations: int = 0
    # for each rank that answers questions: the client that has the turn,
    taken: dict[int, Client] = field(default_factory=dict)
    # the clients that wait for the turn,
    waiting: dict[int, deque[Client]] = field(default_factory=dict)
    # and the clients whose questions are open
    questions: dict[int, deque[Client]] = field(default_factory=dict)

    def book(self, now_s: float, *, chunk: bool = False) -> float:
        """Serves a request that is sent now, and returns the time at which its answer arrives."""
        serve_s = self.chunk_s if chunk else self.serve_s
        way_s = (self.trip_s - self.serve_s) / 2
        self.free_s = max(now_s + way_s, self.free_s) + serve_s
        self.busy_s += serve_s
        self.operations += 1
        return self.free_s + way_s


Steps = Generator[float, None, None]  # yields the times at which a rank continues
NEVER = float("inf")


class Client:
    """A rank that uses the store, one operation after another."""

    def __init__(self, store: Store, clock: Clock, rank: int) -> None:
        self.store, self.clock, self.rank, self.now_s = store, clock, rank, 0.0
        self.shortest_s = NEVER  # the shortest round trip when it compares clocks
        self._steps: Steps

    def begin(self, steps: Steps) -> None:
        """Starts to run the given steps."""
        self._steps = steps
        self.clock.at(0.0, self._go_on)

    def wake(self, time_s: float) -> None:
        """Continues at a given time, after the client yielded ``NEVER``."""
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
        """Sends a request, and waits for its answer."""
        self.now_s = self.store.book(self.now_s, chunk=chunk)
        yield self.now_s

    def put(self, *key: object, chunk: bool = False) -> Steps:
        """Stores a value under a key."""
        self.store.keys.add(key)
        yield from self.ask(chunk=chunk)

    def wait(self, *key: object, longest_s: float = SHORT_S, there: bool = True) -> Steps:
        """Polls until a key exists, or no longer exists."""
        pause_s = 0.0002
        while True:
            found = key in self.store.keys  # the store serves earlier requests first
            yield from self.ask()
            if found == there:
                return
            yield from self.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def take(self, *key: object, longest_s: float = SHORT_S, chunk: bool = False) -> Steps:
        """Waits for a key, reads its value, and deletes the key."""
        yield from self.wait(*key, longest_s=longest_s)
        yield from self.ask(chunk=chunk)
        self.store.keys.remove(key)
        yield from self.ask()


def call_roll(client: Client, _: int) -> Steps:
    """Runs the operations of a rank in ``initialize_distributed``."""
    for _ in range(ROLL_CALL):
        yield from client.ask()


def gather(client: Client, ranks: int, often: bool) -> Steps:
    """Runs the operations of a rank that leaves a recorded block.

    Rank 0 fetches the parts of every other host from the host's first rank. If ``often`` is set,
    all ranks check every 10 ms whether it is their turn, instead of waiting for a notice.
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
    """Runs the operations of rank 0.

    It reads which ranks have left and where all ranks are, and fetches the parts host by host. Then
    it waits until all ranks know that it has done so.
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
            yield from client.ask()  # whether the rank has already left its parts in the store
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
    """Runs the operations of a rank that compares clocks; there is one such rank per host."""
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
        if questions[0] is not client:  # the answering thread has earlier questions to answer
            yield NEVER
        yield from client.ask()  # the answering thread gets the question
        yield from client.ask()  # and answers it
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
    """Has a rank continue if it is still waiting for its turn after the longest allowed time."""
    if client in waiting:
        waiting.remove(client)
        client.wake(client.clock.now)


def least_s(store: Store, name: str, size: int) -> float:
    """Returns a lower bound for the time, computed by a formula."""
    if name == "roll-call":
        return ROLL_CALL * max(store.trip_s, size * store.serve_s)
    if name == "clocks":
        return ROUND_TRIPS * max(4 * store.trip_s, 4 * (size - 1) * store.serve_s)
    hosts, away = -(-size // HOST) - 1, size - HOST  # all hosts except rank 0's, and their ranks
    looks = 4 * (size - 1) + hosts * (2 + 3 + 2 * CHUNKS + 2) + 3 * away - hosts
    rank_0_s = looks * store.trip_s + hosts * CHUNKS * (
        store.trip_s - store.serve_s + store.chunk_s
    )
    return max(rank_0_s, (looks + 9 * away) * store.serve_s + hosts * CHUNKS * 2 * store.chunk_s)


# The name, the worker and its other arguments. One rank on each host compares clocks.
CASES: dict[str, tuple[str, Callable[..., Steps], tuple[bool, ...]]] = {
    "roll-call": ("roll-call", call_roll, ()),
    "gathering": ("gathering", gather, (False,)),
    "gathering-often": ("gathering, if all ranks poll every 10 ms", gather, (True,)),
    "clocks": ("clocks", compare, (False,)),
    "clocks-flat": ("clocks, if all ranks ask rank 0", compare, (True,)),
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
            clock.run([], lambda _: None)
            last_s, bound_s = (
                max(client.now_s for client in clients),
                least_s(store, name.split(",")[0], size),
            )
            took_s = [client.shortest_s for client in clients if client.shortest_s < NEVER]
            print(
                f"simulated, {ranks:,} ranks: {name}: {last_s:.2f} s (lower bound {bound_s:.2f} "
                f"s); {store.operations:,} operations on the store, which was busy for "
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
