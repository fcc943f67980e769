"""How ranks find each other: the socket they meet at, the store behind it, and the default process group.

Rank 0 opens the listening socket itself and hands it to torch's store, for torch's own would listen on every network of the machine. The
others come to it by a numeric address. Whoever listens there may be a stranger that never answers, and torch's client then ignores its
time-out; so it runs in a thread that can be left behind.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim.background import BackgroundCall
from ringsim.errors import ArgumentError, RendezvousFailed
from ringsim.roll_call import Card, LeftAlready, RollCall

__all__ = ["Rendezvous", "build_default_group", "host", "leave", "listen", "loopback_interface", "meet", "meet_over"]

Address = tuple[socket.AddressFamily, str]  # family and numeric address

_BACKLOG = 4096  # more ranks than one machine starts at once; the system caps it
_RETRY_S = 0.01
_KNOCK_S = 1.0
_FAREWELL_S = 5.0  # rank 0 waits this long at most for the others to be done with its store
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a world met.

    Attributes:
        roll: this rank's part in the roll-call; its ``store`` is theirs alone.
        rings: every ring of this world, as its global ranks in order.
        loopback: all of them are on this machine, and say so.
        listener: the file descriptor this process listens on, None where another does.
    """

    roll: RollCall
    rings: list[tuple[int, ...]]
    loopback: bool
    listener: int | None = None


def listen(host: str, port: int, *, timeout_s: float = 30) -> socket.socket:
    """Opens the socket that rank 0 hosts the store on, bound to ``host``'s own address: loopback alone where ``host`` is loopback.

    Only rank 0, or who starts it, calls this. It blocks for name resolution at most.

    Args:
        host: a numeric address or a name of this machine.
        port: 1 to 65535, or 0 to let the system choose one.
        timeout_s: limit of the name's resolution, in seconds.

    Returns:
        The listening socket; ``getsockname()[1]`` is its port.

    Raises:
        RendezvousFailed: the port is taken, the name is unknown, or the address is not this machine's.

    Example:
        >>> with listen("127.0.0.1", 0) as listener:
        ...     listener.getsockname()[0]
        '127.0.0.1'
    """
    failure: OSError | None = None
    for family, address in _resolve(host, time.monotonic() + timeout_s):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was in use a moment ago is free
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            failure = failure or error
        else:
            return listener
    if failure is not None and failure.errno == errno.EADDRINUSE:
        raise RendezvousFailed(
            f"port must be free on rank 0's machine, got {port}, where something listens on {host} already (rank 0). "
            "Choose another port, or end what listens there: another program, another run, or a second process started as rank 0."
        ) from failure
    raise RendezvousFailed(
        f"head_ip must be an address of rank 0's own machine, got {host!r}: {failure} (rank 0, port {port}). "
        "Pass the address of the machine that rank 0 runs on; 127.0.0.1 where all ranks are on one."
    ) from failure


def meet(
    head_ip: str, port: int, rank: int, world_size: int, card: Card, timeout_s: float, listen_socket: socket.socket | None = None
) -> Rendezvous:
    """Brings all ranks of a world together at rank 0 and calls the roll.

    Every rank calls it. It blocks until all are there, ``timeout_s`` at most.

    Args:
        head_ip: where rank 0 is: a numeric address or a name.
        port: where rank 0 listens.
        rank: this rank, 0 to ``world_size`` - 1.
        world_size: how many ranks there are.
        card: what this rank says of itself.
        timeout_s: limit, in seconds.
        listen_socket: for rank 0, a socket that listens at ``head_ip`` and ``port`` already; it is taken over.

    Returns:
        The store they share, and who rings with whom.

    Raises:
        RendezvousFailed: they could not all meet.
    """
    deadline = time.monotonic() + timeout_s
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_PORT") == str(port)
    if listen_socket is not None or (rank == 0 and not agent):
        listener = listen_socket or listen(head_ip, port, timeout_s=timeout_s)
        address = listener.getsockname()[0]
        loopback = ipaddress.ip_address(address).is_loopback
        descriptor = listener.fileno()
        store = host(listener, timeout_s)
        roll = RollCall(store, rank, world_size, hosts=True, reused=False)
        try:
            return Rendezvous(roll, roll.start(card, deadline), loopback and _leads_alike(head_ip), descriptor)
        except BaseException as error:
            _stop_listening(descriptor)
            if isinstance(error, RendezvousFailed) and loopback and not _leads_alike(head_ip):
                raise RendezvousFailed(
                    f"{error} If those that are missing are on other machines: {head_ip!r} leads to {address} on rank 0's own machine, "
                    "where no other machine can reach it. Pass rank 0's numeric address as head_ip, or set MASTER_ADDR to it."
                ) from error
            raise
    where = f"rank {rank} of {world_size}, head {head_ip}:{port}"
    addresses = _resolve(head_ip, deadline)
    loopback = _leads_alike(head_ip) and all(ipaddress.ip_address(address).is_loopback for _, address in addresses)
    while True:
        store = _join(addresses, port, deadline, where)
        try:
            if agent:  # torchrun keeps one store for all its restarts, so each of them gets a part of its own
                store = PrefixStore(f"ringsim/restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            roll = RollCall(store, rank, world_size, hosts=False, reused=agent)
        except (LeftAlready, RuntimeError) as error:  # the ring before this one is still going
            if time.monotonic() > deadline:
                raise _unanswered(where, "a ring that is being taken down") from error
            time.sleep(_RETRY_S)
        else:
            return Rendezvous(roll, roll.start(card, deadline), loopback)


def meet_over(store: Store, rank: int, world_size: int, card: Card, timeout_s: float) -> Rendezvous:
    """Calls the roll over a store that the ranks share already; for the arguments, what it returns and raises see ``meet``."""
    deadline = time.monotonic() + timeout_s
    roll = RollCall(store, rank, world_size, hosts=False, reused=True)
    return Rendezvous(roll, roll.start(card, deadline), loopback=False)


def host(listener: socket.socket, timeout_s: float) -> Store:
    """Hosts the store that the ranks meet over in this process.

    Rank 0, or who starts it, calls this. It does not block. The store lives as long as somebody holds it.

    Args:
        listener: a listening socket, from ``listen``; it belongs to the store afterwards.
        timeout_s: how long a look-up in the store waits, in seconds.

    Returns:
        The store.

    Example:
        >>> store = host(listen("127.0.0.1", 0), timeout_s=5)
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
    """
    address, port = listener.getsockname()[:2]
    return BackgroundCall(partial(_connect, address, port, timeout_s, listener.detach())).result(timeout_s)


def build_default_group(rendezvous: Rendezvous, rank: int, world_size: int, backend: str, timeout: timedelta) -> Callable[[], None]:
    """Builds torch's default process group over the ranks that met.

    Every rank calls it. It blocks until all are connected. Where the ranks met on loopback, Gloo stays there, for this group and for
    every later one.

    Args:
        rendezvous: what ``meet`` returned.
        rank: this rank.
        world_size: how many ranks there are.
        backend: "gloo" or "nccl".
        timeout: limit of each operation on the group.

    Returns:
        A function that undoes the choice of the network; to be called after the group is destroyed.
    """
    interface = loopback_interface() if rendezvous.loopback and _INTERFACE not in os.environ else None
    if interface is not None:
        os.environ[_INTERFACE] = interface

    def undo() -> None:
        if interface is not None and os.environ.get(_INTERFACE) == interface:
            del os.environ[_INTERFACE]

    try:
        dist.init_process_group(
            backend, store=PrefixStore("default", rendezvous.roll.store), rank=rank, world_size=world_size, timeout=timeout
        )
    except BaseException:
        undo()
        raise
    return undo


def leave(rendezvous: Rendezvous, timeout_s: float) -> None:
    """Takes leave of the store; rank 0 stays until the others are done with it, a few seconds at most, and then frees the port."""
    limit_s = min(timeout_s, _FAREWELL_S)
    with suppress(TimeoutError):  # a store whose process is stopped takes words and never answers
        BackgroundCall(lambda: rendezvous.roll.leave(limit_s)).result(limit_s + _KNOCK_S)
    if rendezvous.listener is not None:
        _stop_listening(rendezvous.listener)


def _stop_listening(descriptor: int) -> None:
    """Frees the port of a store that is still alive.

    A group or a traceback that somebody keeps keeps the store, and the store its socket; so a socket that listens to nobody takes the
    place of that one.
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
                return BackgroundCall(partial(_connect, address, port, remaining)).result(remaining)
            except TimeoutError as error:
                raise _unanswered(where, "a listener that does not answer as rank 0 does") from error
            except RuntimeError as error:
                found = f"a listener that answers otherwise ({str(error).splitlines()[0]})"
        time.sleep(_RETRY_S)
    raise _unanswered(where, found)


def _connect(address: str, port: int, timeout_s: float, descriptor: int | None = None) -> Store:
    """Connects to a store, or hosts it on a listening descriptor."""
    store: Store = TCPStore(
        address,
        port,
        None,
        descriptor is not None,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    return store


def _unanswered(where: str, found: str) -> RendezvousFailed:
    return RendezvousFailed(
        f"rank 0 must answer at head_ip and port within the time limit, got {found} ({where}). "
        "Rank 0 is missing, and who else is there shows only where it is: start it, or correct head_ip and port."
    )


def _leads_alike(host: str) -> bool:
    """Tells whether a host that leads to loopback here does so on every machine: an address, or "localhost".

    A machine's own name does not: its /etc/hosts may lead to loopback (Debian: 127.0.1.1) where the others find its address on the network.
    """
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolve(host: str, deadline: float) -> list[Address]:
    """Returns the numeric addresses of a host, IPv4 first, so that rank 0 and the others try the same one first."""
    try:
        numeric = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if numeric.is_unspecified:
            raise ArgumentError(
                f"head_ip must be one address that the ranks can reach, got {host!r}. Pass rank 0's own address, such as 127.0.0.1."
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
    """Returns the name of this machine's loopback interface: "lo" on Linux, "lo0" on macOS; None where it has another.

    Example:
        >>> loopback_interface() in ("lo", "lo0")
        True
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
