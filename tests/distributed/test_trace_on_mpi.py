"""``ringsim.trace(worker, backend="mpi")``: ranks that ringsim starts with mpirun."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi_runs import require_mpi
from torch.nn.parallel import DistributedDataParallel

import ringsim
from ringsim import errors

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
RANKS = 3
COLUMNS = ["rank", "kind", "op", "group", "peer", "tag", "size_bytes", "dtype", "shape", "line"]


@pytest.fixture
def mpi() -> None:
    require_mpi()


def fails(error: type[BaseException], words: str, worker: Any, *args: Any, **options: Any) -> Any:
    """Returns the error of a run with two ranks over MPI."""
    with pytest.raises(error, match=words) as caught:
        ringsim.trace(worker, world_size=2, backend="mpi", args=args, **options)
    return caught.value


# -- correct runs


def pass_round(rounds: int) -> float:
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank))
    for turn in range(rounds):
        arriving = torch.empty_like(token)
        recv = dist.irecv(arriving, ring.pred, group=ring.pred_group, tag=turn)
        dist.isend(token, ring.succ, group=ring.succ_group, tag=turn).wait()
        recv.wait()
        with ringsim.span("compute"):
            token = arriving + 1
    return token[0].item()


def gradients(inputs: torch.Tensor, *, parallel: bool) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    if parallel:
        model = DistributedDataParallel(model)
    model(inputs).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def work(rounds: int, *, greeting: str) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"{greeting} from {rank}")
    token = pass_round(rounds)
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    inputs = torch.arange(4.0 * size).reshape(size, 4)
    return {
        "token": token,
        "everybody": everybody,
        "gradients": gradients(inputs[rank : rank + 1], parallel=True),
        "random": torch.rand(1).item(),
        "limits": [
            getattr(group, "timeout", None)
            for group in (dist.group.WORLD, ringsim.current_ring().pred_group)
        ],
    }


@pytest.fixture(scope="module")
def traces(nothing_left_behind: None) -> dict[str, ringsim.Trace]:
    require_mpi()
    options: dict[str, Any] = {"args": (3,), "kwargs": {"greeting": "hello"}}
    return {
        name: ringsim.trace(
            work, world_size=RANKS, backend=backend, timeout_s=77, limit_s=200, **options
        )
        for name, backend in (("gloo", None), ("mpi", "mpi"))
    }


def test_results_output_and_operations_are_those_of_gloo(traces: dict[str, Any]) -> None:
    over_mpi, on_gloo = traces["mpi"], traces["gloo"]
    assert [each["token"] for each in over_mpi.results] == [3, 4, 5]
    for mine, theirs in zip(over_mpi.results, on_gloo.results, strict=True):
        for name in ("everybody", "gradients", "random"):
            torch.testing.assert_close(mine[name], theirs[name])
    assert over_mpi.output == [f"hello from {rank}\n" for rank in range(RANKS)]
    assert (over_mpi.metadata["backend"], on_gloo.metadata["backend"]) == ("mpi", "gloo")
    assert over_mpi.metadata["complete"]
    tables = []
    for trace in (over_mpi, on_gloo):
        frame = trace.to_pandas().sort_values(["rank", "seq"])
        assert set(frame["status"]) == {"ok"}
        ring = frame[frame["group"].str.startswith("ring:") | (frame["label"] == "compute")]
        tables.append(ring[COLUMNS].to_csv(index=False).splitlines())
    assert len(tables[0]) == 1 + RANKS * 3 * 3
    assert tables[0] == tables[1]
    assert len(over_mpi.to_pandas("messages")) == RANKS * 3


def test_gradients_of_ddp_are_those_of_one_process(traces: dict[str, Any]) -> None:
    alone = gradients(torch.arange(4.0 * RANKS).reshape(RANKS, 4), parallel=False)
    for result in traces["mpi"].results:
        torch.testing.assert_close(result["gradients"], alone)
    assert traces["mpi"].results[0]["limits"] == [timedelta(seconds=77)] * 2


def test_a_worker_joins_the_ranks_itself_and_one_is_made_to_fail(mpi: None) -> None:
    def join() -> tuple[int, str, str]:
        dist.init_process_group("mpi")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            dist.recv(torch.empty(10**6), 0)
        else:  # this one makes progress although no rank waits for it
            dist.isend(torch.empty(10**6), 1)
        try:
            dist.isend(torch.ones(1), 1 - dist.get_rank())
        except errors.RankFailed as error:
            return int(total), dist.get_backend(), str(error).partition(" instead of")[0]
        return int(total), dist.get_backend(), "well"

    options: dict[str, Any] = {"ring": False, "inject": [ringsim.Fail(1, at_op=2)]}
    trace = ringsim.trace(join, world_size=2, backend="mpi", limit_s=200, **options)
    assert trace.results == [(3, "mpi", "well"), (3, "mpi", "rank 1 of 2 was made to fail")]


# -- failing runs


def test_a_rank_that_raises(mpi: None) -> None:
    def look_up() -> None:
        if ringsim.current_ring().rank == 1:
            raise KeyError("no such layer")
        dist.barrier()

    error = fails(errors.RankFailed, "rank 1 of 2 raised KeyError: 'no such layer'", look_up)
    assert error.rank == 1
    line = look_up.__code__.co_firstlineno + 2
    assert f'{__file__}", line {line}, in look_up' in str(error)
    assert "stopped as a result: rank 0" in str(error)
    assert error.trace.to_pandas()["op"].tolist() == ["barrier"]


def test_a_deadlock_is_found_and_can_be_caught(mpi: None) -> None:
    def wait_for_each_other() -> str:
        ring = ringsim.current_ring()
        try:
            dist.recv(torch.empty(1), ring.succ)
        except errors.Deadlock as error:
            print(type(error).__name__)
            raise
        return "never"

    error = fails(
        errors.Deadlock, "ranks 0 and 1 wait for each other", wait_for_each_other, limit_s=200
    )
    assert error.diagnosis.findings[0].ranks == (0, 1)
    assert error.trace.output == ["Deadlock\n"] * 2


def test_a_limit_ends_a_run_that_hangs(mpi: None) -> None:
    def hang() -> None:
        if ringsim.current_ring().rank == 0:
            dist.recv(torch.empty(1), 1)
        while True:
            time.sleep(0.01)

    for limit_s in (1, 16, 128):  # on a busy machine the ranks may take longer to connect
        error = fails(
            errors.RunTimeout, f"did not end within limit_s={limit_s} s", hang, limit_s=limit_s
        )
        if "still starting" not in str(error):
            break
    assert "rank 0 waits for" in str(error)
    assert error.trace.to_pandas()["status"].tolist() == ["in_flight"]


def test_an_interrupt_gives_the_trace_so_far(mpi: None, tmp_path: Path) -> None:
    def work_on() -> None:
        ringsim.mark("here")
        (tmp_path / str(os.getpid())).touch()
        time.sleep(100)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    error = fails(errors.Interrupted, "the run was interrupted after", work_on)
    thread.join()
    assert error.trace.to_pandas()["kind"].tolist() == ["mark"] * 2


# -- invalid arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "pigeon"}, "backend must be \"mpi\" or None, got 'pigeon'"),
        ({"comm_device": "gpu"}, 'comm_device must be "cpu" with backend="mpi"'),
        ({"inject": [ringsim.Degrade(0, 1, 2.0)]}, "inject must not contain Degrade"),
        ({"check": "full"}, 'check must be "basic" or "off" with backend="mpi"'),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ArgumentError, match=words):
        ringsim.trace(print, world_size=2, **{"backend": "mpi", **options})


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"cannot find mpirun and mpi4py, .* Run pip install 'ringsim\[mpi\]'"
    fails(errors.RingError, words, print)
