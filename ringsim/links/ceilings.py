"""The ceilings: what a raw TCP connection and a copy in memory give, in the same processes, with the same sizes.

No library on top of them can be faster, so they say how much of a time is the library's own.
"""

from __future__ import annotations

import functools
import secrets
import socket
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from ringsim.links.patterns import group_of
from ringsim.links.plan import Block
from ringsim.ring import Ring

__all__ = ["Loopback", "make_copy"]

_WORD_BYTES: Final = 16


def make_copy(block: Block, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Returns the function that does one step of "memcpy": ``block.copies`` copies within one memory, on a CPU by one thread.

    Args:
        block: what is measured.
        source: what is copied, uint8, shape (size_bytes,).
        target: where to, of the same shape, on the same device.
    """
    if source.is_cuda:
        one: Callable[[], object] = functools.partial(target.copy_, source)
    else:
        one = functools.partial(np.copyto, target.numpy(), source.numpy())

    def copy() -> None:
        for _ in range(block.copies):
            one()

    return copy


class Loopback:
    """A TCP connection over loopback between the two ranks of an edge.

    Both ranks of the edge make one, at the same time; it blocks until both have. The other ranks make none.

    Args:
        block: gives the edge.
        ring: this rank's ring.
        timeout_s: limit for connecting, and of each send and recv.
        device: where the tensors are that tell the other rank the port.

    Raises:
        OSError: they cannot connect, as when they are on two machines.
    """

    def __init__(self, block: Block, ring: Ring, timeout_s: float, device: torch.device) -> None:
        self._first = ring.rank == block.src
        group = group_of(block, ring)
        card = torch.zeros(2 + _WORD_BYTES, dtype=torch.uint8, device=device)  # the port, and a word that proves who comes
        if self._first:
            dist.recv(card, block.dst, group=group)
            high, low, *word = card.tolist()
            self._connection = socket.create_connection(("127.0.0.1", high * 256 + low), timeout=timeout_s)
            self._connection.sendall(bytes(word))
        else:
            with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
                server.settimeout(timeout_s)
                secret = secrets.token_bytes(_WORD_BYTES)
                card.copy_(torch.tensor([*divmod(server.getsockname()[1], 256), *secret], dtype=torch.uint8))
                dist.send(card, block.src, group=group)
                self._connection = _accept(server, secret, timeout_s)
        self._connection.settimeout(timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def make_step(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Callable[[], None]:
        """Returns the function that does this rank's part of one round trip.

        Args:
            outgoing: what is sent, uint8, in host memory.
            incoming: where what is received goes, of the same shape.
        """
        give, take = outgoing.numpy().data, incoming.numpy().data
        connection = self._connection

        def go_first() -> None:
            connection.sendall(give)
            _receive(connection, take)

        def answer() -> None:
            _receive(connection, take)
            connection.sendall(give)

        return go_first if self._first else answer

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def _accept(server: socket.socket, secret: bytes, timeout_s: float) -> socket.socket:
    """Returns the connection of whoever knows the secret; strangers are turned away."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(timeout_s)
        shown = bytearray(_WORD_BYTES)
        _receive(connection, memoryview(shown))
        if secrets.compare_digest(bytes(shown), secret):
            return connection
        connection.close()


def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fills ``target``."""
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise ConnectionError("the other rank of the edge has closed its end of the loopback connection")
        target = target[count:]
