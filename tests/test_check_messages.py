"""The checks of the lessons on messages: right answers pass, wrong ones fail for their reason."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable
from typing import Any

import IPython.display
import pytest
import torch
import torch.distributed as dist
import verdicts
from verdicts import after, make_tests, receive, send, verdict

import ringsim
from ringsim import check, current_ring
from ringsim.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("on_the_clock")

Answer = Callable[..., Any]
Tensor = torch.Tensor


def is_even() -> bool:
    return current_ring().rank % 2 == 0


# -- hello: shares of numbers; pair_groups


def sharing(total: Callable[[list[int], Any], Any]) -> Answer:
    """Returns an answer that adds up in a span."""

    def answer(numbers: list[int]) -> Any:
        with ringsim.span("share"):
            return total(numbers, current_ring())

    return answer


def own(numbers: list[int], ring: Any) -> list[int]:
    return numbers[ring.rank :: ring.world_size]


share = sharing(lambda numbers, ring: sum(own(numbers, ring)))
share_as_tensor = sharing(lambda *args: torch.tensor(own(*args), dtype=torch.float64).sum())


def share_without_span(numbers: list[int]) -> int:
    return sum(own(numbers, current_ring()))


def share_of_the_next(numbers: list[int]) -> int:
    rank, size = current_ring().rank, current_ring().world_size
    with ringsim.span("share"):
        return sum(numbers[(rank + 1) % size :: size])


def share_before_span(numbers: list[int]) -> int:
    total = share_without_span(numbers)
    with ringsim.span("share"):
        return total


def pairs(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)] if n > 1 else []


def pairs_unless(wrong: Callable[[int], bool], change: Answer) -> Answer:
    return lambda n: change(pairs(n)) if wrong(n) else pairs(n)


# -- ring: numbers passed around


def with_calls(
    more: int = 0,
    to: str = "succ",
    on: str = "",
    source: str = "pred",
    source_on: str = "",
    waits: bool = True,
) -> Answer:
    """Returns the right answer, or one with other arguments of its isend and recv."""

    def answer(token: Tensor) -> Tensor:
        total = token.clone()
        for _ in range(current_ring().world_size - 1 + more):
            wait = send(token, to, on, waits)
            token = receive(token, source, source_on)
            wait()
            total += token
        return total

    return answer


pass_round = with_calls()


def pass_round_by_turns(token: Tensor) -> float:
    """Passes numbers around without isend: even ranks send first, odd ranks receive first."""
    tokens, ring = [token], current_ring()
    for step in range(ring.world_size - 1):
        received = torch.empty(1)
        if is_even():
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        dist.recv(received, ring.pred, group=ring.pred_group, tag=step)
        if not is_even():
            dist.send(tokens[-1], ring.succ, group=ring.succ_group, tag=step)
        tokens.append(received)
    return sum(float(token) for token in tokens)


def rounds_of_zeros(token: Tensor) -> float:
    """Sends all messages, but the numbers bypass them."""
    ring = current_ring()
    verdicts.BOARD[ring.rank] = float(token)
    pass_round(torch.zeros(1))
    return sum(verdicts.BOARD[rank] for rank in range(ring.world_size))


# -- no_deadlock: exchanges that end


def exchange(*names: str, sends: str = "send", **received: Any) -> Callable[[Any], Any]:
    """Returns an exchange that sends and receives in the given order."""

    def answer(mine: Tensor) -> Tensor:
        ring = current_ring()
        into, handle = torch.empty_like(mine), None
        for name in names:
            if name == "send":
                handle = getattr(dist, sends)(mine, ring.succ, group=ring.succ_group)
            else:
                dist.recv(into, ring.pred, **{"group": ring.pred_group, **received})
        if sends == "isend" and handle is not None:
            handle.wait()
        return into

    return answer


def by_order(mine: Tensor) -> Tensor:
    order = ("recv", "send") if current_ring().rank == 0 else ("send", "recv")
    return exchange(*order)(mine)


by_isend = exchange("send", "recv", sends="isend")


def by_batch(mine: Tensor, groups: tuple[str, ...] = ("pred_group", "succ_group")) -> Tensor:
    ring: Any = current_ring()
    received = torch.empty_like(mine)
    on = [getattr(ring, name) if name else None for name in groups]
    both = [
        dist.P2POp(dist.irecv, received, ring.pred, on[0]),
        dist.P2POp(dist.isend, mine, ring.succ, on[1]),
    ]
    batches = [[each] for each in both] if all(groups) else [both]  # a batch is of one group
    for handle in [handle for batch in batches for handle in dist.batch_isend_irecv(batch)]:
        handle.wait()
    return received


def by_one_batch_on_the_world(mine: Tensor) -> Tensor:
    return by_batch(mine, ("", ""))


def returns_before_it_is_there(mine: Tensor) -> Tensor:
    by_isend(mine)
    return torch.full_like(mine, -1.0)


def exchange_of_zeros(mine: Tensor) -> Tensor:
    ring = current_ring()
    verdicts.BOARD[ring.rank, len(mine)] = mine
    by_isend(torch.zeros_like(mine))
    return verdicts.BOARD[ring.pred, len(mine)]


def turns_round(mine: Tensor) -> Tensor:
    wait = send(mine, "pred")
    received = receive(mine, "succ")
    wait()
    return received


# -- every_order: an order that deadlocks, and a program that never does

STUCK_ORDER = [2, 0, 0, 2, 1]


def every_order(answer: Any, seed: int | None) -> Any:
    """Checks a pair of a program and an order."""
    function, order = answer if isinstance(answer, tuple) else (answer, STUCK_ORDER)
    return check.every_order(function, order=order, seed=seed)


def add_up(sources: Callable[[int], list[int | None]], answers: int = 9) -> Answer:
    """Returns a program whose rank 0 receives from the given sources, and answers some ranks."""

    def answer(mine: Tensor) -> Tensor:
        ring, total, received = current_ring(), mine.clone(), torch.empty_like(mine)
        if ring.rank > 0:
            dist.send(mine, 0)
            if ring.rank <= answers:
                dist.recv(total, 0)
            return total
        for source in sources(ring.world_size):
            dist.recv(received, source)
            total += received
        for rank in range(1, min(ring.world_size, answers + 1)):
            dist.send(total, rank)
        return total

    return answer


from_any = add_up(lambda n: [None] * (n - 1))
from_each = add_up(lambda n: [*range(1, n)])
any_first = add_up(lambda n: [None, *range(2, n)])


def subtracts_in_some_orders(mine: Tensor) -> Tensor:
    """Returns the sum, unless rank 2 comes first."""
    ring, total, received = current_ring(), mine.clone(), torch.empty_like(mine)
    if ring.rank == 0:
        first = dist.recv(received)
        total += -received if first == 2 else received
        for _ in range(2, ring.world_size):
            dist.recv(received)
            total += received
    else:
        dist.send(mine, 0)
    dist.broadcast(total, 0)
    return total


# -- ring_all_reduce: chunks


def all_reduce(
    steps: Callable[[int], int] = lambda n: 2 * (n - 1),
    whole: bool = False,
    always_add: bool = False,
    on: str = "",
) -> Answer:
    """Returns the right answer, or one with another number of steps, other chunks or groups."""

    def answer(tensor: Tensor) -> Tensor:
        ring = current_ring()
        n = ring.world_size
        pieces = 1 if whole else n
        chunks = list(tensor.clone().chunk(pieces))
        for step in range(steps(n)):
            out, into = ((ring.rank - step - back) % n % pieces for back in (0, 1))
            wait = send(chunks[out], on=on)
            received = receive(chunks[into], on=on)
            wait()
            add = step < n - 1 or always_add
            chunks[into] = chunks[into] + received if add else received
        return torch.cat(chunks)

    return answer


reduced = all_reduce()


def meets_itself(tensor: Tensor) -> Tensor:
    if current_ring().world_size == 1:
        dist.barrier()
    return reduced(tensor)


# -- token_ring: an order without deadlock


def exchange_tokens(waits: bool = True, on: str = "") -> Answer:
    """Returns an answer that posts its send, receives, and then waits for the send."""

    def answer(output: Tensor | None, space: Tensor | None) -> None:
        wait = send(output, on=on, waits=waits)
        if space is not None:
            space.copy_(receive(space, on=on))
        wait()

    return answer


posted_first = exchange_tokens()


def all_send_first(output: Tensor | None, space: Tensor | None, turned: bool = False) -> None:
    ring = current_ring()
    for sends in (turned, not turned):
        if sends and space is not None:
            dist.recv(space, ring.pred, group=ring.pred_group)
        elif not sends and output is not None:
            dist.send(output, ring.succ, group=ring.succ_group)


all_receive_first = functools.partial(all_send_first, turned=True)


def rank_0_receives_first(output: Tensor | None, space: Tensor | None) -> None:
    (all_receive_first if current_ring().rank == 0 else all_send_first)(output, space)


def into_another_tensor(output: Tensor | None, space: Tensor | None) -> None:
    posted_first(output, None if space is None else torch.empty_like(space))


# -- timed_op: a decorator that changes nothing


Call = Callable[[Answer, tuple[Any, ...], dict[str, Any]], Any]


def calls(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def around(call: Call = calls, name: str = "", encloses: bool = True, **kept: Any) -> Answer:
    """Returns a decorator that makes its calls with ``call(function, args, kwargs)``."""

    def decorator(function: Answer) -> Answer:
        @functools.wraps(function, **kept)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ringsim.span(name or function.__name__):
                result = call(function, args, kwargs) if encloses else None
            return result if encloses else call(function, args, kwargs)

        return timed

    return decorator


timed_op = around()


def waits(*call: Any) -> Any:
    result = calls(*call)
    if hasattr(result, "wait"):
        result.wait()
    return result


def swallows_errors(*call: Any) -> Any:
    try:
        return calls(*call)
    except LookupError:
        return None


def copies(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*(each.clone() if torch.is_tensor(each) else each for each in args), **kwargs)


def unwrapped(function: Answer) -> Answer:
    function = timed_op(function)
    del function.__wrapped__  # type: ignore[attr-defined]
    return function


RIGHT: dict[Answer, list[Answer]] = {
    check.hello: [share, share_as_tensor],
    check.pair_groups: [pairs, lambda n: tuple([a, b] for a, b in pairs(n))],
    check.ring: [pass_round, pass_round_by_turns],
    check.ring_all_reduce: [reduced],
    every_order: [from_any, from_each, (from_any, (2, 0, 1, 0, 2))],
    check.token_ring: [rank_0_receives_first, posted_first],
    check.timed_op: [timed_op],
}
ZEROS = "With 2 ranks, your answer is the same even if every message contains only zeros"
COLLECTIVE = "Rank 0 of 3 called all_reduce, but only messages between neighbours are allowed."
UNREADABLE = ", but returned a tensor whose numbers cannot be read."
STUCK = "In a ring of 3 ranks, ranks 0, 1 and 2 wait for each other."
WORLD = 'on the group "world", but must use its '
# answers, with words of the reason and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.hello: [
        (
            lambda numbers: 7,
            "All 3 ranks returned 7, but each should have returned the sum of its own",
        ),
        (sharing(lambda numbers, _: sum(numbers)), "Every rank added up all the numbers"),
        (
            sharing(lambda numbers, ring: sum(numbers[ring.rank :: 4])),
            "Rank 0 of 3 took every 4th number, but should have taken every 3rd",
        ),
        (share_of_the_next, "Rank 0 of 3 returned the share of rank 1."),
        (share_before_span, 'Rank 0 of 3 took no number inside its span named "share": the work'),
        (share_without_span, 'Rank 0 of 3 must record one span named "share", but recorded 0.'),
        (lambda numbers: numbers[len(numbers)], "of 3 raised IndexError: list index out of range"),
        (3, "Your answer must be a function, got 3."),
    ],
    check.pair_groups: [
        (lambda n: None, "For 1 rank, your answer must be a list of pairs of ranks, got None."),
        (
            lambda n: [(r, (r + 1) % n) for r in range(n)],
            "A ring of 1 rank has no pairs, but your answer has 1: (0, 0).",
        ),
        (lambda n: pairs(n)[:-1], "The ring of 2 ranks is not closed: (1, 0) is missing."),
        (pairs_unless(lambda n: n > 2, lambda due: [(b, a) for a, b in due]), "the wrong way"),
        (lambda n: pairs(n) * 2, "The ring of 2 ranks has 2 pairs, but your answer has 4: some"),
        (pairs_unless(lambda n: n > 2, lambda due: due[::-1]), "must be in order"),
        (pairs_unless(lambda n: n > 4, lambda due: pairs(4)), "has no pair (3, 0), because rank"),
        (pairs_unless(lambda n: n > 4, lambda due: due[:3]), "missing, beginning with (3, 4)."),
    ],
    check.ring: [
        (lambda token: (token.clone(), pass_round(token))[0], ", which is only its own number."),
        (with_calls(more=1), "Rank 0 of 3 must send 2 tokens to its successor, but sent 3."),
        (with_calls(to="pred", source="succ"), "Rank 0 of 3 sent to rank 2, its predecessor"),
        (with_calls(source_on="world"), f'{WORLD}predecessor group "ring:2>0".'),
        (lambda token: dist.all_reduce(token), COLLECTIVE),
        (
            with_calls(waits=False),
            "Rank 0 never waited for its isend",
            "Keep the handle that isend returns, and call its wait()",
        ),
        (rounds_of_zeros, f"{ZEROS}, so your numbers bypass the messages."),
    ],
    check.no_deadlock: [
        (turns_round, "Rank 0 of 3 must send 3 tensors to its successor, but sent none and 3"),
        (after(by_isend, lambda mine: None), "its predecessor's tensor, of shape (1,), but"),
        (after(by_isend, lambda mine: mine), "of shape (1,), but returned its own."),
        (lambda mine: by_isend(mine)[:1], ", but returned a tensor of shape (1,)."),
        (exchange_of_zeros, ZEROS),
        (returns_before_it_is_there, ", but number 0 of the returned tensor differs."),
        (lambda mine: by_isend(mine).to("meta"), UNREADABLE),
    ],
    every_order: [
        (any_first, "In the order 0, 2, 0, 1, 2, ranks 0 and 2 wait for each other.", "Play"),
        ((from_any, []), "After your choices, ranks 0, 1 and 2 may still go.", "rank 0"),
        ((from_any, [2, 0, 0, 2]), "After your choices, rank 1 may still go."),
        ((from_any, [1, 0, 0, 2, 0, 1, 0, 2]), "In your order, the program finishes."),
        ((from_any, [2, 2]), "Your order is impossible: rank must be one that may go (0, 1), got"),
        ((from_any, None), "Your order must be a list of ranks, got None."),
        (add_up(lambda n: [None]), "the sum of all tensors must be "),
        (add_up(lambda n: [None] * (n - 1), answers=1), "the sum of all tensors must be "),
        (lambda mine: mine, "Rank 0 of 3 raised ValueError: the sum of all tensors must be "),
        (subtracts_in_some_orders, "the sum of all tensors must be "),
        (3, "Your answer must be a function, got 3."),
    ],
    check.ring_all_reduce: [
        (lambda tensor: tensor, "Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, but sent none."),
        (all_reduce(lambda n: n - 1), "but sent 328 in 2 messages", "only half of the algorithm"),
        (
            all_reduce(lambda n: n - 1, whole=True),
            "must send 2 * 2/3 * 492 = 656 bytes, but sent 984 in 2 messages.",
            "Your whole tensor goes around the ring.",
        ),
        (all_reduce(always_add=True), "must return the sum of all tensors: number "),
        (after(reduced, lambda tensor: tensor), "sum of all tensors: number 0, in chunk 0, must"),
        (meets_itself, "A single rank has no other rank to talk to, but called barrier."),
    ],
    check.token_ring: [
        (all_send_first, STUCK, "before they receive"),
        (all_receive_first, "ranks 0, 2 and 1 wait for each other", "before they send"),
        (into_another_tensor, "token 0 of batch 0 must be ", "Receive into `space` itself"),
        (exchange_tokens(waits=False), "rank 0 posted isend to 1 ("),
        (exchange_tokens(on="world"), WORLD, "Pass the group"),
        (
            lambda output, space: dist.send(output, current_ring().succ),
            "Expected parameter `tensor` of type torch.Tensor",
            "Send output unless it is None",
        ),
        (lambda *_: None, "Rank 0 of 3 must send 12 outputs, but sent none.", "Send output unless"),
    ],
    check.timed_op: [
        (lambda function: function, "called share_gradients twice and must record one span with"),
        (lambda function: function(torch.ones(1)), "the decorator called share_gradients, but"),
        (around(assigned=("__doc__",)), "keep its name, share_gradients, but is called timed."),
        (unwrapped, "(tensor, factor=2.0, *, group=None), but its signature is (*args, **kwargs)."),
        (around(waits), "returns a handle, but the decorator waited for it."),
        (around(after(calls, lambda *_: None)), "must return the function's result, but returned"),
        (around(swallows_errors), " must raise the function's error, but raised nothing."),
        (around(copies), "share_gradients must receive the arguments that the caller"),
        (around(after(calls, calls)), "the originals 4 times, but called them 7 times"),
        (around(after(lambda *_: dist.barrier(), calls)), "Rank 0 of 3 called barrier in the"),
        (around(name="all_reduce"), "with that name per call, but recorded 0 and one named all_r"),
    ],
}


test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)


def test_an_answer_for_one_size_alone_does_not_pass() -> None:
    result = verdict(check.hello, sharing(lambda numbers, ring: sum(numbers[ring.rank :: 3])))
    assert "took every 3rd number, but should have taken every" in result.reason
    assert result.world_size != 3


def test_the_same_seed_draws_the_same() -> None:
    fails_late = pairs_unless(lambda n: n > 4, lambda due: [])
    first, second = (verdict(check.pair_groups, fails_late, seed=77) for _ in range(2))
    assert first.as_dict() == second.as_dict()
    sizes = {check.pair_groups(fails_late).world_size for _ in range(12)}
    assert len(sizes) > 1, "another seed must draw another size"


def test_a_ring_of_two_must_use_the_right_one_of_its_two_groups() -> None:
    def turned(token: Tensor) -> Tensor:
        """Fails only with two ranks, whose predecessor and successor are the same rank."""
        if current_ring().world_size == 2:
            return with_calls(on="pred", source_on="succ")(token)
        return pass_round(token)

    assert verdict(check.ring, turned).reason == (
        'Rank 0 of 2 sent to rank 1 on the group "ring:1>0", but must use its successor group '
        '"ring:0>1".'
    )


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that a notebook displays."""
    shown: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", lambda value, **_: shown.append(value))
    return shown


def test_a_failing_result_shows_text_and_then_the_picture(displayed: list[Any]) -> None:
    wrong = verdict(check.ring, with_calls(on="world", source_on="world"))
    wrong._ipython_display_()
    text, picture = displayed
    assert (text["text/plain"], picture) == (repr(wrong), wrong.trace)
    for word in ("\N{BALLOT X}", "not yet", "<summary>A hint</summary>"):
        assert word in text["text/html"]
    assert text["text/html"].count(html.escape(wrong.reason)) == 1
    data, about = wrong.trace._repr_mimebundle_()  # type: ignore[union-attr]
    assert "image/png" in data
    assert about["image/png"]["alt"]
    displayed.clear()
    verdict(check.ring, pass_round)._ipython_display_()
    (text,) = displayed
    assert "\N{CHECK MARK}" in text["text/html"]
    assert "<summary>" not in text["text/html"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (exchange("send", "recv"), STUCK),
        (exchange("send", "recv", sends="isend", tag=1), "receives with tag 1."),
        (exchange("send", "recv", sends="isend", group=None), "receives on group "),
    ],
)
def test_no_deadlock_names_who_waits_for_whom(
    answer: Answer, reason: str, displayed: list[Any]
) -> None:
    result = verdict(check.no_deadlock, answer)
    assert not result.passed
    assert reason in result.reason
    assert "test_check_messages.py:" in result.reason
    assert result.diagnosis.edges
    result._ipython_display_()
    (page,) = displayed
    text, *pictures = page["text/html"].split("<img ")
    assert len(pictures) == 1, "the picture of the waits"
    assert text.count(html.escape(result.reason)) == 1, "the reason appears once"


WAYS = [
    (by_order, "order", ""),
    (by_isend, "isend", ""),
    (by_batch, "batch", ""),
    (by_one_batch_on_the_world, "batch", ""),
    (by_isend, "order", 'uses isend and recv: this exercise asks you to solve it with "order".'),
    (by_order, "isend", "uses recv and send: this exercise"),
    (by_batch, "isend", "uses batch_irecv and batch_isend: this exercise"),
]


@pytest.mark.parametrize(("answer", "way", "reason"), WAYS)
def test_no_deadlock_wants_the_way_that_was_asked_for(
    answer: Answer, way: str | None, reason: str
) -> None:
    result = verdict(functools.partial(check.no_deadlock, way=way), answer)
    assert (result.passed, result.diagnosis) == (not reason, None)
    assert (reason or "rings of 2, 3, 4 and 5 ranks") in result.reason
    assert reason or result.trace.world_size == 5


def test_no_deadlock_refuses_a_way_that_there_is_not() -> None:
    with pytest.raises(ArgumentError, match="'order', 'isend', 'batch' or None, got 'luck'"):
        check.no_deadlock(by_order, way="luck")


def test_the_verdict_states_the_bytes() -> None:
    result = verdict(check.ring_all_reduce, reduced)
    size = result.trace.world_size
    messages = result.trace.to_pandas("messages")
    (sent,) = set(messages.groupby("src")["size_bytes"].sum())
    whole = sent * size // (2 * (size - 1))
    assert result.reason.endswith(f"each rank sent 2 * {size - 1}/{size} * {whole} = {sent} bytes.")
    assert messages["src"].nunique() == size
