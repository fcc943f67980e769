"""Programs that create their own world."""

from __future__ import annotations

import contextlib
import io
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, free_port, results

import ringsim
from ringsim import comm
from ringsim.cli import main

WRONG = {"world_size": 3, "rank": 7, "backend": "cpu:gloo,cuda:nccl"}


def make_worlds(library: Any) -> list[Any]:
    """Requests different worlds, then the existing one, twice."""
    said: list[Any] = []
    for wrong in [{name: value} for name, value in WRONG.items()] + [
        {"backend": "cpu:gloo", "timeout": timedelta(seconds=7)},
        {},
    ]:
        try:
            library.init_process_group(**wrong)
            world = dist.distributed_c10d._get_default_group()
            said.append(world._get_backend(torch.device("cpu")).options._timeout)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    for last in (False, True):
        numbers = torch.ones(1)
        dist.all_reduce(numbers)
        said.append(numbers.item())
        dist.destroy_process_group()
        if not last:
            library.init_process_group()
    return said


@pytest.mark.parametrize("library", [dist, comm], ids=["torch", "ringsim"])
def test_a_worker_joins_the_world_that_is_there(library: Any) -> None:
    trace = ringsim.trace(make_worlds, args=(library,), world_size=2)
    for rank, (*refused, timeout, again, first, second) in enumerate(trace.results):
        for (name, given), text in zip(WRONG.items(), refused, strict=True):
            told = rf"ArgumentError: {name} must be .* got {given!r} \(rank {rank} of 2\)\..*"
            assert re.fullmatch(f"{told}ring=False.*", text)
        assert (timeout, first, second) == (timedelta(seconds=7), 2, 2)
        assert again == "ValueError: trying to initialize the default process group twice!"
    assert [text.count("joined") for text in trace.output] == [1, 0]
    assert str(trace.explain()).startswith("Nothing wrong was found")


def two_worlds() -> None:
    """Ends a first world with a message that is never received; the second world has three."""
    rank, payload = dist.get_rank(), torch.ones(7)
    dist.barrier()
    unreceived = dist.isend(payload, 1) if rank == 0 else None
    dist.destroy_process_group()
    del unreceived
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    for tag in (0, 0, 1):
        if rank == 0:
            dist.send(payload, 1, tag=tag)
        else:
            dist.recv(payload, 0, tag=tag)
    dist.barrier()


def test_messages_of_two_worlds_never_meet(tmp_path: Path) -> None:
    """0.2.0 shifted all pairs of the second world by one, and compared none there."""
    trace = ringsim.trace(two_worlds, world_size=2)
    trace.save(tmp_path / "two.ringtrace")
    for each in (trace, ringsim.load(tmp_path / "two.ringtrace")):
        frame, messages = each.to_pandas(), each.to_pandas("messages")
        assert messages["tag"].tolist() == [0, 0, 1]
        sends = frame[frame["op"] == "send"]
        assert messages["send_post_ns"].tolist() == sends["post_ns"].tolist()
        (unreceived,) = each.unmatched
        assert (unreceived.op, unreceived.group) == ("isend", "world")
        assert not each.metadata.get("not_checked")
        assert [finding.kind for finding in each.explain().findings] == ["leaked_request"]


SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed import init_process_group

def start(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    init_process_group("gloo", rank=rank, world_size=2)
    dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.ones(3), 0)
    if rank == 0:
        dist.destroy_process_group()

if __name__ == "__main__":
    processes = [mp.get_context(how).Process(target=start, args=(rank, sys.argv[1])) for rank, how in enumerate(sys.argv[2:])]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("all joined")
"""  # noqa: E501


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Follows the pattern of torch's tutorials."""
    path = tmp_path / "tutorial.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_starts_its_ranks_is_told_to_leave_n_out(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(script.parent / "run.ringtrace")
    words = ["-n", "2", "-o", file, str(script), str(free_port()), "fork", "fork"]
    assert main(["trace", *words]) == 2
    said = capsys.readouterr()
    assert "both ringsim and the program start ranks" in said.err
    assert "all joined" not in said.out


def trace_script(directory: Path, *words: str) -> str:
    """Runs the command line in this process; returns its output."""
    os.chdir(directory)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["trace", *words]) == 0
    return said.getvalue()


def test_the_ranks_that_a_script_starts_are_recorded(script: Path, server: RankServer) -> None:
    (said,) = results(
        server.run(trace_script, [(script.parent, str(script), str(free_port()), "fork", "spawn")])
    )
    assert "tutorial.py starts its own ranks" in said
    assert "all joined" in said
    messages = ringsim.load(script.with_suffix(".ringtrace")).to_pandas("messages")
    assert messages[["src", "dst", "size_bytes"]].values.tolist() == [[0, 1, 12]]
