"""``ringsim.scale``: from a trace of a few ranks to hundreds of stages.

What the few ranks tell::

    stage 0            its own times        -> stage 0
    inner stages       their mean           -> every inner stage; of two stages, the mean of both
    last stage         its own times        -> the last stage
    messages           latency, size        -> every boundary
    between actions    posting, the program -> after every action
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringsim.errors import ArgumentError, check_integer, is_integer, say
from ringsim.link import Link
from ringsim.predict.calibration import calibrate
from ringsim.schedules.costs import Costs
from ringsim.simulator.schedules import ScheduleRun, simulate_schedule
from ringsim.traces.events import NONE, Ints
from ringsim.traces.steps import StageActions, count_steps, find_step, in_step
from ringsim.traces.value import Trace, check_trace

__all__ = ["scale"]


def scale(trace: Trace, *, world_size: int, num_microbatches: int | None = None) -> ScheduleRun:
    """Predicts the step of a pipeline on more ranks than were recorded, with the same schedule and stages like those recorded.

    The first and the last stage keep their times; inner stages take the mean of the inner ones, or of both if there are two. Messages keep
    their size. The machine is assumed to be as fast with more ranks, which is wrong for more ranks than cores.

    Args:
        trace: of ranks that ran ``train_step_pipeline`` or ``rehearse``, two or more, with one of the known schedules.
        world_size: number of ranks to predict, 2 or more.
        num_microbatches: how many microbatches; None for as many as were recorded.

    Returns:
        The predicted step: its makespan in seconds, bubble, critical path, and with ``trace()`` a trace to be drawn.

    Raises:
        ArgumentError: the trace has no step of a known schedule, or too few messages to tell what they cost.
        ScheduleError: there is no such schedule for so many ranks and microbatches.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe, rehearse
        >>> recorded = ringsim.trace(rehearse, world_size=2, args=(gpipe(2, 8), Costs(forward=0.001, backward=0.002)),
        ...                          kwargs={"size_bytes": 1024, "ahead": 0})
        >>> run = scale(recorded, world_size=100)
        >>> run.num_ranks, run.num_microbatches, run.makespan > 107 * 0.003
        (100, 8, True)
    """
    check_trace("trace", trace)
    if not is_integer(world_size) or world_size < 2:
        raise ArgumentError(f"world_size must be an integer from 2, got {say(world_size)}. Say how many ranks to predict.")
    if num_microbatches is not None:
        check_integer("num_microbatches", num_microbatches, 1, "Say how many to predict, or leave it out for as many as were recorded.")
    if count_steps(trace.events) == 0:
        raise ArgumentError(
            "trace must have a step of a pipeline, got one without. Record ranks that call train_step_pipeline or rehearse."
        )
    known = find_step(trace).find_known()
    if known is None or known.num_ranks < 2:
        raise ArgumentError(
            f"trace must have a step of a known schedule on 2 ranks or more, got {find_step(trace).schedule!r} on {trace.world_size}. "
            "Record one that make_schedule knows."
        )
    calibration = calibrate(trace)
    sizes = np.unique(trace.events.size_bytes[trace.messages.send[in_step(trace.events, 0)[trace.messages.send]]])
    size_bytes = int(sizes[-1])  # headers are smaller
    apart = _find_time_between(trace)
    assert calibration.costs is not None  # there is a step
    stages = world_size * (known.num_chunks or 1)
    found = calibration.costs
    forward, weight = (_spread(times, stages, apart) for times in (found.forward, found.weight))
    costs = Costs(
        forward, _spread(found.input, stages, apart), weight, None if found.backward is None else _spread(found.backward, stages, apart)
    )
    # The time to post a send is part of what follows its computation and of what its message takes: it counts once.
    latency_s = max(calibration.link.time_s(size_bytes) - calibration.post_s(True, size_bytes), 0.0)
    busy = calibration.link.beta_s_per_byte * size_bytes
    link = Link(max(latency_s - busy, 0.0), min(busy, latency_s) / size_bytes if size_bytes else 0.0)
    return simulate_schedule(
        known.name,
        costs,
        num_ranks=world_size,
        num_microbatches=known.num_microbatches if num_microbatches is None else num_microbatches,
        num_chunks=known.num_chunks,
        link=link,
        size_bytes=size_bytes,
    )


def _spread(times: Any, stages: int, apart: float) -> tuple[float, ...]:
    """Returns the times of many stages from those of a few; 0 stays, for kinds that the schedule does not have."""
    if not any(times):
        return (0.0,) * stages
    between = times[1:-1] or times
    middle = sum(between) / len(between)
    return tuple(time + apart for time in (times[0], *[middle] * (stages - 2), times[-1]))


def _find_time_between(trace: Trace) -> float:
    """Returns the median time between two computations in which a rank was not blocked: posting and the program itself; in seconds."""
    found = [between for step in range(count_steps(trace.events)) for between in _list_between(trace, find_step(trace, step))]
    return float(np.median(np.concatenate(found))) * 1e-9 if found else 0.0


def _list_between(trace: Trace, actions: StageActions) -> list[Ints]:
    """Returns, for each rank of a step, the times between its computations in which it was not blocked, in ns."""
    events = trace.events
    found = []
    for rank in actions.ranks:
        own = actions.of(rank)
        waits = np.flatnonzero((events.rank == rank) & (events.wait_ns != NONE) & (events.done_ns != NONE))
        waits = waits[np.argsort(events.wait_ns[waits])]
        blocked = np.concatenate([[0], np.cumsum(events.done_ns[waits] - events.wait_ns[waits])])
        until = np.searchsorted(events.wait_ns[waits], np.stack([own.end[:-1], own.start[1:]]))
        found.append(own.start[1:] - own.end[:-1] - (blocked[until[1]] - blocked[until[0]]))
    return found
