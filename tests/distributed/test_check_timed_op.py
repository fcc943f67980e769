"""The check of the lesson on the communication layer: a decorator that times and changes nothing."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from verdicts import verdict

import ringsim
from ringsim import check

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]


def timed_op(function: Answer) -> Answer:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with ringsim.span(function.__name__):
            return function(*args, **kwargs)

    return timed


def timed_by_hand(function: Answer) -> Answer:
    """Right without functools.wraps and without with."""
    import inspect

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


@pytest.mark.parametrize("answer", [timed_op, timed_by_hand])
def test_timed_op_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.timed_op, answer, seed)
        assert result.passed, result


def around(call: Callable[[Answer, tuple[Any, ...], dict[str, Any]], Any], **kept: Any) -> Answer:
    """A decorator that makes its calls by ``call(function, args, kwargs)``."""

    def decorator(function: Answer) -> Answer:
        @functools.wraps(function, **kept)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ringsim.span(function.__name__):
                return call(function, args, kwargs)

        return timed

    return decorator


def plain(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def waits(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    if hasattr(result, "wait"):
        result.wait()
    return result


def looks_until_it_is_done(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    while hasattr(result, "wait") and not result.is_completed():
        time.sleep(0.01)
    return result


def loses_the_result(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function(*args, **kwargs)


def loses_the_handle(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    return None if hasattr(result, "wait") else result


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


def loses_keywords(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args) if args else function(kwargs["tensor"])


def copies_tensors(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*(each.clone() if isinstance(each, torch.Tensor) else each for each in args), **kwargs)


def calls_twice(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function(*args, **kwargs)
    return function(*args, **kwargs)


def meets_first(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dist.barrier()
    return function(*args, **kwargs)


def reduces_the_time(function: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start = time.perf_counter()
    result = function(*args, **kwargs)
    dist.all_reduce(torch.tensor([time.perf_counter() - start]))
    return result


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


def takes_one_tensor(function: Answer) -> Answer:
    @functools.wraps(function)
    def timed(tensor: torch.Tensor) -> Any:
        return function(tensor)

    return timed


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda function: function, "called share_gradients twice and must record one span of that name for each call, got 0."),
        (lambda function: None, "On rank 0 of 3 the decorator must return a function, got None."),
        (
            lambda function: function(torch.ones(1)),
            "the decorator called share_gradients, and must return a function that does so when it is called.",
        ),
        (around(plain, assigned=("__doc__",)), "the decorated function must keep its name, share_gradients, got timed."),
        (around(plain, assigned=("__name__",)), "share_gradients must keep its docstring, got None."),
        (
            lambda function: unwrapped(timed_op(function)),
            "must keep its signature, (tensor, factor=2.0, *, group=None), got (*args, **kwargs).",
        ),
        (around(waits), "returns a handle, and the decorator waited for it."),
        (around(loses_the_result), "the decorated share_gradients must return what the function returns, got None."),
        (around(loses_the_handle), " must return the handle, got None."),
        (around(swallows_errors), " must raise what the function raises, and nothing was raised."),
        (around(raises_another_error), " must raise what the function raises, and got KeyError: 'failed'."),
        (around(loses_keywords), "share_gradients must get the arguments that it was called with"),
        (around(copies_tensors), "share_gradients must get the arguments that it was called with"),
        (around(calls_twice), "each of 4 calls must call the function once, and it was called 7 times."),
        (around(lambda function, args, kwargs: None), "each of 4 calls must call the function once, and it was called 0 times."),
        (around(meets_first), "Rank 0 of 3 called barrier in the decorator, which must not communicate."),
        (around(reduces_the_time), "Rank 0 of 3 called all_reduce in the decorator, which must not communicate."),
        (spans("all_reduce"), "one span of that name for each call, got 0, and one named all_reduce."),
        (spans(times=2), "one span of that name for each call, got 4."),
        (spans(around_the_call=False), "Rank 0 of 3 called share_gradients outside of its span."),
        (takes_one_tensor, "raised TypeError: share_gradients() got an unexpected keyword argument 'group'."),
        (lambda: None, "takes 0 positional arguments but 1 was given"),
        (None, "The answer must be a function, got None."),
    ],
)
def test_timed_op_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.timed_op, answer)
    assert not result.passed
    assert reason in result.reason


def unwrapped(function: Answer) -> Answer:
    del function.__wrapped__  # type: ignore[attr-defined]
    return function


def test_names_are_drawn() -> None:
    reasons = {verdict(check.timed_op, lambda function: function, seed).reason for seed in range(5)}
    assert len(reasons) > 1
