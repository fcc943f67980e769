"""Explorers: sliders for simulated runs, in a notebook or on a web page.

::

    explore.schedule()     compare two pipeline schedules: ranks, microbatches, unequal stages,
                           latency, memory
    explore.ring()         send a token, a shift or an all-reduce around a ring, and compare the
                           time with the closed form
    explore.bandwidth()    send messages of all sizes over two links
    explore.generation()   find how many batches keep a generation ring busy, and how many block it
    explore.deadlock()     choose which ranks send first, and see which orders deadlock

Put an explorer on the last line of a cell. ``to_html`` writes the explorer to a page that works
without a kernel, and ``frame`` returns the result for one choice of settings.

Example:
    >>> from ringsim import explore
    >>> explore.deadlock().frame(rank_2="receives").text
    'The run ends after 51.6 µs. The rule predicts no deadlock: one rank must differ from the rest.'
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock, ScheduleError
from ringsim.faults import Slow
from ringsim.link import Link
from ringsim.ring.ring import current_ring
from ringsim.schedules import SCHEDULE_NAMES, find_num_chunks
from ringsim.schedules.costs import Costs
from ringsim.schedules.generation import plan_jobs, plan_steps, steady_use, time_generation
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.steps import measure_stage_use
from ringsim.traces.units import bytes_text, count, time_text
from ringsim.traces.value import Trace
from ringsim.view.explorer import Choice, Explorer, Frame, say_stuck

__all__ = ["bandwidth", "deadlock", "generation", "ring", "schedule"]

_NONE: Final = "none"
_ONE_BY_ONE: Final = "one after the other"
_ALL_REDUCE: Final = "all-reduce"
_MS: Final = 1e-3
_US: Final = 1e-6
_LATENCIES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_BANDWIDTHS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0)
_EAGER_BYTES: Final = 65536
_ITEM_BYTES: Final = 8  # a float64


def schedule() -> Explorer:
    """Explores two pipeline schedules side by side on a shared axis; a forward pass takes 1 ms.

    Returns:
        The explorer.

    Example:
        >>> print(
        ...     schedule().frame(left="1f1b", right="none", ranks=2, microbatches=4).text
        ... )  # doctest: +NORMALIZE_WHITESPACE
                step    closed form   bubble   closed form   activations held, by rank
        A 1f1b  15 ms         15 ms   20.0 %        20.0 %   2 1
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
    )
    return Explorer("pipeline schedules", _schedules, choices)


def _schedules(
    left: str,
    right: str,
    ranks: int,
    microbatches: int,
    backward: float,
    latency: float,
    last: float,
) -> Frame:
    lines = [
        "                       step   closed form   bubble   closed form   "
        "activations held, by rank"
    ]
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
def _one_schedule(
    name: str, ranks: int, microbatches: int, backward: float, latency: float, last: float
) -> tuple[str, Trace]:
    stages = ranks * find_num_chunks(name)
    # the same model, divided into more stages
    one_s = _MS * ranks / stages
    forward: Any = (*[one_s] * (stages - 1), one_s * last)
    half: Any = tuple(backward / 2 * each_s for each_s in forward)
    if last == 1.0:  # closed forms are for equal stages
        forward, half = forward[0], half[0]
    costs = Costs(forward=forward, input=half, weight=half, latency=latency * _MS)
    run = simulate_schedule(
        name, costs, num_ranks=ranks, num_microbatches=microbatches, semantics="buffered"
    )
    trace = run.trace()
    bubble, peaks = trace.bubble(), trace.peak_activations()
    step = "none" if run.closed_form is None else f"{1e3 * float(run.closed_form):.4g} ms"
    share = "none"
    if not latency and last == 1.0 and bubble.closed_form is not None:
        share = f"{100 * bubble.closed_form.of_total:.1f} %"
    held = " ".join(map(str, peaks.peaks))
    line = (
        f"{1e3 * run.makespan:>5.4g} ms   {step:>11}   {100 * run.bubble:>4.1f} %   {share:>11}   "
        f"{held}"
    )
    return line, trace


def ring() -> Explorer:
    """Explores how a token, a shift or an all-reduce travels around a ring of simulated ranks.

    Returns:
        The explorer.

    Example:
        >>> print(ring().frame(what="token", ranks=8).text)
        simulated    212 µs
        closed form  212 µs   ranks (computing + latency + size / bandwidth)
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
    link, size_bytes, compute_s = _link(latency, bandwidth), 1024 * size, round(_US * computing, 6)
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
    closed = time_text(1e9 * closed_s)
    known = f"{closed}   {words}"
    if slow > 1:
        known = f"none for a slow rank; {closed} for equal ranks"
    text = f"simulated    {time_text(1e9 * trace.makespan_s)}\nclosed form  {known}"
    return Frame(text, (trace,))


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
        >>> print(bandwidth().frame(latency_b=10.0, bandwidth_b=10.0).text.splitlines()[-1].split())
        ['half', 'the', 'bandwidth', 'at', '97.7', 'KiB', '97.7', 'KiB']
    """
    choices = (
        Choice("latency_a", "A: latency", 10.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_a", "A: bandwidth", 10.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
        Choice("latency_b", "B: latency", 1.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_b", "B: bandwidth", 2.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
    )
    return Explorer("bandwidth of two links", _two_links, choices, tab="bandwidth")


_SIZES: Final = tuple(8**power for power in range(1, 9))  # bytes, to 16 MiB


def _two_links(latency_a: float, bandwidth_a: float, latency_b: float, bandwidth_b: float) -> Frame:
    sides = [_one_link(latency_a, bandwidth_a), _one_link(latency_b, bandwidth_b)]
    sizes = [
        "",
        "    size",
        *(f"{bytes_text(size):>8}" for size in _SIZES),
        "half the bandwidth at",
    ]
    lines = [
        "   ".join([size, *rows]).rstrip()
        for size, *rows in zip(sizes, *(rows for rows, _ in sides), strict=True)
    ]
    return Frame("\n".join(lines), tuple(trace for _, trace in sides))


@lru_cache(256)
def _one_link(latency: float, bandwidth: float) -> tuple[list[str], Trace]:
    """Returns the rows of a table, and the trace."""
    link = _link(latency, bandwidth)
    trace = simulate(_send_all, world_size=2, link=link)
    events, messages = trace.events, trace.messages
    took_ns = (events.done_ns[messages.recv] - events.post_ns[messages.send]).tolist()
    rows = [f"{f'{latency:g} µs, {bandwidth:g} GB/s':^36}", "simulated   closed form    bandwidth"]
    rows += [
        f"{time_text(ns):>9}   {time_text(1e9 * link.time_s(size)):>11}  {size / ns:>6.3g} GB/s"
        for size, ns in zip(_SIZES, took_ns, strict=True)
    ]
    return [*rows, f"{bytes_text(round(link.n_half_bytes)):<36}"], trace


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
        >>> print(generation().frame(batches=4).text)  # doctest: +NORMALIZE_WHITESPACE
                          in all   32 tokens
        simulated          56 ms   a stage works 85 % of the time while decoding
        planned            56 ms   closed form, without latency: 100 %
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
        return Frame(f"{text}\n{say_stuck(error)}", (error.trace,))
    played = time_generation(
        stages, batches, 1, tokens, prefill, 1.0, async_comm=together, latency=latency
    )
    busy = sum(row.decode_use for row in measure_stage_use(trace)) / stages
    played_ms = max(times[-1][1] for times in played.times)
    lines = [
        f"                  in all   {count(batches * tokens, 'token')}",
        f"simulated         {1e3 * trace.makespan_s:>6.4g} ms   a stage works {100 * busy:.0f} "
        "% of the time while decoding",
        f"planned           {played_ms:>6.4g} ms   closed form, without latency: {share}",
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
    kinds = ("rendezvous", "eager up to 64 KiB")
    choices = (
        *(
            Choice(f"rank_{rank}", f"rank {rank} first", "sends", orders, orders)
            for rank in range(4)
        ),
        Choice("size", "size", 4, (4, 1024), (4, 1024), "KiB"),
        Choice("semantics", "messages", "rendezvous", kinds, kinds),
    )
    return Explorer("order of sends and receives", _in_order, choices)


def _in_order(
    rank_0: str, rank_1: str, rank_2: str, rank_3: str, size: int, semantics: str
) -> Frame:
    orders, size_bytes = [rank_0, rank_1, rank_2, rank_3], 1024 * size
    kind = "rendezvous" if semantics == "rendezvous" else f"buffered({_EAGER_BYTES})"
    eager = semantics != "rendezvous" and size_bytes <= _EAGER_BYTES
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
        return Frame(f"The run never ends. {rule}\n{say_stuck(error)}", (error.trace,))
    return Frame(f"The run ends after {time_text(1e9 * trace.makespan_s)}. {rule}", (trace,))


def _exchange(orders: list[str], size_bytes: int) -> None:
    ring = current_ring()
    mine, space = _payload(size_bytes), _payload(size_bytes)
    ringsim.compute(round(10 * _US * (ring.rank + 1), 6))  # real ranks are never exactly alike
    if orders[ring.rank] == "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)
    dist.recv(space, ring.pred, group=ring.pred_group)
    if orders[ring.rank] != "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)
