"""Keeps the messages that one rank has in flight during a step.

::

    post(1RECV_F2) --->  waiting: 1RECV_F1 1RECV_F2  -- the shape is known -->  posted: 1RECV_F0  --->  take(1RECV_F0)
    send(1SEND_B0) --->  sent: 1SEND_B0              ---------------------------------------------->  finish() waits for all

A receive needs a buffer of the right size, so the mailbox posts it as soon as the shape is known.
If all microbatches of a step have the same shape, only the first activation over a boundary carries
a header, which contains a flag for this case. Otherwise, each activation carries a header. A
gradient never needs a header, because it has the shape of its activation.

Transports without tags match messages by order, so a rank posts its receives in the order in which
the other side sends, which is the order that `lower` writes. Some transports run all messages
between two ranks one after another. They need a common order for both directions (`lower_in_step`),
and every payload directly after its header. On these transports, posting a receive waits for the
header.
"""  # noqa: E501

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ringsim.errors import MessageMismatch
from ringsim.pipeline.messages import (
    HEADER_TAG,
    SHARED_TAG,
    BufferSpec,
    Header,
    Route,
    Transfer,
    find_routes,
    place_in,
)
from ringsim.ring import Ring
from ringsim.schedules.schedule import Action, Schedule
from ringsim.traces.spans import stage_and_microbatch


class Mailbox:
    """Sends and receives the messages of one step on one rank.

    Every rank of the ring must create a mailbox for the same step, and call `finish` at the end.
    The first `send` or `post` blocks until both neighbours have created their mailboxes, in order
    to compare ``agreed``.

    Args:
        ring: this rank's ring.
        schedule: the schedule to run; its rank *i* is the rank at place *i* in the ring.
        agreed: a greeting that contains the values that must be the same on all ranks.
        alike: whether all microbatches have the same shape.
    """

    def __init__(self, ring: Ring, schedule: Schedule, agreed: Header, *, alike: bool) -> None:
        own, size = place_in(ring), len(ring.ranks)
        self._rank = ring.rank
        self._in_order = ring.in_order
        self._alike = alike
        self._agreed = agreed
        self._sent: dict[Action, Transfer] = {}
        self._shapes = _Shapes()
        self._routes = find_routes(ring, schedule.stage_ranks)
        self._incoming = {route: _Incoming(route, self._shapes) for route in self._routes.values()}
        neighbours = {(own - 1) % size, (own + 1) % size} - {own}
        routes = [
            Route.over_edge(ring, min(own, place), max(own, place)) for place in sorted(neighbours)
        ]
        self._greetings = {route.peer: route.iswap(agreed.pack(), SHARED_TAG) for route in routes}

    def send(self, action: Action, tensor: Tensor) -> None:
        """Posts a send. Its tensor must not change before `finish`.

        This method does not block.

        Raises:
            MessageMismatch: a neighbour runs a different step, or the tensor differs from its
                header.
        """
        self._greet()
        route = self._routes[find_boundary(action)]
        with about(action):
            if action.kind == "SEND_F":
                self._announce(action, BufferSpec.of(tensor), route)
            self._sent[action] = route.isend(tensor)

    def post(self, action: Action) -> None:
        """Adds the next receive from a rank, which is posted when its shape is known.

        This method does not block, unless the transport runs messages one after another. In that
        case, it waits for the header before anything else is posted.

        Raises:
            MessageMismatch: a neighbour runs a different step.
        """
        self._greet()
        incoming = self._incoming[self._routes[find_boundary(action)]]
        incoming.add(action)
        if self._in_order:
            incoming.read_headers()

    def take(self, action: Action) -> Tensor | None:
        """Returns the tensor of a posted receive, or None if the gradient does not exist.

        This method blocks until the tensor has arrived.

        Raises:
            MessageMismatch: the other rank sends a different message.
        """
        received = self._incoming[self._routes[find_boundary(action)]].take(action)
        # a gradient answers an activation, so the activation's send has ended
        if action.kind == "RECV_B" and received is not None:
            self._sent.pop(action._replace(kind="SEND_F")).wait()
        return received

    def finish(self) -> None:
        """Blocks until all sent messages have arrived."""
        self._greet()
        for posted in self._sent.values():
            posted.wait()
        self._sent.clear()

    def _greet(self) -> None:
        """Compares the greetings of both neighbours with this rank's greeting, once.

        Both sides raise an error if the greetings differ.
        """
        theirs = {}
        for peer, (sent, received) in self._greetings.items():
            theirs[peer] = Header.unpack(received.wait())
            sent.wait()
        self._greetings.clear()
        for peer, header in theirs.items():
            if header != self._agreed:
                raise MessageMismatch(
                    "the ranks do not perform the same step: "
                    f"{self._describe_difference(peer, header)}. "
                    "Call train_step_pipeline with the same schedule, partition and number of "
                    "microbatches on every rank."
                )

    def _describe_difference(self, peer: int, theirs: Header) -> str:
        """Describes the difference between a neighbour's greeting and this rank's greeting."""
        mine, rank = self._agreed, self._rank
        words = []
        if theirs.microbatch != mine.microbatch:  # then the digests also differ
            words.append(
                f"the number of microbatches is {mine.microbatch} on rank {rank} but "
                f"{theirs.microbatch} on rank {peer}"
            )
        elif theirs.digest != mine.digest:
            words.append(f"the schedules on ranks {rank} and {peer} differ")
        if theirs.payload != mine.payload:
            words.append(f"the partitions of the model on ranks {rank} and {peer} differ")
        return ", and ".join(words)

    def _announce(self, action: Action, payload: BufferSpec, route: Route) -> None:
        """Sends an activation's header, unless an earlier header applies to the activation."""
        announced = self._shapes.find(action)
        if announced is None:
            header = Header("activation", action.microbatch, payload, self._alike)
            # The wait comes together with the wait for the payload, which follows the header.
            self._sent[action._replace(kind="header")] = route.isend(header.pack(), HEADER_TAG)
        elif announced != payload:
            raise MessageMismatch(
                "microbatches of the same shape caused different activations at a stage boundary: "
                f"first {announced}, then {payload} "
                f"({action} on rank {self._rank}). Make the shape of a stage's output depend "
                "only on the shape of its input."
            )
        for message in (action, action._replace(kind="RECV_B")):  # the activation, and its gradient
            self._shapes.learn(message, payload, every=self._alike)


class _Shapes:
    """The message shapes that are known so far.

    A shape belongs to a single message, or to all messages of a kind that a stage sends or
    receives.
    """

    def __init__(self) -> None:
        self._known: dict[Action | tuple[int, str], BufferSpec] = {}

    def learn(self, action: Action, payload: BufferSpec, *, every: bool) -> None:
        self._known[action[:2] if every else action] = payload

    def find(self, action: Action) -> BufferSpec | None:
        return self._known.get(action[:2]) or self._known.get(action)


class _Incoming:
    """The messages from another rank to this rank, in order."""

    def __init__(self, route: Route, shapes: _Shapes) -> None:
        self._route = route
        self._shapes = shapes
        self._waiting: deque[Action] = deque()
        self._posted: dict[Action, Transfer | None] = {}
        self._header: Transfer | None = None

    def add(self, action: Action) -> None:
        self._waiting.append(action)
        self._advance()

    def read_headers(self) -> None:
        """Posts all waiting receives. Blocks until their shapes are known."""
        while self._waiting:
            self._read_header()

    def take(self, action: Action) -> Tensor | None:
        self._advance()
        while action not in self._posted:
            self._read_header()
        posted = self._posted.pop(action)
        return None if posted is None else posted.wait()

    def _advance(self) -> None:
        """Posts the receives that can be posted.

        These are the payloads with a known shape, and the header of the first payload with an
        unknown shape.
        """
        while self._waiting:
            first = self._waiting[0]
            payload = self._shapes.find(first)
            if payload is None:
                break
            self._waiting.popleft()
            with about(first):
                has_message = first.kind == "RECV_F" or payload.dtype.is_floating_point
                self._posted[first] = self._route.irecv(payload) if has_message else None
        if self._waiting and self._header is None and self._waiting[0].kind == "RECV_F":
            with about(self._waiting[0]):
                self._header = self._route.irecv_header()

    def _read_header(self) -> None:
        """Reads the first message's shape from its header, and posts more receives.

        This method blocks until the header has arrived.
        """
        action, posted = self._waiting[0], self._header
        assert posted is not None, f"{action} before the forward pass that it answers"
        self._header = None
        header = Header.unpack(posted.wait())
        if (header.kind, header.microbatch) != ("activation", action.microbatch):
            raise MessageMismatch(
                f"{action} expected the activation of microbatch {action.microbatch}, got the "
                f"{header.kind} of microbatch "
                f"{header.microbatch} (from rank {self._route.peer}). Send in the order in which "
                "the other side receives."
            )
        self._shapes.learn(action, header.payload, every=header.alike)
        self._advance()


def find_boundary(action: Action) -> int:
    """Returns the boundary that a message crosses, numbered by the stage before it."""
    return min(action.stage, action.other_side.stage)


@contextmanager
def about(action: Action) -> Iterator[None]:
    """Labels a block's operations in the trace with their stage and microbatch.

    The block acts like a span, but does not record one.
    """
    outer = stage_and_microbatch.set(action.microbatch << 32 | action.stage)
    try:
        yield
    finally:
        stage_and_microbatch.reset(outer)
