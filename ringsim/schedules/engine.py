"""Times and checks schedules exactly, by playing their actions on a clock.

This is 1F1B over two ranks, with backwards that take twice as long as forwards; each ``.`` is a
unit of waiting::

    rank 0   0F0 0F1  .  0B0 ---  .  0B1 ---
    rank 1    .  1F0 1B0 --- 1F1 1B1 ---

A schedule without sends and receives is lowered first, so the times are those of the actions that
the executor runs. A message takes ``Costs.latency``, but none of the ranks' time. ``semantics``
determines when a message may start, and ``lower``'s ``ahead`` determines the position of its
receive.

Two actions in ``OVERLAP_F_B`` run one after the other, unless ``Costs.overlap`` is positive. With
1, a forward of 1 and a backward of 2 start together. In general, the second action starts as soon
as its message has arrived and the rest of the first takes no longer than the hidden time::

    overlap=0    F--- B-------      overlap=1/2    F---            overlap=1    F---
                                                     B-------                   B-------

If they overlap, the messages of both leave when both have ended.

NCCL carries out the messages of a communicator in order, which ``grouped`` and ``paired`` model. As
on NCCL, the executor then posts messages in the order of ``lower_in_step``, each on its own. A
schedule that contains its sends and receives keeps its order, and may hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ringsim.errors import Deadlock, ScheduleError
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.cures import describe_cures, try_cures
from ringsim.schedules.lowering import lower_checked, lower_in_step
from ringsim.schedules.playing import play
from ringsim.schedules.programs import Blocked, Run, Semantics, read_semantics
from ringsim.schedules.schedule import Action, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        """The time that each rank spends computing; two actions that overlap count once."""
        return tuple(
            sum(timed.end - timed.start for timed in row)
            - sum(max(0, one.end - then.start) for one, then in pairwise(row))
            for row in self._rows
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
        return [
            (row[0].start, max(timed.end for timed in row)) if row else (0, 0) for row in self._rows
        ]

    @cached_property
    def _rows(self) -> list[tuple[TimedAction, ...]]:
        return [*map(self.get_computations, range(self.schedule.num_ranks))]


class Cycle(tuple[tuple[int, Action], ...]):
    """Ranks of a schedule that wait for each other, each with the action that blocks it.

    Each rank waits for the next, and the last one for the first.

    Attributes:
        num_ranks: the number of ranks of the schedule.
        semantics: the condition under which a message starts.
        labels: each rank's action and, if its message is queued, the action that comes first.
        message: a description of the cycle.
    """

    num_ranks: int
    semantics: Semantics
    labels: list[str]
    message: str

    def plot(self, **look: Any) -> Axes:
        """Draws the cycle; the arguments are those of ``Diagnosis.plot``. Returns the axes."""
        from ringsim.plot.waitfor import diagnose_cycle

        return diagnose_cycle(self).plot(**look)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Returns the description and the picture for Jupyter."""
        from ringsim.plot.waitfor import diagnose_cycle

        return diagnose_cycle(self)._repr_mimebundle_()


def evaluate(
    schedule: Schedule, costs: Costs | None = None, semantics: Semantics = "rendezvous"
) -> Evaluation:
    """Times every action and message of a schedule.

    Args:
        schedule: any schedule, lowered or not; it may cover only part of a step.
        costs: the costs of the actions, or None for ``Costs()``: 1 for each forward, input and
            weight, 2 for each backward, and 0 for each message.
        semantics: ``rendezvous``: a message starts to travel when both its send and its receive are
            posted; ``buffered``: when its send is posted; ``grouped``: like ``rendezvous``, but a
            rank's sends and receives are carried out one after another (NCCL with one communicator
            for all ranks); ``paired``: only those between the same two ranks are (NCCL with one
            communicator for each pair). With ``grouped(65536)`` or ``paired(65536)``, a send of at
            most 65536 bytes is done when its turn comes. Here, messages have no size, so every send
            is; ``simulate_schedule`` has an argument for the size.

    Returns:
        The times, which are exact if the costs are ints or Fractions.

    Raises:
        ScheduleError: an action belongs to a different rank, occurs twice, precedes an action that
            it needs, or is a send or receive without a match.
        Deadlock: ranks wait for each other in a cycle; ``diagnosis`` is the cycle, as a tuple of
            (rank, action) pairs, where the action is the one that blocks the rank. The tuple has a
            method ``plot``. If posts are carried out in order, the message lists changes that were
            tried, those that help with the length of the step, the shortest first.
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
        >>> from ringsim.schedules.lowering import lower
        >>> evaluate(lower(one_f_one_b(num_ranks=2, num_microbatches=2)), semantics="paired")
        Traceback (most recent call last):
        ringsim.errors.Deadlock: the schedule cannot finish, because ranks wait for each other: ...
    """
    costs = costs or Costs()
    lowered = lower_for(schedule, costs, semantics)
    costs.check(schedule.num_stages)
    return _collect(play_through(lowered, costs, semantics), lowered, costs)


def lower_for(
    schedule: Schedule, costs: Costs, semantics: Semantics, *, whole: bool = False
) -> Schedule:
    """Checks a schedule, and inserts sends and receives as the executor does.

    Args:
        schedule: any schedule; if it is already lowered, its own sends and receives are checked.
        costs: the costs, which decide whether two actions in ``OVERLAP_F_B`` remain a pair.
        semantics: the condition under which a message starts, as for `evaluate`.
        whole: whether every stage must do the forward and backward of every microbatch.

    Raises:
        ArgumentError, ScheduleError, Deadlock: as for `evaluate`.
    """
    in_order, overlap = read_semantics(semantics).in_order, bool(costs.overlap)
    lowered = lower_checked(schedule, whole=whole, overlap=overlap)
    if not in_order or schedule.lowered:
        return lowered
    # raises an error if computations wait for each other
    play_through(lowered, Costs(), "rendezvous")
    return lower_in_step(schedule, overlap=overlap)


def play_through(lowered: Schedule, costs: Costs, semantics: Semantics) -> Run:
    """Runs a lowered schedule, like ``play``. Raises Deadlock if ranks wait for each other."""
    run = play(lowered, costs, semantics)
    if not run.blocked:
        return run
    in_order = read_semantics(semantics).in_order
    cycle = Cycle((stuck.rank, _find_blocked(stuck, lowered)) for stuck in run.cycle)
    cycle.num_ranks, cycle.semantics = lowered.num_ranks, semantics
    cycle.labels, waits = [], []
    heads = [lowered.actions[stuck.rank][stuck.head] for stuck in run.cycle]
    for (rank, action), stuck, head, then in zip(
        cycle, run.cycle, heads, heads[1:] + heads[:1], strict=True
    ):
        label = f"{action} behind {head}" if stuck.post != stuck.head else str(action)
        after = f", which comes after {then}" if in_order else ""
        waits.append(
            f"rank {rank} waits in {label} for {head.other_side} on rank {stuck.peer}{after}"
        )
        cycle.labels.append(label)
    failure = "the schedule cannot finish, because ranks wait for each other"
    cycle.message = f"{failure}: {'; '.join(waits)}."
    remedy = "Move one of the awaited actions earlier."
    if in_order:
        remedy = describe_cures(try_cures(lowered, costs, semantics))
    raise Deadlock(f"{cycle.message} {remedy}", diagnosis=cycle)


def _find_blocked(stuck: Blocked, lowered: Schedule) -> Action:
    """Returns the action that blocks a rank; at the end of the step, this is a send."""
    row = lowered.actions[stuck.rank]
    return row[stuck.position if stuck.position < len(row) else stuck.post]


def _collect(run: Run, schedule: Schedule, costs: Costs) -> Evaluation:
    rows = [
        [
            TimedAction(
                action, start, start + costs.get_duration(action) if action.overlaps else end
            )
            for action, (start, end) in zip(
                row, times, strict=False
            )  # waits come after the actions
        ]
        for row, times in zip(schedule.actions, run.times, strict=True)
    ]
    messages = []
    for source, send, rank, receive, posted, arrived in run.messages:
        messages.append(TimedMessage(rows[source][send].action, source, rank, posted, arrived))
        for one, place in ((source, send), (rank, receive)):
            rows[one][place] = rows[one][place]._replace(end=arrived)
    return Evaluation(schedule, tuple(map(tuple, rows)), tuple(messages))


def validate(schedule: Schedule, semantics: Semantics = "rendezvous") -> None:
    """Raises an error if a schedule is incomplete, is out of order, or cannot finish.

    * Complete: for each microbatch, each stage does ``F`` once, and either ``B`` once or ``I`` and
      ``W`` once, on its own rank.
    * In order: an action comes after the actions that it needs on its own rank. In a lowered
      schedule, sends and receives match in order.
    * Free of deadlock, whatever the costs, even if a send ends only when its message is received.

    Args:
        schedule: any schedule, lowered or not.
        semantics: the condition under which a message starts, as for ``evaluate``. Pass "grouped"
            to find out whether the sends and receives of a lowered schedule would hang on NCCL.

    Raises:
        ScheduleError: the schedule breaks a rule; the message names the first action that does, its
            rank, and its position in the rank's row, counted from 0. If ranks wait for each other,
            ``diagnosis`` is the cycle, as for ``evaluate``.
        ArgumentError: ``semantics`` is unknown.

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
    try:
        play_through(lower_for(schedule, Costs(), semantics, whole=True), Costs(), semantics)
    except Deadlock as stuck:
        rank, action = stuck.diagnosis[0]
        position = schedule.actions[rank].index(action)
        raise ScheduleError(
            f"{stuck} The first action that waits is {action} (rank {rank}, position {position}).",
            diagnosis=stuck.diagnosis,
        ) from stuck
