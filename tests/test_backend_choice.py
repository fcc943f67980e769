"""Which backend comm_device means, for machines that this one is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringsim.cli import doctor, main
from ringsim.cli.doctor import (
    BackendFacts,
    backend_criteria,
    backend_facts,
    choose_backend,
    criteria_text,
)
from ringsim.errors import ArgumentError
from ringsim.traces.bandwidths import Bandwidths, make_bandwidths

BUILT = {"has_torch": True, "has_gloo": True, "has_nccl": True}
LAPTOP = BackendFacts(has_torch=True, has_gloo=True, interface="lo")
ONE_GPU = BackendFacts(**BUILT, gpus=("H200",))
FOUR = BackendFacts(**BUILT, gpus=("A100",) * 4, direct_pairs=6)
TWO_PAIRS = BackendFacts(**BUILT, gpus=("A100",) * 4, direct_pairs=2)


def measured(backend: str, *, alpha_us: float = 40.0, gb_per_s: float = 4.0) -> Bandwidths:
    row = {
        "pattern": "pingpong",
        "src": 0,
        "dst": 1,
        "backend": backend,
        "kind": "measured",
        "n": 30,
    }
    sizes = [2**power for power in range(3, 29)]
    rows = [
        {**row, "size_bytes": size, "latency_us": alpha_us + size / gb_per_s / 1e3}
        for size in sizes
    ]
    return make_bandwidths(rows, {"date": "2026-11-20"})


@pytest.mark.parametrize(
    ("comm_device", "facts", "backend", "reason"),
    [
        ("cpu", LAPTOP, "gloo", "the tensors are in host memory"),
        # GPUs change nothing: where the tensors are decides
        ("cpu", FOUR, "gloo", "the tensors are in host memory"),
        ("cpu", BackendFacts(has_torch=True), None, "built without Gloo"),
        ("cpu", BackendFacts(), None, "torch is not installed"),
        ("gpu", BackendFacts(), None, "torch is not installed"),
        ("gpu", LAPTOP, None, "torch finds no GPU here"),
        ("gpu", BackendFacts(has_torch=True, gpus=("A100",)), None, "built without NCCL"),
        ("gpu", ONE_GPU, "nccl", "up to 1 rank here"),
        ("gpu", FOUR, "nccl", "up to 4 ranks here, one on each GPU"),
    ],
)
def test_the_backend_follows_from_where_the_tensors_are(
    comm_device: str, facts: BackendFacts, backend: str | None, reason: str
) -> None:
    choice = choose_backend(comm_device, facts)
    assert choice.backend == backend
    assert reason in choice.reason


def test_other_devices_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r'comm_device must be "cpu" \(Gloo\) or "gpu" \(NCCL\), got \'tpu\''
    ):
        choose_backend("tpu", LAPTOP)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LAPTOP, "none here"),
        (ONE_GPU, "one GPU: nothing to be connected with"),
        (
            FOUR,
            "all 4 GPUs read each other's memory, over NVLink or PCIe (torch does not say which)",
        ),
        (
            TWO_PAIRS,
            "2 of 6 pairs of GPUs read each other's memory; the others go through host memory",
        ),
    ],
)
def test_the_interconnect_is_what_is_known(facts: BackendFacts, words: str) -> None:
    _, interconnect, _, _ = backend_criteria(facts)
    assert words in interconnect.nccl


def test_a_bandwidth_is_measured_cited_or_missing() -> None:
    _, _, bandwidth, _ = backend_criteria(LAPTOP)
    assert "published: 24 to 370 GB/s" in bandwidth.nccl
    assert bandwidth.gloo == "not measured: run `ringsim bandwidth`"
    _, _, bandwidth, _ = backend_criteria(FOUR, measured("gloo"))
    assert bandwidth.nccl == "not measured: run `ringsim bandwidth --device gpu`"
    assert (
        bandwidth.gloo
        == "up to 4 GB/s (pingpong 0 -> 1), half of it from 156 KiB on, measured 2026-11-20"
    )
    _, _, bandwidth, _ = backend_criteria(FOUR, measured("nccl", gb_per_s=200))
    assert bandwidth.nccl.startswith("up to 194 GB/s (pingpong 0 -> 1)")


def test_the_criteria_are_those_of_the_table() -> None:
    rows = backend_criteria(FOUR)
    assert [row.name for row in rows] == ["tensor location", "interconnect", "bandwidth", "use"]
    assert "4 x A100" in rows[0].nccl
    assert criteria_text(rows).count("\n") == 2 * len(rows) - 1


def test_the_facts_are_those_of_torch() -> None:
    import torch
    import torch.distributed as dist

    facts = backend_facts()
    assert (facts.has_gloo, facts.has_nccl) == (dist.is_gloo_available(), dist.is_nccl_available())
    assert len(facts.gpus) == torch.cuda.device_count()


def test_the_interface_is_the_one_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert backend_facts().interface == "eth7"
    assert "TCP sockets over eth7" in backend_criteria(backend_facts())[1].gloo


def test_doctor_explains_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_STORE_PEER", "127.0.0.1")  # whose name needs no name server
    measured("gloo").save(tmp_path / "links.json")
    main(["doctor", "--bandwidths", str(tmp_path / "links.json")])
    shown = capsys.readouterr().out
    assert 'comm_device="cpu", the default: gloo; the tensors are in host memory' in shown
    assert "up to 4 GB/s (pingpong 0 -> 1)" in shown
    assert len(shown.splitlines()) <= 24  # one screen
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert ("torch", True) in [(row["what"], row["works"]) for row in said["found"]]
    assert said["backends"][0]["backend"] == "gloo"
    (tmp_path / "links.json").write_text("no table")
    assert main(["doctor", "--bandwidths", str(tmp_path / "links.json")]) == 1
    assert "A table of bandwidths must be whole" in capsys.readouterr().err


def test_without_torch_the_doctor_still_speaks(tmp_path: Path) -> None:
    """The package hides torch as a machine does that has none.

    Neither a spec nor an import is found.
    """
    script = (
        "import importlib.util as u, sys\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "sys.modules['torch'] = None\n"
        "from ringsim.cli.doctor import *\n"
        "print(choose_backend('cpu', backend_facts()).reason)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (
        done.stdout == "torch is not installed: traces can be read and drawn, ranks cannot run\n"
    ), done.stderr


def test_doctor_names_the_line_that_cures_a_slow_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: ("localhost", "0"))
    assert doctor._name_look_up()[0]
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: threading.Event().wait(0.3))
    monkeypatch.setattr(doctor, "_SLOW_LOOK_UP_S", 0.2)
    good, _, slow = doctor._name_look_up()
    assert not good
    assert "Add this line to /etc/hosts: ::ffff:127.0.0.1 localhost" in slow
    monkeypatch.setattr(doctor, "_LOOK_UP_LIMIT_S", 0.1)
    good, _, silent = doctor._name_look_up()
    assert not good
    assert "takes more than 0 s" in silent
