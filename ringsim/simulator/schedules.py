"""Implements ``ringsim.simulate_schedule``, which times a pipeline step.

The times follow from the schedule, and from the costs of computations and messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from ringsim.errors import (
    ArgumentError,
    ScheduleError,
    check_integer,
    is_list,
    is_number,
    say,
)
from ringsim.link import GivenLinks, Link
from ringsim.provenance import __version__
from ringsim.ring.pairs import all_pairs, list_groups
from ringsim.schedules import closed_forms, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import evaluate, lower_for
from ringsim.schedules.lowering import check_ahead, lower
from ringsim.schedules.programs import Semantics, read_semantics
from ringsim.schedules.schedule import Action, Schedule
from ringsim.simulator.columns import (
    Columns,
    Prices,
    Sizes,
    columns_of,
    make_prices,
    put_in_order,
    spread_sizes,
)
from ringsim.simulator.critical_path import (
    CriticalPath,
    Lever,
    Sensitivity,
    find_critical_path,
    improve,
    list_levers,
    plain,
)
from ringsim.simulator.levels import Levels, Times, Wave, find_levels, find_wave
from ringsim.simulator.settings import write_links
from ringsim.simulator.step_trace import check_between, make_trace
from ringsim.traces.display import Bundle, Images, Style, bundle
from ringsim.traces.events import Ints
from ringsim.traces.filtering import choose
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TIMES = 2_000_000  # kept for all variants together; more would not fit into a cache


@dataclass(frozen=True, eq=False)
class Source:
    """A schedule in the forms needed for timing, each created on first use.

    Attributes:
        schedule: the schedule.
        ahead: the number of computations between the post of a receive and its use.
        semantics: the condition under which a message starts.
        sizes: the size in bytes of a message at each boundary between stages.
        costs: the costs of the computations, or of the first variant.
    """

    schedule: Schedule
    ahead: int
    semantics: Semantics
    sizes: list[int]
    costs: Costs

    @property
    def in_order(self) -> str:
        """The order of messages, from `read_semantics`."""
        return read_semantics(self.semantics).in_order

    @property
    def rendezvous(self) -> bool:
        """Whether a message starts only when its receive is also posted."""
        return max(self.sizes, default=0) > read_semantics(self.semantics).limit_bytes

    @cached_property
    def wave(self) -> Wave | None:
        """The rule for the schedule's levels, or None if there is none."""
        return None if self.in_order else find_wave(self.schedule, self.ahead)

    @cached_property
    def columns(self) -> Columns:
        """The schedule's computations as columns."""
        overlap = bool(self.costs.overlap)
        if not self.in_order:
            return columns_of(self.schedule, self.ahead, overlap=overlap)
        lowered = lower_for(self.schedule, self.costs, self.semantics)
        columns = columns_of(lowered, overlap=overlap)
        return put_in_order(columns, lowered, self.semantics, self.sizes)

    @cached_property
    def levels(self) -> Levels:
        """The order in which the computations are timed.

        Raises Deadlock if the ranks wait for each other.
        """
        levels = find_levels(self.columns)
        if levels is None:
            lowered = lower(self.schedule, ahead=self.ahead, overlap=bool(self.costs.overlap))
            semantics = self.in_order if self.in_order and self.rendezvous else self.semantics
            # raises an error that lists the ranks that wait for each other
            evaluate(lowered, self.costs, semantics)
            raise AssertionError(
                "the evaluator finished a schedule even though its ranks are waiting for each other"
            )
        return levels

    def _choose(self, prices: Prices) -> Wave | Levels:
        return self.levels if self.wave is None or prices.is_exact else self.wave

    def time(self, prices: Prices) -> tuple[Ints, Ints, Ints | None]:
        """Returns each computation's end, message start and end of the receive, as in `Times`."""
        return self._choose(prices).time(prices, rendezvous=self.rendezvous)

    def find_makespan(self, prices: Prices) -> Any:
        """Returns the length of the step, or K lengths for K sets of costs."""
        last = self._choose(prices).last_ends(prices, rendezvous=self.rendezvous)
        return last.max(axis=0, initial=0)

    def find_makespans(self, variants: Sequence[Prices]) -> Ints:
        """Returns the length of the step for each of K prices, float64, shape (K,)."""
        kept = self.schedule.num_ranks if self.wave is not None else len(self.columns)
        at_once = max(1, _MOST_TIMES // max(kept, 1))
        found = np.empty(len(variants))
        for first in range(0, len(variants), at_once):
            some = slice(first, first + at_once)
            tables = zip(*variants[some], strict=True)
            prices = Prices(*(np.stack(table, axis=-1).astype(np.float64) for table in tables))
            found[some] = self.find_makespan(prices)
        return found

    def find_busy(self, prices: Prices) -> Ints:
        """Returns the time that each rank spends computing, shape (ranks,).

        Two computations that overlap count once.
        """
        if self.wave is not None:
            busy: Ints = self.schedule.num_microbatches * (prices.duration[0] + prices.duration[1])
            return busy
        busy = np.zeros(self.schedule.num_ranks, dtype=prices.duration.dtype)
        np.add.at(busy, self.columns.rank, prices.duration[self.columns.kind, self.columns.stage])
        if self.columns.overlaps.any():
            times = Times(self.columns, prices, self.rendezvous, *self.time(prices))
            both = np.maximum(times.ends_of(self.columns.before) - times.starts, 0)
            np.subtract.at(busy, self.columns.rank, both)
        return busy


@dataclass(frozen=True, eq=False)
class Setting:
    """A simulated step and its settings.

    Attributes:
        source: the schedule.
        prices: the costs of computations and messages.
        sizes: the size in bytes of a message at each boundary between stages, or None if no sizes
            were given.
        metadata: the metadata for traces of the step.
    """

    source: Source
    prices: Prices
    sizes: list[int] | None
    metadata: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleRun:
    """The times of a simulated step, starting at 0, in the unit of the costs.

    If a link was given, the unit is seconds. Expensive results are computed on first use and then
    kept.

    Attributes:
        name: the name of the schedule.
        num_ranks: the number of ranks.
        num_stages: the number of stages over all ranks.
        num_microbatches: the number of microbatches.
        makespan: the length of the step, up to the end of the last computation.
        busy: the time that each rank spends computing, shape (ranks,).
        closed_form: the makespan by formula, or None if no formula is known for this schedule with
            these costs.
        setting: the settings of the simulation.

    Example:
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> run = simulate_schedule("1f1b", num_ranks=4, num_microbatches=8)
        >>> run
        1f1b, 4 ranks, 8 microbatches: 33 (closed form 33), bubble 27.3 %
        >>> run.critical_path.by_reason
        {'start': 1, 'program order': 15, 'data': 12}
        >>> (
        ...     str(run.operations.action(1)),
        ...     float(run.slack[1]),
        ... )  # rank 1 does not yet need the second output of rank 0
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
        """Each rank's bubble: the time for which it is idle during the step, shape (ranks,)."""
        idle: Ints = self.makespan - self.busy
        return idle

    @property
    def bubble(self) -> float:
        """The fraction of the step for which ranks are idle, over all ranks.

        The fraction is 0 if the step takes no time.
        """
        whole = float(self.makespan) * self.num_ranks
        return float(self.idle.sum()) / whole if whole else 0.0

    @property
    def operations(self) -> Columns:
        """The computations as columns. The other arrays have one entry per computation."""
        return self.setting.source.columns

    @cached_property
    def _found(self) -> tuple[Ints, Ints, Ints | None]:
        return self.setting.source.time(self.setting.prices)

    @cached_property
    def _times(self) -> Times:
        return Times(
            self.operations,
            self.setting.prices,
            self.setting.source.rendezvous,
            *self._found,
        )

    @property
    def ends(self) -> Ints:
        """The end of each computation, shape (n,)."""
        return self._found[0]

    @property
    def starts(self) -> Ints:
        """The start of each computation, shape (n,).

        A computation starts when the previous one has ended, unless the two overlap, and its
        message has arrived.
        """
        return self._times.starts

    @property
    def message_starts(self) -> Ints:
        """The time at which each computation's message starts to use its link, shape (n,).

        The time is -inf for a computation without a message.
        """
        return self._found[1]

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of computations and messages that determines the length of the step.

        Each hop gives the reason that it did not start earlier.
        """
        return find_critical_path(self._times)

    @cached_property
    def slack(self) -> Ints:
        """The delay that each computation could have without making the step longer.

        The delays are float64, shape (n,), and 0 on the critical path. Each delay applies only if
        no other computation is delayed.
        """
        source = self.setting.source
        prices = self.setting.prices.map(lambda table: table.astype(np.float64))
        latest = source.levels.latest_ends(
            prices, float(self.makespan), rendezvous=source.rendezvous
        )
        slack: Ints = np.maximum(latest - self.ends.astype(np.float64), 0.0)
        return slack

    def sensitivity(self, by: float = 0.1, *, most: int = 8) -> Sensitivity:
        """Finds the stages, links or message sizes that are worth improving.

        Args:
            by: the improvement, above 0 and below 1: 0.1 makes a stage or a link 10 % faster, or
                messages 10 % smaller.
            most: the number of parts to try, each with a simulation, in descending order of the
                time that the critical path spends on them.

        Raises:
            ArgumentError: ``by`` or ``most`` is invalid.
        """
        if not is_number(by) or not 0 < by < 1:
            raise ArgumentError(
                f"by must be above 0 and below 1, got {say(by)}. Use 0.1 for parts that are 10 % "
                "faster."
            )
        check_integer("most", most, 1, "Pass the number of parts to try.")
        setting = self.setting
        spent = dict(list(list_levers(self.critical_path, setting.prices).items())[:most])
        variants = [
            improve(what, float(by), setting.source.schedule.stage_ranks, setting.prices)
            for what in spent
        ]
        gains = float(self.makespan) - setting.source.find_makespans(variants)
        levers = [
            Lever(what, time, max(gain, 0.0), by * time)
            for (what, time), gain in zip(spent.items(), gains.tolist(), strict=True)
        ]
        return Sensitivity(
            by, float(self.makespan), tuple(sorted(levers, key=lambda lever: -lever.gain))
        )

    def trace(
        self, *, ranks: Iterable[int] | None = None, between: tuple[float, float] | None = None
    ) -> Trace:
        """Returns a trace of the step, like one recorded by ranks that run it.

        One unit of cost is one second.

        Args:
            ranks: the ranks whose events to include, or None for all ranks. A message is included
                if both of its ranks are included.
            between: the start and the end of the time to include, in the unit of the costs, or None
                for the whole step. Events that overlap this time are included in full.

        Returns:
            The trace. Its metadata describes the simulation and the selected part.

        Raises:
            ArgumentError: a rank or a time does not exist, or the part has too many events or takes
                too long for a trace.

        Example:
            >>> from ringsim.simulator.schedules import simulate_schedule
            >>> trace = simulate_schedule("1f1b", num_ranks=2, num_microbatches=2).trace()
            >>> trace.makespan_s, len(trace.messages), trace.bubble().of_total
            (9.0, 4, 0.3333333333333333)
        """
        chosen = None if ranks is None else choose(self.num_ranks, ranks, None)[0]
        check_between(between)
        setting = self.setting
        metadata = dict(setting.metadata)
        notes = list(metadata.get("notes", ()))
        if chosen is not None:
            notes.append(f"only ranks {', '.join(map(str, chosen))}")
        if between is not None:
            notes.append(f"only from {between[0]:g} to {between[1]:g}")
        if notes:
            metadata["notes"] = notes
        return make_trace(self._times, setting.sizes, metadata, chosen, between)

    def plot(self, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws the step and its critical path on ``ax`` or a new figure, and returns the axes."""
        from ringsim.plot.schedule_run import plot_schedule_run

        return plot_schedule_run(self, ax=ax, **look)

    def __repr__(self) -> str:
        """Returns a one-line summary."""
        known = "" if self.closed_form is None else f" (closed form {float(self.closed_form):,.6g})"
        sizes = f"{self.num_ranks:,} ranks, {self.num_microbatches:,} microbatches"
        notes = "".join(f"; {note}" for note in self.setting.metadata.get("notes", ()))
        return (
            f"{self.name}, {sizes}: {float(self.makespan):,.6g}{known}, bubble "
            f"{100 * self.bubble:.1f} %{notes}"
        )

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        """Returns the plot and the summary for Jupyter."""
        return bundle(repr(self), repr(self), self._draw)

    def _draw(self) -> Images:
        from ringsim.plot.schedule_run import schedule_run_images

        return schedule_run_images(self)


@dataclass(frozen=True, eq=False, repr=False)
class WhatIfs:
    """The times of a schedule with each of K sets of costs.

    Attributes:
        name: the name of the schedule.
        makespan: the length of the step, float64, shape (K,).
        busy: the time that each rank spends computing, shape (K, ranks).

    Example:
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> what_ifs = simulate_schedule(
        ...     "1f1b", [Costs(), Costs(forward=2)], num_ranks=4, num_microbatches=8
        ... )
        >>> what_ifs.makespan.tolist(), what_ifs.bubble.round(3).tolist()
        ([33.0, 44.0], [0.273, 0.273])
    """

    name: str
    makespan: Ints
    busy: Ints

    def __len__(self) -> int:
        """Returns K, the number of sets of costs."""
        return len(self.makespan)

    @property
    def idle(self) -> Ints:
        """The time for which each rank is idle during the step, shape (K, ranks)."""
        idle: Ints = self.makespan[:, None] - self.busy
        return idle

    @property
    def bubble(self) -> Ints:
        """The fraction of the step for which ranks are idle, over all ranks, shape (K,).

        The fraction is 0 if the step takes no time.
        """
        whole = self.makespan * self.busy.shape[1]
        share: Ints = self.idle.sum(axis=1) / np.where(whole > 0, whole, 1)
        return share

    def __repr__(self) -> str:
        """Returns the number of sets of costs, and the shortest and the longest step."""
        return (
            f"{len(self)} what-ifs of {self.name}: {self.makespan.min():.6g} to "
            f"{self.makespan.max():.6g}"
        )


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Costs | None = None, *, num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None, link: GivenLinks | None = None, size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous", ahead: int = 1,
) -> ScheduleRun: ...  # fmt: skip


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Sequence[Costs], *, num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None, link: GivenLinks | Sequence[GivenLinks] | None = None,
    size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous", ahead: int = 1,
) -> WhatIfs: ...  # fmt: skip


def simulate_schedule(
    schedule: str | Schedule,
    costs: Costs | Sequence[Costs] | None = None,
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    link: GivenLinks | Sequence[GivenLinks] | None = None,
    size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous",
    ahead: int = 1,
) -> ScheduleRun | WhatIfs:
    """Simulates a pipeline's training step on a virtual clock, without starting ranks.

    Every rank performs its actions in order and waits for the messages that it needs, like the
    ranks in ``train_step_pipeline``. A message starts when its payload is computed, its link is
    free and, with ``rendezvous``, its receive is posted. The message occupies the link for
    ``size_bytes * beta_s_per_byte`` and arrives ``alpha_s`` later.

    Args:
        schedule: a name, as for ``make_schedule``, or any schedule. GPipe and 1F1B are timed from
            their phases, without a list of actions, so you can use thousands of ranks and
            microbatches.
        costs: the costs of the computations, or None for a cost of 1 per forward, input and weight.
            Pass a list of K costs to time all of them in one call.
        num_ranks: the number of ranks, if ``schedule`` is a name.
        num_microbatches: the number of microbatches, if ``schedule`` is a name.
        num_chunks: the number of stages per rank, if ``schedule`` is a name, as for
            ``make_schedule``.
        link: the cost of a message, as one link for all messages, or a dict with one link per (from
            rank, to rank). With K costs, you can also pass a list of K such links or dicts. Links
            use seconds, so the unit of all costs is then the second. With None, a message takes
            ``costs.latency``, and links are never busy.
        size_bytes: the size of an activation and of its gradient, if a link is given: one size for
            all boundaries between stages, or one per boundary.
        semantics: with ``rendezvous``, a message starts when both its send and its receive are
            posted (Gloo); with ``buffered``, when its send is posted (eager). With ``grouped`` or
            ``paired``, messages are also carried out in order, as for ``evaluate`` (NCCL). With
            ``grouped(65536)`` or ``paired(65536)``, a send of at most 65536 bytes does not wait for
            its receive.
        ahead: the number of computations between the post of a receive and its use. With 0, a
            receive is posted when the rank has nothing else to do. The argument is ignored for a
            lowered schedule, which contains its receives, and if messages are carried out in
            order.

    Returns:
        The times and, on demand, the critical path and more; with K costs, the K makespans. The
        times are exact if any cost is a Fraction.

    Raises:
        ScheduleError: no schedule has that name, or the schedule breaks a rule.
        Deadlock: the ranks would wait for each other; ``diagnosis`` contains the cycle, as for
            ``evaluate``.
        ArgumentError: a count, cost, link, size or semantics is invalid.

    Example:
        >>> from ringsim.link import Link
        >>> from ringsim.schedules.costs import Costs
        >>> size = {"num_ranks": 4, "num_microbatches": 8}
        >>> simulate_schedule("1f1b", Costs(latency=1), semantics="buffered", **size)
        1f1b, 4 ranks, 8 microbatches: 49 (closed form 49), bubble 51.0 %
        >>> costs, link = Costs(1e-3, 1e-3, 1e-3), Link(alpha_s=10e-6, beta_s_per_byte=1e-9)
        >>> run = simulate_schedule("gpipe", costs, link=link, size_bytes=10**6, **size)
        >>> round(run.makespan, 6), run.critical_path.by_reason
        (0.03909, {'start': 1, 'program order': 9, 'data': 15, 'receiver late': 3})
        >>> many = [Costs(forward=time) for time in (1, 2, 3)]
        >>> simulate_schedule("1f1b", many, num_ranks=1000, num_microbatches=10).makespan.tolist()
        [3027.0, 4036.0, 5045.0]

    Source:
        F. Baccelli et al., Synchronization and Linearity, 1992: the longest path as a recurrence of
        maxima and sums.
    """
    read_semantics(semantics)
    check_ahead(ahead)
    found = _find_schedule(schedule, num_ranks, num_microbatches, num_chunks)
    links: Any = link if is_list(link) else [link]
    has_link = any(each is not None for each in links)
    sizes = spread_sizes(size_bytes, found.num_stages, has_link=has_link)
    source = Source(found, ahead, semantics, sizes, Costs())
    if isinstance(costs, Costs):
        source = replace(source, costs=costs)
    elif costs is not None:
        return _simulate_variants(source, costs, link)
    step = None
    if isinstance(schedule, str):
        step = closed_forms.Step(schedule, found.num_ranks, found.num_microbatches, num_chunks)
    one: Any = link  # a Link or a dict of links; make_prices refuses anything else
    return _simulate(source, one, step)


def _simulate(
    source: Source, link: GivenLinks | None, step: closed_forms.Step | None
) -> ScheduleRun:
    """Simulates a schedule with one set of costs.

    ``step`` describes the schedule for the closed forms, if it was created by name.
    """
    schedule = source.schedule
    prices = make_prices(schedule.stage_ranks, source.costs, link, source.sizes)
    sizes = None if link is None else source.sizes
    return ScheduleRun(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        makespan=plain(source.find_makespan(prices)),
        busy=source.find_busy(prices),
        closed_form=None if step is None else _closed_form(step, source, link),
        setting=Setting(source, prices, sizes, _metadata(source, link)),
    )


def _find_schedule(schedule: str | Schedule, *counts: int | None) -> Schedule:
    """Returns the requested schedule. The counts apply to a schedule given by name."""
    if not isinstance(schedule, Schedule):
        given: Any = counts  # make_schedule refuses missing counts
        return make_schedule(schedule, *given)
    if any(count is not None for count in counts):
        raise ArgumentError(
            "num_ranks, num_microbatches and num_chunks must be omitted if a Schedule is given, "
            f"got {say(counts)}. Remove them, or pass a schedule's name instead."
        )
    return schedule


def _simulate_variants(source: Source, costs: Sequence[Costs], link: Any) -> WhatIfs:
    """Simulates a schedule with K sets of costs."""
    if not is_list(costs) or not all(type(each) is Costs for each in costs):
        raise ArgumentError(
            f"costs must be Costs or a list of Costs, got {say(costs)}. Pass, for example, "
            "Costs(forward=1, backward=2)."
        )
    if len({bool(each.overlap) for each in costs}) > 1:
        raise ArgumentError(
            "overlap must be 0 in all of the costs or in none, because it changes when messages "
            "leave. Simulate them in two calls."
        )
    links = list(link) if is_list(link) else [link] * len(costs)
    if len(links) != len(costs) or not links:
        raise ArgumentError(
            f"costs and link must be lists of the same length, at least 1, got {len(costs)} and "
            f"{len(links)}. Pass a single link, or one per Costs."
        )
    source, schedule = replace(source, costs=costs[0]), source.schedule
    variants = [
        make_prices(schedule.stage_ranks, *each, source.sizes)
        for each in zip(costs, links, strict=True)
    ]
    busy = np.stack([source.find_busy(prices).astype(np.float64) for prices in variants])
    return WhatIfs(schedule.name, source.find_makespans(variants), busy)


def _closed_form(step: closed_forms.Step, source: Source, link: GivenLinks | None) -> Time | None:
    """Returns the makespan by formula, or None if no formula is known.

    The formulas assume that all stages, messages and links are alike.
    """
    if source.in_order:
        return None
    costs = source.costs
    latency: Time = costs.latency if step.num_ranks > 1 else 0
    try:
        if link is not None and step.num_ranks > 1:  # a single rank sends nothing
            if not isinstance(link, Link) or len(set(source.sizes)) > 1:
                return None
            occupancy = source.sizes[0] * link.beta_s_per_byte
            if occupancy > min(costs.get_duration(Action(0, kind, 0)) for kind in "FB"):
                return None  # if messages queue, no formula applies
            latency = occupancy + link.alpha_s
        if latency and source.rendezvous and source.ahead > 0:
            return None
        return closed_forms.makespan(step, replace(costs, latency=latency), source.semantics)
    except ScheduleError:
        return None


def _metadata(source: Source, link: GivenLinks | None) -> dict[str, Any]:
    """Returns a description of the simulation for JSON.

    The description contains no date, so that the same arguments produce the same bytes.
    """
    constants: dict[str, Any] = {"semantics": source.semantics, "ahead": source.ahead}
    constants |= {name: _as_json(cost) for name, cost in vars(source.costs).items()}
    if link is not None:
        constants |= {"links": write_links(link), "size_bytes": source.sizes}
    size = source.schedule.num_ranks
    return {
        "format": 1,
        "source": "simulated",
        "world_size": size,
        "backend": f"virtual clock, {source.semantics}",
        "schedule": source.schedule.name,
        "constants": constants,
        "ring_groups": list_groups(all_pairs(range(size))),
        "versions": {"ringsim": __version__},
    }


def _as_json(cost: Time | Sequence[Time] | None) -> Any:
    if isinstance(cost, Sequence):
        return [float(one) for one in cost]
    return None if cost is None else float(cost)
