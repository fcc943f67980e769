"""Runs simulated ranks in a chosen order.

A rank halts before it posts an operation. When no rank can do anything else, one of the halted
ranks is chosen, posts its operation, and runs on until it halts, waits or ends. The choices decide
everything that depends on the order, so the same choices always lead to the same state::

    rank 0   halted: recv from any rank    chosen ->  waits for a message
    rank 1   halted: send to 0                        halted: send to 0
    rank 2   halted: send to 0                        halted: send to 0

Most steps commute. Messages on a channel are matched in the order in which they are posted, so only
two things depend on the order of different ranks: which of several sends a recv from any source
receives, and whether an operation is done when its rank asks. In these cases, two steps race.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ringsim.comm.checks import Attempt
from ringsim.diagnose.variables import describe_stack
from ringsim.simulator.simulation import Outcome, Simulation, run_in
from ringsim.traces.events import ANY_SOURCE, NONE
from ringsim.traces.value import Trace

_STEP_S = 1e-6  # the virtual time between two choices


class Step(NamedTuple):
    """The next step of a halted rank.

    Attributes:
        text: the step in words.
        kind: the peer of the operation that the rank posts, and whether it is a send; None if the
            rank asks whether an operation is done.
        inbox: the group, destination and tag of a send.
        decides: the kinds of operations that decide the answer, if the rank asks.
        again: whether the rank has asked the same in the same state. ``decides`` then stands for
            all questions since the last post.
        cause: the number of the choice that let the rank run to this step, or -1.
    """

    text: str
    kind: tuple[int, bool] | None = None
    inbox: tuple[int, ...] | None = None
    decides: Collection[object] = ()
    again: bool = False
    cause: int = -1

    def races(self, other: Step, inboxes: Collection[object]) -> bool:
        """Returns whether the order of two ranks' steps makes a difference.

        Args:
            other: the other rank's step.
            inboxes: the inboxes in which a rank receives from any source.
        """
        competes = self.inbox == other.inbox and self.inbox in inboxes
        return competes or self.kind in other.decides or other.kind in self.decides


class Choice(NamedTuple):
    """A choice: the steps of the halted ranks, the ranks that are asleep, and the chosen rank.

    A halted rank is asleep if its step need not be tried, because other orders begin with it.
    """

    steps: dict[int, Step]
    asleep: set[int]
    rank: int


class OrderedSimulation(Simulation):
    """A simulation in which ranks halt before their operations.

    ``more`` of the outcome holds the next steps of the halted ranks in words, the choices, and the
    inboxes in which ranks receive from any source.

    Args:
        order: the ranks to choose.
        asleep: the ranks that are asleep before the last choice in ``order``, or None to stop after
            this choice.
        inboxes: the inboxes that are known from other orders.
        run: the arguments of the simulation.
    """

    def __init__(
        self, order: Sequence[int], asleep: set[int] | None, inboxes: set[object], *run: Any
    ) -> None:
        super().__init__(*run)
        self._order, self._first_asleep, self._asleep = order, asleep, set[int]()
        self._known, self._inboxes = inboxes, set[object]()
        self._steps: dict[int, Step] = {}
        self._choices: list[Choice] = []
        # since the last post: the states in which a rank asked, and what decides the answers
        self._asked: dict[int, tuple[set[object], set[object]]] = {}
        self._clock.choose, self._clock.halt_poll = self._choose, self._halt_poll
        self._outputs.shown = open(os.devnull, "w")  # noqa: SIM115  # until the process ends

    def finish(self) -> Outcome:
        """Runs the simulation until no choice is left."""
        outcome = super().finish()
        steps = {} if outcome.error else {rank: step.text for rank, step in self._steps.items()}
        return replace(outcome, more=(dict(sorted(steps.items())), self._choices, self._inboxes))

    def _choose(self) -> Any:
        if self._reports or not self._steps:
            return None
        count = len(self._choices)
        if count < len(self._order):
            rank, self._asleep = self._order[count], self._first_asleep or set()
        elif (rank := self._pick()) is None:
            return None
        self._choices.append(Choice(self._steps.copy(), self._asleep, rank))
        step = self._steps.pop(rank)
        self._asleep = {
            one
            for one in self._asleep & self._steps.keys()
            if not step.races(self._steps[one], self._known)
        }
        self._clock.set(self._clock.now + _STEP_S)
        return self._ranks[rank]

    def _pick(self) -> Any:
        """Returns the next rank, or None if there is no need to go on."""
        if self._first_asleep is None:
            return None
        awake = self._steps.keys() - self._asleep
        if not awake and all(step.again for step in self._steps.values()):  # they ask forever
            awake = {*self._steps}
        return min(awake, key=lambda rank: (bool(self._steps[rank].decides), rank), default=None)

    def _on_operation(self, attempt: Attempt) -> None:
        rank, sends = self._clock.current.number, attempt.op == "isend"
        if attempt.peer == ANY_SOURCE:
            self._inboxes.add((attempt.group, rank, attempt.tag))
        inbox = (attempt.group, attempt.peer, attempt.tag) if sends else None
        kind = NONE if attempt.tag is None else attempt.peer, sends
        self._asked.pop(rank, None)
        self._halt(Step(self._describe(attempt), kind, inbox))

    def _halt_poll(self, asked: Any) -> None:
        rank, sends = self._clock.current.number, getattr(asked, "sends", None)
        decides = {(NONE, False)} if sends is None else {(rank, not sends), (ANY_SOURCE, False)}
        if self._clock.in_order:  # the operation may be queued behind others of its group
            decides = set(product(range(ANY_SOURCE, self._size), (False, True)))
        frame = sys._getframe()
        places = (*(frame.f_lasti for frame, _ in traceback.walk_stack(frame)),)
        state = id(asked), places, describe_stack(frame)
        states, before = self._asked.get(rank, (set[object](), set[object]()))
        again, both = state in states, before | decides
        self._asked[rank] = states | {state}, both
        is_done = asked.done_s <= self._clock.now
        if is_done or not all(step.decides for step in self._steps.values()):
            self._clock.polls = 0  # the rank does not ask forever
        text = f"is_completed at {self._here()}"
        self._halt(Step(text, decides=both if again else decides, again=again))

    def _halt(self, step: Step) -> None:
        rank = self._clock.current.number
        self._steps[rank] = step._replace(cause=len(self._choices) - 1)
        if step.again:
            self._asleep.add(rank)
        while rank in self._steps:
            self._clock.pause()

    def _judge(self) -> Any:
        return None if self._steps else super()._judge()

    def _make_trace(self, *, complete: bool) -> Trace:
        return super()._make_trace(complete=complete and not self._steps)


run_here = partial(run_in, OrderedSimulation)
