"""When the record of a user's own operation ends: with the wait for the handle that it returns, where it returns one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringsim.comm import configure, timed_op
from ringsim.comm.built import Handle
from ringsim.comm.mpi_transfers import MpiGroup, MpiHandle, MpiRecords
from ringsim.errors import RunTimeout
from ringsim.state import change_state, get_state
from ringsim.traces.events import ERROR, IN_FLIGHT, OK, OP_CODES, OP_NAMES
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import Recorder

MPI = SimpleNamespace(Exception=RuntimeError, BYTE="byte")


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, 0, 2)
    change_state(recorder=recorder)
    configure(enabled=True)
    yield recorder
    configure(enabled=False)
    recorder.close()


class Request:
    """Is done when the test says so."""

    done = False

    def Test(self, status: Any = None) -> bool:  # noqa: N802 - mpi4py's name
        return self.done


def begin_on_mpi(request: Request) -> MpiHandle:
    """Returns what ``all_reduce(async_op=True)`` of the MPI backend returns."""
    recorder = get_state().recorder
    group = MpiGroup(SimpleNamespace(Get_rank=lambda: 0), (0, 1), "world", 0, 30.0)
    handle = MpiHandle(MPI, request, "all_reduce", 30.0)
    if recorder is not None:
        begun = MpiRecords("MPI").post(OP_CODES["all_reduce"], group, -1, -1, [torch.ones(2)])
        assert begun is not None
        handle.record(*begun)
    return handle


def begin_built(request: Request) -> Handle:
    """Returns what an operation that is built from others returns."""

    def finish() -> None:
        if not request.done:
            raise RunTimeout("the built operation must be answered, got no answer. Wait again.")

    return Handle([], finish)


BEGINNERS: dict[str, Callable[[Request], Any]] = {"mpi": begin_on_mpi, "built": begin_built}


@timed_op
def sum_up(tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    return begin()


def span_of(directory: Path) -> dict[str, int]:
    """Returns status and times of the one span there is."""
    events, _ = read_parts(directory)
    (place,) = [place for place, op in enumerate(events.op) if OP_NAMES[op] == "span"]
    return {name: int(getattr(events, name)[place]) for name in ("status", "post_ns", "wait_ns", "done_ns")}


@pytest.mark.parametrize("kind", BEGINNERS)
def test_it_ends_with_the_wait_and_one_in_vain_fails_it(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    handle = sum_up(torch.ones(2), lambda: BEGINNERS[kind](request))
    assert span_of(tmp_path)["status"] == IN_FLIGHT
    with pytest.raises(RunTimeout):
        handle.wait(0.01)
    assert span_of(tmp_path)["status"] == ERROR
    request.done, waited_ns = True, time.monotonic_ns()
    handle.wait()
    span = span_of(tmp_path)
    assert span["status"] == OK
    assert span["done_ns"] >= span["wait_ns"] >= waited_ns - logged.start_ns > span["post_ns"]
    handle.wait()
    assert span_of(tmp_path) == span


@pytest.mark.parametrize("kind", BEGINNERS)
def test_it_ends_at_return_where_the_function_has_waited(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    request.done = True

    def begin_and_wait() -> Any:
        handle = BEGINNERS[kind](request)
        handle.wait()
        return handle

    handle = sum_up(torch.ones(2), begin_and_wait)
    before = span_of(tmp_path)
    assert before["status"] == OK
    handle.wait()
    assert span_of(tmp_path) == before


@pytest.mark.parametrize("kind", BEGINNERS)
def test_a_handle_that_outlives_the_recorder_writes_nothing(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    handle = sum_up(torch.ones(2), lambda: BEGINNERS[kind](request))
    configure(enabled=False)
    change_state(recorder=None)
    logged.close()
    request.done = True
    assert handle.wait()
    assert span_of(tmp_path)["status"] == IN_FLIGHT


@pytest.mark.parametrize("result", [None, 3, [1, 2], math.inf])
def test_what_is_no_handle_ends_it(result: Any, logged: Recorder, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        sum_up()  # type: ignore[call-arg]
    assert sum_up(torch.ones(2), lambda: result) is result
    assert span_of(tmp_path)["status"] == OK
