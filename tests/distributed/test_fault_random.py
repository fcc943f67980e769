"""Random programs of messages on real ranks: the run ends with a verdict where the evaluator of lists says so, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note, settings
from hypothesis import strategies as st
from message_programs import Groups, Programs, awaited, circles, joined, named, programs_of_messages, said, said_circles

import ringsim
from ringsim.diagnose.failure import error_of_kind
from ringsim.errors import RingError
from ringsim.schedules.engine import Operation, Receive, Run, Send, Wait, run_programs
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("nothing_left_behind")]

SIZE = 3
GROUPS: Groups = {"world": (0, 1, 2), "ring:0>1": (0, 1), "ring:1>2": (1, 2), "ring:2>0": (0, 2)}
LIMIT_S = 20.0  # a run that hangs ends, as a RunTimeout, and so as a failure of the test


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
        return ringsim.trace(play, world_size=SIZE, args=([spell(program) for program in programs],), limit_s=LIMIT_S)
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
