"""Programs for simulators: what is written of a trace, and that it runs there as it ran here."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from synthetic import Story
from trace_mutations import DATA, read_in_full

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.exchange import read_chakra, read_goal
from ringsim.exchange.programs import Step, make_programs, replay
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.collectives import bus_factor, count_rounds, make_rounds
from ringsim.traces.value import Trace

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)


def back_from_goal(trace: Trace, directory: Path, link: ringsim.Link = LINK) -> Trace:
    trace.to_goal(directory / "run.goal")
    return read_goal(directory / "run.goal", link=link)


def back_from_chakra(trace: Trace, directory: Path, link: ringsim.Link = LINK) -> Trace:
    shutil.rmtree(directory / "run", ignore_errors=True)
    trace.to_chakra(directory / "run")
    return read_chakra(directory / "run", link=link)


WAYS = {"goal": back_from_goal, "chakra": back_from_chakra}


def small() -> Trace:
    """Rank 0 computes, sends while it computes on, and waits; rank 1 waits for it; then all meet; one receive is never served."""
    story = Story(2)
    story.span(0, "forward", 0, 2, stage=0, microbatch=1)
    story.message(0, 1, (2, 5, 6), (1, 1, 7), size_bytes=4000, tag=3)
    story.op(0, "all_reduce", (8, 8, 12), group="world", size_bytes=4000)
    story.op(1, "all_reduce", (9, 9, 12), group="world", size_bytes=4000)
    story.op(1, "irecv", (13, 14, -1), peer=0, tag=9, group="world", size_bytes=8)
    return story.trace()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zb_h1", 4)])
def test_a_simulated_step_takes_as_long_there(tmp_path: Path, way: str, schedule: str, num_ranks: int) -> None:
    link = ringsim.Link(alpha_s=0.05, beta_s_per_byte=1e-4)
    settings = {"num_ranks": num_ranks, "num_microbatches": 4, "num_chunks": 2 if "inter" in schedule else None, "size_bytes": 1000}
    here = simulate_schedule(schedule, link=link, semantics="buffered", **settings)
    there = WAYS[way](here.trace(), tmp_path, link)
    assert there.makespan_s == pytest.approx(float(here.makespan), abs=1e-6)
    assert len(there.messages) == len(here.trace().messages)


def pass_round(rounds: int) -> None:
    """Works unevenly, passes something on while it works on, and adds it up with all others."""
    ring = ringsim.current_ring()
    token = torch.zeros(250)
    for _ in range(rounds):
        ringsim.compute(1e-3 * (1 + ring.rank % 3))
        received = torch.empty(250)
        works = [dist.isend(token, (ring.rank + 1) % ring.world_size), dist.irecv(received, (ring.rank - 1) % ring.world_size)]
        ringsim.compute(5e-4)
        for work in works:
            work.wait()
    dist.all_reduce(token)


@pytest.mark.parametrize("way", WAYS)
def test_a_simulated_worker_takes_as_long_there(tmp_path: Path, way: str) -> None:
    here = ringsim.simulate(pass_round, world_size=8, args=(5,), link=LINK, semantics="buffered")
    assert WAYS[way](here, tmp_path).makespan_s == pytest.approx(here.makespan_s, abs=1e-7)


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """Programs of three ranks, each one after the other but for messages that are waited for later; every message meets its other side."""
    ranks: list[list[Step]] = [[], [], []]
    front: list[tuple[int, ...]] = [(), (), ()]
    loose: list[list[int]] = [[], [], []]

    def add(rank: int, step: Step) -> None:
        ranks[rank].append(step)
        if step.kind == "work":
            front[rank] = (len(ranks[rank]) - 1,)
        else:
            loose[rank].append(len(ranks[rank]) - 1)

    for _ in range(draw(st.integers(1, 12))):
        src, dst = draw(st.permutations([0, 1, 2]))[:2]
        for rank in (0, 1, 2):
            if draw(st.booleans()):
                if draw(st.booleans()):
                    front[rank], loose[rank] = (*front[rank], *loose[rank]), []
                add(rank, Step("work", front[rank], work_ns=draw(st.integers(1, 4)) * 10**6, label="work"))
        size, tag = draw(st.integers(1, 3)) * 1000, draw(st.integers(0, 1))
        add(src, Step("send", front[src], peer=dst, tag=tag, size_bytes=size))
        add(dst, Step("recv", front[dst], peer=src, tag=tag, size_bytes=size))
    return ranks


@pytest.mark.parametrize("way", WAYS)
@given(found=programs())
def test_any_program_runs_as_it_ran(tmp_path: Path, way: str, found: list[list[Step]]) -> None:
    here = replay([[*program, Step("work", tuple(range(len(program))), work_ns=10**6, label="end")] for program in found], LINK, "a test")
    there = WAYS[way](here, tmp_path)
    ends = [trace.to_pandas().query("kind == 'span'").groupby("rank")["done_ns"].max().tolist() for trace in (here, there)]
    assert ends[1] == pytest.approx(ends[0], abs=10)
    assert len(there.messages) == len(here.messages)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", sorted(DATA.glob("*.ringtrace")), ids=lambda path: path.stem)
def test_a_real_trace_runs_there(tmp_path: Path, file: Path, way: str) -> None:
    trace = ringsim.load(file)
    there = WAYS[way](trace, tmp_path)
    assert there.unmatched == []
    assert there.world_size == trace.world_size
    assert there.metadata["source"] == "simulated"
    busy = sum(step.work_ns for step in make_programs(trace)[0]) * 1e-9
    assert there.makespan_s >= busy
    read_in_full(there, draw=False)


@pytest.mark.parametrize("way", WAYS)
@given(trace=traces)
def test_any_trace_is_written_and_read_or_refused(tmp_path: Path, trace: Trace, way: str) -> None:
    try:
        read_in_full(WAYS[way](trace, tmp_path), draw=False)
    except TraceFileError as error:
        assert str(error).isprintable()  # noqa: PT017  # such as a time of 292 years


def test_a_tree_of_loggopsim_takes_its_depth(tmp_path: Path) -> None:
    """The broadcast of binary_tree_16.goal: rank r sends to r + 2^k wherever 2^k is larger than r."""
    lines = ["num_ranks 16", "// comment", "/* another", "one */"]
    for rank in range(16):
        sends = [rank + 2**k for k in range(4) if 2**k > rank]
        parent = rank - 2 ** (rank.bit_length() - 1) if rank else None
        lines += [f"rank {rank} {{", *([f"l1: recv 1b from {parent} tag 0 cpu 0 nic 0"] if rank else [])]
        for number, other in enumerate(sends, start=2):
            lines += [f"\tl{number}: send 1b to {other}", *([f"l{number} requires l1"] if rank else [])]
        lines.append("}")
    (tmp_path / "tree.goal").write_text("\r\n".join(lines))
    trace = read_goal(tmp_path / "tree.goal", link=LINK)
    assert len(trace.messages) == 15
    assert trace.makespan_s == pytest.approx(4 * LINK.time_s(1))


def test_what_begins_with_another_and_one_cpu_for_two(tmp_path: Path) -> None:
    (tmp_path / "run.goal").write_text(
        "num_ranks 1\nrank 0 {\na: calc 100\nb: calc 50\nb irequires a\nc: calc 30 cpu 1\nc irequires a\nd: calc 1\nd requires c\n}"
    )
    spans = read_goal(tmp_path / "run.goal", link=LINK).to_pandas().sort_values(["post_ns", "done_ns"])
    assert spans[["thread", "post_ns", "done_ns"]].to_numpy().tolist() == [[1, 0, 30], [0, 0, 100], [0, 100, 150], [0, 150, 151]]


def test_who_waits_for_ever_is_in_flight_and_a_circle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.goal"
    path.write_text("num_ranks 2\nrank 0 {\nrecv 4b from 1\n}\nrank 1 {\na: recv 4b from 0\nb: send 4b to 0\nb requires a\n}")
    trace = read_goal(path, link=LINK)
    assert [one.status for one in trace.unmatched] == ["in_flight", "in_flight"]
    assert "wait" in str(trace.explain())
    path.write_text("num_ranks 1\nrank 0 {\na: calc 1\nb: calc 1\na requires b\nb requires a\n}")
    with pytest.raises(TraceFileError, match="steps of it need each other"):
        read_goal(path, link=LINK)


ROUNDS = {
    "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 0, "reduce": 0, "gather": 1, "scatter": 1,
    "barrier": None,
}  # fmt: skip


@pytest.mark.parametrize("op", ROUNDS)
@given(size=st.integers(1, 9), data=st.data())
def test_rounds_move_what_a_collective_must(op: str, size: int, data: st.DataObject) -> None:
    root, share = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 50))
    rounds = list(make_rounds(op, size, root, share * size))
    count, amount = count_rounds(op, size, share * size)
    assert len(rounds) == count
    assert {bytes_ for messages in rounds for _, _, bytes_ in messages} <= {amount}
    assert all(source != to for messages in rounds for source, to, _ in messages)
    if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        sent = [sum(bytes_ for messages in rounds for source, _, bytes_ in messages if source == rank) for rank in range(size)]
        assert sent == [round(share * size * bus_factor(op, size))] * size
    elif op in ("broadcast", "reduce"):
        have = {root}
        for messages in rounds if op == "broadcast" else [[(to, source, _) for source, to, _ in one] for one in rounds[::-1]]:
            assert {source for source, _, _ in messages} <= have
            have |= {to for _, to, _ in messages}
        assert have == set(range(size))
        assert count == math.ceil(math.log2(size))
    elif op == "barrier":
        knows = [{rank} for rank in range(size)]
        for messages in rounds:
            knows = [knows[rank].union(*(knows[source] for source, to, _ in messages if to == rank)) for rank in range(size)]
        assert all(known == set(range(size)) for known in knows)


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.goal"
    for text, said in (
        ("", "does not begin with num_ranks"),
        ("num_ranks 1\nrank 1 {\n}", "rank 1 is not one of 1"),
        ("num_ranks 1\nhello", "'hello' stands outside"),
        ("num_ranks 1\nrank 0 {\ncalc x\n}", "'calc x' is no line of GOAL"),
        ("num_ranks 1\n" + "/* " * 10**6, "num_ranks is 1, and 0 ranks"),  # in a moment, not in an hour
        ("num_ranks 1000000\nrank 0 {\n}", "num_ranks is 1000000, and 1 ranks are there"),
        ("num_ranks 2\nrank 0 {\nrecv 1b from 0\n}\nrank 1 {\n}", "receives from rank 0 of 2"),
        ("num_ranks 99999999999", "does not begin"),
    ):
        path.write_text(text)
        with pytest.raises(TraceFileError, match=said):
            read_goal(path, link=LINK)
    for link, way in itertools.product((None, {(0, 1): LINK}), WAYS):
        with pytest.raises(ArgumentError, match="link must be"):
            WAYS[way](small(), tmp_path, link)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TraceFileError, match=r"named <name>.<rank>.et"):
        read_chakra(tmp_path, link=LINK)
    with pytest.raises(TraceFileError, match="must be there"):
        read_chakra(tmp_path / "none", link=LINK)
    path.write_text("num_ranks 1\n")
    with pytest.raises(TraceFileError, match="must be writable"):
        small().to_chakra(path)
    small().to_chakra(tmp_path / "run")
    with pytest.raises(TraceFileError, match="it holds files of another run"):
        small().to_chakra(tmp_path / "run")
