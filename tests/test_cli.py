"""The command line without ranks, and the training data of the demonstration."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import ringsim
from ringsim import Link, Trace, simulate_schedule
from ringsim.cli import demo, main, make_parser
from ringsim.errors import RankFailed, RingError
from ringsim.pipeline import Costs

ROOT = Path(__file__).parent.parent


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.ringtrace"
    simulate_schedule("1f1b", num_ranks=1, num_microbatches=1).trace().save(file)
    return file


@pytest.fixture(scope="module")
def pipeline() -> Trace:
    given: dict[str, Any] = {"link": Link(1e-5, 1e-9), "size_bytes": 100}
    run = simulate_schedule("1f1b", Costs(0.01), num_ranks=4, num_microbatches=4, **given)
    return run.trace()


VERBS = (
    "demo generate trace merge show open compare figures explain bandwidth "
    "simulate grade lessons lab doctor"
).split()


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_that_parses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    example = text.split("example:\n")[1].strip().split()
    assert example[:2] == ["ringsim", verb]
    make_parser().parse_args(example[1:])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--version"], 0, f"ringsim {ringsim.__version__}\n"), ([], 2, "COMMAND")],
)
def test_without_a_verb(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == code
    assert words in "".join(capsys.readouterr())


def test_a_shell_learns_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--print-completion", "bash"])
    assert left.value.code == 0
    (verbs,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("_shtab_ringsim_subparsers=")
    )
    assert {"demo", "explain", "lab"} <= set(verbs.partition("(")[2].replace("'", "").split())


@pytest.mark.parametrize(
    ("option", "out", "written"),
    [
        ("-o", "pictures", {"pictures/ring.png": b"\x89PNG", "pictures/timeline.png": b"\x89PNG"}),
        ("-o", "new/picture.svg", {"new/picture.svg": b"<?xml"}),
        ("-o", "new/picture.html", {"new/picture.html": b"<!DOCTYPE html>"}),
        ("--export", "run.pftrace", {"run.pftrace": b""}),
        ("--export", "run.json", {"run.json": b"{"}),
    ],
)
def test_show_prints_the_summary_and_writes_what_is_asked_for(
    option: str,
    out: str,
    written: dict[str, bytes],
    trace_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", str(trace_file), option, str(tmp_path / out)]) == 0
    said = capsys.readouterr().out
    assert ringsim.load(trace_file).summary() in said
    for file, begins in written.items():
        assert (tmp_path / file).read_bytes().startswith(begins)
        assert f"wrote {tmp_path / file}\n" in said


def test_explain_says_and_draws(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "waits.png"
    assert main(["explain", "-o", str(picture), str(trace_file)]) == 0
    words = f"Nothing wrong was found in this run of 1 rank.\nwrote {picture}\n"
    assert capsys.readouterr().out == words
    assert picture.read_bytes()[:4] == b"\x89PNG"


LOADS = """import ringsim
import torch.distributed as dist
dist.init_process_group("gloo")
with ringsim.span("load"):
    ringsim.compute(0.002)
"""
WORKS = """with ringsim.span("work"):
    ringsim.compute(0.002)
"""
CHANGED = """

with ringsim.span("work"):
    ringsim.compute(0.007)
with ringsim.span("check"):
    ringsim.compute(0.001)
"""


@pytest.fixture
def two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """The traces of a script, before and after a change."""
    script, files = tmp_path / "train.py", [tmp_path / "a.ringtrace", tmp_path / "b.ringtrace"]
    for then, file in zip((WORKS, CHANGED), files, strict=True):
        script.write_text(LOADS + then)
        assert main(["simulate", "-n", "1", "--save", str(file), str(script)]) == 0
    capsys.readouterr()
    return files


def test_compare_says_where_two_runs_differ_and_shows_both(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending, begins in (("html", b"<!DOCTYPE html>"), ("png", b"\x89PNG")):
        out = tmp_path / "new" / f"both.{ending}"
        assert main(["compare", *map(str, two_runs), "-o", str(out)]) == 0
        said = capsys.readouterr().out
        assert said.startswith("run: a.ringtrace 4.000 ms, b.ringtrace 9.000 ms (+125.0%)\n")
        assert "largest change: rank 0: work took 5 ms longer." in said
        assert said.endswith(f"wrote {out}\n")
        assert out.read_bytes().startswith(begins)
        rows = {line.split()[3]: line for line in said.splitlines() if "train.py:" in line}
        assert rows["work"].endswith("  train.py:9")
        assert rows["check"].endswith("  train.py:11")


def test_several_runs_are_opened_in_one_page(two_runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["open", "--no-browser", "-o", str(page), *map(str, two_runs)]) == 0
    assert page.read_text().count('"application/x-ringsim">') == len(two_runs)


def test_explain_tells_whether_the_script_ended_well(
    pipeline: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: object, error: RingError | None) -> Trace:
        if error is not None:
            raise error
        return pipeline

    for error, code in ((None, 0), (RankFailed("rank 0 raised", trace=pipeline), 1)):
        monkeypatch.setattr("ringsim.cli.traces.run_script", functools.partial(run, error=error))
        assert main(["explain", "train.py"]) == code
        # the reason for slowness is printed, and is no failure
        assert "late sender: " in capsys.readouterr().out


def test_a_script_stands_for_its_newest_trace(
    trace_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    assert main(["show", "x.py"]) == 2
    assert "no trace of x.py, such as x.ringtrace. Record one" in capsys.readouterr().err
    old, new, other = Path("x.ringtrace"), Path("x-2.ringtrace"), Path("x-other.ringtrace")
    for age, file in enumerate((other, new, old)):
        file.write_bytes(trace_file.read_bytes())
        os.utime(file, ns=(time.time_ns() + 10**10 * (3 - age),) * 2)
    old.write_bytes(b"not read")
    os.utime(old, (time.time(),) * 2)
    for verb in (["show"], ["explain"], ["open", "--no-browser"], ["compare", str(other)]):
        main([*verb, "x.py"])
        assert capsys.readouterr().err.startswith("reading x-2.ringtrace, the newest of 2\n")
    ran: list[str] = []
    monkeypatch.setattr(
        "ringsim.cli.traces.run_script",
        lambda options: ran.append("run") or ringsim.load(trace_file),
    )
    os.utime("x.py", (time.time() + 100,) * 2)
    assert main(["explain", "x.py"]) == main(["explain", "-n", "2", "x.py"]) == 0
    assert ran == ["run", "run"]


def test_figures_are_drawn_for_what_they_are_for(pipeline: Trace, tmp_path: Path) -> None:
    pipeline.save(tmp_path / "run.ringtrace")
    for purpose, ending, begins in (
        ("paper", "pdf", b"%PDF"),
        ("slide", "png", b"\x89PNG"),
        ("web", "svg", b"<?xml"),
    ):
        file, out = str(tmp_path / "run.ringtrace"), tmp_path / purpose
        assert main(["figures", file, "--for", purpose, "--dark", "-o", str(out)]) == 0
        drawn, captions = sorted(out.glob(f"*.{ending}")), sorted(out.glob("*.caption.txt"))
        names = ["bandwidth", "ring", "timeline"]
        assert [picture.stem for picture in drawn] == names
        assert [file.name for file in captions] == (
            [f"{name}.caption.txt" for name in names] if purpose == "paper" else []
        )
        assert len(list(out.iterdir())) == len(drawn) + len(captions)
        assert all(picture.read_bytes().startswith(begins) for picture in drawn)


def test_numbers_for_programs(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: object) -> Any:
        assert main([*map(str, arguments)]) == 0
        return json.loads(capsys.readouterr().out)

    said, trace = ask("show", trace_file, "--json"), ringsim.load(trace_file)
    assert (said["world_size"], said["events"]) == (trace.world_size, len(trace.events))
    assert [row["count"] for row in said["operations"]] == [row.count for row in trace.stats().rows]
    slow = ROOT / "figures" / "data" / "straggler.ringtrace"
    findings = ringsim.load(slow).explain().findings
    assert [
        (one["kind"], one["message"]) for one in ask("explain", "--json", slow)["findings"]
    ] == [(one.kind, one.message) for one in findings]
    compared = ask("compare", slow, slow, "--json")
    assert compared["steps_s"]["first"] == compared["steps_s"]["second"] != []
    assert {row["longer_s"] for row in compared["parts"]} == {0.0}
    step = ask("simulate", ROOT / "docs" / "examples" / "pipeline.toml", "--json")
    assert (step["num_ranks"], step["num_microbatches"]) == (8, 16)
    assert 0 < step["bubble"] < 1
    assert step["step_s"] > (16 + 8 - 1) * 30e-3  # without messages, and without the slow rank


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["shov", "x"], "show"),
        (["show", "x", "--jsn"], "--json"),
        (["trace", "--rnaks=2", "x.py"], "--ranks"),
        (["show", "x", "--zzzz"], ""),
    ],
)
def test_says_what_may_have_been_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"Did you mean {meant}?" if meant else "unrecognized arguments: --zzzz")


def test_known_errors_are_one_line_and_a_code(
    tmp_path: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign.ringtrace"
    foreign.write_text("no trace")
    occupied = tmp_path / "occupied"
    occupied.write_text("a file in the place of a directory")
    empty = tmp_path / "empty.ringtrace"
    ringsim.load(trace_file).filter(ops="send").save(empty)
    for command, code in (
        (["explain", str(trace_file), "--json"], 2),
        (["show", str(tmp_path / "missing.ringtrace")], 1),
        (["show", str(trace_file), "-o", str(occupied)], 1),
        (["show", str(trace_file), "-o", str(tmp_path / "picture.gif")], 2),
        (["show", str(trace_file), "--export", str(tmp_path / "run.pdf")], 2),
        (["compare", str(trace_file), str(foreign)], 1),
        (["compare", str(trace_file), str(empty)], 2),
        (["compare", str(trace_file), str(trace_file), "-o", str(tmp_path / "both")], 2),
        (["explain", str(foreign)], 1),
        (["explain", "-o", str(occupied / "waits.png"), str(trace_file)], 1),
        (["trace", "-n", "2", str(tmp_path / "missing.py")], 2),
        (["trace", "-n", "0", __file__], 2),
        (["demo", "-n", "0"], 2),
    ):
        assert main(command) == code
        captured = capsys.readouterr().err
        assert captured.startswith("ringsim: ")
        assert captured.count("\n") == 1, captured


def test_without_torch_a_verb_that_needs_it_says_so_in_a_sentence(trace_file: Path) -> None:
    hosts = ROOT / "docs" / "examples" / "hosts.toml"
    verbs = [
        ["demo"],
        ["simulate", str(hosts)],
        ["trace", "-n", "2", __file__],
        ["bandwidth"],
        ["show", str(trace_file)],
    ]
    program = (
        "import sys; sys.modules['torch'] = None; from ringsim.cli import main; "
        f"print([main(words) for words in {verbs}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[1, 1, 1, 1, 0]\n")
    words = [line.split(",")[0] for line in done.stderr.splitlines()]
    assert words == ["ringsim: this command needs torch"] * 4


def test_light_install_reads_draws_and_plans(tmp_path: Path) -> None:
    """With what docs/how-to/install.md names for reading and drawing, and without the rest."""
    light = re.search(
        r"pip install --no-deps ringsim && pip install ([a-z ]+)\n",
        (ROOT / "docs" / "how-to" / "install.md").read_text(),
    )[1].split()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    left_out = {re.match(r"\w+", line)[0] for line in wanted} - set(light)
    assert {"torch", "protobuf"} <= left_out
    trace, description = (
        ROOT / "figures" / "data" / "straggler.ringtrace",
        ROOT / "docs" / "examples" / "pipeline.toml",
    )
    verbs = [
        ["show", trace],
        ["show", trace, "--json"],
        ["show", trace, "-o", "pictures"],
        ["figures", trace],
        ["explain", "-o", "waits.png", trace],
        ["compare", trace, trace, "-o", "both.html"],
        ["open", trace, "-o", "page.html", "--no-browser"],
        ["simulate", description, "--save", "step.ringtrace", "--plot", "step.png"],
        ["lessons", "--edition", "slides"],
        ["lessons"],
        ["lessons"],
    ]
    program = f"""
import sys
import time
sys.modules |= dict.fromkeys({sorted(left_out - {"protobuf"} | {"google.protobuf"})})
import ringsim
from ringsim.cli import main
assert [main(words) for words in {[[*map(str, words)] for words in verbs]}] == [0] * {len(verbs)}
needing = [["bandwidth"], ["show", {str(trace)!r}, "--export", "x.pftrace"], ["--print-completion", "bash"]]
assert [main(words) for words in needing] == [1, 1, 1]
ringsim.load("step.ringtrace").filter(ranks=[0, 1]).plot_bandwidth()
ringsim.simulate_schedule("zb_h1", num_ranks=4, num_microbatches=8).plot()
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lessons = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in (tmp_path / "ringsim-lessons").glob("*.ipynb")) == lessons
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == [
        f"ringsim: this command needs {name}" for name in ("torch", "protobuf", "shtab")
    ]
    # the second time: the user's answers may be in the files
    assert "files that already existed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--inner", "5"], 1, "num_inner_iterations must be from 2 to 4 with 4 stages"),
        (["--tokens", "2"], 2, "--tokens must be at least 3"),
        (["-n", "1"], 2, "--ranks at least 2"),
    ],
)
def test_generate_refuses_before_it_starts_a_rank(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "starting" not in said.out


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "good", "words"),
    [
        ({}, False, "no argument provides rank, world_size, local_rank, head_ip and port"),
        (
            {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            True,
            "rank 1 of 2, local rank 0, head 127.0.0.1:29500: found by torchrun from RANK=1, "
            "WORLD_SIZE=2",
        ),
        ({"RANK": "1"}, False, "incomplete: ringsim found RANK=1, but not WORLD_SIZE"),
    ],
)
def test_doctor_says_which_rule_would_fire(
    variables: dict[str, str],
    good: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # a name that needs no name server, and no job that would wait for its other rank
    monkeypatch.setattr("ringsim.cli.doctor._STORE_PEER", "127.0.0.1")
    monkeypatch.setattr("ringsim.cli.doctor.find_launched", lambda: None)
    assert main(["doctor", "--json"]) == 0
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)["found"]}
    assert found["launcher"]["works"] is good
    assert words in found["launcher"]["detail"]
    assert all(found[what]["works"] for what in ("Gloo", "loopback", "start method"))
    assert {"NCCL", "processes"} <= found.keys()


DATA = files("ringsim") / "data"


def test_targets_are_the_letters_after_the_inputs() -> None:
    task = demo.make_task()
    text = (DATA / "sonnets.txt").read_text()
    inputs, targets = task.microbatches(step=3)
    assert len(inputs) == len(targets) == demo.NUM_MICROBATCHES
    for tokens, target in zip(inputs, targets, strict=True):
        assert tokens.shape == target.shape == (demo.BATCH, demo.LENGTH)
        for row, next_row in zip(tokens.tolist(), target.tolist(), strict=True):
            assert task.decode([row[0], *next_row]) in text
            assert row[1:] == next_row[:-1]
    assert task.encode(text) == task.text.tolist()


def test_the_text_is_small_and_says_where_it_is_from() -> None:
    text, source = (DATA / "sonnets.txt").read_text(), (DATA / "README.md").read_text()
    assert len(text) < 100_000
    assert "Gutenberg" not in text  # the name would bring its own licence
    assert all(word in source for word in ("Shakespeare", "Gutenberg", "public domain"))
    assert text.count("\n\n") == 2 * 154  # a numeral before each sonnet, and the title before all
