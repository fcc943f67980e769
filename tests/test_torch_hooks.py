"""The recording of a rank's operations, on torch's fake backend."""

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
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fake_rank import fake_world, recorded
from torch.distributed import ProcessGroup, Work, isend
from torch.testing._internal.distributed.fake_pg import FakeStore

import ringsim
from ringsim import Trace, comm
from ringsim.errors import RingError

SIZE = 4
SHORT = timedelta(seconds=1)


@pytest.fixture
def world() -> Iterator[ProcessGroup]:
    with fake_world(SIZE) as world:
        yield world


@pytest.fixture
def stop(world: ProcessGroup, tmp_path: Path) -> Iterator[Callable[[], Trace]]:
    """A function that ends the recording and returns the trace."""
    with recorded(tmp_path) as stop:
        yield stop


def here() -> int:
    """Returns the line of the caller."""
    return sys._getframe(1).f_lineno


def operations(trace: Trace) -> pd.DataFrame:
    frame = trace.to_pandas()
    return frame[frame["kind"] != "mark"]


# -- messages


def test_a_message_is_written_down_whole_within_spans_that_nest(stop: Callable[[], Trace]) -> None:
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
    frame = stop().to_pandas()
    places = frame[["stage", "microbatch", "status"]].astype(object)
    rows = [tuple(None if pd.isna(each) else each for each in row) for row in places.to_numpy()]
    assert dict(zip(frame["label"].astype(object).fillna("the message"), rows, strict=True)) == {
        "outer": (2, None, "ok"),
        "inner": (2, 7, "ok"),
        "failing": (5, 7, "error"),
        "the message": (5, 7, "ok"),
        "between": (2, None, "ok"),
        "there": (None, None, "ok"),
    }
    done = frame.set_index("label")["done_ns"]
    assert done["outer"] >= done["inner"] >= done["failing"]
    assert (frame["line"] > 0).all()
    (message,) = frame[frame["op"] == "isend"].itertuples()
    assert (message.peer, message.tag, message.group, message.thread) == (3, 5, "world", 0)
    assert (message.dtype, message.shape, message.size_bytes) == ("bfloat16", "2x3", 12)
    assert (message.file, message.line) == (__file__, line)
    assert 0 <= message.post_ns <= message.wait_ns <= message.done_ns


def test_every_spelling_of_a_message_is_told_apart(
    stop: Callable[[], Trace], world: ProcessGroup
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
    frame = stop().to_pandas()
    assert frame["op"].tolist() == [
        *("send", "isend", "isend", "recv", "irecv", "batch_isend", "batch_irecv"),
        *("send_object_list", "send_object_list", "send_object_list", "send_object_list"),
        *("isend", "isend", "irecv"),
    ]
    assert frame["kind"].tolist() == ["recv" if "recv" in op else "send" for op in frame["op"]]
    assert frame["peer"].tolist() == [2 if op == "batch_irecv" else 1 for op in frame["op"]]
    assert set(frame["status"]) == {"ok"}
    assert frame["tag"].tolist()[-1] == 9
    assert frame["line"].is_monotonic_increasing
    assert set(frame["file"]) == {__file__}


def test_lines_are_the_users_through_decorators_and_modes_and_when_functions_come_and_go(
    stop: Callable[[], Trace],
) -> None:
    lines = []

    def program() -> None:
        with torch.overrides.BaseTorchFunctionMode():
            dist.send(torch.zeros(1), 1)
            lines.append(here() - 1)

    for each in (program, torch.no_grad()(program), torch.inference_mode()(program)):
        each()
    # like rerun notebook cells: new code at the addresses of old code
    for blank in range(300):
        code = compile(
            "\n" * blank + "dist.isend(tensor, 1).wait()\ndist.send(tensor, 1)", "a cell", "exec"
        )
        for _ in range(2):
            exec(code, {"dist": dist, "tensor": torch.zeros(1)})
            lines += [blank + 1, blank + 2]
        del code
    by_the_compiler = compile("\n\n\ndist.send(tensor, 1)", "<eval_with_key>.3", "exec")
    exec(by_the_compiler, {"dist": dist, "tensor": torch.zeros(1)})
    lines.append(here() - 1)
    frame = stop().to_pandas()
    assert frame["line"].tolist() == lines
    assert list(frame["file"].unique()) == [__file__, "a cell"]


async def in_an_event_loop(*call: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(None, *call)
    await asyncio.to_thread(*call)
    await asyncio.gather(
        asyncio.to_thread(*call), asyncio.create_task(asyncio.to_thread(functools.partial(*call)))
    )


def test_what_is_handed_straight_to_a_thread_is_told_by_the_line_that_does_so(
    stop: Callable[[], Trace], world: ProcessGroup
) -> None:
    call, first = (dist.send, torch.zeros(1), 1), here()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(*call).result(10)
        pool.submit(comm.send, *call[1:]).result(10)
        list(pool.map(dist.send, call[1:2], call[2:]))
        pool.submit(lambda: dist.send(*call[1:])).result(10)  # has a line of its own
        pool.submit(world.send, [call[1]], 1, 0).result(10)
    with ThreadPool(1) as threads:
        threads.apply(call[0], call[1:])  # identified by the line that created the pool
    for thread in (
        threading.Thread(target=call[0], args=call[1:]),
        threading.Timer(0.0, call[0], call[1:]),
    ):
        thread.start()
        thread.join()
    asyncio.run(in_an_event_loop(*call))
    lines = [first + there for there in (2, 3, 4, 5, 6, 7, 13, 13)]
    first = in_an_event_loop.__code__.co_firstlineno
    expected = lines + [first + there for there in (1, 2, 4, 4)]
    assert stop().to_pandas()["line"].tolist() == expected


def test_a_thread_that_begins_in_torch_is_recorded_without_a_line(
    stop: Callable[[], Trace], world: ProcessGroup
) -> None:
    begun, done = threading.Event(), [torch.zeros(1)]
    # shows when torch has released it: _thread's threads cannot be joined
    weakref.finalize(done[0], begun.set)
    _thread.start_new_thread(world.send, (done[:], 1, 0))
    done.clear()
    assert begun.wait(10)
    frame = stop().to_pandas()
    assert frame["op"].tolist() == ["isend"]
    assert frame[["file", "line"]].isna().all(axis=None)


def test_receiving_from_anybody_says_so_until_the_message_has_come(
    stop: Callable[[], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group([0, 2, 3])
    work = dist.irecv(torch.zeros(1), group=group)
    monkeypatch.setattr(Work, "_source_rank", lambda _: 2, raising=False)
    dist.irecv(torch.zeros(1), group=group).wait()
    peers = stop().to_pandas()["peer"].tolist()
    assert [None if pd.isna(peer) else peer for peer in peers] == [None, None, 3]
    del work


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:538] Connection reset by peer [127.0.0.1]:4182", True),
        ("Invalid scalar type", False),
        # by this rank itself: the other rank may be fine
        ("Application timeout caused pair closure", False),
    ],
)
def test_a_lost_connection_is_a_wait_that_broke_and_no_refusal(
    words: str, lost: bool, world: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessGroup, "send", Mock(side_effect=RuntimeError(words)))
    with recorded(tmp_path) as stop, pytest.raises(RuntimeError, match=words[-9:]):
        dist.send(torch.zeros(1), 1)
    (row,) = stop().to_pandas().itertuples()
    assert row.status == "error"
    assert pd.notna(row.wait_ns) == lost


# -- collectives: the call of each with group size 4, S of nccl-tests in float32 elements, the
# shape, and the root

ONE, FULL = (lambda: torch.zeros(2, 3)), (lambda: torch.zeros(8, 3))
LIST = lambda: [torch.zeros(2, 3) for _ in range(SIZE)]  # noqa: E731
COLLECTIVES: dict[str, tuple[Callable[[], Any], str, int | None]] = {
    "broadcast": (lambda: dist.broadcast(ONE(), 2), "2x3", 2),
    "all_reduce": (lambda: dist.all_reduce(ONE()), "2x3", None),
    "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([ONE(), ONE()]), "2x2x3", None),
    "reduce": (lambda: dist.reduce(ONE(), 1), "2x3", 1),
    "all_gather": (lambda: dist.all_gather(LIST(), ONE()), "4x2x3", None),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(FULL(), ONE()), "8x3", None),
    "gather": (lambda: dist.gather(ONE(), LIST(), 0), "4x2x3", 0),
    "scatter": (lambda: dist.scatter(ONE(), LIST(), 0), "4x2x3", 0),
    "reduce_scatter": (lambda: dist.reduce_scatter(ONE(), LIST()), "4x2x3", None),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(ONE(), FULL()), "8x3", None),
    "all_to_all": (lambda: dist.all_to_all(LIST(), LIST()), "4x2x3", None),
    "all_to_all_single": (lambda: dist.all_to_all_single(FULL(), FULL()), "8x3", None),
}
if hasattr(dist, "all_gather_single"):
    COLLECTIVES |= {
        "all_gather_single": (lambda: dist.all_gather_single(FULL(), ONE()), "8x3", None),
        "reduce_scatter_single": (lambda: dist.reduce_scatter_single(ONE(), FULL()), "8x3", None),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's old names
def test_collectives_follow_the_sizes_of_nccl_tests(stop: Callable[[], Trace]) -> None:
    for call, _, _ in COLLECTIVES.values():
        call()
    rows = list(stop().to_pandas().itertuples())
    assert [
        (row.op, row.dtype, row.shape, None if pd.isna(row.peer) else row.peer, row.line)
        for row in rows
    ] == [
        (name, "float32", shape, root, call.__code__.co_firstlineno)
        for name, (call, shape, root) in COLLECTIVES.items()
    ]
    for row in rows:
        assert row.size_bytes == 4 * torch.Size(map(int, row.shape.split("x"))).numel()
    assert {(pd.isna(row.tag), row.status) for row in rows} == {(True, "ok")}


def test_collectives_that_cpp_issues_have_their_roots_and_splits(
    stop: Callable[[], Trace], world: ProcessGroup
) -> None:
    out, into = [3, 2, 1, 0], [0, 1, 2, 3]
    dist.all_reduce(torch.ones(4))  # through C++, and not recorded twice
    functional.wait_tensor(functional.broadcast(torch.ones(3), 2, world))
    functional.wait_tensor(functional.all_to_all_single(torch.ones(6), into, out, world))
    trace = stop()
    frame, events = trace.to_pandas(), trace.events
    assert frame["op"].tolist() == ["all_reduce", "broadcast", "all_to_all_single"]
    assert frame["peer"].isna().tolist() == [True, False, True]
    assert frame["peer"][1] == 2
    splits = [events.tables.payloads[payload].splits for payload in events.payload]
    assert splits == [(), (), ((12, 8, 4, 0), (0, 4, 8, 12))]
    assert set(frame["status"]) == {"ok"}


def test_what_the_program_has_waited_for_is_done(
    world: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the additional waiting thread has not reached it."""
    gate = threading.Event()
    for kind in (Work, *Work.__subclasses__()):
        if "wait" in vars(kind):
            monkeypatch.setattr(kind, "wait", lambda *_: gate.wait(60))
    with recorded(tmp_path):
        with recorded(tmp_path / "inner") as stop:
            functional.wait_tensor(functional.all_reduce(torch.ones(5), "sum", world))
        gate.set()
    (row,) = stop().to_pandas().itertuples()
    assert row.status == "ok"
    assert 0 < row.wait_ns <= row.done_ns


def test_collectives_by_other_signatures_and_how_they_reduce(
    stop: Callable[[], Trace], world: ProcessGroup
) -> None:
    world.broadcast(ONE(), 3).wait()
    world.broadcast(tensor=ONE(), root=3).wait()
    world.allreduce(ONE()).wait()
    world.barrier().wait()
    dist.all_reduce(ONE(), op=dist.ReduceOp.MAX)
    trace = stop()
    frame, events = trace.to_pandas(), trace.events
    reductions = [events.tables.payloads[payload].reduction for payload in events.payload]
    assert list(zip(frame["op"], frame["peer"].fillna(-1), reductions, strict=True)) == [
        *[("broadcast", 3, "")] * 2,
        *(("all_reduce", -1, "SUM"), ("barrier", -1, ""), ("all_reduce", -1, "MAX")),
    ]
    assert frame["size_bytes"][3] == 0


# -- groups


def test_a_group_has_its_name_and_global_ranks_and_is_not_kept_alive(
    stop: Callable[[], Trace],
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
    # created only by its members, so it has no order relative to other groups
    dist.new_group([0, 2], use_local_synchronization=True)
    trace = stop()
    frame, events = trace.to_pandas(), trace.events
    groups = [events.tables.groups[number] for number in events.group]
    members = [events.tables.payloads[payload].shape for payload in events.payload]
    assert frame["op"].tolist() == ["new_group", "isend", "isend"] * 3 + ["new_group"]
    for place, name in enumerate(names):
        made, *used = groups[3 * place : 3 * place + 3]
        assert made.ranks == (0, 1, 2, 3)
        assert [(group.name, group.ranks) for group in used] == [(name, (0, 3))] * 2
    assert groups[-1].ranks == (0, 2)
    assert members[::3] == [(0, 3)] * 3 + [(0, 2)]
    assert frame["peer"].dropna().tolist() == [3, 3] * 3
    assert set(frame["status"]) == {"ok"}
    assert -1 < frame["post_ns"][0] <= frame["wait_ns"][0] <= frame["done_ns"][0]


@pytest.mark.parametrize("used", [True, False])
def test_a_group_that_was_used_before_is_not_compared(used: bool, tmp_path: Path) -> None:
    with fake_world(1, "gloo"):
        if used:
            dist.barrier()
        with recorded(tmp_path) as stop:
            dist.barrier()
    said = stop().metadata.get("not_checked", [])
    assert ["operations on group world" in each for each in said] == [True] * used


@pytest.mark.parametrize("check", ["basic", "off"])
def test_only_what_would_be_compared_is_said_not_to_be(
    check: str, world: ProcessGroup, tmp_path: Path
) -> None:
    with recorded(tmp_path, check) as stop:
        world.recv_anysource([torch.zeros(1)], 0)
    said = stop().metadata.get("not_checked", [])
    assert any("rank 0 received on group world" in each for each in said) == (check != "off")


def test_a_group_belongs_to_its_world(tmp_path: Path) -> None:
    with fake_world(SIZE), recorded(tmp_path) as stop:
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=SIZE)
        dist.barrier()
    trace = stop()
    barriers = trace.events.group[(trace.to_pandas()["op"] == "barrier").to_numpy()]
    assert [trace.events.tables.groups[group].world for group in barriers] == [0, 1]


def test_an_unregistered_group_says_so(stop: Callable[[], Trace], world: ProcessGroup) -> None:
    group, cpu = ProcessGroup(FakeStore(), 0, 2), torch.device("cpu")
    group._register_backend(cpu, ProcessGroup.BackendType.CUSTOM, world._get_backend(cpu))
    group._set_group_name("mine")
    group.send([torch.zeros(1)], 1, 0).wait()
    (row,) = stop().to_pandas().itertuples()
    assert (row.group, row.peer) == ("mine (unregistered: group ranks)", 1)


# -- handles


class Handle(Work):
    """A handle whose outcome the test sets."""

    completed: bool | None = False
    fails = False

    def wait(self, timeout: Any = None) -> bool:
        if self.fails:
            raise RuntimeError("it failed")
        return True


def says_it_is_completed(self: Work) -> bool:
    if getattr(self, "completed", False) is None:
        raise RuntimeError("it failed")
    return bool(getattr(self, "completed", False))


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The handles of the next sends; request this fixture before recording begins."""
    handles = [Handle()]
    monkeypatch.setattr(Work, "is_completed", says_it_is_completed)
    monkeypatch.setattr(ProcessGroup, "send", lambda *_: handles[0])
    return handles


@pytest.fixture
def handle(handles: list[Handle]) -> Handle:
    return handles[0]


@pytest.mark.parametrize(("more_ms", "status"), [(0, "ok"), (1, "error")])
def test_a_groups_limit_of_up_to_half_a_minute_does_not_end_a_message(
    more_ms: int, status: str, handle: Handle, stop: Callable[[], Trace]
) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30, milliseconds=more_ms))
    dist.isend(torch.zeros(1), 1, group=group)
    handle.fails = True
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait()
    handle.fails = False
    ringsim.mark("now")
    handle.wait()
    message, now = list(stop().to_pandas().itertuples())[-2:]
    assert message.status == status
    assert 0 < message.wait_ns < now.post_ns
    assert (message.done_ns >= now.post_ns) == (status == "ok")


def test_a_limited_wait_that_failed_for_good_is_over(
    handle: Handle, stop: Callable[[], Trace]
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.fails, handle.completed = True, True
    for limit in ((SHORT,), ()):  # torch raises again
        with pytest.raises(RuntimeError, match="it failed"):
            handle.wait(*limit)
    (row,) = stop().to_pandas().itertuples()
    assert row.status == "error"
    assert 0 < row.wait_ns <= row.done_ns


def test_a_limited_wait_is_over_if_an_exception_ends_the_recording(
    handle: Handle, world: ProcessGroup, tmp_path: Path
) -> None:
    handle.fails = True
    with suppress(KeyError), recorded(tmp_path) as stop:  # ends while the error propagates
        dist.isend(torch.zeros(1), 1)
        with suppress(RuntimeError):
            handle.wait(SHORT)
        raise KeyError
    row = next(stop().to_pandas().itertuples())
    assert row.status == "error"
    assert 0 < row.wait_ns <= row.done_ns


@pytest.mark.parametrize("limit", [(), (SHORT,)])
@pytest.mark.parametrize("error", [RuntimeError("it failed"), RingError("it is refused")])
def test_a_monitored_barrier_that_fails_is_recorded_as_failed(
    error: Exception, limit: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessGroup, "monitored_barrier", Mock(side_effect=error))
    with recorded(tmp_path) as stop, pytest.raises(type(error), match="it"):
        world.monitored_barrier(*limit)
    (row,) = stop().to_pandas().itertuples()
    assert row.status == "error"
    assert row.wait_ns <= row.done_ns


def test_the_failure_of_what_is_found_completed_is_for_the_wait_to_say(
    handle: Handle, stop: Callable[[], Trace]
) -> None:
    dist.isend(torch.zeros(1), 1)
    handle.completed, handle.fails = True, True
    assert handle.is_completed()
    with pytest.raises(RuntimeError, match="it failed"):
        handle.wait()
    (row,) = stop().to_pandas().itertuples()
    assert row.status == "error"
    assert row.post_ns <= row.wait_ns <= row.done_ns


def test_what_nobody_waits_for_any_more_is_let_go(
    handles: list[Handle], stop: Callable[[], Trace]
) -> None:
    """They are released as the record grows, even after one that fails.

    Operations that are still to be waited for on a group with a limit are kept.
    """
    limited = dist.new_group(timeout=SHORT)
    broken, given_up, awaited = handles[0], Handle(), Handle()
    for work, group in ((broken, None), (given_up, None), (awaited, limited)):
        handles[:] = [work]
        dist.isend(torch.zeros(1), 1, group=group)
    given_up.fails = True
    with pytest.raises(RuntimeError, match="it failed"):
        given_up.wait(SHORT)
    broken.completed, given_up.completed, awaited.completed = None, True, True
    gone, kept = weakref.ref(given_up), weakref.ref(awaited)
    handles.clear()
    del given_up, work
    for _ in range(10_000):
        ringsim.mark("on and on")
    assert gone() is None
    awaited.wait()
    del awaited
    assert kept() is None
    trace = stop()
    assert any("in a different way" in each for each in trace.metadata["not_recorded"])
    assert operations(trace)["status"].tolist() == ["ok", "in_flight", "in_flight", "ok"]


def test_only_what_torch_itself_starts_is_awaited_unseen(stop: Callable[[], Trace]) -> None:
    call = "import torch.distributed as dist\ndist.all_reduce(tensor, async_op=True)"
    for name in ("a script.py", os.path.join(os.path.dirname(torch.__file__), "a module.py")):
        exec(compile(call, name, "exec"), {"tensor": torch.zeros(1)})
    assert stop().to_pandas()["status"].tolist() == ["in_flight", "ok"]


# -- installing and uninstalling


def test_the_end_of_a_recording_puts_the_same_objects_back(
    world: ProcessGroup, tmp_path: Path
) -> None:
    classes = (ProcessGroup, Work, *Work.__subclasses__(), threading.Thread, ThreadPoolExecutor)
    owners = (*classes, asyncio, dist.distributed_c10d)
    before = [dict(vars(owner)) for owner in owners]
    with recorded(tmp_path):
        assert ProcessGroup.send is not before[0]["send"]
        assert ProcessGroup.send.__name__ == "send"
        assert ProcessGroup.send.__doc__ == before[0]["send"].__doc__
        with recorded(tmp_path / "inner"):
            time.sleep(0)
        assert ProcessGroup.send is not before[0]["send"]
    for owner, was in zip(owners, before, strict=True):
        assert vars(owner).keys() == was.keys()
        assert all(vars(owner)[name] is value for name, value in was.items())
