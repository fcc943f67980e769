"""Implements ``ringsim.predict`` and ``ringsim.scale``, which predict many ranks from a few.

Predictions use the measurements from a trace of a few ranks as follows::

    stage 0            its own times        -> stage 0
    inner stages       their mean           -> every inner stage; with two stages, the mean of both
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
from ringsim.errors import ArgumentError, check_integer, say
from ringsim.link import Link
from ringsim.prediction.calibration import Calibration, calibrate
from ringsim.provenance import note_doubts
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.schedule import Schedule
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import ScheduleRun, simulate_schedule
from ringsim.traces.steps import count_steps, find_step, in_step, list_steps
from ringsim.traces.units import time_text
from ringsim.traces.value import Trace, check_trace


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
    """Predicts a program on more ranks, or a different program on the same machine.

    The prediction measures constants from a trace of real ranks on the machine (see
    ``ringsim.calibrate``) and runs the program on the virtual clock. Messages, posting,
    ``ringsim.compute`` and pipeline stages take as long as in the trace. Additional inner stages
    take the mean time of the recorded inner stages. The ranks share the machine's cores. All other
    computing in the worker takes no time. The program runs three times: once with the measured
    constants, once with shorter constants and once with longer ones. The constants are shortened
    and lengthened by the spread between parts of the trace. The results form the prediction's
    range.

    Args:
        worker_or_schedule: a function, as for ``ringsim.trace``, or a schedule, whose step is timed
            without ranks. A schedule can also be given by name; it then has as many microbatches as
            the trace.
        world_size: the number of ranks to predict; for a schedule, at least 2.
        from_trace: a trace of at least two ranks. For a schedule, the trace must contain a pipeline
            step. For a worker, you can also pass the result of ``ringsim.calibrate``, which may use
            several traces.
        args: the worker's positional arguments.
        kwargs: the worker's keyword arguments.

    Returns:
        For a worker, a trace like the one from ``ringsim.simulate``, with the range of its makespan
        in ``metadata["range_s"]``. For a schedule, its times, as from
        ``ringsim.simulate_schedule``. Reasons to doubt the constants, such as a busy machine,
        appear in the repr and, in short form, under the plots.

    Raises:
        ArgumentError: the trace does not show the program's costs, or an argument is invalid.

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
                "args and kwargs must be omitted with a schedule, because only a worker takes "
                "arguments. Remove them, or pass a worker."
            )
        if isinstance(from_trace, Calibration):
            raise ArgumentError(
                "from_trace must be a trace if a schedule is given, got a calibration. Pass a "
                "trace that contains a pipeline step."
            )
        return _predict_schedule(worker_or_schedule, from_trace, world_size)
    constants, semantics = _find_constants(from_trace, world_size)
    shares = constants.cores > 0 and semantics == "rendezvous"
    found = []
    for seed, factor in enumerate(_factors(constants)):
        table = constants.scaled(factor)
        network: dict[str, Any] = {"topology": table.topology} if shares else {"link": table.link}
        # only the first run prints
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
    """Returns the constants for a prediction, and the semantics of its messages.

    The constants include times for as many stages as the prediction needs.
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
    """Adds the range of the predicted makespan to a prediction's metadata."""
    low_s, high_s = min(times_s), max(times_s)
    note = (
        f"between {time_text(low_s * 1e9)} and {time_text(high_s * 1e9)}, judging by the spread "
        "between parts of the calibration"
    )
    return {**metadata, "range_s": [low_s, high_s], "notes": [*metadata.get("notes", ()), note]}


def scale(trace: Trace, *, world_size: int, num_microbatches: int | None = None) -> ScheduleRun:
    """Predicts a pipeline step on more ranks than the trace contains.

    The schedule stays the same, and the stages resemble the recorded ones. The first and the last
    stage keep their times. Inner stages take the mean time of the recorded inner stages, or of both
    stages if there are only two. Messages keep their size. The prediction assumes that the machine
    is equally fast with more ranks, which is wrong if there are more ranks than cores.

    Args:
        trace: a trace of at least two ranks that ran ``train_step_pipeline`` or ``rehearse`` with
            one of the known schedules.
        world_size: the number of ranks to predict, at least 2.
        num_microbatches: the number of microbatches, or None for the recorded number.

    Returns:
        The predicted step, with its makespan in seconds, bubble and critical path. Its method
        ``trace()`` returns a trace that you can plot.

    Raises:
        ArgumentError: the trace contains no step of a known schedule, or too few messages to
            measure their cost.
        ScheduleError: the schedule does not exist for this number of ranks and microbatches.

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
            "Pass the number of microbatches, or omit it to use the recorded number.",
        )
    known = find_step(trace).find_known()
    if known is None or known.num_ranks < 2:
        raise ArgumentError(
            "trace must contain a step of a known schedule on at least 2 ranks, got schedule "
            f"{find_step(trace).schedule!r} with world_size={trace.world_size}. "
            "Record a schedule from make_schedule."
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
    check_integer("world_size", world_size, 2, "Pass the number of ranks to predict.")
    if count_steps(trace.events) == 0:
        raise ArgumentError(
            "the trace contains no pipeline step. Record ranks that call "
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
            "worker_or_schedule must be a function, a Schedule or the name of a schedule, got "
            f"{say(schedule)}."
        )
    if made.num_ranks != world_size:
        raise ArgumentError(
            f"world_size must be the schedule's number of ranks, {made.num_ranks}, got "
            f"{world_size}. Use the same number for both."
        )
    if any(action.kind == "W" for action in made.actions[0]) and not (recorded.kind == "W").any():
        raise ArgumentError(
            f"trace must contain a step with a split backward to predict {made.name}, got a step "
            f"of {recorded.schedule!r}. Record a step with a split backward."
        )
    if made is schedule:
        return _time_step(trace, made, made.num_stages)
    counts = {"num_ranks": world_size, "num_microbatches": made.num_microbatches}
    return _time_step(trace, schedule, made.num_stages, **counts)


def _time_step(trace: Trace, schedule: Schedule | str, stages: int, **counts: Any) -> ScheduleRun:
    """Times a schedule with a trace's costs. ``counts`` complete a schedule given by name."""
    calibration = calibrate(trace)
    sends = trace.messages.send
    of_step = sends[in_step(trace.events, 0)[sends]]
    size_bytes = int(trace.events.size_bytes[of_step].max())  # headers are smaller
    between_s = _find_time_between(trace)

    def run(factor: float) -> ScheduleRun:
        """Times the step with messages.

        The time between computations is multiplied by ``factor``.
        """
        table = calibration.scaled(factor)
        # The time to post a send is part of both the time after its computation and the time of its
        # message, but must count only once.
        latency_s = max(table.link.time_s(size_bytes) - table.post_s(True, size_bytes), 0.0)
        busy_s = min(table.link.beta_s_per_byte * size_bytes, latency_s)
        assert calibration.costs is not None  # the trace contains a step
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
    """Returns the factors by which the true constants may differ from the measured ones.

    The factors are 1, and the factors that shorten and lengthen the constants by the calibration's
    spread.
    """
    return 1.0, 1.0 - min(calibration.spread, 1.0), 1.0 + calibration.spread


def _spread_costs(found: Costs, stages: int, apart: float = 0.0) -> Costs:
    """Derives the costs of many stages from those of a few stages.

    Each cost includes ``apart``, the time between two computations.
    """
    names = "forward", "input", "weight", "backward"
    return Costs(*(_spread(getattr(found, name), stages, apart) for name in names))


def _spread(times: Any, stages: int, apart: float) -> Any:
    """Derives the times of many stages from those of a few stages. None stays None.

    Kinds of computations that the schedule does not contain still cost 0.
    """
    if times is None:
        return None
    if not any(times):
        return (0.0,) * stages
    between = times[1:-1] or times
    middle = sum(between) / len(between)
    return tuple(time + apart for time in (times[0], *[middle] * (stages - 2), times[-1])[:stages])


def _find_time_between(trace: Trace) -> float:
    """Returns the median unblocked time between two computations on a rank, in seconds.

    This time consists of posting, and of the program itself.
    """
    activity, found = Activity(trace.events, trace.world_size), []
    for actions in list_steps(trace):
        for rank in actions.ranks:
            own = actions.of(rank)
            begin, end = own.end[:-1], own.start[1:]
            found.append(end - begin - activity.blocked_between(rank, begin, end))
    return float(np.median(np.concatenate(found))) * 1e-9
