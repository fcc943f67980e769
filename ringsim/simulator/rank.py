"""Defines a simulated rank, which posts messages and collectives, and records them.

``ringsim.simulator.group`` calls its methods with the arguments that a process group of
``torch.distributed`` receives::

    dist.isend -> SimulatedGroup.send -> SimulatedRank.begin_message -> matcher -> link
                                           |
                                           +-- checked, and recorded with the user's line
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from ringsim.comm.calls import (
    READINGS,
    Call,
    describe,
    has_gaps,
    name_of_reduction,
    read_call,
)
from ringsim.comm.checks import Attempt, Prechecks, find_fault
from ringsim.comm.numbering import COLLECTIVE_NAMES, RECV_NAMES, SEND_NAMES
from ringsim.comm.reductions import check_reduction
from ringsim.compute_costs import PostingCosts
from ringsim.errors import Refused
from ringsim.faults import make_failure
from ringsim.simulator.clock import Clock, Rank
from ringsim.simulator.collective_ops import Part, meet
from ringsim.simulator.links import Links, SharedCores
from ringsim.simulator.point_to_point import Matcher, SimulatedMessage
from ringsim.simulator.work import PayloadKind, Team
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES, Payload
from ringsim.traces.recorder import Post, Recorder


@dataclass
class Shared:
    """The state that the ranks of a simulation share."""

    clock: Clock
    recorder: Recorder
    records: bool  # whether operations are recorded
    links: Links
    matcher: Matcher
    costs: PostingCosts | None  # the cost of posting a message
    kinds: dict[Any, PayloadKind] = field(default_factory=dict)
    on_new_kind: Callable[[], None] = lambda: None
    on_operation: Callable[[Attempt], None] | None = None
    checks: Prechecks = field(init=False)
    post_send: Post = field(init=False)
    post_recv: Post = field(init=False)
    poster_of: Callable[[str], Post] = field(init=False)  # by the name of a collective

    def __post_init__(self) -> None:
        make_post = self.recorder.make_post
        self.checks = Prechecks(self.recorder)
        self.post_send = make_post(OP_CODES["isend"], SEND_NAMES)
        self.post_recv = make_post(OP_CODES["irecv"], RECV_NAMES)
        self.poster_of = cache(lambda name: make_post(OP_CODES[name], COLLECTIVE_NAMES))

    def kind_of(self, tensors: Sequence[Tensor], copies: int = 1, op: Any = None) -> PayloadKind:
        """Returns the kind of an operation on given tensors.

        Args:
            tensors: the tensors that the operation carries.
            copies: the number of times that the tensors count.
            op: the reduction, or None if there is none.

        Raises:
            ArgumentError: the simulator does not support the reduction.
        """
        key = *[(tensor.dtype, tensor.shape) for tensor in tensors], copies, op
        kind = self.kinds.get(key)
        if kind is None:
            self.on_new_kind()
            if op is not None:
                check_reduction(op)
            how = "" if op is None else name_of_reduction(op)
            payload = Payload(*describe(list(tensors), copies), how)
            kind = self.kinds[key] = self.make_kind(payload)
        return kind

    def kind_of_message(self, tensor: Tensor) -> PayloadKind:
        """Returns the kind of a message that carries a tensor."""
        key = tensor.dtype, tensor.shape
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = self.kind_of([tensor])
        return kind

    def make_kind(self, payload: Payload) -> PayloadKind:
        """Returns the kind of operations with a given payload."""
        return PayloadKind(self.recorder.payload(*payload), payload, payload.size_bytes)


class SimulatedRank(Rank):
    """A rank of a simulation.

    Args:
        shared: the state that all ranks share.
        number: the number of this rank.
        seed: the seed of the rank's random numbers.
        fails_at: the number of the operation at which the rank fails, or None if it does not fail.

    Attributes:
        blank: whether the rank's messages carry zeros instead of their tensors' data.
        batch: the messages of the current batch that have been posted so far, or None outside a
            batch.
    """

    _operations = _refusals = 0
    _refusal: Callable[[], BaseException]

    def __init__(self, shared: Shared, number: int, seed: int, fails_at: int | None = None) -> None:
        super().__init__(number, seed, shared.clock)
        self.shared = shared
        self.recorder, self._records = shared.recorder, shared.records
        self.blank = False
        self.batch: list[SimulatedMessage] | None = None
        self._fails_at = fails_at
        self._hooked = (
            shared.clock.measures or fails_at is not None or shared.on_operation is not None
        )
        gloo = shared.links.gloo if isinstance(shared.links, SharedCores) else None
        self._first_use_s = gloo.first_use_s if gloo is not None else 0.0

    # -- messages

    def begin_message(
        self, sends: bool, team: Team, place: int | None, tensors: Any, tag: Any
    ) -> SimulatedMessage:
        """Starts a send or a recv.

        Args:
            sends: whether the message is a send.
            team: the group.
            place: the other side's rank in the group, or None for any source.
            tensors: a list that contains one tensor.
            tag: the tag of the message.
        """
        shared = self.shared
        post = shared.post_send if sends else shared.post_recv
        other, kind = self._check_message(sends, team, place, tensors, tag, post)
        src, dst = (self.number, other) if sends else (other, self.number)
        channel = shared.matcher.channel_of(team, src, dst, tag, self.batch is None)
        if not channel.connection.is_open:  # as on Gloo, the operation is posted, and then fails
            self._refuse_closed(other, post(team.number, other, tag, kind.number))
        if self._hooked:
            name = "isend" if sends else "irecv"
            self._before_operation(name, team.number, other, tag, kind.number)
        slots: Any = (post(team.number, other, tag, kind.number),) if self._records else ()
        tensor = tensors[0]
        if sends and self.blank:
            tensor = tensor.new_zeros(tensor.shape)
        code = SEND_NAMES["isend"] if sends else RECV_NAMES["irecv"]
        message = SimulatedMessage(code, self, slots, channel, kind, tensor, tag, sends)
        if self._first_use_s:
            self._warm_up()
        self._hand_over(message)
        return message

    def _check_message(
        self, sends: bool, team: Team, place: int | None, tensors: Any, tag: Any, post: Post
    ) -> tuple[int, PayloadKind]:
        """Checks a message, and returns the other side's global rank and the kind."""
        other = ANY_SOURCE if place is None else NONE
        if isinstance(place, int) and 0 <= place < len(team.ranks):
            other = team.ranks[place]
        kind = self.shared.kind_of_message(tensors[0])
        fault = find_fault(tensors, tag, other == self.number)
        if other == NONE or fault is not None:
            self.batch = None
            attempt = Attempt("send" if sends else "recv", team.number, other, tag, kind.number)
            checks = self.shared.checks
            checks.check_message(attempt, [], place, len(team.ranks), post)
            checks.refuse(*(fault or ("", "")), attempt, post)  # a valid peer, so there is a fault
        return other, kind

    def _refuse_closed(self, other: int, slot: Any) -> None:
        if self._records:
            self.recorder.complete(slot, ERROR)
        closed = Refused(
            f"the connection to rank {other} is closed because an earlier operation timed out "
            f"({self.here()}). Create a new group after a timeout."
        )
        closed.imposed = True
        raise closed

    def _hand_over(self, message: SimulatedMessage) -> None:
        """Passes a message to the matcher, and lets the time for posting pass."""
        shared, clock = self.shared, self.clock
        costs = shared.costs
        if costs is None:
            self._match(message)
            return
        busy_s = message.channel.connection.busy_s
        busy_s[self.number] = clock.now
        self._match(message)
        met = message.number == 0
        end_s = clock.book(costs.post_s(message.sends, message.kind.size_bytes, met=met))
        busy_s[self.number] = end_s
        clock.sleep_until(end_s)

    def _match(self, message: SimulatedMessage) -> None:
        if self.batch is None:
            self.shared.matcher.post(message)
            return
        self.batch.append(message)
        self.batch_left -= 1
        if self.batch_left == 0:
            batch, self.batch = self.batch, None
            self.shared.matcher.post_together(batch)

    def begin_batch(self, count: int) -> None:
        """Combines the next ``count`` messages into a batch, if this matters to the semantics."""
        if not self.shared.matcher.by_tag:
            self.batch, self.batch_left = [], count

    # -- collectives

    def begin_collective(
        self,
        name: str,
        team: Team,
        arguments: Mapping[str, Any],
        carried: Sequence[Tensor] | None = None,
    ) -> Part:
        """Starts a collective.

        Args:
            name: the name of the function in torch.distributed.
            team: the group.
            arguments: the arguments of the function, by name.
            carried: the tensors whose size is recorded, if the function's own tensors are only
                pieces of these.
        """
        call = read_call(name, arguments, team)
        kind = self.shared.kind_of(carried or call.carried, call.copies, call.op)
        if READINGS[name].raw:
            self._refuse_gaps(call, kind)
        return self.take_part(call, kind)

    def begin_monitored_barrier(self, team: Team) -> Part:
        """Starts a ``monitored_barrier``."""
        return self.take_part(Call("monitored_barrier", team, (), ()), self.shared.kind_of(()))

    def take_part(self, call: Call, kind: PayloadKind) -> Part:
        """Posts this rank's part in a collective."""
        team: Any = call.group
        post = self.shared.poster_of(call.recorded_name)
        peer = NONE if call.root == NONE else team.ranks[call.root]
        if self._hooked:
            self._before_operation(call.recorded_name, team.number, peer, None, kind.number)
        slots: Any = (post(team.number, peer, NONE, kind.number),) if self._records else ()
        part = Part(self, slots, kind, call)
        if self._first_use_s:
            self._warm_up()
        self.clock.polls = 0
        meet(part, self.shared.links)
        return part

    def _refuse_gaps(self, call: Call, kind: PayloadKind) -> None:
        """Raises ArgumentError for a tensor with gaps, whose memory Gloo would misread."""
        team: Any = call.group
        for tensor in call.tensors:
            if has_gaps(tensor):
                attempt = Attempt(call.recorded_name, team.number, NONE, None, kind.number)
                post = self.shared.poster_of(call.recorded_name)
                self.shared.checks.refuse_collective(attempt, tensor, post)

    # -- failures and delays

    def _warm_up(self) -> None:
        """Lets the extra time for a new process's first operation pass, but only once."""
        seconds, self._first_use_s = self._first_use_s, 0.0
        self.clock.work(seconds)

    def _before_operation(self, *attempt: Any) -> None:
        """Counts an operation, and charges for the computing before it.

        Raises:
            BaseException: the rank must fail at this operation.
        """
        if self._refusals > 0:
            self._refusals -= 1
            raise self._refusal()
        if self.clock.measures:
            self.clock.pay()
        if self._fails_at is not None and self._operations >= self._fails_at:
            raise make_failure(self.number, self._fails_at, len(self.clock.ranks))
        self._operations += 1
        if self.shared.on_operation is not None:
            self.shared.on_operation(Attempt(*attempt))

    def refuse(self, make_error: Callable[[], BaseException], times: int) -> None:
        """Makes the next ``times`` operations of a rank that can never continue raise an error."""
        self._refusal, self._refusals = make_error, times
        self._hooked = True

    def begin_again(self) -> None:
        """Forgets what a call of a session has left unfinished."""
        self._refusals, self.batch = 0, None
        self.errands.clear()
