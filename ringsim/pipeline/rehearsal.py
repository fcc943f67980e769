"""A step of a pipeline without a model: computing takes the time that it is said to take, and messages have the size that they are given.

What moves, and when, is just what a step with that schedule does::

    rank 0   compute  isend ->            compute  isend ->
    rank 1   irecv, wait      compute     irecv, wait ...

On real ranks that shows what the messages cost beside the schedule, for ranks that sleep do not compete for cores. On a virtual clock it is
the same function, and the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

import torch

from ringsim.compute_costs import compute
from ringsim.errors import ArgumentError, check_duration, is_integer, say
from ringsim.pipeline.headers import Payload
from ringsim.pipeline.mailbox import about, find_boundary
from ringsim.pipeline.routes import Posted, find_routes
from ringsim.ring import current_ring
from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import get_recv, lower, lower_in_step
from ringsim.schedules.schedule import Action, Schedule
from ringsim.state import get_state
from ringsim.traces.recorder import span
from ringsim.traces.steps import KINDS, STEP

__all__ = ["rehearse"]

_SPANS: Final = {kind: name for name, kind in KINDS.items()}


def rehearse(schedule: Schedule, costs: Costs, *, size_bytes: int = 0, steps: int = 1, ahead: int = 1) -> None:
    """Does the steps of a pipeline without a model: sleeps instead of computing, and sends zeros.

    Every rank of the ring calls it with the same arguments, and it blocks until this rank's part is done. It needs a ring of as many ranks
    as the schedule has. The trace shows what it shows of a training step.

    Args:
        schedule: what to rehearse; one that is lowered already is taken as it is.
        costs: of the computations, in seconds; ``latency`` stays 0, for messages take what they take.
        size_bytes: of each activation and each gradient; nothing is sent where it is 0.
        steps: how many steps, one after the other.
        ahead: how many computations before its use a receive is posted, as in ``lower``; not on NCCL and with the semantics "grouped",
            where there is one order for both sides (``lower_in_step``).

    Raises:
        ArgumentError: a value breaks its rule, or the schedule is for another number of ranks.
        ScheduleError: the schedule sends something that nobody receives, or the other way round.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe
        >>> costs = Costs(forward=0.001, backward=0.002)
        >>> trace = ringsim.trace(rehearse, world_size=2, args=(gpipe(2, 4), costs), kwargs={"size_bytes": 1024})
        >>> len(trace.messages), trace.bubble().of_total > 1 / 5
        (8, True)
    """
    _check(schedule, costs)
    for name, value, least in (("size_bytes", size_bytes, 0), ("steps", steps, 1)):
        if not is_integer(value) or value < least:
            raise ArgumentError(
                f"{name} must be an integer from {least}, got {say(value)}. Say how large an activation is, and how many steps."
            )
    ring = current_ring()
    if schedule.num_ranks != len(ring.ranks):
        raise ArgumentError(
            f"schedule must be for the {len(ring.ranks)} ranks of the ring, got one for {schedule.num_ranks}. Make it anew."
        )
    lowered = lower_in_step(schedule) if ring.in_order else lower(schedule, ahead=ahead)
    place, routes = ring.ranks.index(ring.rank), find_routes(ring, lowered.stage_ranks)
    is_real = get_state().clock is None
    payload = Payload((size_bytes,), torch.uint8, has_data=is_real)  # on a virtual clock nobody has to copy them
    zeros = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu" if is_real else "meta")
    for _ in range(steps):
        with span(f"{STEP}{schedule.name}"):
            posted: dict[Action, Posted] = {}
            for action in lowered.actions[place]:
                if action.is_compute:
                    recv = get_recv(action, lowered.stage_ranks)
                    if recv is not None:
                        posted.pop(recv).wait()
                    with span(_SPANS[action.kind], stage=action.stage, microbatch=action.microbatch):
                        compute(float(costs.get_duration(action)))
                else:
                    route = routes[find_boundary(action)]
                    with about(action):
                        posted[action] = route.isend(zeros) if action.kind.startswith("SEND") else route.irecv(payload)
            for each in posted.values():
                each.wait()


def _check(schedule: Schedule, costs: Costs) -> None:
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"schedule must be a schedule, got {say(schedule)}. Make one: make_schedule('1f1b', 4, 8).")
    if not isinstance(costs, Costs):
        raise ArgumentError(f"costs must be Costs, got {say(costs)}. Pass Costs(forward=0.001, backward=0.002).")
    costs.check(schedule.num_stages)
    for name in (field.name for field in fields(costs)):
        given = getattr(costs, name)
        for time in given if isinstance(given, Sequence) else [given or 0]:
            check_duration(name, time)
    if costs.latency != 0:
        raise ArgumentError(f"latency must be 0, got {costs.latency}: messages take what they take. Leave it out.")
