"""The lesson on deadlocks: every rank sends and receives, and nobody waits forever."""

from __future__ import annotations

import random
from typing import Final

import numpy as np

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    judge_unmatched,
    listed,
    plain_tensor,
    shown,
    sides,
)
from ringsim.errors import ArgumentError
from ringsim.traces.events import COLLECTIVE, OP_NAMES, SEND
from ringsim.traces.units import count
from ringsim.traces.value import Trace

__all__ = ["no_deadlock"]

WAYS: Final = {
    "order": ("send", "recv"),
    "isend": ("isend", "irecv", "send", "recv"),
    "batch": ("batch_isend", "batch_irecv"),
}
_WORLD_SIZES: Final = (3, 2, 4, 5)
_WAY_HINTS: Final = {
    "order": (
        "Use dist.send and dist.recv alone: what differs from rank to rank is which of the two "
        "comes first."
    ),
    "isend": "Post the send with dist.isend, receive, and then wait() for the handle.",
    "batch": (
        "Make a list of two dist.P2POp, give it to dist.batch_isend_irecv, and wait() for every "
        "handle that it returns."
    ),
}
_VALUE_HINT: Final = (
    "Receive into a fresh tensor, torch.empty_like(mine), and return that: what is being sent "
    "must not change before its wait() is over, "
    "and what is being received is not there before its wait() is over."
)
_COUNT_HINT: Final = "Each call sends one tensor, to ring.succ, and receives one, from ring.pred."


def no_deadlock(
    function: Answer, *, way: str | None = None, seed: int | None = None
) -> CheckResult:
    """Checks an exchange in which ranks send to the successor and receive from the predecessor.

    ``function(mine)`` gets this rank's tensor, float32 of one dimension, and returns the one of its
    predecessor, a tensor of the same shape. It is run in rings of 2 to 5 ranks, each with a small,
    a middling and a large tensor. If ranks wait for each other forever, the verdict says which, in
    what and where, and shows who waits for whom.

    Args:
        function: the answer.
        way: "order" for send and recv alone, "isend" for a send that is posted and waited for
            later, "batch" for batch_isend_irecv; None for any of them.
        seed: seed of the sizes and numbers; None for a random one.

    Returns:
        The verdict; its trace shows what was sent, and its diagnosis who waits for whom.

    Raises:
        ArgumentError: there is no such way.

    Example:
        >>> print(no_deadlock(lambda mine: mine, seed=1).reason)
        Rank 0 of 3 must send 3 tensors to its successor, sent none.
    """
    if way is not None and way not in WAYS:
        raise ArgumentError(
            f"way must be one of {', '.join(map(repr, WAYS))} or None, got {shown(repr(way))}. "
            "Say which one is to be shown."
        )
    return examine("no_deadlock", function, lambda examination: _judge(examination, way), seed)


def _judge(examination: Examination, way: str | None) -> str:
    draw = examination.random
    for world_size in _WORLD_SIZES:
        lengths = [1, draw.randrange(1_000, 10_000), draw.randrange(200_000, 300_000)]
        trace = examination.run(_exchange_on_rank, world_size, lengths, draw.randrange(10**6))
        _judge_messages(trace, len(lengths))
        _judge_values(trace, lengths)
        if way is not None:
            _judge_way(trace, way)
    examination.judge_content(
        lambda blank: _judge_values(blank, [1]), _exchange_on_rank, 2, [1], draw.randrange(10**6)
    )
    return (
        f"Nobody waited in vain in rings of {listed(_WORLD_SIZES)} ranks, with 4 bytes, a few kB "
        "and a megabyte."
    )


def _exchange_on_rank(function: Answer, lengths: list[int], secret: int) -> list[str | None]:
    """Exchanges a tensor of each length; says what is wrong with each that was returned."""
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim.ring import current_ring

    ring = current_ring()
    complaints = []
    for number, length in enumerate(lengths):
        own, due = (_fill(secret, number, rank) for rank in (ring.rank, ring.pred))
        answer = plain_tensor(function(torch.full((length,), own)))
        complaints.append(_complain(answer, length, own, due))
    return complaints


def _complain(
    answer: tuple[tuple[int, ...], list[float]] | str, length: int, own: float, due: float
) -> str | None:
    """Returns the reason why an answer is not a tensor full of ``due``, or None."""
    if isinstance(answer, str):
        return f"got {answer}"
    shape, numbers = answer
    if shape != (length,):
        return f"got one of shape {shape}"
    if numbers == [own] * length:
        return "got its own"
    for place, number in enumerate(numbers):
        if number != due:
            return f"and number {place} of it differs"
    return None


def _fill(secret: int, number: int, rank: int) -> float:
    """The number that one rank's tensor is full of."""
    return float(random.Random(f"{secret}/{number}/{rank}").randrange(1, 10**6))


def _judge_messages(trace: Trace, exchanges: int) -> None:
    """One send to the successor and one recv from the predecessor a call.

    Each with a partner, and nothing else.
    """
    events = trace.events
    collectives = np.flatnonzero(events.kind == COLLECTIVE)
    for side in sides(trace):
        called = collectives[events.rank[collectives] == side.rank]
        if len(called):
            reason = (
                f"{side.who} called {OP_NAMES[events.op[called[0]]]}, and only messages between "
                "neighbours are allowed."
            )
            raise Wrong(reason, _COUNT_HINT)
        number = int(np.count_nonzero(events.peer[side.events] == side.peer))
        more = len(side.events) - number
        if number != exchanges or more:
            to = "to its successor" if side.kind == SEND else "from its predecessor"
            others = f", and {count(more, 'other')}" if more else ""
            reason = (
                f"{side.who} must {side.verb} {count(exchanges, 'tensor')} {to}, {side.done} "
                f"{number or 'none'}{others}."
            )
            raise Wrong(reason, _COUNT_HINT)
    judge_unmatched(trace, "Use the same tag and the same group on both sides.")


def _judge_values(trace: Trace, lengths: list[int]) -> None:
    for rank, complaints in enumerate(trace.results):
        for length, complaint in zip(lengths, complaints, strict=True):
            if complaint is not None:
                reason = (
                    f"Rank {rank} of {trace.world_size} must return the tensor of its predecessor, "
                    f"of shape ({length},), {complaint}."
                )
                raise Wrong(reason, _VALUE_HINT)


def _judge_way(trace: Trace, way: str) -> None:
    """The exchange must have been made in the way that the exercise is about."""
    used = {event.op for event in trace if event.kind in ("send", "recv")}
    if used <= set(WAYS[way]) and (way != "isend" or used & {"isend", "irecv"}):
        return
    reason = (
        f"It works, but with {' and '.join(sorted(used))}: this exercise is about the way called "
        f"{way}."
    )
    raise Wrong(reason, _WAY_HINTS[way])
