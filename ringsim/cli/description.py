"""Reads a TOML file for ``ringsim simulate``: a model, a ring, a schedule and links.

::

    [model]             [schedule]               [[edge]]       # a link that differs
    forward_ms = 10     name = "1f1b"            from = 3
    backward_ms = 20    microbatches = 16        to = 4
    activation_mib = 4                           latency_us = 50
                        [link]                   bandwidth_gb_per_s = 1
    [ring]              latency_us = 10
    ranks = 8           bandwidth_gb_per_s = 10  [[slow]]       # a rank that computes more slowly
                                                 rank = 2
                                                 factor = 1.5

Instead of a name, ``[schedule]`` may list its ``actions``. Instead of times, ``[model]`` may
contain a transformer's shapes and the number of floating-point operations that a rank performs per
second. Instead of ``[link]`` and ``[[edge]]``, ``[topology]`` may describe which links the ranks
share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringsim.cli.toml_table import BANDWIDTH, SIZE, TEXT, TIME, TRUTH, TomlTable, at_least, number
from ringsim.errors import LONGEST_S, ArgumentError, RingError, ScheduleError, escape_line
from ringsim.faults import (
    Degrade,
    Injection,
    Jitter,
    Slow,
    check_injections,
    degraded_by,
    slowed_by,
)
from ringsim.link import GivenLinks, Link
from ringsim.pipeline.flops import Flops, attention_flops, linear_flops
from ringsim.ring.pairs import Pair
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.closed_forms import Step
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import validate
from ringsim.schedules.partition import by_count
from ringsim.schedules.programs import SEMANTICS, Semantics, read_semantics
from ringsim.schedules.schedule import Action, Schedule, from_text
from ringsim.simulator.links import degraded
from ringsim.simulator.schedules import ScheduleRun, simulate_schedule
from ringsim.topologies import FullBisection, Hosts, RingLinks

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# these are simulated without writing out their actions; stage s is on rank s
_BY_RULE = ("gpipe", "afab", "1f1b")
_MOST_FORWARDS = 20_000_000
_MOST_WRITTEN_OUT = 1_000_000  # for the other schedules: half a minute and a gigabyte
_MOST_REHEARSED = 100_000  # by simulated ranks: a minute
_FREE = Link(0.0, 0.0)  # for one rank, which sends nothing
_TOPOLOGIES = ("hosts", "full_bisection", "ring")

Network = Hosts | FullBisection | RingLinks


@dataclass(frozen=True)
class Description:
    """A step to simulate, with message costs that assume uncontended links.

    The costs include slow ranks and degraded links.
    """

    schedule: Step | Schedule
    costs: Costs
    link: GivenLinks
    size_bytes: int
    semantics: Semantics
    ahead: int
    topology: Network | None
    degrade: tuple[Degrade, ...]
    jitter: tuple[Jitter, ...]

    @property
    def needs_ranks(self) -> bool:
        """Whether the order of events depends on times, so that ranks must run the step."""
        return self.topology is not None or bool(self.jitter)

    @property
    def stages_differ(self) -> bool:
        """Whether the stages take different times."""
        return any(isinstance(times, Sequence) for times in _times(self.costs))

    def rehearse(self) -> Trace:
        """Simulates the step on ranks, with shared links and jitter."""
        from ringsim.pipeline.executor import rehearse  # needs torch
        from ringsim.simulator.api import simulate

        step = _write_out(self.schedule)
        network: Any = {"link": self.link, "inject": self.jitter}
        if self.topology is not None:
            network = {"topology": self.topology, "inject": (*self.degrade, *self.jitter)}
        more = {"size_bytes": self.size_bytes, "ahead": self.ahead}
        return simulate(
            rehearse,
            world_size=step.num_ranks,
            args=(step, self.costs),
            kwargs=more,
            semantics=self.semantics,
            **network,
        )

    def simulate(self) -> ScheduleRun:
        """Simulates the step from its schedule, without shared links or jitter."""
        step: Any = self.schedule
        counts: dict[str, Any] = {}
        if isinstance(step, Step):
            counts = asdict(step)
            step = counts.pop("name")
        return simulate_schedule(
            step,
            self.costs,
            link=self.link,
            size_bytes=self.size_bytes,
            semantics=self.semantics,
            ahead=self.ahead,
            **counts,
        )


def read_description(file: Path) -> Description:
    """Reads a description from a TOML file and checks everything in it.

    Raises:
        RingError: the file cannot be read.
        ArgumentError: the file is not TOML, a key is unknown or missing, or a value is invalid.
    """
    name = escape_line(str(file))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RingError(f"cannot read the description: {error}. Check the path.") from None
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # not only TOMLDecodeError: numbers of 5,000 digits, a thousand brackets
        raise ArgumentError(
            f"the description is not valid TOML: {error} ({name}). Fix that line."
        ) from None
    return _describe(TomlTable("the description", name, tables))


def _describe(whole: TomlTable) -> Description:
    model, ring, schedule = (whole.table(key) for key in ("model", "ring", "schedule"))
    shares = "topology" in whole
    if shares and ("link" in whole or "edge" in whole):
        raise ArgumentError(
            "the links are described twice, in [topology] and in [link] or [[edge]] "
            f"({whole.file}). Remove [topology] or the other tables."
        )
    every_link = whole.table("topology" if shares else "link")
    edges, slow, degrade, jitter = (
        whole.tables(key) for key in ("edge", "slow", "degrade", "jitter")
    )
    num_ranks = ring.read("ranks", at_least(1))
    read_schedule = _read_actions if "actions" in schedule else _read_step
    step: Step | Schedule = read_schedule(schedule, num_ranks)
    semantics = schedule.read("semantics", TEXT, "rendezvous")
    try:
        read_semantics(semantics)
    except ArgumentError:
        semantics = schedule.choice("semantics", SEMANTICS)
    ahead = schedule.read("ahead", at_least(0), 1)
    owners = _write_out(step).stage_ranks

    has_shapes = "layers" in model
    costs, size_bytes = _read_shapes(model, len(owners)) if has_shapes else _read_times(model)
    costs.check(len(owners))
    topology, link, links = None, _FREE, dict[Pair, Link]()
    if shares:
        topology = _read_topology(every_link)
        links = _idle_links(topology, num_ranks)
    else:
        link = _read_link(every_link)
    own = [_read_edge(each, num_ranks) for each in edges]
    if twice := [edge for edge in own if own.count(edge) > 1]:
        raise ArgumentError(
            f"two [[edge]] tables describe the link from {twice[0][0]} to {twice[0][1]} "
            f"({whole.file}). Remove one of them."
        )
    links |= {edge: _read_link(each) for edge, each in zip(own, edges, strict=True)}
    factor, seed = number(1), at_least(0)
    slowed = tuple(
        Slow(each.read("rank", at_least(0)), each.read("factor", factor)) for each in slow
    )
    degrades = tuple(
        Degrade(*_read_edge(each, num_ranks), each.read("factor", factor)) for each in degrade
    )
    jitters = tuple(
        Jitter(each.read("fraction", number()), each.read("seed", seed, 0)) for each in jitter
    )
    whole.finish()
    check_injections([*slowed, *degrades, *jitters], num_ranks)
    factors = [slowed_by(slowed, rank) for rank in owners]
    described = Description(
        schedule=step,
        costs=_slow_down(costs, factors) if max(factors) > 1 else costs,
        link=_lay_links(num_ranks, link, links, degrades) if links or degrades else link,
        size_bytes=size_bytes,
        semantics=semantics,
        ahead=ahead,
        topology=topology,
        degrade=degrades,
        jitter=jitters,
    )
    _check_sizes(described, len(owners), whole.file)
    return described


def _check_sizes(described: Description, num_stages: int, file: str) -> None:
    """Rejects steps that take too long to simulate or do not fit into a trace."""
    forwards = num_stages * described.schedule.num_microbatches
    if described.needs_ranks and forwards > _MOST_REHEARSED:
        raise ArgumentError(
            f"a step with [topology] or [[jitter]] must have at most {_MOST_REHEARSED:,} forward "
            f"passes, got {forwards:,} ({file}). Use fewer microbatches."
        )
    if described.needs_ranks and described.size_bytes == 0:
        raise ArgumentError(
            f"activation must be positive with [topology] or [[jitter]], got 0 ({file}). Set it to "
            "the size of the messages between stages."
        )
    costs, links = described.costs, described.link
    times = [
        costs.get_duration(Action(stage, kind, 0)) for stage in range(num_stages) for kind in "FB"
    ]
    each_link = [links] if isinstance(links, Link) else links.values()
    slowest = max((link.time_s(described.size_bytes) for link in each_link), default=0.0)
    # as if everything ran one after the other, with the largest jitter
    most_s = (
        2 * described.schedule.num_microbatches * (float(sum(times)) + 2 * num_stages * slowest)
    )
    if not most_s <= LONGEST_S:
        raise ArgumentError(
            f"the times could add up to {most_s:.3g} s, but a step can last at most 285 years, "
            f"because a trace counts nanoseconds ({file}). Check the units, bandwidths and factors."
        )


def _read_step(schedule: TomlTable, num_ranks: int) -> Step:
    name = schedule.choice("name", SCHEDULE_NAMES)
    num_microbatches = schedule.read("microbatches", at_least(1))
    num_chunks = schedule.read("chunks", at_least(1)) if "chunks" in schedule else None
    try:
        step = Step(name, num_ranks, num_microbatches, num_chunks)
    except ScheduleError as error:
        raise ArgumentError(
            f"the schedule does not allow chunks = {num_chunks} ({schedule.file}): {error}"
        ) from None
    size = step.num_stages * num_microbatches
    most = _MOST_FORWARDS if name in _BY_RULE else _MOST_WRITTEN_OUT
    if size > most:
        raise ArgumentError(
            f"a {name} step must have at most {most:,} forward passes, got {size:,} "
            f"({schedule.file}). Use fewer microbatches."
        )
    return step


def _read_actions(schedule: TomlTable, num_ranks: int) -> Schedule:
    """Reads a schedule that lists its actions, one line per rank."""
    try:
        own = from_text(schedule.read("actions", TEXT))
        validate(own)
    except ScheduleError as error:
        raise ArgumentError(
            f"actions is not a valid schedule ({schedule.file}): {' '.join(str(error).split())}"
        ) from None
    if own.num_ranks != num_ranks:
        raise ArgumentError(
            f"actions must have one line for each of the {num_ranks} ranks in [ring], got "
            f"{own.num_ranks} ({schedule.file}). Change actions or ranks."
        )
    return own


def _write_out(step: Step | Schedule) -> Schedule:
    return make_schedule(*astuple(step)) if isinstance(step, Step) else step


def _read_times(model: TomlTable) -> tuple[Costs, int]:
    def times(what: str) -> Any:
        return model.quantity(what, TIME, by_stage=True)

    forward, backwards = times("forward"), [key for key in TIME.keys("backward") if key in model]
    if any(key in model for what in ("input", "weight") for key in TIME.keys(what)):
        costs = Costs(forward, times("input"), times("weight"))
        if backwards:
            raise ArgumentError(
                f"{model.name} has both {backwards[0]} and its halves, input and weight "
                f"({model.file}). Remove {backwards[0]} or the halves."
            )
    else:
        backward = times("backward")
        half = tuple(time / 2 for time in backward) if isinstance(backward, tuple) else backward / 2
        costs = Costs(forward, half, half, backward)
    size = model.quantity("activation", SIZE, 0)
    if 0 < size < 1:
        raise model.wrong(
            "activation", "either 0 or at least 1 byte", f"{size:g} bytes", "Check its unit."
        )
    return costs, round(size)


def _read_shapes(model: TomlTable, num_stages: int) -> tuple[Costs, int]:
    """Derives the costs of a transformer's stages from its shapes and a rank's speed."""
    positive = at_least(1)
    num_layers, hidden = model.read("layers", positive), model.read("hidden_size", positive)
    heads = model.read("heads", positive)
    sequence = model.read("sequence_length", positive)
    sequences = model.read("microbatch_size", positive, 1)
    kv_heads = model.read("kv_heads", positive, heads)
    narrow = kv_heads * (hidden // heads)
    inner = model.read("intermediate_size", positive, 4 * hidden)
    widening = 2 if model.read("gated_mlp", TRUTH, False) else 1
    vocabulary = model.read("vocab_size", at_least(0), 0)
    flops_per_s = model.read("flops_per_s", number(1))
    tokens = sequence * sequences
    if hidden % heads:
        raise model.wrong(
            "hidden_size", f"a multiple of heads ({heads})", f"{hidden}", "Change one of them."
        )
    if heads % kv_heads:
        raise model.wrong(
            "heads", f"a multiple of kv_heads ({kv_heads})", f"{heads}", "Change one of them."
        )
    # queries, keys, values, output
    linear = [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden)]
    linear += [(hidden, inner)] * widening + [(inner, hidden)]
    layer = attention_flops(sequences, sequence, sequence, hidden)
    for each in linear:
        layer = layer.plus(linear_flops(tokens, *each))
    stages = [
        Flops(*(count * len(own) for count in layer)) for own in by_count(num_layers, num_stages)
    ]
    stages[-1] = stages[-1].plus(linear_flops(tokens, hidden, vocabulary))
    columns = zip(*((count / flops_per_s for count in each) for each in stages), strict=True)
    forward, input_grad, weight_grad = (
        times[0] if len(set(times)) == 1 else times for times in columns
    )
    costs = Costs(forward, input_grad, weight_grad)
    return costs, tokens * hidden * model.read("bytes_per_number", positive, 2)


def _read_link(table: TomlTable, which: str = "") -> Link:
    """Reads latency and bandwidth from keys that begin with ``which``."""
    bandwidth = table.quantity(f"{which}bandwidth", BANDWIDTH)
    if bandwidth * LONGEST_S < 1:
        got = f"{bandwidth:g} bytes/s" if bandwidth else "0"
        raise table.wrong(
            f"{which}bandwidth",
            "positive",
            got,
            "Use a larger value: with this one, no message would ever arrive.",
        )
    return Link(table.quantity(f"{which}latency", TIME), 1 / bandwidth)


def _read_topology(table: TomlTable) -> Network:
    kind = table.choice("kind", _TOPOLOGIES)
    if kind == "hosts":
        return Hosts(
            table.read("ranks_per_host", at_least(1)),
            _read_link(table, "inner_"),
            _read_link(table, "outer_"),
        )
    link = _read_link(table)
    return FullBisection(link) if kind == "full_bisection" else RingLinks(link)


def _neighbours(num_ranks: int) -> Iterator[Pair]:
    for src in range(num_ranks):
        for dst in {(src + 1) % num_ranks, (src - 1) % num_ranks} - {src}:
            yield src, dst


def _idle_links(topology: Network, num_ranks: int) -> dict[Pair, Link]:
    """Returns the cost of messages between neighbours on an otherwise idle network."""
    found = {}
    for src, dst in _neighbours(num_ranks):
        links = [hop.link for hop in topology.route(src, dst, num_ranks)]
        found[src, dst] = Link(
            sum(link.alpha_s for link in links), max(link.beta_s_per_byte for link in links)
        )
    return found


def _read_edge(table: TomlTable, num_ranks: int) -> Pair:
    """Reads a link's two ranks.

    Neighbouring stages are on neighbouring ranks, so messages use no other links.
    """
    src, dst = (table.read(key, at_least(0)) for key in ("from", "to"))
    if (
        src == dst
        or max(src, dst) >= num_ranks
        or (dst - src) % num_ranks not in (1, num_ranks - 1)
    ):
        raise table.wrong(
            "from and to",
            f"neighbours in a ring of {num_ranks}",
            f"{src} and {dst}",
            "Change one of them: stages send only to neighbours.",
        )
    return src, dst


def _slow_down(costs: Costs, factors: Sequence[float]) -> Costs:
    def by_stage(times: Any) -> Any:
        if times is None:
            return None
        listed = times if isinstance(times, tuple) else (times,) * len(factors)
        return tuple(time * factor for time, factor in zip(listed, factors, strict=True))

    return Costs(*map(by_stage, _times(costs)))


def _times(costs: Costs) -> tuple[Any, ...]:
    return costs.forward, costs.input, costs.weight, costs.backward


def _lay_links(
    num_ranks: int, link: Link, links: dict[Pair, Link], inject: Sequence[Injection]
) -> dict[Pair, Link]:
    """Returns every link of a ring, with the slowdowns in ``inject``."""
    return {
        edge: degraded(links.get(edge, link), degraded_by(inject, *edge))
        for edge in _neighbours(num_ranks)
    }
