"""The log of communication: its sums, and the end of the record of a user's own operation."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from fake_rank import fake_world, recorded

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError

# a message of 1,000 bytes takes a millisecond and another one
LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
TOOK_US = 2000.0
RANKS = 4


def log_of(program: Callable[[], Any], **options: Any) -> Any:
    """Returns the log table of a simulated program."""

    def worker() -> Any:
        dist.configure(enabled=True, **options)
        program()
        dist.configure(enabled=False)
        return dist.log_summary(show_straggler=True)

    return ringsim.simulate(worker, world_size=RANKS, link=LINK).results[0]


def rows_of(program: Callable[[], Any], **options: Any) -> dict[str, Any]:
    return {row.name: row for row in log_of(program, **options).rows}


def pass_on(*late_us: float) -> None:
    """Sends 1,000 bytes from rank 1 to rank 3 for each of the receiver's delays."""
    tensor = torch.zeros(1000, dtype=torch.uint8)
    for each in late_us:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(tensor, 3)
        elif dist.get_rank() == 3:
            ringsim.compute(each * 1e-6)
            dist.recv(tensor, 1)


SOME = [11, 13, 17, 19, 23, 29, 400]


def test_each_operation_counts_its_own_time_and_first_ones_are_kept_apart() -> None:
    """DeepSpeed 0.19.8 never resets its timer, so each time includes all earlier ones."""
    rows = rows_of(lambda: pass_on(700, *SOME))
    send, recv, times = rows["send"], rows["recv"], [TOOK_US + late for late in SOME]
    assert (send.count, send.first_count, send.size_bytes, send.group_size) == (8, 1, 1000, RANKS)
    assert send.first_mean_us == pytest.approx(TOOK_US + 700)
    assert send.total_us == pytest.approx(TOOK_US + 700 + sum(times))
    assert send.mean_us == pytest.approx(np.mean(times))
    assert [send.p10_us, send.median_us, send.p90_us] == pytest.approx(
        np.percentile(times, [10, 50, 90]).tolist()
    )
    assert send.straggler_mean_us == pytest.approx(np.mean(SOME))
    assert send.algbw_gb_per_s == pytest.approx(1000e-3 / (TOOK_US + 19))
    assert (recv.mean_us, recv.p90_us, recv.straggler_mean_us) == pytest.approx(
        (TOOK_US, TOOK_US, 0)
    )


def test_only_first_operations_leave_no_steady_state() -> None:
    table = log_of(lambda: pass_on(0))
    (row,) = (row for row in table.rows if row.name == "send")
    assert row.first_mean_us == pytest.approx(TOOK_US)
    assert math.isnan(row.mean_us)
    assert math.isnan(row.algbw_gb_per_s)
    (line,) = (line for line in str(table).splitlines() if line.startswith("send"))
    assert line.split()[-3:] == ["-", "-", "-"]


def test_a_simulated_log_waits_for_no_rank_in_real_time() -> None:
    """Rank 0 must give way to the others, which read its table."""

    def took_s(run: Callable[[], Any]) -> float:  # other programs may slow down one of the runs
        times = []
        for _ in range(3):
            began_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - began_s)
        return min(times)

    def plain() -> Any:
        return ringsim.simulate(pass_on, world_size=RANKS, link=LINK)

    plain()  # the first simulation also loads torch
    assert took_s(lambda: log_of(pass_on)) < 20 * took_s(plain)


def reduce_sooner() -> None:
    tensor = torch.zeros(1000, dtype=torch.uint8)
    for _ in range(2):
        dist.barrier()
        if dist.get_rank() == 1:
            work = dist.isend(tensor, 3)
            ringsim.compute(0.8 * TOOK_US * 1e-6)
            work.wait()
        elif dist.get_rank() == 3:
            dist.recv(tensor, 1)


def test_an_asynchronous_operation_keeps_post_wait_and_done_apart() -> None:
    """DeepSpeed 0.19.8 only times the post, on the CPU."""
    table = log_of(reduce_sooner)
    (row,) = (row for row in table.rows if row.name == "isend")
    found = row.mean_us, row.overlap_mean_us, row.blocked_mean_us
    assert found == pytest.approx((TOOK_US, 0.8 * TOOK_US, 0.2 * TOOK_US))
    assert row.lower_bound
    assert ">= 500 kB/s" in str(table)


@dist.timed_op
def mine(tensor: torch.Tensor, fails: bool = False) -> None:
    ringsim.compute(1e-3)
    if fails:
        raise KeyError


def use_many_names() -> None:
    tensor, words = torch.zeros(250), [None] * RANKS
    pair = dist.new_group([1, 3])
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="all_reduce")  # its own name adds no information
    dist.all_reduce(torch.zeros(1000))
    dist.all_reduce(tensor, log_name="gradients")
    if dist.get_rank() in (1, 3):
        dist.all_reduce(tensor, group=pair)
    for _ in range(2):
        dist.reduce_scatter_tensor(torch.zeros(250), torch.zeros(1000))
    # DeepSpeed 0.19.8 ends the process if its table lacks an operation
    dist.all_gather_object(words, 1)
    dist.monitored_barrier()
    with ringsim.span("no operation"):
        ringsim.mark("nor this")
    mine(tensor)
    mine(tensor)
    with contextlib.suppress(KeyError):
        mine(tensor, fails=True)


def test_rows_are_by_name_operation_group_size_and_size() -> None:
    rows = log_of(use_many_names).rows
    keys = {(row.name, row.op, row.group_size, row.size_bytes): row for row in rows}
    assert {key: row.count for key, row in keys.items() if key[1] == "all_reduce"} == {
        ("all_reduce", "all_reduce", 2, 1000): 1,
        ("all_reduce", "all_reduce", 4, 1000): 2,
        ("all_reduce", "all_reduce", 4, 4000): 1,
        ("gradients", "all_reduce", 4, 1000): 1,
    }
    assert [key[:2] for key in keys] == sorted(key[:2] for key in keys)
    # DeepSpeed 0.19.8 takes the full input and multiplies it by the number of ranks
    scattered = keys["reduce_scatter_tensor", "reduce_scatter_tensor", 4, 4000]
    assert scattered.busbw_gb_per_s == pytest.approx(scattered.algbw_gb_per_s * 3 / 4)
    own = keys["mine", "span", 4, 1000]
    assert (own.count, own.failed, own.in_flight) == (3, RANKS, 0)
    assert own.straggler_mean_us == pytest.approx(0)
    assert {"monitored_barrier", "all_gather_object"} <= {row.name for row in rows}
    assert not {"no operation", "nor this"} & {row.name for row in rows}


LATE_US = [0, 20, 60, 40]


def meet_late() -> None:
    rank, tensor = dist.get_rank(), torch.zeros(3)
    dist.barrier()  # warms up
    ringsim.compute(LATE_US[rank] * 1e-6)
    dist.barrier(prof=True)
    # DeepSpeed 0.19.8 reduces the list of records over all ranks, and hangs or fails if the lists
    # differ in length
    dist.broadcast(tensor, 0, prof=rank == 0)


def test_straggler_time_is_the_wait_for_the_last_rank() -> None:
    rows = rows_of(meet_late, prof_all=False)
    assert rows["barrier"].straggler_mean_us == pytest.approx(30)  # 60, 40, 0 and 20
    assert math.isnan(rows["broadcast"].straggler_mean_us)


def test_the_table_in_pandas_and_an_empty_one_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    frame = log_of(lambda: pass_on(0, 0)).to_pandas().set_index("name")
    assert frame.loc["send", ["count", "mean_us"]].tolist() == [2, pytest.approx(TOOK_US)]
    capsys.readouterr()
    empty = dist.log_summary()
    assert capsys.readouterr().out == f"{empty}\n"
    assert "nothing was logged" in str(empty)
    assert list(empty.to_pandas().set_index("name")) == list(frame)
    assert empty.to_dict()["summary"] == {}


# -- settings


class Section:  # like DeepSpeed's own objects
    enabled, prof_all, prof_ops, verbose, debug = True, False, ("all_reduce",), False, True


DEEPSPEED = SimpleNamespace(comms_config=SimpleNamespace(comms_logger=Section()))
SECTION = {"comms_logger": {"enabled": True, "prof_ops": ["barrier"]}, "train_batch_size": 8}


@pytest.fixture
def stopped() -> Iterator[None]:
    yield
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()


@pytest.mark.parametrize(
    ("config", "arguments", "names"),
    [
        (SECTION, {"prof_all": False}, ["barrier"]),
        (DEEPSPEED, {}, ["all_reduce in test_settings_come_from_arguments_or_a_configuration"]),
        (DEEPSPEED, {"debug": False, "prof_ops": ["barrier"]}, ["barrier"]),
        (object(), {"enabled": True}, ["all_reduce", "barrier"]),
        (None, {"enabled": "yes"}, "enabled must be True or False, got 'yes'"),
        (None, {"prof_ops": "barrier"}, "prof_ops must be a list of names, got 'barrier'"),
        (None, {"prof_ops": [1]}, "prof_ops must be a list of names"),
        ({"comms_logger": {"style": "pigeon"}}, {}, 'style must be "ringsim" or "deepspeed"'),
        ({"comms_logger": {"debug": 1}}, {}, "debug must be True or False, got 1"),
    ],
)
def test_settings_come_from_arguments_or_a_configuration(
    config: Any, arguments: dict[str, Any], names: Any, stopped: None
) -> None:
    if isinstance(names, str):
        with pytest.raises(ArgumentError, match=names):
            dist.configure(config, **arguments)
        return
    with fake_world(1, "gloo"):
        dist.configure(config, **arguments)
        dist.all_reduce(torch.zeros(1))
        dist.barrier()
        assert dist.get_logged_comm_ops() == names


# -- the record of a user's own operation


class Message(torch_dist.Work):
    """The handle of a message whose arrival the test controls."""

    has_come = False

    def wait(self, timeout: Any = None) -> bool:
        if not type(self).has_come:
            raise RuntimeError("nothing has come")
        return True


class Slow(dist.MessageGroup):
    """A backend with such messages; all other operations are built from them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size, backend_name="slow", timeout=timeout)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        return Message()

    irecv = isend  # type: ignore[assignment]


@dist.timed_op
def sum_up(tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    return begin()


@pytest.mark.filterwarnings("ignore:the backend 'slow' does not support")
def test_it_ends_with_the_wait_and_one_in_vain_fails_it(
    tmp_path: Path, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Message, "has_come", False)
    torch_dist.Backend.register_backend("slow", Slow, devices=["cpu"])

    def begin() -> Any:
        return dist.all_reduce(torch.ones(2), group=group, async_op=True)

    def begin_and_wait() -> Any:
        begun = begin()
        begun.wait()
        return begun

    with fake_world(2), recorded(tmp_path) as stop:
        group = dist.new_group([0, 1], backend="slow")
        dist.configure(enabled=True)
        handles = [sum_up(torch.ones(2), begin) for _ in range(3)]
        for handle in handles[:2]:
            with pytest.raises(RuntimeError, match="nothing has come"):
                handle.wait()
        ringsim.mark("now")
        Message.has_come = True
        handles[1].wait()
        handles[1].wait()
        sum_up(torch.ones(2), begin_and_wait).wait()
        assert [sum_up(torch.ones(2), lambda each=each: each) for each in (None, 3)] == [None, 3]
        with pytest.raises(TypeError):
            sum_up()  # type: ignore[call-arg]
        trace = stop()
        assert handles[2].wait()  # a handle that outlives the recorder writes nothing
    frame = trace.to_pandas()
    spans = frame[frame["op"] == "span"]
    assert spans["status"].tolist() == ["error", "ok", "in_flight", "ok", "ok", "ok"]
    now = frame[frame["op"] == "mark"]["post_ns"].item()
    failed, done = list(spans.itertuples())[:2]
    assert failed.done_ns < now < done.wait_ns <= done.done_ns


def test_a_log_that_is_never_stopped_leaves_nothing(tmp_path: Path) -> None:
    program = """
import os, ringsim.comm
ringsim.comm.configure(enabled=True)
print([name.startswith("ringsim-log-") for name in os.listdir(os.environ["TMPDIR"])])
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "True" in said.stdout
    assert [path.name for path in tmp_path.iterdir() if "ringsim" in path.name] == []
