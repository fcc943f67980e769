"""Explorers of messages: what goes round a ring, what a link gives, and which orders wait for ever."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import Deadlock
from ringsim.explore.explorer import Choice, Explorer, Frame, say_stuck
from ringsim.faults import Slow
from ringsim.link import Link
from ringsim.ring.ring import current_ring
from ringsim.simulator.api import simulate
from ringsim.traces.units import bytes_text, time_text
from ringsim.traces.value import Trace

__all__ = ["bandwidth", "deadlock", "ring"]

_US: Final = 1e-6
_LATENCIES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_BANDWIDTHS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0)
_ALL_REDUCE: Final = "all-reduce"
_EAGER_BYTES: Final = 65536
_ITEM_BYTES: Final = 8  # a float64


def ring() -> Explorer:
    """Explores what goes round a ring of simulated ranks: a token, a shift, or the chunks of an all-reduce.

    Returns:
        The explorer.

    Example:
        >>> print(ring().frame(what="token", ranks=8).text)
        simulated    248 µs
        closed form  248 µs   ranks (computing + latency + size / bandwidth)
    """
    choices = (
        Choice("what", "what", "token", ("token", "shift", _ALL_REDUCE), ("token", "shift", _ALL_REDUCE)),
        Choice("ranks", "ranks", 4, range(2, 17), (2, 4, 8)),
        Choice("size", "size", 64, (1, 4, 16, 64, 256), (4, 64, 256), "KiB"),
        Choice("latency", "latency", 10.0, _LATENCIES, (10.0, 100.0), "µs"),
        Choice("bandwidth", "bandwidth", 10.0, _BANDWIDTHS, (1.0, 10.0), "GB/s"),
        Choice("computing", "computing", 10.0, (0.0, 1.0, 10.0, 50.0, 100.0), unit="µs"),
        Choice("slow", "rank 1 slower", 1, (1, 2, 4, 8), (1, 4), "x"),
    )
    return Explorer("what goes round a ring", _go_round, choices)


def _go_round(what: str, ranks: int, size: int, latency: float, bandwidth: float, computing: float, slow: int) -> Frame:
    link, size_bytes, compute_s = _link(latency, bandwidth), 1024 * size, _US * computing
    chunk_bytes = _ITEM_BYTES * (size_bytes // _ITEM_BYTES // ranks)
    forms = {
        "token": (ranks * (compute_s + link.time_s(size_bytes)), "ranks (computing + latency + size / bandwidth)"),
        "shift": (compute_s + link.time_s(size_bytes), "computing + latency + size / bandwidth"),
        _ALL_REDUCE: (compute_s + 2 * (ranks - 1) * link.time_s(chunk_bytes), "computing + 2 (ranks - 1) (latency + size / ranks / bandwidth)"),
    }
    closed_s, words = forms[what]
    inject = [Slow(1, slow)] if slow > 1 else []
    trace = simulate(_pass_round, world_size=ranks, args=(what, size_bytes, compute_s), link=link, inject=inject)
    known = f"{time_text(1e9 * closed_s)}   {words}" if slow == 1 else f"none: it is for ranks that are alike, which would take {time_text(1e9 * closed_s)}"
    return Frame(f"simulated    {time_text(1e9 * trace.makespan_s)}\nclosed form  {known}", (trace,))


def _pass_round(what: str, size_bytes: int, compute_s: float) -> None:
    ring = current_ring()
    chunks = ring.world_size if what == _ALL_REDUCE else 1
    mine, space = _payload(size_bytes // chunks), _payload(size_bytes // chunks)
    if what == "token":
        if ring.rank > 0:
            dist.recv(space, ring.pred, group=ring.pred_group)
        _compute(compute_s)
        dist.send(mine, ring.succ, group=ring.succ_group)
        if ring.rank == 0:
            dist.recv(space, ring.pred, group=ring.pred_group)
        return
    _compute(compute_s)
    for _ in range(2 * (ring.world_size - 1) if what == _ALL_REDUCE else 1):
        sending, receiving = dist.isend(mine, ring.succ, group=ring.succ_group), dist.irecv(space, ring.pred, group=ring.pred_group)
        sending.wait()
        receiving.wait()


def _payload(size_bytes: int) -> torch.Tensor:
    """Returns a tensor of few numbers: the threads with which torch copies many cost more than a frame may."""
    return torch.zeros(size_bytes // _ITEM_BYTES, dtype=torch.float64)


def _compute(seconds: float) -> None:
    with ringsim.span("compute"):
        ringsim.compute(seconds)


def _link(latency: float, bandwidth: float) -> Link:
    return Link(alpha_s=_US * latency, beta_s_per_byte=1e-9 / bandwidth)


def bandwidth() -> Explorer:
    """Explores what two links give to messages of all sizes.

    Returns:
        The explorer.

    Example:
        >>> print(bandwidth().frame().text.splitlines()[0])
    """
    choices = (
        Choice("latency_a", "A: latency", 10.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_a", "A: bandwidth", 10.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
        Choice("latency_b", "B: latency", 1.0, _LATENCIES, _LATENCIES[::3], "µs"),
        Choice("bandwidth_b", "B: bandwidth", 2.0, _BANDWIDTHS, (2.0, 10.0, 50.0), "GB/s"),
    )
    return Explorer("what two links give", _two_links, choices, tab="bandwidth")


_SIZES: Final = tuple(8**power for power in range(1, 9))  # bytes, to 16 MiB


def _two_links(latency_a: float, bandwidth_a: float, latency_b: float, bandwidth_b: float) -> Frame:
    sides = [_one_link(latency_a, bandwidth_a), _one_link(latency_b, bandwidth_b)]
    sizes = ["", "    size", *(f"{bytes_text(size):>8}" for size in _SIZES), "half of the bandwidth from"]
    lines = ["   ".join([size, *rows]).rstrip() for size, *rows in zip(sizes, *(rows for rows, _ in sides), strict=True)]
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


def deadlock() -> Explorer:
    """Explores who sends first: four ranks each send to the next one and receive from the one before, in an order of their own.

    Returns:
        The explorer.

    Example:
        >>> print(deadlock().frame(rank_0="receives").text.splitlines()[0])
        It ends, after 15.2 µs. By the rule it ends.
    """
    orders = ("sends", "receives")
    choices = (
        *(Choice(f"rank_{rank}", f"rank {rank} first", "sends", orders, orders) for rank in range(4)),
        Choice("size", "size", 4, (4, 1024), (4, 1024), "KiB"),
        Choice("semantics", "messages", "rendezvous", ("rendezvous", "eager up to 64 KiB"), ("rendezvous", "eager up to 64 KiB")),
    )
    return Explorer("who sends first", _in_order, choices)


def _in_order(size: int, semantics: str, **first: str) -> Frame:
    orders, eager = list(first.values()), semantics != "rendezvous" and 1024 * size <= _EAGER_BYTES
    ends = len(set(orders)) > 1 or (orders[0] == "sends" and eager)
    rule = f"By the rule it {'ends' if ends else 'never ends'}: "
    rule += "a message leaves before its receiver asks for it." if eager else "one rank has to differ from the others."
    if orders[0] == "receives" and len(set(orders)) == 1:
        rule = "By the rule it never ends: nobody has sent what all wait for."
    kind = "rendezvous" if semantics == "rendezvous" else f"buffered({_EAGER_BYTES})"
    try:
        trace = simulate(_exchange, world_size=len(orders), args=(orders, 1024 * size), link=_link(5.0, 10.0), semantics=kind)
    except Deadlock as error:
        return Frame(f"It never ends. {rule}\n{say_stuck(error)}", (error.trace,))
    return Frame(f"It ends, after {time_text(1e9 * trace.makespan_s)}. {rule}", (trace,))


def _exchange(orders: list[str], size_bytes: int) -> None:
    ring = current_ring()
    mine, space = _payload(size_bytes), _payload(size_bytes)
    if orders[ring.rank] == "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)
    dist.recv(space, ring.pred, group=ring.pred_group)
    if orders[ring.rank] != "sends":
        dist.send(mine, ring.succ, group=ring.succ_group)
