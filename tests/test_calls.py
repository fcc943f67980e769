"""Calls of ``ringsim.trace``: the data sent with them, invalid arguments, and the first failure."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

import ringsim
from ringsim import comm as dist
from ringsim import trace
from ringsim.errors import ArgumentError, RankFailed

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    ("worker", "arguments", "words"),
    [
        (42, {"world_size": 2}, "worker must be a function"),
        (None, {"world_size": 2}, "not its result"),
        (_coroutine, {"world_size": 2}, "async"),
        (print, {}, "world_size must be an integer"),
        (print, {"world_size": 0}, "got 0"),
        (print, {"world_size": 1025}, "1 to 1024"),
        (print, {"world_size": 2, "comm_device": "tpu"}, "comm_device must be"),
        (print, {"world_size": 2, "timeout_s": 0}, "timeout_s must be"),
        (print, {"world_size": 2, "timeout_s": float("nan")}, "timeout_s must be"),
        (print, {"world_size": 2, "limit_s": -1}, "limit_s must be"),
        (print, {"world_size": 2, "seed": 1.5}, "seed must be"),
        (print, {"world_size": 2, "backend": "nccl"}, 'backend must be "mpi" or None'),
        ("file.ringtrace", {"world_size": 2}, "world_size must be omitted"),
        ("file.ringtrace", {"inject": [ringsim.Slow(0, 2)]}, "inject must be omitted"),
        (print, {"world_size": 2, "inject": [ringsim.Slow(2, 2)]}, "must be from 0 to 1, got Slow"),
        (
            print,
            {"world_size": 2, "inject": [ringsim.Degrade(0, 1, 2)], "comm_device": "gpu"},
            "inject must not contain Degrade with comm_device=",
        ),
    ],
)
def test_wrong_arguments_start_nothing(worker: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        trace(worker, **arguments)


def test_what_cannot_be_pickled_is_named_with_the_line_that_uses_it() -> None:
    lock = threading.Lock()
    generator = (n for n in range(3))

    def worker() -> None:
        first = 1
        with lock:
            print(first)

    def helper() -> int:
        return next(generator)

    line = worker.__code__.co_firstlineno + 2
    for function, call, words in (
        (worker, {}, rf"the variable 'lock'.*_thread\.lock.*line {line}, in worker"),
        (lambda: helper(), {}, r"the variable 'generator'.*builtins\.generator.*in helper"),
        (print, {"args": (1, lock)}, "argument 1 of args"),
        (print, {"kwargs": {"key": lock}}, "argument 'key' of kwargs"),
    ):
        with pytest.raises(ArgumentError, match=words):
            trace(function, world_size=1, **call)


@pytest.mark.distributed
def test_large_captures_are_named() -> None:
    table, small = bytes(11_000_000), b"x"
    words = r"11\.0 MB to every rank; the largest part is the variable 'table' \(11\.0 MB\)"
    with pytest.warns(UserWarning, match=words):
        trace(lambda: len(table) + len(small), world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(lambda: len(small), world_size=1)


def fail_alike() -> None:
    raise KeyError("here") if dist.get_rank() == 5 else TypeError("no")


def test_many_that_fail_alike_are_told_together() -> None:
    many = "ranks 1, 2, 3, 4, 6, 7, 8, 9 and 990 more (TypeError); rank 5 (KeyError)"
    with pytest.raises(RankFailed) as caught:
        ringsim.simulate(fail_alike, world_size=1000, link=LINK)
    assert str(caught.value).startswith("rank 0 of 1000 raised TypeError: no\n")
    assert str(caught.value).endswith(f"also failed: {many}")


def refuse() -> None:
    ringsim.span(7)


def test_an_error_of_ringsim_comes_as_itself() -> None:
    with pytest.raises(ArgumentError, match=r"must be .*, got 7"):
        ringsim.simulate(refuse, world_size=2, link=LINK)
