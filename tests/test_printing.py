"""What is shown, what is kept, and that ``print`` comes back."""

from __future__ import annotations

import builtins
import io
import sys
from typing import Any

import pytest

from ringsim.errors import ArgumentError
from ringsim.ring.printing import restore_output, suppress_output
from ringsim.state import change_state


@pytest.mark.parametrize(("rank", "shown"), [(0, "plain\nforced\n"), (1, "forced\n"), (63, "forced\n")])
def test_rank_0_and_forced_prints_are_shown(rank: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    suppress_output(rank)
    print("plain")
    print("forced", force=True)
    restore_output()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("force", [True, False])
def test_stderr_is_governed_like_stdout(rank: int, force: bool, capsys: pytest.CaptureFixture[str]) -> None:
    suppress_output(rank)
    print("words", file=sys.stderr, force=force)
    restore_output()
    assert capsys.readouterr().err == ("words\n" if rank == 0 or force else "")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"sep": "-"}, {"end": "!"}, {"sep": None, "end": None}, {"sep": "", "end": ""}])
def test_a_file_of_the_callers_own_gets_exactly_what_print_writes(rank: int, force: bool, flush: bool, arguments: dict[str, Any]) -> None:
    written, expected = io.StringIO(), io.StringIO()
    print("a", 1, [2.5], None, **arguments, flush=flush, file=expected)
    suppress_output(rank)
    print("a", 1, [2.5], None, **arguments, flush=flush, file=written, force=force)
    restore_output()
    assert written.getvalue() == expected.getvalue()


@pytest.mark.parametrize("arguments", [{}, {"sep": "-"}, {"end": "!"}, {"sep": None, "end": None}, {"flush": True}, {"file": None}])
def test_shown_and_hidden_text_are_what_print_writes(arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print("a", 1, [2.5], **arguments)
    expected = capsys.readouterr().out
    hidden: list[str] = []
    change_state(hidden_output=hidden.append)
    for rank in (0, 1):
        suppress_output(rank)
        print("a", 1, [2.5], **arguments)
    restore_output()
    assert capsys.readouterr().out == expected
    assert hidden == [expected]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("arguments", [{"sep": 1}, {"end": 2}, {"colour": "red"}])
def test_wrong_arguments_fail_on_every_rank_alike(rank: int, arguments: dict[str, Any]) -> None:
    suppress_output(rank)
    with pytest.raises(TypeError):
        print("a", "b", **arguments)


def test_values_that_cannot_be_text_fail_on_hidden_ranks_too() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    suppress_output(1)
    with pytest.raises(RuntimeError, match="no words"):
        print(Mute())


def test_print_comes_back_as_the_same_object() -> None:
    before = builtins.print
    suppress_output(0)
    suppress_output(1)
    suppress_output(1)
    assert builtins.print is not before
    restore_output()
    assert builtins.print is before
    restore_output()
    assert builtins.print is before


def test_the_last_rank_counts(capsys: pytest.CaptureFixture[str]) -> None:
    suppress_output(1)
    suppress_output(0)
    print("now rank 0")
    suppress_output(1)
    print("rank 1 again")
    assert capsys.readouterr().out == "now rank 0\n"


def test_a_print_put_over_ours_stays_and_shows_everything_after_restore(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = builtins.print
    suppress_output(1)
    ours = builtins.print

    def tagging(*values: Any, **arguments: Any) -> None:
        ours("tag:", *values, **arguments)

    monkeypatch.setattr(builtins, "print", tagging)
    print("hidden")
    restore_output()
    assert builtins.print is tagging
    print("shown")
    assert capsys.readouterr().out == "tag: shown\n"
    monkeypatch.undo()
    builtins.print = before


@pytest.mark.parametrize("rank", [-1, "0", None, 1.0, True])
def test_wrong_rank(rank: Any) -> None:
    before = builtins.print
    with pytest.raises(ArgumentError, match="rank must be a whole number of 0 or more, got"):
        suppress_output(rank)
    assert builtins.print is before
