"""Any schedule as columns, with the places of its messages: what `lower` and the evaluator find action by action, found array by array.

What breaks a rule is handed to the evaluator's own checks, which say it in words.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import numpy as np

from ringsim.errors import ScheduleError
from ringsim.pipeline.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action
from ringsim.pipeline.lowering import check_ahead, lower
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.well_formed import check_messages, check_order, check_places
from ringsim.simulator.operations import Operations
from ringsim.traces.events import Ints

__all__ = ["read_schedule"]

_CODES: Final = {kind: code for code, kind in enumerate((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))}
_F, _B, _I, _W, _SEND_F, _SEND_B, _RECV_F, _RECV_B = range(8)
# Of a send or receive: how many stages away the other side is.
_AWAY: Final = np.array([0, 0, 0, 0, 1, -1, -1, 1])


class _Broken(Exception):
    """The schedule breaks a rule."""


def read_schedule(schedule: Schedule, ahead: int = 1) -> Operations:
    """Returns a schedule as columns.

    Args:
        schedule: any schedule, lowered or not; it need not be a whole step.
        ahead: as in `lower`: how many computations before its use a receive is posted. A lowered schedule says that itself.

    Returns:
        Its computations, with the places of their messages.

    Raises:
        ScheduleError: an action is not its rank's, comes twice, before what it needs, or without the other side of its message.
        ArgumentError: ``ahead`` is no whole number, or negative.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> operations = read_schedule(one_f_one_b(num_ranks=2, num_microbatches=2))
        >>> [str(operations.action(number)) for number in range(len(operations))]
        ['0F0', '0F1', '0B0', '0B1', '1F0', '1B0', '1F1', '1B1']
        >>> operations.sent_after.tolist(), operations.posted_after.tolist()
        ([-1, -1, 5, 7, 0, -1, 1, -1], [-1, -1, 0, 1, -1, -1, 4, -1])
    """
    check_ahead(ahead)
    try:
        return _Reader(schedule).read(min(ahead, max(map(len, schedule.actions), default=0)))  # sooner than at once is at once
    except (_Broken, KeyError):
        _refuse(schedule)
        raise


def _refuse(schedule: Schedule) -> None:
    """Says in words which rule a schedule breaks, as `evaluate` does."""
    check_places(schedule)
    check_order(schedule)
    check_messages(lower(schedule))


class _Reader:
    """The columns of all actions, sends and receives included, and where each action stands."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        rows = schedule.actions
        columns = list(zip(*chain.from_iterable(rows), strict=True)) or [(), (), ()]
        self.stage = np.array(columns[0], dtype=np.int64)
        self.kind = np.array([_CODES[kind] for kind in columns[1]], dtype=np.int64)
        self.microbatch = np.array(columns[2], dtype=np.int64)
        self.rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        self.owner = np.array(schedule.stage_ranks, dtype=np.int64)
        self.computes = self.kind <= _W
        self._check_places()
        self.place = np.full((len(_CODES), schedule.num_stages + 2, max(schedule.num_microbatches, 1)), -1, dtype=np.int64)
        self.place[self.kind, self.stage, self.microbatch] = np.arange(len(self.stage))  # two rows more: -1 and S have nothing
        found = self.place[self.kind, self.stage, self.microbatch]
        gradients = (self.place[_B] >= 0) & (self.place[_I] >= 0)
        _require((found == np.arange(len(found))).all() and not gradients.any())
        self.makes = np.maximum(self.place[_B], self.place[_I])  # of a gradient; one of the two is -1
        self._check_needs()

    def _check_places(self) -> None:
        """Refuses what `check_places` refuses, but for second ones."""
        schedule = self.schedule
        _require(schedule.num_microbatches >= 1 and ((self.owner >= 0) & (self.owner < schedule.num_ranks)).all())
        _require(((self.stage >= 0) & (self.stage < schedule.num_stages)).all())
        _require(((self.microbatch >= 0) & (self.microbatch < schedule.num_microbatches)).all())
        _require((self.owner[self.stage] == self.rank).all())
        messages = ~self.computes
        other = (self.stage + _AWAY[self.kind])[messages]
        _require(((other >= 0) & (other < schedule.num_stages)).all())
        _require((self.owner[other] != self.rank[messages]).all())

    def _check_needs(self) -> None:
        """Refuses what comes before what it needs on its own rank, and finds what makes each message."""
        here = np.arange(len(self.stage))
        own_forward, own_gradient = self.place[_F, self.stage, self.microbatch], self.makes[self.stage, self.microbatch]
        for code, made in (
            (_B, own_forward), (_I, own_forward), (_W, self.place[_I, self.stage, self.microbatch]),
            (_SEND_F, own_forward), (_SEND_B, own_gradient),
        ):  # fmt: skip
            some = self.kind == code
            _require(((made[some] >= 0) & (made[some] < here[some])).all())
        forward, gradient = self.kind == _F, (self.kind == _B) | (self.kind == _I)
        source = np.where(forward, self.stage - 1, np.where(gradient, self.stage + 1, -1))
        inside = (source >= 0) & (source < len(self.owner))
        away = inside & (self.owner[np.where(inside, source, 0)] != self.rank)
        self.maker = np.where(forward, self.place[_F, source, self.microbatch], self.makes[source, self.microbatch])
        near = inside & ~away
        _require(((self.maker[near] >= 0) & (self.maker[near] < here[near])).all())
        self.needs_message = away
        if not self.schedule.lowered:
            _require((self.maker[away] >= 0).all() and self._count_sends() == away.sum())

    def _count_sends(self) -> int:
        """Counts the computations whose output or gradient another rank could need."""
        forward, gradient = self.kind == _F, (self.kind == _B) | (self.kind == _I)
        target = self.stage + np.where(forward, 1, -1)
        inside = (forward | gradient) & (target >= 0) & (target < len(self.owner))
        return int((self.owner[target[inside]] != self.rank[inside]).sum())

    def read(self, ahead: int) -> Operations:
        """Returns the columns of the computations."""
        computes = np.flatnonzero(self.computes)
        number = np.cumsum(self.computes) - 1  # of each action: the last computation up to it
        begins = np.searchsorted(self.rank[computes], np.arange(self.schedule.num_ranks + 1))
        needing = computes[self.needs_message[computes]]
        if self.schedule.lowered:
            send, receive = self._meet(needing)
            order, channel = self._by_channel(send, needing)
            sent, posted = number[send], number[receive]
        else:
            send = self.maker[needing]
            order, channel = self._by_channel(send, needing)
            sent = number[send]
            position = number[needing] - begins[self.rank[needing]]
            for some in np.split(order, np.flatnonzero(np.diff(channel)) + 1):  # before what needs a later one of the same channel
                position[some] = np.minimum.accumulate(position[some][::-1])[::-1]
            posted = begins[self.rank[needing]] + position - ahead - 1
        columns = np.full((3, len(computes)), -1, dtype=np.int32)
        of = number[needing]
        columns[0, of] = sent
        columns[1, of] = np.where(posted >= begins[self.rank[needing]], posted, -1)
        follows = channel[1:] == channel[:-1]
        columns[2, of[order[1:][follows]]] = of[order[:-1][follows]]
        stage, kind, microbatch = (column[computes].astype(np.int32) for column in (self.stage, self.kind, self.microbatch))
        schedule = self.schedule
        return Operations(
            schedule.name, schedule.num_microbatches, schedule.stage_ranks, begins, stage, kind.astype(np.int8), microbatch, *columns
        )

    def _by_channel(self, send: Ints, needing: Ints) -> tuple[Ints, Ints]:
        """Orders messages by channel (from a rank, to a rank), then as they are sent; returns the order and the channels in it."""
        channel = self.rank[send] * self.schedule.num_ranks + self.rank[needing]
        order = np.lexsort((send, channel))
        return order, channel[order]

    def _meet(self, needing: Ints) -> tuple[Ints, Ints]:
        """Finds the written sends and receives of messages; both sides of a channel must have one order."""
        ahead = self.kind[needing] == _F
        stage, microbatch = self.stage[needing], self.microbatch[needing]
        receive = self.place[np.where(ahead, _RECV_F, _RECV_B), stage, microbatch]
        send = self.place[np.where(ahead, _SEND_F, _SEND_B), stage + np.where(ahead, -1, 1), microbatch]
        _require(((receive >= 0) & (receive < needing) & (send >= 0)).all())
        unneeded = np.setdiff1d(np.flatnonzero(self.kind > _SEND_B), receive)
        if len(unneeded):
            index = int(unneeded[0])
            action = Action(
                int(self.stage[index]), (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)[self.kind[index]], int(self.microbatch[index])
            )
            check_messages(self.schedule)
            raise ScheduleError(
                f"{action} must be for a computation, got none that needs it (rank {self.rank[index]}). Take both sides out."
            )
        _require(2 * len(needing) == (~self.computes).sum())
        order, channel = self._by_channel(send, needing)
        later = np.diff(receive[order])
        _require((later[channel[1:] == channel[:-1]] > 0).all())
        return send, receive


def _require(holds: bool | np.bool) -> None:
    if not holds:
        raise _Broken
