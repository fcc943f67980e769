"""Runs on real ranks, explained from the trace that their error carries, from a file of it, and by the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import RankFailed, RingError, RunTimeout
from ringsim.traces.findings import Diagnosis

pytestmark = pytest.mark.timeout(90)


def explained(worker: Any, world_size: int, tmp_path: Path) -> Diagnosis:
    """Runs a worker that fails; the trace of the error and the file of that trace must say the same."""
    with pytest.raises(RingError) as caught:
        ringsim.trace(worker, world_size=world_size, limit_s=30)
    trace = caught.value.trace
    assert trace is not None
    trace.save(tmp_path / "failed.ringtrace")
    assert ringsim.load(tmp_path / "failed.ringtrace").explain() == trace.explain()
    return trace.explain()


def receives_first() -> None:
    ring = ringsim.current_ring()
    token = torch.zeros(4)
    dist.recv(token, ring.pred)
    dist.send(token, ring.succ)


def test_ring_of_recvs(tmp_path: Path) -> None:
    diagnosis = explained(receives_first, 4, tmp_path)
    assert (diagnosis.kind, diagnosis.findings[0].ranks) == ("deadlock", (0, 3, 2, 1))
    line = receives_first.__code__.co_firstlineno + 3
    assert {(one.rank, one.op, one.peer, one.line) for one in diagnosis.findings[0].operations} == {
        (rank, "recv", (rank - 1) % 4, line) for rank in range(4)
    }


def raises_in_rank_1() -> None:
    ring = ringsim.current_ring()
    token = torch.zeros(4)
    if ring.rank == 1:
        raise ValueError("no such layer")
    dist.recv(token, 1 if ring.rank == 0 else 0)


def test_first_exception_is_the_root(tmp_path: Path) -> None:
    diagnosis = explained(raises_in_rank_1, 3, tmp_path)
    assert (diagnosis.kind, diagnosis.findings[0].ranks) == ("rank_failed", (1,))
    assert "raised ValueError: no such layer" in diagnosis.findings[0].message
    assert f"line {raises_in_rank_1.__code__.co_firstlineno + 4}" in diagnosis.findings[0].message
    assert {one.ranks[0] for one in diagnosis.findings[0].consequences} == {0, 2}


def dies() -> None:
    if ringsim.current_ring().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(4), 0)


def test_killed_peer(tmp_path: Path) -> None:
    diagnosis = explained(dies, 2, tmp_path)
    assert (diagnosis.kind, diagnosis.findings[0].ranks) == ("peer_exited", (0, 1))
    assert "SIGKILL" in diagnosis.findings[0].message


def posts_after_the_end(how: str, op: str) -> None:
    number = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        dist.send(number.fill_(os.getpid()), 0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    dist.recv(number, 1)
    while is_alive(int(number)):
        time.sleep(0.001)
    time.sleep(0.05)  # Gloo's thread sees the connection end: most of these raise when they are posted, and all must be explained
    work = getattr(dist, op)(torch.zeros(4), 1)
    if op == "irecv":
        work.wait()


def is_alive(process: int) -> bool:
    """Tells whether a process runs; one that has ended may wait to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("op", ["send", "recv", "irecv"])
def test_message_to_a_rank_that_is_gone_already(how: str, op: str) -> None:
    with pytest.raises(RankFailed) as caught:
        ringsim.trace(posts_after_the_end, world_size=2, args=(how, op), limit_s=30)
    for diagnosis in (caught.value.diagnosis, caught.value.trace.explain()):
        first = diagnosis.findings[0]
        assert (first.kind, first.ranks) == ("peer_exited", (0, 1)), str(diagnosis)
        assert ("SIGKILL" if how == "kill" else "sys.exit(0)") in first.message
        assert [(one.op, one.line) for one in first.operations] == [(op, posts_after_the_end.__code__.co_firstlineno + 11)]


def leaves_while_another_computes() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    time.sleep(30)


def test_rank_that_leaves_though_nobody_waits_for_it() -> None:
    with pytest.raises(RankFailed, match="SystemExit: 0") as caught:
        ringsim.trace(leaves_while_another_computes, world_size=2)
    (finding,) = caught.value.diagnosis.findings
    assert (finding.kind, finding.ranks) == ("rank_failed", (1,))
    assert "rank 1 left with sys.exit(0)" in finding.message


def computes_long(rounds: int) -> None:
    ring = ringsim.current_ring()
    token = torch.zeros(1024)
    for microbatch in range(rounds):
        if ring.rank > 0:
            dist.recv(token, ring.rank - 1)
        with ringsim.span("compute", stage=ring.rank, microbatch=microbatch):
            time.sleep(0.2 if ring.rank == 1 else 0.002)
        if ring.rank < ring.world_size - 1:
            dist.send(token, ring.rank + 1)


def test_slow_stage_of_a_run_that_finished() -> None:
    diagnosis = ringsim.trace(computes_long, world_size=4, args=(5,)).explain()
    first = diagnosis.findings[0]
    assert (first.kind, first.ranks) == ("straggler", (1,))
    assert "still computing stage 1, microbatch" in first.message
    assert any(one.kind == "late_sender" and one.ranks == (2, 1) for one in first.consequences)


def ring_that_works(rounds: int) -> None:
    ring = ringsim.current_ring()
    token, got = torch.zeros(16), torch.zeros(16)
    for _ in range(rounds):
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, token, ring.succ), dist.P2POp(dist.irecv, got, ring.pred)]):
            work.wait()
    dist.barrier()


def test_ring_that_works_has_nothing_wrong() -> None:
    found = ringsim.trace(ring_that_works, world_size=3, args=(20,)).explain().findings
    assert {finding.kind for finding in found} <= {"late_sender", "late_receiver", "straggler"}  # a loaded machine lets some wait


def forgets() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)


def test_handle_that_nobody_waited_for() -> None:
    (finding,) = ringsim.trace(forgets, world_size=2).explain().findings
    assert (finding.kind, finding.ranks, finding.operations[0].op) == ("leaked_request", (0,), "isend")
    assert finding.operations[0].line == forgets.__code__.co_firstlineno + 2


def test_command_runs_a_script_and_explains_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        'import torch\nimport torch.distributed as dist\ndist.init_process_group("gloo")\ndist.recv(torch.zeros(4), 1 - dist.get_rank())\n'
    )
    command = [sys.executable, "-m", "ringsim", "explain", "-n", "2", "-o", "waits.png", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("deadlock: ranks 0 and 1 wait for each other: rank 0 waits")
    assert "script.py:4" in done.stdout
    assert (tmp_path / "waits.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["script.py", "waits.png"]


def leaves_a_thread_behind() -> int:
    threading.Thread(target=lambda: dist.recv(torch.zeros(4), 1 - dist.get_rank()), daemon=True).start()
    time.sleep(0.3)
    return 1


def test_a_thread_that_waits_when_its_rank_returns_is_named() -> None:
    trace = ringsim.trace(leaves_a_thread_behind, world_size=2, limit_s=30)
    assert trace.results == [1, 1]
    findings = trace.explain().findings
    assert [(one.kind, one.ranks) for one in findings] == [("leaked_request", (0,)), ("leaked_request", (1,))]
    assert findings[0].message.startswith("rank 0 returned while a thread of it still waited in recv from 1 (")
    assert {one.operations[0].line for one in findings} == {leaves_a_thread_behind.__code__.co_firstlineno + 1}


def destroys_its_groups(op: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), 0)
        dist.destroy_process_group()
        time.sleep(30)
    elif dist.get_rank() == 0:
        dist.send(torch.zeros(1), 2)
    if op == "barrier":
        dist.barrier()
    else:
        dist.recv(torch.zeros(4), 2)


@pytest.mark.parametrize(("op", "kind"), [("barrier", "missing_participant"), ("recv", "peer_exited")])
def test_a_rank_that_destroys_its_groups_under_the_others_is_named(op: str, kind: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 2 has destroyed its process groups at test_fault_explain\.py:") as caught:
        ringsim.trace(destroys_its_groups, world_size=3, args=(op,), ring=False, limit_s=20)
    assert caught.value.trace is not None
    for diagnosis in (caught.value.diagnosis, caught.value.trace.explain()):
        assert diagnosis is not None
        assert (diagnosis.kind, set(diagnosis.findings[0].ranks)) == (kind, {0, 1, 2}), str(diagnosis)
        assert f"groups at test_fault_explain.py:{destroys_its_groups.__code__.co_firstlineno + 4}." in diagnosis.findings[0].message


def makes_its_groups_anew(folder: str) -> None:
    for attempt in range(3):  # each with a store of its own: in one that lives on, torch may read the addresses of the groups before
        if attempt:
            dist.destroy_process_group()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=size)
        dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(4), 1)
    time.sleep(30)


def test_groups_that_are_made_anew_are_there(tmp_path: Path) -> None:
    with pytest.raises(RunTimeout) as caught:
        ringsim.trace(makes_its_groups_anew, world_size=2, args=(str(tmp_path),), ring=False, limit_s=4)
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.kind == "stalled", str(caught.value.diagnosis)
