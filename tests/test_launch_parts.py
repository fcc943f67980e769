"""Parts of launching that need no ranks: the output of a run, and its properties."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ringsim.diagnose.failure import PEER, Report, make_error
from ringsim.launch import progress, run
from ringsim.launch.job import RankConfig, start_environment
from ringsim.launch.output import RankOutput
from ringsim.launch.results import read_result, write_result
from ringsim.traces.events import OP_CODES
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder


def test_values_read_at_the_start_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with other values needs ranks of another server."""
    read = "OMP_NUM_THREADS TORCH_GLOO_LAZY_INIT GLOO_SOCKET_IFNAME LD_PRELOAD CUDA_VISIBLE_DEVICES"
    others = "HOME PATH MY_SETTING RANK OMPX"
    for name in f"{read} {others}".split():
        monkeypatch.setenv(name, "/")
    assert {*read.split()} <= {*dict(start_environment())}
    assert not {*others.split()} & {*dict(start_environment())}


def test_runs_on_gpus_alone_have_a_limit_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(device: str, limit_s: float | None) -> Any:
        return run.run(None, SimpleNamespace(comm_device=device), run.RunOptions(limit_s))

    monkeypatch.setattr(run, "get_launcher", mock.Mock())
    give_back = SimpleNamespace  # returns the limit of the run
    monkeypatch.setattr(run, "Run", lambda *of: give_back(finish=lambda: of[-1].limit_s))
    found = [limit("cpu", None), limit("cpu", 5), limit("gpu", None), limit("gpu", 5)]
    assert found == [None, 5, run.GPU_LIMIT_S, 5]


def test_those_that_lost_their_peer_and_those_that_were_stopped_are_told_apart() -> None:
    cause = Report(1, "ValueError", "no such layer", "file.py, line 1, in f", "", at_ns=5)
    echo = replace(cause, rank=0, error="RuntimeError", at_ns=1, echo=PEER)
    later = replace(cause, rank=2, at_ns=9)
    message = str(make_error([echo, later, cause], 4, stopped=[3]))
    assert message.splitlines() == [
        "rank 1 of 4 raised ValueError: no such layer",
        "  also failed: rank 2 (ValueError)",
        "  lost a peer as a result: rank 0 (file.py, line 1, in f)",
        "  stopped as a result: rank 3",
    ]


def test_only_what_is_no_plain_tensor_is_copied_into_the_pickle(tmp_path: Path) -> None:
    whole = torch.arange(2.0**20).reshape(1024, 1024)
    result = whole, whole.to(torch.bfloat16), whole > 3, whole.t(), whole.numpy()
    spans = write_result(result, tmp_path / "result")
    assert [(end - start) >> 20 for start, end in spans[1:]] == [4, 2, 1, 4]
    assert spans[0][1] < 5 << 20
    assert torch.equal(read_result(tmp_path / "result", spans)[0], whole)
    assert list(tmp_path.iterdir()) == []


# -- the output of a run while it lasts

HIDDEN = "a\n<mark>hid\nand\n<mark>b\n<mark>last\n<mark>"
ALL = "a\nhid\nand\nb\nlast\n"


@pytest.mark.parametrize(
    ("steps", "show_hidden", "kept"),
    [
        # Lines are shown when they are complete.
        (
            [("one\ntw", "one\n"), ("o\n\nthr", "two\n\n"), ("ee", ""), ("", "three\n")],
            False,
            "one\ntwo\n\nthree",
        ),
        # Hidden text is kept, and shown on request.
        ([(HIDDEN, "a\nb\n"), ("", "")], False, ALL),
        ([(HIDDEN, ALL), ("", "")], True, ALL),
        # A character that is split in two is kept intact.
        ([(b"sp\xc3", ""), (b"\xa4ter\n\xff\n", "später\n\ufffd\n")], False, "später\n\ufffd\n"),
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
    file, output = config.file("out"), RankOutput(config, show=True, show_hidden=show_hidden)
    output.follow()  # the rank has not started yet
    for number, (written, shown) in enumerate(steps, 1):
        with file.open("ab") as stream:
            stream.write(written if isinstance(written, bytes) else written.encode())
        output.follow(last=number == len(steps))
        lines = shown.splitlines(keepends=True)
        assert capsys.readouterr().out == "".join(f"[rank 2] {line}" for line in lines)
    assert output.text == kept


def test_the_progress_line_comes_late_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(is_terminal: bool, quiet_s: float) -> list[str]:
        """Returns the output after the first update, after the second, and at the end."""
        stream, seen = io.StringIO(), []
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "QUIET_S", quiet_s)
        line = progress.Progress(4)
        line.update(1, lambda: "3 of 8 measured")
        seen.append(stream.getvalue())
        line.update(2, lambda: "")
        seen.append(stream.getvalue())
        line.close()
        return [*seen, stream.getvalue()]

    words = "\r\x1b[Jringsim: 4 ranks, 0 s, 1 done, 3 of 8 measured"
    assert shown(is_terminal=True, quiet_s=2.0) == ["", "", ""], "a short run must show nothing"
    assert shown(is_terminal=True, quiet_s=0.0) == [words, words, f"{words}\r\x1b[J"]
    assert shown(is_terminal=False, quiet_s=0.0) == ["", "", ""]


def test_output_takes_the_place_of_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In 0.3.0 a rank's output continued the progress line."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    line = progress.Progress(2, live=True)
    config = RankConfig(str(tmp_path), 1, 2, "cpu", 30.0, ring=True, mark="<mark>")
    output = RankOutput(config, show=True, show_hidden=False, make_room=line.make_room)
    line.update(0, lambda: "first\nsecond")
    output.follow()
    before = stream.getvalue()
    assert before == "\r\x1b[Jringsim: 2 ranks, 0 s, 0 done, first\nsecond"
    config.file("out").write_text("hello\n")
    output.follow()
    assert stream.getvalue() == f"{before}\x1b[1A\r\x1b[J[rank 1] hello\n"
    line.update(0, lambda: "third")  # at once, below the output
    assert stream.getvalue().endswith("hello\n\r\x1b[Jringsim: 2 ranks, 0 s, 0 done, third")


def test_progress_counts_messages_and_steps(tmp_path: Path) -> None:
    readers = [PartReader(tmp_path, rank) for rank in range(2)]
    assert progress.count_progress(readers) == ""
    recorders = [Recorder(tmp_path, rank, 2) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        send = recorder.make_post(OP_CODES["isend" if rank == 0 else "irecv"])
        for step in range(2 - rank):
            spans = [recorder.span_begin(name) for name in ("step mine", "forward")]
            recorder.mark("step mark")
            recorder.wait(send(recorder.group("world", [0, 1]), 1 - rank, step, -1))
            for span in reversed(spans):
                recorder.span_end(span)
    for reader in readers:
        reader.advance()
    assert progress.count_progress(readers) == "2 messages, step 2"
    for recorder in recorders:
        recorder.close()
    for reader in readers:
        reader.advance()  # records that have changed count once
    assert progress.count_progress(readers) == "2 messages, step 2"
