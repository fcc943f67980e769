"""Correct programs, as users write them, unchanged."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
import torch.distributed as dist

import ringsim
from ringsim import Trace
from ringsim.cli import main

PLACE = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PLACE))
import right_messages  # noqa: E402
import right_modules  # noqa: E402

for module in (right_messages, right_modules):
    cloudpickle.register_pickle_by_value(module)
PROGRAMS = right_messages.PROGRAMS
CALLS = ("send", "recv", "collective")
# findings that are not faults: the run finished, but might be faster
SLOW = {"link", "slow_link", "late_sender", "late_receiver", "straggler"}


def run_all(names: list[str]) -> None:
    for name in names:
        dist.barrier()
        with ringsim.span(name):
            PROGRAMS[name][0]()


@pytest.fixture(scope="module")
def trace() -> Trace:
    size = right_messages.SIZE
    return ringsim.trace(run_all, world_size=size, args=(list(PROGRAMS),), limit_s=100)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_recorded(trace: Trace, name: str) -> None:
    frame = trace.to_pandas()
    calls = frame[frame["kind"].isin(CALLS)]
    found: Counter[str] = Counter()
    for span in frame[frame["label"] == name].itertuples():
        within = calls["post_ns"].between(span.post_ns, span.done_ns)
        found.update(calls[(calls["rank"] == span.rank) & within]["op"])
    assert found == PROGRAMS[name][1]


def test_nobody_is_accused(trace: Trace) -> None:
    assert {finding.kind for finding in trace.explain().findings} <= SLOW
    assert trace.metadata["not_recorded"] == []


# The number of ranks and their calls. FSDP2 has four units, gathered for the forward pass and,
# except for the outermost, again for the backward pass; the norm of sharded gradients is one
# all_reduce. GPipe and 1F1B send one message in each direction per boundary and microbatch.
OBJECTS = {"send_object_list": 4, "recv_object_list": 4}
SCRIPTS = {
    "data_parallel": (2, {"all_gather": 2, "broadcast": 8, "all_reduce": 6}),
    "fully_sharded": (2, {"all_gather_single": 28, "reduce_scatter_single": 16, "all_reduce": 4}),
    "pipelining": (2, {"send": 2, "recv": 2, "isend": 8, "irecv": 8, **OBJECTS}),
    "one_forward_one_backward": (4, {"batch_isend": 36, "batch_irecv": 36, "all_reduce": 8}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    file, (size, calls) = tmp_path / "run.ringtrace", SCRIPTS[name]
    script = str(PLACE / "scripts" / f"{name}.py")
    assert main(["trace", "-n", str(size), "-o", str(file), script]) == 0
    trace = ringsim.load(file)
    frame = trace.to_pandas()
    assert Counter(frame[frame["kind"].isin(CALLS)]["op"]) == calls
    assert (frame["status"] == "ok").all()
    assert {finding.kind for finding in trace.explain().findings} <= SLOW
