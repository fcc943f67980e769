"""The log of ``ringsim.comm`` on real ranks: selecting, starting, stopping, sharing the recorder, and the table on every rank."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from hidden import Hiding
from rank_server import RankServer, results

import ringsim
from ringsim import comm as dist
from ringsim.comm import log
from ringsim.state import get_state

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as running:
        yield running


def join(directory: str, rank: int, size: int) -> None:
    tempfile.tempdir = directory
    torch.set_num_threads(1)
    store = torch_dist.FileStore(f"{directory}/store", size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))


def run(server: RankServer, function: Any, directory: Path, size: int = 2) -> list[Any]:
    return results(server.run(function, [(str(directory), rank, size) for rank in range(size)], limit_s=60))


def private_directories(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith("ringsim-log")]


def counts(table: Any) -> dict[str, int]:
    return {row.name: row.count for row in table.rows}


def selecting(directory: str, rank: int, size: int) -> list[dict[str, int]]:
    join(directory, rank, size)
    tensor, found = torch.ones(8), []

    def work() -> None:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, log_name="gradients")
        dist.broadcast(tensor, 0)
        dist.broadcast(tensor, 0, prof=True)
        dist.barrier()
        torch_dist.reduce(tensor, 0)  # behind ringsim.comm's back

    for settings in ({"prof_all": True}, {"prof_all": False}, {"prof_ops": ["all_reduce"]}, {"prof_ops": ("gradients",)}):
        dist.configure(enabled=True, **settings)
        work()
        found.append(counts(dist.log_summary()))
        dist.reset_log()
    dist.configure(enabled=False)
    work()
    found.append(counts(dist.log_summary()))
    torch_dist.destroy_process_group()
    return found


def test_what_is_selected_is_logged(server: RankServer, tmp_path: Path) -> None:
    # DeepSpeed 0.19.8: prof_ops matches a log_name only, and prof given by position is passed over.
    for found in run(server, selecting, tmp_path):
        everything, only_asked, by_operation, by_name, off = found
        assert everything == {"all_reduce": 1, "gradients": 1, "broadcast": 2, "barrier": 1, "reduce": 1}
        assert only_asked == {"broadcast": 1}
        assert by_operation == {"all_reduce": 1, "gradients": 1, "broadcast": 1}
        assert by_name == {"gradients": 1, "broadcast": 1}
        assert off == {}
    assert private_directories(tmp_path) == []


def toggling(directory: str, rank: int, size: int) -> list[Any]:
    join(directory, rank, size)
    tensor, other = torch.ones(8), 1 - rank
    methods = dict(vars(torch_dist.ProcessGroup))
    dist.configure(enabled=True)
    work = dist.all_reduce(tensor, async_op=True)
    dist.configure(enabled=False)  # in the middle of an operation
    stopped = dict(vars(torch_dist.ProcessGroup)) == methods and get_state().log is None
    work.wait()
    message = dist.isend(tensor, other), dist.irecv(torch.empty(8), other)
    dist.configure(enabled=True)
    for each in message:
        each.wait()
    dist.all_reduce(tensor, log_name="later")
    dist.configure(enabled=False)
    before = counts(dist.log_summary())
    dist.configure(enabled=True)
    dist.reset_log()
    dist.barrier()
    after = counts(dist.log_summary())
    torch_dist.destroy_process_group()
    return [stopped, before, after, float(tensor.sum())]


def test_starting_and_stopping_in_the_middle_is_harmless(server: RankServer, tmp_path: Path) -> None:
    # DeepSpeed 0.19.8 fails with unbound names when the log is switched while an operation runs.
    assert run(server, toggling, tmp_path) == [[True, {"all_reduce": 1, "later": 1}, {"barrier": 1}, 32.0]] * 2


def everywhere(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)
    pair = torch_dist.new_group([0, 2])
    dist.configure(enabled=True)
    for _ in range(3):
        dist.all_reduce(torch.ones(1024))
        if rank != 1:
            dist.all_reduce(torch.ones(1024), group=pair)
    data = dist.log_summary(show_straggler=True, return_dict=True)
    table = dist.log_summary()
    torch_dist.destroy_process_group()
    return data, table.to_pandas()[["name", "group_size", "count", "first_count"]].values.tolist()


def test_every_rank_gets_the_data(server: RankServer, tmp_path: Path) -> None:
    found = run(server, everywhere, tmp_path, size=3)
    data, rows = found[0]
    assert rows == [["all_reduce", 2, 3, 2], ["all_reduce", 3, 3, 3]]
    for other, other_rows in found:
        assert repr(other) == repr(data)
        assert other_rows == rows
    pair, world = data["summary"]["all_reduce"][4096]
    assert world["busbw_gb_per_s"] == pytest.approx(world["algbw_gb_per_s"] * 4 / 3)
    assert pair["busbw_gb_per_s"] == pytest.approx(pair["algbw_gb_per_s"])
    assert world["straggler_mean_us"] >= 0


def different_counts(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)
    dist.configure(enabled=True)
    for _ in range(5):
        if rank == 0:
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            dist.recv(torch.ones(2), 0)
    table = dist.log_summary(show_straggler=True)
    torch_dist.destroy_process_group()
    return counts(table)


def test_ranks_may_have_logged_different_things(server: RankServer, tmp_path: Path) -> None:
    assert run(server, different_counts, tmp_path, size=3) == [{"send": 5, "recv": 5}] * 3


def one_stays_away(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)
    dist.configure(enabled=True)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return None
    dist.configure(enabled=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_WAIT_S", 1.0)
        table = dist.log_summary()
    return counts(table), table.ranks, table.notes


def test_a_rank_that_hangs_does_not_take_the_log_with_it(server: RankServer, tmp_path: Path) -> None:
    # DeepSpeed 0.19.8 begins its summary with a barrier on the group whose operations it reports.
    found, nothing = run(server, one_stays_away, tmp_path)
    assert nothing is None
    assert found == ({"barrier": 1}, (0,), ("ranks [1] had not called log_summary 1 s after rank 0",))


def not_blocked(directory: str, rank: int, size: int) -> float:
    join(directory, rank, size)
    store = torch_dist.distributed_c10d._get_default_store()
    dist.configure(enabled=True, verbose=True)
    tensor = torch.full((4,), float(rank))
    if rank == 0:
        work = dist.isend(tensor, 1, log_name="early")
        store.set("posted", "")  # rank 1 comes to receive after this only
        work.wait()
    else:
        store.wait(["posted"], timedelta(seconds=30))
        dist.recv(tensor, 0)
    dist.configure(enabled=False)
    torch_dist.destroy_process_group()
    return float(tensor.sum())


def test_the_log_blocks_no_asynchronous_operation(server: RankServer, tmp_path: Path) -> None:
    # Gloo's send waits for its receiver: a log that waited for the send would never get to the next line.
    assert run(server, not_blocked, tmp_path) == [0.0, 0.0]


def on_another_backend(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)
    dist.set_backend(Hiding("all_to_all"))
    dist.configure(enabled=True)
    dist.all_reduce(torch.ones(8))
    dist.barrier(log_name="meeting")
    tables = [dist.log_summary() for _ in range(2)]
    dist.configure(enabled=False)
    dist.set_backend("torch")
    torch_dist.destroy_process_group()
    return [counts(table) for table in tables]


def test_a_backend_without_a_store_gathers_the_log_and_leaves_that_out(server: RankServer, tmp_path: Path) -> None:
    assert run(server, on_another_backend, tmp_path) == [[{"all_reduce": 1, "meeting": 1}] * 2] * 2


def writing(directory: str, rank: int, size: int) -> list[str]:
    join(directory, rank, size)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("ringsim.comm")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    dist.configure(enabled=True, verbose=True, debug=True)
    dist.all_reduce(torch.ones(1024))
    dist.all_reduce(torch.ones(2), async_op=True, log_name="late").wait()
    torch_dist.destroy_process_group()
    return lines


def test_verbose_writes_a_line_for_each_operation(server: RankServer, tmp_path: Path) -> None:
    for lines in run(server, writing, tmp_path):
        done, posted = lines
        assert done.startswith("all_reduce in writing: all_reduce, world, 4 KiB, ")
        assert "algbw" in done
        assert posted == "late in writing: all_reduce, world, 8 B, posted"


def own_collectives(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)

    @dist.timed_op
    def swap(tensor: torch.Tensor, other: int, async_op: bool = False) -> Any:
        """Exchanges a tensor."""
        works = [dist.isend(tensor.clone(), other), dist.irecv(tensor, other)]
        return works[1] if async_op else [work.wait() for work in works]

    @dist.timed_op
    def total(tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, async_op=True)

    dist.configure(enabled=True, prof_all=False, prof_ops=["swap", "total"])
    swap(torch.ones(4), 1 - rank)
    swap(tensor=torch.ones(4), other=1 - rank)
    work = total(torch.ones(4))
    time.sleep(0.05)
    work.wait()
    with pytest.raises(TypeError):
        swap()  # type: ignore[call-arg]
    table = dist.log_summary()
    rows = [(row.name, row.op, row.size_bytes, row.group_size, row.count, row.in_flight) for row in table.rows]
    (span,) = [row for row in table.rows if (row.name, row.op) == ("total", "span")]
    torch_dist.destroy_process_group()
    return rows, span.first_mean_us > 50_000, swap.__name__, swap.__doc__


def test_timed_op_logs_functions_of_ones_own(server: RankServer, tmp_path: Path) -> None:
    for rows, waited, name, doc in run(server, own_collectives, tmp_path):
        assert rows == [
            ("swap", "irecv", 16, 2, 4, 0),
            ("swap", "isend", 16, 2, 4, 0),
            ("swap", "span", 16, 2, 2, 0),
            ("total", "all_reduce", 16, 2, 1, 0),
            ("total", "span", 16, 2, 1, 0),
        ]
        assert waited  # done when it has been waited for, not when it was posted
        assert (name, doc) == ("swap", "Exchanges a tensor.")


def around_a_recording(directory: str, rank: int, size: int) -> Any:
    join(directory, rank, size)
    dist.configure(enabled=True)
    dist.barrier()
    with ringsim.trace(f"{directory}/run.ringtrace") as recording:
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    table = dist.log_summary()
    dist.configure(enabled=False)
    torch_dist.destroy_process_group()
    return counts(table), [str(op) for op in recording.trace.to_pandas()["op"]] if rank == 0 else None


def test_a_recorded_block_and_the_log_share_one_recorder(server: RankServer, tmp_path: Path) -> None:
    first, second = run(server, around_a_recording, tmp_path)
    assert first == ({"all_reduce": 1, "barrier": 2}, ["all_reduce", "all_reduce"])
    assert second[0] == first[0]
    assert private_directories(tmp_path) == []


def within_a_run() -> Any:
    dist.barrier()
    dist.configure(enabled=True)
    for _ in range(2):
        dist.all_reduce(torch.ones(2), log_name="gradients")
    return counts(dist.log_summary())


def test_within_a_run_the_log_shares_its_recorder() -> None:
    trace = ringsim.trace(within_a_run, world_size=2)
    assert trace.results == [{"gradients": 2}] * 2
    assert "gradients" in trace.output[0]
    assert trace.output[1] == ""
    assert [str(label) for label in trace.to_pandas()["label"].dropna()] == ["gradients"] * 4


def forking(directory: str, rank: int, size: int) -> int:
    join(directory, rank, size)
    dist.configure(enabled=True)
    child = os.fork()
    if not child:
        dist.configure(enabled=False)
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    count = dist.get_comm_operation_count()
    dist.configure(enabled=False)
    torch_dist.destroy_process_group()
    return count


def test_a_forked_process_leaves_the_records_alone(server: RankServer, tmp_path: Path) -> None:
    assert run(server, forking, tmp_path, size=1) == [1]
    assert private_directories(tmp_path) == []


def test_a_log_that_was_never_stopped_leaves_nothing(tmp_path: Path) -> None:
    script = "from ringsim import comm; comm.configure(enabled=True); import os; print(os.listdir(os.environ['TMPDIR'])[0])"
    shown = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert shown.startswith("ringsim-log-")
    assert private_directories(tmp_path) == []
