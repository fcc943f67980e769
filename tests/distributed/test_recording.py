"""Recording on real ranks changes nothing and misses nothing."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_server import RankServer, results

import ringsim
from ringsim import Trace

pytestmark = pytest.mark.timeout(900)  # dozens of programs in one test
PATIENCE = timedelta(seconds=40)  # no working program comes close, even on two loaded cores


def join(directory: str, rank: int, size: int) -> str:
    """Joins the ranks in the default group; returns the path of the trace."""
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return f"{directory}/run.ringtrace"


def run(server: RankServer, function: Any, directory: Path, size: int = 2) -> Any:
    """Runs ``function(directory, rank)``; returns the saved trace, and each rank's result."""
    returned = results(server.run(function, [(str(directory), rank) for rank in range(size)]))
    return ringsim.load(directory / "run.ringtrace"), returned


def failures(directory: str, rank: int) -> list[str]:
    path = join(directory, rank, 2)
    messages = []
    with ringsim.trace(path):
        dist.barrier()
        if rank == 0:
            late = dist.irecv(torch.zeros(4), 1)
            for go_wrong in (
                lambda: late.wait(timedelta(milliseconds=50)),
                # it did not arrive, and a second wait does not change that
                lambda: late.wait(timedelta(milliseconds=50)),
                lambda: dist.isend(torch.zeros(4, 4).t()[1:], 1),
            ):
                try:
                    go_wrong()
                except (RuntimeError, ValueError) as error:
                    messages.append(f"{type(error).__name__}: {error}")
        # The connection is broken now: the ranks meet at the store, so that rank 1 does not also
        # disconnect too early.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"seen {rank}", "")
        store.wait(["seen 0", "seen 1"], PATIENCE)
    return messages


def test_what_fails_is_recorded_and_raised_as_it_was(server: RankServer, tmp_path: Path) -> None:
    trace, returned = run(server, failures, tmp_path)
    assert "Timed out" in returned[0][0]
    assert len(returned[0]) == 3
    assert "contiguous" in returned[0][2]
    failed = trace.to_pandas().query("rank == 0")
    # the mark has the reason
    assert [*failed["op"]] == ["barrier", "irecv", "isend", "mark"]
    assert [*failed["status"]] == ["ok", "error", "error", "ok"]
    assert (failed["done_ns"] > 0).all()


def given_up(how: str) -> None:
    """Rank 0 is late for a collective, for which rank 1 has waited with a limit, twice."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["given up"], PATIENCE)
        dist.all_reduce(torch.ones(3))
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=20))
        ringsim.mark("given up")
    store.set("given up", "")
    if how == "wait(limit)":
        assert work.wait(PATIENCE)
    elif how == "wait()":
        work.wait()
    while how == "is_completed()" and not work.is_completed():
        pass
    ringsim.mark("done")


@pytest.mark.parametrize("how", ["wait(limit)", "wait()", "is_completed()", "nothing"])
def test_a_limit_does_not_end_a_collective(how: str) -> None:
    """0.2.0 recorded that it had failed at the first limit."""
    mine = ringsim.trace(given_up, world_size=2, args=(how,)).to_pandas().query("rank == 1")
    (collective,) = mine[mine["op"] == "all_reduce"].itertuples()
    if how == "nothing":
        assert (collective.status, pd.isna(collective.wait_ns)) == ("in_flight", True)
        return
    assert collective.status == "ok"
    given_up_ns = mine[mine["label"] == "given up"]["post_ns"].tolist()
    (done_ns,) = mine[mine["label"] == "done"]["post_ns"]
    assert collective.post_ns <= collective.wait_ns < given_up_ns[0]
    assert given_up_ns[1] < collective.done_ns <= done_ns


# -- random correct programs give the same results with and without recording, and their trace
# equals the program

SIZE = 3
DTYPES = ("float32", "int64", "bfloat16", "bool", "complex64", "uint8")


class Step(NamedTuple):
    """A message, which both sides have at the same place of the program: no deadlock."""

    src: int
    dst: int
    how_sent: str
    how_received: str
    dtype: str
    shape: tuple[int, ...]
    tag: int


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    steps = []
    for tag in range(draw(st.integers(1, 12))):
        src = draw(st.integers(0, SIZE - 1))
        dst = (src + draw(st.integers(1, SIZE - 1))) % SIZE
        how_sent = draw(st.sampled_from(("send", "isend", "batch")))
        how_received = draw(st.sampled_from(("recv", "irecv", "batch", "anybody")))
        # Gloo refuses a message of 0 bytes from any source
        least = 1 if how_received == "anybody" else 0
        shape = tuple(draw(st.lists(st.integers(least, 3), max_size=2)))
        dtype = draw(st.sampled_from(DTYPES))
        steps.append(Step(src, dst, how_sent, how_received, dtype, shape, tag))
    return steps


def play(steps: list[Step], rank: int) -> list[Any]:
    """Runs a program in which each message depends on all earlier received ones."""
    handles: list[Any] = []
    received: list[torch.Tensor] = []
    seed = rank
    for step in steps:
        dtype = getattr(torch, step.dtype)
        if step.src == rank:
            numbers = torch.arange(torch.Size(step.shape).numel()) + seed
            tensor = (numbers % 2).reshape(step.shape).to(dtype)
            if step.how_sent == "send":
                dist.send(tensor, step.dst, tag=step.tag)
            elif step.how_sent == "isend":
                handles.append(dist.isend(tensor, step.dst, tag=step.tag))
            else:
                operation = dist.P2POp(dist.isend, tensor, step.dst, tag=step.tag)
                handles += dist.batch_isend_irecv([operation])
        elif step.dst == rank:
            tensor = torch.zeros(step.shape, dtype=dtype)
            received.append(tensor)
            if step.how_received == "recv":
                assert dist.recv(tensor, step.src, tag=step.tag) == step.src
            elif step.how_received == "anybody":
                assert dist.recv(tensor, tag=step.tag) == step.src
            elif step.how_received == "irecv":
                handles.append(dist.irecv(tensor, step.src, tag=step.tag))
            else:
                operation = dist.P2POp(dist.irecv, tensor, step.src, tag=step.tag)
                dist.batch_isend_irecv([operation])[0].wait()
            if step.how_received != "irecv":
                seed += int(tensor.ne(0).sum())
    for handle in handles:
        handle.wait()
    return [(str(tensor.dtype), tensor.tolist()) for tensor in received]


def with_and_without(directory: str, rank: int, several: list[list[Step]]) -> list[Any]:
    join(directory, rank, SIZE)
    found = []
    for number, steps in enumerate(several):
        # a recv from any source must not get the next program's message with the same tag
        dist.barrier()
        bare = play(steps, rank)
        with ringsim.trace(f"{directory}/{number}.ringtrace"):
            recorded = play(steps, rank)
        found.append((bare, recorded, play(steps, rank)))
    return found


@settings(max_examples=settings.default.max_examples // 8)
@given(several=st.lists(programs(), min_size=8, max_size=8))
def test_recording_changes_nothing_and_misses_nothing(
    server: RankServer, several: list[list[Step]]
) -> None:
    """Eight programs per launch."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [(directory, rank, several) for rank in range(SIZE)]
        for found in results(server.run(with_and_without, arguments)):
            for bare, recorded, afterwards in found:
                assert bare == recorded == afterwards
        for number, steps in enumerate(several):
            check_trace(ringsim.load(Path(directory, f"{number}.ringtrace")), steps)


def check_trace(trace: Trace, steps: list[Step]) -> None:
    """Checks that the trace equals the program."""
    frame, messages = trace.to_pandas(), trace.to_pandas("messages")
    assert (frame["status"] == "ok").all()
    assert trace.unmatched == []
    for rank in range(SIZE):
        expected = []
        for step in steps:
            if rank not in (step.src, step.dst):
                continue
            how, peer = step.how_received, step.src
            if step.src == rank:
                how, peer = step.how_sent, step.dst
            batched = "batch_isend" if step.src == rank else "batch_irecv"
            op = {"batch": batched, "anybody": "recv"}.get(how, how)
            real = step.dtype == "complex64"  # which torch sends as pairs of floats
            dtype, shape = ("float32", (*step.shape, 2)) if real else (step.dtype, step.shape)
            expected.append((op, peer, step.tag, dtype, "x".join(map(str, shape))))
        columns = frame[frame["rank"] == rank][["op", "peer", "tag", "dtype", "shape"]]
        assert [*columns.itertuples(index=False, name=None)] == expected
    assert (messages["recv_done_ns"] >= messages["send_post_ns"]).all()
