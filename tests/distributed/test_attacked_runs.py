"""Runs on a hostile machine."""

from __future__ import annotations

import os
import pkgutil
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import until

import ringsim
from ringsim.errors import Interrupted, RingError

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def go_on(there: Path) -> None:
    """Communicates until the file exists."""
    flag = torch.zeros(1)
    dist.all_reduce(flag)
    (there.parent / str(os.getpid())).touch()
    while not flag:
        flag += there.exists()
        dist.all_reduce(flag)


def attacked(
    there: Path, attack: Callable[[], None], error: type[BaseException], words: str
) -> Any:
    """Attacks a run after both ranks have begun to work; returns its error."""

    def wait_and_attack() -> None:
        until(lambda: len(list(there.parent.iterdir())) == 2)
        attack()

    thread = threading.Thread(target=wait_and_attack)
    thread.start()
    with pytest.raises(error, match=words) as caught:
        ringsim.trace(go_on, world_size=2, args=(there,))
    thread.join()
    return caught.value


def test_a_second_interrupt_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for name in ("kill", "wait_for_end", "close"):  # the calls after the first one
        place = f"ringsim.launch.ranks.ForkedRanks.{name}"
        going_on = pkgutil.resolve_name(place)
        monkeypatch.setattr(place, lambda ranks, going_on=going_on: (interrupt(), going_on(ranks)))
    error = attacked(tmp_path / "never", interrupt, Interrupted, "the run was interrupted after")
    assert len(error.trace.events) > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_directory_of_a_run_vanishes(tmp_path: Path) -> None:
    def attack() -> None:
        for directory in Path(tempfile.gettempdir()).glob("ringsim-*"):
            shutil.rmtree(directory)
        (tmp_path / "over").touch()

    attacked(tmp_path / "over", attack, RingError, "the run's directory disappeared")


def test_the_disk_has_no_room_for_what_a_worker_returns() -> None:
    def work() -> bytes:
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        return bytes(2**21)

    with pytest.raises(
        RingError, match="cannot write the worker's result to the run's directory: "
    ) as caught:
        ringsim.trace(work, world_size=2)
    assert "Traceback" not in str(caught.value)
    assert len(caught.value.trace.events) == 2


PROGRAM = """
import sys
import ringsim
import torch

sys.path.insert(0, "")  # the working directory, as in a notebook

def work():
    print("x" * 1000)

def call():
    trace = ringsim.trace(work, world_size=2)
    assert [len(text) for text in trace.output] == [1001, 1001], trace.output
    trace.save("program.ringtrace")

(call if sys.argv[1:] else work)()
"""


ALONE = "-W error ../program.py alone <&- >/dev/full 2>&-"


@pytest.mark.parametrize("way", [ALONE, "-m ringsim trace ../program.py >/dev/full"])
def test_closed_streams_a_full_disk_behind_one_strict_warnings_and_neighbours_called_random_and_torch(  # noqa: E501
    way: str, tmp_path: Path
) -> None:
    """None of them causes an error."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "elsewhere").mkdir()
    for name in ("random", "torch", "numpy"):
        (tmp_path / "elsewhere" / f"{name}.py").touch()
    subprocess.run(
        f"exec {sys.executable} {way}", shell=True, cwd=tmp_path / "elsewhere", check=False
    )
    assert ringsim.load(tmp_path / "elsewhere" / "program.ringtrace").metadata["complete"]
