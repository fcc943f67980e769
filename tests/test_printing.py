"""Tests of shown and hidden prints, and of restoring ``print``."""

from __future__ import annotations

import builtins
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import ringsim
from ringsim import destroy_distributed, suppress_output
from ringsim.errors import ArgumentError

ARGUMENTS: list[dict[str, Any]] = [
    *({}, {"sep": "-"}, {"end": "!"}, {"sep": None, "end": None}, {"sep": "", "end": ""}),
    {"flush": True},
]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = builtins.print
    yield
    destroy_distributed()
    assert builtins.print is before


@pytest.mark.parametrize(("rank", "shown"), [(0, "plain\nforced\n"), (1, "forced\n")])
def test_rank_0_and_forced_prints_are_shown_on_both_streams(
    rank: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suppress_output(rank)
    for file in (None, sys.stdout, sys.stderr):
        print("plain", file=file)
        print("forced", file=file, force=True)
    assert capsys.readouterr() == (shown * 2, shown)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_shown_and_written_text_is_what_print_writes(
    arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print("a", 1, [2.5], None, **arguments)
    expected = capsys.readouterr().out
    for rank in (0, 1):
        suppress_output(rank)
        print("a", 1, [2.5], None, **arguments)
        for force in (True, False):  # the caller's own file gets everything
            written = io.StringIO()
            print("a", 1, [2.5], None, **arguments, file=written, force=force)
            assert written.getvalue() == expected
    assert capsys.readouterr().out == expected


def test_hidden_text_is_kept_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        for arguments in ARGUMENTS:
            print("a", 1, [2.5], None, **arguments)

    speak()
    expected = capsys.readouterr().out
    link = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.0)
    assert ringsim.simulate(speak, world_size=2, link=link).output == [expected] * 2


LINES = """
from ringsim import suppress_output

suppress_output(0)
print("a", 1, None, sep="-")
print("b", "c", force=True, flush=True)
print("two\\nlines", end="!\\n")
"""


def test_each_print_is_one_write_where_output_is_unbuffered() -> None:
    """Torchrun starts its ranks with unbuffered output.

    In 0.2.0 each value was written separately, and the lines of two ranks mixed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", LINES], stdout=theirs, check=True)
        theirs.close()
        writes = list(iter(lambda: ours.recv(100), b""))
    assert writes == [b"a-1-None\n", b"b c\n", b"two\nlines!\n"]


class Mute:
    def __str__(self) -> str:
        raise TypeError("no words")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("arguments", [{"sep": 1}, {"end": 2}, {"colour": "red"}, {}])
def test_what_cannot_be_printed_fails_on_every_rank_alike(rank: int, arguments: Any) -> None:
    suppress_output(rank)
    with pytest.raises(TypeError):
        print("a" if arguments else Mute(), "b", **arguments)


def test_the_last_rank_counts_until_print_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0, 1, 1):
        suppress_output(rank)
        print("from", rank)
    destroy_distributed()
    print("from", 7)
    assert capsys.readouterr().out == "from 0\nfrom 7\n"


def test_a_print_put_over_ours_stays_and_shows_everything_after_restore(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = builtins.print
    suppress_output(1)
    ours = builtins.print

    def tagging(*values: Any, **arguments: Any) -> None:
        ours("tag:", *values, **arguments)

    builtins.print = tagging
    print("hidden")
    destroy_distributed()
    assert builtins.print is tagging
    print("shown")
    assert capsys.readouterr().out == "tag: shown\n"
    builtins.print = before


@pytest.mark.parametrize("rank", [-1, "0", None, 1.0, True])
def test_wrong_rank(rank: Any) -> None:
    with pytest.raises(ArgumentError, match="rank must be a non-negative integer, got"):
        suppress_output(rank)
