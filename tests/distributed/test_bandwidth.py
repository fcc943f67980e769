"""Bandwidths of real ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, free_port, results

import ringsim
from ringsim.cli import main
from ringsim.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


PATTERNS = ("pingpong", "oneway", "exchange", "shift", "all_reduce")


def check_columns(columns: Any) -> None:
    """Checks the properties of every measured table."""
    assert (columns["n"] >= 3).all()
    assert (columns["p10_latency_us"] <= columns["latency_us"]).all()
    assert (columns["latency_us"] <= columns["p90_latency_us"]).all()
    np.testing.assert_allclose(
        columns["algbw_gb_per_s"], columns["size_bytes"] / columns["latency_us"] / 1e3
    )
    assert set(columns["kind"]) == {"measured"}


def test_every_pattern() -> None:
    table = ringsim.bandwidth(3, [64], PATTERNS, edge=(1, 2), limit_s=15)
    check_columns(table.columns)
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for pattern, backend, src, dst in table.series():
        found.setdefault((backend, pattern), set()).add((src, dst))
    assert found == {
        **{("gloo", pattern): {(1, 2)} for pattern in ("pingpong", "oneway", "exchange")},
        ("gloo", "shift"): {(0, 1), (1, 2), (2, 0)},
        ("gloo", "all_reduce"): {(-1, -1)},
        ("tcp", "pingpong"): {(1, 2)},
        ("memcpy", "copy"): {(-1, -1)},
    }
    columns = table.select(table.columns["pattern"] == "all_reduce").columns
    np.testing.assert_allclose(columns["busbw_gb_per_s"], columns["algbw_gb_per_s"] * 4 / 3)
    said = table.metadata
    about = {"source": "measured", "backend": "gloo", "comm_device": "cpu", "world_size": 3}
    assert about.items() <= said.items()
    assert said["interface"] in ("lo", "lo0")
    # which contains "+cpu" or "+cu130" if the installed package does
    assert torch.__version__.startswith(said["versions"]["torch"])
    assert (len(said["load"]), said["interrupted"]) == (2, False)
    assert "2.5%" in said["steady"]
    assert {"cpu", "cores", "memory_bytes", "platform"} == set(said["machine"])


def test_a_ring_of_one_has_its_memory_alone() -> None:
    table = ringsim.bandwidth(1, [4096], ["pingpong", "all_reduce"], limit_s=6)
    check_columns(table.columns)
    assert table.series() == [("all_reduce", "gloo", -1, -1), ("copy", "memcpy", -1, -1)]
    assert table.columns["busbw_gb_per_s"][0] == 0, "a single rank must not use a link"


LARGE = 2**24  # a size with one warm-up instead of three
TOO_MANY = [2**26 + 2**20 * number for number in range(12)]  # more than fit into the limit


def around() -> list[Any]:
    """Measures within a worker that sends its own messages before and after."""
    ring = ringsim.current_ring()
    measure = partial(ringsim.bandwidth, ceilings=False)
    dist.all_reduce(torch.ones(4))
    first = measure(sizes=[8, 64], edge=(1, 0), limit_s=6)
    second = measure(sizes=[512], edge=(0, 1), limit_s=1)
    limited = measure(sizes=TOO_MANY, edge=(0, 1), limit_s=0.6)
    dist.all_reduce(torch.ones(4))
    assert ringsim.current_ring() is ring, "the ring must not change"
    for wrong, words in (
        ({"world_size": 3}, "world_size must be 2, the number of running ranks, got 3"),
        ({"comm_device": "gpu"}, "as in the existing ring"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ringsim.bandwidth(sizes=[8], **wrong)
    socket.gethostname = lambda: f"machine {ring.rank}"
    apart = ringsim.bandwidth(sizes=[8], edge=(0, 1), limit_s=6)
    return [first, second, limited, apart]


@pytest.fixture(scope="module")
def inside(nothing_left_behind: None) -> Any:
    return ringsim.trace(around, world_size=2)


def test_a_worker_measures_and_all_ranks_have_the_same_table(inside: Any) -> None:
    # as text, because the error of a constant may be NaN
    assert repr(inside.results[0]) == repr(inside.results[1])
    first, second, _, apart = inside.results[1]
    assert first.columns["size_bytes"].tolist() == [8, 64], (
        "the second table must contain nothing of the first"
    )
    assert second.columns["size_bytes"].tolist() == [512]
    assert [backend for _, backend, _, _ in apart.series()] == ["gloo", "memcpy"]
    notes = apart.metadata["notes"]
    assert (
        "TCP over loopback was not measured, because ranks 0 and 1 are on different machines."
        in notes
    )
    assert not any("the time" in note for note in notes)
    frame = inside.to_pandas().query("op == 'all_reduce' and size_bytes == 16")
    assert sorted(frame["rank"]) == [0, 0, 1, 1], (
        "recording must continue after the measurement, also on the rank that was not measured"
    )


def test_the_limit_leaves_out_the_largest_sizes_and_says_so(inside: Any) -> None:
    table = inside.results[0][2]
    measured = table.columns["size_bytes"].tolist()
    assert measured == TOO_MANY[: len(measured)]
    assert 0 < len(measured) < len(TOO_MANY)
    note = f"{len(TOO_MANY) - len(measured)} of 12 measurements are missing"
    assert (note in table.metadata["notes"][0], "limit_s=0.6" in repr(table)) == (True, True)


def press_ctrl_c_once(label: str, directory: Path) -> None:
    """Waits until a record of the run names the block."""
    while not any(label in names.read_text() for names in directory.rglob("rank-*.names")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sizes = [8, *(LARGE + 8 * number for number in range(200))]
    arguments = f"bandwidth gloo pingpong 0 1 {LARGE}", tmp_path
    threading.Thread(target=press_ctrl_c_once, args=arguments, daemon=True).start()
    # ranks with another timeout than the parked ranks, whose directory is elsewhere
    table = ringsim.bandwidth(sizes=sizes, edge=(0, 1), ceilings=False, limit_s=600, timeout_s=29.0)
    check_columns(table.select(table.columns["size_bytes"] == 8).columns)
    assert table.metadata["interrupted"]
    assert (
        "the run was interrupted; the table contains only the results so far."
        in table.metadata["notes"]
    )
    assert not any("limit_s" in note for note in table.metadata["notes"])


def started_by_another(directory: str, rank: int, ports: tuple[int, int]) -> tuple[int, int, str]:
    """Measures in a script that has joined its ranks, then in one that has not."""
    os.chdir(directory)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    dist.init_process_group("gloo")
    table = ringsim.bandwidth(sizes=[8], ceilings=False, limit_s=6)
    total = torch.ones(1)
    dist.all_reduce(total)  # the group of the script still works
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(ports[1])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main("bandwidth --sizes 8,4K --limit 12 -o links.json -o links.csv".split())
    return len(table), int(total), printed.getvalue()


def test_ranks_that_something_else_started_have_the_table_and_one_writes(
    server: RankServer, tmp_path: Path
) -> None:
    ports = free_port(), free_port()
    found = results(
        server.run(started_by_another, [(str(tmp_path), rank, ports) for rank in range(2)])
    )
    assert [each[:2] for each in found] == [(2, 2), (2, 2)]
    assert ["wrote links.json" in printed for *_, printed in found] == [True, False]
    columns = json.loads((tmp_path / "links.json").read_text())["columns"]
    check_columns({name: np.array(values) for name, values in columns.items()})
    rows = len((tmp_path / "links.csv").read_text().splitlines()) - 1
    assert rows == len(columns["n"]) == 2 * 4
