"""What a run shows while it goes on: tagged lines, and a progress line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ringsim.launch import run
from ringsim.launch.run import RankOutput


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rank-2.out"


def test_lines_are_shown_when_they_are_complete(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = RankOutput(2, file, show=True, show_hidden=False)
    output.follow()  # the rank has not started
    with file.open("wb") as stream:
        for text, shown in (("one\ntw", "[rank 2] one\n"), ("o\n\nthr", "[rank 2] two\n[rank 2] \n"), ("ee", "")):
            stream.write(text.encode())
            stream.flush()
            output.follow()
            assert capsys.readouterr().out == shown
    output.follow(last=True)
    assert capsys.readouterr().out == "[rank 2] three\n"
    assert output.text == "one\ntwo\n\nthree"


def test_hidden_text_is_kept_and_not_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("a\n\x0ehidden\nand more\n\x0fb\n\x0elast\n\x0f")
    output = RankOutput(2, file, show=True, show_hidden=False)
    output.follow(last=True)
    assert capsys.readouterr().out == "[rank 2] a\n[rank 2] b\n"
    assert output.text == "a\nhidden\nand more\nb\nlast\n"
    everything = RankOutput(2, file, show=True, show_hidden=True)
    everything.follow(last=True)
    assert capsys.readouterr().out.count("[rank 2]") == 5


def test_a_character_cut_in_two_is_not_harmed(file: Path) -> None:
    output = RankOutput(0, file, show=False, show_hidden=False)
    encoded = "später\n".encode()
    file.write_bytes(encoded[:4])
    output.follow()
    file.write_bytes(encoded + b"\xff\n")
    output.follow()
    assert output.text == "später\n\ufffd\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_comes_late_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = run.Progress(4)
    line.update(1, lambda: "")
    line.clear()
    assert terminal.getvalue() == "", "a short run shows nothing"
    monkeypatch.setattr(run, "QUIET_S", 0.0)
    line = run.Progress(4)
    line.update(1, lambda: "")
    assert terminal.getvalue().endswith("ringsim: 4 ranks, 0 s, 1 done")
    line.update(2, lambda: "")
    assert "2 done" not in terminal.getvalue(), "it does not flicker"
    line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_the_progress_line_says_what_the_ranks_are_at(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(run, "QUIET_S", 0.0)
    run.Progress(2).update(0, lambda: "3 of 8 measured")
    assert terminal.getvalue().endswith("ringsim: 2 ranks, 0 s, 0 done, 3 of 8 measured")


def test_no_progress_line_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(run, "QUIET_S", 0.0)
    line = run.Progress(4)
    line.update(1, lambda: "")
    line.clear()
    assert log.getvalue() == ""
