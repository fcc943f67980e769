"""Tests that programs of sends and recvs take as long as in SimGrid, if it is installed.

SimGrid is in the Debian package ``python3-simgrid``, for the system's Python.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_runs import now_s

import ringsim
from ringsim import comm as dist
from ringsim import simulate

LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-9)
HERE = Path(__file__).parent
PYTHON = shutil.which("python3", path="/usr/bin") or ""
Program = list[list[list[Any]]]  # by rank: its operations in order


def is_there(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


needs_simgrid = pytest.mark.skipif(
    not is_there([PYTHON, "-c", "import simgrid"]), reason="the system's Python has no simgrid"
)


def make_program(seed: int) -> Program:
    """Returns a program of work and of blocking messages of any size, in one order for all ranks.

    Every other program begins with a shift.
    """
    draw = random.Random(seed)
    size = draw.randint(2, 6)
    program: Program = [
        [["shift", (rank + 1) % size, (rank - 1) % size, 5000]] * (seed % 2) for rank in range(size)
    ]
    for _ in range(30):
        source, to = draw.sample(range(size), 2)
        bytes_ = draw.choice((1, 1000, 100_000))
        program[source].append(["send", to, bytes_])
        program[to].append(["recv", source, bytes_])
        program[draw.randrange(size)].append(["work", draw.choice((1e-5, 1e-4))])
    return program


def follow(program: Program) -> float:
    for what, *about in program[dist.get_rank()]:
        if what == "work":
            ringsim.compute(about[0])
        elif what == "send":
            dist.send(torch.zeros(about[1], dtype=torch.uint8), about[0])
        elif what == "recv":
            dist.recv(torch.zeros(about[1], dtype=torch.uint8), about[0])
        else:
            to, source, bytes_ = about
            give, take = torch.zeros(2, bytes_, dtype=torch.uint8)
            for handle in (dist.isend(give, to), dist.irecv(take, source)):
                assert handle is not None
                handle.wait()
    return now_s()


@needs_simgrid
def test_random_programs_end_when_they_do_in_simgrid() -> None:
    programs = [make_program(seed) for seed in range(20)]
    asked = json.dumps(
        {"alpha_s": LINK.alpha_s, "beta_s_per_byte": LINK.beta_s_per_byte, "programs": programs}
    )
    command = [PYTHON, str(HERE / "simgrid_programs.py")]
    told = subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout
    ours = [
        simulate(follow, world_size=len(program), args=(program,), link=LINK).results
        for program in programs
    ]
    for seed, (mine, theirs) in enumerate(zip(ours, json.loads(told), strict=True)):
        # SimGrid ends a flow some bytes early
        assert mine == pytest.approx(theirs, rel=1e-5), f"program {seed}"
