"""The watcher's findings in runs whose outcome the test knows."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from accusations import accused
from hypothesis import given, note, settings
from hypothesis import strategies as st
from message_programs import (
    Programs,
    awaited,
    circles_of,
    joined,
    named,
    programs_of_messages,
    run_to_the_end,
    said,
    said_circles,
)
from rendezvous_machine import Machine

import ringsim
from ringsim.errors import Deadlock, PeerExited, RingError
from ringsim.state import get_state
from ringsim.traces.events import Group

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

GROUPS = (
    Group("world", (0, 1, 2)),
    Group("ring:0>1", (0, 1)),
    Group("ring:1>2", (1, 2)),
    Group("ring:2>0", (0, 2)),
)


def play(programs: Programs) -> dict[int, list[int]]:
    """Plays this rank's program; every message has the number of its rank and post."""
    ring, received, handles = ringsim.current_ring(), {}, []
    groups = {0: None, 1 + ring.rank: ring.succ_group, 1 + ring.pred: ring.pred_group}
    for position, (what, *about) in enumerate(programs[ring.rank]):
        if what == "wait":
            post, work, buffer = handles[about[0]]
            work.wait()
        else:
            peer, tag, group = about
            sent = [ring.rank, position] if "send" in what else [-1, -1]
            post, buffer = position, torch.tensor(sent)
            work = getattr(dist, what)(buffer, peer, group=groups[group], tag=tag)
            if what.startswith("i"):
                handles.append((post, work, buffer))
                continue
        if "recv" in programs[ring.rank][post][0]:
            received[post] = buffer.tolist()
    return received


def expected_results(machine: Machine) -> list[dict[int, list[int]]]:
    """Returns the result of ``play`` according to the machine."""
    return [
        {
            op.line - 1: [op.partner.rank, op.partner.line - 1]
            for op in posted
            if op.op.endswith("recv") and op.done >= 0 and op.partner
        }
        for posted in machine.posted
    ]


# test_diagnose_machines tests the same on records, and more often
@settings(max_examples=settings.default.max_examples // 3)
@given(parts=st.lists(programs_of_messages(GROUPS), min_size=1, max_size=6))
def test_ranks_are_told_where_the_machine_says_so(parts: list[Programs]) -> None:
    stuck = [bool(run_to_the_end(part, GROUPS).unfinished) for part in parts]
    ending = [part for part, is_stuck in zip(parts, stuck, strict=True) if not is_stuck]
    # one run for all programs that end, and one for a program that does not
    programs = joined([*ending, *[part for part in parts if part not in ending][:1]], 3)
    machine = run_to_the_end(programs, GROUPS)
    note(f"{programs}\n{awaited(machine)}")
    try:
        trace = ringsim.trace(play, world_size=3, args=(programs,), limit_s=20)
    except RingError as caught:
        error = caught
    else:
        assert machine.unfinished == set()
        assert trace.results == expected_results(machine)
        assert "stalled" not in {finding.kind for finding in trace.explain().findings}
        return
    diagnosis = error.diagnosis
    assert said(diagnosis)
    # it may come while other ranks are about to get stuck
    assert said(diagnosis) <= awaited(machine)
    assert said_circles(diagnosis) <= circles_of(machine)
    assert named(diagnosis) >= {one.rank for one in said(diagnosis)}
    kinds = {"deadlock", "tag_mismatch", "group_mismatch", "peer_exited"}
    assert {finding.kind for finding in diagnosis.findings} <= kinds
    assert type(error) is (PeerExited if diagnosis.kind == "peer_exited" else Deadlock)
    # the file has the watcher's records
    assert said(error.trace.explain()) >= said(diagnosis)


MAXIMUM = 600  # the real limit, two million, takes minutes to reach
ROUNDS = 400  # two messages each: the last 200 messages are not recorded
STOPS = (0, 3)  # a sender and a receiver stop recording


def to_and_fro() -> int:
    """Messages in both directions in each pair."""
    rank, token = dist.get_rank(), torch.zeros(1)
    peer, sends = rank ^ 1, rank % 2 == 0
    if rank in STOPS:
        get_state().recorder._store.max_records = MAXIMUM
    for turn in range(2 * ROUNDS):
        if sends is (turn % 2 == 0):
            dist.send(token + turn, peer)
        else:
            dist.recv(token, peer)
    if sends:
        time.sleep(1.5)
        dist.send(token, peer)
    else:
        dist.recv(token, peer)
    dist.barrier()
    return int(token)


def test_a_rank_that_no_longer_records_is_not_taken_for_stuck() -> None:
    trace = ringsim.trace(to_and_fro, world_size=4, limit_s=30)
    recorded = trace.to_pandas()["rank"].value_counts()
    for rank in range(4):
        assert recorded[rank] == (MAXIMUM if rank in STOPS else 2 * ROUNDS + 2)
    assert trace.metadata["complete"] is False
    notes = [note for note in trace.metadata["notes"] if note.startswith("Recording")]
    for rank, note_of_rank in zip(STOPS, notes, strict=True):
        stopped = f"Recording of rank {rank} stopped: the maximum of 600 records was reached."
        assert note_of_rank.startswith(stopped)
    assert accused(trace) == []
