"""Runs that go wrong on real ranks: what only they can show. Signals, limits, threads, what Gloo and torch do by themselves.

All programs run side by side before the first test, for most of them wait for something; each test looks at how its own ended. What the
records alone tell is tested on simulated ranks, in test_fault_causes and test_simulated_faults.
"""

from __future__ import annotations

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
import pytest
import test_fault_causes as causes
import torch
import torch.distributed as dist
from fault_programs import die_within, large, marked_lines
from hypothesis import given, note, settings
from hypothesis import strategies as st
from message_programs import Groups, Programs, awaited, circles, joined, named, programs_of_messages, said, said_circles
from torch.distributed.device_mesh import init_device_mesh

import ringsim
from ringsim.cli import main
from ringsim.diagnose.failure import error_of_kind
from ringsim.errors import Deadlock, PeerExited, RankFailed, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.schedules.engine import Operation, Receive, Run, Send, Wait, run_programs
from ringsim.traces.events import IN_FLIGHT, NONE
from ringsim.traces.findings import Diagnosis, Finding
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
for module in (sys.modules[__name__], causes):
    cloudpickle.register_pickle_by_value(module)  # ranks need not import pytest

AT_ONCE = 5
LONG_S = 60.0
LIMIT_S = 4.0  # of runs that only a limit ends
WITHOUT_A_WATCHER = RunOptions(limit_s=2.0, poll_s=None)


class Case(NamedTuple):
    worker: Callable[..., Any]
    size: int
    options: dict[str, Any]


class Ended(NamedTuple):
    """How a run ended: the error, if any, and what was recorded."""

    error: Any
    trace: Trace

    @property
    def diagnosis(self) -> Diagnosis:
        """What the error says, which the trace and its file must repeat."""
        return self.trace.explain() if self.error is None else self.error.diagnosis

    @property
    def first(self) -> Finding:
        return self.diagnosis.findings[0]


CASES: dict[str, Case] = {}


def on_ranks(size: int = 2, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a worker one of the programs that are run."""

    def register(worker: Callable[..., Any]) -> Callable[..., Any]:
        CASES[worker.__name__] = Case(worker, size, {"limit_s": 30, **options})
        return worker

    return register


def run_case(case: Case) -> Ended:
    try:
        return Ended(None, ringsim.trace(case.worker, world_size=case.size, **case.options))
    except RingError as error:
        assert error.trace is not None  # noqa: PT017
        return Ended(error, error.trace)


@pytest.fixture(scope="module")
def ended(nothing_left_behind: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Returns how a program ended."""
    ringsim.trace(time.monotonic, world_size=2)  # the first run loads torch: none of those that a limit must end
    folder = str(tmp_path_factory.mktemp("stores"))
    CASES["groups made anew"] = Case(makes_its_groups_anew, 2, {"args": (folder,), "ring": False, "limit_s": LIMIT_S})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {name: pool.submit(run_case, case) for name, case in CASES.items()}
    return lambda worker: runs[worker if isinstance(worker, str) else worker.__name__].result()


def line_of(worker: Callable[..., Any], words: str) -> int:
    """Returns the line of a worker that ends with a comment of these words."""
    lines, first = inspect.getsourcelines(worker)
    return next(first + offset for offset, line in enumerate(lines) if line.rstrip().endswith(f"# {words}"))


def tensor(count: int = 4) -> Any:
    return torch.zeros(count)


# -- ranks that are stuck


@on_ranks(4)
def two_of_four() -> None:
    rank = dist.get_rank()
    if rank < 2:
        dist.recv(tensor(), 1 - rank)  # here
    time.sleep(20)  # the others compute, and would for long


@on_ranks()
def a_monitored_barrier_against_a_recv() -> None:
    if dist.get_rank():
        dist.recv(tensor(), 0)  # here
    else:
        dist.monitored_barrier()  # here


@on_ranks()
def from_anybody() -> None:
    dist.recv(tensor())  # here


@on_ranks()
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


AT_A_STALL_S = 3.0 + 1.0  # nothing moves for 3 s; what was posted proves nothing, and the finding says so


@pytest.mark.parametrize(
    ("program", "kind", "ranks", "error", "within_s"),
    [
        (two_of_four, "deadlock", {0, 1}, "Deadlock", 1.0),
        (a_monitored_barrier_against_a_recv, "collective_mismatch", {0, 1}, "MessageMismatch", 3.0),
        (from_anybody, "deadlock", {0, 1}, "Deadlock", 1.0),
        (anybody_got_it, "peer_exited", {0, 1}, "PeerExited", AT_A_STALL_S),
    ],
)
def test_a_stuck_program_is_named(
    program: Callable[[], None], kind: str, ranks: set[int], error: str, within_s: float, ended: Callable[..., Ended]
) -> None:
    found, lines = ended(program), marked_lines(program)
    assert type(found.error).__name__ == error
    assert (found.first.kind, set(found.first.ranks)) == (kind, ranks)
    assert {operation.line for operation in found.first.operations} == lines
    assert min(operation.waited_s for operation in found.first.operations) < within_s
    assert ("Not proved" in found.first.hint) is (within_s == AT_A_STALL_S)
    assert found.first.message in str(found.error)
    stuck = (found.trace.events.status == IN_FLIGHT) & (found.trace.events.wait_ns != NONE)
    assert set(found.trace.events.line[stuck]) == lines
    assert found.trace.explain().findings[0].kind == kind  # what the file says is what the watcher saw


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


on_ranks(3)(causes.receives_and_goes_on)


@on_ranks()
def receives_in_a_thread() -> None:
    """Its first thread has communicated, too, and waits for the second."""
    rank = dist.get_rank()
    dist.barrier()
    thread = threading.Thread(target=lambda: dist.recv(tensor(), 1 - rank, tag=3 + rank))
    thread.start()
    thread.join()


@pytest.mark.parametrize(("program", "ranks"), [(causes.receives_and_goes_on, {0, 1, 2}), (receives_in_a_thread, {0, 1})])
def test_a_verdict_stands_though_the_program_catches_it(
    program: Callable[[], object], ranks: set[int], ended: Callable[..., Ended], tmp_path: Path
) -> None:
    causes.check_caught(ended(program).error, "deadlock", ranks, tmp_path)


def test_a_script_is_watched_and_the_command_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(
        'import torch\nimport torch.distributed as dist\ndist.init_process_group("gloo")\ndist.recv(torch.zeros(4), 1 - dist.get_rank())\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "-n", "2", "-o", "waits.png", "script.py"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("deadlock: ranks 0 and 1 wait for each other: rank 0 waits")
    assert "script.py:4" in said
    assert (tmp_path / "waits.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["script.py", "waits.png"]


def test_without_the_watcher_the_limit_ends_the_run(ended: Callable[..., Ended]) -> None:
    with pytest.raises(RunTimeout) as caught:
        run(pack_call(catches_and_raises_again, (), {}, seed=0), make_kind(2, "cpu", 30, ring=True), WITHOUT_A_WATCHER)
    assert caught.value.diagnosis.kind == "deadlock"


# -- ranks that fail, die or leave


@on_ranks(3)
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


def test_peers_that_wrap_the_lost_connection_are_no_cause(ended: Callable[..., Ended]) -> None:
    found = ended(wraps_in_a_chain)
    assert found.error.rank == 2
    assert "also failed" not in str(found.error)
    assert [(finding.kind, finding.ranks) for finding in found.diagnosis.findings] == [("rank_failed", (2,))]
    assert "after ValueError: nan loss (" in found.first.message
    assert sorted(echo.ranks for echo in found.first.consequences) == [(0,), (1,)]


@on_ranks(3)
def wraps_a_death() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.recv(tensor(), 1)
    except Exception as error:
        raise RuntimeError("lost my peer") from error


@on_ranks(timeout_s=40)
def dies_within_a_message() -> None:
    if dist.get_rank() == 0:
        dist.send(large(1), 1)
    else:
        message = large(0)
        die_within(message)
        dist.recv(message, 0)
        time.sleep(20)


def test_a_death_is_the_cause_and_is_noticed_at_once(ended: Callable[..., Ended]) -> None:
    found = ended(wraps_a_death)
    assert "rank 1 of 3 failed: its process was ended by signal 9" in str(found.error)
    assert [(finding.kind, finding.ranks) for finding in found.diagnosis.findings] == [("peer_exited", (0, 1, 2))]
    found = ended(dies_within_a_message)
    assert "rank 1 of 2 failed: its process was ended by signal 9 (SIGKILL)" in str(found.error)
    assert found.trace.metadata["end_ns"] < 20e9  # the limit of the run is 30 s, that of an operation 40 s


on_ranks(3)(causes.finish_in_a_barrier)


def test_what_a_finally_hides_is_the_cause_here_too(ended: Callable[..., Ended]) -> None:
    found = ended(causes.finish_in_a_barrier)
    causes.check_hidden(found.error, found.diagnosis)


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
    work = getattr(dist, op)(torch.zeros(4), 1)  # here
    if op == "irecv":
        work.wait()


def is_alive(process: int) -> bool:
    """Tells whether a process runs; one that has ended may wait to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


AFTER_THE_END = [("kill", "send"), ("exit", "send"), ("kill", "recv"), ("exit", "irecv")]
for _how, _op in AFTER_THE_END:
    CASES[f"{_op} after {_how}"] = Case(posts_after_the_end, 2, {"args": (_how, _op), "limit_s": 30})


@pytest.mark.parametrize(("how", "op"), AFTER_THE_END)
def test_message_to_a_rank_that_is_gone_already(how: str, op: str, ended: Callable[..., Ended]) -> None:
    found = ended(f"{op} after {how}")
    assert type(found.error) is RankFailed
    for diagnosis in (found.diagnosis, found.trace.explain()):
        first = diagnosis.findings[0]
        assert (first.kind, first.ranks) == ("peer_exited", (0, 1)), str(diagnosis)
        assert ("SIGKILL" if how == "kill" else "sys.exit(0)") in first.message
        assert [(one.op, {one.line}) for one in first.operations] == [(op, marked_lines(posts_after_the_end))]


@on_ranks()
def leaves_while_another_computes() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    time.sleep(30)


def test_rank_that_leaves_though_nobody_waits_for_it(ended: Callable[..., Ended]) -> None:
    found = ended(leaves_while_another_computes)
    assert "SystemExit: 0" in str(found.error)
    (finding,) = found.diagnosis.findings
    assert (finding.kind, finding.ranks) == ("rank_failed", (1,))
    assert "rank 1 left with sys.exit(0)" in finding.message


@on_ranks()
def leaves_a_thread_behind() -> int:
    threading.Thread(target=lambda: dist.recv(tensor(), 1 - dist.get_rank()), daemon=True).start()  # here
    time.sleep(0.3)
    return 1


def test_a_thread_that_waits_when_its_rank_returns_is_named(ended: Callable[..., Ended]) -> None:
    found = ended(leaves_a_thread_behind)
    assert found.trace.results == [1, 1]
    findings = found.diagnosis.findings
    assert [(one.kind, one.ranks) for one in findings] == [("leaked_request", (0,)), ("leaked_request", (1,))]
    assert findings[0].message.startswith("rank 0 returned while a thread of it still waited in recv from 1 (")
    assert {one.operations[0].line for one in findings} == marked_lines(leaves_a_thread_behind)


# -- where only a limit ends a run


@on_ranks(timeout_s=2)
def stops() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.recv(tensor(), 1)


def test_a_stopped_rank_is_named_when_the_limit_of_an_operation_is_over(ended: Callable[..., Ended]) -> None:
    found = ended(stops)
    assert type(found.error) is RankFailed
    assert "rank 1 is stopped by a signal" in str(found.error)
    assert (found.diagnosis.kind, found.diagnosis.states[1]) == ("stalled", "stopped")


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


def at_the_limit(found: Ended, tmp_path: Path) -> Finding:
    """Returns what is said of a run that a limit ended, which must be the same of a file."""
    assert type(found.error) is RunTimeout
    found.trace.save(tmp_path / "ended.ringtrace")
    assert ringsim.load(tmp_path / "ended.ringtrace").explain() == found.diagnosis
    (finding,) = found.diagnosis.findings
    assert finding.kind == "stalled"
    assert finding.message in str(found.error)
    assert all(operation.waited_s <= LIMIT_S + 1 for operation in finding.operations)
    return finding


def test_stopped_and_busy_ranks_are_named(ended: Callable[..., Ended], tmp_path: Path) -> None:
    """And as long as one of them might help there is no verdict: the limit ends the run."""
    found = ended(others_are_stopped_or_busy)
    finding, worker = at_the_limit(found, tmp_path), others_are_stopped_or_busy
    assert finding.ranks == (0,)
    assert {(edge.rank, edge.peer) for edge in found.diagnosis.edges} == {(0, 1)}
    assert found.diagnosis.states == ("blocked", "stopped", "running", "running")
    assert re.search(r"Meanwhile rank 1 is stopped by a signal \(SIGSTOP, or one like it, for [\d.]+ s\); ", finding.message)
    at = f"asleep at test_faults.py:{line_of(worker, 'in a span')}"
    assert re.search(rf"rank 2 was still computing stage 2, microbatch 5 \(for [\d.]+ s, {at}\)", finding.message)
    line = line_of(worker, "in none")
    assert re.search(rf"rank 3 was computing at test_faults.py:({line - 1}|{line}) \(for [\d.]+ s\)", finding.message)


def test_ranks_that_all_compute_are_named_too(ended: Callable[..., Ended], tmp_path: Path) -> None:
    """The error said that nobody had an answer, and the diagnosis that nothing was wrong."""
    finding = at_the_limit(ended(nobody_waits), tmp_path)
    assert finding.ranks == (0, 1, 2, 3)
    at = f"asleep at test_faults.py:{line_of(nobody_waits, 'all of them')}"
    assert finding.message.startswith(f"no rank waited for another when the run was ended: rank 0 was {at} (for ")


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


def test_groups_that_are_made_anew_are_there(ended: Callable[..., Ended]) -> None:
    assert ended("groups made anew").diagnosis.kind == "stalled"


# -- groups


def destroys_its_groups(op: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), 0)
        dist.destroy_process_group()  # here
        time.sleep(30)
    elif dist.get_rank() == 0:
        dist.send(torch.zeros(1), 2)
    if op == "barrier":
        dist.barrier()
    else:
        dist.recv(torch.zeros(4), 2)


for _op in ("barrier", "recv"):
    CASES[f"groups destroyed before {_op}"] = Case(destroys_its_groups, 3, {"args": (_op,), "ring": False, "limit_s": 20})


@pytest.mark.parametrize(("op", "kind"), [("barrier", "missing_participant"), ("recv", "peer_exited")])
def test_a_rank_that_destroys_its_groups_under_the_others_is_named(op: str, kind: str, ended: Callable[..., Ended]) -> None:
    found = ended(f"groups destroyed before {op}")
    (line,) = marked_lines(destroys_its_groups)
    said = f"rank 2 has destroyed its process groups at test_faults.py:{line}."
    assert type(found.error) is RankFailed
    assert said[:-1] in str(found.error)
    for diagnosis in (found.diagnosis, found.trace.explain()):
        assert (diagnosis.kind, set(diagnosis.findings[0].ranks)) == (kind, {0, 1, 2}), str(diagnosis)
        assert said in diagnosis.findings[0].message


@on_ranks(4)
def makes_groups() -> float:
    for _ in range(5):
        for ranks in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3], None):
            dist.new_group(ranks)
    dist.new_subgroups(2)
    if dist.get_rank() < 2:
        for _ in range(2):
            dist.new_group([0, 1], use_local_synchronization=True)  # known to its members alone, named after how many groups each is in
    dist.new_group([2, 3], use_local_synchronization=True)  # the others pass by
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group("rows"))
    return float(total)


def test_groups_in_one_order_raise_nothing_and_are_recorded_with_their_members(ended: Callable[..., Ended]) -> None:
    found = ended(makes_groups)
    assert found.trace.results == [2.0, 4.0, 2.0, 4.0]
    assert [finding.kind for finding in found.diagnosis.findings if "mismatch" in finding.kind] == []
    rows = found.trace.to_pandas()
    made = rows[(rows["op"] == "new_group") & rows["group"].astype(str).str.startswith("groups of [")]
    assert [(int(one.rank), one.shape) for one in made.itertuples()] == [(0, "0x1")] * 2 + [(1, "0x1")] * 2 + [(2, "2x3"), (3, "2x3")]


@on_ranks(3)
def its_members_alone() -> None:
    """Rank 0 and 2 are to make a group, of which rank 1 need not know."""
    if dist.get_rank() == 2:
        dist.new_group([0, 2], use_local_synchronization=True)  # here


@on_ranks()
def in_different_numbers_of_groups() -> None:
    """Torch names a group that its members alone make by how many groups each of them is in: here they never meet."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1], use_local_synchronization=True)  # here


@pytest.mark.parametrize(
    ("program", "error", "kind", "ranks"),
    [(its_members_alone, PeerExited, "missing_participant", {0, 2}), (in_different_numbers_of_groups, Deadlock, "deadlock", {0, 1})],
)
def test_members_that_wait_in_vain_for_others_to_make_their_group_are_told(
    program: Callable[[], None], error: type[RingError], kind: str, ranks: set[int], ended: Callable[..., Ended]
) -> None:
    """0.1.0 did not record the making: the member that made it waited for torch's store until the time-out of the run."""
    found = ended(program)
    assert type(found.error) is error
    assert found.trace.metadata["end_ns"] < 20e9
    assert (found.first.kind, set(found.first.ranks)) == (kind, ranks)
    assert {operation.line for operation in found.first.operations} == marked_lines(program)
    assert found.trace.explain().findings[0].kind == kind
    if kind == "deadlock":
        assert "after 4 others" in found.first.message
        assert "let them make the same groups before it" in found.first.hint


# -- a rank that stops recording at the maximum of records, so that what comes later is taken for no fault

MAXIMUM = 600  # the real one, two million, takes minutes to reach
ROUNDS = 400  # two messages each: the last 200 messages are not recorded


def to_and_fro(stops: tuple[int, ...]) -> int:
    """Messages both ways; then one that its sender sends late, when a rank that looked stuck would have been found out."""
    from ringsim.state import get_state

    rank, token, recorder = dist.get_rank(), torch.zeros(1), get_state().recorder
    if rank in stops:
        recorder._store._max_records = recorder._max_records = MAXIMUM
    for _ in range(ROUNDS):
        for sender in (0, 1):
            if rank == sender:
                token += 1
                dist.send(token, 1 - rank)
            else:
                dist.recv(token, 1 - rank)
    if rank == 0:
        time.sleep(1.5)
        dist.send(token, 1)
    else:
        dist.recv(token, 0)
    dist.barrier()
    return int(token)


STOPS = [(0,), (1,)]
for _stops in STOPS:
    CASES[f"to_and_fro{_stops}"] = Case(to_and_fro, 2, {"args": (_stops,)})


@pytest.mark.parametrize("stops", STOPS, ids=["the sender", "the receiver"])
def test_a_rank_that_no_longer_records_is_not_taken_for_stuck(stops: tuple[int, ...], ended: Callable[..., Ended]) -> None:
    trace = ended(f"to_and_fro{stops}").trace
    assert trace.results == [2 * ROUNDS, 2 * ROUNDS]
    recorded = {rank: int((trace.events.rank == rank).sum()) for rank in (0, 1)}
    assert recorded == {rank: MAXIMUM if rank in stops else 2 * ROUNDS + 2 for rank in (0, 1)}
    assert trace.metadata["complete"] is False
    stopped = [f"Recording of rank {rank} stopped: the maximum of 600 records was reached." for rank in stops]
    assert [note.partition(" What")[0] for note in trace.metadata["notes"] if note.startswith("Recording")] == stopped
    assert not {finding.kind for finding in trace.explain().findings} - {"late_sender", "late_receiver", "straggler"}


# -- random programs of messages: the run ends with a verdict where the evaluator of lists says so, and only there

SIZE = 3
GROUPS: Groups = {"world": (0, 1, 2), "ring:0>1": (0, 1), "ring:1>2": (1, 2), "ring:2>0": (0, 2)}


def spell(program: list[Operation]) -> list[tuple[Any, ...]]:
    """Writes a program in plain data: ranks need not load what the tests need. A wait right behind its post makes some of them blocking."""
    words: list[tuple[Any, ...]] = []
    for position, operation in enumerate(program):
        if isinstance(operation, Wait):
            words.append(("wait", operation.position))
        elif isinstance(operation, Send | Receive):
            group, tag = operation.tag  # type: ignore[misc]
            blocks = position % 3 > 0 and program[position + 1 : position + 2] == [Wait(position)]
            op = ("send" if blocks else "isend") if isinstance(operation, Send) else ("recv" if blocks else "irecv")
            words.append((op, operation.peer, group, tag))
    return words


def play(spelt: list[list[tuple[Any, ...]]]) -> dict[int, list[int]]:
    """Plays this rank's program; every message says which post of which rank it is. Returns what each recv that was waited for got."""
    ring = ringsim.current_ring()
    groups = {"world": None, f"ring:{ring.rank}>{ring.succ}": ring.succ_group, f"ring:{ring.pred}>{ring.rank}": ring.pred_group}
    buffers: dict[int, Any] = {}
    works: dict[int, Any] = {}
    received = {}
    for position, (what, *about) in enumerate(spelt[ring.rank]):
        if what == "wait":
            (post,) = about
            if post in works:
                works[post].wait()
            if "recv" in spelt[ring.rank][post][0]:
                received[post] = buffers[post].tolist()
            continue
        peer, group, tag = about
        buffers[position] = torch.tensor([ring.rank, position]) if "send" in what else torch.tensor([-1, -1])
        post: Callable[..., Any] = getattr(dist, what)
        work = post(buffers[position], peer, group=groups[group], tag=tag)
        if what.startswith("i"):
            works[position] = work
    return received


def expected_results(programs: Programs, run: Run) -> list[dict[int, list[int]]]:
    """Returns what ``play`` returns, by the evaluator."""
    came = {(message.rank, message.receive): [message.source, message.send] for message in run.messages}
    return [
        {
            operation.position: came[rank, operation.position]
            for operation in program
            if isinstance(operation, Wait) and isinstance(program[operation.position], Receive)
        }
        for rank, program in enumerate(programs)
    ]


def in_a_row(parts: list[Programs]) -> Programs:
    """Writes those that come to an end one behind the other, and behind them the first that does not: one run for all of them."""
    ending = [part for part in parts if not run_programs(part).blocked]
    stuck = [part for part in parts if run_programs(part).blocked]
    return joined(ending + stuck[:1], SIZE)


def outcome(programs: Programs) -> Trace | RingError:
    """Returns what a run of programs gives back, or the error that it ends with."""
    try:
        return ringsim.trace(play, world_size=SIZE, args=([spell(program) for program in programs],), limit_s=20)
    except RingError as error:
        return error


@settings(max_examples=settings.default.max_examples // 3)  # test_diagnose_programs asks the same of the record alone, and more often
@given(parts=st.lists(programs_of_messages(SIZE, GROUPS), min_size=1, max_size=6))
def test_ranks_are_told_where_the_evaluator_says_so(parts: list[Programs]) -> None:
    programs = in_a_row(parts)
    run = run_programs(programs)
    found = outcome(programs)
    note(f"{programs}\n{run.blocked}\n{found}")
    if not isinstance(found, RingError):
        assert run.blocked == ()
        assert found.results == expected_results(programs, run)
        assert "stalled" not in {finding.kind for finding in found.explain().findings}
        return
    diagnosis = found.diagnosis
    assert said(diagnosis)
    assert said(diagnosis) <= awaited(programs, run)  # it may come while others are still on their way into it
    assert said_circles(diagnosis) <= circles(run)
    assert named(diagnosis) >= {one.rank for one in said(diagnosis)}
    assert {finding.kind for finding in diagnosis.findings} <= {"deadlock", "tag_mismatch", "group_mismatch", "peer_exited"}
    assert type(found) is error_of_kind(diagnosis.kind)
    assert found.trace is not None
    assert said(found.trace.explain()) >= said(diagnosis)  # what is in the file is what the watcher saw
