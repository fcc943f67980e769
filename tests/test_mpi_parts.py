"""The parts of the MPI backend that need no MPI job, and the checks of every such group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from fake_rank import fake_world

from ringsim import comm as dist
from ringsim.errors import ArgumentError, RingError


class Mute(dist.MessageGroup):
    """A backend that sends nothing."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size, backend_name="mute", timeout=timeout)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        raise NotImplementedError

    irecv = isend  # type: ignore[assignment]


@pytest.fixture
def group() -> Iterator[Any]:
    torch_dist.Backend.register_backend("mute", Mute, devices=["cpu"])
    with fake_world(4):
        yield torch_dist.new_group([0, 2], backend="mute")


TWO, THREE, FOUR = torch.empty(2), torch.empty(3), torch.empty(4)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's old names
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("all_gather", ([TWO, THREE], TWO), r"tensor_list\[1\] must have the shape \(2,\)"),
        ("all_gather", ([TWO], TWO), "tensor_list must have 2 entries, got 1"),
        ("all_gather_into_tensor", (FOUR.double(), TWO), "output_tensor.* got torch.float64"),
        ("all_gather_into_tensor", (THREE, TWO), "output_tensor must have 2 times .*, got 3"),
        ("reduce_scatter", (TWO, [THREE, THREE]), "is 3, but output has room for 2"),
        ("all_to_all_single", (FOUR, FOUR, [1, 2]), "output_split_sizes must be 2 .* add up to 4"),
        ("all_to_all_single", (THREE, FOUR), "dimension of output must be a multiple of 2, .*3"),
    ],
)
def test_calls_are_checked_before_anything_is_sent(
    name: str, args: tuple[Any, ...], message: str, group: Any
) -> None:
    with pytest.raises(ArgumentError, match=message):
        getattr(dist, name)(*args, group=group)


def test_without_mpi4py_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    if torch_dist.is_mpi_available():  # it existed when ringsim.comm was imported
        with pytest.raises(RingError, match=r"pip install 'ringsim\[mpi\]'"):
            torch_dist.init_process_group("mpi")
    monkeypatch.setattr(torch_dist, "is_mpi_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"pip install 'ringsim\[mpi\]'"):
        dist.set_backend("mpi")
    assert not torch_dist.is_initialized()


PROGRAM = """
import gc, json, os, sys
from ringsim.comm.mpi import watch_exit

gc.freeze()  # processes end without a walk through all that torch has made
before = sys.exit
undo = watch_exit(lambda code: print("abort", code, flush=True))
children = []
for number, ending in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        for place, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), place)
        break
    children.append(child)
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
    os._exit(0)
exec(ending)
"""
CAUGHT = "try:\n    sys.exit(4)\nexcept SystemExit as error:\n    assert error.code == 4\n    "
CLEANED = "def f():\n    try:\n        sys.exit(2)\n    finally:\n        print('cleaned')\nf()"
THREAD = "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\n"
ENDINGS = [  # and the exit code of the process, and its output
    ("sys.exit(3)", 3, "abort 3\n"),
    ("sys.exit('no data')", 1, "abort 1\n"),
    (CLEANED, 2, "cleaned\nabort 2\n"),
    (CAUGHT + "raise", 4, "abort 4\n"),
    ("import argparse\nargparse.ArgumentParser().error('no')", 2, "abort 2\n"),
    ("import atexit\natexit.register(print, 'last')\nsys.exit(5)", 5, "last\nabort 5\n"),
    ("sys.exit()", 0, ""),
    (CAUGHT + "kept = error\nassert kept.args == (4,)\nsys.exit(0)", 0, ""),
    (THREAD + "thread.join()", 0, ""),
    ("kept = sys.exit\nundo()\nassert sys.exit is before is not kept\nkept(3)", 3, ""),
]


def test_only_an_end_with_another_code_than_0_aborts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps([ending for ending, _, _ in ENDINGS])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = json.loads(done.stdout)
    found = [
        (ending, codes[number], (tmp_path / f"{number}.out").read_text())
        for number, (ending, _, _) in enumerate(ENDINGS)
    ]
    assert found == ENDINGS
    assert (tmp_path / "1.err").read_text() == "no data\n"
