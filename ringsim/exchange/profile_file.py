"""Reads one rank's torch.profiler file: its calls, annotations and GPU kernels.

A kernel runs after the program has launched it, and the kernels that a span launches are what the
span computes. A span therefore lasts from the first of its kernels to the last::

    program's thread   | PP:0F0 |
                        launches              the span
    GPU                        | kernel | kernel |

Kernels launched by any thread count, because autograd launches a backward's kernels from a thread
of its own. NCCL's kernels also wait for other ranks, so they count only for spans without other
kernels. A span without any kernel keeps its time in the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringsim.exchange.flight_recorder import name_group
from ringsim.exchange.reading import to_ns
from ringsim.traces.events import Group, Ints
from ringsim.traces.steps import KINDS, STEP

RECORD = "record_param_comms"  # the name of a call's record
_OURS = ("gloo:", "nccl:")  # the prefixes of annotations that torch makes for operations
_CALLS = (RECORD, "c10d::")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_PROFILER_STEP = "ProfilerStep#"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # torch's text for a computation of a pipeline
_LABELS = {letter: label for label, letter in KINDS.items()}

Stretch = tuple[int, int]  # start and end
# the columns of the kernels
LAUNCHED, THREAD, START, END, NCCL = range(5)


def take_kernels(kernels: Ints, event: dict[str, Any]) -> Stretch | None:
    """Returns the start and end of a call's NCCL kernels, and marks them as belonging to a call."""
    own = _during(kernels, event)
    mine = (own[:, NCCL] == 1) & (own[:, THREAD] == event["thread"])
    own[mine, NCCL] = 0
    return _stretch(own[mine])


def _during(kernels: Ints, event: dict[str, Any]) -> Ints:
    times = event["start_ns"], event["end_ns"] + 1
    return kernels[slice(*np.searchsorted(kernels[:, LAUNCHED], times))]


def _stretch(own: Ints) -> Stretch | None:
    return (int(own[:, START].min()), int(own[:, END].max())) if len(own) else None


@dataclass
class Profile:
    """The content of one rank's file.

    Attributes:
        rank: the rank.
        world_size: the number of ranks in the run.
        backend: "gloo" or "nccl".
        groups: the process groups, by torch's name.
        slices: the calls, works and annotations in the order in which they began, each with its
            start, end and thread.
        kernels: the kernels in the order in which they were launched. The columns are the time and
            thread of the launch, the start, the end, and whether the kernel is one of NCCL's and
            belongs to no call yet.
    """

    rank: int
    world_size: int
    backend: str
    groups: dict[Any, Group]
    slices: list[dict[str, Any]]
    kernels: Ints

    def list_spans(self) -> Iterator[dict[str, Any]]:
        """Yields the columns of each span."""
        for event in self.slices:
            if event["cat"] != "user_annotation" or event["name"].startswith(_OURS):
                continue
            own = _during(self.kernels, event)
            kernels = _stretch(own[own[:, NCCL] == 0]) or _stretch(own)
            start_ns, end_ns = kernels or (event["start_ns"], event["end_ns"])
            for columns in _read_label(event["name"]):
                yield {"post_ns": start_ns, "done_ns": end_ns, "thread": event["thread"], **columns}


def read_profile(document: Any) -> Profile:
    """Reads the JSON document in a file; raises an error of ``DAMAGE`` if it is not a profile."""
    told = document.get("distributedInfo", {}) if isinstance(document, dict) else {}
    rank, size = told.get("rank"), told.get("world_size")
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= 10**6:
        raise ValueError(
            "it names no rank, because torch.distributed was not in use; read other Chrome traces "
            "with ringsim.exchange.read_chrome"
        )
    groups = told.get("pg_config", [])
    # a backend may be "cpu:gloo,cuda:nccl"; if the program chose none, only the groups name it
    backend = "nccl" if "nccl" in str([told.get("backend"), groups]) else told.get("backend")
    if backend not in ("gloo", "nccl"):
        raise ValueError(
            f"the run used the backend {str(backend)[:20]!r}, but ringsim reads only profiles of "
            "Gloo and NCCL"
        )
    base = document.get("baseTimeNanoseconds", 0)
    launches, kernels, slices = dict[Any, dict[str, Any]](), list[dict[str, Any]](), []
    for event in document["traceEvents"]:
        kind, name = event.get("cat"), event.get("name")
        if kind in _LAUNCHES:
            launches[event.get("args", {}).get("correlation")] = event
        elif kind == "kernel":
            kernels.append(event)
        elif kind == "user_annotation" or (kind == "cpu_op" and name.startswith(_CALLS)):
            slices.append({"args": {}, **event, **_times(base, event)})
    slices.sort(key=lambda event: (event["start_ns"], -event["end_ns"]))
    threads: dict[Any, int] = {}
    for event in slices:
        if not event["name"].startswith(_OURS):
            threads.setdefault(event["tid"], len(threads))
        event["thread"] = threads.get(event["tid"], -1)
    rows = []
    for event in kernels:
        launch = launches.get(event.get("args", {}).get("correlation"), event)
        rows.append(
            (
                base + to_ns(launch["ts"]),
                threads.get(launch["tid"], -1),
                *_times(base, event).values(),
                str(event.get("name")).startswith("nccl"),
            )
        )
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5)
    return Profile(rank, size, backend, _read_groups(groups), slices, table)


def _read_groups(told: list[dict[str, Any]]) -> dict[Any, Group]:
    groups: dict[Any, Group] = {}
    for about in told:
        name, word = str(about.get("pg_name")), str(about.get("pg_desc", ""))
        group = name_group(name, word, tuple(about["ranks"]))
        if group in groups.values():  # two groups of the same ranks may have the same description
            group = group._replace(name=f"{word} ({name})")
        groups[name] = group
    return groups


def _times(base: int, event: dict[str, Any]) -> dict[str, int]:
    start_ns = base + to_ns(event["ts"])
    return {"start_ns": start_ns, "end_ns": start_ns + to_ns(event.get("dur", 0))}


def _read_label(name: str) -> list[dict[str, Any]]:
    """Returns the label of a span, with its stage and microbatch if it is a computation.

    Two computations of a pipeline may share an annotation.

    Example:
        >>> _read_label("PP:2F0")
        [{'label': 'forward', 'stage': 2, 'microbatch': 0}]
        >>> _read_label("ProfilerStep#12"), _read_label("PP:2SEND_F0")
        ([{'label': 'step 12'}], [{'label': 'PP:2SEND_F0'}])
    """
    if name.startswith(_PROFILER_STEP):
        return [{"label": STEP + name.removeprefix(_PROFILER_STEP)}]
    actions = _ACTION.findall(name) if name.startswith("PP:") else []
    return [
        {"label": _LABELS[letter], "stage": int(stage), "microbatch": int(microbatch)}
        for stage, letter, microbatch in actions
    ] or [{"label": name}]
