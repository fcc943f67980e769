"""``ringsim.predict`` and ``ringsim.scale``: from a trace of a few ranks to a program on many.

What the few ranks tell::

    stage 0            its own times        -> stage 0
    inner stages       their mean           -> every inner stage; of two stages, the mean of both
    last stage         its own times        -> the last stage
    messages           latency, size        -> every boundary
    between actions    posting, the program -> after every action
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from ringsim.diagnose.lateness import Activity
from ringsim.errors import ArgumentError, check_integer, is_integer, say
from ringsim.link import Link
from ringsim.prediction.calibration import Calibration, calibrate
from ringsim.provenance import note_doubts
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.schedule import Schedule
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import ScheduleRun, simulate_schedule
from ringsim.traces.events import Ints
from ringsim.traces.steps import StageActions, count_steps, find_step, in_step
from ringsim.traces.units import time_text
from ringsim.traces.value import Trace, check_trace

__all__ = ["predict", "scale"]


@overload
def predict(
    worker_or_schedule: Schedule | str,
    *,
    world_size: int,
    from_trace: Trace,
    args: Sequence[Any] = (),
    kwargs: None = None,
) -> ScheduleRun: ...


@overload
def predict(
    worker_or_schedule: Callable[..., Any], *, world_size: int, from_trace: Trace | Calibration,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Trace: ...  # fmt: skip


def predict(
    worker_or_schedule: Callable[..., Any] | Schedule | str,
    *,
    world_size: int,
    from_trace: Trace | Calibration,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Trace | ScheduleRun:
    """Predicts a program on more ranks, or another program.

    From a trace of real ranks on the same machine. The trace is calibrated (see
    ``ringsim.calibrate``), and the program runs on the virtual clock: messages, posting,
    ``ringsim.compute`` and the stages of a pipeline take what they took in the trace, inner stages
    of more ranks the mean of the inner ones. The ranks share the machine's cores. Whatever else the
    worker computes takes no time. It is run three times: as predicted, and with all constants as
    much shorter and longer as parts of the trace differ, so that the prediction can say between
    which times it may be.

    Args:
        worker_or_schedule: a function, as for ``ringsim.trace``; or the schedule of a pipeline's
            step, which is timed without ranks: any schedule, or a name, with as many microbatches
            as the trace has.
        world_size: number of ranks to predict; with a schedule 2 or more.
        from_trace: what was measured, on two ranks or more; for a schedule, with a step of a
            pipeline. For a worker also what ``ringsim.calibrate`` found in several traces.
        args: positional arguments of the worker.
        kwargs: keyword arguments of the worker.

    Returns:
        For a worker a trace, as from ``ringsim.simulate``, with ``metadata["range_s"]``: from when
        to when the run may end; for a schedule its times, as from ``ringsim.simulate_schedule``.
        What makes the constants doubtful, such as a busy machine, stands in the repr and, briefly,
        under the pictures.

    Raises:
        ArgumentError: the trace does not tell what the program costs, or an argument breaks its
            rule.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe, rehearse
        >>> step = {
        ...     "args": (gpipe(2, 8), Costs(forward=0.001, backward=0.002)),
        ...     "kwargs": {"size_bytes": 1024, "ahead": 0},
        ... }
        >>> recorded = ringsim.trace(rehearse, world_size=2, **step)
        >>> again = predict(rehearse, world_size=2, from_trace=recorded, **step)
        >>> (
        ...     again.makespan_s > 9 * 0.003,
        ...     predict("1f1b", world_size=100, from_trace=recorded).num_ranks,
        ... )
        (True, 100)
    """
    if not callable(worker_or_schedule):
        if args or kwargs:
            raise ArgumentError(
                "args and kwargs must be left out with a schedule, got some: a worker takes "
                "them. Give a worker."
            )
        if isinstance(from_trace, Calibration):
            raise ArgumentError(
                "from_trace must be a trace with a step of a pipeline for a schedule, got "
                "constants. Give the trace."
            )
        return _predict_schedule(worker_or_schedule, from_trace, world_size)
    constants, semantics = _find_constants(from_trace, world_size)
    shares = constants.cores > 0 and semantics == "rendezvous"
    found = []
    for seed, factor in enumerate(_factors(constants)):
        table = constants.scaled(factor)
        network: dict[str, Any] = {"topology": table.topology} if shares else {"link": table.link}
        # it has printed once
        with contextlib.redirect_stdout(io.StringIO()) if seed else contextlib.nullcontext():
            found.append(
                simulate(
                    worker_or_schedule, world_size=world_size, args=args, kwargs=kwargs,
                    compute=table, semantics=semantics, seed=seed,
                    **network,
                )
            )  # fmt: skip
    return replace(
        found[0], metadata=_with_range(found[0].metadata, [each.makespan_s for each in found])
    )


def _find_constants(source: Trace | Calibration, world_size: int) -> tuple[Calibration, str]:
    """Returns the constants of a prediction, and the semantics of messages.

    With times for as many stages as it needs.
    """
    if isinstance(source, Calibration):
        return source, "rendezvous"
    constants = calibrate(source)
    if constants.costs is not None:
        recorded = find_step(source)
        stages = recorded.num_stages * world_size // len(recorded.ranks)
        if stages != recorded.num_stages:
            constants = replace(constants, costs=_spread_costs(constants.costs, stages))
    return constants, "grouped" if source.metadata.get("backend") == "nccl" else "rendezvous"


def _with_range(metadata: Mapping[str, Any], times_s: Sequence[float]) -> dict[str, Any]:
    """Returns the metadata of a prediction, with the times between which it may be."""
    low_s, high_s = min(times_s), max(times_s)
    note = (
        f"by how far parts of the calibration differ, it takes {time_text(low_s * 1e9)} to "
        f"{time_text(high_s * 1e9)}"
    )
    return {**metadata, "range_s": [low_s, high_s], "notes": [*metadata.get("notes", ()), note]}


def scale(trace: Trace, *, world_size: int, num_microbatches: int | None = None) -> ScheduleRun:
    """Predicts the step of a pipeline on more ranks than were recorded.

    With the same schedule and stages like those recorded. The first and the last stage keep their
    times; inner stages take the mean of the inner ones, or of both if there are two. Messages keep
    their size. The machine is assumed to be as fast with more ranks, which is wrong for more ranks
    than cores.

    Args:
        trace: of ranks that ran ``train_step_pipeline`` or ``rehearse``, two or more, with one of
            the known schedules.
        world_size: number of ranks to predict, 2 or more.
        num_microbatches: how many microbatches; None for as many as were recorded.

    Returns:
        The predicted step: its makespan in seconds, bubble, critical path, and with ``trace()`` a
        trace to be drawn.

    Raises:
        ArgumentError: the trace has no step of a known schedule, or too few messages to tell what
            they cost.
        ScheduleError: there is no such schedule for so many ranks and microbatches.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe, rehearse
        >>> recorded = ringsim.trace(
        ...     rehearse,
        ...     world_size=2,
        ...     args=(gpipe(2, 8), Costs(forward=0.001, backward=0.002)),
        ...     kwargs={"size_bytes": 1024, "ahead": 0},
        ... )
        >>> run = scale(recorded, world_size=100)
        >>> run.num_ranks, run.num_microbatches, run.makespan > 107 * 0.003
        (100, 8, True)
    """
    _check_step(trace, world_size)
    if num_microbatches is not None:
        check_integer(
            "num_microbatches",
            num_microbatches,
            1,
            "Say how many to predict, or leave it out for as many as were recorded.",
        )
    known = find_step(trace).find_known()
    if known is None or known.num_ranks < 2:
        raise ArgumentError(
            "trace must have a step of a known schedule on 2 ranks or more, got "
            f"{find_step(trace).schedule!r} on {trace.world_size}. "
            "Record one that make_schedule knows."
        )
    return _time_step(
        trace,
        known.name,
        world_size * (known.num_chunks or 1),
        num_ranks=world_size,
        num_microbatches=num_microbatches or known.num_microbatches,
        num_chunks=known.num_chunks,
    )


def _check_step(trace: Trace, world_size: int) -> None:
    check_trace("trace", trace)
    if not is_integer(world_size) or world_size < 2:
        raise ArgumentError(
            f"world_size must be an integer from 2, got {say(world_size)}. "
            "Say how many ranks to predict."
        )
    if count_steps(trace.events) == 0:
        raise ArgumentError(
            "trace must have a step of a pipeline, got one without. Record ranks that call "
            "train_step_pipeline or rehearse."
        )


def _predict_schedule(schedule: Schedule | str, trace: Trace, world_size: int) -> ScheduleRun:
    """Predicts a step of any schedule."""
    _check_step(trace, world_size)
    recorded = find_step(trace)
    if isinstance(schedule, str):
        made = make_schedule(schedule, world_size, recorded.num_microbatches)
    elif isinstance(schedule, Schedule):
        made = schedule
    else:
        raise ArgumentError(
            "worker_or_schedule must be a function, a Schedule or its name, got "
            f"{say(schedule)}. Give one of these."
        )
    if made.num_ranks != world_size:
        raise ArgumentError(
            f"world_size must be the schedule's number of ranks, {made.num_ranks}, got "
            f"{world_size}. Make them the same."
        )
    if any(action.kind == "W" for action in made.actions[0]) and not (recorded.kind == "W").any():
        raise ArgumentError(
            f"trace must have a step whose backward is split, as that of {made.name} is, got "
            f"{recorded.schedule!r}. Record such a step."
        )
    if made is schedule:
        return _time_step(trace, made, made.num_stages)
    counts = {"num_ranks": world_size, "num_microbatches": made.num_microbatches}
    return _time_step(trace, schedule, made.num_stages, **counts)


def _time_step(trace: Trace, schedule: Schedule | str, stages: int, **counts: Any) -> ScheduleRun:
    """Times a schedule of so many stages with what a trace tells; ``counts`` go with a name."""
    calibration = calibrate(trace)
    sends = trace.messages.send
    of_step = sends[in_step(trace.events, 0)[sends]]
    size_bytes = int(trace.events.size_bytes[of_step].max())  # headers are smaller
    between_s = _find_time_between(trace)

    def run(factor: float) -> ScheduleRun:
        """Times the step with messages.

        What lies between computations takes so many times as long.
        """
        table = calibration.scaled(factor)
        # The time to post a send is part of what follows its computation and of what its message
        # takes: it counts once.
        latency_s = max(table.link.time_s(size_bytes) - table.post_s(True, size_bytes), 0.0)
        busy_s = min(table.link.beta_s_per_byte * size_bytes, latency_s)
        assert calibration.costs is not None  # there is a step
        return simulate_schedule(
            schedule,
            _spread_costs(calibration.costs, stages, between_s * factor),
            link=Link(latency_s - busy_s, busy_s / size_bytes if size_bytes else 0.0),
            size_bytes=size_bytes,
            **counts,
        )

    found, *others = [run(factor) for factor in _factors(calibration)]
    doubtful = {**found.setting.metadata, "notes": note_doubts(calibration.notes)}
    metadata = _with_range(doubtful, [float(each.makespan) for each in (found, *others)])
    return replace(found, setting=replace(found.setting, metadata=metadata))


def _factors(calibration: Calibration) -> tuple[float, float, float]:
    """Returns the factors by which constants may be longer.

    As found, and by how far parts of the calibration differ.
    """
    return 1.0, 1.0 - min(calibration.spread, 1.0), 1.0 + calibration.spread


def _spread_costs(found: Costs, stages: int, apart: float = 0.0) -> Costs:
    """Returns the costs of many stages from those of a few.

    Each with the time between two computations.
    """
    kinds: dict[str, Any] = {}
    for name in ("forward", "input", "weight", "backward"):
        times = getattr(found, name)
        kinds[name] = None if times is None else _spread(times, stages, apart)
    return Costs(**kinds)


def _spread(times: Any, stages: int, apart: float) -> tuple[float, ...]:
    """Returns the times of many stages from those of a few.

    0 stays, for kinds that the schedule does not have.
    """
    if not any(times):
        return (0.0,) * stages
    between = times[1:-1] or times
    middle = sum(between) / len(between)
    return tuple(time + apart for time in (times[0], *[middle] * (stages - 2), times[-1])[:stages])


def _find_time_between(trace: Trace) -> float:
    """Returns the median time between two computations in which a rank was not blocked.

    Posting and the program itself; in seconds.
    """
    found: list[Ints] = []
    for step in range(count_steps(trace.events)):
        found += _list_between(trace, find_step(trace, step))
    return float(np.median(np.concatenate(found))) * 1e-9 if found else 0.0


def _list_between(trace: Trace, actions: StageActions) -> list[Ints]:
    """Returns, for each rank of a step, the unblocked times between its computations, in ns."""
    activity = Activity(trace.events, trace.world_size)
    found = []
    for rank in actions.ranks:
        own = actions.of(rank)
        begin, end = own.end[:-1], own.start[1:]
        found.append(end - begin - activity.blocked_between(rank, begin, end))
    return found
