"""Launching: what a worker finds, and what comes back."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import pass_round

import ringsim
from ringsim.errors import ArgumentError

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_by_rank(world_size: int) -> None:
    trace = ringsim.trace(pass_round, world_size=world_size, args=(2,), kwargs={"step": 10.0})
    assert trace.world_size == world_size
    steps = 20.0 if world_size > 1 else 0.0
    assert trace.results == [(rank - 2) % world_size + steps for rank in range(world_size)]
    messages = trace.to_pandas("messages")
    assert len(messages) == (2 * world_size if world_size > 1 else 0)
    assert len(trace.unmatched) == 0


def test_a_local_class_comes_back_as_itself() -> None:
    class Answer:
        def __init__(self, rank: int) -> None:
            self.rank = rank

    def worker() -> Answer:
        return Answer(ringsim.current_ring().rank)

    results = ringsim.trace(worker, world_size=2).results
    assert all(isinstance(result, Answer) for result in results)
    assert [result.rank for result in results] == [0, 1]


def test_ranks_see_the_callers_surroundings_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker() -> tuple[object, ...]:
        affinity = sorted(os.sched_getaffinity(0))
        return os.environ.get("MY_SETTING"), "GONE" in os.environ, os.getcwd(), sys.path[0], sys.argv, affinity

    monkeypatch.setenv("GONE", "1")
    ringsim.trace(worker, world_size=2)  # parked ranks for the next call start under this environment
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MY_SETTING", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/somewhere/else")
    monkeypatch.setattr(sys, "argv", ["me", "--flag"])
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        results = ringsim.trace(worker, world_size=2).results
    finally:
        os.sched_setaffinity(0, before)
    assert results == [("now", False, str(tmp_path), "/somewhere/else", ["me", "--flag"], [core])] * 2


def test_values_read_at_the_start_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        import torch

        return torch.get_num_threads()

    for number in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number))
        assert ringsim.trace(threads, world_size=1).results == [number]
    monkeypatch.delenv("OMP_NUM_THREADS")
    crowded = ringsim.trace(threads, world_size=(os.cpu_count() or 1) + 1)
    assert set(crowded.results) == {1}
    assert any("one torch thread per rank" in note for note in crowded.metadata["notes"])


def test_seeds_differ_by_rank_and_repeat_by_run() -> None:
    import torch

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    first = ringsim.trace(draw, world_size=2, seed=5).results
    torch.manual_seed(6)
    assert first[1][2] == float(torch.rand(1))
    assert first == ringsim.trace(draw, world_size=2, seed=5).results
    assert first[0] != first[1]
    assert first[1] == ringsim.trace(draw, world_size=1, seed=6).results[0]  # seed + rank


def test_a_rank_is_never_used_twice() -> None:
    pids: list[int] = []
    for _ in range(3):
        pids += ringsim.trace(os.getpid, world_size=2).results
    assert len(set(pids)) == 6


def test_output_is_kept_by_rank_and_shown_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        rank = ringsim.current_ring().rank
        print("line", rank, "\nand more", sep="-")
        print("forced", rank, force=True)  # type: ignore[call-overload]
        os.write(2, b"from C, without an end of line")

    trace = ringsim.trace(talk, world_size=2)
    assert trace.output == [f"line-{rank}-\nand more\nforced {rank}\nfrom C, without an end of line" for rank in range(2)]
    lines = capsys.readouterr().out.splitlines()
    end = "from C, without an end of line"
    assert [line for line in lines if "[rank 0]" in line] == [f"[rank 0] {text}" for text in ("line-0-", "and more", "forced 0", end)]
    assert [line for line in lines if "[rank 1]" in line] == [f"[rank 1] {text}" for text in ("forced 1", end)]


def test_a_worker_may_build_its_own_group() -> None:
    def worker() -> tuple[int, int]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()

    assert ringsim.trace(worker, world_size=3, ring=False).results == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_may_initialise_as_a_script_does() -> None:
    def worker() -> int:
        environment = os.environ
        head, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        ringsim.initialize_distributed(head, port, 2, int(environment["RANK"]), int(environment["LOCAL_RANK"]), "cpu")
        return ringsim.current_ring().succ

    assert ringsim.trace(worker, world_size=2, ring=True).results == [1, 0]  # the values in force
    assert ringsim.trace(worker, world_size=2, ring=False).results == [1, 0]


def test_no_gpu_is_said_plainly() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ArgumentError, match="gpu"):
        ringsim.trace(pass_round, world_size=2, comm_device="gpu")
