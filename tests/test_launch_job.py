"""What travels with a call, without starting a rank."""

from __future__ import annotations

import pickle
import threading
import warnings
from dataclasses import replace

import pytest

from ringsim.diagnose.failure import PEER, Report, first_failure, make_error
from ringsim.errors import ArgumentError
from ringsim.launch.api import make_kind, trace
from ringsim.launch.job import START_VALUES, pack_call


def test_a_local_function_travels_with_what_it_captures() -> None:
    offset = 10

    def helper(x: int) -> int:
        return x + offset

    job = pack_call(lambda x: helper(x) * 2, (1,), {}, seed=0)
    assert job.call is not None
    worker, args, kwargs = pickle.loads(job.call)
    assert worker(*args, **kwargs) == 22


def test_an_unpicklable_capture_is_named_with_the_line_that_uses_it() -> None:
    lock = threading.Lock()

    def worker() -> None:
        first = 1
        with lock:
            print(first)

    with pytest.raises(ArgumentError) as caught:
        pack_call(worker, (), {}, seed=0)
    line = worker.__code__.co_firstlineno + 2
    assert "the variable 'lock'" in str(caught.value)
    assert "_thread.lock" in str(caught.value)
    assert f"line {line}, in worker" in str(caught.value)


def test_an_unpicklable_capture_of_a_helper_is_named() -> None:
    generator = (n for n in range(3))

    def helper() -> int:
        return next(generator)

    def worker() -> int:
        return helper()

    with pytest.raises(ArgumentError, match=r"the variable 'generator'.*builtins\.generator.*in helper"):
        pack_call(worker, (), {}, seed=0)


def test_an_unpicklable_argument_is_named() -> None:
    with pytest.raises(ArgumentError, match="argument 1 of args"):
        pack_call(print, (1, threading.Lock()), {}, seed=0)
    with pytest.raises(ArgumentError, match="argument 'key' of kwargs"):
        pack_call(print, (), {"key": threading.Lock()}, seed=0)


def test_large_captures_are_named() -> None:
    table = bytes(11_000_000)
    small = b"x"
    with pytest.warns(UserWarning, match=r"11\.0 MB travel to every rank, most of it in the variable 'table' \(11\.0 MB\)"):
        pack_call(lambda: (table, small), (), {}, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_call(lambda: small, (), {}, seed=0)


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    ("worker", "arguments", "words"),
    [
        (42, {"world_size": 2}, "worker must be a function"),
        (None, {"world_size": 2}, "not what it returns"),
        (_coroutine, {"world_size": 2}, "async"),
        (print, {}, "world_size must be an integer"),
        (print, {"world_size": 0}, "got 0"),
        (print, {"world_size": True}, "got True"),
        (print, {"world_size": "4"}, "got '4'"),
        (print, {"world_size": 1025}, "1 to 1024"),
        (print, {"world_size": 2, "comm_device": "tpu"}, "comm_device must be"),
        (print, {"world_size": 2, "timeout_s": 0}, "timeout_s must be"),
        (print, {"world_size": 2, "timeout_s": float("nan")}, "timeout_s must be"),
        (print, {"world_size": 2, "limit_s": -1}, "limit_s must be"),
        (print, {"world_size": 2, "seed": 1.5}, "seed must be"),
        ("file.ringtrace", {"world_size": 2}, "world_size must be left out"),
    ],
)
def test_wrong_arguments_start_nothing(worker: object, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        trace(worker, **arguments)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_GLOO_LAZY_INIT", "GLOO_SOCKET_IFNAME", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES"])
def test_values_read_at_the_start_make_another_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_kind(2, "cpu", 30, ring=True)
    assert before == make_kind(2, "cpu", 30, ring=True)
    monkeypatch.setenv(name, "1")
    assert before != make_kind(2, "cpu", 30, ring=True)


@pytest.mark.parametrize("name", ["HOME", "PATH", "MY_SETTING", "RANK", "OMPX"])
def test_other_values_do_not(name: str) -> None:
    assert not START_VALUES.fullmatch(name)


def _report(rank: int, error: str, text: str, at_ns: int, *, of_ringsim: bool = False) -> Report:
    return Report(rank, error, text, f"file.py, line {rank}, in f" if error else "", "", at_ns, of_ringsim)


def test_the_first_failure_is_the_earliest_that_is_no_echo() -> None:
    echo = replace(_report(0, "RuntimeError", "[...] Connection closed by peer [127.0.0.1]:1", 1), echo=PEER)
    cause = _report(1, "ValueError", "no such layer", 5)
    later = _report(2, "ValueError", "me too", 9)
    assert first_failure([echo, later, cause]) is cause
    message = str(make_error([echo, later, cause], 4, stopped=[3]))
    assert message.splitlines()[0] == "rank 1 of 4 raised ValueError: no such layer"
    assert "also failed: rank 2" in message
    assert "lost their peer because of it: rank 0 (file.py, line 0, in f)" in message
    assert "stopped because of it: rank 3" in message


def test_an_error_of_ringsim_comes_as_itself() -> None:
    error = make_error([_report(0, "ArgumentError", "x must be y, got z", 1, of_ringsim=True)], 2, [])
    assert type(error) is ArgumentError
    assert str(error).startswith("x must be y, got z")
