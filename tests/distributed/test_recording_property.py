"""Random correct programs give the same results with recording and without, and their trace is the program."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_server import RankServer
from test_recording import join

import ringsim
from ringsim.traces.events import OK, OP_NAMES
from ringsim.traces.value import Trace

pytestmark = pytest.mark.timeout(300)
DTYPES = ("float32", "int64", "bfloat16", "bool", "complex64", "uint8")


class Step(NamedTuple):
    """One message. Both sides meet it at the same place of the program, so a program of steps cannot deadlock."""

    src: int
    dst: int
    how_sent: str
    how_received: str
    dtype: str
    shape: tuple[int, ...]
    tag: int


SIZE = 3


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    steps = []
    for tag in range(draw(st.integers(1, 12))):
        src = draw(st.integers(0, SIZE - 1))
        dst = draw(st.integers(0, SIZE - 1).filter(lambda rank, src=src: rank != src))
        how_sent = draw(st.sampled_from(("send", "isend", "batch")))
        how_received = draw(st.sampled_from(("recv", "irecv", "batch", "anybody")))
        least = 1 if how_received == "anybody" else 0  # Gloo refuses a message of 0 bytes from anybody
        shape = tuple(draw(st.lists(st.integers(least, 3), max_size=2)))
        steps.append(Step(src, dst, how_sent, how_received, draw(st.sampled_from(DTYPES)), shape, tag))
    return steps


def play(steps: list[Step], rank: int) -> list[Any]:
    """Runs a program: what is sent depends on all that was received before; returns everything that was received."""
    handles: list[Any] = []
    received: list[torch.Tensor] = []
    seed = rank
    for step in steps:
        dtype = getattr(torch, step.dtype)
        if step.src == rank:
            tensor = ((torch.arange(torch.Size(step.shape).numel()) + seed) % 2).reshape(step.shape).to(dtype)
            if step.how_sent == "send":
                dist.send(tensor, step.dst, tag=step.tag)
            elif step.how_sent == "isend":
                handles.append(dist.isend(tensor, step.dst, tag=step.tag))
            else:
                handles += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, step.dst, tag=step.tag)])
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
                works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, step.src, tag=step.tag)])
                works[0].wait()
            if step.how_received != "irecv":
                seed += int(tensor.ne(0).sum())
    for handle in handles:
        handle.wait()
    return [(str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).tolist()) for tensor in received]


def with_and_without(directory: str, rank: int, several: list[list[Step]]) -> list[tuple[list[Any], ...]]:
    join(directory, rank, SIZE)
    results = []
    for number, steps in enumerate(several):
        dist.barrier()  # a recv from anybody must not get what the next program sends with the same tag
        bare = play(steps, rank)
        with ringsim.trace(f"{directory}/{number}.ringtrace"):
            recorded = play(steps, rank)
        results.append((bare, recorded, play(steps, rank)))
    return results


@settings(max_examples=settings.default.max_examples // 8)
@given(several=st.lists(programs(), min_size=8, max_size=8))
def test_recording_changes_nothing_and_misses_nothing(server: RankServer, several: list[list[Step]]) -> None:
    """Eight programs a launch."""
    with tempfile.TemporaryDirectory() as directory:
        ended = server.run(with_and_without, [(directory, rank, several) for rank in range(SIZE)], limit_s=60)
        assert [(each.how, each.value) for each in ended if each.how != "returned"] == []
        for each in ended:
            for bare, recorded, afterwards in each.value:
                assert bare == recorded == afterwards
        for number, steps in enumerate(several):
            check_trace(ringsim.load(Path(directory, f"{number}.ringtrace")), steps)


def check_trace(trace: Trace, steps: list[Step]) -> None:
    """The trace is the program."""
    events, payloads = trace.events, trace.events.tables.payloads
    assert (events.status == OK).all()
    assert trace.unmatched == []
    for rank in range(SIZE):
        expected = []
        for step in steps:
            if rank in (step.src, step.dst):
                op = {"batch": "batch_isend"}.get(step.how_sent, step.how_sent)
                if step.dst == rank:
                    op = {"batch": "batch_irecv", "anybody": "recv"}.get(step.how_received, step.how_received)
                peer = step.dst if step.src == rank else step.src
                real = step.dtype == "complex64"  # which torch sends as pairs of floats
                expected.append((op, peer, step.tag, "float32" if real else step.dtype, (*step.shape, 2) if real else step.shape))
        mine = events.select(events.rank == rank)
        columns = zip(mine.op, mine.peer.tolist(), mine.tag.tolist(), mine.payload, strict=True)
        assert [(OP_NAMES[op], peer, tag, *payloads[payload][:2]) for op, peer, tag, payload in columns] == expected
    assert (events.done_ns[trace.messages.recv] >= events.post_ns[trace.messages.send]).all()
