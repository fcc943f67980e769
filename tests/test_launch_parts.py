"""Launching, as far as it needs no ranks.

What travels with a call, which failure counts, and what a run shows.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringsim import trace
from ringsim.diagnose.failure import PEER, Report, first_failure, make_error
from ringsim.errors import ArgumentError
from ringsim.launch import progress
from ringsim.launch.api import make_kind
from ringsim.launch.job import START_VALUES, RankConfig, pack_call
from ringsim.launch.output import RankOutput


def test_a_local_function_travels_with_what_it_captures() -> None:
    offset = 10

    def helper(x: int) -> int:
        return x + offset

    job = pack_call(lambda x: helper(x) * 2, (1,), {}, seed=0)
    assert job.call is not None
    worker, args, kwargs = pickle.loads(job.call)
    assert worker(*args, **kwargs) == 22


def test_a_function_travels_whose_module_was_loaded_by_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As pytest loads files of tests with ``--import-mode=importlib``.

    With what it uses of another such file.
    """
    with monkeypatch.context() as patch:
        for name, text in (
            ("", ""),
            (".helpers", "def one(): return 1"),
            (".test_it", "from strange.helpers import one\ndef two(): return one() + 1"),
        ):
            module = types.ModuleType(f"strange{name}")
            patch.setitem(sys.modules, module.__name__, module)
            exec(text, vars(module))
        job = pack_call(module.two, (), {}, seed=0)
    assert pickle.loads(job.call or b"")[0]() == 2


def test_a_module_with_a_class_of_its_own_travels_by_name() -> None:
    job = pack_call(lambda: (torch.ops, torch.backends.cudnn), (), {}, seed=0)
    assert pickle.loads(job.call or b"")[0]() == (torch.ops, torch.backends.cudnn)


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
    for function, args, kwargs, words in (
        (worker, (), {}, rf"the variable 'lock'.*_thread\.lock.*line {line}, in worker"),
        (lambda: helper(), (), {}, r"the variable 'generator'.*builtins\.generator.*in helper"),
        (print, (1, lock), {}, "argument 1 of args"),
        (print, (), {"key": lock}, "argument 'key' of kwargs"),
    ):
        with pytest.raises(ArgumentError, match=words):
            pack_call(function, args, kwargs, seed=0)  # type: ignore[arg-type]


def test_large_captures_are_named() -> None:
    table = bytes(11_000_000)
    small = b"x"
    with pytest.warns(
        UserWarning,
        match=r"11\.0 MB travel to every rank, most of it in the variable 'table' \(11\.0 MB\)",
    ):
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
def test_wrong_arguments_start_nothing(
    worker: object, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        trace(worker, **arguments)  # type: ignore[call-overload]


def test_values_read_at_the_start_make_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [make_kind(2, "cpu", 30, ring=True)]
    for name in (
        "OMP_NUM_THREADS",
        "TORCH_GLOO_LAZY_INIT",
        "GLOO_SOCKET_IFNAME",
        "LD_PRELOAD",
        "CUDA_VISIBLE_DEVICES",
    ):
        assert make_kind(2, "cpu", 30, ring=True) == seen[-1]
        monkeypatch.setenv(name, "1")
        seen.append(make_kind(2, "cpu", 30, ring=True))
        assert seen[-1] not in seen[:-1], name
    assert not any(
        START_VALUES.fullmatch(name) for name in ("HOME", "PATH", "MY_SETTING", "RANK", "OMPX")
    )


def _report(rank: int, error: str, text: str, at_ns: int, *, of_ringsim: bool = False) -> Report:
    return Report(
        rank, error, text, f"file.py, line {rank}, in f" if error else "", "", at_ns, of_ringsim
    )


def test_the_first_failure_is_the_earliest_that_is_no_echo() -> None:
    echo = replace(
        _report(0, "RuntimeError", "[...] Connection closed by peer [127.0.0.1]:1", 1), echo=PEER
    )
    cause = _report(1, "ValueError", "no such layer", 5)
    later = _report(2, "ValueError", "me too", 9)
    assert first_failure([echo, later, cause]) is cause
    message = str(make_error([echo, later, cause], 4, stopped=[3]))
    assert message.splitlines()[0] == "rank 1 of 4 raised ValueError: no such layer"
    assert "also failed: rank 2 (ValueError)" in message
    assert "lost their peer because of it: rank 0 (file.py, line 0, in f)" in message
    assert "stopped because of it: rank 3" in message


def test_many_that_fail_alike_are_told_together() -> None:
    message = str(
        make_error(
            [
                _report(rank, "TypeError" if rank != 5 else "KeyError", "", rank)
                for rank in range(1000)
            ],
            1000,
            [],
        )
    )
    assert (
        "also failed: ranks 1, 2, 3, 4, 6, 7, 8, 9 and 990 more (TypeError); rank 5 (KeyError)"
        in message
    )


def test_an_error_of_ringsim_comes_as_itself() -> None:
    error = make_error(
        [_report(0, "ArgumentError", "x must be y, got z", 1, of_ringsim=True)], 2, []
    )
    assert type(error) is ArgumentError
    assert str(error).startswith("x must be y, got z")


# -- what a run shows while it goes on


@pytest.mark.parametrize(
    ("steps", "show_hidden", "kept"),
    [
        # Lines are shown when they are complete.
        (
            [("one\ntw", "one\n"), ("o\n\nthr", "two\n\n"), ("ee", ""), ("", "three\n")],
            False,
            "one\ntwo\n\nthree",
        ),
        # Hidden text is kept, and shown to who asks for it.
        (
            [("a\n<mark>hid\nand\n<mark>b\n<mark>last\n<mark>", "a\nb\n"), ("", "")],
            False,
            "a\nhid\nand\nb\nlast\n",
        ),
        (
            [
                ("a\n<mark>hid\nand\n<mark>b\n<mark>last\n<mark>", "a\nhid\nand\nb\nlast\n"),
                ("", ""),
            ],
            True,
            "a\nhid\nand\nb\nlast\n",
        ),
        # A character that is cut in two is not harmed.
        (
            [(b"sp\xc3", ""), (b"\xa4ter\n\xff\n", "später\n\ufffd\n"), ("", "")],
            False,
            "später\n\ufffd\n",
        ),
    ],
)
def test_output(
    steps: list[tuple[Any, str]],
    show_hidden: bool,
    kept: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RankConfig(str(tmp_path), 2, 3, "cpu", 30.0, ring=True, mark="<mark>")
    file, output = config.output_file, RankOutput(config, show=True, show_hidden=show_hidden)
    output.follow()  # the rank has not started
    for number, (written, shown) in enumerate(steps, 1):
        with file.open("ab") as stream:
            stream.write(written if isinstance(written, bytes) else written.encode())
        output.follow(last=number == len(steps))
        assert capsys.readouterr().out == "".join(
            f"[rank 2] {line}" for line in shown.splitlines(keepends=True)
        )
    assert output.text == kept


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_comes_late_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = progress.Progress(4)
    line.update(1, lambda: "")
    line.clear()
    assert terminal.getvalue() == "", "a short run shows nothing"
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    line = progress.Progress(4)
    line.update(1, lambda: "3 of 8 measured")
    assert terminal.getvalue().endswith("ringsim: 4 ranks, 0 s, 1 done, 3 of 8 measured")
    line.update(2, lambda: "")
    assert "2 done" not in terminal.getvalue(), "it does not flicker"
    line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", log)
    line = progress.Progress(4)
    line.update(1, lambda: "")
    line.clear()
    assert log.getvalue() == "", "where nobody looks there is none"
