"""The check for the lesson on several hosts: the two hosts with a slow link between them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, permutations
from typing import Any, NamedTuple

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    refuse_text,
    shown,
)
from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
from ringsim.traces.value import Trace

RUNS = 6
ALPHA_NS = 50_000  # latency on any link
NS_PER_BYTE = 1.0  # on a good link
SLOW = 8  # the factor of the slow link
LATE_NS = 300_000_000
STALL_NS = 3_000_000_000
# the misleading messages of two pairs of hosts; runs alternate between the rows
MISLEADING = (("busy", "late"), ("stall", "small"))
SIZES = (8, 64 * 1024, 128 * 1024, 256 * 1024, 4 * 1024**2)
LARGEST = len(SIZES) - 1
PAYLOADS = Tables(payloads=tuple(Payload("uint8", (size,), size) for size in SIZES))
Pair = tuple[str, str]  # hosts, in alphabetical order
_PAIR_HINT = (
    "Return the names of the two hosts, as written in hosts, in any order: return first, second."
)
_HINTS = {
    "inner": (
        "The hosts of a message are hosts[src] and hosts[dst]. Look for a link between two hosts, "
        "and leave out messages within one host."
    ),
    "busy": (
        "Many large messages take a long time even on a good link. Divide the size of each "
        "message by that message's own time."
    ),
    "stall": (
        "Even on a good link, a message may stall. A stall changes a sum or a maximum over the "
        "messages between two hosts, but not a median."
    ),
    "late": (
        "Until the sender arrives, the link is idle. The time spent on the link is transfer_ns; "
        "late_sender_ns is not part of it."
    ),
    "small": (
        "On any link, a message of a few bytes costs only the latency. Compare messages of 64 KiB "
        "and more."
    ),
    "": (
        "For each pair of hosts, compute the median of size_bytes / transfer_ns over all messages "
        "of 64 KiB and more, in both directions together."
    ),
}


class _Run(NamedTuple):
    """A made-up run: messages, the host of each rank, the slow pair, and misleading pairs."""

    messages: Any
    hosts: list[str]
    slow: Pair
    decoys: dict[Pair, str]


def slow_link(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that finds the slow link between two hosts.

    ``function(messages, hosts)`` receives a run's table ``trace.to_pandas("messages")`` and its
    ``trace.hosts``, the name of each rank's host, and returns the names of two hosts. The check
    uses made-up runs on 3 to 5 hosts, in which one link is eight times as slow as the others, in
    both directions. Other messages also take a long time, but for other reasons: there are many of
    them, one stalls, they are sent late, they are small, or they stay within one host.

    Args:
        function: the answer.
        seed: the seed for generating the runs, or None for a random seed.

    Returns:
        The verdict.

    Example:
        >>> print(slow_link(lambda messages, hosts: sorted(set(hosts))[:2], seed=1).reason)
        On the hosts node18, node42, node82, the slow link is not between node18 and node42.
    """
    return examine("slow_link", function, _judge, seed)


def _judge(examination: Examination) -> str:
    runs = [_make_up(examination.random, MISLEADING[number % 2]) for number in range(RUNS)]
    asked = [(run.messages, run.hosts) for run in runs]
    for run, (_, answer) in zip(runs, examination.ask(asked, _read_pair, own=False), strict=True):
        names = sorted(set(run.hosts))
        if isinstance(answer, str) or not set(answer) <= set(names):
            raise Wrong(
                f"Your answer must be the names of two hosts, got {shown(answer)}.", _PAIR_HINT
            )
        if answer != run.slow:
            first, second = answer
            between = f"within {first}" if first == second else f"between {first} and {second}"
            reason = f"On the hosts {', '.join(names)}, the slow link is not {between}."
            raise Wrong(reason, _HINTS[run.decoys.get(answer, "")])
    return f"Right for {RUNS} runs on 3 to 5 hosts."


def _read_pair(answer: Any) -> Pair:
    first, second = sorted(map(str, refuse_text(answer)))
    return first, second


def _make_up(draw: random.Random, misleading: Sequence[str]) -> _Run:
    names = [f"node{number}" for number in draw.sample(range(10, 99), draw.randrange(3, 6))]
    hosts = names * 2
    draw.shuffle(hosts)
    pairs: list[Pair] = [(min(pair), max(pair)) for pair in combinations_with_replacement(names, 2)]
    outer = [pair for pair in pairs if pair[0] != pair[1]]
    draw.shuffle(outer)
    slow = outer.pop()
    decoys = {(name, name): "inner" for name in names}
    decoys.update(zip(outer, misleading, strict=False))
    rows = [row for pair in pairs for row in _messages(draw, hosts, pair, slow, decoys.get(pair))]
    names_of_columns = ("rank", "op", "peer", "tag", "payload", "post_ns", "wait_ns", "done_ns")
    columns = dict(zip(names_of_columns, zip(*rows, strict=True), strict=True))
    trace = Trace(make_events(columns, PAYLOADS), {"world_size": len(hosts)})
    return _Run(trace.to_pandas("messages"), hosts, slow, decoys)


def _messages(
    draw: random.Random, hosts: list[str], pair: Pair, slow: Pair, decoy: str | None
) -> Iterator[tuple[int, ...]]:
    """Yields the send and the recv of each message between two hosts, or within one host."""
    ranks = [rank for rank, host in enumerate(hosts) if host in pair]
    edges = [
        (src, dst) for src, dst in permutations(ranks, 2) if {hosts[src], hosts[dst]} == set(pair)
    ]
    start = 0
    for number, (src, dst) in enumerate(edges * (6 if decoy == "busy" else 2)):
        if decoy == "busy":
            payload = LARGEST
        elif decoy == "small" and number % 4:
            payload = 0
        else:
            payload = draw.randrange(1, LARGEST)
        slower = SLOW if pair == slow else 2 * SLOW if decoy == "inner" else 1
        rate = NS_PER_BYTE * draw.uniform(0.9, 1.2) * slower
        took = ALPHA_NS + round(SIZES[payload] * rate)
        if decoy == "stall" and number == 1:
            took += STALL_NS
        recv_ns, send_ns = start, start + draw.randrange(LATE_NS if decoy == "late" else 1_000_000)
        done_ns = send_ns + took
        yield src, OP_CODES["send"], dst, 0, payload, send_ns, send_ns, done_ns
        yield dst, OP_CODES["recv"], src, 0, payload, recv_ns, recv_ns, done_ns
        start = done_ns + 1
