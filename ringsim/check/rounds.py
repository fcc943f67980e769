"""The second exercise of the lesson on the ring: numbers go round on the pair groups until every rank knows their sum."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ringsim.check.examination import Examination, Wrong, examine, plain_number, shown
from ringsim.check.neighbours import ALONE_HINT, RAISED_HINT, judge_way
from ringsim.check.result import CheckResult
from ringsim.traces.events import RECV, SEND
from ringsim.traces.value import Trace, count

__all__ = ["ring"]

_COUNT_HINT: Final = (
    "Each round passes one token on: what I received last I send next. After N - 1 rounds every number has been at every rank: "
    "for _ in range(ring.world_size - 1)."
)
_SUM_HINT: Final = (
    "Keep two things apart: the token, which is passed on as it came, and the total, to which every token that arrives is added. "
    "Receive into a fresh tensor, torch.empty_like(token): the one that is being sent must not change meanwhile."
)


def ring(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that passes numbers round the ring until every rank knows their sum.

    ``function(token)`` gets this rank's own number, a float32 tensor of shape (1,), which no other rank knows, and returns the sum of all
    ranks' numbers. It does so by messages between neighbours: N - 1 sends to the successor on its group and N - 1 recvs from the
    predecessor on its group, on every rank, and nothing else. It is run on 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: what sizes and numbers are drawn from; None to draw the seed, too.

    Returns:
        The verdict; its trace shows what was really sent.

    Example:
        >>> print(ring(lambda token: token, seed=1).reason)
        Rank 0 of 3 must send 2 tokens to its successor, sent none.
    """
    return examine("ring", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5, 6]), 1]
    trace = None
    for world_size in sizes:
        secret = draw.randrange(10**9)
        trace = examination.run(_round_on_rank, world_size, secret, judge_early_end=_judge_way, hint=RAISED_HINT)
        _judge_way(trace)
        _judge_counts(trace)
        _judge_sums(trace)
    return f"Right in rings of {', '.join(map(str, sorted(sizes)[:-1]))} and {max(sizes)} ranks, message by message.", trace


def _judge_way(trace: Trace) -> None:
    judge_way(trace, "tokens")


def _round_on_rank(function: Callable[..., Any], secret: int) -> tuple[float, float | str]:
    """Makes this rank's number and returns it with the answer."""
    import torch  # here: who only starts ranks does not load it

    from ringsim.ring import current_ring

    number = float(random.Random(f"{secret}/{current_ring().rank}").randrange(100, 1000))
    return number, plain_number(function(torch.tensor([number])))


def _judge_counts(trace: Trace) -> None:
    """N - 1 sends and as many recvs on every rank, each with a partner."""
    events, size = trace.events, trace.world_size
    for rank in range(size):
        for kind, verb, done, role in ((SEND, "send", "sent", "to its successor"), (RECV, "receive", "received", "from its predecessor")):
            number = int(np.count_nonzero((events.rank == rank) & (events.kind == kind)))
            if number != size - 1:
                reason = f"Rank {rank} of {size} must {verb} {count(size - 1, 'token')} {role}, {done} {number or 'none'}."
                raise Wrong(reason, _COUNT_HINT, world_size=size, trace=trace)
    if trace.unmatched:
        reason = f"Every send needs its recv, and {trace.unmatched[0]!r}."
        raise Wrong(reason, "Use the same tag on both sides, or none.", world_size=size, trace=trace)


def _judge_sums(trace: Trace) -> None:
    """Every rank must return the sum of all numbers."""
    size = trace.world_size
    numbers = [number for number, _ in trace.results or []]
    due = sum(numbers)
    for rank, (number, answer) in enumerate(trace.results or []):
        if answer == due:
            continue
        own = ", its own number alone" if answer == number else ""
        reason = f"Rank {rank} of {size} must return the sum of all numbers, {shown(due)}, got {shown(answer)}{own}."
        hint = "The function must end in a return on every rank." if isinstance(answer, str) else ALONE_HINT if size == 1 else _SUM_HINT
        raise Wrong(reason, hint, world_size=size, trace=trace)
