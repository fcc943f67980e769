"""The command line, as far as it needs no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringsim
from ringsim.cli import main, make_parser
from ringsim.traces.events import OP_CODES, make_events
from ringsim.traces.value import Trace


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    events = make_events({"rank": [0], "op": [OP_CODES["mark"]], "post_ns": [5], "done_ns": [5]})
    file = tmp_path / "run.ringtrace"
    Trace(events, {"world_size": 1, "source": "measured"}).save(file)
    return file


@pytest.mark.parametrize("verb", ["demo", "generate", "trace", "show", "explain", "bandwidth", "simulate", "doctor"])
def test_help_has_an_example_that_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    example = text.split("example:\n")[1].strip().split()
    assert example[:2] == ["ringsim", verb]
    make_parser().parse_args(example[1:])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ringsim {ringsim.__version__}\n"


def test_show_prints_the_summary_and_draws(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = tmp_path / "pictures"
    assert main(["show", str(trace_file), "-o", str(pictures)]) == 0
    assert ringsim.load(trace_file).summary() in capsys.readouterr().out
    assert {picture.read_bytes()[:4] for picture in (pictures / "ring.png", pictures / "timeline.png")} == {b"\x89PNG"}


@pytest.mark.parametrize("ending", [".pftrace", ".json", ".goal", ".chakra"])
def test_show_exports(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    path = tmp_path / f"run{ending}"
    assert main(["show", str(trace_file), "--export", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {path}\n")
    assert path.exists()


def test_explain_says_and_draws(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "waits.png"
    assert main(["explain", "-o", str(picture), str(trace_file)]) == 0
    assert capsys.readouterr().out == f"Nothing wrong was found in this run of 1 rank.\nwrote {picture}\n"
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_known_errors_are_one_line_and_a_code(tmp_path: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = tmp_path / "foreign.ringtrace"
    foreign.write_text("no trace")
    occupied = tmp_path / "occupied"
    occupied.write_text("a file where a directory should be")
    for command, code in (
        (["show", str(tmp_path / "missing.ringtrace")], 1),
        (["show", str(foreign)], 1),
        (["show", str(trace_file), "-o", str(occupied)], 1),
        (["show", str(trace_file), "--export", str(tmp_path / "run.pdf")], 2),
        (["explain", str(foreign)], 1),
        (["explain", "-o", str(occupied / "waits.png"), str(trace_file)], 1),
        (["explain", "-n", "2", str(tmp_path / "missing.py")], 2),
        (["trace", "-n", "2", str(tmp_path / "missing.py")], 2),
        (["trace", "-n", "0", __file__], 2),
        (["demo", "-n", "0"], 2),
    ):
        assert main(command) == code
        captured = capsys.readouterr().err
        assert captured.startswith("ringsim: ")
        assert captured.count("\n") == 1, captured


def test_no_verb_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "VERB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--inner", "5"], 1, "num_inner_iterations must be 2 to 4 with 4 stages"),
        (["--tokens", "2"], 2, "--tokens must be 3 or more"),
        (["-n", "1"], 2, "--ranks 2 or more"),
    ],
)
def test_generate_refuses_before_it_starts_a_rank(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments]) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "starting" not in said.out
