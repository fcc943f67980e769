"""The watcher on real ranks: what it calls stuck programs, on whom and on which line it puts it, how soon, and what is left behind."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fault_programs import die_within, large

import ringsim
from ringsim.errors import Deadlock, MessageMismatch, PeerExited, RankFailed, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call, pack_script
from ringsim.launch.run import RunOptions, run
from ringsim.traces.events import IN_FLIGHT, NONE

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


def tensor(count: int = 4) -> Any:
    return torch.zeros(count)


def both_receive() -> None:
    dist.recv(tensor(), 1 - dist.get_rank(), tag=3)  # here


def one_message_too_few() -> None:
    for turn in range(5):
        if dist.get_rank() == 0:
            dist.recv(tensor(), 1)  # here
        elif turn < 4:
            dist.send(tensor(), 0)


def in_a_batch() -> None:
    peer = 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor(), peer), dist.P2POp(dist.irecv, tensor(), peer)])  # here
    for work in works:
        work.wait()


def two_of_four() -> None:
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(tensor(), 1 - rank)  # here
    time.sleep(20)  # the others compute, and would for long


def a_monitored_barrier_against_a_recv() -> None:
    if dist.get_rank():
        dist.recv(tensor(), 0)  # here
    else:
        dist.monitored_barrier()  # here


def from_anybody() -> None:
    dist.recv(tensor())  # here


def anybody_got_it() -> None:
    """The recv from anybody was there first, and has the only message."""
    if dist.get_rank() == 0:
        works = [dist.irecv(tensor(), tag=3)]
        dist.recv(tensor(), 1, tag=4)
        dist.recv(tensor(), 1, tag=3)  # here
        works[0].wait()
    else:
        dist.send(tensor(), 0, tag=3)
        dist.send(tensor(), 0, tag=4)


def nobody_is_left_for_anybody() -> None:
    """The recv from rank 1 has the only message; nobody has waited for it yet."""
    if dist.get_rank() == 0:
        works = [dist.irecv(tensor(), 1, tag=3)]
        dist.recv(tensor(), 1, tag=4)
        dist.recv(tensor(), tag=3)  # here
        works[0].wait()
    else:
        sent: Any = dist.isend(tensor(), 0, tag=3)
        dist.send(tensor(), 0, tag=4)
        sent.wait()
        dist.recv(tensor(), 0, tag=3)  # here


def another_sender_was_first() -> None:
    """Two send what one recv from anybody gets, and nobody waits for that yet."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.irecv(tensor(), tag=3)]
        dist.recv(tensor(), 2, tag=4)
        dist.recv(tensor(), 1, tag=4)  # here
        works[0].wait()
    elif rank == 1:
        dist.recv(tensor(), 2, tag=5)
        dist.send(tensor(), 0, tag=3)  # here
    else:
        dist.send(tensor(), 0, tag=3)
        dist.send(tensor(), 0, tag=4)
        dist.send(tensor(), 1, tag=5)


def anybody_got_it_round_the_ring() -> None:
    """Each recv from anybody was there first, and has the only message."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works: list[Any] = [dist.irecv(tensor(), tag=3)]
    works += [dist.isend(tensor(), (rank + 1) % size, tag=tag) for tag in (3, 4)]
    dist.recv(tensor(), (rank - 1) % size, tag=4)
    dist.recv(tensor(), (rank - 1) % size, tag=3)  # here
    for work in works:
        work.wait()


IN_A_STALL_S = 8.0  # 3 s in which nothing moves, on a loaded machine


class Fault(NamedTuple):
    """A stuck program: its number of ranks, what it is called, who is to blame, with which error it ends, and how soon."""

    program: Callable[[], None]
    size: int
    kind: str
    ranks: set[int]
    error: type[RingError]
    within_s: float = 1.0


FAULTS = (  # others are rows of docs/faults.md: test_faults_table
    Fault(both_receive, 2, "deadlock", {0, 1}, Deadlock),
    Fault(one_message_too_few, 2, "peer_exited", {0, 1}, PeerExited),
    Fault(in_a_batch, 2, "deadlock", {0, 1}, Deadlock),
    Fault(two_of_four, 4, "deadlock", {0, 1}, Deadlock),
    Fault(a_monitored_barrier_against_a_recv, 2, "collective_mismatch", {0, 1}, MessageMismatch, 3.0),
    Fault(from_anybody, 2, "deadlock", {0, 1}, Deadlock),
    Fault(anybody_got_it, 2, "peer_exited", {0, 1}, PeerExited, IN_A_STALL_S),
    Fault(nobody_is_left_for_anybody, 2, "deadlock", {0, 1}, Deadlock, IN_A_STALL_S),
    Fault(another_sender_was_first, 3, "deadlock", {0, 1}, Deadlock, IN_A_STALL_S),
    Fault(anybody_got_it_round_the_ring, 4, "deadlock", set(range(4)), Deadlock, IN_A_STALL_S),
)


def marked_lines(program: Callable[[], None]) -> set[int]:
    """Returns the lines of a program that are marked as those it is stuck on."""
    lines, first = inspect.getsourcelines(program)
    return {first + offset for offset, line in enumerate(lines) if "# here" in line}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.program.__name__)
def test_a_stuck_program_is_named(fault: Fault) -> None:
    with pytest.raises(RingError) as caught:
        ringsim.trace(fault.program, world_size=fault.size)
    error = caught.value
    assert type(error) is fault.error
    finding = error.diagnosis.findings[0]
    assert (finding.kind, set(finding.ranks)) == (fault.kind, fault.ranks)
    assert {operation.line for operation in finding.operations} == marked_lines(fault.program)
    assert min(operation.waited_s for operation in finding.operations) < fault.within_s
    assert finding.message in str(error)
    assert error.trace is not None
    stuck = (error.trace.events.status == IN_FLIGHT) & (error.trace.events.wait_ns != NONE)
    assert set(error.trace.events.line[stuck]) == marked_lines(fault.program)
    assert error.trace.explain().findings[0].kind == fault.kind  # what the file says is what the watcher saw


def test_the_ranks_themselves_raise_on_the_users_line() -> None:
    def worker() -> None:
        try:
            both_receive()
        except Deadlock as error:
            print(f"caught: {error}")
            raise

    with pytest.raises(Deadlock) as caught:
        ringsim.trace(worker, world_size=2)
    assert caught.value.trace is not None
    for rank, output in enumerate(caught.value.trace.output):
        assert output.startswith("caught: deadlock: ranks 0 and 1 wait for each other")
        assert f"rank {rank} waits for " in output
    text = str(caught.value)
    assert text.count("dist.recv(tensor(), 1 - dist.get_rank(), tag=3)") == 2  # of both ranks
    assert "Traceback" not in text


def test_a_verdict_stands_though_the_program_catches_it() -> None:
    def worker() -> str:
        try:
            both_receive()
        except Deadlock:
            time.sleep(0.1)
        return "as if nothing had happened"

    with pytest.raises(Deadlock, match="wait for each other"):
        ringsim.trace(worker, world_size=2)


def test_a_failed_rank_is_the_cause_and_who_waits_for_it_the_consequence() -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        dist.recv(tensor(), 1)

    with pytest.raises(RankFailed, match="rank 1 of 3 raised ValueError: no such layer") as caught:
        ringsim.trace(worker, world_size=3)
    assert [(finding.kind, finding.ranks) for finding in caught.value.diagnosis.findings][:1] == [("rank_failed", (1,))]


def test_a_rank_killed_within_a_message_is_noticed() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            dist.send(large(1), 1)
        else:
            message = large(0)
            die_within(message)
            dist.recv(message, 0)
            time.sleep(20)

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed: its process was ended by signal 9 \(SIGKILL\)"):
        ringsim.trace(worker, world_size=2)
    assert time.monotonic() - start < 20  # the limit of an operation is 30 s


def test_a_script_is_watched_too(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    lines = ("import torch, torch.distributed as dist", "dist.init_process_group('gloo')", "dist.recv(torch.zeros(1), 1 - dist.get_rank())")
    script.write_text("\n".join(lines))
    with pytest.raises(Deadlock, match=r"script\.py:3"):
        run(pack_script(str(script), [], 0), make_kind(2, "cpu", 1800, ring=False), RunOptions(show=False))


def test_a_stopped_rank_is_named_when_the_limit_of_an_operation_is_over() -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.recv(tensor(), 1)

    with pytest.raises(RankFailed, match="rank 1 is stopped by a signal") as caught:
        ringsim.trace(worker, world_size=2, timeout_s=2)
    assert caught.value.diagnosis.kind == "stalled"
    assert caught.value.diagnosis.states[1] == "stopped"


def test_without_the_watcher_the_limit_ends_the_run() -> None:
    ringsim.trace(dist.barrier, world_size=2)  # whoever is the first to start ranks waits for torch to load, at the limit's expense
    job = pack_call(both_receive, (), {}, seed=0)
    with pytest.raises(RunTimeout) as caught:
        run(job, make_kind(2, "cpu", 30, ring=True), RunOptions(limit_s=2.0, poll_s=None))
    assert caught.value.diagnosis.kind == "deadlock"
