"""Faults that need real ranks: signals, limits, threads, and the behavior of Gloo and torch.

All programs run at the same time before the first test, because most of them wait; each test checks
the end of its own program. Faults that follow from the records are tested on simulated ranks, in
test_fault_causes and test_simulated_faults.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import test_fault_causes as causes
import torch
import torch.distributed as dist
from accusations import accused
from fault_programs import marked_lines
from torch.distributed.device_mesh import init_device_mesh

import ringsim
from ringsim import Trace
from ringsim.cli import main
from ringsim.errors import Deadlock, MessageMismatch, PeerExited, RankFailed, RingError, RunTimeout

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
for module in (sys.modules[__name__], causes):
    cloudpickle.register_pickle_by_value(module)  # ranks need not import pytest

AT_ONCE = 8
LONG_S = 60.0
LIMIT_S = 3.0  # limit of runs that only a limit ends


class Case(NamedTuple):
    """A program with its options, and the expected error, finding and words.

    The finding must name its marked lines.
    """

    worker: Callable[..., Any]
    size: int
    options: dict[str, Any]
    expected: tuple[Any, ...] = ()


class Ended(NamedTuple):
    """The end of a run: the error, if any, and the trace."""

    error: Any
    trace: Trace

    @property
    def diagnosis(self) -> Any:
        """The error's diagnosis, which the trace and its file must also give."""
        return self.trace.explain() if self.error is None else self.error.diagnosis


CASES: dict[str, Case] = {}


def on_ranks(
    size: int = 2, expected: tuple[Any, ...] = (), *args: Any, name: str = "", **options: Any
) -> Callable[..., Any]:
    """Registers a worker as a program to run, with these arguments."""

    def register(worker: Callable[..., Any]) -> Callable[..., Any]:
        options["args"] = args
        CASES[name or worker.__name__] = Case(worker, size, {"limit_s": 30, **options}, expected)
        return worker

    return register


def run_case(case: Case) -> Ended:
    try:
        return Ended(None, ringsim.trace(case.worker, world_size=case.size, **case.options))
    except RingError as error:
        return Ended(error, error.trace)


@pytest.fixture(scope="module")
def ended(nothing_left_behind: None) -> Callable[..., Ended]:
    """Returns the end of a program."""
    # the first run loads torch, so that no run with a limit does
    ringsim.trace(time.monotonic, world_size=2)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {name: pool.submit(run_case, case) for name, case in CASES.items()}
    return lambda worker: runs[worker if isinstance(worker, str) else worker.__name__].result()


def tensor(count: int = 4) -> Any:
    return torch.zeros(count)


# -- ranks that are stuck


@on_ranks(4, (Deadlock, "deadlock", {0, 1}))
def two_of_four() -> None:
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(tensor(), 1 - rank)  # here
    time.sleep(20)  # the others compute for long


@on_ranks(2, (PeerExited, "peer_exited", {0, 1}, "do not prove this"))
def anybody_got_it() -> None:
    """The recv from any source was posted first, and gets the only message.

    Nothing moves for 3 s; the posted operations prove nothing.
    """
    if dist.get_rank() == 0:
        works = [dist.irecv(tensor(), tag=3)]
        dist.recv(tensor(), 1, tag=4)
        dist.recv(tensor(), 1, tag=3)  # here
        works[0].wait()
    else:
        dist.send(tensor(), 0, tag=3)
        dist.send(tensor(), 0, tag=4)


@on_ranks(3, (PeerExited, "missing_participant", {0, 2}))
def its_members_alone() -> None:
    """Ranks 0 and 2 should create a group, without rank 1."""
    if dist.get_rank() == 2:
        dist.new_group([0, 2], use_local_synchronization=True)  # here


@on_ranks(
    2,
    (
        Deadlock,
        "deadlock",
        {0, 1},
        "after 4 others",
        "Create the same groups on all members of this group first",
    ),
)
def in_different_numbers_of_groups() -> None:
    """Torch names a group created only by its members by the number of groups of each member.

    Here, the names differ.
    """
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1], use_local_synchronization=True)  # here


@on_ranks(
    2, (MessageMismatch, "collective_mismatch", {0, 1}, "the order of elements in memory differs")
)
def over_memory_in_another_order() -> None:
    """Gloo reads the memory as it is: a tensor and its transpose would be mixed up.

    All ranks have returned when it is found.
    """
    dist.all_reduce(torch.zeros(3, 4) if dist.get_rank() else torch.zeros(4, 3).t())


APART = "their lines first differ in collective 6 of group world (ranks 0 and 2 at test_faults.py:"


@on_ranks(3, (MessageMismatch, "collective_mismatch", {0, 1}, APART))
def leaves_one_collective_out() -> None:
    """Rank 1 continues with the next, so that nothing is wrong until collective 8.

    0.2.0 named only the lines of collective 8.
    """
    for step in range(4):
        dist.all_reduce(tensor())
        if (dist.get_rank(), step) != (1, 2):
            dist.all_reduce(tensor())
    dist.barrier()


# -- programs that catch the errors of their waits


@on_ranks(2)
def tries_again() -> tuple[list[str], float]:
    """Catches a verdict, then two of its own limits.

    It continues for longer than a woken rank has to raise.
    """
    other, said = 1 - dist.get_rank(), []
    try:
        dist.recv(tensor(), other)
    except RuntimeError as error:
        said.append(type(error).__name__)
    # longer than the watcher's patience with messages, and with collectives
    for limit_s in (0.6, 1.6):
        limit = dt.timedelta(seconds=limit_s)
        group = dist.new_group()  # an expired limit breaks the connections of its group
        begin_s = time.monotonic()
        try:
            if limit_s > 1 and other:
                dist.monitored_barrier(group, limit)
            else:
                dist.irecv(tensor(), other, group).wait(limit)
        except RuntimeError as error:
            said.append(f"{type(error).__name__} {time.monotonic() - begin_s > limit_s - 0.1}")
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    return said, total.item()


def test_what_a_program_catches_ends_no_run(ended: Callable[..., Ended]) -> None:
    error, trace = ended("tries_again")
    assert error is None
    assert trace.results == [(["Deadlock", "RuntimeError True", "RuntimeError True"], 2.0)] * 2
    (finding,) = trace.explain().findings
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1))
    assert finding.message.endswith(CAUGHT)


@on_ranks(2, (), "recv", name="the limit of a recv's group")
@on_ranks(2, (), "all_reduce", name="the limit of a collective's group")
def reaches_the_limit_of_its_group(op: str) -> tuple[str, float]:
    """Only rank 0 uses a group with a timeout, and rank 1 waits for rank 0.

    Torch lets both continue after 1.6 s.
    """
    # longer than the watcher's patience with collectives
    group = dist.new_group(timeout=dt.timedelta(seconds=1.6))
    said = ""
    if dist.get_rank() == 0:
        try:
            if op == "recv":
                dist.recv(tensor(), 1, group)
            else:
                dist.all_reduce(tensor(), group=group)
        except RuntimeError as error:
            said = type(error).__name__
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("the limit of")])
def test_the_time_out_of_a_group_is_the_programs_own(
    name: str, ended: Callable[..., Ended]
) -> None:
    """0.2.0 considered the two ranks stuck, and ended the run."""
    error, trace = ended(name)
    assert error is None
    assert trace.results == [("RuntimeError", 2.0), ("", 2.0)]
    assert accused(trace) == []


CAUGHT = "\n  the program caught the error and continued"


@on_ranks(
    2, (RankFailed, "rank_failed", {0}, "ValueError: another thing", "rank 1 has exited", CAUGHT)
)
def survives_a_lost_peer() -> None:
    """0.2.0 named the lost peer, and not the error that ended the run."""
    if dist.get_rank() == 0:
        with contextlib.suppress(RuntimeError):
            dist.recv(tensor(), 1)
        raise ValueError("another thing")


@on_ranks(2)
def returns_without_its_peer() -> None:
    survives = dist.get_rank() == 0
    with contextlib.suppress(RuntimeError):
        dist.recv(tensor(), 1) if survives else None


def test_a_lost_peer_that_the_program_got_over_is_a_note(ended: Callable[..., Ended]) -> None:
    error, trace = ended(returns_without_its_peer)
    assert error is None
    diagnosis = trace.explain()
    assert diagnosis.findings == ()
    assert any(note.endswith(CAUGHT) for note in diagnosis.notes)


@on_ranks(2)
def computes_unequally() -> None:
    for _ in range(6):
        time.sleep(0.03 * dist.get_rank())
        dist.all_reduce(tensor())


def test_of_two_ranks_the_one_that_comes_last_is_named(ended: Callable[..., Ended]) -> None:
    """0.2.0 found nothing wrong.

    On a busy machine, rank 0 may be late: the times of the trace decide.
    """
    _, trace = ended(computes_unequally)
    frame = trace.to_pandas().query("op == 'all_reduce'")
    posted = np.stack([frame[frame["rank"] == rank]["post_ns"].to_numpy() for rank in (0, 1)])
    # time that the other rank waited
    late = np.maximum(posted - posted[::-1], 0).sum(axis=1)
    assert posted.shape == (2, 6)
    diagnosis = trace.explain()
    said = diagnosis.findings[0].message if diagnosis.findings else diagnosis.notes[0]
    assert f"rank {late.argmax()} " in said.replace(",", " ")


@on_ranks(2, (RankFailed, "deadlock", {0, 1}))
def catches_no_limit_of_its_group() -> None:
    group = dist.new_group(timeout=dt.timedelta(seconds=1.6))
    other = 1 - dist.get_rank()
    dist.recv(tensor(), other, dist.group.WORLD if other == 0 else group)  # here


@on_ranks(2)
def catches_one_of_two() -> None:
    try:
        dist.recv(tensor(), 1 - dist.get_rank())
    except RuntimeError:
        group = dist.new_group()
    time.sleep(2.5)  # like a program that computes
    dist.recv(tensor(), 1 - dist.get_rank(), group)  # here


def test_the_verdict_that_was_not_caught_is_the_error(ended: Callable[..., Ended]) -> None:
    error, trace = ended("catches_one_of_two")
    assert type(error) is Deadlock
    first, earlier = trace.explain().findings
    assert error.diagnosis.findings == (first,)
    assert {one.line for one in first.operations} == marked_lines(catches_one_of_two)
    assert earlier.message.endswith(CAUGHT)


# -- ranks that fail, die or leave


@on_ranks(3, (RankFailed, "rank_failed", {2}, "after ValueError: nan loss ("))
def wraps_in_a_chain() -> None:
    x = torch.zeros(4)
    try:
        for step in range(3):
            if dist.get_rank() == 2 and step == 1:
                time.sleep(0.1)
                raise ValueError("nan loss")
            dist.all_reduce(x)
    except Exception as error:
        raise RuntimeError(f"rank {dist.get_rank()} failed in step") from error


DEAD = "rank 1's last operation was barrier (world) at test_faults.py:"


@on_ranks(3, (RankFailed, "peer_exited", {0, 1, 2}, "its process was ended by signal 9", DEAD))
def wraps_a_death() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(tensor(), 1)
    except Exception as error:
        raise RuntimeError("lost my peer") from error


IN_VAIN = "and then got stuck in a wait during cleanup: "
on_ranks(3, (RankFailed, "rank_failed", {1}, "ValueError: root cause", IN_VAIN))(
    causes.finish_in_a_barrier
)


@on_ranks(2, (RankFailed, "peer_exited", {0, 1}, "SIGKILL"), "send", name="send after the end")
@on_ranks(2, (RankFailed, "peer_exited", {0, 1}, "SIGKILL"), "irecv", name="irecv after the end")
def posts_after_the_end(op: str) -> None:
    number = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        dist.send(number.fill_(os.getpid()), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(number, 1)
    while is_alive(int(number)):
        time.sleep(0.001)
    # Gloo's thread sees the connection end: most of these raise when they are posted, and all must
    # be explained
    time.sleep(0.05)
    work = getattr(dist, op)(torch.zeros(4), 1)  # here
    if op == "irecv":
        work.wait()


def is_alive(process: int) -> bool:
    """Returns whether a process runs; an ended one may still wait to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


DESTROYED = r"rank 2 has destroyed its process groups at test_faults.py:"


NEVER_THERE = RankFailed, "missing_participant", {0, 1, 2}, DESTROYED
GONE = RankFailed, "peer_exited", {0, 1, 2}, DESTROYED


@on_ranks(3, NEVER_THERE, "barrier", name="destroyed before a barrier", ring=False)
@on_ranks(3, GONE, "recv", name="destroyed before a recv", ring=False)
def destroys_its_groups(op: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), 0)
        dist.destroy_process_group()
        time.sleep(30)
    elif dist.get_rank() == 0:
        dist.send(torch.zeros(1), 2)
    if op == "barrier":
        dist.barrier()  # here
    else:
        dist.recv(torch.zeros(4), 2)  # here


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.expected])
def test_a_run_ends_in_its_error_and_names_what_happened(
    name: str, ended: Callable[..., Ended], tmp_path: Path
) -> None:
    found = ended(name)
    error, kind, ranks, *words = CASES[name].expected
    assert type(found.error) is error
    assert "also failed" not in str(found.error)
    found.trace.save(tmp_path / "ended.ringtrace")
    for diagnosis in (
        found.diagnosis,
        found.trace.explain(),
        ringsim.load(tmp_path / "ended.ringtrace").explain(),
    ):
        (first,) = diagnosis.findings
        assert (first.kind, set(first.ranks)) == (kind, ranks), str(diagnosis)
        marked = marked_lines(CASES[name].worker)
        lines = {operation.line for operation in first.operations}
        assert not marked or (lines and lines <= marked), str(diagnosis)
    for each in words:
        assert each in f"{found.error}\n{found.diagnosis}"
    # the limit of most runs is 30 s, that of an operation 30 minutes
    assert found.trace.metadata["end_ns"] < 20e9


# -- the reports of a fault


@on_ranks()
def catches_and_raises_again() -> None:
    try:
        dist.recv(tensor(), 1 - dist.get_rank(), tag=3)
    except Deadlock as error:
        print(f"caught: {error}")
        raise


def test_the_ranks_themselves_raise_on_the_users_line(ended: Callable[..., Ended]) -> None:
    error, trace = ended(catches_and_raises_again)
    for rank, output in enumerate(trace.output):
        assert output.startswith("caught: deadlock: ranks 0 and 1 wait for each other")
        assert f"rank {rank} waits for " in output
    assert str(error).count("dist.recv(tensor(), 1 - dist.get_rank(), tag=3)") == 2  # of both ranks
    assert "Traceback" not in str(error)


@on_ranks()
def waits_for_one_that_disagreed() -> None:
    """Gloo silently reads one dtype as the other.

    The program continues, and one rank waits for the other.
    """
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["posted"])
        time.sleep(0.3)  # otherwise, no rank might wait when the mismatch is found
        dist.recv(torch.zeros(4, dtype=torch.int32), 0)
        time.sleep(30)
    sending = dist.isend(torch.zeros(4), 1)
    store.set("posted", "")
    try:
        dist.barrier()
        sending.wait()
    except MessageMismatch as error:
        print(f"heard: {error}")
        raise


def test_whoever_waits_when_sides_disagree_is_woken(ended: Callable[..., Ended]) -> None:
    error, trace = ended(waits_for_one_that_disagreed)
    assert "the dtype differs" in str(error)
    assert trace.output[0].startswith("heard: message mismatch: rank 0 sends float32[4]")
    assert trace.metadata["end_ns"] < 20e9
    assert (trace.explain().kind, trace.explain().findings[0].ranks) == ("message_mismatch", (0, 1))


def test_a_script_is_watched_and_the_command_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(
        'import torch\nimport torch.distributed as dist\ndist.init_process_group("gloo")\n'
        "dist.recv(torch.zeros(4), 1 - dist.get_rank())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "-n", "2", "-o", "waits.png", "script.py"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("deadlock: ranks 0 and 1 wait for each other.\n  rank 0 waits")
    assert "script.py:4" in said
    assert (tmp_path / "waits.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["script.py", "waits.png"]


def test_without_the_watcher_the_limit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are watched only on systems with /proc."""
    monkeypatch.setattr("ringsim.launch.supervisor.has_proc", lambda: False)
    with pytest.raises(RunTimeout) as caught:
        # on a busy machine, both must have posted by then
        ringsim.trace(catches_and_raises_again, world_size=2, limit_s=4.0)
    assert caught.value.diagnosis.kind == "deadlock"


@on_ranks()
def leaves_a_thread_behind() -> int:
    threading.Thread(
        target=lambda: dist.recv(tensor(), 1 - dist.get_rank()),  # here
        daemon=True,
    ).start()
    time.sleep(0.3)
    return 1


def test_a_thread_that_waits_when_its_rank_returns_is_named(ended: Callable[..., Ended]) -> None:
    found = ended(leaves_a_thread_behind)
    assert found.trace.results == [1, 1]
    findings = found.diagnosis.findings
    assert [(one.kind, one.ranks) for one in findings] == [
        ("leaked_request", (0,)),
        ("leaked_request", (1,)),
    ]
    assert findings[0].message.startswith(
        "rank 0 returned while one of its threads waited in recv.\n  rank 0 posted recv from 1 ("
    )
    assert {one.operations[0].line for one in findings} == marked_lines(leaves_a_thread_behind)


# -- runs that only a limit ends


def line_of(worker: Callable[..., Any], words: str) -> int:
    """Returns the line of a worker that ends with a comment of these words."""
    lines, first = inspect.getsourcelines(worker)
    return next(
        first + offset for offset, line in enumerate(lines) if line.rstrip().endswith(f"# {words}")
    )


@on_ranks(4, limit_s=LIMIT_S)
def others_are_stopped_or_busy() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.recv(torch.zeros(4), 1)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:
        with ringsim.span("compute", stage=2, microbatch=5):
            time.sleep(LONG_S)  # in a span
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        sum(range(1000))  # in none


@on_ranks(4, limit_s=LIMIT_S)
def nobody_waits() -> None:
    dist.barrier()
    time.sleep(LONG_S)  # all of them


def at_the_limit(found: Ended, tmp_path: Path) -> Any:
    """Returns the finding of a run that a limit ended, which must be the same for a file."""
    assert type(found.error) is RunTimeout
    found.trace.save(tmp_path / "ended.ringtrace")
    assert ringsim.load(tmp_path / "ended.ringtrace").explain() == found.diagnosis
    (finding,) = found.diagnosis.findings
    assert finding.kind == "stalled"
    assert finding.message.replace("\n", "\n  ") in str(found.error)
    given_up_s = found.trace.metadata["given_up_ns"] * 1e-9
    assert all(operation.waited_s <= given_up_s for operation in finding.operations), (
        "until then, not to the end of the run"
    )
    return finding


def test_stopped_and_busy_ranks_are_named(ended: Callable[..., Ended], tmp_path: Path) -> None:
    """While one of them might help, there is no verdict: the limit ends the run."""
    found = ended(others_are_stopped_or_busy)
    finding, worker = at_the_limit(found, tmp_path), others_are_stopped_or_busy
    assert finding.ranks == (1, 0)
    assert {(edge.rank, edge.peer) for edge in found.diagnosis.edges} == {(0, 1)}
    assert found.diagnosis.states == ("blocked", "stopped", "running", "running")
    span, line = line_of(worker, "in a span"), line_of(worker, "in none")
    for words in (
        r"\n  rank 1 is stopped by a signal \(SIGSTOP or a similar signal, for [\d.]+ m?s\)\n",
        r"rank 2 was still computing stage 2, microbatch 5 "
        rf"\(for [\d.]+ m?s, asleep at test_faults.py:{span}\)",
        rf"rank 3 was computing at test_faults.py:({line - 1}|{line}) \(for [\d.]+ m?s\)",
    ):
        assert re.search(words, finding.message)


def test_ranks_that_all_compute_are_named_too(ended: Callable[..., Ended], tmp_path: Path) -> None:
    """The error had no cause, and the diagnosis found nothing wrong."""
    finding = at_the_limit(ended(nobody_waits), tmp_path)
    assert finding.ranks == (0, 1, 2, 3)
    at = f"asleep at test_faults.py:{line_of(nobody_waits, 'all of them')}"
    assert finding.message.startswith(
        f"no rank waited for another when the run was ended.\n  rank 0 was {at} (for "
    )


# -- programs that only look wrong


@on_ranks(4)
def makes_groups() -> float:
    for _ in range(5):
        for ranks in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3], None):
            dist.new_group(ranks)
    dist.new_subgroups(2)
    if dist.get_rank() < 2:
        for _ in range(2):
            # created only by its members, named by the number of groups of each
            dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([2, 3], use_local_synchronization=True)  # the others skip it
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group("rows"))
    return float(total)


def test_groups_in_one_order_raise_nothing_and_are_recorded_with_their_members(
    ended: Callable[..., Ended],
) -> None:
    found = ended(makes_groups)
    assert found.trace.results == [2.0, 4.0, 2.0, 4.0]
    assert accused(found.trace) == []
    made = found.trace.to_pandas().query("op == 'new_group'")
    made = made[made["group"].astype(str).str.startswith("groups of [")]
    members = [(0, "0x1")] * 2 + [(1, "0x1")] * 2 + [(2, "2x3"), (3, "2x3")]
    assert [*zip(made["rank"], made["shape"], strict=True)] == members
