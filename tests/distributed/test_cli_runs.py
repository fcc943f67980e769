"""The command line on real ranks, run as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ringsim

pytestmark = pytest.mark.timeout(250)


def ringsim_command(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "ringsim", *arguments], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done


def write_script(directory: Path, body: str) -> str:
    (directory / "script.py").write_text(textwrap.dedent(body))
    return "script.py"


def test_demo_learns_records_and_draws(tmp_path: Path) -> None:
    done = ringsim_command("demo", "-n", "3", cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"step +\d+ of 40 +loss (\S+)", done.stdout)]
    assert len(losses) == 9
    assert losses[0] > 3.9  # 62 letters, all as likely
    assert losses[-1] < 2.6
    assert "lose as much in one process" in done.stdout
    assert sorted(file.name for file in (tmp_path / "demo").iterdir()) == ["ring.png", "run.ringtrace", "timeline.png"]
    trace = ringsim.load(tmp_path / "demo" / "run.ringtrace")
    assert trace.peak_activations(step=39).peaks == (3, 2, 1)
    events = trace.to_pandas()
    steps = events[events.label == "step 1f1b"]
    assert steps.groupby("rank").size().tolist() == [40, 40, 40]
    sends = events[(events["rank"] == 0) & (events.kind == "send") & (events.size_bytes == 8 * 32 * 64 * 4)]
    assert len(sends) == 40 * 8  # each microbatch's hidden states, in each step
    assert set(sends.group) == {"ring:0>1"}
    assert {Path(file).name for file in events.file} == {"demo.py"}  # the line that asked for it, not one of ringsim's own


def test_generate_measures_and_draws(tmp_path: Path) -> None:
    done = ringsim_command("generate", "-n", "2", "--tokens", "4", "--job-ms", "2", "--compare", cwd=tmp_path)
    assert "14 messages of states and tokens" in done.stdout  # 2 batches x (4 tokens x 2 edges - 1)
    compared = re.findall(r"(synchronous|asynchronous), (\d) inner iterations?: a stage works (\d+)% .* at most (\d+)%", done.stdout)
    assert [(kind, turns, most) for kind, turns, _, most in compared] == [
        ("synchronous", "2", "100"),
        ("asynchronous", "1", "50"),
        ("asynchronous", "2", "100"),
        ("asynchronous", "3", "50"),
    ]
    assert all(0 < int(use) <= int(most) + 10 for _, _, use, most in compared)  # jobs are not exactly alike
    files = {file.name: file.read_bytes()[:4] for file in (tmp_path / "generation").iterdir()}
    assert sorted(files) == ["inner_iterations.png", "ring.png", "run.ringtrace", "timeline.png"]
    assert files["inner_iterations.png"] == b"\x89PNG"


def test_trace_runs_an_unmodified_script(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
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
        """,
    )
    done = ringsim_command("trace", "-n", "3", script, "--steps", "2", cwd=tmp_path)
    for rank in range(3):
        assert f"[rank {rank}] {rank} 3.0 ['--steps', '2'] __main__" in done.stdout
    trace = ringsim.load(tmp_path / "script.ringtrace")
    messages = trace.to_pandas("messages")
    assert messages[["src", "dst", "tag", "size_bytes", "group"]].values.tolist() == [[0, 1, 3, 32, "world"]]
    assert (trace.to_pandas().op == "all_reduce").sum() == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["script.py", "script.ringtrace"]


def test_trace_keeps_what_a_failing_script_did(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.recv(torch.zeros(1), 1)
        """,
    )
    done = ringsim_command("trace", "-n", "2", "-o", "run.ringtrace", script, cwd=tmp_path, code=1)
    assert "rank 1 of 2 raised ValueError: no such layer" in done.stderr
    assert 'raise ValueError("no such layer")' in done.stderr
    frame = ringsim.load(tmp_path / "run.ringtrace").to_pandas()
    assert (frame.op == "barrier").sum() == 2


def test_interrupting_a_trace_leaves_the_file_and_no_process(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        import time
        import ringsim
        ringsim.mark("here")
        print(os.getpid(), flush=True)
        time.sleep(100)
        """,
    )
    command = [sys.executable, "-m", "ringsim", "trace", "-n", "2", script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        start = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert time.monotonic() - start < 10
    assert "interrupted" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert ringsim.load(tmp_path / "script.ringtrace").to_pandas().kind.tolist() == ["mark", "mark"]


def test_the_parts_of_a_killed_run_are_recovered(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        import time
        import ringsim
        ringsim.mark("here")
        print(os.getpid(), flush=True)
        time.sleep(100)
        """,
    )
    command = [sys.executable, "-m", "ringsim", "trace", "-n", "2", script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        process.kill()
    trace = ringsim.load(tmp_path / "script.ringtrace")
    assert trace.to_pandas().label.tolist() == ["here", "here"]
    done = ringsim_command("trace", "-n", "2", script, cwd=tmp_path, code=2)  # it does not overwrite the evidence
    assert "script.ringtrace.parts must not exist" in done.stderr


def test_doctor_says_what_works(tmp_path: Path) -> None:
    done = ringsim_command("doctor", cwd=tmp_path)
    words = {line[4:20].strip(): line[:3].strip() for line in done.stdout.splitlines()}
    assert words["Gloo"] == words["loopback"] == words["start method"] == "ok"
    assert "NCCL" in words
    assert "processes" in words


@pytest.mark.parametrize(("check", "code"), [("full", 1), ("basic", 0)])
def test_trace_checks_what_it_is_asked_to(tmp_path: Path, check: str, code: int) -> None:
    script = write_script(
        tmp_path,
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
        """,
    )
    done = ringsim_command("trace", "--check", check, script, cwd=tmp_path, code=code)
    assert ("a buffer must not be changed before its message was waited for" in done.stderr) == (check == "full")
