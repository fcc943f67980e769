"""The checks for the lesson on the communication layer: a timing decorator and an all-reduce."""

from __future__ import annotations

import inspect
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.check.examination import (
    ALONE_HINT,
    RAISED_HINT,
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
from ringsim.traces.units import count
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from torch import Tensor

Complaint = tuple[str, str]  # a reason, to follow "On rank 0 of 3, ", and a hint
_NAMES = ("sum_up", "share_gradients", "agree", "merge", "add_over_ranks", "join_parts")
_WRAPS_HINT = (
    "Decorate the inner function with functools.wraps(function), which copies the name, docstring "
    "and signature."
)
_RETURN_HINT = (
    "Define an inner function that calls the original function and returns its result. Then return "
    "the inner function: return timed."
)
_PASS_ON_HINT = (
    "Have the inner function accept *args and **kwargs, pass both on unchanged, and return the "
    "original function's result."
)
_SPAN_HINT = "Put the call inside this block: with ringsim.span(function.__name__):"
Numbers = list[float]
_ITEM_BYTES = 4  # float32
_WHOLE_HINT = (
    "Your whole tensor goes around the ring. Cut it into N chunks, tensor.chunk(N), and send one "
    "chunk at a time: in step s, rank r sends chunk (r - s) % N and receives chunk (r - s - 1) % N."
)
_HALF_HINT = (
    "That is only half of the algorithm. In the first N - 1 steps, add the chunk that arrives to "
    "your own (reduce-scatter). In the next N - 1 steps, replace your own chunk with the chunk "
    "that arrives (all-gather)."
)
_BYTES_HINT = (
    "There are 2 (N - 1) steps. In each step, every rank sends one chunk, which is 1/N of the "
    "tensor, and receives a different one: for step in range(2 * (N - 1))."
)
_SUM_HINT = (
    "In the first N - 1 steps, add the chunk that arrives to your chunk with the same number. In "
    "the last N - 1 steps, replace your chunk with the one that arrives. Receive into a new "
    "tensor, and update your chunk before you send it in the next step."
)


def timed_op(decorator: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a decorator that times an operation.

    ``decorator(function)`` returns a function that replaces the original. Each call must be
    recorded in one span that has the function's name and encloses the call. Everything else must
    stay the same: name, docstring, signature, arguments, result and errors. A handle must be
    returned unchanged, without waiting for it. The check decorates functions with random names, on
    3 ranks and on a single rank.

    Args:
        decorator: the answer.
        seed: the seed for generating the names and numbers, or None for a random seed.

    Returns:
        The verdict, with its reason.

    Example:
        >>> def timed(function):
        ...     def wrapper(*args, **kwargs):
        ...         return function(*args, **kwargs)
        ...
        ...     return wrapper
        >>> print(timed_op(timed, seed=1).reason)
        On rank 0 of 3, the decorated function must keep its name, share_gradients, but is called wrapper.
    """  # noqa: E501
    return examine("timed_op", decorator, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    for world_size in (3, 1):
        names = draw.sample(_NAMES, 3)
        trace = examination.run(
            _calls_on_rank, world_size, names, float(draw.randrange(3, 9)), hint=_PASS_ON_HINT
        )
        for rank, complaint in enumerate(trace.results):
            if complaint is not None:
                reason, hint = complaint
                raise Wrong(f"On rank {rank} of {world_size}, {reason}.", hint)
        _judge_spans(trace, names)
    return (
        "Every call is in a span with the function's name, and nothing else has changed: the name, "
        "the signature, the result, the handle and the error are the same."
    )


class _Watched:
    def __init__(self, work: Any) -> None:
        self._work = work
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        self.waited = True
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        return self.waited  # never done before wait(), however often it is checked


def _calls_on_rank(decorator: Answer, names: list[str], factor: float) -> Complaint | None:
    """Decorates three operations and calls them; returns a complaint, or None.

    All calls are made before they are judged, because a rank that stopped at the first fault would
    leave the others waiting.
    """
    import torch

    from ringsim import comm as dist

    received: list[tuple[int, float, Any]] = []
    kept: list[Any] = []

    def at_once(tensor: Tensor, factor: float = 2.0, *, group: Any = None) -> object:
        received.append((id(tensor), factor, group))
        dist.all_reduce(tensor, group=group)
        kept.append(object())
        return kept[-1]

    def in_background(tensor: Tensor, group: Any = None) -> _Watched:
        handle = _Watched(dist.all_reduce(tensor, group=group, async_op=True))
        kept.append(handle)
        return handle

    def refusing(tensor: Tensor) -> None:
        kept.append(LookupError(f"no rank wants a tensor of shape {tuple(tensor.shape)}"))
        raise kept[-1]

    originals: list[Any] = [at_once, in_background, refusing]
    decorated: list[Any] = []
    for original, name, what in zip(
        originals, names, ("immediately", "in the background", "never"), strict=True
    ):
        original.__name__ = original.__qualname__ = name
        original.__doc__ = f"Adds up a tensor over all ranks, {what}."
        decorated.append(decorator(original))
        complaint = _compare(decorated[-1], original, called=bool(kept))
        if complaint is not None:
            return complaint
    first, second, third = torch.ones(4), torch.ones(2), torch.ones(3)
    group = dist.group.WORLD
    results = [
        decorated[0](first, factor, group=group),
        decorated[0](tensor=second),
        decorated[1](third),
    ]
    handles = [each for each in kept if isinstance(each, _Watched)]
    waited = any(handle.waited for handle in handles)
    for handle in handles:
        handle.wait()
    try:
        decorated[2](first)
        raised: BaseException | None = None
    except LookupError as error:
        raised = error
    due = [(id(first), factor, group), (id(second), 2.0, None)]
    arguments_hold = received[:2] == due[: len(received)]
    return _judge_calls(names, arguments_hold, results, waited, raised, kept)


def _compare(function: Any, original: Any, called: bool) -> Complaint | None:
    """Returns a complaint if a decorated function differs or was called too early, else None."""
    if called:
        return (
            f"the decorator called {original.__name__}, but it must return a function that calls "
            f"{original.__name__} later",
            _RETURN_HINT,
        )
    if not callable(function):
        return f"the decorator must return a function, but returned {shown(function)}", _RETURN_HINT
    name = getattr(function, "__name__", "no name")
    if name != original.__name__:
        return (
            f"the decorated function must keep its name, {original.__name__}, but is called "
            f"{shown(name)}",
            _WRAPS_HINT,
        )
    if function.__doc__ != original.__doc__:
        found_doc = shown(function.__doc__)
        return f"{name} must keep its docstring, but its docstring is {found_doc}", _WRAPS_HINT
    due, found = (_without_annotations(inspect.signature(each)) for each in (original, function))
    if found != due:
        return f"{name} must keep its signature, {due}, but its signature is {found}", _WRAPS_HINT
    return None


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    return inspect.Signature(
        [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    )


def _judge_calls(
    names: list[str],
    arguments_hold: bool,
    results: list[Any],
    waited: bool,
    raised: BaseException | None,
    kept: list[Any],
) -> Complaint | None:
    """Returns a complaint about the calls, or None.

    The first function was called twice; the second and the third, which raises, once each.
    """
    if len(kept) != 4:
        return (
            "4 calls to the decorated functions must call the originals 4 times, but called them "
            f"{count(len(kept), 'time')}",
            _PASS_ON_HINT,
        )
    if not arguments_hold:
        return (
            f"{names[0]} must receive the arguments that the caller passes, including defaults, "
            "but received different ones",
            _PASS_ON_HINT,
        )
    if waited:
        hint = (
            "Do not call wait(): the caller computes in the meantime and waits when it needs the "
            "result."
        )
        return f"{names[1]} returns a handle, but the decorator waited for it", hint
    for name, result, due in zip((names[0], names[0], names[1]), results, kept[:3], strict=True):
        if result is not due:
            what = "the handle" if isinstance(due, _Watched) else "the function's result"
            reason = f"the decorated {name} must return {what}, but returned {shown(result)}"
            return reason, _PASS_ON_HINT
    if raised is not kept[3]:
        found = (
            "raised nothing"
            if raised is None
            else f"raised {type(raised).__name__}: {shown(str(raised))}"
        )
        hint = (
            "Do not catch the error: the ringsim.span(...) block ends the span, and the error "
            "then reaches the caller."
        )
        return f"the decorated {names[2]} must raise the function's error, but {found}", hint
    return None


def _judge_spans(trace: Trace, names: list[str]) -> None:
    """Raises ``Wrong`` unless each call is in its own span, and the decorator sends nothing."""
    events = list(trace)
    for rank in range(trace.world_size):
        who = f"Rank {rank} of {trace.world_size}"
        own = [event for event in events if event.rank == rank]
        spans = [event for event in own if event.kind == "span" and event.label is not None]
        found = [span.label for span in spans]
        operations = [event for event in own if event.kind in ("send", "recv", "collective")]
        ops = [event.op for event in operations]
        if ops != ["all_reduce"] * 3:
            strange, *_ = [op for op in ops if op != "all_reduce"] or ["all_reduce"]
            reason = f"{who} called {strange} in the decorator, which must not communicate."
            hint = (
                "Do not synchronise: a decorator that makes ranks wait for each other changes the "
                "program that it measures."
            )
            raise Wrong(reason, hint)
        for name, calls, times in zip(names, (2, 1, 1), ("twice", "once", "once"), strict=True):
            if found.count(name) != calls:
                others = f" and one named {shown(found[0])}" if found and name not in found else ""
                reason = (
                    f"{who} called {name} {times} and must record one span with that name per "
                    f"call, but recorded {found.count(name)}{others}."
                )
                raise Wrong(reason, _SPAN_HINT)
        made = [span for span in spans if span.label in names[:2]]
        for span, operation in zip(made, operations, strict=True):
            if span.done_ns is None or not span.post_ns <= operation.post_ns <= span.done_ns:
                raise Wrong(f"{who} called {span.label} outside its span.", _SPAN_HINT)


def ring_all_reduce(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks an all-reduce built from neighbour messages: a reduce-scatter, then an all-gather.

    ``function(tensor)`` receives this rank's own numbers, a one-dimensional float32 tensor whose
    length is a multiple of N, and returns the sum of all ranks' tensors. Every rank must send
    exactly 2 (N - 1) / N times the tensor's size in bytes, all of it to its successor, on that
    edge's group. The check counts the bytes in the trace. It uses 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages.

    Example:
        >>> print(ring_all_reduce(lambda tensor: tensor, seed=1).reason)
        Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, but sent none.

    Source:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009: the algorithm and its bytes.
    """
    return examine("ring_all_reduce", function, _judge_chunks, seed)


def _judge_chunks(examination: Examination) -> str:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5, 6]), 1]
    runs = {}
    for world_size in sizes:
        length = world_size * draw.randrange(5, 50)
        secret = draw.randrange(10**9)
        trace = examination.run(
            _reduce_on_rank, world_size, length, secret, things="chunks", hint=RAISED_HINT
        )
        runs[world_size] = _judge_bytes(trace, length * _ITEM_BYTES), trace
        _judge_sums(trace, length)
    sent, largest = runs[max(sizes)]
    examination.judge_content(lambda blank: _judge_sums(blank, 4), _reduce_on_rank, 4, secret)
    examination.trace = largest
    return f"Right in rings of {listed(sizes)} ranks; in the largest, each rank sent {sent}."


def _reduce_on_rank(function: Answer, length: int, secret: int) -> tuple[Numbers, Numbers | str]:
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim.ring import current_ring

    draw = random.Random(f"{secret}/{current_ring().rank}")
    numbers = [float(draw.randrange(1, 1000)) for _ in range(length)]
    answer = plain_tensor(function(torch.tensor(numbers)))
    if isinstance(answer, str):
        return numbers, answer
    shape, found = answer
    return numbers, found if shape == (length,) else f"a tensor of shape {shape}"


def _judge_bytes(trace: Trace, size_bytes: int) -> str:
    """Raises ``Wrong`` unless every rank sent the right number of bytes; returns the formula."""
    events, size = trace.events, trace.world_size
    due = 2 * (size - 1) * size_bytes // size
    formula = f"2 * {size - 1}/{size} * {size_bytes} = {due} bytes"
    whole, half = (size - 1) * size_bytes, due // 2
    hints = {2 * whole: _WHOLE_HINT, whole: _WHOLE_HINT, half: _HALF_HINT}
    for side in sides(trace):
        found = int(events.size_bytes[side.events].clip(min=0).sum())
        if found != due:
            number = len(side.events)
            amount = number and f"{found} in {count(number, 'message')}"
            raise side.wrong(formula, amount, hints.get(found, _BYTES_HINT))
    judge_unmatched(trace)
    return formula


def _judge_sums(trace: Trace, length: int) -> None:
    size = trace.world_size
    due = np.sum([numbers for numbers, _ in trace.results], axis=0).tolist()
    for rank, (numbers, answer) in enumerate(trace.results):
        if answer == due:
            continue
        who = f"Rank {rank} of {size}"
        if isinstance(answer, str):
            reason = f"{who} must return a tensor of shape ({length},), but returned {answer}."
            hint = (
                "Return the tensor on every rank. torch.cat(chunks) joins the chunks into one "
                "tensor."
            )
            raise Wrong(reason, hint)
        place = next(place for place in range(length) if answer[place] != due[place])
        own = ", which is only its own number" if answer[place] == numbers[place] else ""
        reason = (
            f"{who} must return the sum of all tensors: number {place}, in chunk "
            f"{place // (length // size)}, must be "
            f"{shown(due[place])}, but is {shown(answer[place])}{own}."
        )
        raise Wrong(reason, ALONE_HINT if size == 1 else _SUM_HINT)
