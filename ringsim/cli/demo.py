"""``ringsim demo`` and ``ringsim generate``: a small transformer learns on real ranks, and generates tokens on a ring of stages."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ringsim
from ringsim.cli.verb import Verbs, add_verb, write_picture, write_pictures
from ringsim.errors import ArgumentError, RingError
from ringsim.schedules.generation import can_finish, check_can_finish, count_messages, steady_use, time_generation
from ringsim.traces.steps import StageUse, measure_stage_use
from ringsim.traces.value import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ringsim.traces.value import Trace

CHECKED_STEPS, TOLERANCE = 3, 1e-3  # this many steps are repeated in one process; until then rounding errors stay small


def add_demo(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    help_text = "train a small transformer on Shakespeare's sonnets, cut into stages on real ranks; record it and draw it"
    parser = add_verb(verbs, "demo", help_text, "ringsim demo -n 4 -o demo", run_demo)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks, one stage each (default: 4)")
    parser.add_argument("-o", "--out", type=Path, default=Path("demo"), metavar="DIR", help="where trace and pictures go (default: demo)")


def run_demo(options: argparse.Namespace) -> int:
    """Trains, checks the losses against one process, and draws; returns the exit code."""
    import torch

    from ringsim.cli import demo_programs
    from ringsim.pipeline import compare_losses

    print(f"starting {count(options.ranks, 'rank')} (Gloo, joined in a ring), a stage of the transformer each ...", flush=True)
    trace = ringsim.trace(demo_programs.worker, world_size=options.ranks)
    losses, lines = trace.results[0]
    torch.set_num_threads(1)  # as on the ranks
    expected = demo_programs.expected_losses(CHECKED_STEPS)
    if compare_losses(losses[:CHECKED_STEPS], expected, tolerance=TOLERANCE).first_step is not None:
        raise RingError(
            f"the ring must learn what one process learns, losses {expected}, got {losses[:CHECKED_STEPS]}. Please report this."
        )
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}; the first {CHECKED_STEPS} steps lose as much in one process. It writes now:\n")
    print("\n".join(f"    {line}" for line in lines))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "run.ringtrace"
    trace.save(file)
    print(f"\n{trace.summary()}\n")
    for written in (file, *write_pictures(trace, options.out)):
        print(f"wrote {written}")
    print(f"\nlook again with: ringsim show {file}")
    return 0


def add_generate(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    help_text = "generate tokens on a ring of stages: prefill against decode, and the effect of inner iterations"
    parser = add_verb(verbs, "generate", help_text, "ringsim generate -n 4 --inner 4 --tokens 8 -o generation", run_generate)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks, one stage each (default: 4)")
    parser.add_argument("--inner", type=int, metavar="T", help="batches on their way at a time (default: as many as ranks)")
    parser.add_argument("--async", dest="async_comm", action="store_true", help="post the send and the receive of a step together")
    parser.add_argument("--tokens", type=int, default=8, help="tokens for each prompt, 3 or more (default: 8)")
    parser.add_argument("--job-ms", type=float, default=10.0, metavar="MS", help="how long a stage takes for a token (default: 10)")
    parser.add_argument("--compare", action="store_true", help="measure other numbers of inner iterations, too")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("generation"), metavar="DIR", help="where trace and pictures go (default: generation)"
    )


def run_generate(options: argparse.Namespace) -> int:
    """Generates, compares with one process, and draws; returns the exit code."""
    from ringsim.cli import demo_programs
    from ringsim.plot.charts import MeasuredUse, plot_inner_iterations

    num_stages = options.ranks
    turns = num_stages if options.inner is None else options.inner
    if options.tokens < 3 or num_stages < 2:
        raise ArgumentError(
            f"--tokens must be 3 or more and --ranks 2 or more, got {options.tokens} and {num_stages}. "
            "With fewer there is nothing to compare."
        )
    check_can_finish(num_stages, turns, options.tokens, options.async_comm)  # before any rank is started

    print(f"starting {count(num_stages, 'rank')}, a stage each; {count(turns, 'inner iteration')} ...", flush=True)
    trace = _generate(options, turns, options.async_comm)
    alone = ringsim.trace(demo_programs.generation_worker, world_size=1, args=(num_stages, options.tokens, turns, False, 0.0, 0.0))
    if trace.results != alone.results * num_stages:
        raise RingError("the ring must generate what one process generates, got other tokens. Please report this.")
    use = measure_stage_use(trace)
    print(_report(options, turns, trace, use))

    measured = [MeasuredUse(turns, options.async_comm, _mean_use(use))]
    for other_turns, async_comm in _others(num_stages, turns, options.async_comm) if options.compare else []:
        other = measure_stage_use(_generate(options, other_turns, async_comm))
        measured.append(MeasuredUse(other_turns, async_comm, _mean_use(other)))
        print(_line(num_stages, *measured[-1]), flush=True)

    file = options.out / "run.ringtrace"
    options.out.mkdir(parents=True, exist_ok=True)
    trace.save(file)
    figure = cast("Figure", plot_inner_iterations(num_stages, measured, metadata=trace.metadata).figure)
    for written in (file, *write_pictures(trace, options.out), write_picture(figure, options.out / "inner_iterations.png")):
        print(f"wrote {written}")
    return 0


def _generate(options: argparse.Namespace, turns: int, async_comm: bool) -> Trace:
    """Runs the demonstration; reading prompts takes a stage twice as long as decoding."""
    from ringsim.cli import demo_programs

    decode_s = options.job_ms / 1000
    return ringsim.trace(
        demo_programs.generation_worker,
        world_size=options.ranks,
        args=(options.ranks, options.tokens, turns, async_comm, 2 * decode_s, decode_s),
    )


def _others(num_stages: int, turns: int, async_comm: bool) -> list[tuple[int, bool]]:
    """Returns the other settings that can finish, up to one turn more than there are stages: more would take long."""
    settings = [
        (number, posted) for posted in (False, True) for number in range(1, num_stages + 2) if can_finish(num_stages, number, posted)
    ]
    return [setting for setting in settings if setting != (turns, async_comm)]


def _report(options: argparse.Namespace, turns: int, trace: Trace, use: list[StageUse]) -> str:
    """Returns what was measured, next to what the plan takes with jobs of that length."""
    num_stages, num_tokens = options.ranks, options.tokens
    prefill, decode = sum(stage.prefill_s for stage in use) / num_stages, sum(stage.decode_s for stage in use) / num_stages
    run = time_generation(num_stages, turns, 1, num_tokens, prefill, decode, async_comm=options.async_comm)
    due = max(times[-1][1] for times in run.times)
    took = use[0].idle_s + turns * (use[0].prefill_s + (num_tokens - 1) * use[0].decode_s)
    rows = [f"stage {stage:>3}  {1e3 * row.prefill_s:>10.1f}  {1e3 * row.decode_s:>9.1f}  {1e3 * row.idle_s:>7.0f}  {row.decode_use:>12.0%}"
            for stage, row in enumerate(use)]  # fmt: skip
    tokens = sum(len(row) for row in trace.results[0])
    return "\n".join(
        [
            "",
            "           prefill ms  decode ms  idle ms  works, decoding",
            *rows,
            "",
            f"first to last job: {took:.3f} s; with these jobs and messages that take no time: {due:.3f} s",
            f"{tokens} tokens, {tokens / took:.0f} a second; {count_messages(num_stages, turns, num_tokens)} messages of states and tokens",
            _line(num_stages, turns, options.async_comm, _mean_use(use)),
        ]
    )


def _line(num_stages: int, turns: int, async_comm: bool, use: float) -> str:
    kind = "asynchronous" if async_comm else "synchronous"
    due = float(steady_use(num_stages, turns, async_comm))
    return f"{kind}, {count(turns, 'inner iteration')}: a stage works {use:.0%} of the time while decoding; at most {due:.0%}"


def _mean_use(use: list[StageUse]) -> float:
    return sum(stage.decode_use for stage in use) / len(use)
