"""Runs simulated ranks in a chosen order.

A rank halts before it posts an operation. When no rank can do anything else, one of the halted
ranks is chosen, posts its operation, and runs on until it halts, waits or ends. The choices decide
everything that depends on the order, so the same choices always lead to the same state::

    rank 0   halted: recv from any rank    chosen ->  waits for a message
    rank 1   halted: send to 0                        halted: send to 0
    rank 2   halted: send to 0                        halted: send to 0

Most choices commute. Messages on a channel are matched in the order in which they are posted, so
only two things depend on the order of different ranks: which of several sends a recv from any
source receives, and whether an operation is done when its rank asks. These operations are races.
To try every order, it is enough to try alternatives between races, once for each state.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ringsim.comm.checks import Attempt
from ringsim.simulator.simulation import Outcome, Simulation, run_in
from ringsim.traces.cells import rename_places
from ringsim.traces.events import ANY_SOURCE
from ringsim.traces.value import Trace

_STEP_S = 1e-6  # the virtual time between two choices
_QUESTION = "is_completed"  # the race between a question and the operations of other ranks


class _OrderedSimulation(Simulation):
    """A simulation in which ranks halt before their operations.

    ``more`` of the outcome holds the next operations of the halted ranks in words, the choices, and
    the races. A choice consists of a number for the state, the ranks worth trying in this state,
    and the chosen rank. A race is a group, a destination and a tag, or a question.

    Args:
        order: the ranks to choose.
        known: the races that are known from other orders, to run to the end, or None to stop when
            all ranks in ``order`` have been chosen.
        run: the arguments of the simulation.
    """

    def __init__(self, order: Iterable[int], known: Collection[object] | None, *run: Any) -> None:
        super().__init__(*run)
        self._order, self._known = iter(order), known
        self._halted: dict[int, tuple[str, object]] = {}
        self._choices: list[tuple[int, list[int], int]] = []
        self._races: set[object] = set()
        self._clock.choose, self._clock.halt_poll = self._choose, self._halt_poll
        self._outputs.shown = open(os.devnull, "w")  # noqa: SIM115  # until the process ends

    def finish(self) -> Outcome:
        """Runs the simulation until no choice is left."""
        outcome = super().finish()
        halted = {} if outcome.error else {rank: text for rank, (text, _) in self._halted.items()}
        return replace(outcome, more=(dict(sorted(halted.items())), self._choices, self._races))

    def _choose(self) -> Any:
        if self._reports or not self._halted:
            return None
        ranks = self._list_alternatives()
        rank = next(self._order, None if self._known is None else ranks[0])
        if rank is None:
            return None
        self._choices.append((self._number_state(), ranks, rank))
        del self._halted[rank]
        self._clock.set(self._clock.now + _STEP_S)
        return self._ranks[rank]

    def _list_alternatives(self) -> list[int]:
        """Returns the halted ranks, or only a rank whose operation commutes with all others."""
        known, races = self._known or (), {rank: race for rank, (_, race) in self._halted.items()}
        ranks = sorted(races, key=lambda rank: (races[rank] == _QUESTION, rank))
        free = [rank for rank in ranks if races[rank] not in known]
        return free[:1] if free and _QUESTION not in known else ranks

    def _number_state(self) -> int:
        """Returns a number that is the same for equal states, in all forks of one server."""
        events, waiting = self._recorder.read(), self._shared.matcher.waiting()
        sends = sorted((one.number, one.rank.number, one.peer) for one in waiting if one.sends)
        halted = tuple(sorted(self._halted.items()))
        order = tuple(send[1:] for send in sends)
        return hash((events.rank.tobytes(), events.peer.tobytes(), order, halted))

    def _on_operation(self, attempt: Attempt) -> None:
        race: object = (attempt.group, attempt.peer, attempt.tag)
        if attempt.peer == ANY_SOURCE:
            self._races.add((attempt.group, self._clock.current.number, attempt.tag))
        self._halt(self._describe(attempt), race if attempt.op == "isend" else None)

    def _halt_poll(self) -> None:
        self._races.add(_QUESTION)
        text = f"{_QUESTION} at {self._find_place(self._clock.current)}"
        self._halt(rename_places(text, self._cells), _QUESTION)

    def _halt(self, text: str, race: object) -> None:
        rank = self._clock.current
        self._halted[rank.number] = text, race
        while rank.number in self._halted:
            self._clock.pause()

    def _judge(self) -> Any:
        return None if self._halted else super()._judge()

    def _make_trace(self, *, complete: bool) -> Trace:
        return super()._make_trace(complete=complete and not self._halted)


run_here = partial(run_in, _OrderedSimulation)
