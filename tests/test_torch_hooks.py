"""What the hooks show to the recorder, on torch's fake backend.

One process, no messages, every function of torch.distributed.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fake_rank import SIZE, fake_world, recording
from torch.distributed import ProcessGroup, Work, isend
from torch.testing._internal.distributed.fake_pg import FakeStore

import ringsim
from ringsim import comm
from ringsim.comm import torch_private
from ringsim.comm.group_order import GROUPS, own_limit
from ringsim.comm.torch_hooks import UNAWAITED, find_handle_types, install, uninstall
from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.errors import RendezvousFailed, RingError
from ringsim.state import get_state
from ringsim.traces.events import (
    ANY_SOURCE,
    ERROR,
    IN_FLIGHT,
    KIND_NAMES,
    NONE,
    OK,
    OP_CODES,
    OP_NAMES,
    Events,
    Group,
)
from ringsim.traces.matching import refused
from ringsim.traces.recorder import LOST_PEER, Recorder, fail_posting
from ringsim.traces.runs import read_parts
from ringsim.traces.store import CHUNK


@pytest.fixture
def world() -> Iterator[ProcessGroup]:
    with fake_world() as world:
        yield world


@pytest.fixture
def record(world: ProcessGroup, tmp_path: Path) -> Iterator[Callable[[], Events]]:
    """Records until it is called; then gives the events."""
    with recording(Recorder(tmp_path, rank=0, world_size=SIZE)) as stop:
        yield lambda: stop()[0]


def ops(events: Events) -> list[str]:
    return [OP_NAMES[op] for op in events.op]


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def row(events: Events, i: int = 0) -> dict[str, Any]:
    tables, payload = events.tables, events.payload[i]
    return {
        "op": OP_NAMES[events.op[i]],
        "payload": tuple(tables.payloads[payload][:3]) if payload >= 0 else None,
        **{name: int(getattr(events, name)[i]) for name in ("peer", "tag", "line", "status")},
    }


# -- messages


def test_a_message_is_written_down_whole_within_spans_that_nest(
    record: Callable[[], Events],
) -> None:
    with ringsim.span("outer", stage=2):
        with (
            ringsim.span("inner", microbatch=7),
            suppress(KeyError),
            ringsim.span("failing", stage=5),
        ):
            work, line = dist.isend(torch.zeros(2, 3, dtype=torch.bfloat16), dst=3, tag=5), here()
            work.wait()
            raise KeyError
        ringsim.mark("between")
        with ThreadPoolExecutor() as pool:
            pool.submit(ringsim.mark, "there").result(10)
    ringsim.mark("after")
    events = record()
    labels = [events.tables.labels[label] if label >= 0 else None for label in events.label]
    found = dict(
        zip(labels, zip(events.stage, events.microbatch, events.status, strict=True), strict=True)
    )
    assert found == {
        "outer": (2, -1, OK),
        "inner": (2, 7, OK),
        "failing": (5, 7, ERROR),
        None: (5, 7, OK),
        "between": (2, -1, OK),
        "there": (-1, -1, OK),
        "after": (-1, -1, OK),
    }
    done = dict(zip(labels, events.done_ns, strict=True))
    assert done["outer"] >= done["inner"] >= done["failing"]
    assert (events.line > 0).all()
    at = labels.index(None)
    message = {
        "op": "isend",
        "peer": 3,
        "tag": 5,
        "payload": ("bfloat16", (2, 3), 12),
        "line": line,
        "status": OK,
    }
    assert row(events, at) == message
    assert events.tables.files[events.file[at]] == __file__
    assert events.tables.groups[events.group[at]] == Group("world", (0, 1, 2, 3))
    assert events.thread[at] == 0
    assert 0 <= events.post_ns[at] <= events.wait_ns[at] <= events.done_ns[at]


def test_every_spelling_of_a_message_is_told_apart(
    record: Callable[[], Events], world: ProcessGroup
) -> None:
    tensor = torch.zeros(1)
    dist.send(tensor, 1)
    dist.isend(tensor, 1).wait()
    isend(tensor, 1).wait()  # a name that was bound before recording began
    dist.recv(tensor, 1)
    dist.irecv(tensor, 1).wait()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, 1), dist.P2POp(dist.irecv, tensor, 2)]
    ):
        work.wait()
    dist.send_object_list(["x"], 1)
    dist.send_object_list(["x"], 1, use_batch=True)
    world.send([tensor], 1, 0).wait()
    world.send([tensor], 1, tag=0).wait()
    world.recv(tensors=[tensor], srcRank=1, tag=9).wait()
    events = record()
    found = ops(events)
    assert found == [
        *("send", "isend", "isend", "recv", "irecv", "batch_isend", "batch_irecv"),
        *("send_object_list", "send_object_list", "send_object_list", "send_object_list"),
        *("isend", "isend", "irecv"),
    ]
    assert [KIND_NAMES[kind] for kind in events.kind] == [
        "recv" if "recv" in op else "send" for op in found
    ]
    assert list(events.peer) == [2 if op == "batch_irecv" else 1 for op in found]
    assert (events.status == OK).all()
    assert list(events.tag)[-1] == 9
    assert (events.line[1:] >= events.line[:-1]).all()
    assert {events.tables.files[file] for file in events.file} == {__file__}


def test_lines_are_the_users_through_decorators_and_modes_and_when_functions_come_and_go(
    record: Callable[[], Events],
) -> None:
    lines = []

    def program() -> None:
        with torch.overrides.BaseTorchFunctionMode():
            dist.send(torch.zeros(1), 1)
            lines.append(here() - 1)

    for each in (program, torch.no_grad()(program), torch.inference_mode()(program)):
        each()
    # as cells of a notebook that are run again: new code at addresses that old code had
    for blank in range(300):
        code = compile(
            "\n" * blank + "dist.isend(tensor, 1).wait()\ndist.send(tensor, 1)", "a cell", "exec"
        )
        for _ in range(2):
            exec(code, {"dist": dist, "tensor": torch.zeros(1)})
            lines += [blank + 1, blank + 2]
        del code
    # by torch.compile
    exec(
        compile("\n\n\ndist.send(tensor, 1)", "<eval_with_key>.3", "exec"),
        {"dist": dist, "tensor": torch.zeros(1)},
    )
    lines.append(here() - 4)
    events = record()
    assert list(events.line) == lines
    assert events.tables.files == (__file__, "a cell")


async def in_an_event_loop(*call: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(None, *call)
    await asyncio.to_thread(*call)
    await asyncio.gather(
        asyncio.to_thread(*call), asyncio.create_task(asyncio.to_thread(functools.partial(*call)))
    )


def test_what_is_handed_straight_to_a_thread_is_told_by_the_line_that_does_so(
    record: Callable[[], Events], world: ProcessGroup
) -> None:
    call, first = (dist.send, torch.zeros(1), 1), here()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(*call).result(10)
        pool.submit(comm.send, *call[1:]).result(10)
        list(pool.map(dist.send, call[1:2], call[2:]))
        pool.submit(lambda: dist.send(*call[1:])).result(10)  # has a line of its own
        pool.submit(world.send, [call[1]], 1, 0).result(10)
    with ThreadPool(1) as threads:
        threads.apply(call[0], call[1:])  # told by the line that made the pool
    for thread in (
        threading.Thread(target=call[0], args=call[1:]),
        threading.Timer(0.0, call[0], call[1:]),
    ):
        thread.start()
        thread.join()
    asyncio.run(in_an_event_loop(*call))
    lines = [first + there for there in (2, 3, 4, 5, 6, 7, 13, 13)]
    first = in_an_event_loop.__code__.co_firstlineno
    assert record().line.tolist() == lines + [first + there for there in (1, 2, 4, 4)]


def test_a_thread_that_begins_in_torch_is_recorded_without_a_line(
    record: Callable[[], Events], world: ProcessGroup
) -> None:
    begun, done = threading.Event(), [torch.zeros(1)]
    # tells when torch lets go of it: _thread's threads cannot be joined
    weakref.finalize(done[0], begun.set)
    _thread.start_new_thread(world.send, (done[:], 1, 0))
    done.clear()
    assert begun.wait(10)
    events = record()
    assert ops(events) == ["isend"]
    assert (events.file.item(), events.line.item()) == (NONE, NONE)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([], 1, 0), NotImplementedError),
        (([torch.zeros(1)], None, 0), TypeError),
        (([torch.zeros(1)], 1, "seven"), TypeError),
    ],
)
def test_what_torch_refuses_is_recorded_and_refused_as_before(
    record: Callable[[], Events],
    world: ProcessGroup,
    arguments: tuple[Any, ...],
    error: type[Exception],
) -> None:
    send: Any = world.send
    with pytest.raises(error) as refused:
        send(*arguments)
    events = record()
    with pytest.raises(error) as bare:
        send(*arguments)
    assert str(refused.value).split(" at 0x")[0] == str(bare.value).split(" at 0x")[0]
    assert events.status[0] == ERROR
    assert events.done_ns[0] >= events.post_ns[0]


def test_receiving_from_anybody_says_so_until_the_message_has_come(
    record: Callable[[], Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group([0, 2, 3])
    work = dist.irecv(torch.zeros(1), group=group)
    monkeypatch.setattr(Work, "_source_rank", lambda _: 2, raising=False)
    dist.irecv(torch.zeros(1), group=group).wait()
    assert list(record().peer) == [NONE, ANY_SOURCE, 3]
    del work


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        *(
            (f"[../gloo/transport/tcp/pair.cc:538] {words} [127.0.0.1]:4182", True)
            for words in LOST_PEER
        ),
        ("Invalid scalar type", False),
        # by this rank itself: the other one may be well
        ("Application timeout caused pair closure", False),
    ],
)
def test_a_lost_connection_is_a_wait_that_broke_and_no_refusal(
    words: str, lost: bool, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=2)
    slot = recorder.make_post(OP_CODES["send"])(recorder.group("world", [0, 1]), 1, 0, NONE)
    assert slot is not None
    assert fail_posting(recorder, slot, RuntimeError(words)) is not lost
    recorder.close()
    events = read_parts(tmp_path)[0]
    assert events.status.tolist() == [ERROR]
    assert refused(events).tolist() == [not lost]
    assert bool(snapshot_of_events(events, 2).ranks[0].awaited) is lost


# -- collectives: how each is called with group size 4, and S of nccl-tests in elements of float32
# with its shape and the root

ONE, FULL = (lambda: torch.zeros(2, 3)), (lambda: torch.zeros(8, 3))
LIST = lambda: [torch.zeros(2, 3) for _ in range(SIZE)]  # noqa: E731
COLLECTIVES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "broadcast": (lambda: dist.broadcast(ONE(), 2), (2, 3), 2),
    "all_reduce": (lambda: dist.all_reduce(ONE()), (2, 3), NONE),
    "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([ONE(), ONE()]), (2, 2, 3), NONE),
    "reduce": (lambda: dist.reduce(ONE(), 1), (2, 3), 1),
    "all_gather": (lambda: dist.all_gather(LIST(), ONE()), (4, 2, 3), NONE),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(FULL(), ONE()), (8, 3), NONE),
    "gather": (lambda: dist.gather(ONE(), LIST(), 0), (4, 2, 3), 0),
    "scatter": (lambda: dist.scatter(ONE(), LIST(), 0), (4, 2, 3), 0),
    "reduce_scatter": (lambda: dist.reduce_scatter(ONE(), LIST()), (4, 2, 3), NONE),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(ONE(), FULL()), (8, 3), NONE),
    "all_to_all": (lambda: dist.all_to_all(LIST(), LIST()), (4, 2, 3), NONE),
    "all_to_all_single": (lambda: dist.all_to_all_single(FULL(), FULL()), (8, 3), NONE),
}
if hasattr(dist, "all_gather_single"):
    COLLECTIVES["all_gather_single"] = (lambda: dist.all_gather_single(FULL(), ONE()), (8, 3), NONE)
    COLLECTIVES["reduce_scatter_single"] = (
        lambda: dist.reduce_scatter_single(ONE(), FULL()),
        (8, 3),
        NONE,
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's old spellings
def test_collectives_follow_the_sizes_of_nccl_tests(record: Callable[[], Events]) -> None:
    for call, _, _ in COLLECTIVES.values():
        call()
    events = record()
    found = [row(events, i) for i in range(len(events))]
    assert [(each["op"], each["payload"], each["peer"], each["line"]) for each in found] == [
        (
            name,
            ("float32", shape, torch.Size(shape).numel() * 4),
            root,
            call.__code__.co_firstlineno,
        )
        for name, (call, shape, root) in COLLECTIVES.items()
    ]
    assert {(each["tag"], each["status"]) for each in found} == {(NONE, OK)}


def test_collectives_that_cpp_issues_have_their_roots_and_splits(
    record: Callable[[], Events],
    world: ProcessGroup,
) -> None:
    out, into = [3, 2, 1, 0], [0, 1, 2, 3]
    dist.all_reduce(torch.ones(4))  # by way of C++, and not recorded twice
    functional.wait_tensor(functional.broadcast(torch.ones(3), 2, world))
    functional.wait_tensor(functional.all_to_all_single(torch.ones(6), into, out, world))
    events = record()
    assert ops(events) == ["all_reduce", "broadcast", "all_to_all_single"]
    assert events.peer.tolist() == [NONE, 2, NONE]
    splits = [events.tables.payloads[payload].splits for payload in events.payload]
    assert splits == [(), (), ((12, 8, 4, 0), (0, 4, 8, 12))]
    assert (events.status == OK).all()


def test_what_the_program_has_waited_for_is_done(
    world: ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the thread that waits as well has not come to it."""
    gate = threading.Event()
    for kind in find_handle_types(Work):
        monkeypatch.setattr(kind, "wait", lambda *_: gate.wait(60))
    with recording(Recorder(tmp_path, rank=0, world_size=SIZE)) as stop:
        functional.wait_tensor(functional.all_reduce(torch.ones(5), "sum", world))
        part = read_parts(tmp_path, start_ns=0)[0]
        gate.set()
        stop()
    assert part.status.tolist() == [OK]
    assert 0 < part.wait_ns[0] <= part.done_ns[0]


def test_collectives_by_other_signatures_and_how_they_reduce(
    record: Callable[[], Events], world: ProcessGroup
) -> None:
    world.broadcast(ONE(), 3).wait()
    world.broadcast(tensor=ONE(), root=3).wait()
    world.allreduce(ONE()).wait()
    world.barrier().wait()
    dist.all_reduce(ONE(), op=dist.ReduceOp.MAX)
    events = record()
    assert ops(events) == ["broadcast", "broadcast", "all_reduce", "barrier", "all_reduce"]
    assert events.peer.tolist() == [3, 3, NONE, NONE, NONE]
    assert [events.tables.payloads[payload].reduction for payload in events.payload] == [
        "",
        "",
        "SUM",
        "",
        "MAX",
    ]
    assert row(events, 3)["payload"] == ("", (), 0)


# -- groups


def test_a_group_has_its_name_and_global_ranks_and_is_not_kept_alive(
    record: Callable[[], Events],
) -> None:
    names = []
    for _ in range(3):  # the next one may get the same id
        group = dist.new_group([3, 0])
        names.append(group.group_name)
        dist.isend(torch.zeros(1), 3, group=group).wait()
        dist.isend(torch.zeros(1), group_dst=1, group=group).wait()
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        assert gone() is None
    # by its members alone: in no order with those of others
    dist.new_group([0, 2], use_local_synchronization=True)
    events = record()
    groups = [events.tables.groups[number] for number in events.group]
    payloads = [events.tables.payloads[payload].shape for payload in events.payload]
    assert ops(events) == ["new_group", "isend", "isend"] * 3 + ["new_group"]
    assert [(group.name, group.ranks) for group in groups[1:-1:3]] == [
        (name, (0, 3)) for name in names
    ]
    assert groups[1:-1:3] == groups[2::3]
    assert list(events.peer) == [NONE, 3, 3] * 3 + [NONE]
    assert groups[:-1:3] == [Group(GROUPS, (0, 1, 2, 3))] * 3
    assert groups[-1].ranks == (0, 2)
    assert payloads[::3] == [(0, 3)] * 3 + [(0, 2)]
    assert (events.status == OK).all()
    assert -1 < events.post_ns[0] <= events.wait_ns[0] <= events.done_ns[0]


def test_groups_are_compared_with_those_that_another_rank_makes_in_their_place(
    tmp_path: Path,
    record: Callable[[], Events],
) -> None:
    """One that torch refused has no place; one that its members alone make is theirs."""
    theirs = Recorder(tmp_path, rank=1, world_size=SIZE)
    group = theirs.group(GROUPS, range(SIZE), fresh=True)
    post = theirs.make_post(OP_CODES["new_group"])
    for members, status in (([9], ERROR), ([0, 1], OK), ([0, 2], OK), ([0, 1, 2], OK)):
        slot = post(group, NONE, NONE, theirs.payload("ranks", members, 0))
        assert slot is not None
        theirs.complete(slot, status)
    dist.new_group([0, 1])
    dist.new_group([1, 2], use_local_synchronization=True)
    dist.new_group([0, 2])
    with pytest.raises(RendezvousFailed, match=r"got \[0, 3\] here and \[0, 1, 2\] in rank 1's"):
        dist.new_group([0, 3])
    events = record()
    events = events.select((events.rank == 0) & (events.op == OP_CODES["new_group"]))
    shapes = [events.tables.payloads[payload].shape for payload in events.payload]
    assert shapes == [(0, 1), (0, 2), (0, 3)]
    theirs.close()


@pytest.mark.parametrize("used", [True, False])
def test_a_group_that_was_used_before_is_not_compared(used: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if used:
        dist.barrier()
    with recording(Recorder(tmp_path, rank=0, world_size=1)) as stop:
        dist.barrier()
        said = stop()[1].get("not_checked", [])
    places = [sentence.split(":")[0].split(" not compared on ")[1] for sentence in said]
    assert places == ["group world"] * used
    dist.destroy_process_group()


@pytest.mark.parametrize("check", ["basic", "off"])
def test_only_what_would_be_compared_is_said_not_to_be(
    check: str,
    world: ProcessGroup,
    tmp_path: Path,
) -> None:
    with recording(Recorder(tmp_path, rank=0, world_size=SIZE), check) as stop:
        world.recv_anysource([torch.zeros(1)], 0)
        _, facts = stop()
    said = facts.get("not_checked", ())
    assert any("was from any rank" in each for each in said) == (check != "off")


def test_a_group_belongs_to_its_world(tmp_path: Path) -> None:
    with fake_world(), recording(Recorder(tmp_path, rank=0, world_size=SIZE)) as stop:
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
        dist.barrier()
        events, _ = stop()
    barriers = events.group[events.op == OP_CODES["barrier"]]
    assert [events.tables.groups[group].world for group in barriers] == [0, 1]


def test_an_unregistered_group_says_so(record: Callable[[], Events], world: ProcessGroup) -> None:
    group, cpu = ProcessGroup(FakeStore(), 0, 2), torch.device("cpu")
    group._register_backend(cpu, ProcessGroup.BackendType.CUSTOM, world._get_backend(cpu))
    group._set_group_name("mine")
    group.send([torch.zeros(1)], 1, 0).wait()
    events = record()
    assert events.tables.groups == (Group("mine (unregistered: group ranks)", (0, 1)),)
    assert list(events.peer) == [1]


# -- handles


def test_handles_are_kept_until_waited_for_and_no_longer(record: Callable[[], Events]) -> None:
    alive = weakref.ref(dist.isend(torch.zeros(1), 1))
    kept = alive()
    assert kept is not None
    kept.wait()
    del kept
    assert alive() is None


def test_a_long_run_does_not_hoard_handles(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with recording(Recorder(tmp_path, rank=0, world_size=1)) as stop:
        tensor = torch.zeros(1)
        first = weakref.ref(dist.all_reduce(tensor, async_op=True))
        assert first() is not None
        for _ in range(CHUNK - 2):
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        dist.barrier()  # the part grows
        assert first() is None  # complete, and nobody waits
        assert (stop()[0].status == IN_FLIGHT).sum() == CHUNK - 1
    dist.destroy_process_group()


class Handle(Work):
    """A handle that is told what becomes of it."""

    completed = fails = False
    calls = 0
    kind = NONE

    def wait(self, timeout: Any = None) -> bool:
        self.calls += 1
        if self.fails:
            raise RuntimeError("it failed")
        return True

    def _get_op_type(self) -> Any:
        return self.kind


def says_it_is_completed(self: Work) -> bool:
    if getattr(self, "completed", False) is None:
        raise RuntimeError("it failed")
    return bool(getattr(self, "completed", False))


SHORT = timedelta(seconds=1)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The handle of every message that is sent; to be asked for before recording begins."""
    handle = Handle()
    monkeypatch.setattr(Work, "is_completed", says_it_is_completed)
    monkeypatch.setattr(ProcessGroup, "send", lambda *_: handle)
    return handle


def test_a_time_out_of_more_than_half_a_minute_is_a_net_for_hangs() -> None:
    half_a_minute = timedelta(seconds=30)
    assert own_limit(half_a_minute) == half_a_minute
    assert own_limit(half_a_minute + timedelta(milliseconds=1)) is own_limit(None) is None


@pytest.mark.parametrize("whose", ["the group's", "the wait's"])
@pytest.mark.parametrize("then", ["wait", "wait without a limit", "is_completed"])
def test_a_wait_that_a_limit_ended_goes_on_later(
    whose: str, then: str, handle: Handle, record: Callable[[], Events]
) -> None:
    group = dist.new_group(timeout=SHORT) if whose == "the group's" else None
    limit = () if group else (SHORT,)
    dist.isend(torch.zeros(1), 1, group=group)
    recorder: Any = get_state().recorder
    failures: list[str] = []
    recorder.on_failure = lambda: failures.append("it failed")
    handle.fails = True
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait(*limit)
    part = read_parts(recorder.directory, start_ns=0)[0]
    assert (part.status[-1], part.wait_ns[-1], failures) == (IN_FLIGHT, NONE, [])
    between_ns, handle.fails = time.monotonic_ns(), False
    if then == "is_completed":
        handle.completed = True
        assert handle.is_completed()
    else:
        handle.wait(*limit if then == "wait" else ())
    events = record()
    assert events.status[-1] == OK
    assert 0 < events.wait_ns[-1] < between_ns <= events.done_ns[-1]


@pytest.mark.parametrize("why", ["it is completed", "a message's connection is broken"])
def test_a_limited_wait_that_failed_for_good_is_over(
    why: str, handle: Handle, record: Callable[[], Events]
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.fails, handle.completed = True, why == "it is completed"
    if not handle.completed:
        handle.kind = 12  # torch's number of a send
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait(SHORT)
    handle.completed = True
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait()  # which torch says again
    events = record()
    assert events.status[-1] == ERROR
    assert 0 < events.wait_ns[-1] <= events.done_ns[-1]


def test_a_limited_wait_is_over_if_an_exception_ends_the_recording(
    handle: Handle,
    world: ProcessGroup,
    tmp_path: Path,
) -> None:
    handle.fails = True
    recorder = Recorder(tmp_path, rank=0, world_size=SIZE)
    with suppress(KeyError), recording(recorder):  # ends while the error is on its way
        dist.isend(torch.zeros(1), 1)
        with suppress(RuntimeError):
            handle.wait(SHORT)
        raise KeyError
    events = read_parts(tmp_path, start_ns=0)[0]
    assert events.status.tolist() == [ERROR]
    assert 0 < events.wait_ns[0] <= events.done_ns[0]


@pytest.mark.parametrize(
    ("error", "limit", "asked"),
    [
        (RuntimeError("it failed"), (), 1),
        (RuntimeError("it failed"), (SHORT,), 0),  # the program's own limit
        (RingError("it is refused"), (), 0),
    ],
)
def test_why_a_monitored_barrier_failed_is_asked_unless_that_is_known(
    error: Exception,
    limit: tuple[timedelta, ...],
    asked: int,
    world: ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ProcessGroup, "monitored_barrier", fail)
    recorder, failures = Recorder(tmp_path, rank=0, world_size=SIZE), []
    with recording(recorder) as stop:
        recorder.on_failure = lambda: failures.append("it failed")
        with pytest.raises(type(error), match="it"):
            world.monitored_barrier(*limit)
        assert stop()[0].status.tolist() == [ERROR]
    assert len(failures) == asked


@pytest.mark.parametrize(("message", "calls"), [(True, 1), (False, 2)])
def test_only_a_message_is_not_waited_for_twice(
    message: bool, calls: int, handle: Handle, record: Callable[[], Events]
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.completed = True
    if message:
        handle.kind = 12  # torch's number of a send
    assert handle.wait()
    assert handle.wait()
    assert handle.calls == calls


def test_what_is_found_completed_was_waited_for_when_it_was(
    handle: Handle,
    record: Callable[[], Events],
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.completed = True
    assert handle.is_completed()
    events = record()
    assert events.status.tolist() == [OK]
    assert events.post_ns[0] <= events.wait_ns[0] <= events.done_ns[0]


def test_what_is_completed_but_fails_is_for_the_wait_to_say(
    handle: Handle, record: Callable[[], Events]
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.completed = handle.fails = True
    assert handle.is_completed()
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait()
    assert record().status.tolist() == [ERROR]


def test_what_nobody_waits_for_any_more_is_let_go(
    monkeypatch: pytest.MonkeyPatch, world: ProcessGroup, tmp_path: Path
) -> None:
    """Also behind one that fails.

    But not what is still to be waited for on a group with a limit.
    """
    broken, given_up, awaited, posted = Handle(), Handle(), Handle(), []
    monkeypatch.setattr(Work, "is_completed", says_it_is_completed)
    monkeypatch.setattr(ProcessGroup, "send", lambda *_: posted.pop())
    with recording(recorder := Recorder(tmp_path, rank=0, world_size=SIZE)) as stop:
        limited = dist.new_group(timeout=SHORT)
        for work, group in ((broken, None), (given_up, None), (awaited, limited)):
            posted.append(work)
            dist.isend(torch.zeros(1), 1, group=group)
        given_up.fails = True
        with pytest.raises(RuntimeError, match="it failed"):
            given_up.wait(SHORT)
        broken.completed, given_up.completed, awaited.completed = None, True, True  # type: ignore[assignment]
        gone = weakref.ref(given_up)
        del given_up, work
        recorder.hooks.on_growth()
        assert gone() is None
        assert read_parts(tmp_path)[1]["not_recorded"] == [UNAWAITED]
        kept = weakref.ref(awaited)
        awaited.wait()
        del awaited
        assert kept() is None
        events, _ = stop()
    assert events.status.tolist() == [OK, IN_FLIGHT, IN_FLIGHT, OK]


def test_only_what_torch_itself_starts_is_awaited_unseen(record: Callable[[], Events]) -> None:
    call = "import torch.distributed as dist\ndist.all_reduce(tensor, async_op=True)"
    for name in ("a script.py", os.path.join(os.path.dirname(torch.__file__), "a module.py")):
        exec(compile(call, name, "exec"), {"tensor": torch.zeros(1)})
    assert record().status.tolist() == [IN_FLIGHT, OK]


def test_a_batch_shares_one_handle(record: Callable[[], Events], world: ProcessGroup) -> None:
    """As on NCCL: the operations between start and end are done when the one handle is."""
    cpu = torch.device("cpu")
    world._start_coalescing(cpu)
    world.send([torch.zeros(1)], 1, 0)
    world.recv([torch.zeros(1)], 1, 0)
    work = world._end_coalescing(cpu)
    world.send([torch.zeros(1)], 1, 0)
    work.wait()
    events = record()
    assert list(events.status) == [OK, OK, IN_FLIGHT]
    assert events.done_ns[0] <= events.done_ns[1]


# -- coming and going


def test_uninstalling_puts_the_same_objects_back(tmp_path: Path) -> None:
    owners = (
        ProcessGroup,
        Work,
        *Work.__subclasses__(),
        threading.Thread,
        ThreadPoolExecutor,
        asyncio,
    )
    before = [dict(vars(owner)) for owner in owners]
    recorder = Recorder(tmp_path, rank=0, world_size=SIZE)
    install(recorder)
    changed = {name for name, value in vars(ProcessGroup).items() if before[0][name] is not value}
    assert {
        "send",
        "recv",
        "recv_anysource",
        "allreduce",
        "broadcast",
        "barrier",
        "_start_coalescing",
    } <= changed
    assert get_state().recorder is recorder
    assert (ProcessGroup.send.__name__, ProcessGroup.send.__doc__) == (
        "send",
        before[0]["send"].__doc__,
    )
    with pytest.raises(
        RingError, match=r"must be the only one, .* \(rank 0 of 4\). Use the one that records"
    ):
        install(Recorder(tmp_path / "other", rank=0, world_size=SIZE))
    install(recorder)
    uninstall(recorder)
    assert ProcessGroup.__dict__["send"] is not before[0]["send"]
    uninstall(recorder)
    for owner, was in zip(owners, before, strict=True):
        assert vars(owner).keys() == was.keys()
        assert all(vars(owner)[name] is value for name, value in was.items())
    assert get_state().recorder is None


# what is replaced
PLACES = [
    value
    for value in vars(torch_private).values()
    if isinstance(value, tuple) and isinstance(value[-1], str)
]
ASKED = [
    *((dist.distributed_c10d, name) for name in ("_get_default_store", "_world")),
    *((ProcessGroup, name) for name in ("_get_backend", "_get_sequence_number_for_group")),
    *((Work, name) for name in ("_get_op_type", "_source_rank")),
]


@pytest.mark.parametrize(("owner", "name"), [*PLACES, *ASKED])
def test_torch_has_the_private_names_that_are_used_and_may_lack_each(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(owner, name)
    monkeypatch.delattr(owner, name)
    if name == "_world":  # without it nothing of torch's own would work
        assert torch_private.count_groups() == 0
        return
    with recording(Recorder(tmp_path, rank=0, world_size=SIZE)):
        assert not hasattr(owner, name)
    unknown: Any = object()
    assert (
        torch_private.gpu_backend(unknown),
        torch_private.is_message(unknown),
        torch_private.source_rank(unknown),
    ) == ("", False, -1)
    if name == "_get_default_store":
        assert torch_private.default_store() is None
