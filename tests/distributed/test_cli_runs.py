"""The command line on real ranks."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import gone, until

import ringsim
from ringsim.cli import demo, main

pytestmark = pytest.mark.timeout(150)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_script(body: str) -> str:
    Path("script.py").write_text(textwrap.dedent(body))
    return "script.py"


def test_demo_learns_records_and_draws(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(demo, "worker", functools.partial(demo.worker, 11))  # a quarter of the steps
    assert main(["demo", "-n", "3"]) == 0
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step +\d+ of 11 +loss (\S+)", shown)]
    assert len(losses) == 3
    assert losses[0] > 3.9  # 62 letters, all as likely
    assert losses[-1] < 3.3
    assert "lose as much in one process" in shown
    assert sorted(file.name for file in Path("demo").iterdir()) == ["ring.png", "run.ringtrace", "timeline.png"]
    trace = ringsim.load("demo/run.ringtrace")
    assert trace.peak_activations(step=10).peaks == (3, 2, 1)
    events = trace.to_pandas()
    assert events[events.label == "step 1f1b"].groupby("rank").size().tolist() == [11, 11, 11]
    sends = events[(events["rank"] == 0) & (events.kind == "send") & (events.size_bytes == 8 * 32 * 64 * 4)]
    assert len(sends) == 11 * 8  # each microbatch's hidden states, in each step
    assert set(sends.group) == {"ring:0>1"}
    assert {Path(file).name for file in events.file} == {"demo.py"}  # the line that asked for it, not one of ringsim's own


def test_generate_measures_and_draws(capsys: Captured) -> None:
    assert main(["generate", "-n", "2", "--tokens", "4", "--job-ms", "2", "--compare"]) == 0
    shown = capsys.readouterr().out
    assert "14 messages of states and tokens" in shown  # 2 batches x (4 tokens x 2 edges - 1)
    compared = re.findall(r"(synchronous|asynchronous), (\d) inner iterations?: a stage works (\d+)% .* at most (\d+)%", shown)
    assert [(kind, turns, most) for kind, turns, _, most in compared] == [
        ("synchronous", "2", "100"),
        ("asynchronous", "1", "50"),
        ("asynchronous", "2", "100"),
        ("asynchronous", "3", "50"),
    ]
    assert all(0 < int(use) <= int(most) + 10 for _, _, use, most in compared)  # jobs are not exactly alike
    files = {file.name: file.read_bytes()[:4] for file in Path("generation").iterdir()}
    assert sorted(files) == ["inner_iterations.png", "ring.png", "run.ringtrace", "timeline.png"]
    assert files["inner_iterations.png"] == b"\x89PNG"


def test_trace_runs_an_unmodified_script() -> None:
    script = write_script(
        """
        import sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(8) * dist.get_rank()
        dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            dist.send(tensor, 1, tag=3)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0, tag=3)
        print(dist.get_rank(), tensor[0].item(), sys.argv[1:], __name__)
        dist.destroy_process_group()
        """
    )
    command = [sys.executable, "-m", "ringsim", "trace", "-n", "3", script, "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert f"[rank {rank}] {rank} 3.0 ['--steps', '2'] __main__" in done.stdout
    trace = ringsim.load("script.ringtrace")
    messages = trace.to_pandas("messages")
    assert messages[["src", "dst", "tag", "size_bytes", "group"]].values.tolist() == [[0, 1, 3, 32, "world"]]
    assert (trace.to_pandas().op == "all_reduce").sum() == 3
    assert sorted(file.name for file in Path().iterdir()) == ["script.py", "script.ringtrace"]


def test_trace_keeps_what_a_failing_script_did(capsys: Captured) -> None:
    script = write_script(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.recv(torch.zeros(1), 1)
        """
    )
    assert main(["trace", "-n", "2", "-o", "run.ringtrace", script]) == 1
    said = capsys.readouterr().err
    assert "rank 1 of 2 raised ValueError: no such layer" in said
    assert 'raise ValueError("no such layer")' in said
    assert (ringsim.load("run.ringtrace").to_pandas().op == "barrier").sum() == 2


SLEEPS = """
    import os
    import time
    import ringsim
    ringsim.mark("here")
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_recorded_until_then_is_there_and_no_process(how: signal.Signals, capsys: Captured) -> None:
    script = write_script(SLEEPS)
    command = [sys.executable, "-m", "ringsim", "trace", "-n", "2", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        start = time.monotonic()
        os.kill(process.pid, how)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - start < 10
    assert until(lambda: all(gone(pid) for pid in pids), 2.0)
    assert ringsim.load("script.ringtrace").to_pandas().label.tolist() == ["here", "here"]
    if how == signal.SIGINT:
        assert (process.returncode, "interrupted" in errors) == (130, True)
    else:  # the parts are read, and a later run does not overwrite the evidence
        assert main(["trace", "-n", "2", script]) == 2
        assert "script.ringtrace.parts must not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("check", "code"), [("full", 1), ("basic", 0)])
def test_trace_checks_what_it_is_asked_to(check: str, code: int, capsys: Captured) -> None:
    script = write_script(
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.zeros(8)
        if dist.get_rank() == 0:
            work = dist.isend(tensor, 1)
            tensor += 1
            work.wait()
        else:
            dist.recv(tensor, 0)
        dist.destroy_process_group()
        """
    )
    assert main(["trace", "--check", check, script]) == code
    assert ("a buffer must not be changed before its message was waited for" in capsys.readouterr().err) == (check == "full")
