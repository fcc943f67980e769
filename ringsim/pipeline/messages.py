"""Sends and receives messages between stages.

This module defines headers, routes, activations and gradients. A header precedes a message. It is
an int64 tensor of fixed size::

    | magic | kind | microbatch | dtype | has data | alike | digest | ndim | dim 0 ... dim 7 |

The transports carry bytes and compare nothing. On Gloo, a receive buffer that is too small ends the
process, and a buffer of a different dtype gets wrong values. With a header, the receiver can create
a buffer that fits.

Messages use the ring's pair groups. This is a boundary between two stages on ranks 1 and 2 (the
ring's edge 1 -> 2)::

    rank 1  -- activations, forward ------>  rank 2
            <------- gradients, backward --             both on the group "ring:1>2"

In a V-shaped placement, activations also go from rank 2 to rank 1. They use the same edge in the
other direction. Two ranks that are not neighbours use the default group.

You can send and receive single messages in your own loop::

    stage r                                          stage r + 1
    send_activation(y, 3)  -- header, payload --->   x = recv_activation(3)
                           <-- answer: taken ----
    recv_gradient(3)       <--- header, payload --   send_gradient(x.grad, 3)
                           -- answer: taken ----->

All four functions block until the message has arrived. The receiver compares the header with the
message that it expects, and answers. If the two differ, both sides raise the same error. The
executor has many messages in flight at a time, so it uses a `Mailbox` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ringsim import comm as dist
from ringsim.errors import ArgumentError, MessageMismatch, RingError
from ringsim.ring import Ring, current_ring, destroy_distributed, initialize_distributed
from ringsim.ring.printing import restore_output
from ringsim.state import get_state

MAX_DIMS = 8
HEADER_SIZE = 8 + MAX_DIMS  # numbers of 8 bytes
_MAGIC = 0x52494E47  # "RING"
KINDS = ("greeting", "activation", "gradient")
# Headers contain indexes into this list, so only append to it.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class BufferSpec(NamedTuple):
    """The properties of a buffer for a message.

    Attributes:
        shape: the shape of the buffer.
        dtype: the dtype of the elements.
        has_data: whether the tensor has data; a tensor on device "meta" has none, and only
            simulated ranks can send such a tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_data: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> BufferSpec:
        """Returns the properties of a buffer that can hold this tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, not tensor.is_meta)

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')} of shape "
            f"{self.shape}{'' if self.has_data else ' without data'}"
        )


class Header(NamedTuple):
    """The contents of a header.

    Attributes:
        kind: "activation", "gradient", or "greeting", which has no payload.
        microbatch: the index of the microbatch; in a greeting, the number of microbatches.
        payload: the shape and dtype of the next message; in a step's greeting, the shape is a
            digest of the partition.
        alike: whether all further messages of the step over this boundary have the same shape and
            dtype, and therefore come without a header.
        digest: a number that both sides compute from values that must be equal (in a step's
            greeting, the schedule), or 0 if there are no such values.

    Example:
        >>> header = Header("activation", 3, BufferSpec((2, 16), torch.float32))
        >>> Header.unpack(header.pack()) == header
        True
    """

    kind: str
    microbatch: int
    payload: BufferSpec = BufferSpec((), torch.float32)
    alike: bool = False
    digest: int = 0

    def pack(self) -> Tensor:
        """Returns the header as a tensor, shape (16,), int64.

        Raises:
            ArgumentError: the payload has too many dimensions, or its dtype has no code.
        """
        shape, dtype, has_data = self.payload
        if len(shape) > MAX_DIMS or dtype not in _DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise ArgumentError(
                f"a message must have at most {MAX_DIMS} dimensions and one of the dtypes {names}, "
                f"got {self.payload}. Convert the tensor."
            )
        numbers = [
            _MAGIC,
            KINDS.index(self.kind),
            self.microbatch,
            _DTYPES.index(dtype),
            has_data,
            self.alike,
            self.digest,
            len(shape),
            *shape,
        ]
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)

    @classmethod
    def unpack(cls, tensor: Tensor) -> Header:
        """Returns the header in a tensor.

        Raises:
            MessageMismatch: the tensor is not a header, because the other side sent something else.
        """
        numbers: list[int] = tensor.tolist()
        magic, kind, microbatch, dtype, has_data, alike, digest, ndim, *dims = numbers
        if (
            magic != _MAGIC
            or not 0 <= kind < len(KINDS)
            or not 0 <= dtype < len(_DTYPES)
            or not 0 <= ndim <= MAX_DIMS
        ):
            raise MessageMismatch(
                f"expected a header, got the numbers {numbers[:4]}... "
                "Send messages with send_activation or send_gradient, and finish each step on "
                "every rank before the next one."
            )
        return cls(
            KINDS[kind],
            microbatch,
            BufferSpec(tuple(dims[:ndim]), _DTYPES[dtype], bool(has_data)),
            bool(alike),
            digest,
        )


# Tags distinguish messages between two ranks. Messages with the same tag arrive in the order in
# which they were sent.
PAYLOAD_TAG = 0
HEADER_TAG = 1
ANSWER_TAG = 2
SHARED_TAG = 3


@dataclass
class Transfer:
    """A posted send or receive. Its buffer must not change until `wait` returns.

    Attributes:
        work: the handle, or None if there was nothing to send.
        tensor: the buffer.
    """

    work: Any
    tensor: Tensor

    def wait(self) -> Tensor:
        """Blocks until the message has been sent or has arrived, and returns the buffer.

        A Gloo handle can only be waited for once.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        return self.tensor


@dataclass(frozen=True)
class Route:
    """A route to another rank.

    Attributes:
        peer: the global rank of the other side.
        group: the group of the ring's edge, or None for the default group.
        device: the device of the buffers: the CPU for Gloo, or this rank's GPU for NCCL.
    """

    peer: int
    group: Any
    device: torch.device

    @classmethod
    def to_succ(cls, ring: Ring) -> Route:
        """Returns the route to the successor."""
        return cls(ring.succ, ring.succ_group, ring.device)

    @classmethod
    def to_pred(cls, ring: Ring) -> Route:
        """Returns the route to the predecessor."""
        return cls(ring.pred, ring.pred_group, ring.device)

    @classmethod
    def over_edge(cls, ring: Ring, source: int, target: int) -> Route:
        """Returns the route from this rank to the other of two ranks, given by their positions.

        Activations travel from the rank at place ``source`` in the ring to the rank at place
        ``target``. Gradients use the same route in the other direction.

        Example:
            >>> ring = Ring(rank=1, world_size=4, pred=0, succ=2, ranks=(0, 1, 2, 3))
            >>> (
            ...     Route.over_edge(ring, 0, 1).peer,
            ...     Route.over_edge(ring, 1, 2).peer,
            ...     Route.over_edge(ring, 2, 1).peer,
            ... )
            (0, 2, 2)
        """
        size, is_source = len(ring.ranks), place_in(ring) == source
        is_forward = target == (source + 1) % size
        if is_forward or source == (target + 1) % size:
            return cls.to_succ(ring) if is_source == is_forward else cls.to_pred(ring)
        return cls(ring.ranks[target if is_source else source], None, ring.device)

    def isend(self, tensor: Tensor, tag: int = PAYLOAD_TAG) -> Transfer:
        """Posts a send without blocking. Does not send a tensor without elements."""
        buffer = self._make_buffer(tensor)
        work = dist.isend(buffer, self.peer, group=self.group, tag=tag) if buffer.numel() else None
        return Transfer(work, buffer)

    def irecv(self, payload: BufferSpec, tag: int = PAYLOAD_TAG) -> Transfer:
        """Posts a receive into a new buffer without blocking."""
        buffer = torch.empty(
            payload.shape, dtype=payload.dtype, device=self.device if payload.has_data else "meta"
        )
        work = dist.irecv(buffer, self.peer, group=self.group, tag=tag) if buffer.numel() else None
        return Transfer(work, buffer)

    def irecv_header(self) -> Transfer:
        """Posts the receive of a header without blocking."""
        return self.irecv(BufferSpec((HEADER_SIZE,), torch.int64), HEADER_TAG)

    def iswap(self, tensor: Tensor, tag: int) -> tuple[Transfer, Transfer]:
        """Posts a send and a receive of tensors of the same shape and dtype, in one batch.

        The other side does the same. This method does not block.
        """
        sent = self._make_buffer(tensor)
        received = torch.empty_like(sent)
        both: list[Any] = [
            dist.P2POp(op, each, self.peer, self.group, tag)
            for op, each in ((dist.isend, sent), (dist.irecv, received))
        ]
        works = dist.batch_isend_irecv(both)
        # Gloo returns one handle per operation. NCCL returns one handle for the whole batch, which
        # may be waited for twice, and must be waited for before the received tensor is used.
        return Transfer(works[0], sent), Transfer(works[-1], received)

    def _make_buffer(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in the form that transports expect.

        The tensor is contiguous and, if it has data, on the device of the buffers.
        """
        plain = tensor.detach()
        return (plain if plain.is_meta else plain.to(self.device)).contiguous()


def find_routes(ring: Ring, stage_ranks: Sequence[int]) -> Mapping[int, Route]:
    """Returns the route across each boundary of this rank's stages.

    Boundaries are numbered by the stage before them.

    Args:
        ring: this rank's ring.
        stage_ranks: for each stage, the place of its rank in the ring.

    Example:
        >>> ring = Ring(rank=1, world_size=3, pred=0, succ=2, ranks=(0, 1, 2))
        >>> {boundary: route.peer for boundary, route in find_routes(ring, (0, 1, 2, 2, 1)).items()}
        {0: 0, 1: 2, 3: 2}
    """
    own = place_in(ring)
    return {
        boundary: Route.over_edge(ring, source, target)
        for boundary, (source, target) in enumerate(pairwise(stage_ranks))
        if own in (source, target) and source != target
    }


def place_in(ring: Ring) -> int:
    """Returns this rank's position in the ring."""
    return ring.ranks.index(ring.rank)


def find_ring() -> Ring:
    """Returns this rank's ring.

    If there is no ring, or its default group no longer exists, this function creates a ring over
    the default process group, without hiding prints. In that case, every rank must call the
    function, which blocks until all ranks have. Without a default group, this process is the only
    rank.

    Example:
        >>> find_ring().ranks
        (0,)
    """
    ring = get_state().ring
    if ring is not None and _is_gone(ring):
        destroy_distributed()
    if get_state().ring is None:
        if not torch_dist.is_initialized():
            return Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,))
        prints_are_shown = get_state().undo_print is None
        initialize_distributed()
        if prints_are_shown:
            restore_output()  # the caller did not ask to hide prints
    return current_ring()


def _is_gone(ring: Ring) -> bool:
    """Returns whether the script has destroyed the default group, and so the ring's groups."""
    if not torch_dist.is_initialized() or torch_dist.get_world_size() != ring.world_size:
        return True
    try:
        torch_dist.get_rank(ring.succ_group)
    except ValueError:  # torch no longer knows the group
        return True
    return False


def send_activation(tensor: Tensor, microbatch: int) -> None:
    """Sends a stage's output to the successor, which must call `recv_activation`.

    This function blocks until the tensor has arrived.

    Args:
        tensor: a tensor with at most 8 dimensions; its autograd graph stays on this rank.
        microbatch: the index of the microbatch, from 0.

    Raises:
        MessageMismatch: the successor expects a different message, and also raises this error.
        RingError: the ring has only one rank.

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
    _send("activation", tensor, microbatch, _route(to_succ=True))


def recv_activation(microbatch: int) -> Tensor:
    """Receives a stage's input from the predecessor, which must call `send_activation`.

    This function blocks until the tensor has arrived.

    Args:
        microbatch: the index of the microbatch, from 0.

    Returns:
        A tensor with the sender's shape and dtype. It is a leaf and has no graph.

    Raises:
        MessageMismatch: the predecessor sends a different message, and also raises this error.
        RingError: the ring has only one rank.

    Example:
        See `send_activation`.
    """
    return _recv("activation", microbatch, _route(to_succ=False))


def send_gradient(tensor: Tensor, microbatch: int) -> None:
    """Sends the gradient of a stage's input to the predecessor, which must call `recv_gradient`.

    This function blocks until the tensor has arrived.

    Args:
        tensor: the gradient.
        microbatch: the index of the microbatch, from 0.

    Raises:
        ArgumentError: ``tensor`` is None, because there is no gradient.
        MessageMismatch: the predecessor expects a different message, and also raises this error.
        RingError: the ring has only one rank.

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
    _send("gradient", tensor, microbatch, _route(to_succ=False))


def recv_gradient(microbatch: int) -> Tensor:
    """Receives a stage's output gradient from the successor, which must call `send_gradient`.

    This function blocks until the tensor has arrived.

    Args:
        microbatch: the index of the microbatch, from 0.

    Returns:
        The gradient.

    Raises:
        MessageMismatch: the successor sends a different message, and also raises this error.
        RingError: the ring has only one rank.

    Example:
        See `send_gradient`.
    """
    return _recv("gradient", microbatch, _route(to_succ=True))


def _send(kind: str, tensor: Tensor, microbatch: int, route: Route) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"the {kind} of microbatch {microbatch} must be a tensor, got {tensor!r} (rank "
            f"{current_ring().rank} to rank {route.peer}). "
            "A gradient is None if x was not a leaf that requires a gradient: call "
            "x.requires_grad_() on the received tensor before the forward pass and keep the "
            "tensor, as forward_stage does."
        )
    header = Header(kind, microbatch, BufferSpec.of(tensor))
    parts = [route.isend(header.pack(), HEADER_TAG), route.isend(tensor)]
    answer = route.irecv(BufferSpec((2,), torch.int64), ANSWER_TAG).wait()
    for part in parts:  # the receiver receives both parts even if it refuses the message
        part.wait()
    wanted = KINDS[int(answer[0])], int(answer[1])
    _compare((kind, microbatch), wanted, sender=current_ring().rank, receiver=route.peer)


def _recv(kind: str, microbatch: int, route: Route) -> Tensor:
    header = Header.unpack(route.irecv_header().wait())
    payload = route.irecv(header.payload)
    answer = route.isend(torch.tensor([KINDS.index(kind), microbatch]), ANSWER_TAG)
    received = payload.wait()
    answer.wait()
    _compare(
        (header.kind, header.microbatch),
        (kind, microbatch),
        sender=route.peer,
        receiver=current_ring().rank,
    )
    return received


def _compare(sent: tuple[str, int], wanted: tuple[str, int], *, sender: int, receiver: int) -> None:
    """Raises an error, the same on both sides, if the receiver expects a different message."""
    if sent != wanted:
        raise MessageMismatch(
            f"the receiver expected the {wanted[0]} of microbatch {wanted[1]}, "
            f"got the {sent[0]} of microbatch {sent[1]} (rank {sender} to rank {receiver}). Send "
            "and receive in the same order."
        )


def _route(*, to_succ: bool) -> Route:
    ring = find_ring()
    if len(ring.ranks) < 2:
        raise RingError(
            "a ring with only one rank has no neighbours to send messages to. Pass the tensor "
            "directly from stage to stage."
        )
    return Route.to_succ(ring) if to_succ else Route.to_pred(ring)
