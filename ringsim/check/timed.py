"""The first exercise of the lesson on the communication layer: a decorator that times an operation and changes nothing about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.result import CheckResult
from ringsim.traces.events import COLLECTIVE, NONE, OP_NAMES, RECV, SEND, SPAN
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["timed_op"]

Complaint = tuple[str, str]  # what is wrong, after "Rank 0 of 3: ", and a hint
_NAMES: Final = ("sum_up", "share_gradients", "agree", "merge", "add_over_ranks", "join_parts")
_WRAPS_HINT: Final = "functools.wraps(function) as a decorator of the inner function copies name, docstring and signature."
_RETURN_HINT: Final = (
    "Define an inner function, which calls the function and returns its result; and return the inner function: return timed."
)
_PASS_ON_HINT: Final = "The inner function takes *args, **kwargs, passes both on as they are, and returns what the function returns."
_SPAN_HINT: Final = "The call belongs into the block of: with ringsim.span(function.__name__):"


def timed_op(decorator: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a decorator that times an operation.

    ``decorator(function)`` returns the function that stands in for it. Every call of that is recorded in one span which bears the
    function's name and encloses the call. All else is as before: name, docstring, signature, arguments, what it returns or raises; and a
    handle is returned as it is, without waiting for it. It is tried on functions with names drawn at random, on 3 ranks and on 1.

    Args:
        decorator: the answer.
        seed: what names and numbers are drawn from; None to draw the seed, too.

    Returns:
        The verdict, with its reason.

    Example:
        >>> def timed(function):
        ...     def wrapper(*args, **kwargs):
        ...         return function(*args, **kwargs)
        ...     return wrapper
        >>> print(timed_op(timed, seed=1).reason)
        On rank 0 of 3 the decorated function must keep its name, share_gradients, got wrapper.
    """
    return examine("timed_op", decorator, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    trace = None
    for world_size in (3, 1):
        names = draw.sample(_NAMES, 3)
        trace = examination.run(_calls_on_rank, world_size, names, float(draw.randrange(3, 9)), hint=_PASS_ON_HINT)
        for rank, complaint in enumerate(trace.results):
            if complaint is not None:
                reason, hint = complaint
                raise Wrong(f"On rank {rank} of {world_size} {reason}.", hint, world_size=world_size, trace=trace)
        _judge_spans(trace, names)
    return "Every call is in a span of its name, and is otherwise as it was: name, signature, result, handle, error.", trace


class _Watched:
    """A handle that knows whether it has been waited for."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        self.waited = True
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def is_completed(self) -> bool:
        return self.waited  # until then it is under way, however long one looks


def _calls_on_rank(decorator: Callable[..., Any], names: list[str], factor: float) -> Complaint | None:
    """Decorates three operations and calls them; says what is wrong with what can be seen from outside.

    All calls are made before anything is judged: a rank that stopped at the first fault would leave the others waiting.
    """
    import torch
    import torch.distributed as dist

    received: list[tuple[Any, float, Any]] = []
    kept: list[Any] = []

    def at_once(tensor: Tensor, factor: float = 2.0, *, group: Any = None) -> object:
        received.append((tensor, factor, group))
        dist.all_reduce(tensor, group=group)
        kept.append(object())
        return kept[-1]

    def in_background(tensor: Tensor, group: Any = None) -> _Watched:
        handle = _Watched(dist.all_reduce(tensor, group=group, async_op=True))
        kept.append(handle)
        return handle

    def refusing(tensor: Tensor) -> None:
        kept.append(LookupError(f"nobody wants a tensor of shape {tuple(tensor.shape)}"))
        raise kept[-1]

    originals: list[Any] = [at_once, in_background, refusing]
    for function, name, what in zip(originals, names, ("at once", "in the background", "never"), strict=True):
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"Adds up a tensor over all ranks, {what}."
    decorated: list[Any] = []
    for original in originals:
        decorated.append(decorator(original))
        complaint = _compare(decorated[-1], original, called=bool(kept))
        if complaint is not None:
            return complaint
    first, second, third = torch.ones(4), torch.ones(2), torch.ones(3)
    group = dist.group.WORLD
    results = [decorated[0](first, factor, group=group), decorated[0](tensor=second), decorated[1](third)]
    handle = next((each for each in kept if isinstance(each, _Watched)), None)
    waited = handle is not None and handle.waited
    if handle is not None:
        handle.wait()
    try:
        decorated[2](first)
        raised: BaseException | None = None
    except LookupError as error:
        raised = error
    due = [(first, factor, group), (second, 2.0, None)]
    arguments_hold = all(
        a is tensor and b == number and c is where for (a, b, c), (tensor, number, where) in zip(received, due, strict=False)
    )
    return _judge_calls(names, arguments_hold, results, waited, raised, kept)


def _compare(function: Any, original: Any, called: bool) -> Complaint | None:
    """What of a function is lost on the one that stands in for it; or that it was called when it was to be decorated."""
    if called:
        return f"the decorator called {original.__name__}, and must return a function that does so when it is called", _RETURN_HINT
    if not callable(function):
        return f"the decorator must return a function, got {shown(function)}", _RETURN_HINT
    name = getattr(function, "__name__", "no name")
    if name != original.__name__:
        return f"the decorated function must keep its name, {original.__name__}, got {shown(name)}", _WRAPS_HINT
    if function.__doc__ != original.__doc__:
        return f"{name} must keep its docstring, got {shown(function.__doc__)}", _WRAPS_HINT
    due, found = (_without_annotations(inspect.signature(each)) for each in (original, function))
    if found != due:
        return f"{name} must keep its signature, {due}, got {found}", _WRAPS_HINT
    return None


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    return inspect.Signature([each.replace(annotation=each.empty) for each in signature.parameters.values()])


def _judge_calls(
    names: list[str], arguments_hold: bool, results: list[Any], waited: bool, raised: BaseException | None, kept: list[Any]
) -> Complaint | None:
    """What is wrong with the calls: two of the first function, one each of the second and the third, which raises."""
    if len(kept) != 4:
        return f"each of 4 calls must call the function once, and it was called {len(kept)} times", _PASS_ON_HINT
    if not arguments_hold:
        return f"{names[0]} must get the arguments that it was called with, defaults included, and got others", _PASS_ON_HINT
    if waited:
        hint = "Do not call wait(): the caller wants to compute meanwhile, and waits when the result is needed."
        return f"{names[1]} returns a handle, and the decorator waited for it", hint
    for name, result, due in zip((names[0], names[0], names[1]), results, kept[:3], strict=True):
        if result is not due:
            what = "the handle" if isinstance(due, _Watched) else "what the function returns"
            return f"the decorated {name} must return {what}, got {shown(result)}", _PASS_ON_HINT
    if raised is not kept[3]:
        found = "nothing was raised" if raised is None else f"got {type(raised).__name__}: {shown(str(raised))}"
        hint = "Let an error pass: with ringsim.span(...) ends the span and the error goes on to the caller."
        return f"the decorated {names[2]} must raise what the function raises, and {found}", hint
    return None


def _judge_spans(trace: Trace, names: list[str]) -> None:
    """One span for each call, which encloses what the call does; and nothing sent by the decorator itself."""
    events, size = trace.events, trace.world_size
    for rank in range(size):
        who = f"Rank {rank} of {size}"
        spans = np.flatnonzero((events.rank == rank) & (events.kind == SPAN) & (events.label != NONE))
        found = [events.tables.labels[events.label[index]] for index in spans.tolist()]
        operations = np.flatnonzero((events.rank == rank) & np.isin(events.kind, (SEND, RECV, COLLECTIVE))).tolist()
        strange = [OP_NAMES[events.op[index]] for index in operations if OP_NAMES[events.op[index]] != "all_reduce"]
        if strange or len(operations) != 3:
            reason = f"{who} called {strange[0] if strange else 'all_reduce'} in the decorator, which must not communicate."
            hint = "Nothing is to be synchronised: a decorator that makes ranks wait for each other changes the program that it measures."
            raise Wrong(reason, hint, world_size=size, trace=trace)
        for name, calls, times in zip(names, (2, 1, 1), ("twice", "once", "once"), strict=True):
            if found.count(name) != calls:
                others = f", and one named {shown(found[0])}" if found and name not in found else ""
                reason = (
                    f"{who} called {name} {times} and must record one span of that name for each call, got {found.count(name)}{others}."
                )
                raise Wrong(reason, _SPAN_HINT, world_size=size, trace=trace)
        made = [int(span) for span, name in zip(spans, found, strict=True) if name in names[:2]]
        for span, operation in zip(made, operations, strict=True):
            if not events.post_ns[span] <= events.post_ns[operation] <= events.done_ns[span]:
                name = events.tables.labels[events.label[span]]
                raise Wrong(f"{who} called {name} outside of its span.", _SPAN_HINT, world_size=size, trace=trace)
