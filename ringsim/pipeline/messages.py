"""Activations to the stage after, gradients to the stage before: one message at a time.

::

    stage r                                          stage r + 1
    send_activation(y, 3)  -- header, payload --->   x = recv_activation(3)
                           <-- answer: taken ----
    recv_gradient(3)       <--- header, payload --   send_gradient(x.grad, 3)
                           -- answer: taken ----->

All four block until the message has arrived. The receiver compares the header with what it waits for and answers: where the two disagree,
both sides raise the same error. The executor, which has many messages under way at a time, has a `Mailbox` for them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ringsim.errors import ArgumentError, MessageMismatch, RingError
from ringsim.pipeline.headers import Header, Payload
from ringsim.pipeline.routes import ANSWER_TAG, HEADER_TAG, Route
from ringsim.ring import Ring, current_ring

__all__ = ["recv_activation", "recv_gradient", "send_activation", "send_gradient"]

_KINDS: Final = ("activation", "gradient")


def send_activation(tensor: Tensor, microbatch: int) -> None:
    """Sends a stage's output to the successor, which calls `recv_activation`. Blocks until it has arrived.

    Args:
        tensor: any shape of at most 8 dimensions; autograd's graph stays here.
        microbatch: index of the microbatch, from 0.

    Raises:
        MessageMismatch: the successor waits for something else; it raises too.
        RingError: there is no ring, or it has one rank.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     if ringsim.current_ring().rank == 0:
        ...         send_activation(torch.ones(2, 3), microbatch=0)
        ...     else:
        ...         return recv_activation(microbatch=0).shape
        >>> ringsim.trace(worker, world_size=2).results
        [None, torch.Size([2, 3])]
    """
    _send("activation", tensor, microbatch, _route_to_succ())


def recv_activation(microbatch: int) -> Tensor:
    """Receives a stage's input from the predecessor, which calls `send_activation`. Blocks until it is there.

    Args:
        microbatch: index of the microbatch, from 0.

    Returns:
        The tensor, with the sender's shape and dtype; a leaf without a graph.

    Raises:
        MessageMismatch: the predecessor sends something else; it raises too.
        RingError: there is no ring, or it has one rank.

    Example:
        See `send_activation`.
    """
    return _recv("activation", microbatch, _route_to_pred())


def send_gradient(tensor: Tensor, microbatch: int) -> None:
    """Sends the gradient of a stage's input to the predecessor, which calls `recv_gradient`. Blocks until it has arrived.

    Args:
        tensor: the gradient.
        microbatch: index of the microbatch, from 0.

    Raises:
        ArgumentError: there is no gradient: None in place of a tensor.
        MessageMismatch: the predecessor waits for something else; it raises too.
        RingError: there is no ring, or it has one rank.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     if ringsim.current_ring().rank == 1:
        ...         send_gradient(torch.ones(2), microbatch=5)
        ...     else:
        ...         return recv_gradient(microbatch=5).tolist()
        >>> ringsim.trace(worker, world_size=2).results
        [[1.0, 1.0], None]
    """
    _send("gradient", tensor, microbatch, _route_to_pred())


def recv_gradient(microbatch: int) -> Tensor:
    """Receives the gradient of a stage's output from the successor, which calls `send_gradient`. Blocks until it is there.

    Args:
        microbatch: index of the microbatch, from 0.

    Returns:
        The gradient.

    Raises:
        MessageMismatch: the successor sends something else; it raises too.
        RingError: there is no ring, or it has one rank.

    Example:
        See `send_gradient`.
    """
    return _recv("gradient", microbatch, _route_to_succ())


def _send(kind: str, tensor: Tensor, microbatch: int, route: Route) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"the {kind} of microbatch {microbatch} must be a tensor, got {tensor!r} (rank {current_ring().rank} to rank {route.peer}). "
            "A gradient is None where x was no leaf that requires one: feed forward, and keep, x.requires_grad_(), as forward_stage does."
        )
    header = Header(kind, microbatch, Payload.of(tensor))
    parts = [route.isend(header.pack(), HEADER_TAG), route.isend(tensor)]
    answer = route.irecv(Payload((2,), torch.int64), ANSWER_TAG).wait()
    for part in parts:  # taken by the receiver, also where it refuses the message
        part.wait()
    wanted_kind, wanted_microbatch = _KINDS[int(answer[0])], int(answer[1])
    if (wanted_kind, wanted_microbatch) != (kind, microbatch):
        here = current_ring().rank
        raise _mismatch((kind, microbatch), (wanted_kind, wanted_microbatch), sender=here, receiver=route.peer)


def _recv(kind: str, microbatch: int, route: Route) -> Tensor:
    header = Header.unpack(route.irecv_header().wait())
    payload = route.irecv(header.payload)
    answer = route.isend(torch.tensor([_KINDS.index(kind), microbatch]), ANSWER_TAG)
    received = payload.wait()
    answer.wait()
    if (header.kind, header.microbatch) != (kind, microbatch):
        here = current_ring().rank
        raise _mismatch((header.kind, header.microbatch), (kind, microbatch), sender=route.peer, receiver=here)
    return received


def _mismatch(sent: tuple[str, int], wanted: tuple[str, int], *, sender: int, receiver: int) -> MessageMismatch:
    return MessageMismatch(
        f"a message must be what its receiver waits for, the {wanted[0]} of microbatch {wanted[1]}, "
        f"got the {sent[0]} of microbatch {sent[1]} (rank {sender} to rank {receiver}). Send and receive in the same order."
    )


def _route_to_succ() -> Route:
    ring, here, size = _place()
    return Route.over_edge(ring, here, (here + 1) % size)


def _route_to_pred() -> Route:
    ring, here, size = _place()
    return Route.over_edge(ring, (here - 1) % size, here)


def _place() -> tuple[Ring, int, int]:
    """Returns this rank's ring, its place there, and the ring's size."""
    ring = current_ring()
    if len(ring.ranks) < 2:
        raise RingError("a ring must have two ranks or more for a message, got one. Hand the tensor from stage to stage directly.")
    return ring, ring.ranks.index(ring.rank), len(ring.ranks)
