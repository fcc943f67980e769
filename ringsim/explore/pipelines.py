"""Explorers of pipelines: two schedules side by side, and the ring that generates tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock, ScheduleError
from ringsim.explore.explorer import Choice, Explorer, Frame, say_stuck
from ringsim.link import Link
from ringsim.ring.ring import current_ring
from ringsim.schedules import SCHEDULE_NAMES, find_num_chunks
from ringsim.schedules.costs import Costs
from ringsim.schedules.generation import plan_jobs, plan_steps, steady_use, time_generation
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.steps import measure_stage_use
from ringsim.traces.value import Trace, count

__all__ = ["generation", "schedule"]

_NONE: Final = "none"
_MS: Final = 1e-3


def schedule() -> Explorer:
    """Explores schedules of pipelines, two side by side on one axis; forwards take 1 ms.

    Returns:
        The explorer.

    Example:
        >>> print(schedule().frame(left="1f1b", right="none", ranks=2, microbatches=4).text)
    """
    names = [name for name in SCHEDULE_NAMES if name != "afab"]  # another name of gpipe
    choices = (
        Choice("left", "A", "gpipe", names, ("gpipe", "1f1b", "interleaved_1f1b")),
        Choice("right", "B", "1f1b", [_NONE, *names], ("1f1b", "zb_h1", "zb_v")),
        Choice("ranks", "ranks", 4, range(2, 17), (2, 4, 8)),
        Choice("microbatches", "microbatches", 8, range(1, 33), (4, 8, 16)),
        Choice("backward", "backward", 2.0, (1.0, 1.5, 2.0, 2.5, 3.0), unit="ms"),
        Choice("latency", "latency", 0.0, (0.0, 0.1, 0.25, 0.5, 1.0, 2.0), (0.0, 0.5), "ms"),
        Choice("last", "last stage", 1.0, (0.5, 1.0, 1.5, 2.0, 3.0), (1.0, 2.0), "x"),
    )
    return Explorer("schedules of pipelines", _schedules, choices)


def _schedules(left: str, right: str, ranks: int, microbatches: int, backward: float, latency: float, last: float) -> Frame:
    lines = ["                       step   closed form   bubble   closed form   activations held, by rank"]
    traces = []
    for letter, name in zip("AB", (left, right), strict=True):
        if name == _NONE:
            continue
        words = f"{letter} {name}"
        try:
            line, trace = _one_schedule(name, ranks, microbatches, backward, latency, last)
        except ScheduleError as error:
            lines.append(f"{words:<18} {error}")
            continue
        lines.append(f"{words:<18} {line}")
        traces.append(trace)
    return Frame("\n".join(lines), tuple(traces))


@lru_cache(256)
def _one_schedule(name: str, ranks: int, microbatches: int, backward: float, latency: float, last: float) -> tuple[str, Trace]:
    stages = ranks * find_num_chunks(name)
    scale = [_MS * ranks / stages] * (stages - 1) + [_MS * ranks / stages * last]  # a model is cut into more stages, not made larger
    halves = tuple(backward / 2 * one for one in scale)
    costs = Costs(forward=tuple(scale), input=halves, weight=halves, latency=latency * _MS)
    if last == 1.0:  # closed forms are for stages that are alike
        costs = Costs(forward=scale[0], input=halves[0], weight=halves[0], latency=latency * _MS)
    run = simulate_schedule(name, costs, num_ranks=ranks, num_microbatches=microbatches, semantics="buffered")
    trace = run.trace()
    bubble, peaks = trace.bubble(), trace.peak_activations()
    step = "none" if run.closed_form is None else f"{1e3 * float(run.closed_form):.4g} ms"
    share = "none" if latency or last != 1.0 or bubble.closed_form is None else f"{100 * bubble.closed_form.of_total:.1f} %"
    held = " ".join(map(str, peaks.peaks))
    line = f"{1e3 * run.makespan:>5.4g} ms   {step:>11}   {100 * run.bubble:>4.1f} %   {share:>11}   {held}"
    return line, trace


def generation() -> Explorer:
    """Explores the ring that generates tokens: how many batches keep its stages busy, and how many jam it.

    Returns:
        The explorer.

    Example:
        >>> print(generation().frame(batches=4).text)
        >>> print(generation().frame(batches=5).text.splitlines()[0])
    """
    kinds = (_ONE_BY_ONE, "both posted together")
    choices = (
        Choice("stages", "stages", 4, range(1, 9), (2, 4, 6)),
        Choice("batches", "batches", 2, range(1, 17), range(1, 13)),
        Choice("messages", "messages", _ONE_BY_ONE, kinds, kinds),
        Choice("tokens", "tokens", 8, range(3, 25)),
        Choice("prefill", "prefill", 4.0, (1.0, 2.0, 4.0, 8.0, 16.0), unit="ms"),
        Choice("latency", "latency", 0.0, (0.0, 0.1, 0.25, 0.5, 1.0), (0.0, 0.25), "ms"),
    )
    return Explorer("the ring that generates tokens", _tokens, choices)


_ONE_BY_ONE: Final = "one after the other"


def _tokens(stages: int, batches: int, messages: str, tokens: int, prefill: float, latency: float) -> Frame:
    together = messages != _ONE_BY_ONE
    share = f"{100 * float(steady_use(stages, batches, together)):.0f} %"
    args = (batches, tokens, together, prefill * _MS)
    try:
        trace = simulate(_generate, world_size=stages, args=args, link=Link(alpha_s=latency * _MS, beta_s_per_byte=0.0))
    except Deadlock as error:
        return Frame(f"It never ends; by the closed form a stage works {share} of the time.\n{say_stuck(error)}", (error.trace,))
    played = time_generation(stages, batches, 1, tokens, prefill, 1.0, async_comm=together, latency=latency)
    busy = sum(row.decode_use for row in measure_stage_use(trace)) / stages
    lines = [
        f"                  in all   {count(batches * tokens, 'token')}",
        f"simulated         {1e3 * trace.makespan_s:>6.4g} ms   a stage works {100 * busy:.0f} % of the time while decoding",
        f"played, by plan   {max(times[-1][1] for times in played.times):>6.4g} ms   closed form, without latency: {share}",
    ]
    return Frame("\n".join(lines), (trace,))


def _generate(batches: int, tokens: int, together: bool, prefill_s: float) -> None:
    ring = current_ring()
    output, space = torch.zeros(1), torch.zeros(1)
    for step in plan_steps(ring.rank, ring.world_size, plan_jobs(batches, batches, tokens), tokens):
        posts: list[Callable[[], Any]] = []
        if step.send is not None:
            posts.append(lambda: dist.isend(output, ring.succ, group=ring.succ_group))
        if step.receive is not None:
            posts.append(lambda: dist.irecv(space, ring.pred, group=ring.pred_group))
        if together:
            for work in [post() for post in posts]:
                work.wait()
        else:
            for post in posts if ring.rank else reversed(posts):  # stage 0 receives first
                post().wait()
        if step.compute is not None:
            with ringsim.span(step.compute.name, stage=ring.rank, microbatch=step.compute.batch):
                ringsim.compute(_MS if step.compute.token else prefill_s)
