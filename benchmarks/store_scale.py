"""How ringsim's use of the store grows with the ranks: SIMULATED, for worlds that no machine here can start.

    python benchmarks/store_scale.py [--ranks 1000 10000] [--only roll-call gathering gathering-often clocks clocks-flat]

On ringsim's virtual clock, every rank does the operations of ``comm/bootstrap.py``, ``launch/gathering.py`` or ``launch/clocks.py`` at one
store, which serves them in the order in which they come: each takes ``--serve-us`` (44,000 small ones a second were measured), one with a
chunk of 256 KiB ``--chunk-us``, and a question and its answer take ``--trip-us`` where nobody else asks. There are 8 ranks on a host, and a
host has one clock. What Gloo does at the store, which is far more, and what ranks do besides are not in it. Beside each time stands a lower
bound: what the store or rank 0, whichever has more to do, would need for it alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import ringsim
from ringsim import comm as dist
from ringsim.launch.clocks import ROUND_TRIPS, find_above
from ringsim.launch.gathering import AHEAD, WINDOW, longest_pause_s

HOST = 8  # ranks
CHUNKS = 16  # of a host's parts: 4 MiB
SHORT_S = 0.01  # the longest pause between two looks of a rank that is at work
# Operations of a rank at the roll-call: until it has counted itself in, the wait for the verdict, the same once its groups are built, and
# leaving.
ROLL_CALL = 5 + 2 + 2 + 2 + 1


@dataclass
class Store:
    """The store: what it has, and when it is free again. Whoever asks first is served first."""

    serve_s: float
    chunk_s: float
    trip_s: float
    keys: set[object] = field(default_factory=set)
    free_s: float = 0.0
    busy_s: float = 0.0
    operations: int = 0
    waiting: dict[int, deque[int]] = field(default_factory=dict)  # for the thread of a clock that answers; its first one is at work
    done_s: dict[int, float] = field(default_factory=dict)  # when that thread turned to a rank that waits for it

    def book(self, now_s: float, *, chunk: bool = False) -> float:
        """Takes the next turn; returns when the answer comes."""
        serve_s = self.chunk_s if chunk else self.serve_s
        way_s = (self.trip_s - self.serve_s) / 2
        self.free_s = max(now_s + way_s, self.free_s) + serve_s
        self.busy_s += serve_s
        self.operations += 1
        return self.free_s + way_s


class Client:
    """What a rank does at the store, one operation after the other."""

    def __init__(self, store: Store) -> None:
        self.store, self.now_s = store, 0.0

    def sleep_until(self, time_s: float) -> None:
        """Sleeps on the virtual clock."""
        ringsim.compute(time_s - self.now_s)
        self.now_s = time_s

    def ask(self, *, chunk: bool = False) -> None:
        """Does an operation, and waits for its answer."""
        self.sleep_until(self.store.book(self.now_s, chunk=chunk))

    def put(self, *key: object, chunk: bool = False) -> None:
        """Puts something under a key."""
        self.store.keys.add(key)
        self.ask(chunk=chunk)

    def has(self, *key: object) -> bool:
        """Tells whether a key is there."""
        found = key in self.store.keys  # what was asked before is done before
        self.ask()
        return found

    def wait(self, *key: object, longest_s: float = SHORT_S, there: bool = True) -> None:
        """Looks until a key is there, or gone."""
        pause_s = 0.0002
        while self.has(*key) != there:
            self.sleep_until(self.now_s + pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def take(self, *key: object, longest_s: float = SHORT_S, chunk: bool = False) -> None:
        """Waits for a key, reads what is under it and deletes it."""
        self.wait(*key, longest_s=longest_s)
        self.ask(chunk=chunk)
        self.store.keys.remove(key)
        self.ask()


STORES: list[Store] = []  # the last one is that of the run: what ranks are given as an argument, each has for itself


def call_roll(_: int) -> None:
    """A rank of ``initialize_distributed``."""
    client = Client(STORES[-1])
    for _ in range(ROLL_CALL):
        client.ask()


def gather(ranks: int, often: bool) -> None:
    """A rank that leaves a recorded block; rank 0 fetches the parts of all other hosts, each from its first rank.

    ``often``: whether all look every 10 ms whether it is their turn, and are not told when it comes soon.
    """
    client, rank = Client(STORES[-1]), dist.get_rank()
    if rank == 0:
        fetch(client, ranks, often)
        return
    client.put("at", rank)
    client.put("left", rank)
    for _ in range(2 if rank < HOST else 4):  # where is rank 0?
        client.ask()
    if rank < HOST:
        return
    first = rank % HOST == 0
    if first and not often:
        client.wait("soon", rank, longest_s=longest_pause_s(ranks // HOST))
    client.take("wants", rank, longest_s=SHORT_S if first or often else longest_pause_s(ranks))
    if first:
        client.put("files", rank)
        for number in range(CHUNKS):
            if number >= WINDOW:
                client.wait("chunk", rank, number - WINDOW, there=False)
            client.put("chunk", rank, number, chunk=True)
        client.take("receipt", rank, longest_s=longest_pause_s(ranks // HOST))


def fetch(client: Client, ranks: int, often: bool) -> None:
    """What rank 0 does: it reads who has left and where all are, fetches host by host, and waits until all know that it has done so."""
    for what in ("left", "at"):
        for other in range(1, ranks):
            client.wait(what, other)
            client.ask()
    senders = range(HOST, ranks, HOST)
    for turn, sender in enumerate(senders):
        for soon in () if often else senders[turn + AHEAD : turn + AHEAD + 1] if turn else senders[: AHEAD + 1]:
            client.put("soon", soon)
        for other in range(sender, min(sender + HOST, ranks)):
            client.has("files", other)
        client.put("wants", sender)
        client.take("files", sender)
        for number in range(CHUNKS):
            client.take("chunk", sender, number, chunk=True)
        for other in range(sender + 1, min(sender + HOST, ranks)):
            client.put("wants", other)
    for sender in senders:
        client.put("receipt", sender)
    for what, others in (("wants", range(HOST, ranks)), ("receipt", senders)):
        for other in others:
            client.wait(what, other, there=False)


def compare(_: int, flat: bool) -> list[float]:
    """One of the ranks that compare clocks, one for each host; returns how long its questions took."""
    store = STORES[-1]
    client, number, token = Client(store), dist.get_rank(), torch.zeros(1)
    if number == 0:
        return []
    above = 0 if flat else find_above(number)
    line, took_s = store.waiting.setdefault(above, deque()), []
    for _ in range(ROUND_TRIPS):
        began_s = client.now_s
        client.ask()  # puts the question
        store.book(client.now_s)  # asks for the answer, which comes later
        line.append(number)
        if line[0] != number:  # the thread that answers has others to answer before
            dist.recv(token)
            client.now_s = max(client.now_s, store.done_s.pop(number))
        client.ask()  # that thread gets the question
        client.ask()  # and answers
        line.popleft()
        if line:
            store.done_s[line[0]] = client.now_s
            dist.send(token, line[0])
        took_s.append(client.now_s - began_s)
    return took_s


def least_s(store: Store, name: str, size: int) -> float:
    """Returns a lower bound of the time, by a formula."""
    if name == "roll-call":
        return ROLL_CALL * max(store.trip_s, size * store.serve_s)
    if name == "clocks":
        return ROUND_TRIPS * max(4 * store.trip_s, 4 * (size - 1) * store.serve_s)
    hosts, away = -(-size // HOST) - 1, size - HOST  # beside rank 0's; and their ranks
    looks = 4 * (size - 1) + hosts * (2 + 3 + 2 * CHUNKS + 2) + 3 * away - hosts
    rank_0_s = looks * store.trip_s + hosts * CHUNKS * (store.trip_s - store.serve_s + store.chunk_s)
    return max(rank_0_s, (looks + 9 * away) * store.serve_s + hosts * CHUNKS * 2 * store.chunk_s)


# Name, worker, what it is given beside the number of ranks; one rank of each host compares clocks.
CASES: dict[str, tuple[str, Callable[..., object], tuple[bool, ...]]] = {
    "roll-call": ("roll-call", call_roll, ()),
    "gathering": ("gathering", gather, (False,)),
    "gathering-often": ("gathering, if all look every 10 ms", gather, (True,)),
    "clocks": ("clocks", compare, (False,)),
    "clocks-flat": ("clocks, all asking rank 0", compare, (True,)),
}


def main() -> None:
    """Prints a line for each size and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--only", nargs="+", choices=CASES, default=["roll-call", "gathering", "clocks"])
    parser.add_argument("--serve-us", type=float, default=23.0)
    parser.add_argument("--chunk-us", type=float, default=700.0)
    parser.add_argument("--trip-us", type=float, default=57.0)
    options = parser.parse_args()
    link = ringsim.Link(alpha_s=0, beta_s_per_byte=0)
    for ranks in options.ranks:
        for case in options.only:
            name, worker, how = CASES[case]
            size = -(-ranks // HOST) if worker is compare else ranks
            STORES.append(Store(1e-6 * options.serve_us, 1e-6 * options.chunk_us, 1e-6 * options.trip_us))
            begin_s = time.perf_counter()
            trace = ringsim.simulate(worker, world_size=size, args=(size, *how), link=link, semantics="buffered(64)", record=False)
            store, took_s = STORES.pop(), sorted(map(min, filter(None, trace.results)))
            print(
                f"simulated, {ranks:,} ranks: {name} {trace.makespan_s:.2f} s, at least {least_s(store, name.split(',')[0], size):.2f} s; "
                f"{store.operations:,} operations at the store, which was busy for {store.busy_s:.2f} s"
                + (f"; {size:,} clocks, shortest round trip {1e6 * statistics.median(took_s):.0f} us (median)" if took_s else "")
                + f" (simulating took {time.perf_counter() - begin_s:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    import store_scale  # what ranks find by its name is not copied for each of them

    store_scale.main()
