"""The checks for the lesson on deadlocks: exchanges, and orders, with and without a deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

import ringsim
from ringsim.check.examination import (
    LIMIT_S,
    Answer,
    CheckResult,
    Examination,
    Numbers,
    Wrong,
    examine,
    judge_unmatched,
    listed,
    plain_tensor,
    shown,
    sides,
)
from ringsim.errors import ArgumentError, RingError, name_ranks
from ringsim.launch.recorded_cells import is_replaying, refuse
from ringsim.traces.events import COLLECTIVE, OP_NAMES
from ringsim.traces.units import count
from ringsim.traces.value import Trace

WAYS = {
    "order": ("send", "recv"),
    "isend": ("isend", "irecv", "send", "recv"),
    "batch": ("batch_isend", "batch_irecv"),
}
_WORLD_SIZES = (3, 2, 4, 5)
_WAY_HINTS = {
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
_VALUE_HINT = (
    "Receive into a new tensor, torch.empty_like(mine), and return that tensor. Until wait() "
    "returns, do not change a tensor that you are sending, and do not read a tensor that you are "
    "receiving."
)
_ORDER_HINT = (
    "Look at the lines of rank 0. Which message must its first recv take, so that its second recv "
    "waits forever? Let the ranks go until none may go."
)
_REPAIR_HINT = (
    "Play the order of the verdict with ringsim.explore.scheduler. From which ranks may rank 0 "
    "receive, so that every message finds a recv?"
)
_COUNT_HINT = "Each call sends one tensor to ring.succ and receives one tensor from ring.pred."


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
        lambda blank: _judge_values(blank, [1]), _exchange_on_rank, [1], draw.randrange(10**6)
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


def _complain(answer: Numbers | str, length: int, own: float, due: float) -> str | None:
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
            others = f" and {count(more, 'other')}" if more else ""
            due = f"{count(exchanges, 'tensor')} {side.to}"
            raise side.wrong(due, f"{number or 'none'}{others}", _COUNT_HINT)
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


def every_order(function: Answer, *, order: Iterable[int], seed: int | None = None) -> CheckResult:
    """Checks a deadlock that you bring about, and a repaired program that never deadlocks.

    In the lesson's program, rank 0 adds up the tensors of all ranks, and sends the sum to the other
    ranks. It receives first from any rank, and then from the other ranks in turn.
    ``function(mine)`` is the repaired program, which returns the sum on every rank. The check tries
    every order of 3 and 4 simulated ranks; see ``ringsim.explore.scheduler``.

    Args:
        function: the repaired program.
        order: the choices for ``ringsim.explore.scheduler`` with which the lesson's program
            deadlocks on 3 ranks.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its diagnosis shows the waits.

    Example:
        >>> print(every_order(lambda mine: mine, order=[1, 0], seed=1).reason)
        After your choices, ranks 0, 1 and 2 may still go.
    """
    return examine("every_order", function, lambda one: _judge_orders(one, order), seed)


def _judge_orders(examination: Examination, order: Iterable[int]) -> str:
    tried, world_size = 0, 3
    try:
        if is_replaying():
            refuse("cannot try orders")
        _judge_choices([*order])
        for world_size in (3, 4):
            tried += _try_orders(examination, world_size)
    except TypeError:
        raise Wrong(
            f"Your order must be a list of ranks, got {shown(order)}.", _ORDER_HINT
        ) from None
    except ArgumentError as error:
        raise Wrong(f"Your order is impossible: {error}", _ORDER_HINT) from None
    except RingError as error:
        raise examination.failed(error, world_size, "") from None
    return (
        "Your order brings about the deadlock, and your program has none: the check tried every "
        f"order of 3 and 4 ranks that can make a difference, {count(tried, 'order')}."
    )


def _judge_choices(order: Iterable[int]) -> None:
    """Raises ``Wrong`` unless the lesson's program deadlocks in an order."""
    game = ringsim.explore.scheduler(_add_up, world_size=3).step(*order)
    if game.possible:
        reason = f"After your choices, {name_ranks(game.possible)} may still go."
        raise Wrong(reason, _ORDER_HINT)
    if game.finished:
        raise Wrong("In your order, the program finishes.", _ORDER_HINT, game.trace)


def _try_orders(examination: Examination, world_size: int) -> int:
    """Returns the number of orders, and raises ``Wrong`` if the answer fails in one of them."""
    args = examination.function, examination.random.randrange(10**6)
    game = ringsim.explore.scheduler(_add_up_on_rank, world_size=world_size, args=args)
    found = game.explore(most=1000, limit_s=LIMIT_S)
    if found.left and found.order is None:
        raise Wrong(f"{found!r}.", "Send and receive fewer messages.", undecided=True)
    if found.order is None:
        return found.tried
    game.step(*found.order)
    if game.deadlock is None:
        raise game.error
    (cause, *_) = game.deadlock.findings
    reason = f"In the order {', '.join(map(str, found.order))}, {cause.message}"
    raise Wrong(reason, _REPAIR_HINT, game.trace, diagnosis=game.deadlock)


def _add_up() -> None:
    """The program of the lesson, for three ranks."""
    import torch  # here, so that a process that only starts ranks does not load it
    from torch import distributed as dist

    tensor = torch.zeros(1)
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for source in (None, 2):
        dist.recv(tensor, source)
    for rank in (1, 2):
        dist.send(tensor, rank)


def _add_up_on_rank(function: Answer, secret: int) -> None:
    """Raises ValueError unless the answer returns the sum of all ranks' tensors."""
    import torch  # as above

    ring = ringsim.current_ring()
    numbers = [_fill(secret, 0, rank) for rank in range(ring.world_size)]
    answer = plain_tensor(function(torch.full((1,), numbers[ring.rank])))
    if answer != ((1,), [sum(numbers)]):
        raise ValueError(f"the sum of all tensors must be {[sum(numbers)]}, got {shown(answer)}")
