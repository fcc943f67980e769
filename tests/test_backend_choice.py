"""The backend for each comm_device, on machines that differ from this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringsim.cli import main

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor for a machine with these GPUs and this version of torch."""
    # a name that needs no name server
    monkeypatch.setattr("ringsim.cli.doctor._STORE_PEER", "127.0.0.1")

    def ask(
        *gpus: str, gloo: bool = True, nccl: bool = True, pairs: int = 0, table: str = ""
    ) -> dict[str, Any]:
        left = [pairs]

        def reach(one: int, other: int) -> bool:
            left[0] -= one < other
            return one > other or left[0] >= 0

        for owner, name, function in (
            (dist, "is_gloo_available", lambda: gloo),
            (dist, "is_nccl_available", lambda: nccl),
            (torch.cuda, "device_count", lambda: len(gpus)),
            (torch.cuda, "get_device_name", lambda index: gpus[index]),
            (torch.cuda, "can_device_access_peer", reach),
        ):
            monkeypatch.setattr(owner, name, function)
        main(["doctor", "--json", *(["--bandwidths", table] if table else [])])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


FOUR = ("A100",) * 4


@pytest.mark.parametrize(
    ("gpus", "torch_has", "backends", "reasons"),
    [
        ((), {}, ["gloo", None], ["the tensors are in host memory", "torch finds no GPU here"]),
        # GPUs change nothing for the CPU: only the place of the tensors matters
        (FOUR, {}, ["gloo", "nccl"], ["in host memory", "up to 4 ranks here"]),
        (("H200",), {}, ["gloo", "nccl"], ["in host memory", "up to 1 rank here"]),
        (FOUR, {"nccl": False}, ["gloo", None], ["in host memory", "built without NCCL"]),
        ((), {"gloo": False}, [None, None], ["built without Gloo", "torch finds no GPU here"]),
    ],
)
def test_the_backend_follows_from_where_the_tensors_are(
    gpus: tuple[str, ...],
    torch_has: dict[str, bool],
    backends: list[str | None],
    reasons: list[str],
    doctor: Doctor,
) -> None:
    choices = doctor(*gpus, **torch_has)["backends"]
    assert [choice["comm_device"] for choice in choices] == ["cpu", "gpu"]
    assert [choice["backend"] for choice in choices] == backends
    for choice, reason in zip(choices, reasons, strict=True):
        assert reason in choice["reason"]


@pytest.mark.parametrize(
    ("gpus", "pairs", "words"),
    [
        ((), 0, "none here"),
        (("H200",), 0, "none: this machine has only one GPU"),
        (FOUR, 6, "all 4 GPUs can read each other's memory, over NVLink or PCIe"),
        (FOUR, 2, "2 of 6 GPU pairs can read each other's memory; the others go through host"),
    ],
)
def test_the_interconnect_is_what_is_known(
    gpus: tuple[str, ...], pairs: int, words: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    location, interconnect, _, _ = doctor(*gpus, pairs=pairs)["criteria"]
    assert words in interconnect["nccl"]
    assert "TCP sockets over eth7" in interconnect["gloo"]
    assert ("4 x A100" in location["nccl"]) == (len(gpus) == 4)


UNKNOWN = ["busbw_gb_per_s", *(f"{each}_latency_us" for each in ("p10", "p90"))]
UNKNOWN += [f"{each}_algbw_gb_per_s" for each in ("p10", "p90")]


def test_a_bandwidth_is_measured_cited_or_missing(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "links.json"

    def measure(backend: str, gb_per_s: float) -> str:
        sizes = [2**power for power in range(3, 29)]
        same = {"pattern": "pingpong", "src": 0, "dst": 1, "kind": "measured", "n": 30}
        columns = {
            name: [value] * len(sizes) for name, value in (same | {"backend": backend}).items()
        }
        latencies_us = [40.0 + size / gb_per_s / 1e3 for size in sizes]
        columns |= {"size_bytes": sizes, "latency_us": latencies_us}
        columns["algbw_gb_per_s"] = [
            size / took_us / 1e3 for size, took_us in zip(sizes, latencies_us, strict=True)
        ]
        columns |= {name: [None] * len(sizes) for name in UNKNOWN}
        table = {"format": 1, "what": "ringsim bandwidths", "metadata": {"date": "2026-11-20"}}
        path.write_text(json.dumps(table | {"columns": columns}))
        return str(path)

    assert "published: 24 to 370 GB/s" in doctor()["criteria"][2]["nccl"]
    bandwidth = doctor(*FOUR, table=measure("gloo", 4.0))["criteria"][2]
    assert bandwidth["nccl"] == "not measured: run `ringsim bandwidth --device gpu`"
    words = "up to 4 GB/s (pingpong 0 -> 1), half of that at 156 KiB, measured 2026-11-20"
    assert bandwidth["gloo"] == words
    bandwidth = doctor(*FOUR, table=measure("nccl", 200))["criteria"][2]
    assert bandwidth["gloo"] == "not measured: run `ringsim bandwidth`"
    assert bandwidth["nccl"].startswith("up to 194 GB/s (pingpong 0 -> 1)")


def test_the_screen_explains_the_choice_and_a_broken_table_is_refused(
    doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor()["found"]
    assert ("torch", True) in [(row["what"], row["works"]) for row in found]
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert 'comm_device="cpu", the default: gloo; the tensors are in host memory' in shown
    assert [line.split()[0] for line in shown.splitlines()[-8::2]] == [
        *("tensor", "interconnect", "bandwidth", "use")
    ]
    assert len(shown.splitlines()) <= 24  # one screen
    (tmp_path / "links.json").write_text("no table")
    assert main(["doctor", "--bandwidths", str(tmp_path / "links.json")]) == 1
    assert "as a table of bandwidths: " in capsys.readouterr().err


def test_without_torch_the_doctor_still_speaks(tmp_path: Path) -> None:
    """A fake package hides torch, as on a machine without torch.

    Python finds neither its spec nor the module.
    """
    script = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "sys.modules['torch'] = None\n"
        "from ringsim.cli import main\n"
        "main(['doctor'])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    words = "torch is not installed: you can read and draw traces, but not run ranks"
    assert words in done.stdout, done.stderr


def test_a_slow_look_up_has_the_line_that_cures_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up() -> dict[str, Any]:
        (row,) = (row for row in doctor()["found"] if row["what"] == "name look-up")
        return dict(row)

    monkeypatch.setattr("socket.getnameinfo", lambda *_: ("localhost", "0"))
    assert look_up()["works"]
    monkeypatch.setattr("socket.getnameinfo", lambda *_: threading.Event().wait(0.3))
    monkeypatch.setattr("ringsim.cli.doctor._SLOW_LOOK_UP_S", 0.2)
    slow = look_up()
    assert not slow["works"]
    assert "Add this line to /etc/hosts: 127.0.0.1 localhost" in slow["detail"]
    monkeypatch.setattr("ringsim.cli.doctor._LOOK_UP_LIMIT_S", 0.1)
    assert "takes more than 0 s" in look_up()["detail"]
