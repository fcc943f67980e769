"""The command line on real ranks."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import gone, until

import ringsim
from ringsim.cli import demo, main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_script(body: str) -> str:
    begin = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    Path("script.py").write_text(begin + textwrap.dedent(body))
    return "script.py"


def test_demo_learns_records_and_draws(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(demo, "worker", functools.partial(demo.worker, 8))  # a fifth of the steps
    assert main(["demo", "-n", "3"]) == 0
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step +\d+ of 8 +loss (\S+)", shown)]
    assert len(losses) == 3
    assert losses[0] > 3.9  # 62 letters, all as likely
    assert losses[-1] < 3.4
    assert "the losses of the first 3 steps are the same as in a single process" in shown
    files = sorted(file.name for file in Path("demo").iterdir())
    assert files == ["ring.png", "run.ringtrace", "timeline.png"]
    trace = ringsim.load("demo/run.ringtrace")
    assert trace.peak_activations(step=7).peaks == (3, 2, 1)
    events = trace.to_pandas()
    assert events[events.label == "step 1f1b"].groupby("rank").size().tolist() == [8, 8, 8]
    sends = events[
        (events["rank"] == 0) & (events.kind == "send") & (events.size_bytes == 8 * 32 * 64 * 4)
    ]
    assert len(sends) == 8 * 8  # each microbatch's hidden states, in each step
    assert set(sends.group) == {"ring:0>1"}
    # the line that asked for it, not one of ringsim's own
    assert {Path(file).name for file in events.file} == {"demo.py"}


def test_generate_measures_and_draws(capsys: Captured) -> None:
    assert main(["generate", "-n", "2", "--tokens", "4", "--job-ms", "2", "--compare"]) == 0
    shown = capsys.readouterr().out
    assert "14 messages with states and tokens" in shown  # 2 batches x (4 tokens x 2 edges - 1)
    line = r"(\w+), (\d) inner iterations?: a stage works (\d+)% .* at most (\d+)%"
    compared = re.findall(line, shown)
    most_of = [f"{kind} {turns}: {most}" for kind, turns, _, most in compared]
    assert most_of[:1] == ["synchronous 2: 100"]
    assert most_of[1:] == [f"asynchronous {n}: {most}" for n, most in ((1, 50), (2, 100), (3, 50))]
    # jobs are not exactly alike
    assert all(0 < int(use) <= int(most) + 10 for _, _, use, most in compared)
    files = {file.name: file.read_bytes()[:4] for file in Path("generation").iterdir()}
    assert sorted(files) == ["inner_iterations.png", "ring.png", "run.ringtrace", "timeline.png"]
    assert files["inner_iterations.png"] == b"\x89PNG"


def test_trace_runs_an_unmodified_script(capsys: Captured) -> None:
    script = write_script(
        """
        import sys
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
    assert main(["trace", "-n", "3", script, "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    for rank in range(3):
        assert f"[rank {rank}] {rank} 3.0 ['--steps', '2'] __main__" in shown
    trace = ringsim.load("script.ringtrace")
    messages = trace.to_pandas("messages")
    assert messages[["src", "dst", "tag", "size_bytes", "group"]].values.tolist() == [
        [0, 1, 3, 32, "world"]
    ]
    assert (trace.to_pandas().op == "all_reduce").sum() == 3
    assert until(
        lambda: sorted(file.name for file in Path().iterdir()) == ["script.py", "script.ringtrace"]
    )


def test_trace_checks_what_it_is_asked_to_and_keeps_what_a_failing_script_did(
    capsys: Captured,
) -> None:
    script = write_script(
        """
        tensor = torch.zeros(8)
        if dist.get_rank() == 0:
            work = dist.isend(tensor, 1)
            tensor += 1
            work.wait()
            raise ValueError("no such layer")
        dist.recv(tensor, 0)
        dist.recv(tensor, 0)
        """
    )
    changed = "would change a buffer whose message has not been waited for"
    for check, fault in (("full", changed), ("basic", 'raise ValueError("no such layer")')):
        assert main(["trace", "--check", check, "-n", "2", "-o", f"{check}.ringtrace", script]) == 1
        said = capsys.readouterr().err
        assert fault in said
        assert (changed in said) == (check == "full")
    assert "rank 0 of 2 raised ValueError: no such layer" in said
    assert len(ringsim.load("basic.ringtrace").to_pandas("messages")) == 1


SLEEPS = """
    import os
    import time
    import ringsim
    ringsim.mark("here")
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


def test_what_was_recorded_until_then_is_there_and_no_process(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SLEEPS))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = {}
    for how in (signal.SIGINT, signal.SIGKILL):
        words = f"-m ringsim trace -n 2 -o {how.name}.ringtrace script.py".split()
        running[how] = subprocess.Popen([sys.executable, *words], text=True, **pipes)
    for how, process in running.items():
        with process:
            assert process.stdout is not None
            pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
            process.send_signal(how)
            _, errors = process.communicate()
        assert until(lambda pids=pids: all(gone(pid) for pid in pids))  # type: ignore[misc]
        assert ringsim.load(f"{how.name}.ringtrace").to_pandas().label.tolist() == ["here", "here"]
        assert (process.returncode, "interrupted" in errors) == (
            (130, True) if how == signal.SIGINT else (-how, False)
        )
    # The parts that a killed launcher leaves are read, and a later run does not overwrite the
    # evidence.
    assert main(["trace", "-n", "2", "-o", "SIGKILL.ringtrace", "script.py"]) == 2
    assert "SIGKILL.ringtrace.parts already exists" in capsys.readouterr().err


def test_a_module_is_run_and_no_file_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    Path("package").mkdir()
    Path(write_script("dist.all_reduce(torch.ones(1))\nimport sys; sys.exit(0)")).rename(
        "package/program.py"
    )
    monkeypatch.syspath_prepend(".")
    for expected in ("program.ringtrace", "program-2.ringtrace"):
        assert main(["trace", "-m", "package.program"]) == 0
        assert f"wrote {expected}" in capsys.readouterr().out
    Path("program-2.ringtrace").unlink()
    Path("program.ringtrace").write_text("old")
    assert main(["trace", "-f", "-m", "package.program"]) == 0
    assert set(ringsim.load("program.ringtrace").to_pandas()["op"]) >= {"all_reduce"}
    assert not Path("program-2.ringtrace").exists()


def test_under_a_launcher_each_rank_records_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "-m torch.distributed.run --nproc-per-node=2 -m ringsim trace -o run.ringtrace"
    script = write_script(
        "dist.all_reduce(torch.ones(1))\nif dist.get_rank():\n    raise ValueError('boom')\n"
        "dist.recv(torch.ones(1), 1)"
    )
    ended = subprocess.run([sys.executable, *words.split(), script], check=False)
    assert ended.returncode != 0
    # the launcher, which ends rank 0 for the other one, did not before the file was there
    trace = ringsim.load("run.ringtrace")
    (finding,) = trace.explain().findings
    assert finding.message.startswith("rank 1 raised ValueError: boom (")
    assert trace.to_pandas().query("op == 'all_reduce'")["rank"].tolist() == [0, 1]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["trace", "-n", "2", script]) == 2
