"""The parts of the MPI backend that need no MPI.

Groups, buffers, reductions, handles over a stand-in for a request, and ``sys.exit``.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ringsim.comm import set_backend
from ringsim.comm.collectives import READINGS, Call, read_call
from ringsim.comm.mpi_collectives import Started
from ringsim.comm.mpi_group import Job, MpiGroup, MpiMembers, MpiWork, to_seconds
from ringsim.comm.reductions import reduce_parts
from ringsim.errors import ArgumentError, MessageMismatch, RingError, RunTimeout
from ringsim.state import change_state
from ringsim.traces.events import Group
from ringsim.traces.recorder import Recorder
from ringsim.traces.runs import read_parts


class MpiError(Exception):
    """What mpi4py raises."""

    def Get_error_class(self) -> int:  # noqa: N802 - mpi4py's name
        return int(self.args[0])


class Status:
    """Says that 16 bytes came from rank 1."""

    def Get_source(self) -> int:  # noqa: N802
        return 1

    def Get_count(self, kind: Any) -> int:  # noqa: N802
        return 16


MPI = SimpleNamespace(
    Status=Status,
    Exception=MpiError,
    BYTE="byte",
    ERR_TRUNCATE=15,
    IN_PLACE="in place",
    ANY_SOURCE=-1,
    Get_library_version=lambda: "MPICH Version: 4.3\nMPICH Release date: 2025",
    TAG_UB=0,
    buffer=SimpleNamespace(fromaddress=lambda address, size: (address, size)),
)


class Request:
    """Is done at the n-th look, or raises."""

    def __init__(self, looks: float = 1, error: int = 0) -> None:
        self.looks, self.error, self.cancelled = looks, error, False

    def Test(self, status: Status | None = None) -> bool:  # noqa: N802
        if self.error:
            raise MpiError(self.error)
        self.looks -= 1
        return self.looks <= 0

    def Cancel(self) -> None:  # noqa: N802
        self.cancelled = True

    def Wait(self) -> None:  # noqa: N802
        assert self.cancelled


def group_of(*ranks: int, rank: int = 0, begin: Any = None) -> MpiGroup:
    """Returns a group on MPI whose operations ``begin`` begins."""
    comm = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: len(ranks), Get_attr=lambda _: 9)
    comm.Isend = comm.Irecv = comm.Iallgather = comm.Igather = begin
    job = Job(MPI, comm, None, itertools.count(1), {}, lambda: None)
    group = MpiGroup(job, comm, ranks, 7, timedelta(seconds=30))
    group._set_group_name("mpi:7")
    return group


def work_of(request: Request, what: str = "all_reduce", **about: Any) -> MpiWork:
    return MpiWork(group_of(4, 5), Started(request, None, about.pop("finish", None)), what, **about)


# -- groups


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((3, None), "dst must be a global rank of the group, one of .4, 2, 9., got 3"),
        ((None, 3), "group_dst must be a rank of the group, from 0 to 2, got 3"),
        ((None, -1), "got -1"),
        ((4, 0), "dst or group_dst must be given, one of the two, got 4 and 0"),
        ((None, None), "got none"),
        (("4", None), "dst must be an integer, got '4'"),
    ],
)
def test_a_group_refuses_ranks_that_it_has_not(ranks: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        group_of(4, 2, 9).members.place_of("dst", *ranks)


# -- tensors as bytes


def call_of(name: str, *args: Any) -> Call:
    return read_call(name, READINGS[name].bind(args, {}), MpiMembers((0, 1), 0, "mpi:7"))


def test_what_lies_in_its_place_is_gathered_there() -> None:
    """As FSDP does: MPI forbids to read what it writes."""
    gathered: list[Any] = []

    def begin(given: Any, taken: Any) -> Request:
        gathered.append((given, taken))
        return Request()

    whole = torch.zeros(6)
    for mine in (torch.ones(3), whole[:3], whole[3:]):
        group_of(0, 1, begin=begin).all_gather_single(whole, mine).wait()
    apart, in_place, elsewhere = gathered
    here = [(whole.data_ptr(), 24), 12, "byte"]
    assert apart[1] == here
    assert in_place == ("in place", here)
    assert elsewhere[1] != here  # brought there afterwards


TWO, THREE, FOUR = torch.empty(2), torch.empty(3), torch.empty(4)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "all_gather",
            ([TWO, THREE], TWO),
            r"tensor_list\[1\] must have the shape \(2,\).*got.*\(3,\)",
        ),
        ("all_gather", ([TWO], TWO), "tensor_list must have 2 entries, got 1"),
        ("all_gather_into_tensor", (FOUR.double(), TWO), "output_tensor.* got torch.float64"),
        (
            "all_gather_into_tensor",
            (THREE, TWO),
            "output_tensor must have 2 times the 2 elements of input_tensor, got 3",
        ),
        (
            "scatter",
            (TWO, [TWO, TWO], 1),
            "scatter_list must be left out on all ranks but the root",
        ),
        ("reduce_scatter", (TWO, [THREE, THREE]), "output must have a place for the 3 elements"),
        (
            "all_to_all_single",
            (FOUR, FOUR, [1, 2]),
            "output_split_sizes must be 2 lengths that add up to 4",
        ),
        (
            "all_to_all_single",
            (THREE, FOUR),
            "the first dimension of output must be a multiple of the 2 ranks, got 3",
        ),
        ("all_reduce_coalesced", ([],), "tensors must be at least one"),
        ("gather", (TWO, None), "gather_list must be a list, got NoneType"),
        ("broadcast", ([1.0], 0), "tensor must be a torch.Tensor, got list"),
        (
            "broadcast",
            (TWO.to("meta"), 0),
            "dense tensor on the CPU with the mpi backend, got a torch.strided tensor on meta",
        ),
        ("broadcast", (torch.eye(2).to_sparse(), 0), "got a torch.sparse_coo tensor on cpu"),
    ],
)
def test_calls_are_checked(name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call_of(name, *args)


# -- reductions


def test_the_order_shows_in_the_rounding() -> None:
    parts = [torch.tensor([value], dtype=torch.float16) for value in (2048, 1, 1, -2048)]
    assert reduce_parts(parts, ReduceOp.SUM).item() == 0  # 2048 + 1 is 2048, twice


# -- handles


def test_a_wait_finishes_once() -> None:
    calls: list[str] = []
    handle = work_of(Request(looks=500), finish=lambda: calls.append("finished"))
    assert not handle.is_completed()
    assert handle.wait()
    assert handle.wait(0.001)
    assert handle.is_completed()
    assert calls == ["finished"]


@pytest.mark.parametrize("timeout", [0.02, timedelta(milliseconds=20)])
def test_a_wait_ends_at_its_limit_and_can_be_repeated(timeout: Any) -> None:
    request = Request(looks=math.inf)
    handle = work_of(request, "irecv from rank 3, tag 1")
    begin = time.monotonic()
    with pytest.raises(
        RunTimeout, match=r"irecv from rank 3, tag 1 must be answered within 0.02 s, got no answer"
    ):
        handle.wait(timeout)
    assert time.monotonic() - begin >= 0.02
    request.looks = 1
    assert handle.wait(timeout)


@pytest.mark.parametrize(
    ("request_", "size_bytes", "error", "message"),
    [
        (Request(), 8, MessageMismatch, "got 8 bytes for a message of 16 bytes from rank 5"),
        (Request(error=15), 8, MessageMismatch, "for a longer one"),
        (Request(error=3), None, RingError, "recv must be carried by MPI, got its error 3"),
    ],
)
def test_what_went_wrong_is_said_at_each_wait(
    request_: Request, size_bytes: int | None, error: type[Exception], message: str
) -> None:
    handle = work_of(request_, "recv", size_bytes=size_bytes)
    for _ in range(2):
        with pytest.raises(error, match=message):
            handle.wait()
    assert handle.is_completed()


def test_a_recv_knows_its_source_when_it_is_done() -> None:
    handle = work_of(Request(), "recv", size_bytes=16)
    assert (handle.source_rank(), handle.wait(), handle.source_rank(), handle._source_rank()) == (
        -1,
        True,
        1,
        1,
    )


def test_a_recv_that_is_abandoned_says_so() -> None:
    request = Request(looks=math.inf)
    handle = work_of(request, "irecv", size_bytes=8)
    handle.abandon()
    assert request.cancelled
    with pytest.raises(RingError, match="before the process group is destroyed"):
        handle.wait()


def test_a_future_holds_the_result_or_the_error() -> None:
    tensor = torch.ones(2)
    assert work_of(Request(looks=5), results=[tensor]).get_future().wait() == [tensor]
    late = work_of(Request(looks=math.inf))
    late.group.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(RunTimeout):
        late.get_future().wait()


@pytest.mark.parametrize("timeout", [-1, "soon", True, timedelta(seconds=-1)])
def test_a_limit_is_a_time(timeout: Any) -> None:
    with pytest.raises(ArgumentError, match="timeout must be a number of seconds or a timedelta"):
        to_seconds(timeout)


# -- recording


def test_operations_are_written_down(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1, 2)
    requests: list[Any] = [Request(), Request(), Request(), Request(error=3)]
    group = group_of(0, 1, rank=1, begin=lambda *_: requests.pop(0))
    tensor = torch.zeros(2, 2)
    group.send([tensor], 0, 3)  # nobody records
    change_state(recorder=recorder)
    handles = [
        group.recv_anysource([tensor], 3),
        group.gather([], [tensor], SimpleNamespace(rootRank=0)),
        group.send([tensor], 0, 3),
    ]
    handles[0].wait()
    handles[0].wait()
    with pytest.raises(RingError):
        handles[2].wait()
    recorder.close()
    events, facts = read_parts(tmp_path)
    assert events.peer.tolist() == [1, 0, 0]  # the sender is known now
    assert events.size_bytes.tolist() == [16, 32, 16]
    assert events.status.tolist() == [2, 1, 3]
    assert events.tables.groups[0] == Group("mpi:7", (0, 1))
    assert facts["backend"] == "mpi"


# -- without a job


def test_without_mpi4py_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    if dist.is_mpi_available():  # it was there when ringsim.comm was imported
        with pytest.raises(RingError, match=r"pip install 'ringsim\[mpi\]'"):
            dist.init_process_group("mpi")
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"pip install 'ringsim\[mpi\]'"):
        set_backend("mpi")
    assert not dist.is_initialized()


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
ENDINGS = [  # and with which code the process ends, and what it says
    ("sys.exit(3)", 3, "abort 3\n"),
    ("sys.exit('no data')", 1, "abort 1\n"),
    (
        (
            "def main():\n    try:\n        sys.exit(2)\n    finally:\n "
            "       print('cleaned')\nmain()"
        ),
        2,
        "cleaned\nabort 2\n",
    ),
    (
        "try:\n    sys.exit(4)\nexcept SystemExit as error:\n    assert error.code == 4\n    raise",
        4,
        "abort 4\n",
    ),
    ("import argparse\nargparse.ArgumentParser().error('no')", 2, "abort 2\n"),
    (
        "import atexit\natexit.register(print, 'last words')\nsys.exit(5)",
        5,
        "last words\nabort 5\n",
    ),
    ("sys.exit()", 0, ""),
    (
        (
            "try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\nassert "
            "kept.code == 3 and kept.args == (3,)\nsys.exit(0)"
        ),
        0,
        "",
    ),
    (
        (
            "import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\n"
            "thread.start()\nthread.join()"
        ),
        0,
        "",
    ),
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
