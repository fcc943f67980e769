"""The check for the lesson on deadlocks: every rank sends and receives without a deadlock."""

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

WAYS: Final = {
    "order": ("send", "recv"),
    "isend": ("isend", "irecv", "send", "recv"),
    "batch": ("batch_isend", "batch_irecv"),
}
_WORLD_SIZES: Final = (3, 2, 4, 5)
_WAY_HINTS: Final = {
    "order": (
        "Use only dist.send and dist.recv. Some ranks must send first, and others must receive "
        "first."
    ),
    "isend": "Post the send with dist.isend, receive, and then call wait() on the handle.",
    "batch": (
        "Create a list of two dist.P2POp, pass it to dist.batch_isend_irecv, and call wait() on "
        "every handle that it returns."
    ),
}
_VALUE_HINT: Final = (
    "Receive into a new tensor, torch.empty_like(mine), and return that tensor. Until wait() "
    "returns, do not change a tensor that you are sending, and do not read a tensor that you are "
    "receiving."
)
_COUNT_HINT: Final = (
    "Each call sends one tensor to ring.succ and receives one tensor from ring.pred."
)


def no_deadlock(
    function: Answer, *, way: str | None = None, seed: int | None = None
) -> CheckResult:
    """Checks an exchange: each rank sends to its successor and receives from its predecessor.

    ``function(mine)`` receives this rank's one-dimensional float32 tensor and returns its
    predecessor's tensor, which has the same shape. The check uses rings of 2 to 5 ranks, each with
    a small, a medium and a large tensor. If ranks wait for each other forever, the verdict lists
    these ranks, their operations and lines, and shows a picture of the waits.

    Args:
        function: the answer.
        way: "order" to allow only send and recv, "isend" for a send that is posted first and waited
            for later, "batch" for batch_isend_irecv, or None for any of them.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages, and its diagnosis shows the waits.

    Raises:
        ArgumentError: ``way`` is unknown.

    Example:
        >>> print(no_deadlock(lambda mine: mine, seed=1).reason)
        Rank 0 of 3 must send 3 tensors to its successor, but sent none.
    """
    if way is not None and way not in WAYS:
        raise ArgumentError(
            f"way must be one of {', '.join(map(repr, WAYS))} or None, got {shown(repr(way))}."
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
        f"No rank got stuck in rings of {listed(_WORLD_SIZES)} ranks, with tensors of 4 bytes, a "
        "few kB and a megabyte."
    )


def _exchange_on_rank(function: Answer, lengths: list[int], secret: int) -> list[str | None]:
    """Exchanges a tensor of each length; returns a complaint or None per exchange."""
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
    """Returns a complaint if an answer is not a tensor filled with ``due``, else None."""
    if isinstance(answer, str):
        return f"but returned {answer}"
    shape, numbers = answer
    if shape != (length,):
        return f"but returned a tensor of shape {shape}"
    if numbers == [own] * length:
        return "but returned its own"
    for place, number in enumerate(numbers):
        if number != due:
            return f"but number {place} of the returned tensor differs"
    return None


def _fill(secret: int, number: int, rank: int) -> float:
    """Returns the number that fills a rank's tensor."""
    return float(random.Random(f"{secret}/{number}/{rank}").randrange(1, 10**6))


def _judge_messages(trace: Trace, exchanges: int) -> None:
    """Raises ``Wrong`` unless each call posts one send and one recv, both matched.

    The send must go to the successor, and the recv must be from the predecessor.
    """
    events = trace.events
    collectives = np.flatnonzero(events.kind == COLLECTIVE)
    for side in sides(trace):
        called = collectives[events.rank[collectives] == side.rank]
        if len(called):
            reason = (
                f"{side.who} called {OP_NAMES[events.op[called[0]]]}, but only messages between "
                "neighbours are allowed."
            )
            raise Wrong(reason, _COUNT_HINT)
        number = int(np.count_nonzero(events.peer[side.events] == side.peer))
        more = len(side.events) - number
        if number != exchanges or more:
            to = "to its successor" if side.kind == SEND else "from its predecessor"
            others = f" and {count(more, 'other')}" if more else ""
            reason = (
                f"{side.who} must {side.verb} {count(exchanges, 'tensor')} {to}, but {side.done} "
                f"{number or 'none'}{others}."
            )
            raise Wrong(reason, _COUNT_HINT)
    judge_unmatched(trace, "Use the same tag and the same group on both sides.")


def _judge_values(trace: Trace, lengths: list[int]) -> None:
    for rank, complaints in enumerate(trace.results):
        for length, complaint in zip(lengths, complaints, strict=True):
            if complaint is not None:
                reason = (
                    f"Rank {rank} of {trace.world_size} must return its predecessor's tensor, of "
                    f"shape ({length},), {complaint}."
                )
                raise Wrong(reason, _VALUE_HINT)


def _judge_way(trace: Trace, way: str) -> None:
    """Raises ``Wrong`` unless the exchange was done in the way that the exercise asks for."""
    used = {event.op for event in trace if event.kind in ("send", "recv")}
    if used <= set(WAYS[way]) and (way != "isend" or used & {"isend", "irecv"}):
        return
    reason = (
        f"Your answer works, but it uses {' and '.join(sorted(used))}: this exercise asks you to "
        f'solve it with "{way}".'
    )
    raise Wrong(reason, _WAY_HINTS[way])
