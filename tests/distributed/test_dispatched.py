"""Collectives that C++ issues.

What DistributedDataParallel, functional collectives and DTensor do is recorded, and stays as it
was.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringsim
from ringsim import Trace
from ringsim.comm import dispatcher
from ringsim.comm.dispatcher import LateWaits
from ringsim.comm.torch_hooks import install, uninstall
from ringsim.errors import MessageMismatch
from ringsim.launch.protocol import WAKE_S
from ringsim.state import get_state
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, OP_CODES, Events
from ringsim.traces.findings import SLOW_KINDS
from ringsim.traces.recorder import Recorder

# more than torch puts into its first bucket, 1 MiB
SIZES = [(64, 512), (512, 512), (512, 512), (512, 8)]
BYTES = 4 * sum(rows * columns + columns for rows, columns in SIZES)


def train(steps: int) -> list[torch.Tensor]:
    """Trains a model in several buckets, and returns the gradients of the last step."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(*size) for size in SIZES]), bucket_cap_mb=1
    )
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        with ringsim.span("backward"):
            model(torch.randn(4, SIZES[0][0])).square().sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@contextlib.contextmanager
def unrecorded() -> Any:
    recorder = get_state().recorder
    assert recorder is not None
    uninstall(recorder)
    yield
    install(recorder)


def data_parallel() -> bool:
    """Tells whether gradients are the same, bit by bit, with recording and without."""
    recorded = train(3)
    with unrecorded():
        return all(map(torch.equal, recorded, train(3)))


def functional() -> None:
    import torch.distributed._functional_collectives as functional_collectives

    assert (
        float(functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum())
        == 3 * dist.get_world_size()
    )


class Slow(torch.autograd.Function):
    """Passes on what it gets, and takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ringsim.compute(ctx.seconds)
        return gradient, None


def overlapping() -> None:
    """While one bucket is reduced, the next is computed; rank 1 is late with the last one."""
    layers = [nn.Linear(512, 512) for _ in range(3)]
    seconds = [2.0 if dist.get_rank() == 1 else 0.05, 0.05, 0.05]
    model = nn.ModuleList(layers)
    model.forward = lambda x: functools.reduce(
        lambda hidden, number: Slow.apply(layers[number](hidden), seconds[number]), range(3), x
    )
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(3):
        with ringsim.span("step"):
            model(torch.randn(4, 512)).sum().backward()


def all_in_turn() -> bool:
    same = data_parallel()
    functional()
    overlapping()
    return same


@pytest.fixture(scope="module")
def trace() -> Trace:
    return ringsim.trace(all_in_turn, world_size=3)


def reductions_in(trace: Trace, label: str, rank: int) -> list[Any]:
    """The all_reduce operations of a rank within each of its spans of a name."""
    frame = trace.to_pandas().query(f"rank == {rank}")
    mine, spans = frame[frame["op"] == "all_reduce"], frame[frame["label"] == label]
    return [
        mine[mine["post_ns"].between(*times)]
        for times in zip(spans["post_ns"], spans["done_ns"], strict=True)
    ]


def test_buckets_are_recorded_once_with_their_bytes(trace: Trace) -> None:
    for rank in range(trace.world_size):
        steps = [found["size_bytes"].tolist() for found in reductions_in(trace, "backward", rank)]
        assert [sum(sizes) for sizes in steps] == [BYTES] * 3
        assert len(steps[0]) == 1  # torch makes its buckets in the first step
        assert len(steps[1]) == len(steps[2]) > 1
    frame = trace.to_pandas()
    assert set(frame["status"]) == {"ok"}
    reductions = frame[frame["op"] == "all_reduce"]
    assert set(reductions["group"]) == {"world"}
    assert set(reductions["file"]) == {__file__}
    assert (reductions["done_ns"] >= reductions["post_ns"]).all()


def test_recording_changes_no_bit_of_a_gradient(trace: Trace) -> None:
    assert all(trace.results)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nor_does_it_on_two_or_four_ranks(ranks: int) -> None:
    assert all(ringsim.trace(data_parallel, world_size=ranks).results)


def test_a_program_waits_where_its_functional_collective_does(trace: Trace) -> None:
    waited = trace.to_pandas().query("op == 'all_reduce' and size_bytes == 12")
    assert len(waited) == trace.world_size
    assert (waited["wait_ns"] >= waited["post_ns"]).all()


def test_only_the_last_bucket_of_a_step_blocks(trace: Trace) -> None:
    for rank in (0, 2):
        steps = [found["wait_ns"].notna().tolist() for found in reductions_in(trace, "step", rank)]
        assert steps == [[True], [False, False, True], [False, False, True]]


def test_the_rank_that_comes_late_is_named_and_nothing_is_said_to_be_missing(trace: Trace) -> None:
    assert trace.metadata["not_recorded"] == []
    diagnosis = trace.explain()
    assert {finding.kind for finding in diagnosis.findings} <= {*SLOW_KINDS}, (
        "a busy machine is slow, too"
    )
    assert ("straggler", (1,)) in [(finding.kind, finding.ranks) for finding in diagnosis.findings]
    assert 'still in "compute 2 s"' in str(diagnosis)


def slow_group_first() -> None:
    """Rank 1 enters the collective of the first group when rank 0 has that of the second."""
    import torch.distributed._functional_collectives as functional_collectives

    slow, fast = dist.new_group([0, 1]), dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    issue, wait = functional_collectives.all_reduce, functional_collectives.wait_tensor
    if dist.get_rank() == 0:
        late, early = issue(torch.ones(4), "sum", slow), issue(torch.ones(8), "sum", fast)
        wait(early)
        ringsim.mark("early is here")
        store.set("early is here", "")
    else:
        wait(issue(torch.ones(8), "sum", fast))
        store.wait(["early is here"])
        late = issue(torch.ones(4), "sum", slow)
    wait(late)


def test_a_slow_group_does_not_delay_the_end_of_another() -> None:
    """0.2.0 gave the early collective the end of the late one."""
    frame = ringsim.trace(slow_group_first, world_size=2).to_pandas().query("rank == 0")
    late, early = frame[frame["op"] == "all_reduce"].sort_values("size_bytes").itertuples()
    (mark,) = frame[frame["op"] == "mark"].itertuples()
    # whether rank 0 had to wait for the late one depends on who is quicker
    assert early.done_ns <= mark.post_ns < late.done_ns


class Handle:
    """Stands in for a handle: is done when it is told to be."""

    def __init__(self) -> None:
        self.done, self.fails = threading.Event(), False
        # what happens in its first waits, before their limits; and whether one has come after those
        self.tries: list[Callable[[], None]] = []
        self.tried = threading.Event()

    def wait(self, limit: timedelta | None = None) -> None:
        if self.tries:
            self.tries.pop(0)()
            limit = timedelta(0)
        else:
            self.tried.set()
        if not self.done.wait(None if limit is None else limit.total_seconds()) or self.fails:
            raise RuntimeError("not done")


def ends(recorder: Recorder, which: list[int]) -> list[int]:
    """Returns the status of all records, when some have one that is final."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        status = recorder.read().status.tolist()
        if all(status[place] != IN_FLIGHT for place in which):
            return status
        time.sleep(0.001)
    raise TimeoutError(f"in flight: {status}")


def test_each_group_is_waited_for_by_itself() -> None:
    recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=lambda: 0)
    post = recorder.make_post(OP_CODES["all_reduce"])
    works, slots = [Handle() for _ in range(4)], [post(0, NONE, NONE, 0) or 0 for _ in range(4)]
    made = [torch.ones(3) for _ in range(4)]
    late = LateWaits(recorder, lambda work, *limit: work.wait(*limit), {})
    for work, slot, group, tensor in zip(works, slots, (0, 0, 1, 1), made, strict=True):
        late.add(work, slot, group, [tensor])  # type: ignore[arg-type]
    works[1].done.set()
    works[2].done.set()
    works[3].fails = True
    works[3].done.set()
    assert ends(recorder, [2, 3]) == [IN_FLIGHT, IN_FLIGHT, OK, ERROR]
    late.begin_tensor(made[1])()  # the program has waited for what stands behind the first
    before = recorder.read()
    assert before.status.tolist() == [IN_FLIGHT, OK, OK, ERROR]
    late.begin_tensor(made[2])()  # and for what was done already
    works[0].done.set()
    assert ends(recorder, [0]) == [OK, OK, OK, ERROR]
    late.stop()
    after = recorder.read()
    assert after.done_ns[1:3].tolist() == before.done_ns[1:3].tolist()
    assert after.wait_ns[2] == NONE
    assert after.wait_ns[3] != NONE, "it broke, and was not refused"


class Program:
    """A thread that calls into C++, which issues collectives, and LateWaits that look where it is.

    Attributes:
        looking: is released when a look begins that may find the thread back.
        look: lets such a look go on.
        tells: whether the thread enters a block when it is back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tells = True
        self.looking, self.look = looking, look = threading.Semaphore(0), threading.Semaphore(0)

        class Watched(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if timeout is None:
                    return super().get()
                looking.release()
                assert look.acquire(timeout=30)
                return super().get(block=False)

        monkeypatch.setattr(
            dispatcher, "queue", SimpleNamespace(SimpleQueue=Watched, Empty=queue.Empty)
        )
        self.recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=lambda: 0)
        self.pending: dict[Any, int] = {}
        self.late = LateWaits(self.recorder, lambda work, *limit: work.wait(*limit), self.pending)
        self._post = self.recorder.make_post(OP_CODES["all_reduce"])
        self._orders: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        order = "call"
        while order == "call":
            self._in_cpp(sys._getframe())
            if self.tells:
                self.late.enter_block()
            self._orders.task_done()  # it is back
            order = self._orders.get()
            self._orders.task_done()

    def _in_cpp(self, frame: FrameType) -> None:
        while (order := self._orders.get()) != "return":
            work, group, made, nested = order
            place = sys._getframe() if nested else frame
            self.late.add(work, self._post(0, NONE, NONE, 0) or 0, group, made, place)
            self._orders.task_done()

    def issue(
        self,
        work: Handle,
        group: int = 0,
        made: Sequence[torch.Tensor] = (),
        nested: bool = False,
    ) -> None:
        self._orders.put((work, group, made, nested))
        self._orders.join()

    def issue_in_another_thread(self, work: Handle) -> None:
        self.late.add(work, self._post(0, NONE, NONE, 0) or 0, 0)  # type: ignore[arg-type]

    def come_back(self) -> None:
        self._orders.put("return")
        self._orders.join()

    def call_again(self) -> None:
        self._orders.put("call")

    def look_again(self) -> None:
        """Has the look that has begun end, and the next one begin."""
        self.look.release()
        assert self.looking.acquire(timeout=30)

    def end(self) -> Events:
        for _ in range(9):
            self.look.release()
        self._orders.put("end")
        self.late.stop()
        return self.recorder.read()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def done() -> Handle:
    work = Handle()
    work.done.set()
    return work


def test_the_last_collective_of_a_call_counts_as_waited_for_when_the_call_is_back(
    program: Program,
) -> None:
    first, second = done(), done()
    program.pending[first] = 0
    program.issue(first)
    assert program.looking.acquire(timeout=30)
    program.look_again()  # it is not back
    program.issue(second, 1)
    assert program.looking.acquire(timeout=30)
    program.come_back()
    events = program.end()
    assert events.wait_ns[0] == NONE
    assert events.post_ns[1] <= events.wait_ns[1] <= events.done_ns[1]
    assert program.pending == {}


def test_a_call_is_back_also_if_no_block_tells(program: Program) -> None:
    program.tells = False
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.come_back()
    assert program.end().wait_ns[0] != NONE


def test_a_function_in_python_that_cpp_calls_may_issue_the_next(program: Program) -> None:
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.issue(done(), nested=True)
    program.look.release()
    come_true(lambda: program.recorder.read().status[1] == OK)
    program.come_back()
    assert program.end().wait_ns[0] == NONE


def test_another_thread_on_the_same_group_does_not_hide_what_a_call_waited_for(
    program: Program,
) -> None:
    """In 0.2.0 the first collective did not count as waited for."""
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.issue_in_another_thread(done())
    program.look.release()
    come_true(lambda: program.recorder.read().status[1] == OK)
    program.come_back()
    assert [wait != NONE for wait in program.end().wait_ns] == [True, False]


def test_a_call_that_comes_again_from_the_same_place_is_another(program: Program) -> None:
    program.issue(done())
    assert program.looking.acquire(timeout=30)
    program.come_back()
    second = Handle()
    program.call_again()
    program.issue(second, 1)
    program.look.release()
    come_true(lambda: program.recorder.read().wait_ns[0] != NONE)
    second.done.set()
    assert program.looking.acquire(timeout=30)
    program.come_back()
    assert (program.end().wait_ns != NONE).all()


def test_a_long_wait_is_noted_while_it_lasts(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "NOTICED_S", 0.01)
    work = Handle()
    work.fails = True
    program.issue(work)
    come_true(lambda: program.recorder.read().wait_ns[0] != NONE)
    noted = program.recorder.read()
    assert noted.status.tolist() == [IN_FLIGHT]
    work.done.set()
    come_true(lambda: program.recorder.read().status[0] == ERROR)
    program.come_back()
    assert program.end().wait_ns.tolist() == noted.wait_ns.tolist()


@pytest.mark.parametrize("back_when", ["it is done", "it is not done"])
def test_who_is_back_at_the_second_look_has_waited_for_what_is_done(
    back_when: str, program: Program
) -> None:
    work = Handle()

    def second() -> None:
        program.come_back()
        if back_when == "it is done":
            work.done.set()

    issued = threading.Event()
    work.tries = [lambda: issued.wait(30) and None, second]
    program.issue(work)
    issued.set()
    if back_when == "it is done":
        assert program.looking.acquire(timeout=30)
    else:
        assert work.tried.wait(30)
        work.done.set()
    come_true(lambda: program.recorder.read().status[0] == OK)
    assert (program.end().wait_ns[0] == NONE) == (back_when == "it is not done")


def come_true(check: Callable[[], Any]) -> None:
    """Returns when it is so."""
    end_s = time.monotonic() + 30
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_the_place_of_a_tensor_is_that_of_the_latest_collective_on_it(program: Program) -> None:
    made, first, second = torch.ones(3), Handle(), Handle()
    program.issue(first, 0, [made])
    program.issue(second, 1, [made])
    program.come_back()
    first.done.set()
    come_true(lambda: program.recorder.read().status[0] == OK)
    program.late.begin_tensor(made)()
    assert program.recorder.read().status.tolist() == [OK, OK]
    second.done.set()
    program.end()


def test_a_wait_that_begins_while_the_end_comes_is_not_after_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, wait = Handle(), program.recorder.wait
    program.issue(work)
    program.come_back()

    def wait_too_late(slot: int) -> None:
        work.done.set()
        come_true(lambda: program.recorder.read().status[0] == OK)
        wait(slot)

    monkeypatch.setattr(program.recorder, "wait", wait_too_late)
    program.late.begin((0,))()
    first = program.recorder.read()
    assert first.wait_ns[0] <= first.done_ns[0]
    program.late.begin((0,))()  # what is done is not waited for again
    assert program.end().wait_ns.tolist() == first.wait_ns.tolist()


def test_what_is_under_way_at_the_end_shares_one_limit(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three groups is done when it is waited for.

    The others are left to end by themselves.
    """
    works, limits, left, join = [Handle() for _ in range(3)], [], [], threading.Thread.join
    for group, work in enumerate(works):
        program.issue(work, group)
    program.come_back()

    def join_last(thread: threading.Thread, timeout: float | None = None) -> None:
        assert timeout is not None
        limits.append(timeout)
        works[0].done.set()
        join(thread, timeout)

    monkeypatch.setattr(dispatcher, "JOIN_S", 0.2)
    monkeypatch.setattr(threading.Thread, "join", join_last)
    monkeypatch.setattr(dispatcher, "leave_thread", lambda thread: left.append(thread.is_alive()))
    assert program.end().status.tolist() == [OK, IN_FLIGHT, IN_FLIGHT]
    assert (len(limits), left) == (3, [False, True, True])
    assert limits[1] + limits[2] < 1.5 * dispatcher.JOIN_S
    for work in works:
        work.done.set()


WAYS = {
    "wait": lambda future: future.wait(),
    "then": lambda future: future.then(lambda done: done.value()).wait(),
    "wait_all": lambda future: torch.futures.wait_all([future]),
    "collect_all": lambda future: torch.futures.collect_all([future]).wait(),
}


def stuck_in_a_future(way: str) -> None:
    if dist.get_rank() == 0:
        WAYS[way](dist.all_reduce(torch.ones(3), async_op=True).get_future())
    else:
        dist.recv(torch.ones(2), 0)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_rank_that_waits_for_a_future_waits_for_its_operation(way: str) -> None:
    """0.2.0 said that it waited for another of its threads."""
    with pytest.raises(MessageMismatch) as caught:
        ringsim.trace(stuck_in_a_future, world_size=2, args=(way,), limit_s=60)
    (finding,) = caught.value.diagnosis.findings
    assert {(each.rank, each.op) for each in finding.operations} == {(0, "all_reduce"), (1, "recv")}
    assert "threads" not in str(caught.value)


def unequal() -> None:
    """Rank 1 has one batch more."""
    train(2 + dist.get_rank())
    dist.barrier()


def test_a_rank_that_waits_in_cpp_is_seen_to_wait() -> None:
    with pytest.raises(MessageMismatch) as caught:
        ringsim.trace(unequal, world_size=2, limit_s=60)
    (finding,) = caught.value.diagnosis.findings
    assert caught.value.trace.explain().findings == (finding,), "live as afterwards"
    assert (finding.kind, finding.ranks) == ("collective_mismatch", (0, 1))
    assert {operation.op for operation in finding.operations} == {"all_reduce", "barrier"}
    assert {operation.file for operation in finding.operations} == {__file__}


def saves_a_checkpoint() -> str:
    """As ``unequal``, in a program that saves what it has before it gives up."""
    try:
        unequal()
    except RuntimeError:
        time.sleep(WAKE_S + 1.5)
        return "saved"
    return "trained"


def test_a_rank_that_has_left_its_wait_in_cpp_may_finish() -> None:
    """In 0.2.0 it was ended after 2 s.

    What its peer had waited for was written over another record of it.
    """
    trace = ringsim.trace(saves_a_checkpoint, world_size=2, limit_s=60)
    assert trace.results == ["saved", "saved"]
    calls = trace.to_pandas().query("kind == 'collective'")
    rank_0, rank_1 = (
        list(zip(some["op"], some["status"], strict=True)) for _, some in calls.groupby("rank")
    )
    steps = len(rank_0) - 1
    assert rank_0 == [*rank_1[:steps], ("barrier", "error")]
    assert {*rank_1[steps:]} == {("all_reduce", "error")}
    assert [(one["kind"], one["ranks"]) for one in trace.metadata["caught"]] == [
        ("collective_mismatch", [0, 1])
    ]


def uneven() -> None:
    """Trains on batches of which rank 1 has two more; forgets a handle of its own."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with Join([model]):
        for _ in range(3 + 2 * dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()


def test_handles_that_torch_makes_and_drops_are_not_the_programs_mistake() -> None:
    """0.2.0 accused the program of never waiting for an all_reduce.

    By it torch's Join counts who has batches left.
    """
    trace = ringsim.trace(uneven, world_size=2)
    findings = trace.explain().findings
    assert [one.kind for one in findings] == ["leaked_request"] * 2
    assert {operation.size_bytes for one in findings for operation in one.operations} == {12}
    frame = trace.to_pandas().query("size_bytes == 4")
    assert len(frame) > 0
    assert (frame["done_ns"] >= frame["post_ns"]).all()
