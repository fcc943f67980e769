"""A schedule that was simulated: how long it takes, and everything else when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.errors import ArgumentError, check_integer, is_number, say
from ringsim.pipeline.programs import Time
from ringsim.simulator.compiled import work_through_compiled
from ringsim.simulator.critical_path import CriticalPath, find_critical_path
from ringsim.simulator.level_order import Levels, find_levels
from ringsim.simulator.linear_operations import Linear
from ringsim.simulator.operations import Operations
from ringsim.simulator.prices import Prices
from ringsim.simulator.schedule_trace import check_between, check_ranks, make_trace
from ringsim.simulator.sensitivity import Lever, Sensitivity, improve, list_levers
from ringsim.simulator.wavefront import sweep
from ringsim.simulator.what_if import time_variants
from ringsim.simulator.worklist import work_through
from ringsim.traces.events import Ints
from ringsim.traces.reached import bundle, reach
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ScheduleRun", "Setting"]


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
        >>> from ringsim.simulator.schedule_api import simulate_schedule
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
            >>> from ringsim.simulator.schedule_api import simulate_schedule
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
        axes: Axes = reach("plot_schedule_run")(self, ax=ax)
        return axes

    def __repr__(self) -> str:
        """Returns it in one line."""
        known = "" if self.closed_form is None else f" (closed form {float(self.closed_form):,.6g})"
        sizes = f"{self.num_ranks:,} ranks, {self.num_microbatches:,} microbatches"
        return f"{self.name}, {sizes}: {float(self.makespan):,.6g}{known}, bubble {100 * self.bubble:.1f} %"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gives Jupyter the picture with the line beside it."""
        return bundle(self, repr(self), "schedule_run_png", repr(self))
