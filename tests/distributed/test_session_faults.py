"""The faults of tests/distributed/faults.md as calls of sessions, which survive all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_programs import FAULTS, Fault
from fault_rows import LIMIT_S, ROWS, judge

import ringsim
from ringsim import errors

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# a session always has a ring, and does not look for misused buffers
CALLS = [row for row in ROWS if not FAULTS[row].options.keys() & {"ring", "check"}]
# one of each: a deadlock, a peer that has left, a mismatch, a refused argument, an exception, a
# death, a limit, a collective, a group, and a program without a fault
SHORT = ("1", "7a", "9", "13a", "18", "20", "23b", "25a", "28c", "59")


class Sessions:
    """Sessions by the number of ranks and the limit of a call, which live until the end."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, float], Any] = {}

    def find(self, fault: Fault) -> Any:
        """Returns the session for a program."""
        key = fault.size, min(fault.options.get("limit_s", LIMIT_S), 20)
        if key not in self._sessions:
            session = ringsim.session(world_size=key[0], limit_s=key[1])
            session.run(meet)  # its processes have started
            self._sessions[key] = session
        return self._sessions[key]

    def close(self) -> None:
        """Ends all sessions."""
        for session in self._sessions.values():
            session.close()


@pytest.fixture(scope="module")
def sessions(nothing_left_behind: None) -> Iterator[Sessions]:
    sessions = Sessions()
    for row in SHORT:
        sessions.find(FAULTS[row])
    yield sessions
    sessions.close()


def meet() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def check(row: str, sessions: Sessions) -> None:
    fault = FAULTS[row]
    ranks = sessions.find(fault)
    error: Any = None
    try:
        trace = ranks.run(fault.worker, *fault.args())
    except (errors.RingError, errors.Interrupted) as caught:
        error, trace = caught, caught.trace
    judge(row, ROWS[row], error, trace)
    assert ranks.run(meet).results == [fault.size] * fault.size


@pytest.mark.parametrize("row", SHORT)
def test_a_session_survives_a_fault(row: str, sessions: Sessions) -> None:
    check(row, sessions)


@pytest.mark.parametrize("row", [row for row in CALLS if row not in SHORT])
def test_a_session_survives_every_fault(row: str, sessions: Sessions) -> None:
    check(row, sessions)
