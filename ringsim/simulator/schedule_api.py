"""``ringsim.simulate_schedule``: what a step of a pipeline takes, from its schedule and what things cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final, overload

import numpy as np

from ringsim.errors import ArgumentError, Deadlock, ScheduleError, is_list, is_one_of, say
from ringsim.link import Link
from ringsim.pipeline import closed_forms
from ringsim.pipeline.actions import Action
from ringsim.pipeline.costs import Costs
from ringsim.pipeline.evaluator import evaluate
from ringsim.pipeline.lowering import check_ahead, lower
from ringsim.pipeline.programs import SEMANTICS, Semantics, Time
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.schedules import make_schedule
from ringsim.pipeline.schedules.arguments import check_size
from ringsim.provenance import __version__
from ringsim.simulator.compiled import sweep_compiled, work_through_compiled
from ringsim.simulator.level_order import find_levels
from ringsim.simulator.linear_operations import Linear
from ringsim.simulator.operations import Operations
from ringsim.simulator.prices import Links, Prices, Sizes, make_prices, spread_sizes
from ringsim.simulator.schedule_operations import read_schedule
from ringsim.simulator.schedule_run import ScheduleRun, Setting
from ringsim.simulator.wavefront import sweep
from ringsim.simulator.what_if import WhatIfs, time_variants
from ringsim.simulator.worklist import work_through
from ringsim.traces.events import Ints

__all__ = ["simulate_schedule"]

_LINEAR: Final = {"gpipe": "gpipe", "afab": "gpipe", "1f1b": "1f1b"}
_FEW_RANKS: Final = 12  # up to here plain Python is quicker than arrays of so few


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Costs | None = None, *, num_ranks: int | None = None, num_microbatches: int | None = None,
    num_chunks: int | None = None, link: Links | None = None, size_bytes: Sizes = 0, semantics: Semantics = "rendezvous", ahead: int = 1,
    compiled: bool = False,
) -> ScheduleRun: ...  # fmt: skip


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Sequence[Costs], *, num_ranks: int | None = None, num_microbatches: int | None = None,
    num_chunks: int | None = None, link: Links | Sequence[Links] | None = None, size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous", ahead: int = 1, compiled: bool = False,
) -> WhatIfs: ...  # fmt: skip


def simulate_schedule(
    schedule: str | Schedule,
    costs: Costs | Sequence[Costs] | None = None,
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    link: Links | Sequence[Links] | None = None,
    size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous",
    ahead: int = 1,
    compiled: bool = False,
) -> ScheduleRun | WhatIfs:
    """Simulates one training step of a pipeline on a virtual clock; no rank is started.

    Every rank does its list in order and waits for what it needs, as the ranks of ``train_step_pipeline`` do. A message starts when it is
    made, its link is free, and with ``rendezvous`` its receive is posted; it keeps the link for ``size_bytes * beta_s_per_byte``, and
    arrives ``alpha_s`` later.

    Args:
        schedule: a name, as for ``make_schedule``, or any schedule, also one of one's own. GPipe and 1F1B by name are not written out as
            actions, so they work for thousands of ranks and microbatches.
        costs: of the computations; None: forward, input and weight 1 each. A list of K: all K at once.
        num_ranks: with a name: how many ranks.
        num_microbatches: with a name: how many microbatches.
        num_chunks: with a name: how many stages a rank, as for ``make_schedule``.
        link: what a message costs, in seconds, as the computations then are: one for all, or by (from rank, to rank); with K costs also
            a list of K. None: ``costs.latency``, and links are never busy.
        size_bytes: of an activation and of its gradient, where a link is given: one for all, or one for each boundary between stages.
        semantics: ``rendezvous``: a message starts when its send and its receive are posted (Gloo); ``buffered``: when its send is (eager).
        ahead: how many computations before its use a receive is posted; 0: when the rank has nothing else to do. A lowered schedule says
            that itself.
        compiled: whether to run machine code, which numba makes on the first use in a process, in about a second: for large steps that are
            simulated many times. ``pip install 'ringsim[fast]'`` brings it; Fractions do without.

    Returns:
        The times, the critical path and what follows from them; for K costs the K makespans. Exact where a cost is a Fraction.

    Raises:
        ScheduleError: there is no schedule of that name, or the schedule breaks a rule.
        Deadlock: its ranks would wait for each other; ``diagnosis`` is the circle.
        ArgumentError: a count, cost, link, size or semantics breaks its rule, or numba is asked for and not there.

    Example:
        >>> from ringsim.link import Link
        >>> from ringsim.pipeline.costs import Costs
        >>> simulate_schedule("1f1b", Costs(latency=1), num_ranks=4, num_microbatches=8, semantics="buffered")
        1f1b, 4 ranks, 8 microbatches: 49 (closed form 49), bubble 51.0 %
        >>> link = Link(alpha_s=10e-6, beta_s_per_byte=1e-9)
        >>> run = simulate_schedule("gpipe", Costs(1e-3, 1e-3, 1e-3), num_ranks=4, num_microbatches=8, link=link, size_bytes=10**6)
        >>> round(run.makespan, 6), run.critical_path.by_reason
        (0.03909, {'start': 1, 'program order': 9, 'data': 15, 'receiver late': 3})
        >>> simulate_schedule("1f1b", [Costs(forward=time) for time in (1, 2, 3)], num_ranks=1000, num_microbatches=10).makespan.tolist()
        [3027.0, 4036.0, 5045.0]

    Source:
        F. Baccelli et al., Synchronization and Linearity, 1992: the longest path as a recurrence of maxima and sums.
    """
    if not is_one_of(semantics, SEMANTICS):
        raise ArgumentError(f"semantics must be one of {', '.join(SEMANTICS)}, got {say(semantics)}. Take one of these.")
    if type(compiled) is not bool:
        raise ArgumentError(f"compiled must be True or False, got {say(compiled)}. Say whether to run machine code.")
    check_ahead(ahead)
    source = _find_source(schedule, num_ranks, num_microbatches, num_chunks, ahead)
    stage_ranks = tuple(range(source.num_ranks)) if isinstance(source, Linear) else source.stage_ranks
    rendezvous = semantics == "rendezvous"
    if isinstance(source, Linear):
        ahead = min(ahead, 2 * source.num_microbatches)  # as many computations has a rank: sooner than at once is at once
    if costs is not None and not isinstance(costs, Costs):
        if not is_list(costs) or not all(type(each) is Costs for each in costs):
            raise ArgumentError(f"costs must be Costs, or a list of them, got {say(costs)}. Pass Costs(forward=1, backward=2).")
        links: list[Any] = list(link) if isinstance(link, Sequence) and is_list(link) else [link] * len(costs)
        if len(links) != len(costs) or not links:
            raise ArgumentError(
                f"costs and link must be as many, 1 or more, got {len(costs)} and {len(links)}. Give one link, or one each."
            )
        variants = [make_prices(stage_ranks, *each, size_bytes) for each in zip(costs, links, strict=True)]
        levels = source if isinstance(source, Linear) else find_levels(source)
        if levels is None:
            raise _deadlock(schedule, semantics, ahead)
        makespan = time_variants(levels, variants, rendezvous=rendezvous, ahead=ahead, compiled=compiled)
        return WhatIfs(source.name, makespan, np.stack([_busy(source, prices).astype(np.float64) for prices in variants]))
    if isinstance(link, Sequence) and is_list(link):
        raise ArgumentError(f"link must be one where costs are one, got {len(link)} links. Give as many costs, in a list.")
    costs = costs or Costs()
    one: Any = link  # a Link or a table of them: make_prices refuses what is neither
    prices = make_prices(stage_ranks, costs, one, size_bytes)
    makespan_s = _find_makespan(source, prices, rendezvous=rendezvous, ahead=ahead, compiled=compiled)
    if makespan_s is None:
        raise _deadlock(schedule, semantics, ahead)
    sizes = spread_sizes(size_bytes, len(stage_ranks), has_link=True) if link is not None else None
    metadata = _metadata(source, costs, one, sizes, semantics, ahead)
    closed_form = None
    if isinstance(schedule, str):
        closed_form = _closed_form(
            closed_forms.Step(schedule, source.num_ranks, source.num_microbatches, num_chunks), costs, one, sizes, semantics, ahead
        )
    return ScheduleRun(
        name=source.name,
        num_ranks=source.num_ranks,
        num_stages=len(stage_ranks),
        num_microbatches=source.num_microbatches,
        makespan=makespan_s,
        busy=_busy(source, prices),
        closed_form=closed_form,
        setting=Setting(source, prices, rendezvous, ahead, compiled and not prices.is_exact, sizes, metadata),
    )


def _find_source(
    schedule: str | Schedule, num_ranks: int | None, num_microbatches: int | None, num_chunks: int | None, ahead: int
) -> Linear | Operations:
    """Returns the schedule as columns, or as the rule that makes them."""
    if isinstance(schedule, Schedule):
        given = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        for name, value in given.items():
            if value is not None:
                raise ArgumentError(
                    f"{name} must be left out, got {say(value)}: the schedule says it. Take it out, or give the schedule's name."
                )
        return read_schedule(schedule, ahead)
    if num_ranks is None or num_microbatches is None:
        missing = "num_ranks" if num_ranks is None else "num_microbatches"
        raise ArgumentError(f"{missing} must be given with a schedule's name, got none ({say(schedule)}). Say how many.")
    if is_one_of(schedule, tuple(_LINEAR)):
        check_size(num_ranks, num_microbatches, closed_forms.Step(schedule, num_ranks, num_microbatches, num_chunks).stages_a_rank)
        return Linear(_LINEAR[schedule], num_ranks, num_microbatches)
    return read_schedule(make_schedule(schedule, num_ranks, num_microbatches, num_chunks), ahead)


def _find_makespan(source: Linear | Operations, prices: Prices, *, rendezvous: bool, ahead: int, compiled: bool) -> Time | None:
    """Returns how long the step takes, the quickest way; None where it never ends."""
    if compiled and not prices.is_exact:
        if isinstance(source, Linear):
            return _last(sweep_compiled(source, prices, rendezvous=rendezvous, ahead=ahead))
        times = work_through_compiled(source, prices, rendezvous=rendezvous)
        return None if times is None else _last(times[0])
    if prices.is_exact or source.num_ranks <= _FEW_RANKS:
        operations = source.to_operations(ahead) if isinstance(source, Linear) else source
        times = work_through(operations, prices, rendezvous=rendezvous)
        return None if times is None else _last(times[0])
    if isinstance(source, Linear):
        return _last(sweep(source, prices, rendezvous=rendezvous, ahead=ahead).last)
    levels = find_levels(source)
    return None if levels is None else _last(levels.time(prices, rendezvous=rendezvous)[0])


def _last(ends: Ints) -> Time:
    last: Any = ends.max() if len(ends) else 0
    return float(last) if isinstance(last, float) else last


def _deadlock(schedule: str | Schedule, semantics: Semantics, ahead: int) -> Deadlock:
    """Returns the error that says who waits for whom; who does, does not depend on the costs."""
    assert isinstance(schedule, Schedule)  # the named ones all end
    try:
        evaluate(lower(schedule, ahead=ahead), semantics=semantics)
    except Deadlock as stuck:
        return stuck
    raise AssertionError("the evaluator came to the end of a schedule that waits for itself")


def _busy(source: Linear | Operations, prices: Prices) -> Ints:
    """Returns how long each rank computes."""
    if isinstance(source, Linear):
        busy: Ints = source.num_microbatches * (prices.duration[0] + prices.duration[1])
        return busy
    busy = np.zeros(source.num_ranks, dtype=prices.duration.dtype)
    np.add.at(busy, source.rank, prices.duration[source.kind, source.stage])
    return busy


def _closed_form(
    step: closed_forms.Step, costs: Costs, link: Links | None, sizes: list[int] | None, semantics: Semantics, ahead: int
) -> Time | None:
    """Returns the makespan by formula, None where none is known: they are for stages, messages and links that are all alike."""
    latency: Time = costs.latency if step.num_ranks > 1 else 0
    try:
        if link is not None and step.num_ranks > 1:  # one rank sends nothing
            if not isinstance(link, Link) or len(set(sizes or [0])) > 1:
                return None
            occupancy = (sizes or [0])[0] * link.beta_s_per_byte
            shortest = min(costs.get_duration(Action(0, "F", 0)), costs.get_duration(Action(0, "B", 0)))
            if occupancy > shortest:
                return None  # messages queue: no formula counts that
            latency = occupancy + link.alpha_s
        if latency and semantics == "rendezvous" and ahead > 0:
            return None
        return closed_forms.makespan(step, replace(costs, latency=latency), semantics)
    except ScheduleError:
        return None


def _metadata(
    source: Linear | Operations, costs: Costs, link: Links | None, sizes: list[int] | None, semantics: Semantics, ahead: int
) -> dict[str, Any]:
    """Says what was simulated, as JSON can say it; no date, so that the same arguments give the same bytes."""
    constants: dict[str, Any] = {"semantics": semantics, "ahead": ahead}
    for field in fields(costs):
        value = getattr(costs, field.name)
        constants[field.name] = [float(one) for one in value] if isinstance(value, Sequence) else value if value is None else float(value)
    if link is not None:
        links = {"all": link} if isinstance(link, Link) else {f"{source}>{rank}": one for (source, rank), one in link.items()}
        constants["links"] = {name: {"alpha_s": one.alpha_s, "beta_s_per_byte": one.beta_s_per_byte} for name, one in links.items()}
        constants["size_bytes"] = sizes
    size = source.num_ranks
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return {
        "format": 1,
        "source": "simulated",
        "world_size": size,
        "backend": f"virtual clock, {semantics}",
        "schedule": source.name,
        "constants": constants,
        "ring_groups": [[f"ring:{begin}>{end}", [begin, end]] for begin, end in edges],
        "versions": {"ringsim": __version__},
    }
