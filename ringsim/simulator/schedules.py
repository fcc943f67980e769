"""``ringsim.simulate_schedule``.

How long a step of a pipeline takes, from its schedule and what things cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

import numpy as np

from ringsim.errors import (
    ArgumentError,
    ScheduleError,
    check_integer,
    is_list,
    is_number,
    is_one_of,
    say,
)
from ringsim.link import Link
from ringsim.provenance import __version__
from ringsim.schedules import closed_forms, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import SEMANTICS, Semantics, evaluate
from ringsim.schedules.lowering import check_ahead, lower
from ringsim.schedules.schedule import Action, Schedule
from ringsim.simulator.columns import (
    Columns,
    Links,
    Prices,
    Sizes,
    columns_of,
    make_prices,
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
from ringsim.simulator.step_trace import check_between, make_trace
from ringsim.traces.display import Bundle, Style, bundle
from ringsim.traces.events import Ints
from ringsim.traces.filtering import choose
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ScheduleRun", "Setting", "simulate_schedule"]


_MOST_TIMES: Final = 2_000_000  # kept at once, of all variants: more would not stay in a cache


@dataclass(frozen=True, eq=False)
class Source:
    """A schedule in the forms in which it is timed, each made on first use.

    Attributes:
        schedule: the schedule.
        ahead: how many computations before its use a receive is posted.
        semantics: when a message may start.
    """

    schedule: Schedule
    ahead: int
    semantics: Semantics

    @property
    def rendezvous(self) -> bool:
        """Whether a message starts only when its receive is posted, too."""
        return self.semantics == "rendezvous"

    @cached_property
    def wave(self) -> Wave | None:
        """The rule of its levels; None if there is none."""
        return find_wave(self.schedule, self.ahead)

    @cached_property
    def columns(self) -> Columns:
        """Its computations as columns."""
        return columns_of(self.schedule, self.ahead)

    @cached_property
    def levels(self) -> Levels:
        """The order in which its computations are timed.

        Raises Deadlock if its ranks wait for each other.
        """
        levels = find_levels(self.columns)
        if levels is None:
            # raises, and says who waits for whom
            evaluate(lower(self.schedule, ahead=self.ahead), semantics=self.semantics)
            raise AssertionError(
                "the evaluator came to the end of a schedule that waits for itself"
            )
        return levels

    def _choose(self, prices: Prices) -> Wave | Levels:
        return self.levels if self.wave is None or prices.is_exact else self.wave

    def time(self, prices: Prices) -> tuple[Ints, Ints]:
        """Returns when each computation ends, and when its message starts."""
        return self._choose(prices).time(prices, rendezvous=self.rendezvous)

    def find_makespan(self, prices: Prices) -> Any:
        """Returns how long the step takes: a number, or K of them if the prices have a K."""
        last = self._choose(prices).last_ends(prices, rendezvous=self.rendezvous)
        return last.max(axis=0) if len(last) else np.zeros(prices.duration.shape[2:])[()]

    def find_makespans(self, variants: Sequence[Prices]) -> Ints:
        """Returns how long the step takes with each of K prices, float64, shape (K,)."""
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
        """Returns how long each rank computes, shape (ranks,)."""
        if self.wave is not None:
            busy: Ints = self.schedule.num_microbatches * (prices.duration[0] + prices.duration[1])
            return busy
        busy = np.zeros(self.schedule.num_ranks, dtype=prices.duration.dtype)
        np.add.at(busy, self.columns.rank, prices.duration[self.columns.kind, self.columns.stage])
        return busy


@dataclass(frozen=True, eq=False)
class Setting:
    """The step that was simulated, and how.

    Attributes:
        source: the schedule.
        prices: what its computations and messages cost.
        sizes: bytes of a message, for each boundary between stages; None if they were not given.
        metadata: of the traces.
    """

    source: Source
    prices: Prices
    sizes: list[int] | None
    metadata: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleRun:
    """The times of a simulated step, from 0, in the unit of the costs.

    Seconds if a link was given. Results that take time are computed on first use and kept.

    Attributes:
        name: what the schedule is called.
        num_ranks: how many ranks.
        num_stages: how many stages, over all ranks.
        num_microbatches: how many microbatches.
        makespan: how long the step takes: until the last computation ends.
        busy: how long each rank computes, shape (ranks,).
        closed_form: the makespan by formula; None if none is known for this schedule with these
            costs.
        setting: what was simulated, and how.

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
        ... )  # rank 1 has no use yet for what rank 0 makes second
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
        """The bubble by makespan: how long each rank is idle during the step, shape (ranks,)."""
        idle: Ints = self.makespan - self.busy
        return idle

    @property
    def bubble(self) -> float:
        """The part of the step in which ranks are idle, over all ranks.

        0 for a step that takes no time.
        """
        whole = float(self.makespan) * self.num_ranks
        return float(self.idle.sum()) / whole if whole else 0.0

    @property
    def operations(self) -> Columns:
        """The computations as columns; the arrays below have one entry for each."""
        return self.setting.source.columns

    @cached_property
    def _ends_and_starts(self) -> tuple[Ints, Ints]:
        return self.setting.source.time(self.setting.prices)

    @cached_property
    def _times(self) -> Times:
        return Times(
            self.operations,
            self.setting.prices,
            self.setting.source.rendezvous,
            *self._ends_and_starts,
        )

    @property
    def ends(self) -> Ints:
        """When each computation ends, shape (n,)."""
        return self._ends_and_starts[0]

    @property
    def starts(self) -> Ints:
        """When each computation starts, shape (n,).

        When the previous one has ended and its message has arrived.
        """
        starts: Ints = np.maximum(self._times.ends_of(self.operations.before), self._times.arrivals)
        return starts

    @property
    def message_starts(self) -> Ints:
        """When the message that each computation waits for starts to go over its link, shape (n,).

        -inf without one.
        """
        return self._ends_and_starts[1]

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of computations and messages that takes as long as the step.

        With the reason of each hop.
        """
        return find_critical_path(self._times)

    @cached_property
    def slack(self) -> Ints:
        """How much later each computation alone may end at no cost, float64, shape (n,).

        0 on the critical path.
        """
        source = self.setting.source
        prices = self.setting.prices.map(lambda table: table.astype(np.float64))
        latest = source.levels.latest_ends(
            prices, float(self.makespan), rendezvous=source.rendezvous
        )
        slack: Ints = np.maximum(latest - self.ends.astype(np.float64), 0.0)
        return slack

    def sensitivity(self, by: float = 0.1, *, most: int = 8) -> Sensitivity:
        """Finds out which stage, link or message size to improve, and what it gains.

        Args:
            by: how much each is improved, above 0 and below 1: 0.1 makes it 10 % faster, or
                messages 10 % smaller.
            most: how many to try, each by simulating it; those on which the critical path spends
                most come first.

        Raises:
            ArgumentError: ``by`` or ``most`` breaks its rule.
        """
        if not is_number(by) or not 0 < by < 1:
            raise ArgumentError(
                f"by must be above 0 and below 1, got {say(by)}. 0.1 makes each thing 10 % faster."
            )
        check_integer("most", most, 1, "Say how many things to try.")
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
        """Returns the step as a trace, like that of ranks that run it.

        A unit of the costs is a second.

        Args:
            ranks: whose events; None for all. A message is there if both of its ranks are.
            between: of which time, from and until, in the unit of the costs; None for all. Events
                that reach into it are complete.

        Returns:
            The trace; its metadata says what was simulated, and of which part.

        Raises:
            ArgumentError: there is no such rank or time, or the part has more events or takes
                longer than a trace can hold.

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
        """Draws the step with its critical path, on ``ax`` or a new figure; returns the axes."""
        from ringsim.plot.schedule_run import plot_schedule_run

        return plot_schedule_run(self, ax=ax, **look)

    def __repr__(self) -> str:
        """Returns it in one line."""
        known = "" if self.closed_form is None else f" (closed form {float(self.closed_form):,.6g})"
        sizes = f"{self.num_ranks:,} ranks, {self.num_microbatches:,} microbatches"
        notes = "".join(f"; {note}" for note in self.setting.metadata.get("notes", ()))
        return (
            f"{self.name}, {sizes}: {float(self.makespan):,.6g}{known}, bubble "
            f"{100 * self.bubble:.1f} %{notes}"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        """Returns the picture and the line, for Jupyter."""
        return bundle(repr(self), repr(self), self._draw)

    def _draw(self) -> bytes:
        from ringsim.plot.schedule_run import schedule_run_png

        return schedule_run_png(self)


@dataclass(frozen=True, eq=False, repr=False)
class WhatIfs:
    """The times of a schedule with each of K sets of costs.

    Attributes:
        name: what the schedule is called.
        makespan: how long the step takes, float64, shape (K,).
        busy: how long each rank computes, shape (K, ranks).

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
        """Returns K."""
        return len(self.makespan)

    @property
    def idle(self) -> Ints:
        """How long each rank is idle during the step, shape (K, ranks)."""
        idle: Ints = self.makespan[:, None] - self.busy
        return idle

    @property
    def bubble(self) -> Ints:
        """The part of the step in which ranks are idle, over all ranks, shape (K,).

        0 for a step that takes no time.
        """
        whole = self.makespan * self.busy.shape[1]
        share: Ints = np.divide(
            self.idle.sum(axis=1), whole, out=np.zeros(len(self)), where=whole > 0
        )
        return share

    def __repr__(self) -> str:
        """Returns how many there are, and between which times."""
        return (
            f"{len(self)} what-ifs of {self.name}: {self.makespan.min():.6g} to "
            f"{self.makespan.max():.6g}"
        )


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Costs | None = None, *, num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None, link: Links | None = None, size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous", ahead: int = 1,
) -> ScheduleRun: ...  # fmt: skip


@overload
def simulate_schedule(
    schedule: str | Schedule, costs: Sequence[Costs], *, num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None, link: Links | Sequence[Links] | None = None,
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
    link: Links | Sequence[Links] | None = None,
    size_bytes: Sizes = 0,
    semantics: Semantics = "rendezvous",
    ahead: int = 1,
) -> ScheduleRun | WhatIfs:
    """Simulates one training step of a pipeline on a virtual clock; no rank is started.

    Every rank does its list in order and waits for what it needs, as the ranks of
    ``train_step_pipeline`` do. A message starts when it is made, its link is free, and with
    ``rendezvous`` its receive is posted; it keeps the link for ``size_bytes * beta_s_per_byte``,
    and arrives ``alpha_s`` later.

    Args:
        schedule: a name, as for ``make_schedule``, or any schedule. GPipe and 1F1B are timed from
            their phases, without a list of actions, so they work for thousands of ranks and
            microbatches.
        costs: of the computations; None: forward, input and weight 1 each. A list of K: all K at
            once.
        num_ranks: with a name: how many ranks.
        num_microbatches: with a name: how many microbatches.
        num_chunks: with a name: how many stages a rank, as for ``make_schedule``.
        link: what a message costs, in seconds, as the computations then are: one for all, or by
            (from rank, to rank); with K costs also a list of K. None: ``costs.latency``, and links
            are never busy.
        size_bytes: of an activation and of its gradient, where a link is given: one for all, or one
            for each boundary between stages.
        semantics: ``rendezvous``: a message starts when its send and its receive are posted (Gloo);
            ``buffered``: when its send is (eager).
        ahead: how many computations before its use a receive is posted; 0: when the rank has
            nothing else to do. A lowered schedule says it itself.

    Returns:
        The times, and on demand the critical path and more; for K costs the K makespans. Exact if a
        cost is a Fraction.

    Raises:
        ScheduleError: there is no schedule of that name, or the schedule breaks a rule.
        Deadlock: its ranks would wait for each other; ``diagnosis`` is the circle.
        ArgumentError: a count, cost, link, size or semantics breaks its rule.

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
    if not is_one_of(semantics, SEMANTICS):
        raise ArgumentError(
            f"semantics must be one of {', '.join(SEMANTICS)}, got {say(semantics)}. Take one of "
            "these."
        )
    check_ahead(ahead)
    source = Source(
        _find_schedule(schedule, num_ranks, num_microbatches, num_chunks), ahead, semantics
    )
    if costs is not None and not isinstance(costs, Costs):
        return _simulate_variants(source, costs, link, size_bytes)
    step = None
    if isinstance(schedule, str):
        known = source.schedule
        step = closed_forms.Step(schedule, known.num_ranks, known.num_microbatches, num_chunks)
    one: Any = link  # a Link or a table of them: make_prices refuses what is neither
    return _simulate(source, costs or Costs(), one, size_bytes, step)


def _simulate(
    source: Source,
    costs: Costs,
    link: Links | None,
    size_bytes: Sizes,
    step: closed_forms.Step | None,
) -> ScheduleRun:
    """Simulates a schedule with one set of costs.

    ``step`` is what closed forms know it as, if it was made by name.
    """
    schedule = source.schedule
    spread = spread_sizes(size_bytes, schedule.num_stages, has_link=link is not None)
    prices = make_prices(schedule.stage_ranks, costs, link, spread)
    makespan = source.find_makespan(prices)
    sizes = None if link is None else spread
    closed_form = None if step is None else _closed_form(step, costs, link, sizes, source)
    return ScheduleRun(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        makespan=plain(makespan),
        busy=source.find_busy(prices),
        closed_form=closed_form,
        setting=Setting(source, prices, sizes, _metadata(source, costs, link, sizes)),
    )


def _find_schedule(schedule: str | Schedule, *counts: int | None) -> Schedule:
    """Returns the schedule that was asked for; the counts go with a name."""
    if not isinstance(schedule, Schedule):
        given: Any = counts  # make_schedule refuses those that are missing
        return make_schedule(schedule, *given)
    if any(count is not None for count in counts):
        raise ArgumentError(
            "num_ranks, num_microbatches and num_chunks must be left out, got "
            f"{say(counts)}: the schedule says them. Take them out, or give the schedule's name."
        )
    return schedule


def _simulate_variants(
    source: Source, costs: Sequence[Costs], link: Any, size_bytes: Sizes
) -> WhatIfs:
    """Simulates a schedule with K sets of costs."""
    if not is_list(costs) or not all(type(each) is Costs for each in costs):
        raise ArgumentError(
            f"costs must be Costs, or a list of them, got {say(costs)}. Pass Costs(forward=1, "
            "backward=2)."
        )
    links = list(link) if is_list(link) else [link] * len(costs)
    if len(links) != len(costs) or not links:
        raise ArgumentError(
            f"costs and link must be as many, 1 or more, got {len(costs)} and {len(links)}. Give "
            "one link, or one each."
        )
    schedule, has_link = source.schedule, any(each is not None for each in links)
    sizes = spread_sizes(size_bytes, schedule.num_stages, has_link=has_link)
    variants = [
        make_prices(schedule.stage_ranks, *each, sizes) for each in zip(costs, links, strict=True)
    ]
    busy = np.stack([source.find_busy(prices).astype(np.float64) for prices in variants])
    return WhatIfs(schedule.name, source.find_makespans(variants), busy)


def _closed_form(
    step: closed_forms.Step,
    costs: Costs,
    link: Links | None,
    sizes: list[int] | None,
    source: Source,
) -> Time | None:
    """Returns the makespan by formula, None where none is known.

    Formulas are for stages, messages and links that are all alike.
    """
    latency: Time = costs.latency if step.num_ranks > 1 else 0
    try:
        if link is not None and step.num_ranks > 1:  # one rank sends nothing
            if not isinstance(link, Link) or len(set(sizes or [0])) > 1:
                return None
            occupancy = (sizes or [0])[0] * link.beta_s_per_byte
            shortest = min(
                costs.get_duration(Action(0, "F", 0)), costs.get_duration(Action(0, "B", 0))
            )
            if occupancy > shortest:
                return None  # messages queue: no formula counts that
            latency = occupancy + link.alpha_s
        if latency and source.rendezvous and source.ahead > 0:
            return None
        return closed_forms.makespan(step, replace(costs, latency=latency), source.semantics)
    except ScheduleError:
        return None


def _metadata(
    source: Source, costs: Costs, link: Links | None, sizes: list[int] | None
) -> dict[str, Any]:
    """Returns what was simulated, for JSON.

    Without a date, so that the same arguments give the same bytes.
    """
    constants: dict[str, Any] = {"semantics": source.semantics, "ahead": source.ahead}
    constants |= {name: _as_json(cost) for name, cost in vars(costs).items()}
    if link is not None:
        links = (
            {"all": link}
            if isinstance(link, Link)
            else {f"{source}>{rank}": one for (source, rank), one in link.items()}
        )
        constants["links"] = {
            name: {"alpha_s": one.alpha_s, "beta_s_per_byte": one.beta_s_per_byte}
            for name, one in links.items()
        }
        constants["size_bytes"] = sizes
    size = source.schedule.num_ranks
    edges = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    return {
        "format": 1,
        "source": "simulated",
        "world_size": size,
        "backend": f"virtual clock, {source.semantics}",
        "schedule": source.schedule.name,
        "constants": constants,
        "ring_groups": [[f"ring:{begin}>{end}", [begin, end]] for begin, end in edges],
        "versions": {"ringsim": __version__},
    }


def _as_json(cost: Time | Sequence[Time] | None) -> Any:
    if isinstance(cost, Sequence):
        return [float(one) for one in cost]
    return None if cost is None else float(cost)
