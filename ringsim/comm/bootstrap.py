"""How ranks find each other.

The socket they meet at, the store behind it, the roll-call, and the default process group. Rank 0
opens the listening socket itself and hands it to torch's store, which would otherwise listen on
every network of the machine. The others connect to it by a numeric address. A stranger may be
listening there that never answers, and then torch's client ignores its time-out; so it runs in a
thread that can be left behind.

Ranks that disagree (two with one number, different world sizes, one that never comes) would make
torch wait for half an hour, or quietly run a smaller world. So each rank first puts a card into the
store, and waits for one verdict on all cards::

    rank                      store                         what it costs a rank
      |-- get "head" --------->|  rank 0's card               one wait
      |-- compare_set card/r ->|  mine, unless taken          one operation
      |-- add "count" -------->|  I am the n-th               one operation
      |      (the last one reads all cards and writes the verdict)
      |-- get "verdict" ------>|  who rings with whom, or why not

Whoever finds a fault, or runs out of time, writes the verdict instead. The first verdict stands, so
every rank ends with the same words.
"""

from __future__ import annotations

import _thread
import atexit
import errno
import ipaddress
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any, Generic, NoReturn, TypeVar

import torch.distributed as dist

# public, though torch lists it nowhere
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim.environment import order_by_hosts
from ringsim.errors import ArgumentError, RendezvousFailed

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs a call in a thread that can be left behind, even when the process ends.

    Some of torch's calls obey no time limit.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        # threading.Thread would wait here until the new thread runs: with many ranks on few cores,
        # that is a turn of all of them.
        _thread.start_new_thread(self._run, (call,))

    def result(self, limit_s: float) -> T:
        """Returns what the call returned, or raises what it raised.

        TimeoutError if it has not ended within ``limit_s``, and goes on.
        """
        try:
            return self._future.result(max(limit_s, 0.0))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {limit_s:.1f} s") from None

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._future.set_result(call())
        except Exception as error:
            self._future.set_exception(error)


_LEFT_S = 5.0  # how long a process that ends waits for a thread that is left


def leave_thread(thread: threading.Thread) -> None:
    """Lets a thread end by itself that has been told to, before the interpreter ends.

    A call of torch's that returns later aborts it.
    """
    if thread.is_alive():
        atexit.register(thread.join, _LEFT_S)


_READERS_GRACE_S = 1.0  # a host that failed stays this long at most, for the others to read why
_POLL_S = 0.005
_MOST_PAUSE_S = 0.05


class LeftAlready(Exception):
    """The store belongs to a ring that is being taken down, or an attempt that is over.

    The next one does not exist yet.
    """


@dataclass(frozen=True)
class Card:
    """A rank's description of itself for the roll-call."""

    world_size: int  # how many ranks it expects
    comm_device: str  # "cpu" or "gpu"
    ring: tuple[int, ...]  # the global ranks of its ring, in order
    gpu: str = ""  # the GPU it uses, "" on the CPU
    host: str = ""  # where the ring of all ranks is to be ordered by hosts
    # tells two processes of the same rank apart
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> str:
        """Returns the card as text for the store.

        A ring over all ranks in order is left out, to keep N cards short.
        """
        values = asdict(self)
        if self.ring == tuple(range(self.world_size)):
            del values["ring"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: bytes) -> Card:
        """Returns the card that ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "ring": tuple(values.get("ring", range(values["world_size"])))})


def in_words(ranks: list[int]) -> str:
    """Names ranks in a sentence: "no rank", "rank 2", "ranks 0-2, 5"."""
    if not ranks:
        return "no rank"
    runs = []
    for _, pairs in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        runs.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def find_fault(cards: list[Card]) -> str | None:
    """Returns what is wrong with a full set of cards, one for each rank in order.

    None if nothing is wrong.
    """
    users: dict[str, int] = {}
    for rank, card in enumerate(cards):
        disagreement = _disagreement(cards[0], card, rank)
        if disagreement is not None:
            return disagreement
        if card.gpu and users.setdefault(card.gpu, rank) != rank:
            return (
                f"a GPU must be used by one rank only, got ranks {users[card.gpu]} and {rank} on "
                f"GPU {card.gpu}"
            )
        for other in card.ring:
            if cards[other].ring != card.ring:
                sides = (
                    f"{list(card.ring)} on rank {rank} and {list(cards[other].ring)} on rank "
                    f"{other}"
                )
                return f"ring_ranks must be the same on every rank of a ring, got {sides}"
    asked = [rank for rank, card in enumerate(cards) if card.host]
    if 0 < len(asked) < len(cards):
        return f'ring_order must be the same on every rank, got "hosts" on {in_words(asked)} alone'
    return None


def list_rings(cards: list[Card]) -> list[tuple[int, ...]]:
    """Returns every ring of a world, as its global ranks in order.

    From a full set of cards without a fault.

    Example:
        >>> list_rings(
        ...     [Card(3, "cpu", (0, 1, 2), host=host) for host in ("node0", "node1", "node0")]
        ... )
        [(0, 2, 1)]
    """
    if cards[0].host:
        return [order_by_hosts([card.host for card in cards])]
    return sorted({card.ring for card in cards})


def _disagreement(head: Card, card: Card, rank: int) -> str | None:
    """Returns how the card of ``rank`` differs from rank 0's, None if they agree."""
    for name in ("world_size", "comm_device"):
        ours, theirs = getattr(head, name), getattr(card, name)
        if ours != theirs:
            return (
                f"{name} must be the same on every rank, got {ours!r} on rank 0 and {theirs!r} on "
                f"rank {rank}"
            )
    return None


class RollCall:
    """One rank's part in the roll-call over a store.

    Every rank calls ``start``, ``finish`` and, at the end, ``leave``. The first two block until all
    ranks have called them.

    Args:
        store: the store that all ranks reach.
        rank: this rank.
        world_size: how many ranks it expects.
        hosts: the store lives in this process, which must outlast the others' last look at it.
        reused: the store outlives the ring, so each roll-call on it needs keys of its own.
        over: tells whether rank 0 has begun another roll-call since, where its process and others
            may have been restarted: what is found here may be left by processes that are gone, and
            only rank 0, once it knows that all have come, ends it.

    Raises:
        LeftAlready: the ring before this one is still being taken down.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        hosts: bool = False,
        reused: bool = False,
        over: Callable[[], bool] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts = hosts
        # the larger of this rank's and rank 0's, once known: the ranks that a message must name
        self._expected = world_size
        self._over = over
        self._listed = False  # this process has this rank's number, and no other has it
        # All ranks take part in a roll-call before any can begin the next, so this count is the
        # same number of full rounds on each of them.
        number = (store.add("ringsim/arrivals", 1) - 1) // world_size if reused else 0
        self.store = PrefixStore(f"ringsim/{number}", store)
        if not reused and self.store.add("left", 0) > 0:
            raise LeftAlready

    def start(self, card: Card, deadline: float) -> list[tuple[int, ...]]:
        """Meets all ranks and compares their cards.

        Returns every ring of this world, as its global ranks in order.

        Args:
            card: what this rank says of itself.
            deadline: when to give up, on ``time.monotonic``'s clock.

        Raises:
            RendezvousFailed: a rank is missing, there twice, or disagrees; the message names those
                present and those missing.
            LeftAlready: this roll-call is that of an earlier attempt.
        """
        with self._connection():
            mine = card.to_json()
            if self.store.compare_set(f"start/{self.rank}", "", mine).decode() != mine:
                twice = f"two processes that say they are rank {self.rank}"
                if self._over is not None:
                    raise LeftAlready(twice)
                self._refuse("start", f"each rank must be there once, got {twice}")
            if self._over is not None and self.store.check(["start/verdict"]):
                raise LeftAlready
            self._listed = True
            if self.rank == 0:
                self.store.set("head", mine)
            elif not self._wait("head", deadline):
                self._refuse("start", "rank 0 must be there in time, got a time-out")
            head = Card.from_json(self.store.get("head"))
            self._expected = max(self.world_size, head.world_size)
            disagreement = _disagreement(head, card, self.rank)
            if disagreement is not None:
                self._refuse("start", disagreement)
            complete = self.store.add("start/count", 1) == self.world_size
            if self._over is not None:
                if complete:
                    self.store.set("start/all", "")
                complete = self.rank == 0 and self._wait("start/all", deadline)
            if complete:
                keys = [f"start/{rank}" for rank in range(self.world_size)]
                cards = [Card.from_json(text) for text in self.store.multi_get(keys)]
                fault = find_fault(cards)
                if fault is not None:
                    self._refuse("start", fault)
                self._publish("start", {"rings": list_rings(cards)})
            verdict = self._verdict("start", deadline)
        self._over = None  # all of them live
        return [tuple(ring) for ring in verdict["rings"]]

    def finish(self, deadline: float, failure: str | None = None) -> None:
        """Waits until all ranks have built their groups.

        So that none takes down what another still needs.

        Args:
            deadline: see ``start``.
            failure: why this rank could not build its groups; the others then end with these words
                at once.

        Raises:
            RendezvousFailed: a rank failed, or did not come this far in time.
        """
        with self._connection():
            self.store.set(f"built/{self.rank}", "")
            if failure is not None:
                self._refuse("built", failure)
            if self.store.add("built/count", 1) == self.world_size:
                self._publish("built", {})
            self._verdict("built", deadline)

    def leave(self, limit_s: float) -> None:
        """Announces that this rank is done with the store.

        The host stays until all are, at most ``limit_s`` seconds.
        """
        try:
            if self.store.add("left", 1) == self.world_size:
                self.store.set("all left", "")
            if self.hosts:
                self._wait("all left", time.monotonic() + limit_s)
        except RuntimeError:
            pass  # the store is gone already: nobody is left to tell

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Raises RendezvousFailed if the store is lost."""
        try:
            yield
        except RendezvousFailed:
            raise
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.world_size}"
            raise RendezvousFailed(
                "rank 0 must stay until every rank has built its groups, got a lost connection "
                f"({where}). See why rank 0 ended."
            ) from error

    def _wait(self, key: str, deadline: float) -> bool:
        """Waits for a key and returns whether it came in time."""
        if self._over is not None and self.rank:
            pause_s = 0.001
            while not self.store.check([key]):
                if self._over():
                    raise LeftAlready
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            return True
        try:
            self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            return False
        return True

    def _publish(self, stage: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Writes a verdict unless there is one, and returns the one that stands."""
        standing: dict[str, Any] = json.loads(
            self.store.compare_set(f"{stage}/verdict", "", json.dumps(verdict))
        )
        return standing

    def _verdict(self, stage: str, deadline: float) -> dict[str, Any]:
        """Waits for the verdict and returns it; raises where it is a refusal."""
        if self._wait(f"{stage}/verdict", deadline):
            verdict: dict[str, Any] = json.loads(self.store.get(f"{stage}/verdict"))
        else:
            arrived = self.store.add(f"{stage}/count", 0)
            why = "every rank must be there in time, got a time-out" + self._attendance(stage)
            verdict = self._publish(stage, {"error": why, "readers": arrived})
        if "error" in verdict:
            self._end(stage, verdict)
        return verdict

    def _attendance(self, stage: str) -> str:
        """Names the ranks that came this far and those that did not.

        Asks N times, so only when all is lost.
        """
        present = [rank for rank in range(self._expected) if self.store.check([f"{stage}/{rank}"])]
        missing = [rank for rank in range(self._expected) if rank not in present]
        return f": {in_words(present)} present, {in_words(missing)} missing"

    def _refuse(self, stage: str, why: str) -> NoReturn:
        """Ends the roll-call with one reason for every rank, those on their way included.

        Where it ended well, for this rank alone.
        """
        refusal = {"error": why + self._attendance(stage), "readers": self._expected}
        standing = self._publish(stage, refusal)
        self._end(stage, standing if "error" in standing else refusal)

    def _end(self, stage: str, verdict: dict[str, Any]) -> NoReturn:
        """Raises.

        A host first waits until those concerned, itself among them, could read the verdict.
        """
        if self._listed:
            read = self.store.add(f"{stage}/read", 1)
            give_up = time.monotonic() + _READERS_GRACE_S
            while self.hosts and read < verdict["readers"] and time.monotonic() < give_up:
                time.sleep(_POLL_S)
                read = self.store.add(f"{stage}/read", 0)
        raise RendezvousFailed(
            f"{verdict['error']} (rank {self.rank} of {self.world_size}). Start every rank once, "
            "with the same arguments but its own rank, within the time limit."
        )


Address = tuple[socket.AddressFamily, str]  # family and numeric address

_BACKLOG = 4096  # more ranks than one machine starts at once; the system caps it
_RETRY_S = 0.01
_KNOCK_S = 1.0
_FAREWELL_S = 5.0  # rank 0 waits this long at most for the others to be done with its store
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a world met."""

    roll: RollCall  # this rank's part in the roll-call; its ``store`` is theirs alone
    rings: list[tuple[int, ...]]  # every ring of this world, as its global ranks in order
    loopback: bool  # all of them are on this machine, and say so
    # the file descriptor this process listens on, None if another process does
    listener: int | None = None


def listen(host: str, port: int, *, timeout_s: float = 30) -> socket.socket:
    """Opens the socket that rank 0 hosts the store on, bound to ``host``'s own address.

    Loopback alone where ``host`` is loopback. Rank 0, or whoever starts it, calls this. It blocks
    for name resolution at most, ``timeout_s`` seconds.

    Raises:
        RendezvousFailed: the port is taken, the name is unknown, or the address is not this
            machine's.
    """
    failure: OSError | None = None
    for family, address in _resolve(host, time.monotonic() + timeout_s):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # a port that was in use a moment ago is free
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            failure = failure or error
        else:
            return listener
    if failure is not None and failure.errno == errno.EADDRINUSE:
        raise RendezvousFailed(
            f"port must be free on rank 0's machine, got {port}, where something listens on {host} "
            "already (rank 0). Choose another port, or end what listens there: another program, "
            "another run, or a second process started as rank 0."
        ) from failure
    raise RendezvousFailed(
        f"head_ip must be an address of rank 0's own machine, got {host!r}: {failure} (rank 0, "
        f"port {port}). "
        "Pass the address of the machine that rank 0 runs on; 127.0.0.1 where all ranks are on one."
    ) from failure


def meet(
    head_ip: str,
    port: int,
    rank: int,
    world_size: int,
    card: Card,
    timeout_s: float,
    listen_socket: socket.socket | None = None,
) -> Rendezvous:
    """Brings all ranks of a world together at rank 0 and calls the roll.

    Every rank calls it. It blocks until all are there, ``timeout_s`` at most.

    Args:
        head_ip: where rank 0 is: a numeric address or a name.
        port: where rank 0 listens.
        rank: this rank, from 0.
        world_size: how many ranks there are.
        card: what this rank says of itself.
        timeout_s: limit, in seconds.
        listen_socket: for rank 0, a socket that listens at ``head_ip`` and ``port`` already; it is
            taken over.

    Raises:
        RendezvousFailed: they could not all meet.
    """
    deadline = time.monotonic() + timeout_s
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(
        "MASTER_PORT"
    ) == str(port)
    if listen_socket is not None or (rank == 0 and not agent):
        listener = listen_socket or listen(head_ip, port, timeout_s=timeout_s)
        address = listener.getsockname()[0]
        alike = _leads_alike(head_ip)
        loopback = ipaddress.ip_address(address).is_loopback
        descriptor = listener.fileno()
        store = host(listener, timeout_s)
        roll = RollCall(store, rank, world_size, hosts=True)
        try:
            return Rendezvous(roll, roll.start(card, deadline), loopback and alike, descriptor)
        except BaseException as error:
            _stop_listening(descriptor)
            if isinstance(error, RendezvousFailed) and loopback and not alike:
                raise RendezvousFailed(
                    f"{error} If those that are missing are on other machines: {head_ip!r} leads "
                    f"to {address} on rank 0's own machine, where no other machine can reach it. "
                    "Pass rank 0's numeric address as head_ip, or set MASTER_ADDR to it."
                ) from error
            raise
    where = f"rank {rank} of {world_size}, head {head_ip}:{port}"
    addresses = _resolve(head_ip, deadline)
    loopback = _leads_alike(head_ip) and all(
        ipaddress.ip_address(address).is_loopback for _, address in addresses
    )
    while True:
        store = _join(addresses, port, deadline, where)
        try:
            if agent:
                roll = _follow_rank_0(store, rank, world_size)
            else:
                roll = RollCall(store, rank, world_size)
            return Rendezvous(roll, roll.start(card, deadline), loopback)
        except RendezvousFailed:
            raise
        except (LeftAlready, RuntimeError) as error:  # the ring before this one is still going
            if time.monotonic() > deadline:
                found = str(error) if isinstance(error, LeftAlready) else ""
                raise _unanswered(where, found or "a ring that is being taken down") from error
            time.sleep(_RETRY_S)


def _follow_rank_0(store: Store, rank: int, world_size: int) -> RollCall:
    """Takes part in rank 0's next roll-call in a store that torchrun keeps for all its restarts.

    Rank 0 numbers them: each agent of torchrun counts the restarts of its own ranks alone.

    Raises:
        LeftAlready: rank 0 has not begun one.
    """
    number = store.add("ringsim/roll-calls", int(rank == 0))
    if number == 0:
        raise LeftAlready("a store in which rank 0 is not there yet")

    def over() -> bool:
        return bool(store.add("ringsim/roll-calls", 0) != number)

    own = PrefixStore(f"ringsim/roll-call {number}", store)
    return RollCall(own, rank, world_size, over=over)


def meet_over(store: Store, rank: int, world_size: int, card: Card, timeout_s: float) -> Rendezvous:
    """Calls the roll over a store that the ranks share already.

    For the arguments, what it returns and raises see ``meet``.
    """
    deadline = time.monotonic() + timeout_s
    roll = RollCall(store, rank, world_size, reused=True)
    return Rendezvous(roll, roll.start(card, deadline), loopback=False)


def host(listener: socket.socket, timeout_s: float) -> Store:
    """Hosts a store that ranks meet over in this process.

    On a socket from ``listen`` or ``close_door``, which is the store's afterwards. It lives as long
    as somebody holds it; a look-up in it waits ``timeout_s`` seconds.
    """
    address, port = listener.getsockname()[:2]
    return reach(address, port, timeout_s, listener.detach())


def reach(address: str, port: int, timeout_s: float, descriptor: int | None = None) -> Store:
    """Connects to a store, in which a look-up waits ``timeout_s`` seconds.

    Another process hosts it, or this one does on a socket that listens: ``descriptor``.
    """

    def connect() -> Store:
        limit = timedelta(seconds=timeout_s)
        hosts = descriptor is not None
        store: Store = TCPStore(
            address, port, None, hosts, limit, wait_for_workers=False, master_listen_fd=descriptor
        )
        return store

    return BackgroundCall(connect).result(timeout_s)


def close_door(descriptor: int, address: str, port: int) -> socket.socket | None:
    """Ends the listening of a store whose ranks have all come.

    They stay connected, and nobody else can reach it.

    Args:
        descriptor: of the socket that the store listens on.
        address: what that is bound to.
        port: its port.

    Returns:
        A socket that holds the port and does not listen, for ``host`` to open another store on;
        None if another process was quicker.
    """
    _stop_listening(descriptor)
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((address, port))
    except OSError:
        holder.close()
        return None
    return holder


def build_default_group(
    rendezvous: Rendezvous, rank: int, world_size: int, backend: str, timeout: timedelta
) -> Callable[[], None]:
    """Builds torch's default process group over the ranks that met.

    Every rank calls it. It blocks until all are connected. Where the ranks met on loopback, Gloo
    stays there, for this group and for every later one; what is returned undoes that, once the
    group is destroyed.
    """
    interface = (
        loopback_interface() if rendezvous.loopback and _INTERFACE not in os.environ else None
    )
    if interface is not None:
        os.environ[_INTERFACE] = interface

    def undo() -> None:
        if interface is not None and os.environ.get(_INTERFACE) == interface:
            del os.environ[_INTERFACE]

    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("default", rendezvous.roll.store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except BaseException:
        undo()
        raise
    return undo


@contextmanager
def finishing(rendezvous: Rendezvous, timeout_s: float) -> Iterator[None]:
    """Waits at the end of a with block until all ranks have built their groups.

    A group that cannot be built within ends all ranks with the same words.
    """
    roll, why, failure = rendezvous.roll, None, None
    try:
        yield
    except (RuntimeError, ValueError) as error:
        failure = error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"rank {roll.rank} must reach its peers, got {reason}"
    try:
        roll.finish(time.monotonic() + timeout_s, why)
    except RendezvousFailed as error:
        raise error from failure


def leave(rendezvous: Rendezvous, timeout_s: float) -> None:
    """Takes leave of the store.

    Rank 0 stays until the others are done with it, a few seconds at most, then frees the port.
    """
    limit_s = min(timeout_s, _FAREWELL_S)
    with suppress(TimeoutError):  # a store whose process is stopped takes words and never answers
        BackgroundCall(lambda: rendezvous.roll.leave(limit_s)).result(limit_s + _KNOCK_S)
    if rendezvous.listener is not None:
        _stop_listening(rendezvous.listener)


def _stop_listening(descriptor: int) -> None:
    """Frees the port of a store that is still alive.

    A socket that listens to nobody takes the place of its own. For a group or a traceback that
    somebody keeps also keeps the store, and the store its socket.
    """
    with socket.socket() as idle:
        os.dup2(idle.fileno(), descriptor, inheritable=False)


def _join(addresses: list[Address], port: int, deadline: float, where: str) -> Store:
    """Connects to rank 0's store as soon as it listens."""
    found = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        for family, address in addresses:
            try:
                with socket.socket(family, socket.SOCK_STREAM) as knock:
                    knock.settimeout(min(remaining, _KNOCK_S))
                    knock.connect((address, port))
            except OSError as error:
                found = str(error)
                continue
            try:
                return reach(address, port, remaining)
            except TimeoutError as error:
                raise _unanswered(
                    where, "a listener that does not answer as rank 0 does"
                ) from error
            except RuntimeError as error:
                found = f"a listener that answers otherwise ({str(error).splitlines()[0]})"
        time.sleep(_RETRY_S)
    raise _unanswered(where, found)


def _unanswered(where: str, found: str) -> RendezvousFailed:
    return RendezvousFailed(
        f"rank 0 must answer at head_ip and port within the time limit, got {found} ({where}). "
        "Rank 0 is missing, and who else is there shows only where it is: start it, or correct "
        "head_ip and port."
    )


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host's numeric address, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _leads_alike(host: str) -> bool:
    """Returns whether a host that leads to loopback here does so on every machine.

    An address, or "localhost". A machine's own name does not: its /etc/hosts may lead to loopback
    (Debian: 127.0.1.1) where the others find its address on the network.
    """
    return host == "localhost" or _numeric(host) is not None


def _resolve(host: str, deadline: float) -> list[Address]:
    """Returns the numeric addresses of a host.

    IPv4 first, so that rank 0 and the others try the same one first.
    """
    numeric = _numeric(host)
    if numeric is not None:
        if numeric.is_unspecified:
            raise ArgumentError(
                f"head_ip must be one address that the ranks can reach, got {host!r}. Pass rank "
                "0's own address, such as 127.0.0.1."
            )
        return [(socket.AF_INET if numeric.version == 4 else socket.AF_INET6, host)]
    try:
        look_up = BackgroundCall(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        found = look_up.result(max(deadline - time.monotonic(), 0.001))
    except (OSError, UnicodeError) as error:  # a time-out is an OSError too
        raise RendezvousFailed(
            f"head_ip must be an address or a name that this machine knows, got {host!r}: {error}. "
            "Correct it, or pass rank 0's numeric address. Rank 0 is missing."
        ) from error
    addresses = {(family, str(address[0])): None for family, _, _, _, address in found}
    return sorted(addresses, key=lambda each: each[0] != socket.AF_INET)


def loopback_interface() -> str | None:
    """Returns the name of this machine's loopback interface.

    "lo" on Linux, "lo0" on macOS; None if it has another name.
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
