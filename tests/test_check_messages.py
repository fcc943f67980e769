"""The checks of the lessons on messages, on simulated ranks.

Right answers pass, and each wrong one fails for its own reason.
"""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable
from typing import Any

import IPython.display
import pytest
import torch
import torch.distributed as dist
import verdicts
from verdicts import make_tests, verdict

import ringsim
from ringsim import check
from ringsim.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("on_the_clock")

Answer = Callable[..., Any]

# -- hello: shares of numbers; pair_groups


def sharing(total: Callable[[list[int], Any], Any]) -> Answer:
    """An answer that adds up in a span."""

    def answer(numbers: list[int]) -> Any:
        with ringsim.span("share"):
            return total(numbers, ringsim.current_ring())

    return answer


share = sharing(lambda numbers, ring: sum(numbers[ring.rank :: ring.world_size]))
share_as_tensor = sharing(
    lambda numbers, ring: torch.tensor(
        numbers[ring.rank :: ring.world_size], dtype=torch.float64
    ).sum()
)


def share_before_span(numbers: list[int]) -> int:
    total = share_without_span(numbers)
    with ringsim.span("share"):
        pass
    return total


def share_without_span(numbers: list[int]) -> int:
    ring = ringsim.current_ring()
    return sum(numbers[ring.rank :: ring.world_size])


def on_rank_0(answer: Answer, otherwise: Answer = lambda *_: None) -> Answer:
    """One answer on rank 0, and another on the other ranks."""
    return lambda *args: (answer if ringsim.current_ring().rank == 0 else otherwise)(*args)


def pairs(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)] if n > 1 else []


# -- ring: numbers go round


def pass_round_by_turns(token: torch.Tensor) -> float:
    """No isend: even ranks send first, odd ones receive first."""
    ring = ringsim.current_ring()
    tokens = [token]
    for step in range(ring.world_size - 1):
        received = torch.empty(1)
        if ring.rank % 2 == 0:
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        dist.recv(received, ring.pred, group=ring.pred_group, tag=step)
        if ring.rank % 2 == 1:
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        tokens.append(received)
    return sum(float(token) for token in tokens)


def with_calls(**changes: Any) -> Answer:
    """The right answer, with other arguments of its isend and recv."""

    def answer(token: torch.Tensor) -> torch.Tensor:
        ring = ringsim.current_ring()
        choose = {
            "pred": ring.pred,
            "succ": ring.succ,
            "pred_group": ring.pred_group,
            "succ_group": ring.succ_group,
            "world": None,
        }
        total = token.clone()
        for _ in range(ring.world_size - 1 + changes.get("more", 0)):
            sent = dist.isend(
                token,
                choose[changes.get("to", "succ")],
                group=choose[changes.get("on", "succ_group")],
            )
            received = torch.empty_like(token)
            dist.recv(
                received,
                choose[changes.get("source", "pred")],
                group=choose[changes.get("source_on", "pred_group")],
            )
            if changes.get("waits", True):
                sent.wait()
            token = received
            total += token
        return total

    return answer


pass_round = with_calls()


def rounds_of_zeros(token: torch.Tensor) -> float:
    """The messages are all there, and the numbers travel beside them."""
    ring = ringsim.current_ring()
    verdicts.BOARD[ring.rank] = float(token)
    pass_round(torch.zeros(1))
    return sum(verdicts.BOARD[rank] for rank in range(ring.world_size))


def sends_first(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    dist.send(token, ring.succ, group=ring.succ_group)
    dist.recv(token, ring.pred, group=ring.pred_group)
    return token


def calls_its_successor_on_the_other_group(token: torch.Tensor) -> None:
    ring = ringsim.current_ring()
    dist.isend(token, ring.succ, group=ring.pred_group)


def recurses_at_one(token: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    if ring.world_size == 1:
        dist.send(token, ring.succ, group=ring.succ_group)
    return pass_round(token)


# -- no_deadlock: exchanges that end


def exchange(
    *names: str, sends: str = "send", tag_shift: int = 0, on_world: bool = False, waits: bool = True
) -> Callable[[Any], Any]:
    """An exchange that sends and receives in the order given."""

    def answer(mine: torch.Tensor) -> torch.Tensor:
        ring = ringsim.current_ring()
        received = torch.empty_like(mine)
        handle = None
        for name in names:
            if name == "send":
                handle = getattr(dist, sends)(mine, ring.succ, group=ring.succ_group)
            else:
                dist.recv(
                    received, ring.pred, group=None if on_world else ring.pred_group, tag=tag_shift
                )
        if sends == "isend" and handle is not None and waits:
            handle.wait()
        return received

    return answer


by_order = on_rank_0(exchange("recv", "send"), exchange("send", "recv"))


def by_batch(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    both = [
        dist.P2POp(dist.irecv, received, ring.pred, group=ring.pred_group),
        dist.P2POp(dist.isend, mine, ring.succ, group=ring.succ_group),
    ]
    # a batch is of one group
    handles = [handle for each in both for handle in dist.batch_isend_irecv([each])]
    for handle in handles:
        handle.wait()
    return received


def by_one_batch_on_the_world(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, ring.succ), dist.P2POp(dist.irecv, received, ring.pred)]
    for handle in dist.batch_isend_irecv(both):
        handle.wait()
    return received


by_isend = exchange("send", "recv", sends="isend")


def returns_before_it_is_there(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    handles = [
        dist.isend(mine, ring.succ, group=ring.succ_group),
        dist.irecv(received, ring.pred, group=ring.pred_group),
    ]
    copy = received.clone().fill_(-1.0)
    for handle in handles:
        handle.wait()
    return copy


def exchange_of_zeros(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    verdicts.BOARD[ring.rank, len(mine)] = mine
    by_isend(torch.zeros_like(mine))
    return verdicts.BOARD[ring.pred, len(mine)]


def turns_round(mine: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    received = torch.empty_like(mine)
    sent = dist.isend(mine, ring.pred, group=ring.pred_group)
    dist.recv(received, ring.succ, group=ring.succ_group)
    sent.wait()
    return received


# -- ring_all_reduce: chunks


def all_reduce(steps: Callable[[int], int] = lambda n: 2 * (n - 1), **changes: Any) -> Answer:
    """The right answer, or one with another number of steps, other chunks, or other arguments."""

    def answer(tensor: torch.Tensor) -> Any:
        ring = ringsim.current_ring()
        n, shift = ring.world_size, changes.get("shift", 0)
        pieces = 1 if changes.get("whole") else n
        chunks = list(tensor.clone().chunk(pieces))
        choose = {
            "succ": ring.succ,
            "pred": ring.pred,
            "succ_group": ring.succ_group,
            "pred_group": ring.pred_group,
            "world": None,
        }
        for step in range(steps(n)):
            out, into = (
                (ring.rank - step + shift) % n % pieces,
                (ring.rank - step - 1 + shift) % n % pieces,
            )
            to, on = choose[changes.get("to", "succ")], choose[changes.get("on", "succ_group")]
            sent = dist.isend(chunks[out], to, group=on)
            received = torch.empty_like(chunks[into])
            dist.recv(
                received,
                choose[changes.get("source", "pred")],
                group=choose[changes.get("source_on", "pred_group")],
            )
            if changes.get("waits", True):
                sent.wait()
            if step < n - 1 or changes.get("always_add"):
                chunks[into] += received
            else:
                chunks[into] = received
        return changes.get("end", torch.cat)(chunks)

    return answer


reduced = all_reduce()


def reduced_by_turns(tensor: torch.Tensor) -> torch.Tensor:
    """Right, in place, without isend.

    Even ranks send first; and with messages of one number each.
    """
    ring = ringsim.current_ring()
    n = ring.world_size
    chunks = tensor.view(n, -1)
    for step in range(2 * (n - 1)):
        out, into = (ring.rank - step) % n, (ring.rank - step - 1) % n
        for place in range(chunks.shape[1]):
            received = torch.empty(1)
            if ring.rank % 2 == 0:
                dist.send(chunks[out, place : place + 1], ring.succ, group=ring.succ_group)
            dist.recv(received, ring.pred, group=ring.pred_group)
            if ring.rank % 2 == 1:
                dist.send(chunks[out, place : place + 1], ring.succ, group=ring.succ_group)
            chunks[into, place] = received[0] + (chunks[into, place] if step < n - 1 else 0)
    return tensor


def meets_itself(tensor: torch.Tensor) -> torch.Tensor:
    ring = ringsim.current_ring()
    if ring.world_size == 1:
        dist.barrier()
    return reduced(tensor)


# -- token_ring: an order that never jams


def send(output: torch.Tensor | None) -> None:
    ring = ringsim.current_ring()
    if output is not None:
        dist.send(output, ring.succ, group=ring.succ_group)


def receive(space: torch.Tensor | None) -> None:
    ring = ringsim.current_ring()
    if space is not None:
        dist.recv(space, ring.pred, group=ring.pred_group)


def all_send_first(output: torch.Tensor | None, space: torch.Tensor | None) -> None:
    send(output)
    receive(space)


def all_receive_first(output: torch.Tensor | None, space: torch.Tensor | None) -> None:
    receive(space)
    send(output)


rank_0_receives_first = on_rank_0(all_receive_first, all_send_first)


def posted_first(
    output: torch.Tensor | None, space: torch.Tensor | None, waits: bool = True
) -> None:
    ring = ringsim.current_ring()
    sent = dist.isend(output, ring.succ, group=ring.succ_group) if output is not None else None
    receive(space)
    if sent is not None and waits:
        sent.wait()


def on_the_world(output: torch.Tensor | None, space: torch.Tensor | None) -> None:
    ring = ringsim.current_ring()
    if ring.rank == 0 and space is not None:
        dist.recv(space, ring.pred)
    if output is not None:
        dist.send(output, ring.succ)
    if ring.rank and space is not None:
        dist.recv(space, ring.pred)


# -- timed_op: a decorator that changes nothing


def timed_by_hand(function: Answer) -> Answer:
    """Right without functools.wraps and without with."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        span = ringsim.span(function.__name__)
        span.__enter__()
        try:
            return function(*args, **kwargs)
        finally:
            span.__exit__(None, None, None)

    timed.__name__, timed.__doc__ = function.__name__, function.__doc__
    timed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return timed


def around(call: Callable[[Answer, tuple[Any, ...], dict[str, Any]], Any], **kept: Any) -> Answer:
    """A decorator that makes its calls by ``call(function, args, kwargs)``."""

    def decorator(function: Answer) -> Answer:
        @functools.wraps(function, **kept)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ringsim.span(function.__name__):
                return call(function, args, kwargs)

        return timed

    return decorator


def calls(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


timed_op = around(calls)


def waits(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    if hasattr(result, "wait"):
        result.wait()
    return result


def swallows_errors(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except LookupError:
        return None


def raises_another_error(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except LookupError as error:
        raise KeyError("failed") from error


def spans(name: str | None = None, *, times: int = 1, around_the_call: bool = True) -> Answer:
    """A decorator with spans of other names, in other numbers or elsewhere."""

    def decorator(function: Answer) -> Answer:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            for _ in range(times - around_the_call):
                with ringsim.span(name or function.__name__):
                    pass
            if not around_the_call:
                return function(*args, **kwargs)
            with ringsim.span(name or function.__name__):
                return function(*args, **kwargs)

        return timed

    return decorator


def unwrapped(function: Answer) -> Answer:
    del function.__wrapped__  # type: ignore[attr-defined]
    return function


RIGHT: dict[Answer, list[Answer]] = {
    check.hello: [share, share_as_tensor],
    check.pair_groups: [pairs, lambda n: tuple([a, b] for a, b in pairs(n))],
    check.ring: [pass_round, pass_round_by_turns],
    check.ring_all_reduce: [reduced, reduced_by_turns],
    check.token_ring: [rank_0_receives_first, posted_first],
    check.timed_op: [timed_op, timed_by_hand],
}
# what is answered, words of the reason, and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.hello: [
        (lambda numbers: None, "Rank 0 of 3 must return the sum of its share, "),
        (
            lambda numbers: 7,
            "All 3 ranks returned 7, and each must return the sum of its own share.",
        ),
        (sharing(lambda numbers, _: sum(numbers)), "Every rank added up all the numbers"),
        (
            sharing(lambda numbers, ring: sum(numbers[ring.rank :: 4])),
            "Rank 0 of 3 took every 4th number, and must take every 3rd",
        ),
        (
            sharing(
                lambda numbers, ring: sum(
                    numbers[(ring.rank + 1) % ring.world_size :: ring.world_size]
                )
            ),
            "Rank 0 of 3 returned the share of rank 1.",
        ),
        (
            share_before_span,
            'Rank 0 of 3 took no number inside its span named "share": the work is somewhere else.',
        ),
        (share_without_span, 'Rank 0 of 3 must record one span named "share", got 0.'),
        (
            sharing(lambda numbers, ring: sum(numbers[ring.rank :: ring.world_size]) + 1),
            "Rank 0 of 3 must return the sum of its share, ",
        ),
        (
            lambda numbers: numbers[len(numbers)],
            "of 3 raised IndexError: list index out of range (line ",
        ),
        (lambda: 3, "takes 0 positional arguments but 1 was given"),
        (3, "The answer must be a function, got 3."),
    ],
    check.pair_groups: [
        (lambda n: [], "A ring of 2 ranks has 2 pairs, (0, 1) and (1, 0), got none."),
        (lambda n: None, "For 1 rank the answer must be a list of pairs of ranks, got None."),
        (lambda n: list(range(n)), "must be a list of pairs of ranks, got [0]."),
        (lambda n: [(0, 1), (1, 2), (2, 3), (3, 0)], "A ring of 1 rank has no pairs, got 4"),
        (
            lambda n: [(rank, (rank + 1) % n) for rank in range(n)],
            "A ring of 1 rank has no pairs, got 1: (0, 0).",
        ),
        (
            lambda n: [(rank, rank + 1) for rank in range(n - 1)],
            "The ring of 2 ranks is not closed: (1, 0) is missing.",
        ),
        (
            lambda n: [(rank, rank + 1) for rank in range(n)] if n > 1 else [],
            "The ring of 2 ranks has no pair (1, 2)",
        ),
        (lambda n: pairs(n) if n != 2 else [(0, 1)], "(1, 0) is missing."),
        (
            lambda n: [(b, a) for a, b in pairs(n)] if n > 2 else pairs(n),
            "the wrong way round: (1, 0) instead of (0, 1).",
        ),
        (lambda n: pairs(n) * 2, "The ring of 2 ranks has 2 pairs, got 4: some are there twice."),
        (lambda n: pairs(n)[::-1] if n > 2 else pairs(n), "must come in order"),
        (
            lambda n: pairs(n) if n < 5 else pairs(4),
            "has no pair (3, 0), because rank 3's successor is not rank 0.",
        ),
        (lambda n: pairs(n) if n < 5 else pairs(n)[:3], "lacks"),
    ],
    check.ring: [
        (lambda token: None, "Rank 0 of 3 must send 2 tokens to its successor, sent none."),
        (
            lambda token: (pass_round(token), None)[1],
            "Rank 0 of 3 must return the sum of all numbers, ",
        ),
        (lambda token: (token.clone(), pass_round(token))[0], ", its own number alone."),
        (with_calls(more=-1), "Rank 0 of 3 must send 2 tokens to its successor, sent 1."),
        (with_calls(more=1), "Rank 0 of 3 must send 2 tokens to its successor, sent 3."),
        (
            with_calls(to="pred", on="pred_group", source="succ", source_on="succ_group"),
            "Rank 0 of 3 sent to rank 2, its predecessor",
        ),
        (
            with_calls(source="succ", source_on="succ_group"),
            "Rank 0 of 3 received from rank 1, its successor",
        ),
        (
            with_calls(on="world", source_on="world"),
            'on the group "world", and must do so on its successor group "ring:0>1".',
        ),
        (
            with_calls(source_on="world"),
            'on the group "world", and must do so on its predecessor group "ring:2>0".',
        ),
        (
            lambda token: dist.all_reduce(token),
            "Rank 0 of 3 called all_reduce, and only messages between neighbours are allowed.",
        ),
        (
            with_calls(waits=False),
            "Rank 0 never waited for its isend to 1 (",
            "Keep what isend returns and call its wait()",
        ),
        (
            rounds_of_zeros,
            (
                "With 2 ranks the answer is the same where every message carries zeros: its "
                "numbers go another way."
            ),
        ),
        (sends_first, "In a ring of 3, ranks 0, 1 and 2 wait for each other: rank 0 waits "),
        (calls_its_successor_on_the_other_group, "Global rank 1 is not part of group "),
        (recurses_at_one, "ust be another rank, got this one (rank 0 of 1)"),
    ],
    check.no_deadlock: [
        (turns_round, "Rank 0 of 3 must send 3 tensors to its successor, sent none, and 3 others."),
        (
            lambda mine: (by_isend(mine), None)[1],
            "Rank 0 of 3 must return the tensor of its predecessor, of shape (1,), got None.",
        ),
        (lambda mine: (by_isend(mine), mine)[1], "of shape (1,), got its own."),
        (lambda mine: by_isend(mine)[:1], ", got one of shape (1,)."),
        (
            lambda mine: torch.ones(5),
            "Rank 0 of 3 must send 3 tensors to its successor, sent none.",
        ),
        (
            exchange("send", "recv", sends="isend", waits=False),
            "Rank 0 never waited for its isend to 1 (",
        ),
        (
            exchange_of_zeros,
            "With 2 ranks the answer is the same where every message carries zeros",
        ),
        (returns_before_it_is_there, ", and number 0 of it differs."),
        (
            lambda mine: dist.all_reduce(mine),
            "Rank 0 of 3 called all_reduce, and only messages between neighbours are allowed.",
        ),
        (lambda mine: by_isend(mine).to_sparse(), ", got one whose numbers cannot be read."),
        (lambda mine: by_isend(mine).to("meta"), ", got one whose numbers cannot be read."),
    ],
    check.ring_all_reduce: [
        (lambda tensor: tensor, "Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, sent none."),
        (
            all_reduce(lambda n: n - 1),
            "must send 2 * 2/3 * 492 = 656 bytes, sent 328 in 2 messages.",
            "That is one of the two halves.",
        ),
        (
            all_reduce(lambda n: n - 1, whole=True),
            "must send 2 * 2/3 * 492 = 656 bytes, sent 984 in 2 messages.",
            "The whole tensor goes round here.",
        ),
        (
            lambda tensor: dist.all_reduce(tensor),
            "Rank 0 of 3 called all_reduce, and only messages between neighbours are allowed.",
        ),
        (
            all_reduce(on="world", source_on="world"),
            'on the group "world", and must do so on its successor group "ring:0>1".',
        ),
        (all_reduce(always_add=True), "must return the sum of all tensors: number "),
        (
            lambda tensor: (reduced(tensor), tensor)[1],
            "must return the sum of all tensors: number 0, in chunk 0, must be ",
        ),
        (
            lambda tensor: (reduced(tensor), None)[1],
            "must return a tensor of shape (123,), got None.",
        ),
        (
            all_reduce(end=lambda chunks: chunks),
            "must return a tensor of shape (123,), got [tensor([",
        ),
        (
            lambda tensor: reduced(tensor).to("meta"),
            "of shape (123,), got one whose numbers cannot be read.",
        ),
        (all_reduce(waits=False), "Rank 0 never waited for its isend to 1 ("),
        (meets_itself, "A single rank has nobody to talk to, and called barrier."),
    ],
    check.token_ring: [
        (
            all_send_first,
            "In a ring of 3, ranks 0, 1 and 2 wait for each other: ",
            "before they receive",
        ),
        (
            all_receive_first,
            "In a ring of 3, ranks 0, 2 and 1 wait for each other: ",
            "before they send",
        ),
        (
            lambda output, space: posted_first(
                output, None if space is None else torch.empty_like(space)
            ),
            "Token 0 of batch 0 must be ",
            "Receive into space itself",
        ),
        (functools.partial(posted_first, waits=False), "Rank 0 never waited for its isend to 1 ("),
        (on_the_world, 'on the group "world", and must do so on its', "Name the group"),
        (
            lambda output, space: dist.send(
                output, ringsim.current_ring().succ, group=ringsim.current_ring().succ_group
            ),
            "Expected parameter `tensor` of type torch.Tensor",
            "Send output unless it is None",
        ),
        (
            lambda output, space: None,
            "Rank 0 of 3 must send 12 outputs, sent none.",
            "Send output unless it is None",
        ),
    ],
    check.timed_op: [
        (
            lambda function: function,
            (
                "called share_gradients twice and must record one span of "
                "that name for each call, got 0."
            ),
        ),
        (lambda function: None, "On rank 0 of 3 the decorator must return a function, got None."),
        (
            lambda function: function(torch.ones(1)),
            (
                "the decorator called share_gradients, and must return a function that does so "
                "when it is called."
            ),
        ),
        (
            around(calls, assigned=("__doc__",)),
            "the decorated function must keep its name, share_gradients, got timed.",
        ),
        (
            around(calls, assigned=("__name__",)),
            "share_gradients must keep its docstring, got None.",
        ),
        (
            lambda function: unwrapped(timed_op(function)),
            "must keep its signature, (tensor, factor=2.0, *, group=None), got (*args, **kwargs).",
        ),
        (around(waits), "returns a handle, and the decorator waited for it."),
        (
            around(lambda function, args, kwargs: (calls(function, args, kwargs), None)[1]),
            "the decorated share_gradients must return what the function returns, got None.",
        ),
        (around(swallows_errors), " must raise what the function raises, and nothing was raised."),
        (
            around(raises_another_error),
            " must raise what the function raises, and got KeyError: 'failed'.",
        ),
        (
            around(
                lambda function, args, kwargs: function(
                    *(each.clone() if torch.is_tensor(each) else each for each in args), **kwargs
                )
            ),
            "share_gradients must get the arguments that it was called with",
        ),
        (
            around(
                lambda function, args, kwargs: (
                    calls(function, args, kwargs),
                    calls(function, args, kwargs),
                )[1]
            ),
            "each of 4 calls must call the function once, and it was called 7 times.",
        ),
        (
            around(
                lambda function, args, kwargs: (dist.barrier(), calls(function, args, kwargs))[1]
            ),
            "Rank 0 of 3 called barrier in the decorator, which must not communicate.",
        ),
        (
            spans("all_reduce"),
            "one span of that name for each call, got 0, and one named all_reduce.",
        ),
        (spans(times=2), "one span of that name for each call, got 4."),
        (
            lambda function: functools.wraps(function)(lambda tensor: function(tensor)),
            "raised TypeError: share_gradients() got an unexpected keyword argument 'group'.",
        ),
    ],
}


test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)


def test_an_answer_for_one_size_alone_does_not_pass() -> None:
    result = verdict(check.hello, sharing(lambda numbers, ring: sum(numbers[ring.rank :: 3])))
    assert "took every 3rd number, and must take every" in result.reason
    assert result.world_size != 3


def test_the_same_seed_draws_the_same() -> None:
    def fails_late(n: int) -> list[tuple[int, int]]:
        return pairs(n) if n < 5 else []

    first, second = (verdict(check.pair_groups, fails_late, seed=77) for _ in range(2))
    assert first.as_dict() == second.as_dict()
    sizes = {check.pair_groups(fails_late).world_size for _ in range(12)}
    assert len(sizes) > 1, "another seed must draw another size"


def test_a_ring_of_two_must_use_the_right_one_of_its_two_groups() -> None:
    def turned(token: torch.Tensor) -> torch.Tensor:
        """Right but for two ranks, where predecessor and successor are the same rank."""
        ring = ringsim.current_ring()
        if ring.world_size == 2:
            return with_calls(on="pred_group", source_on="succ_group")(token)
        return pass_round(token)

    result = verdict(check.ring, turned)
    assert result.reason == (
        'Rank 0 of 2 sent to rank 1 on the group "ring:1>0", and must do so on its successor '
        'group "ring:0>1".'
    )


def test_a_failing_result_shows_text_and_then_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr(
        IPython.display, "display", lambda value, **options: displayed.append(value)
    )
    wrong = verdict(check.ring, with_calls(on="world", source_on="world"))
    wrong._ipython_display_()
    shown, picture = displayed
    assert (shown["text/plain"], picture) == (repr(wrong), wrong.trace)
    assert [
        word
        for word in ("\N{BALLOT X}", "not yet", "<summary>A hint</summary>")
        if word not in shown["text/html"]
    ] == []
    assert shown["text/html"].count(html.escape(wrong.reason)) == 1
    data, about = wrong.trace._repr_mimebundle_()  # type: ignore[union-attr]
    assert "image/png" in data
    assert about["image/png"]["alt"]
    displayed.clear()
    right = verdict(check.ring, pass_round)
    right._ipython_display_()
    assert len(displayed) == 1
    assert "\N{CHECK MARK}" in displayed[0]["text/html"]
    assert "<summary>" not in displayed[0]["text/html"]


@pytest.mark.parametrize(
    ("answer", "way"),
    [
        (by_order, "order"),
        (by_isend, "isend"),
        (by_batch, "batch"),
        (by_one_batch_on_the_world, "batch"),
        (by_isend, None),
    ],
)
def test_no_deadlock_passes_every_way_out(answer: Answer, way: str | None) -> None:
    result = verdict(lambda function, seed: check.no_deadlock(function, way=way, seed=seed), answer)
    assert result.passed, result
    assert "rings of 2, 3, 4 and 5 ranks" in result.reason
    assert result.trace.world_size == 5
    assert result.diagnosis is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            exchange("send", "recv"),
            "In a ring of 3, ranks 0, 1 and 2 wait for each other: rank 0 waits ",
        ),
        (
            exchange("recv", "send"),
            "In a ring of 3, ranks 0, 2 and 1 wait for each other: rank 0 waits ",
        ),
        (
            exchange("send", "recv", sends="isend", tag_shift=1),
            "never meet: tag 0 is not tag 1. The same holds for 2 more pairs of ranks.",
        ),
        (exchange("send", "recv", sends="isend", on_world=True), "never meet: group "),
        (exchange("recv"), "ranks 0, 2 and 1 wait for each other"),
        (exchange("send", "recv", "recv", sends="isend"), "wait for each other"),
    ],
)
def test_no_deadlock_names_who_waits_for_whom(
    answer: Answer, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = verdict(check.no_deadlock, answer)
    assert not result.passed
    assert reason in result.reason
    assert "test_check_messages.py:" in result.reason
    assert result.diagnosis.edges
    shown: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", lambda what, raw=False: shown.append(what))
    result._ipython_display_()
    (page,) = shown
    assert page["text/html"].count("<img ") == 1, "the picture of who waits for whom"
    assert page["text/html"].partition("<img")[0].count(html.escape(result.reason)) == 1, (
        "nothing is said twice"
    )


@pytest.mark.parametrize(
    ("answer", "way", "reason"),
    [
        (by_isend, "order", "with isend and recv: this exercise is about the way called order."),
        (by_order, "isend", "with recv and send: this exercise"),
        (by_order, "batch", "with recv and send: this exercise"),
        (by_batch, "isend", "with batch_irecv and batch_isend: this exercise"),
    ],
)
def test_no_deadlock_wants_the_way_that_was_asked_for(
    answer: Answer, way: str, reason: str
) -> None:
    result = verdict(lambda function, seed: check.no_deadlock(function, way=way, seed=seed), answer)
    assert not result.passed
    assert reason in result.reason


def test_no_deadlock_refuses_a_way_that_there_is_not() -> None:
    with pytest.raises(
        ArgumentError, match="way must be one of 'order', 'isend', 'batch' or None, got 'luck'"
    ):
        check.no_deadlock(by_order, way="luck")


def test_the_verdict_states_the_bytes() -> None:
    result = verdict(check.ring_all_reduce, reduced)
    assert result.trace is not None
    size = result.trace.world_size
    sent = result.trace.to_pandas("messages").groupby("src")["size_bytes"].sum().tolist()
    assert len(set(sent)) == 1
    assert len(sent) == size
    assert result.reason.endswith(
        f"each sent 2 * {size - 1}/{size} * {sent[0] * size // (2 * (size - 1))} = {sent[0]} bytes."
    )
