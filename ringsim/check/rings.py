"""The lesson on the ring: which pairs of ranks get a group.

Numbers that go round until every rank knows their sum.
"""

from __future__ import annotations

import random
from typing import Any, Final

from ringsim.check.examination import (
    ALONE_HINT,
    RAISED_HINT,
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    judge_counts,
    listed,
    plain_number,
    refuse_text,
    shown,
)
from ringsim.traces.events import make_events
from ringsim.traces.units import count
from ringsim.traces.value import Trace

__all__ = ["pair_groups", "ring"]

Pairs = list[tuple[int, int]]
_SENT: Final = ("token", " to its successor")
_RECEIVED: Final = ("token", " from its predecessor")
_HINT: Final = (
    "Group i joins rank i and its successor, which is rank (i + 1) % "
    "N: the last rank's successor is rank 0."
)
_COUNT_HINT: Final = (
    "Each round passes one token on: what I received last I send next. After N - 1 rounds every "
    "number has been at every rank: for _ in range(ring.world_size - 1)."
)
_SUM_HINT: Final = (
    "Keep two things apart: the token, which is passed on as it came, and the total, to which "
    "every token that arrives is added. Receive into a fresh tensor, torch.empty_like(token): the "
    "one that is being sent must not change meanwhile."
)


def pair_groups(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that lists the pairs of a ring.

    ``function(N)`` returns a list of N pairs (predecessor, successor): pair i is (i, (i + 1) mod
    N). A ring of one has none. The function runs on its own rank, so that an endless one can be
    stopped.

    Args:
        function: the answer.
        seed: seed of the sizes; None for a random one.

    Returns:
        The verdict; its trace, where there is one, draws the groups that the answer asks for.

    Example:
        >>> print(pair_groups(lambda N: [(i, i + 1) for i in range(N - 1)], seed=1).reason)
        The ring of 2 ranks is not closed: (1, 0) is missing.
    """
    return examine("pair_groups", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    sizes = [1, 2, 3, 4, draw.randrange(5, 10), draw.randrange(10, 65)]
    for (size,), answer in examination.ask([(size,) for size in sizes], _read_pairs):
        _judge_pairs(size, answer)
    return f"Right for rings of {listed(sizes)} ranks."


def _read_pairs(answer: Any) -> Pairs:
    return [(int(pred), int(succ)) for pred, succ in refuse_text(answer)]


def _judge_pairs(size: int, answer: Pairs | str) -> None:
    due = [(rank, (rank + 1) % size) for rank in range(size)] if size > 1 else []
    if answer == due:
        return
    ranks = count(size, "rank")

    def wrong(reason: str, hint: str = _HINT) -> Wrong:
        picture = None if isinstance(answer, str) else _picture(size, answer)
        return Wrong(reason, hint, world_size=size, trace=picture)

    if isinstance(answer, str):
        raise wrong(
            f"For {ranks} the answer must be a list of pairs of ranks, got {answer}.",
            "Return a list such as [(0, 1), (1, 0)].",
        )
    pairs = ", ".join(map(str, answer))
    if size == 1:
        hint = "A rank does not send to itself: for N == 1 the list is empty."
        raise wrong(f"A ring of 1 rank has no pairs, got {len(answer)}: {pairs}.", hint)
    strange = [pair for pair in answer if pair not in due]
    missing = [pair for pair in due if pair not in answer]
    if missing == [(size - 1, 0)] and len(answer) == size - 1:
        raise wrong(f"The ring of {ranks} is not closed: {missing[0]} is missing.")
    if size > 2 and sorted((succ, pred) for pred, succ in answer) == sorted(due):
        hint = "The predecessor comes first: it is the one that sends."
        raise wrong(
            f"In the ring of {ranks} the pairs are the wrong way round: {answer[0]} instead of "
            f"{answer[0][::-1]}.",
            hint,
        )
    if strange:
        raise wrong(
            f"The ring of {ranks} has no pair {strange[0]}, because rank {strange[0][0]}'s "
            f"successor is not rank {strange[0][1]}."
        )
    if missing and size == 2:
        hint = "Between two ranks there are two edges, there and back, and each has its own group."
        raise wrong(
            f"A ring of 2 ranks has 2 pairs, (0, 1) and (1, 0), got {pairs or 'none'}.", hint
        )
    if missing:
        raise wrong(
            f"The ring of {ranks} lacks {count(len(missing), 'pair')}, the first of them "
            f"{missing[0]}."
        )
    if len(answer) > size:
        raise wrong(
            f"The ring of {ranks} has {size} pairs, got {len(answer)}: some are there twice."
        )
    hint = (
        "All ranks must list the groups in the same order, or they would build different groups at "
        "the same time."
    )
    raise wrong(
        f"The pairs of the ring of {ranks} must come in order, pair i for the edge from rank i, "
        f"got {pairs}.",
        hint,
    )


def _picture(size: int, answer: Pairs) -> Trace | None:
    """Returns a trace without events that draws the groups of an answer.

    As far as they can be drawn.
    """
    if size == 1:
        return None
    groups = [
        [f"ring:{pred}>{succ}", [pred, succ]]
        for pred, succ in dict.fromkeys(answer)
        if 0 <= pred < size and 0 <= succ < size
    ]
    source = "the groups of the answer; nothing was run"
    return Trace(
        make_events({"rank": [], "op": []}),
        {"source": source, "world_size": size, "ring_groups": groups},
    )


def ring(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that passes numbers round the ring until every rank knows their sum.

    ``function(token)`` gets this rank's own number, a float32 tensor of shape (1,), which no other
    rank knows, and returns the sum of all ranks' numbers. It does so by messages between
    neighbours: N - 1 sends to the successor on its group and N - 1 recvs from the predecessor on
    its group, on every rank, and nothing else. The check runs it on 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: seed of the sizes and numbers; None for a random one.

    Returns:
        The verdict; its trace shows what was really sent.

    Example:
        >>> print(ring(lambda token: token, seed=1).reason)
        Rank 0 of 3 must send 2 tokens to its successor, sent none.
    """
    return examine("ring", function, _judge_rounds, seed)


def _judge_rounds(examination: Examination) -> str:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5, 6]), 1]
    for world_size in sizes:
        secret = draw.randrange(10**9)
        trace = examination.run(
            _round_on_rank, world_size, secret, things="tokens", hint=RAISED_HINT
        )
        due = [(world_size - 1, world_size - 1)] * world_size
        judge_counts(trace, due, _SENT, _RECEIVED, _COUNT_HINT)
        _judge_sums(trace)
    examination.judge_content(_judge_sums, _round_on_rank, 2, secret)
    return f"Right in rings of {listed(sizes)} ranks, message by message."


def _round_on_rank(function: Answer, secret: int) -> tuple[float, float | str]:
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim.ring import current_ring

    number = float(random.Random(f"{secret}/{current_ring().rank}").randrange(100, 1000))
    return number, plain_number(function(torch.tensor([number])))


def _judge_sums(trace: Trace) -> None:
    size = trace.world_size
    due = sum(number for number, _ in trace.results)
    for rank, (number, answer) in enumerate(trace.results):
        if answer == due:
            continue
        own = ", its own number alone" if answer == number else ""
        reason = (
            f"Rank {rank} of {size} must return the sum of all numbers, {shown(due)}, got "
            f"{shown(answer)}{own}."
        )
        hint = ALONE_HINT if size == 1 else _SUM_HINT
        if isinstance(answer, str):
            hint = "The function must end in a return on every rank."
        raise Wrong(reason, hint)
