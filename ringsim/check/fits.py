"""The check for the lesson on bandwidth: alpha and beta from message times."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from ringsim.check.examination import Answer, CheckResult, Examination, Wrong, examine
from ringsim.link import Link, fit_link
from ringsim.traces.events import RECV, SEND, Ints
from ringsim.traces.units import bytes_text
from ringsim.traces.value import Trace

TOLERANCE = 0.3
SIZES = (8, 1024, 16 * 1024, 128 * 1024, 1024**2, 4 * 1024**2)
LINKS = 5
REPEATS = 9
SLOW = 2  # the number of delayed messages of each size, in the made-up data
_UNITS_HINT = (
    "Return two numbers: alpha in seconds (40e-6, not 40) and beta in seconds per byte: return "
    "alpha, beta."
)
_SLOW_HINT = (
    "Some messages were delayed and took many times as long as the others. First take the median "
    "time for each size, and then fit the medians."
)
_WEIGHT_HINT = (
    "In a plain least-squares fit, the largest messages dominate: one percent of 50 ms is more "
    "than a hundred times alpha. Divide each error by the time: np.polyfit(sizes, times, 1, w=1 / "
    "times) returns beta, alpha."
)
_RAISED_HINT = (
    "Your function receives two numpy arrays of the same length: sizes in bytes and times in "
    "seconds, and each size occurs several times."
)


class Data(NamedTuple):
    """Message times, and the link that they were derived from, or None for measured times."""

    sizes_bytes: Ints
    times_s: Ints
    link: Link | None


def alphabeta(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that fits alpha and beta to message times.

    ``function(sizes_bytes, times_s)`` receives two numpy arrays of the same length, in which each
    size occurs several times. It returns ``(alpha, beta)`` in seconds and seconds per byte, or a
    ``ringsim.Link``. The check uses two kinds of times. The first kind is generated from random
    links, with noise and some delayed messages: both numbers must be within 30 % of the true
    values. The second kind is measured between two real ranks: the fitted line must be within 30 %
    of the median time for at least half of the sizes. The measured times do not count if the
    machine is so busy that a larger message takes less time than a smaller one, or that even
    ``ringsim.link.fit_link`` is not within 15 % of the medians.

    Args:
        function: the answer.
        seed: the seed for generating the links and noise, or None for a random seed.

    Returns:
        The verdict; its trace contains the real messages.

    Example:
        >>> print(alphabeta(lambda sizes, times: (0.0, 1e-9), seed=1).reason)
        alpha must be within 30 % of 5.03 µs, got 0 µs.
    """
    return examine("alphabeta", function, _judge, seed)


def _judge(examination: Examination) -> str:
    data = [_make_up(examination.random) for _ in range(LINKS)]
    trace = examination.run(_messages_on_rank, 2)
    data.append(_measured(trace))
    asked = [(each.sizes_bytes, each.times_s) for each in data]
    close = False
    answers = examination.ask(asked, _read_line, hint=_RAISED_HINT)
    for each, (_, answer) in zip(data, answers, strict=True):
        if isinstance(answer, str):
            raise Wrong(
                f"Your answer must be two non-negative numbers, alpha and beta, got {answer}.",
                _UNITS_HINT,
            )
        if each.link is not None:
            _judge_numbers(each.link, answer)
        else:
            close = _judge_line(each, answer, trace)
    real = "real messages were too irregular to judge, because the machine is busy"
    if close:
        real = "close to the medians of messages between two real ranks"
    examination.trace = trace
    return f"Right for {LINKS} random links; {real}."


def _make_up(draw: random.Random) -> Data:
    """Makes up times from a random link, with 5 % noise and some delayed messages of each size."""
    link = Link(10 ** draw.uniform(-5.5, -4), 10 ** draw.uniform(-10.5, -9))
    half = link.n_half_bytes
    sizes = [8, *(round(half * 4.0**power) for power in range(-4, 6))]
    pairs = []
    for size in sizes:
        for repeat in range(REPEATS):
            held_up = draw.uniform(4, 30) if repeat < SLOW else 1.0
            pairs.append((size, link.time_s(size) * draw.uniform(0.95, 1.05) * held_up))
    draw.shuffle(pairs)
    sizes_bytes, times_s = zip(*pairs, strict=True)
    return Data(np.array(sizes_bytes), np.array(times_s), link)


def _messages_on_rank(_function: Answer) -> None:
    """Sends messages of each size back and forth, plus one uncounted message per size."""
    import torch

    from ringsim import comm as dist
    from ringsim.ring import current_ring

    ring = current_ring()
    calls = [(dist.send, ring.succ_group), (dist.recv, ring.pred_group)]
    if ring.rank == 1:
        calls.reverse()
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8)
        for _ in range(REPEATS + 1):
            for call, group in calls:
                call(tensor, ring.succ, group=group)


def _measured(trace: Trace) -> Data:
    """Returns half of rank 0's round-trip times, without the first round trip of each size."""
    events = trace.events
    mine = events.rank == 0
    sent_ns = events.post_ns[mine & (events.kind == SEND)]
    done_ns = events.done_ns[mine & (events.kind == RECV)]
    times_s = (done_ns - sent_ns).reshape(len(SIZES), -1)[:, 1:] * 0.5e-9
    return Data(np.repeat(SIZES, times_s.shape[1]), times_s.ravel(), None)


def _read_line(answer: Any) -> Link:
    if isinstance(answer, Link):
        return answer
    # a negative number is judged as 0, which is too small
    alpha_s, beta_s_per_byte = (max(float(number), 0.0) for number in answer)
    return Link(alpha_s, beta_s_per_byte)


def _judge_numbers(link: Link, answer: Link) -> None:
    """Raises ``Wrong`` unless both numbers are within the tolerance."""
    for name, due, got, unit in (
        ("alpha", link.alpha_s * 1e6, answer.alpha_s * 1e6, "µs"),
        ("beta", link.beta_s_per_byte * 1e9, answer.beta_s_per_byte * 1e9, "ns per byte"),
    ):
        if abs(got / due - 1) <= TOLERANCE:
            continue
        if answer.alpha_s < answer.beta_s_per_byte or got > 1e5 * due:
            hint = _UNITS_HINT
        else:
            hint = _SLOW_HINT if due < got < 20 * due else _WEIGHT_HINT
        reason = (
            f"{name} must be within {100 * TOLERANCE:.0f} % of {due:.3g} {unit}, got {got:.3g} "
            f"{unit}."
        )
        raise Wrong(reason, hint)


def _judge_line(data: Data, answer: Link, trace: Trace) -> bool:
    """Raises ``Wrong`` if a line is far from the medians; returns False if all lines would be."""
    medians_s = np.median(data.times_s.reshape(len(SIZES), -1), axis=1)

    def find_misses(link: Link) -> Ints:
        return np.abs([link.time_s(size) for size in SIZES] / medians_s - 1)

    falls = (medians_s[1:] < 0.9 * medians_s[:-1]).any()
    if falls or np.median(find_misses(fit_link(SIZES, medians_s))) > TOLERANCE / 2:
        return False
    misses = find_misses(answer)
    if np.median(misses) > TOLERANCE:
        worst = misses.argmax()
        size, took = SIZES[worst], medians_s[worst] * 1e6
        says = answer.time_s(size) * 1e6
        reason = (
            f"Between two real ranks, a message of {bytes_text(size)} took a median of {took:.3g} "
            f"µs, but your line gives {says:.3g} µs."
        )
        raise Wrong(reason, _WEIGHT_HINT, trace)
    return True
