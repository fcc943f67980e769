"""The checks for the lesson on the ring: its pairs of ranks, and a sum passed around the ring."""

from __future__ import annotations

import random
from typing import Any

from ringsim.check.examination import (
    ALONE_HINT,
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    judge_rounds,
    listed,
    plain_number,
    refuse_text,
    shown,
)
from ringsim.ring.pairs import Pair, all_pairs, list_groups
from ringsim.traces.events import NO_EVENTS
from ringsim.traces.units import count
from ringsim.traces.value import Trace

Pairs = list[Pair]
_HINT = (
    "Group i contains rank i and its successor, rank (i + 1) % N: the successor of the last rank "
    "is rank 0."
)
_COUNT_HINT = (
    "Pass one token on in each round: send the token that you received last. After N - 1 rounds, "
    "every number has been on every rank: for _ in range(ring.world_size - 1)."
)
_SUM_HINT = (
    "Keep two tensors: the token, which you pass on unchanged, and the total, to which you add "
    "every token that arrives. Receive into a new tensor, torch.empty_like(token), because a "
    "tensor that you are sending must not change."
)


def pair_groups(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that lists the pairs of a ring.

    ``function(N)`` returns a list of N pairs (predecessor, successor): pair i is (i, (i + 1) mod
    N). A ring of one rank has no pairs. The check calls the function on a separate rank, so that it
    can stop an endless loop.

    Args:
        function: the answer.
        seed: the seed for generating the sizes, or None for a random seed.

    Returns:
        The verdict; its trace, if any, shows the groups in the answer.

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
    due = all_pairs(range(size))
    if answer == due:
        return
    ranks = count(size, "rank")

    def wrong(reason: str, hint: str = _HINT) -> Wrong:
        picture = None if isinstance(answer, str) else _picture(size, answer)
        return Wrong(reason, hint, world_size=size, trace=picture)

    if isinstance(answer, str):
        raise wrong(
            f"For {ranks}, your answer must be a list of pairs of ranks, got {answer}.",
            "Return a list such as [(0, 1), (1, 0)].",
        )
    pairs = ", ".join(map(str, answer))
    if size == 1:
        hint = "A rank does not send to itself: return an empty list if N == 1."
        raise wrong(
            f"A ring of 1 rank has no pairs, but your answer has {len(answer)}: {pairs}.", hint
        )
    strange = [pair for pair in answer if pair not in due]
    missing = [pair for pair in due if pair not in answer]
    if missing == [(size - 1, 0)] and len(answer) == size - 1:
        raise wrong(f"The ring of {ranks} is not closed: {missing[0]} is missing.")
    if size > 2 and sorted((succ, pred) for pred, succ in answer) == sorted(due):
        hint = "The predecessor comes first, because it sends."
        raise wrong(
            f"In the ring of {ranks}, the pairs are the wrong way around: {answer[0]} instead of "
            f"{answer[0][::-1]}.",
            hint,
        )
    if strange:
        raise wrong(
            f"The ring of {ranks} has no pair {strange[0]}, because rank {strange[0][0]}'s "
            f"successor is not rank {strange[0][1]}."
        )
    if missing and size == 2:
        hint = "Two ranks have two edges, one in each direction, and each edge has its own group."
        raise wrong(
            "A ring of 2 ranks has 2 pairs, (0, 1) and (1, 0), but your answer has "
            f"{pairs or 'none'}.",
            hint,
        )
    if missing:
        raise wrong(
            f"In the ring of {ranks}, {count(len(missing), 'pair')} "
            f"{'is' if len(missing) == 1 else 'are'} missing, beginning with {missing[0]}."
        )
    if len(answer) > size:
        raise wrong(
            f"The ring of {ranks} has {size} pairs, but your answer has {len(answer)}: some pairs "
            "occur twice."
        )
    hint = (
        "List the groups in the same order on all ranks. Otherwise, the ranks would create "
        "different groups at the same time."
    )
    raise wrong(
        f"The pairs for the ring of {ranks} must be in order, with pair i for the edge from rank "
        f"i, got {pairs}.",
        hint,
    )


def _picture(size: int, answer: Pairs) -> Trace | None:
    """Returns a trace without events that shows an answer's drawable groups."""
    if size == 1:
        return None
    pairs = [
        (pred, succ)
        for pred, succ in dict.fromkeys(answer)
        if 0 <= pred < size and 0 <= succ < size
    ]
    source = "the groups of the answer; nothing was run"
    return Trace(
        NO_EVENTS,
        {"source": source, "world_size": size, "ring_groups": list_groups(pairs)},
    )


def ring(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that passes numbers around the ring until every rank knows their sum.

    ``function(token)`` receives this rank's own number, a float32 tensor of shape (1,), which no
    other rank knows, and returns the sum of all ranks' numbers. Every rank must post N - 1 sends to
    its successor on the successor's group and N - 1 recvs from its predecessor on the predecessor's
    group, and no other operations. The check uses 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages.

    Example:
        >>> print(ring(lambda token: token, seed=1).reason)
        Rank 0 of 3 must send 2 tokens to its successor, but sent none.
    """
    return examine("ring", function, _judge_rounds, seed)


def _judge_rounds(examination: Examination) -> str:
    where = judge_rounds(examination, _round_on_rank, "token", _COUNT_HINT, _judge_sums)
    return f"The sum and every message are right {where}."


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
        own = ", which is only its own number" if answer == number else ""
        reason = (
            f"Rank {rank} of {size} must return the sum of all numbers, {shown(due)}, but returned "
            f"{shown(answer)}{own}."
        )
        hint = ALONE_HINT if size == 1 else _SUM_HINT
        if isinstance(answer, str):
            hint = "Return the sum on every rank."
        raise Wrong(reason, hint)
