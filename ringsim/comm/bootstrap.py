"""The rendezvous of the ranks.

This module provides the listening socket, the store behind it, the roll-call, and the default
process group. Rank 0 opens the listening socket itself and passes it to torch's store, which would
otherwise listen on every network of the machine. The other ranks connect to the socket by a numeric
address. If an unrelated program listens there and never answers, torch's client ignores its
timeout, so the client runs in a thread that can be abandoned.

If ranks disagree (two ranks have the same number, the world sizes differ, or a rank is missing),
torch would wait for half an hour, or silently run a smaller world. So each rank first puts a card
into the store, and waits for one verdict on all cards::

    rank                      store                         cost for a rank
      |-- get "head" --------->|  rank 0's card               one wait
      |-- compare_set card/r ->|  mine, unless taken          one operation
      |-- add "count" -------->|  I am the n-th               one operation
      |      (the last one reads all cards and writes the verdict)
      |-- get "verdict" ------>|  the rings, or an error

A rank that finds a fault, or runs out of time, writes the verdict instead. Only the first verdict
counts, so every rank ends with the same message.
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

# public, although torch does not list it
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim.environment import order_by_hosts, read_address
from ringsim.errors import ArgumentError, RendezvousFailed

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call on a background thread that can be abandoned, even when the process ends.

    Use this class for torch calls that ignore time limits.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        # threading.Thread would wait here until the new thread runs: with many ranks on few cores,
        # all other ranks may run first.
        _thread.start_new_thread(self._run, (call,))

    def result(self, limit_s: float) -> T:
        """Returns the call's result, or raises the call's exception.

        Raises TimeoutError if the call has not ended within ``limit_s``; the call continues.
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


_LEFT_S = 5.0  # the time that an ending process waits for an abandoned thread


def leave_thread(thread: threading.Thread, limit_s: float) -> None:
    """Waits for a thread that was asked to stop, and again when the interpreter exits.

    If a torch call returned in that thread later, the process would abort.
    """
    thread.join(limit_s)
    if thread.is_alive():
        atexit.register(thread.join, _LEFT_S)


_READERS_GRACE_S = 1.0  # the time that a failed host waits until the others have read the reason
_POLL_S = 0.005
_MOST_PAUSE_S = 0.05


class LeftAlready(Exception):
    """Raised if the store belongs to a ring that is being destroyed, or to an earlier attempt.

    The next store does not exist yet.
    """


@dataclass(frozen=True)
class Card:
    """A rank's description of itself for the roll-call."""

    world_size: int  # the number of ranks that the rank expects
    comm_device: str  # "cpu" or "gpu"
    ring: tuple[int, ...]  # the global ranks of its ring, in order
    gpu: str = ""  # the GPU that the rank uses, or "" on the CPU
    host: str = ""  # set only if the ring of all ranks is ordered by hosts
    # distinguishes two processes with the same rank
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> str:
        """Returns the card as text for the store.

        A ring of all ranks in order is omitted, to keep the N cards short.
        """
        values = asdict(self)
        if self.ring == tuple(range(self.world_size)):
            del values["ring"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: bytes) -> Card:
        """Returns the card written by ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, "ring": tuple(values.get("ring", range(values["world_size"])))})


def in_words(ranks: list[int]) -> str:
    """Formats ranks as words: "no rank", "rank 2", "ranks 0-2, 5"."""
    if not ranks:
        return "no rank"
    runs = []
    for _, pairs in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        runs.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def find_fault(cards: list[Card]) -> str | None:
    """Describes the first fault in a full set of cards, or returns None if there is no fault.

    The cards must be complete, one per rank, in order.
    """
    users: dict[str, int] = {}
    for rank, card in enumerate(cards):
        disagreement = _disagreement(cards[0], card, rank)
        if disagreement is not None:
            return disagreement
        if card.gpu and users.setdefault(card.gpu, rank) != rank:
            return f"ranks {users[card.gpu]} and {rank} use the same GPU, {card.gpu}"
        for other in card.ring:
            if cards[other].ring != card.ring:
                sides = (
                    f"rank {rank} passed {list(card.ring)}, but rank {other} passed "
                    f"{list(cards[other].ring)}"
                )
                return f"the ranks of a ring passed different values of ring_ranks: {sides}"
    asked = [rank for rank, card in enumerate(cards) if card.host]
    if 0 < len(asked) < len(cards):
        return f'only {in_words(asked)} passed ring_order="hosts"'
    return None


def list_rings(cards: list[Card]) -> list[tuple[int, ...]]:
    """Returns all rings in a world; each ring is a sequence of its global ranks, in order.

    The cards must be complete and free of faults.

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
    """Returns the difference between the cards of rank 0 and ``rank``, or None if they agree."""
    for name in ("world_size", "comm_device"):
        ours, theirs = getattr(head, name), getattr(card, name)
        if ours != theirs:
            return f"{name} is {ours!r} on rank 0, but {theirs!r} on rank {rank}"
    return None


class RollCall:
    """One rank's side of the roll-call over a store.

    Every rank calls ``start``, ``finish`` and, at the end, ``leave``. ``start`` and ``finish``
    block until all ranks have called them.

    Args:
        store: the store that all ranks can reach.
        rank: this rank.
        card: the card of this rank.
        hosts: whether the store lives in this process, which must then wait until the other ranks
            have read the store for the last time.
        reused: whether the store outlives the ring, so that each roll-call needs its own keys.
        over: a function that returns whether rank 0 has begun a newer roll-call, for processes that
            may be restarted. In that case, the store may contain entries from dead processes, and
            only rank 0 completes the roll-call, once it knows that all ranks have arrived.

    Raises:
        LeftAlready: the previous ring is still being destroyed.
    """

    _listed = False  # whether this process is the only one with this rank's number

    def __init__(
        self,
        store: Store,
        rank: int,
        card: Card,
        *,
        hosts: bool = False,
        reused: bool = False,
        over: Callable[[], bool] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, card.world_size
        self._card, self._hosts = card, hosts
        # the larger of this rank's and rank 0's world size: a message must list all these ranks
        self._expected = self.world_size
        self._over = over
        # All ranks take part in a roll-call before any rank can begin the next one, so this number
        # of complete rounds is the same on all ranks.
        number = (store.add("ringsim/arrivals", 1) - 1) // self.world_size if reused else 0
        self.store = PrefixStore(f"ringsim/{number}", store)
        if not reused and self.store.add("left", 0) > 0:
            raise LeftAlready

    def start(self, deadline: float) -> list[tuple[int, ...]]:
        """Meets all ranks and compares their cards.

        Returns all rings of this world, each as its global ranks in order.

        Args:
            deadline: the time at which to give up, on ``time.monotonic``'s clock.

        Raises:
            RendezvousFailed: a rank is missing, present twice, or disagrees; the message lists the
                present and the missing ranks.
            LeftAlready: this roll-call belongs to an earlier attempt.
        """
        with self._connection():
            mine = self._card.to_json()
            if self.store.compare_set(f"start/{self.rank}", "", mine).decode() != mine:
                twice = f"two processes have rank {self.rank}"
                if self._over is not None:
                    raise LeftAlready(twice)
                self._refuse("start", twice)
            if self._over is not None and self.store.check(["start/verdict"]):
                raise LeftAlready
            self._listed = True
            if self.rank == 0:
                self.store.set("head", mine)
            elif not self._wait("head", deadline):
                self._refuse("start", "rank 0 did not arrive within the time limit")
            head = Card.from_json(self.store.get("head"))
            self._expected = max(self.world_size, head.world_size)
            disagreement = _disagreement(head, self._card, self.rank)
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
        self._over = None  # all ranks are alive
        return [tuple(ring) for ring in verdict["rings"]]

    def finish(self, deadline: float, failure: str | None = None) -> None:
        """Waits until all ranks have created their groups.

        Otherwise, a rank could destroy resources that another rank still needs.

        Args:
            deadline: see ``start``.
            failure: the reason why this rank could not create its groups; all other ranks then
                immediately fail with the same message.

        Raises:
            RendezvousFailed: a rank failed, or did not get this far in time.
        """
        with self._connection():
            self.store.set(f"built/{self.rank}", "")
            if failure is not None:
                self._refuse("built", failure)
            if self.store.add("built/count", 1) == self.world_size:
                self._publish("built", {})
            self._verdict("built", deadline)

    def leave(self, limit_s: float) -> None:
        """Announces that this rank no longer needs the store.

        The host waits until no rank needs the store, for at most ``limit_s`` seconds.
        """
        try:
            if self.store.add("left", 1) == self.world_size:
                self.store.set("all left", "")
            if self._hosts:
                self._wait("all left", time.monotonic() + limit_s)
        except RuntimeError:
            pass  # the store is already closed

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Raises RendezvousFailed if the store is lost."""
        try:
            yield
        except RendezvousFailed:
            raise
        except RuntimeError as error:
            raise RendezvousFailed(
                "rank 0 closed the connection before every rank had created its groups "
                f"(rank {self.rank} of {self.world_size}). Check why rank 0 ended."
            ) from error

    def _wait(self, key: str, deadline: float) -> bool:
        """Waits for a key and returns whether it appeared in time."""
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

    def _publish(self, stage: str, verdict: dict[str, Any]) -> Any:
        """Writes a verdict unless one already exists, and returns the verdict that counts."""
        return json.loads(self.store.compare_set(f"{stage}/verdict", "", json.dumps(verdict)))

    def _verdict(self, stage: str, deadline: float) -> Any:
        """Waits for the verdict and returns it, or raises RendezvousFailed for an error."""
        if self._wait(f"{stage}/verdict", deadline):
            verdict = json.loads(self.store.get(f"{stage}/verdict"))
        else:
            arrived = self.store.add(f"{stage}/count", 0)
            why = "not all ranks arrived within the time limit" + self._attendance(stage)
            verdict = self._publish(stage, {"error": why, "readers": arrived})
        if "error" in verdict:
            self._end(stage, verdict)
        return verdict

    def _attendance(self, stage: str) -> str:
        """Lists the ranks that have arrived and the ranks that are missing.

        This takes N requests, so the method is used only for errors.
        """
        present = [rank for rank in range(self._expected) if self.store.check([f"{stage}/{rank}"])]
        missing = [rank for rank in range(self._expected) if rank not in present]
        return f": {in_words(present)} present, {in_words(missing)} missing"

    def _refuse(self, stage: str, why: str) -> NoReturn:
        """Ends the roll-call with the same error on every rank, including ranks that arrive later.

        If the roll-call has already succeeded, only this rank fails.
        """
        refusal = {"error": why + self._attendance(stage), "readers": self._expected}
        standing = self._publish(stage, refusal)
        self._end(stage, standing if "error" in standing else refusal)

    def _end(self, stage: str, verdict: dict[str, Any]) -> NoReturn:
        """Raises RendezvousFailed.

        A host first waits until all expected readers, including itself, have read the verdict.
        """
        if self._listed:
            read = self.store.add(f"{stage}/read", 1)
            give_up = time.monotonic() + _READERS_GRACE_S
            while self._hosts and read < verdict["readers"] and time.monotonic() < give_up:
                time.sleep(_POLL_S)
                read = self.store.add(f"{stage}/read", 0)
        raise RendezvousFailed(
            f"{verdict['error']} (rank {self.rank} of {self.world_size}). Start every rank "
            "exactly once, within the time limit, and with the same arguments except for the "
            "rank."
        )


Address = tuple[socket.AddressFamily, str]  # family and numeric address

_BACKLOG = 4096  # more ranks than one machine starts at the same time; the system caps the value
_RETRY_S = 0.01
_KNOCK_S = 1.0
_FAREWELL_S = 5.0  # the longest time that rank 0 waits for the others to leave its store
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous."""

    roll: RollCall  # this rank's part in the roll-call; no other world uses its ``store``
    rings: list[tuple[int, ...]]  # every ring of this world, as its global ranks in order
    loopback: bool  # whether all ranks met on this machine's loopback
    # the file descriptor on which this process listens, or None if a different process listens
    listener: int | None = None


def listen(host: str, port: int, *, timeout_s: float = 30) -> socket.socket:
    """Opens a socket, bound to the address of ``host``, on which rank 0 hosts the store.

    If ``host`` is loopback, the socket listens only there. Call this function on rank 0, or in the
    process that starts rank 0. It blocks only for name resolution, for at most ``timeout_s``
    seconds.

    Raises:
        RendezvousFailed: the port is in use, the name is unknown, or the address belongs to a
            different machine.
    """
    failure: OSError | None = None
    for family, address in _resolve(host, time.monotonic() + timeout_s):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # allows a port that was in use a moment ago
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
            f"cannot listen on {host}, port {port}: the port is already in use (rank 0). "
            "Choose a different port, or end the process listening there: another program, "
            "another run, or a second process started as rank 0."
        ) from failure
    raise RendezvousFailed(
        f"cannot listen on {host}, port {port}: {failure} (rank 0). Pass the address of rank 0's "
        "own machine as head_ip, or 127.0.0.1 if all ranks run on one machine."
    ) from failure


def meet(
    head_ip: str,
    port: int,
    rank: int,
    card: Card,
    timeout_s: float,
    listen_socket: socket.socket | None = None,
) -> Rendezvous:
    """Connects all ranks of a world to rank 0 and calls the roll.

    Call this function on every rank. It blocks until all ranks have arrived, for at most
    ``timeout_s``.

    Args:
        head_ip: the numeric address or the name of rank 0's machine.
        port: the port on which rank 0 listens.
        rank: this rank, from 0.
        card: the card of this rank.
        timeout_s: the time limit, in seconds.
        listen_socket: for rank 0, a socket that already listens at ``head_ip`` and ``port``;
            ``meet`` takes it over.

    Raises:
        RendezvousFailed: not all ranks could meet.
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
        roll = RollCall(store, rank, card, hosts=True)
        try:
            return Rendezvous(roll, roll.start(deadline), loopback and alike, descriptor)
        except BaseException as error:
            _stop_listening(descriptor)
            if isinstance(error, RendezvousFailed) and loopback and not alike:
                raise RendezvousFailed(
                    f"{error} Ranks on other machines cannot reach rank 0, because {head_ip!r} "
                    f"resolves to {address} on rank 0's machine. If the missing ranks run "
                    "elsewhere, pass rank 0's numeric address as head_ip, or set MASTER_ADDR to "
                    "that address."
                ) from error
            raise
    where = f"rank {rank} of {card.world_size}, head {head_ip}:{port}"
    addresses = _resolve(head_ip, deadline)
    loopback = _leads_alike(head_ip) and all(
        ipaddress.ip_address(address).is_loopback for _, address in addresses
    )
    while True:
        store = _join(addresses, port, deadline, where)
        try:
            roll = (_follow_rank_0 if agent else RollCall)(store, rank, card)
            return Rendezvous(roll, roll.start(deadline), loopback)
        except RendezvousFailed:
            raise
        except (LeftAlready, RuntimeError) as error:  # the previous ring still exists
            if time.monotonic() > deadline:
                found = str(error) if isinstance(error, LeftAlready) else ""
                raise _unanswered(
                    where, found or "the previous ring is still being destroyed"
                ) from error
            time.sleep(_RETRY_S)


def _follow_rank_0(store: Store, rank: int, card: Card) -> RollCall:
    """Joins rank 0's next roll-call, in a store that torchrun keeps across restarts.

    Rank 0 numbers the roll-calls, because each torchrun agent counts only the restarts of its own
    ranks.

    Raises:
        LeftAlready: rank 0 has not begun a roll-call.
    """
    number = store.add("ringsim/roll-calls", int(rank == 0))
    if number == 0:
        raise LeftAlready("rank 0 has not reached the store")

    def over() -> bool:
        return bool(store.add("ringsim/roll-calls", 0) != number)

    own = PrefixStore(f"ringsim/roll-call {number}", store)
    return RollCall(own, rank, card, over=over)


def meet_over(store: Store, rank: int, card: Card, timeout_s: float) -> Rendezvous:
    """Calls the roll over a store that the ranks already share.

    For the arguments, the result and the exceptions, see ``meet``.
    """
    deadline = time.monotonic() + timeout_s
    roll = RollCall(store, rank, card, reused=True)
    return Rendezvous(roll, roll.start(deadline), loopback=False)


def host(listener: socket.socket, timeout_s: float) -> Store:
    """Hosts a store for a rendezvous in this process.

    The store takes over a socket from ``listen`` or ``close_door``. The store exists as long as it
    is referenced; a lookup in the store waits at most ``timeout_s`` seconds.
    """
    address, port = listener.getsockname()[:2]
    return reach(address, port, timeout_s, listener.detach())


def reach(address: str, port: int, timeout_s: float, descriptor: int | None = None) -> Store:
    """Connects to a store whose lookups wait at most ``timeout_s`` seconds.

    The store is hosted by a different process, or by this process on the listening socket
    ``descriptor``.
    """

    def connect() -> Any:
        hosts, limit = descriptor is not None, timedelta(seconds=timeout_s)
        return TCPStore(
            address, port, None, hosts, limit, wait_for_workers=False, master_listen_fd=descriptor
        )

    return BackgroundCall[Store](connect).result(timeout_s)


def close_door(descriptor: int, address: str, port: int) -> socket.socket | None:
    """Makes a store stop listening after all its ranks have arrived.

    The ranks stay connected, and no other process can reach the store.

    Args:
        descriptor: the descriptor of the socket on which the store listens.
        address: the address to which the socket is bound.
        port: the port to which the socket is bound.

    Returns:
        A socket that holds the port and does not listen, on which ``host`` can open a new store, or
        None if another process has taken the port.
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
    rendezvous: Rendezvous, backend: str, timeout: timedelta
) -> Callable[[], None]:
    """Creates torch's default process group for the ranks that joined the rendezvous.

    Call this function on every rank. It blocks until all ranks are connected. If the ranks met on
    loopback, Gloo uses only loopback for this group and all later ones; call the returned function
    to undo this change after the group is destroyed.
    """
    roll = rendezvous.roll
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
            store=PrefixStore("default", roll.store),
            rank=roll.rank,
            world_size=roll.world_size,
            timeout=timeout,
        )
    except BaseException:
        undo()
        raise
    return undo


@contextmanager
def finishing(rendezvous: Rendezvous, timeout_s: float) -> Iterator[None]:
    """At the end of a with block, waits until all ranks have created their groups.

    If a group cannot be created in the block, all ranks fail with the same message.
    """
    roll, why, failure = rendezvous.roll, None, None
    try:
        yield
    except (RuntimeError, ValueError) as error:
        failure = error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"rank {roll.rank} cannot connect to its peers: {reason}"
    try:
        roll.finish(time.monotonic() + timeout_s, why)
    except RendezvousFailed as error:
        raise error from failure


def leave(rendezvous: Rendezvous, timeout_s: float) -> None:
    """Leaves the store.

    Rank 0 waits, at most a few seconds, until the others no longer need the store, and then frees
    the port.
    """
    limit_s = min(timeout_s, _FAREWELL_S)
    with suppress(TimeoutError):  # a store in a stopped process accepts requests but never answers
        BackgroundCall(lambda: rendezvous.roll.leave(limit_s)).result(limit_s + _KNOCK_S)
    if rendezvous.listener is not None:
        _stop_listening(rendezvous.listener)


def _stop_listening(descriptor: int) -> None:
    """Frees the port of a store that is still alive.

    This function replaces the store's socket with a socket that does not listen, because a group or
    a traceback may keep the store alive, and the store keeps its socket.
    """
    with socket.socket() as idle:
        os.dup2(idle.fileno(), descriptor, inheritable=False)


def _join(addresses: list[Address], port: int, deadline: float, where: str) -> Store:
    """Connects to rank 0's store as soon as rank 0 is listening."""
    found = "no process answered"
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
                    where, "the process listening there does not respond as rank 0 would"
                ) from error
            except RuntimeError as error:
                found = (
                    "the process listening there does not respond as rank 0 would "
                    f"({str(error).splitlines()[0]})"
                )
        time.sleep(_RETRY_S)
    raise _unanswered(where, found)


def _unanswered(where: str, found: str) -> RendezvousFailed:
    return RendezvousFailed(
        f"rank 0 did not answer at head_ip and port within the time limit: {found} ({where}). "
        "Rank 0 is missing, so ringsim cannot list the other missing ranks. Start rank 0, or "
        "correct head_ip and port."
    )


def _leads_alike(host: str) -> bool:
    """Returns whether a host that resolves to loopback here also does so on every other machine.

    An address or "localhost" always resolves the same way. A machine's own name does not: the
    machine's /etc/hosts may map the name to loopback (Debian: 127.0.1.1), while other machines get
    the machine's address on the network.
    """
    return host == "localhost" or read_address(host) is not None


def _resolve(host: str, deadline: float) -> list[Address]:
    """Returns the numeric addresses of a host.

    IPv4 addresses come first, so that rank 0 and the others first try the same address.
    """
    numeric = read_address(host)
    if numeric is not None:
        if numeric.is_unspecified:
            raise ArgumentError(
                f"head_ip must be an address that the ranks can reach, got {host!r}. Pass rank "
                "0's own address, such as 127.0.0.1."
            )
        return [(socket.AF_INET if numeric.version == 4 else socket.AF_INET6, host)]
    try:
        look_up = BackgroundCall(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        found = look_up.result(max(deadline - time.monotonic(), 0.001))
    except (OSError, UnicodeError) as error:  # a timeout is also an OSError
        raise RendezvousFailed(
            f"rank 0 is missing, because this machine cannot resolve head_ip {host!r}: {error}. "
            "Correct the name, or pass rank 0's numeric address."
        ) from error
    addresses = {(family, str(address[0])): None for family, _, _, _, address in found}
    return sorted(addresses, key=lambda each: each[0] != socket.AF_INET)


def loopback_interface() -> str | None:
    """Returns the name of this machine's loopback interface.

    The name is "lo" on Linux and "lo0" on macOS; the result is None if the interface has a
    different name.
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
