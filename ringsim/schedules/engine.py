"""Runs send-and-receive programs on a clock, without ranks.

The results are exact times, and the ranks that would wait for each other forever. A point-to-point
program consists of a list of operations for each rank. There are four operations: computing,
posting a send, posting a receive, and waiting for a post. A blocking send is a post followed by its
wait::

    send(1); recv(1)          Send(1) Wait(0) Receive(1) Wait(2)
    isend(1); recv(1); wait   Send(1) Receive(1) Wait(1) Wait(0)

The k-th send from one rank to another with a tag matches the k-th receive with this tag there. With
several groups, a pair (group, tag) serves as the tag. The only operation that cannot be written
this way is a receive from any rank, because its sender depends on the times.

The result does not depend on the order in which this module runs the ranks: each rank goes through
its list in order, so a rank that can continue now can also continue later. It is enough to run each
rank until it waits for a post that has not been made, and to return to the rank when the post is
made. When no rank can run, either all ranks have ended, or the remaining ranks wait forever. Each
of them waits for one other rank, and a chain of these waits leads to a cycle or to a rank that has
ended.

``evaluate`` runs a schedule this way. This is 1F1B over two ranks, with backwards that take twice
as long as forwards; each ``.`` is a unit of waiting::

    rank 0   0F0 0F1  .  0B0 ---  .  0B1 ---
    rank 1    .  1F0 1B0 --- 1F1 1B1 ---

A schedule without sends and receives is lowered first, so the times are those of the actions that
the executor runs. A message takes ``Costs.latency``, but none of the ranks' time. ``semantics``
determines when a message may start, and ``lower``'s ``ahead`` determines the position of its
receive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringsim.errors import ArgumentError, Deadlock, ScheduleError, is_one_of, say
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.lowering import get_recv, lower_checked
from ringsim.schedules.schedule import Action, Schedule

Semantics = Literal["rendezvous", "buffered"]
SEMANTICS = ("rendezvous", "buffered")


def check_semantics(semantics: object) -> None:
    """Raises ArgumentError if the semantics are unknown."""
    if not is_one_of(semantics, SEMANTICS):
        raise ArgumentError(
            f"semantics must be one of {', '.join(SEMANTICS)}, got {say(semantics)}."
        )


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes for some time, in any unit that is the same everywhere."""

    duration: Time


@dataclass(frozen=True, slots=True)
class Send:
    """Posts a send to a peer and continues. The receive must have the same tag."""

    peer: int
    tag: Hashable = 0


@dataclass(frozen=True, slots=True)
class Receive:
    """Posts a receive from a peer and continues. The send must have the same tag."""

    peer: int
    tag: Hashable = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until the post at a given position in this rank's list is done."""

    position: int


Instruction = Compute | Send | Receive | Wait
_Place = tuple[int, int]  # (rank, position in its list)


class Delivery(NamedTuple):
    """A send and its matching receive, given by ranks and positions in their lists.

    Attributes:
        source: the rank that sent.
        send: the position of the send.
        rank: the rank that received.
        receive: the position of the receive.
        posted: the time at which the send was posted.
        arrived: the time at which the payload arrived.
    """

    source: int
    send: int
    rank: int
    receive: int
    posted: Time
    arrived: Time


class Blocked(NamedTuple):
    """A rank that waits forever.

    Attributes:
        rank: the rank.
        position: the position of the wait in the rank's list.
        post: the position of the send or receive that the rank waits for.
        peer: the rank that would have to post the other side.
    """

    rank: int
    position: int
    post: int
    peer: int


@dataclass(frozen=True)
class Run:
    """The outcome of running programs.

    Attributes:
        times: for each rank, the (start, end) of each operation that the rank reached; a post takes
            no time, and a wait ends when the rank continues.
        messages: the messages that arrived, sorted by receiver.
        blocked: the ranks that wait forever, in order; empty if all ranks have ended.
    """

    times: tuple[tuple[tuple[Time, Time], ...], ...]
    messages: tuple[Delivery, ...]
    blocked: tuple[Blocked, ...]

    @property
    def cycle(self) -> tuple[Blocked, ...]:
        """A cycle of ranks, each of which waits for the next.

        The cycle is empty if all ranks wait, directly or indirectly, for a rank that has ended.
        """
        waiting = {blocked.rank: blocked for blocked in self.blocked}
        for first in waiting:
            path: list[int] = []
            rank = first
            while rank in waiting and rank not in path:
                path.append(rank)
                rank = waiting[rank].peer
            if rank in path:
                return tuple(waiting[member] for member in path[path.index(rank) :])
        return ()


def run_programs(
    programs: Sequence[Sequence[Instruction]],
    *,
    latency: Time = 0,
    semantics: Semantics = "rendezvous",
) -> Run:
    """Runs one list of operations per rank, in order, on a clock that starts at 0.

    Args:
        programs: for each rank, its operations.
        latency: a message's travel time, in the unit of the computations.
        semantics: ``rendezvous``: a message starts to travel when both sides are posted, and the
            send ends when the message arrives (Gloo, at every size); ``buffered``: the message
            travels as soon as it is sent, and the send is done immediately (MPI, for small
            messages).

    Returns:
        The times of all operations, and the ranks that are left waiting. The times are exact if the
        inputs are ints or Fractions.

    Example:
        >>> both_send_first = [
        ...     [Send(1), Wait(0), Receive(1), Wait(2)],
        ...     [Send(0), Wait(0), Receive(0), Wait(2)],
        ... ]
        >>> [
        ...     f"rank {stuck.rank} waits for rank {stuck.peer}"
        ...     for stuck in run_programs(both_send_first).cycle
        ... ]
        ['rank 0 waits for rank 1', 'rank 1 waits for rank 0']
        >>> run_programs(both_send_first, semantics="buffered").cycle
        ()
    """
    runner = _Runner(programs, latency, semantics)
    runner.run()
    return Run(
        tuple(map(tuple, runner.times)), tuple(runner.list_messages()), tuple(runner.list_blocked())
    )


class _Runner:
    """The programs, each rank's progress, and the positions that ranks wait for."""

    def __init__(
        self, programs: Sequence[Sequence[Instruction]], latency: Time, semantics: Semantics
    ) -> None:
        self.programs = programs
        self.latency = latency
        self.semantics = semantics
        self.partners = _match(programs)
        self.times: list[list[tuple[Time, Time]]] = [[] for _ in programs]
        self.sleepers: dict[_Place, int] = {}
        self.runnable = list(range(len(programs)))

    def run(self) -> None:
        """Runs ranks until none of them can continue."""
        while self.runnable:
            self._advance(self.runnable.pop())

    def _advance(self, rank: int) -> None:
        """Runs one rank to its end, or until it waits for a post that a rank has not reached."""
        times = self.times[rank]
        clock = times[-1][1] if times else 0
        for position in range(len(times), len(self.programs[rank])):
            operation, start = self.programs[rank][position], clock
            if isinstance(operation, Compute):
                clock = start + operation.duration
            elif isinstance(operation, Wait):
                done = self._done_at((rank, operation.position))
                if done is None:
                    partner = self.partners.get((rank, operation.position))
                    if partner is not None:
                        self.sleepers[partner] = rank
                    return
                clock = max(start, done)
            times.append((start, clock))
            if (rank, position) in self.sleepers:
                self.runnable.append(self.sleepers.pop((rank, position)))

    def _done_at(self, place: _Place) -> Time | None:
        """Returns the time at which a post is done.

        The result is None if the time depends on the other side, which is not posted yet.
        """
        posted = self.times[place[0]][place[1]][0]
        if self.semantics == "buffered" and isinstance(self.programs[place[0]][place[1]], Send):
            return posted
        partner = self.partners.get(place)
        if partner is None or partner[1] >= len(self.times[partner[0]]):
            return None
        other = self.times[partner[0]][partner[1]][0]
        return (
            max(posted, other) + self.latency
            if self.semantics == "rendezvous"
            else max(posted, other + self.latency)
        )

    def list_messages(self) -> Iterator[Delivery]:
        """Yields the messages that arrived, by receiver."""
        for rank, times in enumerate(self.times):
            for position in range(len(times)):
                arrived = (
                    self._done_at((rank, position))
                    if isinstance(self.programs[rank][position], Receive)
                    else None
                )
                if arrived is not None:
                    source, send = self.partners[rank, position]
                    yield Delivery(
                        source, send, rank, position, self.times[source][send][0], arrived
                    )

    def list_blocked(self) -> Iterator[Blocked]:
        """Yields the ranks that did not reach their end, each of which is blocked in a wait."""
        for rank, program in enumerate(self.programs):
            position = len(self.times[rank])
            if position < len(program):
                wait = program[position]
                assert isinstance(wait, Wait)  # only a wait can block a rank
                post = program[wait.position]
                assert isinstance(post, Send | Receive)
                yield Blocked(rank, position, wait.position, post.peer)


def _match(programs: Sequence[Sequence[Instruction]]) -> dict[_Place, _Place]:
    """Maps each post to its other side: a channel's k-th send matches its k-th receive.

    Posts without a match are left out.
    """
    posts: dict[Hashable, tuple[list[_Place], list[_Place]]] = {}
    for rank, program in enumerate(programs):
        for position, operation in enumerate(program):
            if isinstance(operation, Send | Receive):
                is_receive = isinstance(operation, Receive)
                ends = (operation.peer, rank) if is_receive else (rank, operation.peer)
                both = posts.setdefault((*ends, operation.tag), ([], []))
                both[is_receive].append((rank, position))
    partners: dict[_Place, _Place] = {}
    for sends, receives in posts.values():
        # the extra posts of the longer side have no match
        for send, receive in zip(sends, receives, strict=False):
            partners[send], partners[receive] = receive, send
    return partners


class TimedAction(NamedTuple):
    """An action and its times.

    Attributes:
        action: the action.
        start: the start of a computation, or the time at which a send or receive is posted.
        end: the end of a computation, or the arrival of a message.
    """

    action: Action
    start: Time
    end: Time


class TimedMessage(NamedTuple):
    """A message from one rank to another.

    Attributes:
        send: the action that sends the message.
        source: the rank that sends.
        rank: the rank that receives.
        posted: the time at which the send was posted.
        arrived: the time at which the payload arrived.
    """

    send: Action
    source: int
    rank: int
    posted: Time
    arrived: Time


@dataclass(frozen=True)
class Evaluation:
    """A schedule with the times of its actions and messages, counted from 0.

    Attributes:
        schedule: the lowered form of the evaluated schedule.
        actions: for each rank, its actions with their times, in the schedule's order.
        messages: all messages, by receiver.

    Example:
        See `evaluate`.
    """

    schedule: Schedule
    actions: tuple[tuple[TimedAction, ...], ...]
    messages: tuple[TimedMessage, ...]

    @property
    def makespan(self) -> Time:
        """The length of the step, up to the end of the last computation."""
        return max((end for _, end in self._spans), default=0)

    @property
    def busy(self) -> tuple[Time, ...]:
        """The time that each rank spends computing."""
        return tuple(
            sum(timed.end - timed.start for timed in self.get_computations(rank))
            for rank in range(self.schedule.num_ranks)
        )

    @property
    def idle(self) -> tuple[Time, ...]:
        """Each rank's bubble relative to the makespan: its idle time during the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_idle(self) -> tuple[Time, ...]:
        """Each rank's bubble relative to its span.

        This is how long the rank is idle between the start of its first action and the end of its
        last. The papers on zero bubbles use this definition, because consecutive steps fill the
        idle time at both ends.
        """
        return tuple(
            end - start - busy for (start, end), busy in zip(self._spans, self.busy, strict=True)
        )

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The peak number of live activations on each rank; see ``list_live``."""
        return tuple(
            max((live for _, live in self.list_live(rank)), default=0)
            for rank in range(self.schedule.num_ranks)
        )

    def get_computations(self, rank: int) -> tuple[TimedAction, ...]:
        """Returns a rank's computations with their times, without its sends and receives."""
        return tuple(timed for timed in self.actions[rank] if timed.action.is_compute)

    def list_live(self, rank: int) -> list[tuple[Time, int]]:
        """Lists the changes in the number of activations that a rank holds.

        An activation is the data that one stage's forward pass keeps for the backward pass. It is
        live from the start of ``F`` to the end of ``B`` or ``W``.

        Args:
            rank: the rank.

        Returns:
            Pairs of a time and the number of activations held from then on, in order of time. If an
            activation ends when the next one starts, the list contains two pairs for that time.
        """
        live = 0
        curve = []
        for action, start, end in self.get_computations(rank):
            if action.kind == "F":
                live += 1
                curve.append((start, live))
            elif action.kind in ("B", "W"):
                live -= 1
                curve.append((end, live))
        return curve

    @property
    def _spans(self) -> list[tuple[Time, Time]]:
        """Returns the start of each rank's first computation and the end of its last."""
        rows = [self.get_computations(rank) for rank in range(self.schedule.num_ranks)]
        return [
            (
                min((timed.start for timed in row), default=0),
                max((timed.end for timed in row), default=0),
            )
            for row in rows
        ]


def evaluate(
    schedule: Schedule, costs: Costs | None = None, semantics: Semantics = "rendezvous"
) -> Evaluation:
    """Times every action and message of a schedule.

    Args:
        schedule: any schedule, lowered or not; it may cover only part of a step.
        costs: the costs of the actions, or None for ``Costs()``: 1 for each forward, input and
            weight, 2 for each backward, and 0 for each message.
        semantics: ``rendezvous``: a message starts to travel when both its send and its receive are
            posted; ``buffered``: when its send is posted.

    Returns:
        The times, which are exact if the costs are ints or Fractions.

    Raises:
        ScheduleError: an action belongs to a different rank, occurs twice, precedes an action that
            it needs, or is a send or receive without a match.
        Deadlock: ranks wait for each other in a cycle; ``diagnosis`` is the cycle, as a tuple of
            (rank, action) pairs, where the action is the one that blocks the rank.
        ArgumentError: the costs do not fit the stages, or ``semantics`` is unknown.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> evaluation = evaluate(one_f_one_b(num_ranks=2, num_microbatches=2), Costs(latency=0))
        >>> evaluation.makespan, evaluation.idle, evaluation.peak_live, len(evaluation.messages)
        (9, (3, 3), (2, 1), 4)
        >>> [
        ...     f"{action} {start}-{end}"
        ...     for action, start, end in evaluation.get_computations(rank=1)
        ... ]
        ['1F0 1-2', '1B0 2-4', '1F1 4-5', '1B1 5-7']
    """
    costs = costs or Costs()
    check_semantics(semantics)
    lowered = lower_checked(schedule)
    costs.check(schedule.num_stages)
    run, owners = _play(lowered, costs, semantics)
    return _collect(run, lowered, owners)


def _play(
    lowered: Schedule, costs: Costs, semantics: Semantics = "rendezvous"
) -> tuple[Run, list[list[int]]]:
    """Runs a lowered schedule.

    Returns the run and, for each rank, the positions of the actions that its operations belong to.
    Raises Deadlock if ranks wait for each other.
    """
    translated = [_translate(row, lowered, costs) for row in lowered.actions]
    programs = [program for program, _ in translated]
    owners = [owners for _, owners in translated]
    run = run_programs(programs, latency=costs.latency, semantics=semantics)
    if run.blocked:
        raise _describe_deadlock(run, lowered, owners)
    return run, owners


def _translate(
    row: tuple[Action, ...], schedule: Schedule, costs: Costs
) -> tuple[list[Instruction], list[int]]:
    """Translates a rank's actions into operations and the positions of their actions.

    A computation first waits for its receive. The waits for the sends come at the end.
    """
    operations: list[tuple[Instruction, int]] = []
    posts: dict[Action, int] = {}
    for owner, action in enumerate(row):
        if action.is_compute:
            recv = get_recv(action, schedule.stage_ranks)
            if recv is not None:
                operations.append((Wait(posts[recv]), owner))
            operations.append((Compute(costs.get_duration(action)), owner))
        else:
            posts[action] = len(operations)
            peer = schedule.stage_ranks[action.other_side.stage]
            operations.append(
                (
                    Send(peer, action)
                    if action.kind.startswith("SEND")
                    else Receive(peer, action.other_side),
                    owner,
                )
            )
    operations += [
        (Wait(position), operations[position][1])
        for action, position in posts.items()
        if action.kind.startswith("SEND")
    ]
    return [operation for operation, _ in operations], [owner for _, owner in operations]


def _collect(run: Run, schedule: Schedule, owners: list[list[int]]) -> Evaluation:
    rows = [[TimedAction(action, 0, 0) for action in row] for row in schedule.actions]
    for rank, row in enumerate(rows):
        for owner, times in zip(owners[rank], run.times[rank], strict=True):
            row[owner] = TimedAction(row[owner].action, *times)
    messages = []
    for message in run.messages:
        send, receive = owners[message.source][message.send], owners[message.rank][message.receive]
        action = schedule.actions[message.source][send]
        messages.append(
            TimedMessage(action, message.source, message.rank, message.posted, message.arrived)
        )
        rows[message.source][send] = TimedAction(action, message.posted, message.arrived)
        rows[message.rank][receive] = rows[message.rank][receive]._replace(end=message.arrived)
    return Evaluation(schedule, tuple(map(tuple, rows)), tuple(messages))


def _describe_deadlock(run: Run, schedule: Schedule, owners: list[list[int]]) -> Deadlock:
    """Returns an error that lists the waiting ranks, their actions and their peers."""
    cycle, waits = [], []
    for stuck in run.cycle:
        row, owner = schedule.actions[stuck.rank], owners[stuck.rank]
        action, awaited = row[owner[stuck.position]], row[owner[stuck.post]].other_side
        cycle.append((stuck.rank, action))
        waits.append(f"rank {stuck.rank} waits in {action} for {awaited} on rank {stuck.peer}")
    failure = "the schedule cannot finish, because ranks wait for each other"
    return Deadlock(
        f"{failure}: {'; '.join(waits)}. Move one of the awaited actions earlier.",
        diagnosis=tuple(cycle),
    )


def validate(schedule: Schedule) -> None:
    """Raises an error if a schedule is incomplete, is out of order, or cannot finish.

    * Complete: for each microbatch, each stage does ``F`` once, and either ``B`` once or ``I`` and
      ``W`` once, on its own rank.
    * In order: an action comes after the actions that it needs on its own rank. In a lowered
      schedule, sends and receives match in order.
    * Free of deadlock, whatever the costs, even if a send ends only when its message is received.

    Args:
        schedule: any schedule, lowered or not.

    Raises:
        ScheduleError: the schedule breaks a rule; the message names the first action that does, its
            rank, and its position in the rank's row, counted from 0.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> validate(one_f_one_b(num_ranks=2, num_microbatches=4))
        >>> validate(
        ...     Schedule(
        ...         "mine", 2, (0,), ((Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1)),)
        ...     )
        ... )
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: stage 0 has no backward pass for microbatch 1 (rank 0). Add 0B1, or 0I1 and 0W1.
    """  # noqa: E501
    lowered = lower_checked(schedule, whole=True)
    try:
        _play(lowered, Costs())
    except Deadlock as stuck:
        rank, action = stuck.diagnosis[0]
        position = schedule.actions[rank].index(action)
        raise ScheduleError(
            f"{stuck} The first action that waits is {action} (rank {rank}, position {position}).",
            diagnosis=stuck.diagnosis,
        ) from stuck
