"""Right programs, as users write them, unchanged: each is recorded whole, with its exact number of calls; no check refuses them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist

import ringsim
from ringsim.cli import main
from ringsim.traces.value import Trace

PLACE = Path(__file__).parents[1] / "programs"
SCRIPT = PLACE / "one_forward_one_backward.py"
sys.path.insert(0, str(PLACE))
import right_messages  # noqa: E402
import right_modules  # noqa: E402

for module in (right_messages, right_modules):
    cloudpickle.register_pickle_by_value(module)
PROGRAMS = right_messages.PROGRAMS
CALLS = ("send", "recv", "collective")
LATE = {"late_sender", "late_receiver", "straggler"}  # on a loaded machine somebody always waits


def run_all(names: list[str]) -> None:
    for name in names:
        dist.barrier()
        with ringsim.span(name):
            PROGRAMS[name][0]()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return ringsim.trace(run_all, world_size=right_messages.SIZE, args=(list(PROGRAMS),), check="full", limit_s=100)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_recorded(trace: Trace, name: str) -> None:
    frame = trace.to_pandas()
    calls = frame[frame["kind"].isin(CALLS)]
    found: Counter[str] = Counter()
    for span in frame[frame["label"] == name].itertuples():
        found.update(calls[(calls["rank"] == span.rank) & calls["post_ns"].between(span.post_ns, span.done_ns)]["op"])
    assert found == PROGRAMS[name][1]


def test_nobody_is_accused(trace: Trace) -> None:
    assert {finding.kind for finding in trace.explain().findings} <= LATE
    assert trace.metadata["not_recorded"] == []


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    """A message each way at each boundary for each microbatch."""
    file = tmp_path / "run.ringtrace"
    assert main(["trace", "-n", "4", "-o", str(file), str(SCRIPT)]) == 0
    trace = ringsim.load(file)
    frame = trace.to_pandas()
    assert Counter(frame[frame["kind"].isin(CALLS)]["op"]) == {"batch_isend": 36, "batch_irecv": 36, "all_reduce": 8}
    assert (frame["status"] == "ok").all()
    assert {finding.kind for finding in trace.explain().findings} <= LATE
