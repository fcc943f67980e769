"""When each action of a schedule happens, without ranks: each rank does its list in order, and waits for what it needs.

1F1B over two ranks, backward twice as long as forward, ``.`` a unit of waiting::

    rank 0   0F0 0F1  .  0B0 ---  .  0B1 ---
    rank 1    .  1F0 1B0 --- 1F1 1B1 ---

A schedule without sends and receives is lowered first, so this times what the executor runs. A message takes ``Costs.latency``, and no time
of the ranks. When it may start is said by ``semantics``; where its receive stands, by ``lower``'s ``ahead``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ringsim.errors import Deadlock
from ringsim.pipeline.actions import Action
from ringsim.pipeline.costs import Costs
from ringsim.pipeline.dataflow import get_recv
from ringsim.pipeline.lowering import lower
from ringsim.pipeline.programs import Compute, Operation, Receive, Run, Semantics, Send, Time, Wait, run_programs
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.well_formed import check_messages, check_order, check_places

__all__ = ["Evaluation", "TimedAction", "TimedMessage", "evaluate"]


class TimedAction(NamedTuple):
    """An action, and when.

    Attributes:
        action: what is done.
        start: when a computation starts, or a send or receive is posted.
        end: when a computation ends, or a message has arrived.
    """

    action: Action
    start: Time
    end: Time


class TimedMessage(NamedTuple):
    """A message from one rank to another.

    Attributes:
        send: the action that sends it.
        source: the rank that sends.
        rank: the rank that receives.
        posted: when the send was posted.
        arrived: when the payload was there.
    """

    send: Action
    source: int
    rank: int
    posted: Time
    arrived: Time


@dataclass(frozen=True)
class Evaluation:
    """A schedule with times, from 0.

    Attributes:
        schedule: what was evaluated, lowered.
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
        """How long the step takes: until the last computation ends."""
        return max((self._end(rank) for rank in range(self.schedule.num_ranks)), default=0)

    @property
    def busy(self) -> tuple[Time, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(timed.end - timed.start for timed in self.get_computations(rank)) for rank in range(self.schedule.num_ranks))

    @property
    def idle(self) -> tuple[Time, ...]:
        """For each rank, its bubble by makespan: how long it does not compute while the step lasts."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_idle(self) -> tuple[Time, ...]:
        """For each rank, its bubble by span: how long it does not compute between the start of its first and the end of its last action.

        The papers on zero bubbles count this way: steps that follow each other fill what is left out at both ends.
        """
        return tuple(self._end(rank) - self._start(rank) - busy for rank, busy in enumerate(self.busy))

    @property
    def peak_live(self) -> tuple[int, ...]:
        """For each rank, the most live activations at a time; see ``list_live``."""
        return tuple(max((live for _, live in self.list_live(rank)), default=0) for rank in range(self.schedule.num_ranks))

    def get_computations(self, rank: int) -> tuple[TimedAction, ...]:
        """Returns a rank's computations with their times, without its sends and receives."""
        return tuple(timed for timed in self.actions[rank] if timed.action.is_compute)

    def list_live(self, rank: int) -> list[tuple[Time, int]]:
        """Lists how many activations a rank holds, each time that changes.

        An activation is what one forward pass of one stage keeps for the backward: it lives from the start of ``F`` to the end of ``B``,
        or of ``W``.

        Args:
            rank: which rank.

        Returns:
            Pairs of a time and the number from then on, in order; where one ends and the next starts at the same time there are two pairs.
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

    def _start(self, rank: int) -> Time:
        """When a rank's first computation starts."""
        return min((timed.start for timed in self.get_computations(rank)), default=0)

    def _end(self, rank: int) -> Time:
        """When a rank's last computation ends."""
        return max((timed.end for timed in self.get_computations(rank)), default=0)


def evaluate(schedule: Schedule, costs: Costs | None = None, semantics: Semantics = "rendezvous") -> Evaluation:
    """Times every action and message of a schedule.

    Args:
        schedule: any schedule, lowered or not; it need not be a whole step.
        costs: what the actions cost; None: forward, input and weight 1 each, backward 2, messages nothing.
        semantics: ``rendezvous``: a message starts to travel when its send and its receive are posted; ``buffered``: when its send is.

    Returns:
        The times; exact where the costs are ints or Fractions.

    Raises:
        ScheduleError: an action is not its rank's, comes twice, before what it needs, or without the other side of its message.
        Deadlock: ranks wait for each other in a circle; ``diagnosis`` is the circle, a tuple of (rank, the action that it waits in).
        ArgumentError: the costs do not fit the stages, or there is no such semantics.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> evaluation = evaluate(one_f_one_b(num_ranks=2, num_microbatches=2), Costs(latency=0))
        >>> evaluation.makespan, evaluation.idle, evaluation.peak_live, len(evaluation.messages)
        (9, (3, 3), (2, 1), 4)
        >>> [f"{action} {start}-{end}" for action, start, end in evaluation.get_computations(rank=1)]
        ['1F0 1-2', '1B0 2-4', '1F1 4-5', '1B1 5-7']
    """
    check_places(schedule)
    check_order(schedule)
    lowered = lower(schedule)
    check_messages(lowered)
    translated = [_translate(row, lowered, costs or Costs()) for row in lowered.actions]
    run = run_programs([program for program, _ in translated], latency=(costs or Costs()).latency, semantics=semantics)
    owners = [owners for _, owners in translated]
    if run.blocked:
        raise _describe_deadlock(run, lowered, owners)
    return _collect(run, lowered, owners)


def _translate(row: tuple[Action, ...], schedule: Schedule, costs: Costs) -> tuple[list[Operation], list[int]]:
    """Writes a rank's actions as operations, each with the position of the action that it belongs to.

    A computation first waits for its receive; the sends are waited for at the end.
    """
    operations: list[tuple[Operation, int]] = []
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
            operations.append((Send(peer, action) if action.kind.startswith("SEND") else Receive(peer, action.other_side), owner))
    operations += [(Wait(position), operations[position][1]) for action, position in posts.items() if action.kind.startswith("SEND")]
    return [operation for operation, _ in operations], [owner for _, owner in operations]


def _collect(run: Run, schedule: Schedule, owners: list[list[int]]) -> Evaluation:
    """Gives the times of the operations back to their actions."""
    rows = [[TimedAction(action, 0, 0) for action in row] for row in schedule.actions]
    for rank, row in enumerate(rows):
        for owner, times in zip(owners[rank], run.times[rank], strict=True):
            row[owner] = TimedAction(row[owner].action, *times)
    messages = []
    for message in run.messages:
        send, receive = owners[message.source][message.send], owners[message.rank][message.receive]
        action = schedule.actions[message.source][send]
        messages.append(TimedMessage(action, message.source, message.rank, message.posted, message.arrived))
        rows[message.source][send] = TimedAction(action, message.posted, message.arrived)
        rows[message.rank][receive] = rows[message.rank][receive]._replace(end=message.arrived)
    return Evaluation(schedule, tuple(map(tuple, rows)), tuple(messages))


def _describe_deadlock(run: Run, schedule: Schedule, owners: list[list[int]]) -> Deadlock:
    """Says who waits where, and for whom."""
    cycle, waits = [], []
    for stuck in run.cycle:
        row, owner = schedule.actions[stuck.rank], owners[stuck.rank]
        action, awaited = row[owner[stuck.position]], row[owner[stuck.post]].other_side
        cycle.append((stuck.rank, action))
        waits.append(f"rank {stuck.rank} waits in {action} for {awaited} of rank {stuck.peer}")
    rule = "a schedule must let every rank go on, got a circle"
    return Deadlock(f"{rule}: {'; '.join(waits)}. Do what one of them waits for earlier.", diagnosis=tuple(cycle))
