"""The log of ``ringsim.comm`` on real and simulated ranks.

The tests cover selecting, starting, stopping, sharing the recorder, and the table on every rank.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from rank_server import RankServer, results

import ringsim
from ringsim import comm as dist
from ringsim.comm import log


def counts(table: Any) -> dict[str, int]:
    return {row.name: row.count for row in table.rows}


def private_directories(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith("ringsim-log")]


# -- within a run, on both clocks

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
COUNTED = ("name", "op", "size_bytes", "group_size", "count", "first_count", "in_flight", "failed")


def row_keys(table: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(getattr(row, name) for name in COUNTED) for row in table.rows)


@dist.timed_op
def swap(tensor: torch.Tensor, group: Any = None) -> Any:
    """Runs the user's own collective, and returns a handle."""
    other = 1 - dist.get_rank()
    sent = dist.isend(tensor.clone(), other, group=group)
    received = dist.irecv(tensor, other, group=group)
    sent.wait()
    return received


def train() -> list[Any]:
    """Logs in all possible ways; returns the rows of three logs."""
    rank, tensor = ringsim.current_ring().rank, torch.ones(1000)
    dist.all_reduce(tensor)  # not yet
    dist.configure(enabled=True)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="gradients")
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    swap(tensor).wait()
    left = dist.irecv(torch.zeros(3), 1 - rank)  # is never sent
    found = [dist.log_summary()]
    # In DeepSpeed 0.19.8, prof_ops only matches a log_name, and a positional prof is ignored.
    dist.configure(prof_all=False, prof_ops=["barrier", "by name"])
    dist.barrier()
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="by name")
    dist.broadcast(tensor, 0, prof=True)
    found.append(dist.log_summary())
    dist.reset_log()
    dist.barrier()
    dist.configure(enabled=False)
    dist.barrier()
    found.append(dist.log_summary())
    dist.send(torch.zeros(3), 1) if rank == 0 else left.wait()
    left.wait() if rank == 0 else dist.send(torch.zeros(3), 0)
    return [row_keys(table) for table in found]


@pytest.mark.usefixtures("nothing_left_behind")
def test_the_rows_of_simulated_ranks_are_those_of_a_real_run() -> None:
    real = ringsim.trace(train, world_size=2)
    virtual = ringsim.simulate(train, world_size=2, link=LINK)
    assert virtual.results == real.results
    first, second, third = real.results[0]
    assert {(row[0], row[4]) for row in first} >= {("all_reduce", 3), ("gradients", 1), ("swap", 1)}
    new = {row[0] for row in second} - {row[0] for row in first}
    assert new == {"barrier", "by name", "broadcast"}
    assert [(row[0], row[4]) for row in third] == [("barrier", 1)]
    for trace in (real, virtual):
        assert [text.count("Communication of 2 ranks") for text in trace.output] == [3, 0]


class Told(logging.Handler):
    """A handler that keeps the lines logged by the calling rank from now on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rank, self.lines = dist.get_rank(), list[str]()
        logger = logging.getLogger("ringsim.comm")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if dist.get_rank() == self.rank:
            self.lines.append(record.getMessage())


def reduce_and_pass() -> tuple[list[str], tuple[float, float, int]]:
    told = Told()
    dist.configure(enabled=True)
    for _ in range(5):
        dist.all_reduce(torch.zeros(500))
    (row,) = dist.log_summary().rows
    count = dist.get_comm_operation_count()
    dist.configure(verbose=True, debug=True)
    dist.all_reduce(torch.zeros(500), log_name="gradients")
    dist.isend(torch.zeros(1), 1).wait() if dist.get_rank() == 0 else dist.recv(torch.zeros(1), 0)
    return told.lines, (row.median_us, row.algbw_gb_per_s, count)


def test_times_are_the_formulas_and_a_verbose_log_writes_lines() -> None:
    results = ringsim.simulate(reduce_and_pass, world_size=2, link=LINK).results
    took_us = 2 * (1000 + 1000)  # two steps of 1 ms and 1,000 bytes
    expected = took_us, pytest.approx(2000 / took_us * 1e-3), 5
    assert [found for _, found in results] == [expected] * 2
    lines = [line for told, _ in results for line in told]
    reduced = "gradients in reduce_and_pass: all_reduce, world, 1.95 KiB, 4 ms, algbw "
    assert sum(line.startswith(reduced) for line in lines) == 2
    # A log that waited for the send would never run its receiver.
    posted = "isend in reduce_and_pass: isend, world, 4 B, posted"
    assert sum(line.startswith(posted) for line in lines) == 1
    assert len(lines) == 4


def log_as_deepspeed_does() -> list[str]:
    told = Told()
    dist.configure(
        {"comms_logger": {"enabled": True, "verbose": True, "debug": True, "style": "deepspeed"}}
    )
    for _ in range(2):
        dist.all_reduce(torch.zeros(1000))
    dist.barrier(log_name="end")
    dist.log_summary(show_straggler=True)
    dist.configure({"comms_logger": {"style": "ringsim"}}, debug=False)
    dist.all_reduce(torch.zeros(1))
    dist.log_summary()
    return told.lines


def test_the_log_is_written_as_deepspeed_does_where_that_is_asked() -> None:
    trace = ringsim.simulate(log_as_deepspeed_does, world_size=2, link=LINK)
    printed = [line.split() for line in trace.output[0].splitlines()]
    line = (
        "[Rank 0] comm op: {} | [Caller Func: log_as_deepspeed_does] | time (ms): {} | msg size: "
        "{} | algbw (Gbps): {} | busbw (Gbps): {}"
    )
    # two steps of 1 ms and 2,000 bytes
    reduced = line.format("all_reduce", "6.00", "3.91 KB", "0.0053", "0.0053")
    ended = line.format("end", "1.00", "0B", "-", "-")
    last = "all_reduce, world, 4 B, 2 ms, algbw 2 kB/s, busbw 2 kB/s"  # of each rank
    assert trace.results == [[reduced, reduced, ended, last], [last]]
    name = ["|", "[Caller", "Func:", "log_as_deepspeed_does]"]
    head = ["Comm.", "Op", "Message", "Size", "Count", "Total"]
    first, second = (number for number, words in enumerate(printed) if words[:6] == head)
    rows = [
        ["all_reduce", *name],
        ["3.91", "KB", "2", "12.00", "6.00", "0.0053", "0.0053"],
        ["end", *name],
        ["0B", "1", "1.00", "1.00", "-", "-"],
    ]
    assert printed[first + 1 : second - 3] == rows
    assert printed[second + 1 : second + 3] == [
        ["all_reduce", *name],
        ["3.91", "KB", "2", "12.00", "0.00", "6.00", "0.00"],
    ]
    # never 0.000 GB/s
    assert [words[-4:] for words in printed if words[:3] == ["all_reduce", "4", "B"]] == [
        ["2", "kB/s", "2", "kB/s"]
    ]


# -- in a job of two ranks, one part after the other


def toggling(directory: str, rank: int) -> Any:
    tensor, other = torch.ones(8), 1 - rank
    methods = dict(vars(torch_dist.ProcessGroup))
    dist.configure(enabled=True)
    work = dist.all_reduce(tensor, async_op=True)
    dist.configure(enabled=False)  # in the middle of an operation
    stopped = dict(vars(torch_dist.ProcessGroup)) == methods
    work.wait()
    message = dist.isend(tensor, other), dist.irecv(torch.empty(8), other)
    dist.configure(enabled=True)
    for each in message:
        each.wait()
    dist.all_reduce(tensor, log_name="later")
    dist.configure(enabled=False)
    before = dist.log_summary()
    dist.configure(enabled=True)
    dist.reset_log()
    dist.barrier()
    after = dist.log_summary()
    # after a stop or a reset, operations do not count as first ones again
    firsts = [row.first_count for table in (before, after) for row in table.rows]
    return [stopped, counts(before), counts(after), firsts, float(tensor.sum())]


def around_a_recording(directory: str, rank: int) -> Any:
    dist.configure(enabled=True)
    dist.barrier()
    with ringsim.trace(f"{directory}/run.ringtrace") as recording:
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    table = dist.log_summary()
    return counts(table), recording.trace.to_pandas()["op"].tolist() if rank == 0 else None


def one_stays_away(directory: str, rank: int) -> Any:
    dist.configure(enabled=True)
    dist.barrier()
    if rank == 1:
        return None
    dist.configure(enabled=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_WAIT_S", 1.0)
        table = dist.log_summary()
    return counts(table), table.ranks, table.notes


# -- in a job of three ranks


def everywhere(directory: str, rank: int) -> Any:
    pair = torch_dist.new_group([0, 2])
    dist.configure(enabled=True)
    for _ in range(3):
        dist.all_reduce(torch.ones(1024))
        if rank != 1:
            dist.all_reduce(torch.ones(1024), group=pair)
    data = dist.log_summary(show_straggler=True, return_dict=True)
    table = dist.log_summary()
    return data, table.to_pandas()[["name", "group_size", "count", "first_count"]].values.tolist()


PARTS: dict[int, tuple[Callable[[str, int], Any], ...]] = {
    2: (toggling, around_a_recording, one_stays_away),
    3: (everywhere,),
}


def do_all(directory: str, rank: int, size: int) -> dict[str, Any]:
    tempfile.tempdir = directory
    torch.set_num_threads(1)
    store = torch_dist.FileStore(f"{directory}/store", size)
    limit = timedelta(seconds=30)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    found = {}
    for part in PARTS[size]:
        found[part.__name__] = part(directory, rank)
        dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
        dist.reset_log()
    torch_dist.destroy_process_group()
    return found


EXPECTED = {
    # DeepSpeed 0.19.8 fails with unbound names if the log is switched while an operation runs.
    "toggling": [[True, {"all_reduce": 1, "later": 1}, {"barrier": 1}, [2, 0, 0], 32.0]] * 2,
    # One recorder serves both.
    "around_a_recording": [
        ({"all_reduce": 1, "barrier": 2}, ops) for ops in (["all_reduce", "all_reduce"], None)
    ],
    # DeepSpeed 0.19.8 begins its summary with a barrier on the group whose operations it reports.
    "one_stays_away": [
        ({"barrier": 1}, (0,), ("rank 1 did not call log_summary within 1 s of rank 0",)),
        None,
    ],
}


def test_each_rank_finds_what_was_logged(tmp_path_factory: pytest.TempPathFactory) -> None:
    found: dict[str, list[Any]] = {}  # the result of each part, in rank order
    with RankServer() as server:
        for size in PARTS:
            directory = str(tmp_path_factory.mktemp("log"))
            ended = results(server.run(do_all, [(directory, rank, size) for rank in range(size)]))
            found |= {name: [each[name] for each in ended] for name in ended[0]}
            assert private_directories(directory) == []
    assert {part: found[part] for part in EXPECTED} == EXPECTED
    data, rows = found["everywhere"][0]
    # rank 1 has logged less than the others
    assert rows == [["all_reduce", 2, 3, 2], ["all_reduce", 3, 3, 3]]
    for other, other_rows in found["everywhere"]:
        assert repr(other) == repr(data)
        assert other_rows == rows
    pair, world = data["summary"]["all_reduce"][4096]
    assert world["busbw_gb_per_s"] == pytest.approx(world["algbw_gb_per_s"] * 4 / 3)
    assert pair["busbw_gb_per_s"] == pytest.approx(pair["algbw_gb_per_s"])
    assert world["straggler_mean_us"] >= 0
