"""Explorers: sliders for simulated runs, in a notebook or on a web page.

::

    explore.schedule()     compare two pipeline schedules: ranks, microbatches, unequal stages,
                           latency, memory
    explore.ring()         send a token, a shift or an all-reduce around a ring, and compare the
                           time with the closed form
    explore.bandwidth()    send messages of all sizes over two links
    explore.generation()   find how many batches keep a generation ring busy, and how many block it
    explore.deadlock()     choose which ranks send first, and see which orders deadlock
    explore.scheduler()    be the scheduler: choose which rank goes next, or try every order

Put an explorer on the last line of a cell. ``to_html`` writes the explorer to a page that works
without a kernel, and ``frame`` returns the result for one choice of settings.

Example:
    >>> from ringsim import explore
    >>> explore.deadlock().frame(rank_2="receives").text
    'The run ends after 51.6 µs. The rule predicts no deadlock: one rank must differ from the rest.'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock, check_worker
from ringsim.faults import Slow
from ringsim.link import Link
from ringsim.ring.packing import pack_worker
from ringsim.ring.ring import current_ring
from ringsim.schedules import SCHEDULE_NAMES, find_num_chunks
from ringsim.schedules.costs import Costs
from ringsim.schedules.generation import (
    order_posts,
    plan_jobs,
    plan_steps,
    steady_use,
    time_generation,
)
from ringsim.schedules.programs import SEMANTICS
from ringsim.simulator.api import check_settings, simulate
from ringsim.simulator.schedules import simulate_schedule
from ringsim.simulator.settings import Settings
from ringsim.traces.steps import measure_stage_use
from ringsim.traces.units import bytes_text, count, rate_text, time_text
from ringsim.traces.value import Trace
from ringsim.view.explorer import Choice, Explorer, Frame, say_stuck
from ringsim.view.scheduler import Scheduler

__all__ = ["bandwidth", "deadlock", "generation", "ring", "schedule", "scheduler"]

_NONE = "none"
_ONE_BY_ONE = "one after the other"
_ALL_REDUCE = "all-reduce"
_MS = 1e-3
_US = 1e-6
_LATENCIES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_BANDWIDTHS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0)
_EAGER_BYTES = 65536
_ITEM_BYTES = 8  # a float64
_STEPS = Link(alpha_s=_US, beta_s_per_byte=0.0)  # a message takes one step


def schedule() -> Explorer:
    """Explores two pipeline schedules side by side on a shared axis; a forward pass takes 1 ms.

    Returns:
        The explorer.

    Example:
        >>> print(
        ...     schedule().frame(left="1f1b", right="none", ranks=2, microbatches=4).text
        ... )  # doctest: +NORMALIZE_WHITESPACE
        schedule    step   closed form   bubble   closed form   activations held, by rank
          A 1f1b   15 ms         15 ms   20.0 %        20.0 %                         2 1
    """
    names = [name for name in SCHEDULE_NAMES if name != "afab"]  # another name for gpipe
    choices = (
        Choice("left", "A", "gpipe", names, ("gpipe", "1f1b", "interleaved_1f1b")),
        Choice("right", "B", "1f1b", [_NONE, *names], ("1f1b", "zb_h1", "zb_v")),
        Choice("ranks", "ranks", 4, range(2, 17), (2, 4, 8)),
        Choice("microbatches", "microbatches", 8, range(1, 33), (4, 8, 16)),
        Choice("backward", "backward", 2.0, (1.0, 1.5, 2.0, 2.5, 3.0), unit="ms"),
        Choice("latency", "latency", 0.0, (0.0, 0.1, 0.25, 0.5, 1.0, 2.0), (0.0, 0.5), "ms"),
        Choice("last", "last stage", 1.0, (0.5, 1.0, 1.5, 2.0, 3.0), (1.0, 2.0), "x"),
        Choice("messages", "messages", "buffered", SEMANTICS),
    )
    return Explorer("pipeline schedules", _schedules, choices)


def _schedules(left: str, right: str, **settings: Any) -> Frame:
    held = "activations held, by rank"
    rows: list[tuple[str, ...]] = [
        ("schedule", "step", "closed form", "bubble", "closed form", held)
    ]
    traces = []
    for letter, name in (("A", left), ("B", right)):
        if name != _NONE:
            row, trace = _one_schedule(name, **settings)
            rows.append((f"{letter} {name}", *row))
            traces.append(trace)
    return Frame((), tuple(traces), tuple(rows))


@lru_cache(256)
def _one_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    backward: float,
    latency: float,
    last: float,
    messages: str,
) -> tuple[tuple[str, ...], Trace]:
    stages = ranks * find_num_chunks(name)
    # the same model, divided into more stages
    one_s = _MS * ranks / stages
    forward: Any = (*[one_s] * (stages - 1), one_s * last)
    half: Any = tuple(backward / 2 * each_s for each_s in forward)
    if last == 1.0:  # closed forms are for equal stages
        forward, half = forward[0], half[0]
    costs = Costs(forward=forward, input=half, weight=half, latency=latency * _MS)
    run = simulate_schedule(
        name, costs, num_ranks=ranks, num_microbatches=microbatches, semantics=messages
    )
    trace = run.trace()
    bubble, peaks = trace.bubble(), trace.peak_activations()
    step = "none" if run.closed_form is None else f"{1e3 * float(run.closed_form):.4g} ms"
    share = "none"
    if not latency and last == 1.0 and bubble.closed_form is not None:
        share = f"{100 * bubble.closed_form.of_total:.1f} %"
    held = " ".join(map(str, peaks.peaks))
    return (f"{1e3 * run.makespan:.4g} ms", step, f"{100 * run.bubble:.1f} %", share, held), trace


def ring() -> Explorer:
    """Explores how a token, a shift or an all-reduce travels around a ring of simulated ranks.

    Returns:
        The explorer.

    Example:
        >>> print(ring().frame(what="token", ranks=8).text)
        Closed form: ranks (computing + latency + size / bandwidth).
        pattern   simulated   closed form
          token      212 µs        212 µs
    """
    kinds = ("token", "shift", _ALL_REDUCE)
    choices = (
        Choice("what", "pattern", "token", kinds, kinds),
        Choice("ranks", "ranks", 4, range(2, 17), (2, 4, 8)),
        Choice("size", "size", 64, (1, 4, 16, 64, 256), (4, 64, 256), "KiB"),
        Choice("latency", "latency", 10.0, _LATENCIES, (10.0, 100.0), "µs"),
        Choice("bandwidth", "bandwidth", 10.0, _BANDWIDTHS, (1.0, 10.0), "GB/s"),
        Choice("computing", "computing", 10.0, (0.0, 1.0, 10.0, 50.0, 100.0), unit="µs"),
        Choice("slow", "rank 1 slower", 1, (1, 2, 4, 8), (1, 4), "x"),
    )
    return Explorer("messages around a ring", _go_round, choices)


def _go_round(
    what: str, ranks: int, size: int, latency: float, bandwidth: float, computing: float, slow: int
) -> Frame:
    link, size_bytes, compute_s = _link(latency, bandwidth), 1024 * size, round(_US * computing, 9)
    closed_s, words = (
        compute_s + link.time_s(size_bytes),
        "computing + latency + size / bandwidth",
    )
    if what == "token":
        closed_s, words = ranks * closed_s, f"ranks ({words})"
    elif what == _ALL_REDUCE:
        chunk_bytes = _ITEM_BYTES * (size_bytes // _ITEM_BYTES // ranks)
        closed_s = compute_s + 2 * (ranks - 1) * link.time_s(chunk_bytes)
        words = "computing + 2 (ranks - 1) (latency + size / ranks / bandwidth)"
    inject = [Slow(1, slow)] if slow > 1 else []
    trace = simulate(
        _pass_round, world_size=ranks, args=(what, size_bytes, compute_s), link=link, inject=inject
    )
    closed, rule = time_text(1e9 * closed_s), f"Closed form: {words}."
    if slow > 1:
        rule = "The closed form is for equal ranks. No closed form is known for a slow rank."
    row = (what, time_text(1e9 * trace.makespan_s), closed)
    return Frame((rule,), (trace,), (("pattern", "simulated", "closed form"), row))


def _pass_round(what: str, size_bytes: int, compute_s: float) -> None:
    ring = current_ring()
    chunks = ring.world_size if what == _ALL_REDUCE else 1
    mine, space = _payload(size_bytes // chunks), _payload(size_bytes // chunks)
    if what == "token":
        if ring.rank > 0:
            dist.recv(space, ring.pred, group=ring.pred_group)
        ringsim.compute(compute_s)
        dist.send(mine, ring.succ, group=ring.succ_group)
        if ring.rank == 0:
            dist.recv(space, ring.pred, group=ring.pred_group)
        return
    ringsim.compute(compute_s)
    for _ in range(2 * (ring.world_size - 1) if what == _ALL_REDUCE else 1):
        sending: Any = dist.isend(mine, ring.succ, group=ring.succ_group)
        dist.recv(space, ring.pred, group=ring.pred_group)
        sending.wait()


def _payload(size_bytes: int) -> torch.Tensor:
    """Returns a tensor with few elements.

    torch copies larger tensors with threads, which would make a frame too slow.
    """
    return torch.zeros(size_bytes // _ITEM_BYTES, dtype=torch.float64)


def _link(latency: float, bandwidth: float) -> Link:
    return Link(alpha_s=_US * latency, beta_s_per_byte=1e-9 / bandwidth)


def bandwidth() -> Explorer:
    """Explores how long messages of any size take on two links.

    Returns:
        The explorer.

    Example:
        >>> print(bandwidth().frame().sentences[0])
        A (10 µs, 10 GB/s) reaches half of its bandwidth with 97.7 KiB.
    """
    choices = (
        Choice("latency_a", "A: latency", 10.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_a", "A: bandwidth", 10.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
        Choice("latency_b", "B: latency", 1.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_b", "B: bandwidth", 2.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
    )
    return Explorer("bandwidth of two links", _two_links, choices, draws=True)


_SIZES = tuple(8**power for power in range(1, 9))  # bytes, to 16 MiB


def _two_links(latency_a: float, bandwidth_a: float, latency_b: float, bandwidth_b: float) -> Frame:
    columns = [("size", *map(bytes_text, _SIZES))]
    sentences, traces = [], []
    for name, latency, bandwidth in (("A", latency_a, bandwidth_a), ("B", latency_b, bandwidth_b)):
        link = _link(latency, bandwidth)
        trace, times_ns = _one_link(link)
        closed = [time_text(1e9 * link.time_s(size)) for size in _SIZES]
        rates = [rate_text(size / ns) for size, ns in zip(_SIZES, times_ns, strict=True)]
        columns += [
            (f"{name}: simulated", *map(time_text, times_ns)),
            (f"{name}: closed form", *closed),
            (f"{name}: bandwidth", *rates),
        ]
        sentences.append(
            f"{name} ({latency:g} µs, {bandwidth:g} GB/s) reaches half of its bandwidth with "
            f"{bytes_text(round(link.n_half_bytes))}."
        )
        traces.append(trace)
    return Frame(tuple(sentences), tuple(traces), tuple(zip(*columns, strict=True)))


@lru_cache(256)
def _one_link(link: Link) -> tuple[Trace, list[int]]:
    """Returns the trace, and the time that each size took, in ns."""
    trace = simulate(_send_all, world_size=2, link=link)
    events, messages = trace.events, trace.messages
    return trace, (events.done_ns[messages.recv] - events.post_ns[messages.send]).tolist()


def _send_all() -> None:
    rank = dist.get_rank()
    for size in _SIZES:
        payload = _payload(size)
        if rank == 0:
            dist.send(payload, 1)
        else:
            dist.recv(payload, 0)


def generation() -> Explorer:
    """Explores how many batches keep the stages of a generation ring busy, and how many block them.

    Returns:
        The explorer.

    Example:
        >>> print(generation().frame(batches=4).text)
        The planned share is the closed form, without latency.
              run   32 tokens   a stage works, while decoding
        simulated       56 ms                            85 %
          planned       56 ms                           100 %
        >>> print(generation().frame(batches=5).text)
        The run never ends. According to the closed form, a stage works 0 % of the time.
        Ranks 0, 1, 2, 3 wait for each other forever.
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
    return Explorer("token generation on a ring", _tokens, choices)


def _tokens(
    stages: int, batches: int, messages: str, tokens: int, prefill: float, latency: float
) -> Frame:
    together = messages != _ONE_BY_ONE
    share = f"{100 * float(steady_use(stages, batches, together)):.0f} %"
    args = (batches, tokens, together, prefill * _MS)
    link = Link(alpha_s=latency * _MS, beta_s_per_byte=0.0)
    try:
        trace = simulate(_generate, world_size=stages, args=args, link=link)
    except Deadlock as error:
        text = (
            f"The run never ends. According to the closed form, a stage works {share} of the time."
        )
        return Frame((text, say_stuck(error)), (error.trace,))
    played = time_generation(
        stages, batches, 1, tokens, prefill, 1.0, async_comm=together, latency=latency
    )
    busy = sum(row.decode_use for row in measure_stage_use(trace)) / stages
    played_ms = max(times[-1][1] for times in played.times)
    rows = (
        ("run", count(batches * tokens, "token"), "a stage works, while decoding"),
        ("simulated", f"{1e3 * trace.makespan_s:.4g} ms", f"{100 * busy:.0f} %"),
        ("planned", f"{played_ms:.4g} ms", share),
    )
    sentence = "The planned share is the closed form, without latency."
    return Frame((sentence,), (trace,), rows)


def _generate(batches: int, tokens: int, together: bool, prefill_s: float) -> None:
    ring = current_ring()
    output, space = torch.zeros(1), torch.zeros(1)
    for step in plan_steps(ring.rank, ring.world_size, plan_jobs(batches, batches, tokens), tokens):
        for posts in order_posts(step, ring.rank, together):
            works: list[Any] = [
                dist.isend(output, ring.succ, group=ring.succ_group)
                if sends
                else dist.irecv(space, ring.pred, group=ring.pred_group)
                for sends in posts
            ]
            for work in works:
                work.wait()
        if step.compute is not None:
            with ringsim.span(step.compute.name, stage=ring.rank, microbatch=step.compute.batch):
                ringsim.compute(_MS if step.compute.token else prefill_s)


def deadlock() -> Explorer:
    """Explores how the order of sends and receives leads to a deadlock.

    Each of four ranks sends to the next rank and receives from the previous one, in an order that
    you choose.

    Returns:
        The explorer.

    Example:
        >>> print(deadlock().frame().text)
        The run never ends. The rule predicts a deadlock: one rank must differ from the rest.
        Ranks 0, 1, 2, 3 wait for each other forever.
    """
    orders = ("sends", "receives")
    kinds = ("rendezvous", "eager up to 64 KiB", "grouped")
    choices = (
        *(
            Choice(f"rank_{rank}", f"rank {rank} first", "sends", orders, orders)
            for rank in range(4)
        ),
        Choice("size", "size", 4, (4, 1024), (4, 1024), "KiB"),
        Choice("semantics", "messages", "rendezvous", kinds, kinds[:2]),
    )
    return Explorer("order of sends and receives", _in_order, choices)


def _in_order(
    rank_0: str, rank_1: str, rank_2: str, rank_3: str, size: int, semantics: str
) -> Frame:
    orders, size_bytes = [rank_0, rank_1, rank_2, rank_3], 1024 * size
    kind = f"buffered({_EAGER_BYTES})" if semantics.startswith("eager") else semantics
    eager = kind != semantics and size_bytes <= _EAGER_BYTES
    reason = "one rank must differ from the rest."
    if set(orders) == {"receives"}:
        reason = "all ranks wait for a message, but no rank has sent one."
    elif eager:
        reason = "a message leaves before its receiver asks for it."
    ends = len(set(orders)) > 1 or (orders[0] == "sends" and eager)
    rule = f"The rule predicts {'no' if ends else 'a'} deadlock: {reason}"
    try:
        trace = simulate(
            _exchange,
            world_size=len(orders),
            args=(orders, size_bytes),
            link=_link(5.0, 10.0),
            semantics=kind,
        )
    except Deadlock as error:
        return Frame((f"The run never ends. {rule}", say_stuck(error)), (error.trace,))
    return Frame((f"The run ends after {time_text(1e9 * trace.makespan_s)}. {rule}",), (trace,))


def _exchange(orders: list[str], size_bytes: int) -> None:
    ring = current_ring()
    mine, space = _payload(size_bytes), _payload(size_bytes)
    ringsim.compute(round(10 * _US * (ring.rank + 1), 6))  # real ranks are never exactly alike
    if orders[ring.rank] == "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)
    dist.recv(space, ring.pred, group=ring.pred_group)
    if orders[ring.rank] != "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)


def scheduler(
    worker: Callable[..., Any],
    *,
    world_size: int = 3,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    semantics: str = "rendezvous",
) -> Scheduler:
    """Lets you choose which simulated rank goes next.

    Each rank halts before it posts an operation, and also before it asks with ``is_completed``
    whether an operation is done. You choose one of the halted ranks with ``step``. It posts its
    operation, and then all ranks run on to their next halt, wait or end. Time limits of operations
    have no effect.

    Args:
        worker: the function to run, as for ``ringsim.simulate``.
        world_size: the number of ranks.
        args: the worker's positional arguments; each rank gets a copy.
        kwargs: the worker's keyword arguments; each rank gets a copy.
        semantics: the condition under which a message leaves, as for ``ringsim.simulate``.

    Returns:
        The scheduler, before the first choice. On the last line of a cell, it shows what each rank
        does; its method ``play`` shows buttons.

    Raises:
        ArgumentError: an argument is invalid.

    Example:
        >>> def worker():
        ...     if ringsim.current_ring().rank == 0:
        ...         dist.recv(torch.zeros(1))  # from any rank
        ...         dist.recv(torch.zeros(1), 1)
        ...     else:
        ...         dist.send(torch.zeros(1), 0)
        >>> game = scheduler(worker)
        >>> game.possible
        (0, 1, 2)
        >>> game.step(2, 0, 1, 0).finished
        True
        >>> game.explore().order
        (0, 1, 0, 2)
    """
    settings = Settings(world_size, _STEPS, None, semantics, None, 0, (), True, "threads")
    check_worker(worker)
    return Scheduler(pack_worker(worker, args, kwargs), check_settings(settings, ()))
