"""Files of torch.profiler become traces of runs on NCCL, on one clock; what they lack is noted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import RankProfile

import ringsim
from ringsim import Trace
from ringsim.cli import main
from ringsim.errors import TraceFileError
from ringsim.exchange import read_profiler

NCCL = Path(__file__).parent / "golden" / "nccl"
S = 1e6  # in µs


def rows(trace: Trace, *names: str) -> list[list[Any]]:
    """Returns columns of the events, with times in µs."""
    frame = trace.to_pandas()[list(names)].astype(object)
    times = [name for name in names if name.endswith("_ns")]
    frame[times] = frame[times].map(lambda time: time / 1000, na_action="ignore")
    return frame.where(frame.notna(), None).to_numpy().tolist()


def two_ranks(ahead_us: float = 0) -> list[RankProfile]:
    """Rank 1 computes until 400 and sends; rank 0 has waited from 100. Both all-reduce until 900.

    Then both exchange messages in a batch, which rank 0 reaches late.
    """
    first, second = RankProfile(0, 2), RankProfile(1, 2, ahead_us=ahead_us)
    first.recv(1, at=90, start=100, end=450)
    second.kernel(50, 60, 400)
    second.send(0, at=91, start=400, end=450)
    for profile, start in ((first, 500), (second, 880)):
        profile.call("allreduce", "0", 200, start, 900)
        profile.record("wait", "0", 210, 7)
    first.batch([("send", 1), ("recv", 1)], at=300, start=1300, end=1380)
    second.batch([("send", 0), ("recv", 0)], at=301, start=1000, end=1380)
    return [first, second]


def test_a_message_is_split_into_waiting_for_the_late_side_and_transfer(tmp_path: Path) -> None:
    for profile in two_ranks():
        profile.write(tmp_path)
    trace = ringsim.load(tmp_path)
    names = ("rank", "op", "group", "peer", "size_bytes", "post_ns", "wait_ns", "done_ns")
    assert rows(trace, *names) == [
        [0, "irecv", "world", 1, 1024, 0, 0, 350],
        [0, "all_reduce", "world", None, 1024, 400, 400, 800],
        [0, "batch_isend", "world", 1, 1024, 1200, 1200, 1280],
        [0, "batch_irecv", "world", 1, 1024, 1200, 1200, 1280],
        [1, "isend", "world", 0, 1024, 300, 300, 350],
        [1, "all_reduce", "world", None, 1024, 780, 780, 800],
        [1, "batch_isend", "world", 0, 1024, 900, 900, 1280],
        [1, "batch_irecv", "world", 0, 1024, 900, 900, 1280],
    ]
    messages = trace.to_pandas("messages")
    assert messages[["src", "dst", "late_sender_ns", "transfer_ns"]].to_numpy().tolist() == [
        [1, 0, 300_000, 50_000],
        [1, 0, 0, 80_000],
        [0, 1, 300_000, 80_000],
    ]
    assert messages["late_receiver_ns"].tolist() == [0, 300_000, 0]
    assert not trace.unmatched


def test_a_run_on_nccl_is_what_ringsim_recorded_of_it() -> None:
    """Each operation, its group, peer, size and order; and its times, which two clocks measured."""
    recorded, read = ringsim.load(NCCL / "run.ringtrace"), ringsim.load(NCCL)
    assert read.metadata["notes"][1:] == []
    _, clock = read.clocks
    assert (clock.ranks, clock.how) == ((1,), "kernels")
    shifts = []
    for rank in range(2):
        ours, theirs = (
            one[(one["rank"] == rank) & (one["kind"] != "span")]
            for one in (recorded.to_pandas(), read.to_pandas())
        )
        assert theirs["op"].tolist() == [
            {"send": "isend", "recv": "irecv"}.get(op, op) for op in ours["op"]
        ]
        for name in ("group", "peer", "tag", "size_bytes", "dtype"):
            assert theirs[name].tolist() == ours[name].tolist() or name == "tag"
        apart = np.array([theirs[name].to_numpy(float) - ours[name].to_numpy(float)
                          for name in ("wait_ns", "done_ns")])  # fmt: skip
        shifts.append(np.median(apart))
        # the recorded times are within 5 µs of the host's clock; the first kernel began early
        assert (abs(apart - shifts[-1]) < 10_000).sum() >= apart.size - 1
    assert abs(shifts[0] - shifts[1]) <= (clock.uncertainty_ns or 0)
    spans = [one.to_pandas().query("label == 'forward'") for one in (recorded, read)]
    assert [len(one) for one in spans] == [16, 8]  # ringsim has its own spans as well
    messages = [one.to_pandas("messages") for one in (recorded, read)]
    assert len(messages[0]) == len(messages[1]) == 16


@given(ahead_us=st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3))
def test_clocks_far_apart_are_aligned(
    tmp_path_factory: pytest.TempPathFactory, ahead_us: list[float]
) -> None:
    """Rank 2 shares a group with rank 1 only, so its clock is compared with that of rank 1."""
    directory = tmp_path_factory.mktemp("run")
    groups = {0: [("1", "left", [0, 1])], 2: [("2", "right", [1, 2])]}
    groups[1] = groups[0] + groups[2]
    for rank in range(3):
        profile = RankProfile(rank, 3, groups[rank], ahead_us[rank])
        for step in range(3):
            for name, _, _ in groups[rank]:
                start = 1000 * step + 10 * rank + 100 * int(name)
                profile.call(
                    "allreduce", name, start, start + 5, 1000 * step + 100 * int(name) + 80
                )
        profile.write(directory)
    trace = ringsim.load(directory)
    posts = trace.to_pandas()["post_ns"] / 1000 - [
        1000 * step + 10 * rank + 100 * int(name) - 100
        for rank in range(3) for step in range(3) for name, _, _ in groups[rank]
    ]  # fmt: skip
    assert (posts.max() - posts.min()) < 1, "within the precision of the numbers in the files"
    assert all(0 < (clock.uncertainty_ns or 0) < 200_000 for clock in trace.clocks[1:])


def test_ranks_without_a_common_collective_keep_their_clocks(tmp_path: Path) -> None:
    for rank in range(2):
        profile = RankProfile(rank, 2, ahead_us=rank * S)
        (profile.recv if rank else profile.send)(1 - rank, 0, 10, 20)
        profile.call("broadcast", "0", 30, 40, 50 + rank)  # its ends do not show the offset
        profile.write(tmp_path)
    trace = ringsim.load(tmp_path)
    assert [clock.how for clock in trace.clocks] == ["reference", "not compared"]
    assert "clocks not all compared" in str(trace)


# -- spans


def pipeline(directory: Path, text: Callable[[int, str, int], str]) -> Trace:
    """Writes two steps of GPipe on two stages, in which the programs run far ahead of the GPUs.

    A forward takes 10 ms and a backward 20 ms. Autograd launches the backwards' kernels from its
    own thread.
    """
    for rank in range(2):
        profile = RankProfile(rank, 2)
        for step in range(2):
            begin = 100_000.0 * step
            forwards = [begin + 10_000 * (rank + number) for number in range(2)]
            backwards = [begin + 30_000 + 20_000 * (1 - rank + number) for number in range(2)]
            at = begin / 100
            profile.span(f"ProfilerStep#{step + 7}", at, at + 90)
            for letter, starts, took, tid in (("F", forwards, 10e3, 7), ("B", backwards, 20e3, 8)):
                for number, start in enumerate(starts):
                    at += 10
                    profile.span(text(rank, letter, number), at, at + 8)
                    profile.kernel(at + 2, start, start + took / 2, tid=tid)
                    profile.kernel(at + 5, start + took / 2, start + took, tid=tid)
            profile.call("allreduce", "0", at + 20, begin + 95_000 + rank, begin + 96_000)
        profile.write(directory)
    return ringsim.load(directory)


def test_the_bubble_of_a_pipeline_comes_from_the_kernels(tmp_path: Path) -> None:
    trace = pipeline(tmp_path, lambda stage, letter, number: f"PP:{stage}{letter}{number}")
    frame = trace.to_pandas()
    spans = frame[(frame["kind"] == "span") & (frame["rank"] == 1)]
    assert spans["label"].tolist()[:5] == ["step 7", "forward", "forward", "backward", "backward"]
    assert spans["stage"].tolist()[1:5] == [1] * 4
    assert spans["microbatch"].tolist()[1:5] == [0, 1, 0, 1]
    bubble = trace.bubble()
    # each stage computes for 60 ms of 90 ms
    assert bubble.of_total_by_rank == pytest.approx([1 / 3, 1 / 3])
    assert trace.peak_activations().peaks == (2, 2)


def test_an_annotation_for_two_computations_and_one_for_none(tmp_path: Path) -> None:
    profile = RankProfile(0, 1)
    profile.span("ProfilerStep#0", 0, 100)
    profile.span("PP:(0F1;3B0)OVERLAP_F_B", 10, 20)
    profile.kernel(11, 200, 300)
    profile.span("PP:0SEND_F1", 30, 40)
    profile.span("loading", 50, 60)  # without kernels: it keeps its time
    profile.write(tmp_path)
    assert rows(ringsim.load(tmp_path), "label", "stage", "microbatch", "post_ns", "done_ns") == [
        ["PP:0SEND_F1", None, None, 0, 10],
        ["loading", None, None, 20, 30],
        ["step 0", None, None, 170, 270],
        ["forward", 0, 1, 170, 270],
        ["backward", 3, 0, 170, 270],
    ]


# -- groups, parts and what is lacking


def test_collectives_are_matched_by_group_and_number(tmp_path: Path) -> None:
    """The file of rank 1 begins one call later; two groups have the same ranks and description."""
    groups = [("5", "mesh_dp", [0, 1]), ("6", "mesh_dp", [0, 1])]
    for rank in range(2):
        profile = RankProfile(rank, 2, groups)
        for number in range(rank, 3):
            at = 100 * number
            profile.call("allreduce", "5", at, at + 10 + rank, at + 40, Seq=number + 3)
        profile.call("_allgather_base", "6", 50, 60, 90, Seq=1, **{"Out msg nelems": 512})
        profile.write(tmp_path)
    trace = ringsim.load(tmp_path)
    assert rows(trace, "op", "group", "size_bytes")[-3:] == [
        ["all_gather_into_tensor", "mesh_dp (6)", 2048],
        ["all_reduce", "mesh_dp", 1024],
        ["all_reduce", "mesh_dp", 1024],
    ]
    assert "left out: 1 operation that some rank called before its file begins" in str(trace)
    assert trace.clocks[1].offset_ns == 0


def test_everything_that_the_files_lack_is_noted(tmp_path: Path) -> None:
    profile, other = two_ranks()
    profile.call("send", "0", 2000, 2010, 2020)  # without a peer
    profile.send(5, 2100, 2110, 2120)
    profile.call("allreduce", "9", 2200, 2210, 2220)
    profile.call("allreduce_sparse", "0", 2300, 2310, 2320)
    profile.record("allreduce", "0", 2400, 7)
    profile.record("send", "0", 2500, 7, **{"Dst Rank": 1})
    profile.kernel(2600, 2610, 2620, "ncclDevKernel_Broadcast(args)")
    for one in (profile, other):
        one.write(tmp_path)
    trace = ringsim.load(tmp_path)
    assert trace.metadata["notes"][1:] == [
        "left out: 2 operations whose peer is missing in the file, or not in the group",
        "left out: 1 operation on groups that the file does not list",
        "left out: 1 operation of unknown kind (allreduce_sparse)",
        "left out: 2 operations without a kernel in the file",
        "left out: 1 operation of which the file has only the kernel",
    ]
    assert len(trace) == 8
    assert not trace.unmatched


def test_a_call_within_a_call_is_part_of_it(tmp_path: Path) -> None:
    """Torch gathers tensors of different sizes by broadcasts in a batch."""
    profile = RankProfile(0, 1)
    profile.add("cpu_op", "record_param_comms", 0, 20, 7, **{
        "Collective name": "all_gather", "In msg nelems": 2, "Out msg nelems": 4, "dtype": "Half",
        "Process Group Name": "0"})  # fmt: skip
    profile.record("_broadcast_oop", "0", 2, 7)
    profile.span("nccl:coalesced", 8, 12)
    profile.kernel(9, 30, 40, "ncclKernel_Broadcast")
    profile.write(tmp_path)
    trace = ringsim.load(tmp_path)
    assert rows(trace, "op", "size_bytes", "post_ns", "done_ns") == [["all_gather", 8, 0, 10]]
    assert len(trace.metadata["notes"]) == 1


def test_ranks_without_a_file_are_left_out(tmp_path: Path) -> None:
    path = two_ranks()[0].write(tmp_path)
    trace = ringsim.load(path)
    assert trace.world_size == 2
    assert "no file from rank 1" in trace.metadata["notes"]
    assert not trace.unmatched, "the other side of each operation was left out"
    assert "4 operations whose other side is left out" in str(trace)


def test_a_directory_is_one_run_and_a_list_is_several(tmp_path: Path) -> None:
    for profile in two_ranks():
        packed = profile.write(tmp_path)
        packed.with_name(f"{packed.name}.gz").write_bytes(gzip.compress(packed.read_bytes()))
        packed.unlink()
    whole = ringsim.load(f"{tmp_path}/")
    assert len(whole) == 8
    assert read_profiler(sorted(tmp_path.iterdir())) == whole
    assert list(map(len, ringsim.load([tmp_path, NCCL / "run.ringtrace"]))) == [8, 64]
    assert len(ringsim.load(tmp_path, ranks=0)) == 4
    assert len(ringsim.load(tmp_path, between_s=(0, 500e-6))) == 3


def test_the_command_line_reads_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline(tmp_path, "PP:{}{}{}".format)
    assert main(["show", str(tmp_path)]) == 0
    assert "Trace of 2 ranks (measured, nccl)" in capsys.readouterr().out
    assert main(["explain", str(tmp_path)]) == 0
    page = tmp_path.parent / "page.html"
    assert main(["open", str(tmp_path), "--no-browser", "-o", str(page)]) == 0
    assert page.stat().st_size


# -- damaged and hostile files


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    first, second = (profile.write(tmp_path) for profile in two_ranks())
    whole = second.read_bytes()
    for content in (whole[:-50], b"", gzip.compress(whole)[:-20]):
        second.write_bytes(content)
        with pytest.raises(TraceFileError, match=r"cannot (read|import) .*rank1_trace.json"):
            ringsim.load(tmp_path)
    document = json.loads(whole)
    document["distributedInfo"]["backend"] = "xccl"
    document["distributedInfo"]["pg_config"] = []
    second.write_text(json.dumps(document))
    with pytest.raises(TraceFileError, match="backend 'xccl', but ringsim reads only profiles of"):
        ringsim.load(tmp_path)
    document["distributedInfo"]["backend"] = "gloo"
    second.write_text(json.dumps(document))
    with pytest.raises(TraceFileError, match="some of the ranks used Gloo and some used NCCL"):
        ringsim.load(tmp_path)
    second.write_text('{"traceEvents": []}')
    with pytest.raises(TraceFileError, match=r"names no rank.*ringsim.exchange.read_chrome"):
        ringsim.load(second)
    second.write_bytes(first.read_bytes())
    with pytest.raises(TraceFileError, match="two files are from rank 0"):
        ringsim.load(tmp_path)


HOSTILE = st.sampled_from(
    (
        None,
        True,
        -1,
        2**70,
        1e300,
        "x",
        "9" * 5000,
        [],
        {},
        [[1]],
        {"correlation": []},
        "PP:1F99999",
    )
)


@given(st.data())
def test_a_hostile_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    profile = two_ranks()[0]
    profile.span("PP:0F0", 1, 2)
    events = profile.document["traceEvents"]
    places = [*events, *(event["args"] for event in events), profile.document["distributedInfo"],
              *profile.document["distributedInfo"]["pg_config"]]  # fmt: skip
    for place in data.draw(st.lists(st.sampled_from(range(len(places))), min_size=1, max_size=3)):
        if places[place]:
            key = data.draw(st.sampled_from(sorted(places[place])))
            places[place][key] = data.draw(HOSTILE)
    path = profile.write(tmp_path_factory.mktemp("run"))
    try:
        trace = ringsim.load(path)
    except TraceFileError:
        return
    assert isinstance(trace.to_pandas(), pd.DataFrame)
    assert str(trace)
