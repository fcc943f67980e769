"""``ringsim.bandwidth``, which measures the latency and bandwidth of a ring's links."""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringsim import provenance
from ringsim.environment import find_launched
from ringsim.errors import ArgumentError, Interrupted
from ringsim.launch.api import make_kind
from ringsim.launch.job import RankKind, pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.link import GivenLinks
from ringsim.measuring.plan import (
    LINK,
    STEADY,
    STEADY_S,
    STEPS_MAX,
    STEPS_MIN,
    MakePlan,
    Plan,
    PlannedRow,
    Samples,
    join_samples,
    make_plan,
    make_rows,
    samples_of,
)
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths
from ringsim.traces.units import bytes_text

STEADY_RULE = (
    f"the median's 95 % interval extends at most {STEADY:.1%} to either side of the median, "
    f"after at least {STEPS_MIN} repetitions and {STEADY_S * 1e3:g} ms; at most {STEPS_MAX} "
    "repetitions"
)


def bandwidth(
    world_size: int | None = None,
    sizes: Sequence[int] | None = None,
    pattern: str | Sequence[str] = "pingpong",
    comm_device: str = "cpu",
    *,
    edge: tuple[int, int] | None = None,
    ceilings: bool = True,
    limit_s: float = 60.0,
    timeout_s: float = 30.0,
    link: GivenLinks | None = None,
    topology: Topology | None = None,
) -> Bandwidths:
    """Measures the latency and bandwidth of a ring's links for a range of message sizes.

    ``bandwidth`` also fits a line to the times. In a notebook or a script, it starts ``world_size``
    ranks, as ``ringsim.trace`` does. If you press Ctrl-C, the measurement ends, and the table
    contains the results so far. If the ranks are already running (under torchrun, or in a
    ``ringsim.trace`` worker), call ``bandwidth`` on every rank with the same arguments. It blocks
    until all ranks have measured, and returns the same table on every rank.

    After a warm-up, which does not count, each size is repeated at least 10 times and for at least
    30 ms, until the median is steady: the 95 % interval must extend at most 2.5 % to either side of
    the median. The measurement of a size ends early, but after at least 3 repetitions, if the
    size's share of ``limit_s`` is used up. If no time is left, the remaining, larger sizes are
    skipped, and a note in the table reports this. The edges are measured one after the other,
    except with the patterns "shift" and "all_reduce". The times come from a recording in which each
    step (such as a round trip) is a span.

    With ``link`` or ``topology``, and in a ``ringsim.simulate`` worker, simulated ranks run a
    single step per size on a virtual clock. ``ceilings``, ``limit_s`` and ``timeout_s`` are then
    ignored.

    Args:
        world_size: the number of ranks, or None for 2 new ranks or for all running ranks.
        sizes: the message sizes in bytes, from 1 to 2**30, or None for the powers of two from 8 B
            to 256 MiB.
        pattern: "pingpong" (there and back), "oneway" (a stream), "exchange" (in both directions at
            the same time), "shift" (all ranks send to their successors at the same time),
            "all_reduce", or a list of these.
        comm_device: "cpu" for Gloo, or "gpu" for NCCL, which requires one GPU per rank and is timed
            with CUDA events.
        edge: the only edge of the ring to measure, as (src, dst), or None for all edges.
        ceilings: whether to measure upper bounds as well, by sending the same sizes over a raw TCP
            connection on loopback (Gloo only) and copying them in memory.
        limit_s: the approximate time limit for the whole measurement, in seconds.
        timeout_s: the time limit for each blocked operation, in seconds.
        link: the link on the virtual clock, for all pairs of ranks or for each (src, dst), as in
            ``ringsim.simulate``.
        topology: a topology from ``ringsim.topologies``, instead of ``link``.

    Returns:
        The table of bandwidths. With a single rank and a GPU, the table covers copies within the
        GPU's memory.

    Raises:
        ArgumentError: an argument is invalid, there are fewer GPUs than ranks, or the sizes require
            too much memory.
        RankFailed, Interrupted: as in ``ringsim.trace``, if nothing was measured.

    Example:
        >>> import ringsim
        >>> table = ringsim.bandwidth(sizes=[1024, 65536], edge=(0, 1), ceilings=False, limit_s=20)
        >>> table.fits["pingpong", "gloo", 0, 1].alpha_s > 0
        True
        >>> table = ringsim.bandwidth(
        ...     sizes=[1024, 65536], link=ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-10)
        ... )
        >>> print(f"{table.fits['pingpong', 'link', 0, 1].alpha_s:.3g}")
        1e-05
    """
    simulated = link is not None or topology is not None or get_state().clock is not None
    make = functools.partial(
        make_plan,
        sizes=sizes,
        pattern=pattern,
        backend=LINK if simulated else _backend_of(comm_device),
        edge=edge,
        ceilings=ceilings and not simulated,
        limit_s=limit_s,
        timeout_s=timeout_s,
    )
    if simulated:
        from ringsim.measuring.running_ranks import measure_simulated  # needs torch

        return measure_simulated(world_size, comm_device, link, topology, make)
    return _measure_links(world_size, comm_device, timeout_s, make)


def _backend_of(comm_device: str) -> str:
    return "nccl" if comm_device == "gpu" else "gloo"


def _measure_links(
    world_size: int | None,
    comm_device: str,
    timeout_s: float,
    make: MakePlan,
) -> Bandwidths:
    """Measures links between ranks that are already running, or between new ranks."""
    load = _load()
    notes: list[str] = []
    if _ranks_run_already():
        from ringsim.measuring.running_ranks import measure_here  # needs torch

        ring, plan, results = measure_here(world_size, comm_device, make)
        ranks, samples = list(ring.ranks), join_samples([result["times_ns"] for result in results])
    else:
        kind = make_kind(2 if world_size is None else world_size, comm_device, timeout_s, ring=True)
        ranks = list(range(kind.world_size))
        plan, samples, results, notes = _launch(kind, make)
    metadata = {
        "source": "measured",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "backend": _backend_of(comm_device),
        "interface": results[0].get("interface") if results else None,
        "limit_s": plan.limit_s,
        "steady": STEADY_RULE,
        **_gpus(ranks, results),
        "world_size": len(ranks),
        "comm_device": comm_device,
        "load": [load, _load()],
        "interrupted": bool(notes),
        "notes": notes
        + _what_is_missing(plan, samples, results, interrupted=bool(notes))
        + _who_else_ran(load),
    }
    return make_bandwidths(make_rows(samples, ranks), metadata)


def _check_memory(plan: Plan, ranks: int) -> None:
    """Raises ArgumentError unless all ranks' buffers fit into half of this machine's memory."""
    largest = max(block.size_bytes for block in plan.blocks)
    memory = provenance.machine()["memory_bytes"]
    if memory is not None and 2 * largest * ranks > memory / 2:
        raise ArgumentError(
            f"the measurement needs too much memory: {ranks} ranks with two buffers of "
            f"{bytes_text(largest)} each would fill more than half of the {bytes_text(memory)} on "
            "this machine. Choose smaller sizes or fewer ranks."
        )


def _ranks_run_already() -> bool:
    """Returns whether this process is one of several ranks started by a different program."""
    torch_distributed: Any = sys.modules.get("torch.distributed")
    if (
        torch_distributed
        and torch_distributed.is_available()
        and torch_distributed.is_initialized()
    ):
        return True
    launched = find_launched()
    return launched is not None and launched.world_size > 1


def _launch(kind: RankKind, make: MakePlan) -> tuple[Plan, Samples, list[Any], list[str]]:
    """Starts ranks that measure; returns the results so far if the user presses Ctrl-C."""
    if kind.comm_device == "gpu":
        from ringsim.measuring.worker import check_gpus  # needs torch

        check_gpus(kind.world_size)
    plan = make(range(kind.world_size))
    _check_memory(plan, kind.world_size)
    job = pack_call(_measure, (plan,), {}, seed=0)
    options = RunOptions(
        limit_s=2 * plan.limit_s + 4 * plan.timeout_s,
        doing=lambda directory, _: _doing(directory, len(plan.blocks)),
    )
    try:
        trace = run(job, kind, options)
    except Interrupted as interrupt:
        samples = samples_of(interrupt.trace.events) if interrupt.trace is not None else {}
        if not samples:
            raise
        note = "the run was interrupted; the table contains only the results so far."
        return plan, samples, [], [note]
    return plan, join_samples([result["times_ns"] for result in trace.results]), trace.results, []


def _measure(plan: Plan) -> dict[str, Any]:
    """Runs on each rank, so that only the ranks load torch and the starting process does not."""
    from ringsim.measuring.worker import measure

    return measure(plan)


def _doing(directory: Path, total: int) -> str:
    """Returns a description of the ranks' progress, for the progress line.

    The number of labels shows the progress, because a rank writes a block's label when it begins
    the block.
    """
    known = {
        block
        for names in directory.glob("rank-*.names")
        for line in names.read_text(encoding="utf-8").splitlines()
        if '"label"' in line and line.endswith("}")
        if (block := PlannedRow.from_label(json.loads(line)["name"]))
    }
    if not known:
        return ""
    latest = max(block.size_bytes for block in known)
    return f"{len(known)} of {total} measured, now {bytes_text(latest)}"


def _gpus(ranks: Sequence[int], results: Sequence[Any]) -> dict[str, Any]:
    """Returns the measured GPUs and the paths between them, or an empty dictionary with Gloo."""
    places = [result["place"] for result in results]
    if not places or places[0] is None:
        return {}
    from ringsim.measuring.worker import paths_between

    return {"gpus": [place["name"] for place in places], "paths": paths_between(ranks, places)}


def _what_is_missing(
    plan: Plan, samples: Samples, results: Sequence[Any], *, interrupted: bool
) -> list[str]:
    missing = [block for block in plan.blocks if block not in samples]
    apart = [
        block
        for block in missing
        if block.backend == "tcp"
        and results
        and results[block.src]["host"] != results[block.dst]["host"]
    ]
    notes = []
    if apart:
        src, dst = apart[0].src, apart[0].dst
        notes.append(
            f"TCP over loopback was not measured, because ranks {src} and {dst} are on different "
            "machines."
        )
    late = [block for block in missing if block not in apart]
    if late:
        first = bytes_text(min(block.size_bytes for block in late))
        why = f"the time limit (limit_s={plan.limit_s:g}) was reached"
        if interrupted:
            why = "the run was interrupted"
        notes.append(
            f"{len(late)} of {len(plan.blocks)} measurements are missing, from {first} upwards, "
            f"because {why}."
        )
    return notes


def _who_else_ran(load: float | None) -> list[str]:
    cores = provenance.machine()["cores"]
    if load is None or load < cores:
        return []
    return [
        "other programs were running before the measurement began (the load average was "
        f"{load:g} on {cores} cores). They slow down messages, even small ones."
    ]


def _load() -> float | None:
    """Returns the machine's load average over the last minute, or None if it is unavailable."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None
