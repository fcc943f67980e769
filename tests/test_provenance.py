"""Tests of provenance: the line below a picture, and the description of the machine in a trace."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys

import pytest

from ringsim.provenance import footer, machine, versions

MEASURED = {
    "source": "measured",
    "machine": {"cpu": "Example CPU", "cores": 2},
    "backend": "gloo",
    "versions": {"ringsim": "0.1.0", "torch": "2.13.0"},
    "date": "2026-11-20",
}
ONE_CORE = MEASURED | {"machine": {"cpu": "Example CPU", "cores": 1}}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (MEASURED, "measured on Example CPU, 2 cores, gloo, torch 2.13.0, 2026-11-20"),
        (ONE_CORE, "measured on Example CPU, 1 core, gloo, torch 2.13.0, 2026-11-20"),
        (MEASURED | {"machine": {}}, "measured: gloo, torch 2.13.0, 2026-11-20"),
        ({"source": "simulated", "versions": {"ringsim": "0.1.0"}}, "simulated: ringsim 0.1.0"),
        ({"source": "measured"}, "measured"),
        ({"date": "2026-11-20"}, "origin unknown: 2026-11-20"),
        ({}, "origin unknown"),
    ],
)
def test_footer(metadata: dict[str, object], expected: str) -> None:
    assert footer(metadata) == expected


def test_machine_is_plain_data_and_not_private() -> None:
    said = json.dumps(machine())
    assert socket.gethostname() not in said or len(socket.gethostname()) < 4
    assert getpass.getuser() not in said.split('"')
    assert machine()["cores"] >= 1


def test_discovery_and_versions_load_neither_torch_nor_mpi() -> None:
    code = (
        "import sys, ringsim.environment; from ringsim.provenance import versions;"
        "print(versions()['ringsim'], *{'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert said.strip() == versions()["ringsim"]
