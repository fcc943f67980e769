"""``ringsim simulate``: simulates a script or a described training step on simulated ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from ringsim.cli.description import Description, Network, read_description
from ringsim.cli.verb import (
    Verbs,
    add_flag,
    add_json,
    add_module,
    add_ranks,
    add_rest,
    add_verb,
    keep_what_was_recorded,
    make_link,
    save_trace,
    tell,
    write_picture,
)
from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules.closed_forms import gpipe_makespan, makespan, one_f_one_b_bound, peak_live
from ringsim.schedules.engine import evaluate
from ringsim.schedules.schedule import Action, Schedule
from ringsim.topologies import FullBisection, Hosts
from ringsim.traces.units import bytes_text, count, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.simulator.schedules import ScheduleRun
    from ringsim.traces.value import Trace


_LATENCY_US = 10.0
_BANDWIDTH_GBPS = 10.0


def add_parser(verbs: Verbs) -> None:
    """Adds the command."""
    help_text = "simulate a torchrun script or a described training step on a virtual clock"
    example = (
        "ringsim simulate -n 64 --save run.ringtrace train.py --steps 10\n"
        "  ringsim simulate --plot run.png docs/examples/pipeline.toml"
    )
    parser = add_verb(verbs, "simulate", help_text, example, run)
    add_ranks(parser, "number of ranks for a script (default: 2)")
    add_module(parser)
    add_network(parser)
    parser.add_argument("--save", type=Path, metavar="FILE.ringtrace", help="save the trace")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the timeline")
    add_json(parser)
    parser.add_argument(
        "file",
        type=Path,
        metavar="SCRIPT|FILE.toml",
        help="script and its arguments, or description (see docs/reference/descriptions.md)",
    )
    add_rest(parser)


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a script's virtual clock; a description sets its own clock."""
    parser.add_argument(
        "--latency-us",
        type=float,
        default=_LATENCY_US,
        metavar="US",
        help="latency of each link in microseconds, for a script (default: %(default)g)",
    )
    parser.add_argument(
        "--bandwidth-gbps",
        type=float,
        default=_BANDWIDTH_GBPS,
        metavar="GB/S",
        help="bandwidth of each link in 1e9 bytes/s, for a script (default: %(default)g)",
    )
    parser.add_argument(
        "--semantics",
        default="rendezvous",
        help="when messages leave: rendezvous (like Gloo), buffered (like MPI), grouped or paired "
        "(like NCCL), or, for example, grouped(65536); default: rendezvous",
    )
    add_flag(
        parser,
        "measure compute time on this machine (default: computing takes no time)",
        "--measure-compute",
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="stop the simulation after this time"
    )


def run(options: argparse.Namespace) -> int:
    """Simulates a script or a description; returns the exit code."""
    if options.module or options.file.suffix != ".toml":
        trace = _simulate_script(options)
        tell(options, trace.summary, lambda: {"makespan_s": trace.makespan_s})
        return _write(options, lambda: trace, trace.plot_timeline)
    if options.arguments:  # after a description there are only options
        options.parser.parse_args([*options.arguments, str(options.file)], options)
    described = read_description(options.file)
    step = described.simulate()
    ran = described.rehearse() if described.needs_ranks else None
    tell(
        options,
        lambda: _report(described, step, ran),
        lambda: _numbers(described, step, ran),
    )
    if ran is None:
        return _write(options, step.trace, step.plot)
    rehearsed: Trace = ran
    return _write(options, lambda: rehearsed, rehearsed.plot_timeline)


def _write(
    options: argparse.Namespace, make_trace: Callable[[], Trace], plot: Callable[[], Axes]
) -> int:
    """Saves and draws the simulated run, if the user asked for this."""
    if options.save is not None:
        save_trace(make_trace(), options.save)
    if options.plot is not None:
        write_picture(plot(), options.plot)
    return 0


def _simulate_script(options: argparse.Namespace) -> Trace:
    from ringsim.simulator.script import simulate_script

    if not options.module and not options.file.is_file():
        raise ArgumentError(
            f"no such script: {str(options.file)!r}. Pass the path of a Python file, or -m MODULE."
        )
    with keep_what_was_recorded(options.save):
        return simulate_script(
            str(options.file),
            options.arguments,
            module=options.module,
            world_size=2 if options.ranks is None else options.ranks,
            link=make_link(
                "--latency-us and --bandwidth-gbps", options.latency_us, options.bandwidth_gbps
            ),
            semantics=options.semantics,
            compute="measured" if options.measure_compute else None,
            limit_s=options.limit,
        )


def _numbers(described: Description, step: ScheduleRun, trace: Trace | None) -> dict[str, object]:
    numbers: dict[str, object] = {
        "schedule": step.name,
        "num_ranks": step.num_ranks,
        "num_microbatches": step.num_microbatches,
        "semantics": described.semantics,
        "size_bytes": described.size_bytes,
        "step_s": float(step.makespan),
        "bubble": step.bubble,
    }
    if trace is not None:
        numbers["undisturbed_s"] = numbers["step_s"]
        numbers["undisturbed_bubble"] = numbers["bubble"]
        numbers["step_s"] = trace.metadata["end_ns"] * 1e-9
        numbers["bubble"] = trace.bubble().of_total
    return numbers


def _describe_topology(topology: Network) -> str:
    if isinstance(topology, Hosts):
        return f"hosts of {count(topology.ranks_per_host, 'rank')}"
    return "full bisection" if isinstance(topology, FullBisection) else "links in a ring"


def _report(described: Description, step: ScheduleRun, ran: Trace | None) -> str:
    """Returns a few lines about the step, including a comparison with its closed form.

    If ranks ran the step, the lines compare it with the step without shared links and jitter
    instead.
    """
    more, rows = "", {"step": _say(step.makespan)}
    if ran is None:
        idle, busy = float(step.idle.sum()), float(step.busy.sum())
        of_step, of_work = step.bubble, idle / busy if busy else 0.0
        rows["closed form"] = _formula(described, step)
    else:
        bubble, alone = ran.bubble(), "without shared links"
        of_step, of_work = bubble.of_total, bubble.of_ideal
        if described.topology is not None:
            more = f", {_describe_topology(described.topology)}"
        if described.jitter:
            more += ", jitter"
            alone += " and jitter"
        rows = {
            "step": _say(ran.metadata["end_ns"] * 1e-9),
            "undisturbed": f"{_say(step.makespan)} {alone}",
        }
    rows["bubble"] = f"{of_step:.1%} of the step, {of_work:.1%} of the work"
    rows["activations"] = _live(described)
    if ran is None:
        rows |= _describe_path(step)
    title = (
        f"{step.name} on {count(step.num_ranks, 'rank')}, "
        f"{count(step.num_microbatches, 'microbatch')} (simulated, {described.semantics}, "
        f"{bytes_text(described.size_bytes)} per message{more})"
    )
    return "\n".join([title, *(f"  {name:<15}{text}" for name, text in rows.items())])


def _describe_path(step: ScheduleRun) -> dict[str, str]:
    """Returns the critical path's time shares, and the costs worth improving."""
    path = step.critical_path
    hops = ", ".join(f"{reason} {number:,}" for reason, number in path.by_reason.items())
    found = {
        "critical path": f"{_say(path.computing)} computing, {_say(path.travelling)} on links; "
        f"hops: {hops}"
    }
    levers = [
        f"{each.what} {each.gain / float(step.makespan):.1%}"
        for each in step.sensitivity(0.1, most=6).levers
        if each.gain > 0
    ][:3]
    if levers:
        found["10 % faster"] = f"shortens the step by: {', '.join(levers)}"
    return found


def _formula(described: Description, step: ScheduleRun) -> str:
    """Returns this step's length according to its closed form.

    If there is no closed form, returns the time of the step with instant messages.
    """
    if step.closed_form is not None:
        return _say(step.closed_form)
    shape = described.schedule
    if isinstance(shape, Schedule):
        return "none for a custom schedule"
    if not described.stages_differ:
        try:
            due = _say(makespan(shape, described.costs))
            return f"none with these messages; {due} with instant messages"
        except ScheduleError as error:
            return f"none: {error}"
    forward, backward = (
        [
            float(described.costs.get_duration(Action(stage, kind, 0)))
            for stage in range(shape.num_stages)
        ]
        for kind in "FB"
    )
    if shape.name in ("gpipe", "afab"):
        due = _say(gpipe_makespan(shape.num_microbatches, forward, backward))
        return f"none with these messages; {due} with instant messages"
    if shape.name == "1f1b":
        least = one_f_one_b_bound(shape.num_microbatches, forward, backward)
        return f"none for stages that differ; at least {_say(least)}"
    return "none for stages that differ"


def _live(described: Description) -> str:
    """Returns the number of activations that are live at the same time.

    For a named schedule, the number comes from a formula; for other schedules, from counting.
    """
    shape = described.schedule
    try:
        peaks = evaluate(shape).peak_live if isinstance(shape, Schedule) else peak_live(shape)
    except ScheduleError as error:
        return f"no formula: {error}"
    most, least = max(peaks), min(peaks)
    if most == least:
        return f"{most:,} live at the same time on every rank"
    return (
        f"{most:,} live at the same time on rank {peaks.index(most)}, {least:,} on rank "
        f"{peaks.index(least)}"
    )


def _say(time_s: SupportsFloat) -> str:
    time_ns = float(time_s) * 1e9
    factor, unit = time_unit(time_ns)
    return f"{time_ns / factor:,.6g} {unit}"
