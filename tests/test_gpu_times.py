"""Times of CUDA events, tied to the host's clock, with a stand-in for the GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_gpu import GPU, LATER, LOOK_NS, MS, StandInGpu

from ringsim.comm import gpu_times
from ringsim.comm.gpu_times import GpuTimes
from ringsim.traces.events import IN_FLIGHT, OK, OP_CODES
from ringsim.traces.recorder import Recorder


class Timed:
    """Operations whose times are read from a stand-in's events.

    Attributes:
        written: the written times wait and done, by slot.
        truth: the times at which the stream reached and passed the operation, by slot.
    """

    def __init__(self, gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu.install(monkeypatch)
        self.gpu = gpu
        self.written: dict[int, tuple[int, int]] = {}
        self.truth: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()  # the slots of operations in flight
        self.times = GpuTimes(self.amend, 3, gpu.now)

    def amend(
        self, slot: int, *, wait_ns: int = 0, done_ns: int = 0, status: int | None = None
    ) -> None:
        if status == IN_FLIGHT:
            self.open.add(slot)
        elif status == OK:
            self.open.discard(slot)
        else:
            self.written[slot] = (wait_ns, done_ns)

    def run(
        self, slot: int, *, before_ns: int = 0, work_ns: int = MS, pause_ns: int = 5 * MS
    ) -> None:
        """Runs one operation of ``work_ns`` after other work."""
        self.gpu.queue(before_ns)
        begun = self.times.begin(GPU)
        self.gpu.queue(work_ns)
        self.times.end(begun, [slot])
        self.truth[slot] = tuple(event.passed_ns for event in self.gpu.recorded[-2:])  # type: ignore[assignment]
        self.gpu.now_ns += pause_ns

    def check(self, slots: list[int]) -> int:
        """Reads the times of these operations, and compares them with the truth.

        Returns their reported error bound in ns.
        """
        found = re.search(r"within ([\d,]+) ns", self.times.read()[0])
        if not slots:
            assert found is None
            assert not self.written
            return 0
        assert found
        within_ns = int(found[1].replace(",", ""))
        assert sorted(self.written) == slots
        for slot, times in self.written.items():
            # whole ns on both clocks
            assert times == pytest.approx(self.truth[slot], rel=0, abs=within_ns + 2)
        return within_ns


@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-3, 1e-3),
    program=st.lists(
        st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS), st.integers(0, 100_000 * MS)),
        min_size=1,
        max_size=20,
    ),
)
def test_times_are_within_what_is_stated_and_in_order(
    offset_ns: int, drift: float, program: list[tuple[int, int, int]]
) -> None:
    gpu = StandInGpu(offset_ns, drift)
    with pytest.MonkeyPatch.context() as monkeypatch:
        timed = Timed(gpu, monkeypatch)
        asked = set()
        for slot, (before_ns, work_ns, pause_ns) in enumerate(program):
            timed.run(slot, before_ns=before_ns, work_ns=work_ns, pause_ns=pause_ns)
            asked.add(gpu.asked)
        assert len(asked) == 1, (
            "after the first anchor, no event may be queried until the record is read"
        )
        gpu.now_ns = max(gpu.now_ns, gpu.busy_until_ns)
        within_ns = timed.check(list(range(len(program))))
    flat = [time_ns for slot in sorted(timed.written) for time_ns in timed.written[slot]]
    assert flat == sorted(flat)
    rounding_ns = 3 * sum(pause_ns for _, _, pause_ns in program) / 2**24
    # an anchor takes one call and one reading; and the bound must be small
    assert within_ns <= 2 * LOOK_NS + rounding_ns + 100


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(StandInGpu(drift=1e-4), monkeypatch)


def test_clocks_may_drift_otherwise_after_a_reading(timed: Timed) -> None:
    timed.run(0, pause_ns=1_000_000 * MS)
    timed.check([0])
    gpu = timed.gpu
    gpu.offset_ns, gpu.drift = gpu.offset_ns + round(gpu.now_ns * (gpu.drift - 1e-5)), 1e-5
    timed.run(1, pause_ns=1_000_000 * MS)
    timed.check([0, 1])
    assert timed.times.read() == timed.times.read()


# Problems that begin before operation 0 or 1, and end before operation 2: the operations with times
# if the record is read before that, the number without times and the reason given, and the
# operations with times at the end. Only operations whose work has not passed are in flight.
TROUBLES: dict[str, tuple[int, dict[str, Any], list[int], int, str, list[int]]] = {
    "the work has not passed": (1, {"busy_until_ns": LATER}, [0], 1, "had not ended", [0, 1, 2]),
    "a graph is captured": (1, {"capturing": True}, [], 1, "had been captured", [0, 2]),
    "the GPU is broken": (1, {"broken": True}, [], 1, "got no event", [0, 2]),
    "no stream at the reading": (1, {"pool_busy_until_ns": LATER}, [], 2, "be queried", [0, 1, 2]),
    "no stream at the start": (0, {"pool_busy_until_ns": LATER}, [], 2, "be tied", []),
    "too many are kept": (1, {}, [1], 1, "still unread", [1, 2]),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_cannot_be_timed_is_counted_and_left_to_the_program(
    trouble: str, timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, values, meanwhile, count, why, in_the_end = TROUBLES[trouble]
    well = dict(vars(timed.gpu))
    monkeypatch.setattr(gpu_times, "MAX_KEPT", 9 if values else 1)
    for slot in range(2):
        if slot == begins:
            vars(timed.gpu).update(values)
        timed.run(slot)
    words = timed.times.read()
    got = [each for each in words if "come from CUDA events" in each]
    assert len(got) == bool(meanwhile)
    assert all(each.startswith("On rank 3, cuda:0: the times of 1 operation ") for each in got)
    is_open = trouble == "the work has not passed"
    told = "done is missing" if is_open else "The records keep the host's times"
    kept = rf": {count} operations? .*{why}.* {told}"
    assert any(re.search(kept, each) for each in words)
    assert timed.open == ({1} if is_open else set())
    assert list(timed.written) == meanwhile
    vars(timed.gpu).update({name: well[name] for name in values})
    timed.gpu.now_ns += LATER
    timed.run(2)
    timed.check(in_the_end)
    assert not timed.open


def test_an_operation_that_has_passed_is_done_even_if_its_time_is_unknown(timed: Timed) -> None:
    timed.run(0, work_ns=LATER)
    timed.times.read()
    assert timed.open == {0}
    timed.gpu.now_ns += LATER
    timed.gpu.pool_busy_until_ns = 3 * LATER
    assert "could not be queried" in timed.times.read()[0]
    assert not timed.open


def test_no_time_is_before_the_call_that_caused_it() -> None:
    recorder = Recorder(None, 0, 1, now=iter([100, 200, 300]).__next__, who=lambda: 0)
    slot = recorder.make_post(OP_CODES["isend"])(0, 0, 0, 0)
    assert slot is not None
    recorder.wait(slot)
    recorder.complete(slot)
    for asked, times in (((50, 90), (200, 300)), ((2300, 1300), (2300, 2300))):
        recorder.amend(slot, wait_ns=asked[0], done_ns=asked[1])
        events = recorder.read()
        assert (events.wait_ns[0], events.done_ns[0]) == times
