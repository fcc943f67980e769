"""Bandwidths of real ranks: every pattern, limits and interrupts, and ranks that something else started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ringsim
from ringsim.cli import main
from ringsim.errors import ArgumentError, Interrupted
from ringsim.links.plan import PATTERNS, make_plan
from ringsim.links.worker import measure
from ringsim.traces.bandwidths import Bandwidths, load

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left_behind")]


def check_rows(table: Bandwidths) -> None:
    """What holds of every measured table."""
    columns = table.columns
    assert (columns["n"] >= 3).all()
    assert (columns["p10_latency_us"] <= columns["latency_us"]).all()
    assert (columns["latency_us"] <= columns["p90_latency_us"]).all()
    np.testing.assert_allclose(columns["algbw_gb_per_s"], columns["size_bytes"] / columns["latency_us"] / 1e3)
    assert set(columns["kind"]) == {"measured"}


def test_every_pattern_on_every_edge() -> None:
    table = ringsim.bandwidth(3, [64], PATTERNS, limit_s=45)
    check_rows(table)
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for pattern, backend, src, dst in table.series():
        found.setdefault((backend, pattern), set()).add((src, dst))
    assert found == {
        **{("gloo", pattern): {(0, 1), (1, 2), (2, 0)} for pattern in ("pingpong", "oneway", "exchange", "shift")},
        ("gloo", "all_reduce"): {(-1, -1)},
        ("tcp", "pingpong"): {(0, 1)},
        ("memcpy", "copy"): {(-1, -1)},
    }
    all_reduce = table.select(table.columns["pattern"] == "all_reduce")
    np.testing.assert_allclose(all_reduce.columns["busbw_gb_per_s"], all_reduce.columns["algbw_gb_per_s"] * 4 / 3)
    said = table.metadata
    assert (said["source"], said["backend"], said["comm_device"], said["world_size"]) == ("measured", "gloo", "cpu", 3)
    assert said["interface"] in ("lo", "lo0")
    assert torch.__version__.startswith(said["versions"]["torch"])  # which says "+cpu" or "+cu130" where the installed package does
    assert (len(said["load"]), said["interrupted"]) == (2, False)
    assert "2.5%" in said["steady"]
    assert {"cpu", "cores", "memory_bytes", "platform"} == set(said["machine"])


def test_a_ring_of_one_has_its_memory_alone() -> None:
    table = ringsim.bandwidth(1, [4096], ["pingpong", "all_reduce"], limit_s=2)
    check_rows(table)
    assert table.series() == [("all_reduce", "gloo", -1, -1), ("copy", "memcpy", -1, -1)]
    assert table.columns["busbw_gb_per_s"][0] == 0, "a rank alone moves nothing over a link"


def test_steps_are_spans_of_the_rank_that_tells_and_warm_ups_do_not_count() -> None:
    plan = make_plan((0, 1), [4096, 2**24], ("pingpong", "oneway"), "gloo", edge=(0, 1), limit_s=4)
    frame = ringsim.trace(measure, world_size=2, args=(plan,)).to_pandas()
    for pattern, teller in (("pingpong", 0), ("oneway", 1)):
        for size in (4096, 2**24):
            steps = frame[frame["label"] == f"bandwidth gloo {pattern} 0 1 {size}"]
            assert set(steps["rank"]) == {teller}
            assert set(steps["kind"]) == {"span"}
    assert not frame["size_bytes"].isin([4096, 2**24]).any(), "what is measured is not slowed down by being recorded"
    measured = {label for label in frame["label"].dropna() if label.startswith("bandwidth ")}  # a ceiling may fall to the limit
    assert (frame["label"] == "warm-up").sum() == sum(1 if label.endswith(f" {2**24}") else 3 for label in measured)


def around() -> tuple[int, list[str], list[str]]:
    """Measures within a worker that sends messages of its own before and after; then asks for what these ranks are not."""
    import socket

    import torch.distributed as dist

    ring = ringsim.current_ring()
    dist.all_reduce(torch.ones(4))
    first = ringsim.bandwidth(sizes=[8, 64], edge=(1, 0), ceilings=False, limit_s=2)
    second = ringsim.bandwidth(sizes=[512], edge=(0, 1), ceilings=False, limit_s=2)
    dist.all_reduce(torch.ones(4))
    assert first.columns["size_bytes"].tolist() == [8, 64], "the second table has nothing of the first"
    assert second.columns["size_bytes"].tolist() == [512]
    assert ringsim.current_ring() is ring, "the ring stays"
    for wrong, words in (({"world_size": 3}, "world_size must be 2 or left out"), ({"comm_device": "gpu"}, "comm_device must be that of")):
        with pytest.raises(ArgumentError, match=words):
            ringsim.bandwidth(sizes=[8], **wrong)
    socket.gethostname = lambda: f"machine {ring.rank}"
    apart = ringsim.bandwidth(sizes=[8], edge=(0, 1), limit_s=2)
    return int(first.columns["n"].sum()), [backend for _, backend, _, _ in apart.series()], apart.metadata["notes"]


def test_a_worker_measures_and_all_ranks_have_the_same_table() -> None:
    trace = ringsim.trace(around, world_size=2)
    assert trace.results[0] == trace.results[1]
    frame = trace.to_pandas().query("op == 'all_reduce' and size_bytes == 16")
    assert sorted(frame["rank"]) == [0, 0, 1, 1], "the recorder is back after the measurement, also on the rank that was not recorded"
    _, backends, notes = trace.results[1]
    assert backends == ["gloo", "memcpy"]
    assert "no TCP over loopback: ranks 0 and 1 are on two machines." in notes
    assert not any("the time" in note for note in notes)


def test_the_limit_leaves_out_the_largest_sizes_and_says_so() -> None:
    sizes = [2**20 * (64 + number) for number in range(12)]
    begin_s = time.monotonic()
    table = ringsim.bandwidth(sizes=sizes, edge=(0, 1), ceilings=False, limit_s=0.6)
    assert time.monotonic() - begin_s < 60
    measured = table.columns["size_bytes"].tolist()
    assert measured == sizes[: len(measured)]
    assert 0 < len(measured) < len(sizes)
    assert f"{len(sizes) - len(measured)} of 12 measurements are not there" in table.metadata["notes"][0]
    assert "limit_s=0.6" in repr(table)


def test_ctrl_c_keeps_what_was_measured() -> None:
    timer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        table = ringsim.bandwidth(sizes=[8, *(2**27 + 8 * number for number in range(200))], edge=(0, 1), ceilings=False, limit_s=600)
    finally:
        timer.cancel()
    check_rows(table.select(table.columns["size_bytes"] == 8))
    assert table.metadata["interrupted"]
    assert "interrupted: only what had been measured by then is here." in table.metadata["notes"]
    assert not any("limit_s" in note for note in table.metadata["notes"])


def test_ctrl_c_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted("the run was interrupted after 0.1 s.")

    monkeypatch.setattr("ringsim.links.api.run", interrupted)
    with pytest.raises(Interrupted):
        ringsim.bandwidth(sizes=[8])


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs enough")
def test_without_a_gpu_for_each_rank_nccl_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at most the number of GPUs") as caught:
        ringsim.bandwidth(sizes=[8], comm_device="gpu")
    assert 'comm_device="cpu"' in str(caught.value)


def test_under_torchrun_all_ranks_have_the_table_and_one_writes(tmp_path: Path) -> None:
    script = """
        import os, torch, torch.distributed as dist, ringsim
        from ringsim.cli import main
        dist.init_process_group("gloo")
        table = ringsim.bandwidth(sizes=[8], ceilings=False, limit_s=2)
        total = torch.ones(1)
        dist.all_reduce(total)  # the group of the script still works
        os.write(1, f"rank {dist.get_rank()} {len(table)} {int(total)}\\n".encode())  # in one piece: both ranks write here
        dist.destroy_process_group()
        main(["bandwidth", "--sizes", "8,4K", "--limit", "4", "-o", "links.json", "-o", "links.csv"])
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == ["rank 0 2 2", "rank 1 2 2"]
    assert done.stdout.count("wrote links.json") == 1
    table = load(tmp_path / "links.json")
    check_rows(table)
    assert len((tmp_path / "links.csv").read_text().splitlines()) == len(table) + 1 == 2 * 4 + 1


def test_the_command_writes_table_and_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--sizes", "8,1KiB,64k", "--pattern", "exchange", "--edge", "1,0", "--limit", "5", "-o", "links.json", "-o", "links.png"]
    assert main(["bandwidth", *asked]) == 0
    assert "fit exchange gloo 1->0: alpha " in capsys.readouterr().out
    assert (tmp_path / "links.png").read_bytes()[:4] == b"\x89PNG"
    assert set(load(tmp_path / "links.json").fits) == {("exchange", "gloo", 1, 0)}


@pytest.mark.parametrize("wrong", [["--sizes", "8,many"], ["--edge", "01"], ["-o", "links.pdf"], ["--edge", "0,3"]])
def test_the_command_refuses_what_it_does_not_know(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["bandwidth", *wrong])
    except SystemExit as refused:  # by argparse
        code = refused.code
    assert code == 2
    assert wrong[1].rpartition(",")[2].strip("0") in capsys.readouterr().err
