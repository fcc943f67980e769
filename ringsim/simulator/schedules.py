"""A schedule that was simulated: how long it takes, and everything else when it is asked for.

``ringsim.simulate_schedule``: what a step of a pipeline takes, from its schedule and what things cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from ringsim import __version__
from ringsim.errors import ArgumentError, Deadlock, ScheduleError, check_integer, is_list, is_number, is_one_of, say
from ringsim.link import Link
from ringsim.schedules import closed_forms, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import SEMANTICS, Semantics, evaluate
from ringsim.schedules.lowering import check_ahead, lower
from ringsim.schedules.schedule import Action, Schedule, check_size
from ringsim.simulator.columns import Linear, Links, Operations, Prices, Sizes, make_prices, read_schedule, spread_sizes
from ringsim.simulator.compiled import sweep_compiled, work_through_compiled
from ringsim.simulator.critical_path import (
    CriticalPath,
    Lever,
    Sensitivity,
    check_between,
    check_ranks,
    find_critical_path,
    improve,
    list_levers,
    make_trace,
)
from ringsim.simulator.levels import Levels, WhatIfs, find_levels, sweep, time_variants
from ringsim.simulator.worklist import work_through
from ringsim.traces.events import Ints
from ringsim.traces.lazy import bundle, resolve
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ScheduleRun", "Setting", "simulate_schedule"]


@dataclass(frozen=True, eq=False)
class Setting:
    """What was simulated, and how.

    Attributes:
        source: the schedule, as columns or as the rule that makes them.
        prices: what its computations and messages cost.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: how many computations before its use a receive is posted.
        compiled: whether by machine code.
        sizes: bytes of a message, for each boundary between stages; None where they were not said.
        metadata: of the traces.
    """

    source: Linear | Operations
    prices: Prices
    rendezvous: bool
    ahead: int
    compiled: bool
    sizes: list[int] | None
    metadata: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleRun:
    """The times of a simulated step, from 0, in the unit of the costs; seconds where a link was given.

    What takes time to find is found on first use, and kept.

    Attributes:
        name: what the schedule is called.
        num_ranks: how many ranks.
        num_stages: how many stages, over all ranks.
        num_microbatches: how many microbatches.
        makespan: how long the step takes: until the last computation ends.
        busy: how long each rank computes, shape (ranks,).
        closed_form: the makespan by formula; None where none is known for this schedule with these costs.
        setting: what was simulated, and how.

    Example:
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> run = simulate_schedule("1f1b", num_ranks=4, num_microbatches=8)
        >>> run
        1f1b, 4 ranks, 8 microbatches: 33 (closed form 33), bubble 27.3 %
        >>> run.critical_path.by_reason
        {'start': 1, 'program order': 15, 'data': 12}
        >>> str(run.operations.action(1)), float(run.slack[1])  # rank 1 has no use yet for what rank 0 makes second
        ('0F1', 2.0)
        >>> print(run.sensitivity(by=0.5, most=2))
        Improved by 50%:    gain    of the step   at most
          stage 3                2.5        7.58%        12
          stage 0                1.5        4.55%       1.5
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    makespan: Time
    busy: Ints
    closed_form: Time | None
    setting: Setting

    @property
    def idle(self) -> Ints:
        """The bubble by makespan: how long each rank does not compute while the step lasts, shape (ranks,)."""
        idle: Ints = self.makespan - self.busy
        return idle

    @property
    def bubble(self) -> float:
        """The part of the step in which ranks do not compute, over all of them; 0 for a step that takes no time."""
        whole = float(self.makespan) * self.num_ranks
        return float(self.idle.sum()) / whole if whole else 0.0

    @cached_property
    def operations(self) -> Operations:
        """The computations as columns; the arrays below have one entry for each."""
        source = self.setting.source
        return source if isinstance(source, Operations) else source.to_operations(self.setting.ahead)

    @cached_property
    def _times(self) -> tuple[Ints, Ints]:
        """When computations end, and when their messages start."""
        setting = self.setting
        if setting.prices.is_exact:
            exact = work_through(self.operations, setting.prices, rendezvous=setting.rendezvous)
            assert exact is not None  # it came to its end before
            return exact
        if setting.compiled:
            found = work_through_compiled(self.operations, setting.prices, rendezvous=setting.rendezvous)
            assert found is not None  # likewise
            return found
        if isinstance(setting.source, Linear):
            kept = sweep(setting.source, setting.prices, rendezvous=setting.rendezvous, ahead=setting.ahead, keep=True)
            assert kept.ends is not None  # asked for
            assert kept.starts is not None
            return kept.ends, kept.starts
        return self._levels.time(setting.prices, rendezvous=setting.rendezvous)

    @cached_property
    def _levels(self) -> Levels:
        levels = find_levels(self.operations)
        assert levels is not None  # it came to its end before
        return levels

    @property
    def ends(self) -> Ints:
        """When each computation ends, shape (n,)."""
        return self._times[0]

    @property
    def starts(self) -> Ints:
        """When each computation starts, shape (n,): when the one before it has ended and its message has arrived."""
        operations, prices = self.operations, self.setting.prices
        way = operations.direction, operations.stage
        arrived = self.message_starts + prices.occupancy[way] + prices.latency[way]  # -inf without a message
        ends = np.append(self.ends, self.ends[:0].sum())
        starts: Ints = np.maximum(ends[operations.before], arrived)
        return starts

    @property
    def message_starts(self) -> Ints:
        """When the message that each computation waits for starts to go over its link, shape (n,); -inf without one."""
        return self._times[1]

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of computations and messages that takes as long as the step, with the reason of each hop."""
        setting = self.setting
        return find_critical_path(self.operations, setting.prices, *self._times, rendezvous=setting.rendezvous)

    @cached_property
    def slack(self) -> Ints:
        """How much later each computation alone may end without the step taking longer, float64, shape (n,); 0 on the critical path."""
        setting = self.setting
        prices = Prices(
            *(table.astype(np.float64) for table in (setting.prices.duration, setting.prices.occupancy, setting.prices.latency))
        )
        latest = self._levels.latest_ends(prices, float(self.makespan), rendezvous=setting.rendezvous)
        slack: Ints = np.maximum(latest - self.ends.astype(np.float64), 0.0)
        return slack

    def sensitivity(self, by: float = 0.1, *, most: int = 8) -> Sensitivity:
        """Says which stage, link or message size to improve, and for how much.

        Args:
            by: how much each is improved, above 0 and below 1: 0.1 makes it 10 % faster, or messages 10 % smaller.
            most: how many are tried, those first on which the critical path spends most; each is simulated.

        Returns:
            The gains, the largest first.

        Raises:
            ArgumentError: ``by`` or ``most`` breaks its rule.
        """
        if not is_number(by) or not 0 < by < 1:
            raise ArgumentError(f"by must be above 0 and below 1, got {say(by)}. 0.1 makes each thing 10 % faster.")
        check_integer("most", most, 1, "Say how many things to try.")
        setting, operations = self.setting, self.operations
        spent = dict(list(list_levers(self.critical_path, setting.prices).items())[:most])
        variants = [improve(what, float(by), operations, setting.prices) for what in spent]
        levers: list[Lever] = []
        if variants:
            source = setting.source if isinstance(setting.source, Linear) else self._levels
            makespans = time_variants(source, variants, rendezvous=setting.rendezvous, ahead=setting.ahead, compiled=setting.compiled)
            gains = np.maximum(float(self.makespan) - makespans, 0.0).tolist()
            levers = [Lever(what, time, gain, by * time) for (what, time), gain in zip(spent.items(), gains, strict=True)]
        return Sensitivity(by, float(self.makespan), tuple(sorted(levers, key=lambda lever: -lever.gain)))

    def trace(self, *, ranks: Iterable[int] | None = None, between: tuple[float, float] | None = None) -> Trace:
        """Gives the step as a trace, as ranks that ran it would leave one; a unit of the costs is a second.

        Args:
            ranks: whose events; None for all. Messages are in it where both ranks are.
            between: of which time, from and until, in the unit of the costs; None for all. What reaches into it is there whole.

        Returns:
            The trace, which says in its metadata what was simulated; of a part, the step is called so.

        Raises:
            ArgumentError: there is no such rank or time, or the part has more events, or takes longer, than a trace can hold.

        Example:
            >>> from ringsim.simulator.schedules import simulate_schedule
            >>> trace = simulate_schedule("1f1b", num_ranks=2, num_microbatches=2).trace()
            >>> trace.makespan_s, len(trace.messages), trace.bubble().of_total
            (9.0, 4, 0.3333333333333333)
        """
        chosen = None if ranks is None else check_ranks(ranks, self.num_ranks)
        check_between(between)
        setting = self.setting
        metadata = dict(setting.metadata)
        parts = [f"only ranks {', '.join(map(str, chosen))}"] if chosen is not None else []
        parts += [f"only from {between[0]:g} to {between[1]:g}"] if between is not None else []
        if parts:
            metadata["notes"] = [*metadata.get("notes", ()), *parts]
        return make_trace(
            self.operations, setting.prices, *self._times, rendezvous=setting.rendezvous, sizes=setting.sizes, metadata=metadata,
            ranks=chosen, between=between,
        )  # fmt: skip

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draws the step with its critical path; on ``ax`` where given, else on a new figure.

        Returns:
            The axes.
        """
        axes: Axes = resolve("plot_schedule_run")(self, ax=ax)
        return axes

    def __repr__(self) -> str:
        """Returns it in one line."""
        known = "" if self.closed_form is None else f" (closed form {float(self.closed_form):,.6g})"
        sizes = f"{self.num_ranks:,} ranks, {self.num_microbatches:,} microbatches"
        return f"{self.name}, {sizes}: {float(self.makespan):,.6g}{known}, bubble {100 * self.bubble:.1f} %"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gives Jupyter the picture with the line beside it."""
        return bundle(self, repr(self), "schedule_run_png", repr(self))


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
        >>> from ringsim.schedules.costs import Costs
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
