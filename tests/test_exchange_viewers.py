"""Files for viewers and programs for simulators: what they say of a trace, and that they come back, and run, as they were."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_schemas import PERFETTO, compile_schema, parse_whole
from random_traces import traces
from synthetic import Story
from trace_mutations import DATA, flip, read_in_full

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.exchange import read_chakra, read_chrome, read_goal, read_perfetto, read_profiler
from ringsim.exchange.programs import Step, make_programs, replay
from ringsim.exchange.slices import place_apart, place_nested, unfold
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.collectives import bus_factor, count_rounds, make_rounds
from ringsim.traces.value import Trace

READERS = {"perfetto": read_perfetto, "chrome": read_chrome}
FILES = sorted(DATA.glob("*.ringtrace"))


def export(trace: Trace, name: str, path: Path) -> Path:
    getattr(trace, f"to_{name}")(path)
    return path


def small() -> Trace:
    """Rank 0 sends twice, the second time before the first is through; rank 1 was waiting; one receive is never served."""
    story = Story(2)
    story.span(0, "outer", 0, 9, microbatch=1)
    story.span(0, "inner", 1, 2)
    story.message(0, 1, (1, 3, 4), (0, 0, 4))
    story.message(0, 1, (2, 4, 5), (4, 4, 6), tag=3)
    story.op(1, "irecv", (7, 8, -1), peer=0, tag=9, group="world", size_bytes=8)
    story.op(1, "mark", (8, -1, -1), label="here")
    return story.trace()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_real_trace_comes_back(tmp_path: Path, file: Path, name: str) -> None:
    trace = ringsim.load(file)
    assert READERS[name](export(trace, name, tmp_path / "file")) == trace


@pytest.mark.parametrize("name", READERS)
@given(trace=traces)
def test_any_trace_comes_back(tmp_path: Path, trace: Trace, name: str) -> None:
    written = export(trace, name, tmp_path / "file")
    assert READERS[name](written) == trace
    open_slices: dict[int, int] = {}
    times: dict[int, int] = {}
    for packet in read_packets(written) if name == "perfetto" else ():
        event = packet.track_event
        if packet.HasField("track_event"):
            assert packet.timestamp >= times.get(event.track_uuid, 0)
            times[event.track_uuid] = packet.timestamp
            open_slices[event.track_uuid] = open_slices.get(event.track_uuid, 0) + {1: 1, 2: -1, 3: 0}[event.type]
            assert open_slices[event.track_uuid] >= 0, "slices nest on every lane"


@pytest.mark.parametrize("name", READERS)
def test_the_same_trace_gives_the_same_bytes_and_may_be_packed(tmp_path: Path, name: str) -> None:
    first, second = (export(small(), name, tmp_path / which).read_bytes() for which in ("one", "two"))
    assert first == second
    (tmp_path / "packed").write_bytes(gzip.compress(first))
    assert READERS[name](tmp_path / "packed") == small()


def read_packets(path: Path) -> list[Any]:
    return list(parse_whole(compile_schema("perfetto", PERFETTO)["Trace"], path.read_bytes()).packet)


def test_slices_of_others_become_spans(tmp_path: Path) -> None:
    theirs = [
        {"ph": "B", "pid": 70, "tid": "main", "ts": 10, "name": "load"},
        {"ph": "X", "pid": 31, "tid": 1, "ts": 11.5, "dur": 2, "name": "one"},
        {"ph": "E", "pid": 70, "tid": "main", "ts": 12},
        {"ph": "i", "pid": 31, "tid": 1, "ts": 13, "name": "here"},
        {"ph": "M", "pid": 31, "name": "process_name", "args": {"name": "x"}},
    ]
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    frame = read_chrome(tmp_path / "theirs.json").to_pandas()[["rank", "kind", "label", "post_ns", "done_ns"]].astype(object)
    assert frame.where(frame.notna(), None).to_numpy().tolist() == [
        [0, "span", "one", 1500, 3500], [0, "mark", "here", 3000, None], [1, "span", "load", 0, 2000],
    ]  # fmt: skip


def test_packets_of_others_become_spans(tmp_path: Path) -> None:
    theirs = compile_schema("perfetto", PERFETTO)["Trace"]()
    for number, packet in enumerate(
        (
            {"track_descriptor": {"uuid": 5, "process": {"pid": 900}}},
            {"track_descriptor": {"uuid": 6, "parent_uuid": 5}},
            {"timestamp": 1000, "interned_data": {"event_names": [{"iid": 1, "name": "work"}]},
             "track_event": {"type": 1, "track_uuid": 6, "name_iid": 1}},
            {"timestamp": 1500, "track_event": {"type": 2, "track_uuid": 6}},
        )
    ):  # fmt: skip
        theirs.packet.add(sequence=7, flags=int(number == 0), **packet)
    (tmp_path / "theirs").write_bytes(theirs.SerializeToString())
    trace = read_perfetto(tmp_path / "theirs")
    assert (trace.world_size, trace.events.tables.labels, trace.events.done_ns.tolist()) == (1, ("work",), [500])


PROFILED = {
    "distributedInfo": {"rank": 0, "world_size": 2, "backend": "gloo", "pg_config": [{"ranks": [0, 1]}]},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "c10d::send", "ts": 1, "dur": 1, "tid": 1, "args": {"Concrete Inputs": ["", "", "1", "3"]}},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:send", "ts": 1.5, "dur": 2, "tid": 2,
         "args": {"Input type": ["float"], "Input Dims": [[6]]}},
        {"ph": "X", "cat": "user_annotation", "name": "mine", "ts": 0, "dur": 9, "tid": 1},
    ],
}  # fmt: skip


def test_a_file_of_the_profiler_says_what_a_rank_did(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(PROFILED))
    frame = read_profiler(tmp_path).to_pandas()[["op", "peer", "tag", "size_bytes", "post_ns", "done_ns"]].astype(object)
    assert frame.where(frame.notna(), None).to_numpy().tolist() == [["span", None, None, None, 0, 9000], ["isend", 1, 3, 24, 1000, 3500]]


LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
WRITTEN = {  # how a whole file is written, and how it is read
    "perfetto": (lambda path: small().to_perfetto(path), read_perfetto),
    "chrome": (lambda path: small().to_chrome(path), read_chrome),
    "profiler": (lambda path: path.write_text(json.dumps(PROFILED)), read_profiler),
    "goal": (lambda path: small().to_goal(path), lambda path: read_goal(path, link=LINK)),
    "chakra": (lambda path: small().to_chakra(path), lambda path: read_chakra(path, link=LINK)),
}


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_damage_gives_one_error(tmp_path: Path, data: st.DataObject, name: str) -> None:
    write, read = WRITTEN[name]
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    write(tmp_path / "run")
    file = tmp_path / "run"
    file = data.draw(st.sampled_from(sorted(file.iterdir()))) if file.is_dir() else file
    file.write_bytes(flip(file.read_bytes(), lambda low, high: data.draw(st.integers(low, high))))
    try:
        trace = read(tmp_path / "run")
    except TraceFileError as error:
        assert str(error).isprintable()  # noqa: PT017  # whether it is raised depends on the damage
    else:
        read_in_full(trace, draw=False)


def test_a_number_in_the_place_of_a_name_asks_for_no_memory(tmp_path: Path) -> None:
    theirs = compile_schema("perfetto", {**PERFETTO, "TrackEvent": "9 type int32, 23 name uint64"})["Trace"]()
    event = theirs.packet.add().track_event
    event.type, event.name = 1, 2**40  # bytes(2**40) would be a terabyte of zeros
    (tmp_path / "hostile").write_bytes(theirs.SerializeToString())
    assert read_perfetto(tmp_path / "hostile").events.tables.labels == ("",)


@pytest.mark.parametrize("name", READERS)
def test_something_else_is_refused(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(b"x" * 100, mtime=0)
    for content in (b"", b"\xff" * 30, b"{}", b"[1]", b"\x1f\x8b", b"[" * 100_000, packed[:-9]):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(TraceFileError, match="A file to import must be"):
            READERS[name](tmp_path / "other")
    with pytest.raises(TraceFileError, match="must exist"):
        READERS[name](tmp_path / "none")


SLICES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20).map(
    lambda pairs: sorted(((start, start + length) for start, length in pairs), key=lambda one: (one[0], -one[1]))
)


@given(slices=SLICES)
def test_lanes_hold_what_they_promise(slices: list[tuple[int, int]]) -> None:
    starts, ends = [start for start, _ in slices], [end for _, end in slices]
    apart, nested = place_apart(starts, ends), place_nested(starts, ends)
    for first in range(len(slices)):
        for second in range(first):
            overlap = min(ends[first], ends[second]) > max(starts[first], starts[second])
            inside = starts[second] <= starts[first] and ends[first] <= ends[second]
            assert not overlap or apart[first] != apart[second]
            assert not overlap or inside or nested[first] != nested[second]
    most = max((sum(start <= time < end for start, end in slices) for time in starts), default=0)
    assert len({lane for lane, (start, end) in zip(apart, slices, strict=True) if end > start}) <= max(most, 1) + sum(
        s == e for s, e in slices
    )


@given(slices=SLICES)
def test_slices_unfold_in_time_and_in_pairs(slices: list[tuple[int, int]]) -> None:
    lanes = place_nested([start for start, _ in slices], [end for _, end in slices])
    placed = [one for one, lane in zip(slices, lanes, strict=True) if lane == 0]
    told = list(unfold([start for start, _ in placed], [end for _, end in placed]))
    times = [placed[index][0 if begins else 1] for index, begins in told]
    assert times == sorted(times)
    stack: list[int] = []
    for index, begins in told:
        if begins:
            stack.append(index)
        else:
            assert stack.pop() == index
    assert stack == []


def back_from_goal(trace: Trace, directory: Path, link: ringsim.Link = LINK) -> Trace:
    trace.to_goal(directory / "run.goal")
    return read_goal(directory / "run.goal", link=link)


def back_from_chakra(trace: Trace, directory: Path, link: ringsim.Link = LINK) -> Trace:
    shutil.rmtree(directory / "run", ignore_errors=True)
    trace.to_chakra(directory / "run")
    return read_chakra(directory / "run", link=link)


WAYS = {"goal": back_from_goal, "chakra": back_from_chakra}


def small_program() -> Trace:
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
            WAYS[way](small_program(), tmp_path, link)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TraceFileError, match=r"named <name>.<rank>.et"):
        read_chakra(tmp_path, link=LINK)
    with pytest.raises(TraceFileError, match="must be there"):
        read_chakra(tmp_path / "none", link=LINK)
    path.write_text("num_ranks 1\n")
    with pytest.raises(TraceFileError, match="must be writable"):
        small_program().to_chakra(path)
    small_program().to_chakra(tmp_path / "run")
    with pytest.raises(TraceFileError, match="it holds files of another run"):
        small_program().to_chakra(tmp_path / "run")
