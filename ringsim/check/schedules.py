"""The checks for the lessons on schedules and prediction: 1F1B, smaller bubbles, microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    find_wrong,
    make_task,
    shown,
)
from ringsim.errors import ScheduleError
from ringsim.schedules.closed_forms import Step, makespan, peak_live
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate, validate
from ringsim.schedules.schedule import Schedule, parse_action
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.units import count

Size = tuple[int, int]  # ranks and microbatches
MOST_RANKS = 4  # in pictures
_LISTS_HINT = (
    'Return the actions of one rank as a list of strings, such as ["0F0", "0B0"]: stage, kind, '
    "microbatch. The stage is the rank."
)
_RULE_HINT = (
    "Write down the order for 3 ranks and 4 microbatches by hand, and compare it with the result "
    "of your function. ringsim.pipeline.validate reports the same mistake."
)
_MEMORY_HINT = (
    "A forward adds an activation, and a backward frees one. Rank s may begin with min(p - s - 1, "
    "m) forwards; after that, do a backward immediately after each forward."
)
_TIME_HINT = (
    "A rank waits although it could compute. Begin on rank s with min(p - s - 1, m) forwards, so "
    "that its first backward finds its gradient ready. Then alternate between one forward and one "
    "backward, and end with the remaining backwards."
)
_FAST_HINT = (
    "The last rank must not spend time on W while others wait for its I. Have rank s run the W of "
    "a microbatch s turns after its I. Then every rank holds at most p activations, and the "
    "remaining W actions fill the gap at the end."
)
_MOST = 2**53  # microbatches that a float can count
_ROUNDING = 1e-9  # the rounding error of a bubble that is computed in a different way
_NUMBER_HINT = "Return one positive integer."
_LOSS_HINT = (
    "A formula without messages gives too few microbatches: in 1F1B, messages cost time for each "
    "microbatch. Ask the simulator: "
    'ringsim.simulate_schedule("1f1b", costs, num_ranks=..., num_microbatches=..., '
    'semantics="buffered").bubble'
)
_MORE_HINT = (
    "Begin with 1 microbatch, and add one at a time until the simulated bubble is small enough."
)


def schedule(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that generates a 1F1B schedule.

    ``function(rank, num_ranks, num_microbatches)`` returns the actions of one rank, in order, as a
    list of strings: ``"2F0"`` is the forward of microbatch 0 on stage 2, and ``B`` is a backward.
    Stage r is on rank r. The schedule must be complete and free of deadlocks, hold at most min(p -
    s, m) live activations on rank s, and take no longer than the formula predicts, even with fewer
    microbatches than ranks. Finally, the check trains a small model with the schedule on real
    ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and data, or None for a random seed.

    Returns:
        The verdict; its trace shows the training step.

    Example:
        >>> def all_forwards_first(rank, num_ranks, num_microbatches):
        ...     return [f"{rank}{kind}{i}" for kind in "FB" for i in range(num_microbatches)]
        >>> print(schedule(all_forwards_first, seed=1).reason)
        With 2 ranks and 4 microbatches, rank 0 holds 4 live activations, but may hold only 2.
    """
    return examine("schedule", function, _judge_1f1b, seed)


def fast_schedule(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that writes a schedule with a smaller bubble than 1F1B's.

    ``function(rank, num_ranks, num_microbatches)`` is the same as for `schedule`; ``I`` and ``W``
    are the halves of a backward. If a forward, an ``I`` and a ``W`` take one unit each, the step
    must take at most 3 m + p - 1 units (1F1B takes 3 (m + p - 1)). No rank may hold more than p
    live activations, as many as the first rank holds in 1F1B. The check uses p microbatches and
    more. Finally, it trains a small model with the schedule on real ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and data, or None for a random seed.

    Returns:
        The verdict; its trace shows the training step.

    Example:
        >>> from ringsim.pipeline import zb_h1
        >>> print(fast_schedule(lambda rank, p, m: zb_h1(p, m).actions[rank], seed=1).reason)
        Your answer calls ringsim's zb_h1, but must do this work itself.
    """
    return examine("fast_schedule", function, _judge_fast, seed)


def _judge_1f1b(examination: Examination) -> str:
    draw = examination.random
    sizes = [(2, 4), (4, 8), (1, 3), (3, 5), (4, 2), (3, 1)]
    sizes += [(draw.randrange(5, 12), draw.randrange(5, 30)), (8, draw.randrange(1, 8))]
    schedules = _ask(examination, sizes)
    for each in schedules:
        for action in chain(*each.actions):
            if action.kind in "IW":
                reason = f"1F1B runs each backward as a whole, but your schedule contains {action}."
                raise Wrong(reason, "Write B for a whole backward.")
        step = Step("1f1b", each.num_ranks, each.num_microbatches)
        _judge_memory(each, peak_live(step))
        for costs in (Costs(), Costs(forward=draw.randrange(1, 9), backward=draw.randrange(1, 9))):
            _judge_time(each, costs, makespan(step, costs), _TIME_HINT)
    _train(examination, schedules[3])
    return (
        f"Right for {len(sizes)} pipelines: the schedule is complete, holds at most min(p - s, m) "
        "live activations, takes no longer than the formula predicts, and trains a model."
    )


def _judge_fast(examination: Examination) -> str:
    draw = examination.random
    few = draw.randrange(5, 9)
    sizes = [(2, 4), (4, 8), (3, 5), (3, 3), (1, 2), (few, draw.randrange(few, 30))]
    schedules = _ask(examination, sizes)
    for each in schedules:
        step = Step("zb_h1", each.num_ranks, each.num_microbatches)
        _judge_memory(each, (each.num_ranks,) * each.num_ranks)
        _judge_time(each, Costs(), makespan(step), _FAST_HINT)
    _train(examination, schedules[2])
    return (
        f"Right for {len(sizes)} pipelines: the schedule is fast enough, holds at most p live "
        "activations, and trains a model."
    )


def _ask(examination: Examination, sizes: Sequence[Size]) -> list[Schedule]:
    """Returns an answer's schedules, each of which is complete and free of deadlocks."""
    cases = [(rank, *size) for size in sizes for rank in range(size[0])]
    answers = examination.ask(cases, _read_row)
    return [_read(size, [row for _, row in islice(answers, size[0])]) for size in sizes]


def _read_row(row: Any) -> list[str]:
    return [str(action) for action in (row.split() if isinstance(row, str) else row)]


def _read(size: Size, rows: list[list[str] | str]) -> Schedule:
    """Returns an answer as a valid schedule."""
    num_ranks, num_microbatches = size
    about = _about(*size)
    if strange := [row for row in rows if isinstance(row, str)]:
        reason = f"{about}, your answer must be a list of actions, got {strange[0]}."
        raise Wrong(reason, _LISTS_HINT)
    try:
        actions = tuple(tuple(map(parse_action, row)) for row in rows)
        found = Schedule("your schedule", num_microbatches, tuple(range(num_ranks)), actions)
        validate(found)
    except ScheduleError as error:
        raise Wrong(f"{about}: {' '.join(str(error).split())}", _RULE_HINT) from None
    if found.lowered:
        raise Wrong(
            f"{about}, your answer must not contain sends or receives: ringsim adds them "
            "automatically.",
            _LISTS_HINT,
        )
    return found


def _about(num_ranks: int, num_microbatches: int) -> str:
    return f"With {count(num_ranks, 'rank')} and {count(num_microbatches, 'microbatch')}"


def _too_much(schedule: Schedule, costs: Costs, reason: str, hint: str) -> Wrong:
    """Returns the error for a schedule that is complete but not good enough.

    The error shows the evaluated step, if the picture is small enough to read.
    """
    size = schedule.num_ranks
    picture = simulate_schedule(schedule, costs).trace() if size <= MOST_RANKS else None
    about = _about(size, schedule.num_microbatches)
    return Wrong(f"{about}, {reason}.", hint, world_size=size, trace=picture)


def _judge_memory(schedule: Schedule, allowed: Sequence[int]) -> None:
    for rank, (live, most) in enumerate(zip(evaluate(schedule).peak_live, allowed, strict=True)):
        if live > most:
            held = count(live, "live activation")
            reason = f"rank {rank} holds {held}, but may hold only {most}"
            raise _too_much(schedule, Costs(), reason, _MEMORY_HINT)


def _judge_time(schedule: Schedule, costs: Costs, most: Any, hint: str) -> None:
    took = evaluate(schedule, costs).makespan
    if took > most:
        reason = f"the step takes {took} units, but must take at most {most}"
        if costs != Costs():
            reason += f" if F takes {costs.forward} and B takes {costs.backward}"
        raise _too_much(schedule, costs, reason, hint)


def _train(examination: Examination, schedule: Schedule) -> None:
    """Runs a training step on real ranks and compares its gradients with a single process's."""
    size = schedule.num_ranks
    trace = examination.run(_step_on_rank, size, schedule, examination.random.randrange(10**9))
    for rank, row in enumerate(trace.results):
        if row is not None:
            about = _about(size, schedule.num_microbatches)
            reason = (
                f"{about}, stage {rank} and a single process have different gradients for "
                f"{row.parameter}."
            )
            raise Wrong(reason, _RULE_HINT)


def _step_on_rank(_: Answer, schedule: Schedule, secret: int) -> Any:
    from ringsim.pipeline.partition import partition_model
    from ringsim.pipeline.stage import build_stages
    from ringsim.pipeline.training import train_step_pipeline
    from ringsim.ring import current_ring

    task = make_task(secret, schedule.num_microbatches)
    train_step_pipeline(*task, schedule=schedule)
    stages = build_stages(task.model, partition_model(task.model, schedule.num_stages))
    mine = stages[current_ring().rank].parameters()
    return find_wrong(task, dict(task.model.named_parameters()), mine)


def fewest_microbatches(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that chooses the number of microbatches for a 1F1B step.

    ``function(num_ranks, costs, limit)`` returns the smallest number of microbatches for which the
    bubble is at most the fraction ``limit`` of the step. ``costs`` is a ``Costs`` that holds the
    times of a forward, a backward and a message; messages leave as soon as they are sent. Such a
    number always exists. The check calls the function on a separate rank, so that it can stop an
    endless search.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and times, or None for a random seed.

    Returns:
        The verdict.

    Example:
        >>> import math
        >>> def without_messages(num_ranks, costs, limit):
        ...     return max(1, math.ceil((num_ranks - 1) * (1 - limit) / limit))
        >>> print(fewest_microbatches(without_messages, seed=1).reason)
        With 4 ranks, a time of 1 for F, 2 for B and 0.5 per message, 9 microbatches have a bubble of 40.0 %, but at most 25 % is allowed.
    """  # noqa: E501
    return examine("fewest_microbatches", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    cases = [(4, Costs(backward=2), 0.11), (1, Costs(backward=2, latency=1), 0.05)]
    for num_ranks, latency in (
        (4, 0.5),
        (2, 1),
        (draw.randrange(3, 9), draw.choice((0.25, 0.75))),
        (8, draw.choice((0.5, 1, 2))),
    ):
        backward = 2 if num_ranks == 4 else draw.randrange(1, 4)
        # per microbatch, independent of the number of microbatches
        lost = 2 * latency * (num_ranks - 1) / num_ranks
        least = lost / (1 + backward + lost)
        limit = math.ceil(100 * (least + 0.05)) / 100
        cases.append((num_ranks, Costs(backward=backward, latency=latency), limit))
    for (num_ranks, costs, limit), answer in examination.ask(cases, _read_number, own=False):
        _judge_number(num_ranks, costs, limit, answer)
    return (
        f"Right for {len(cases)} pipelines of 1 to 8 ranks, with instant and with slower messages."
    )


def _read_number(answer: Any) -> int | str:
    return int(answer) if int(answer) == answer >= 1 and answer < _MOST else shown(answer)


def _judge_number(num_ranks: int, costs: Any, limit: float, answer: int | str) -> None:
    ranks = count(num_ranks, "rank")
    about = (
        f"With {ranks}, a time of 1 for F, {costs.backward} for B and {costs.latency:g} per message"
    )

    def find_bubble(num_microbatches: int) -> float:
        """Returns the fraction of the step that a rank spends idle, from the closed form."""
        took = makespan(Step("1f1b", num_ranks, num_microbatches), costs)
        return float(1 - num_microbatches * (1 + costs.backward) / took)

    if isinstance(answer, str):
        raise Wrong(
            f"{about}, your answer must be a number of microbatches, got {answer}.", _NUMBER_HINT
        )
    bubble = find_bubble(answer)
    if bubble > limit + _ROUNDING:
        have = "have" if answer > 1 else "has"
        reason = (
            f"{about}, {count(answer, 'microbatch')} {have} a bubble of {100 * bubble:.1f} %, but "
            f"at most {100 * limit:.0f} % is allowed."
        )
        raise Wrong(reason, _LOSS_HINT)
    enough = next(
        number for number in range(1, answer + 1) if find_bubble(number) <= limit + _ROUNDING
    )
    if enough < answer and find_bubble(enough) <= limit - _ROUNDING:
        raise Wrong(
            f"{about}, {count(answer, 'microbatch')} are more than needed: {enough} would suffice.",
            _MORE_HINT,
        )
