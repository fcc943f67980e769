"""Reads ``torch.profiler`` files, one per rank, and joins them into one trace.

A Gloo operation appears as two slices, the call and the work, which may be on different threads::

    program's thread     | c10d::send |                        post: the call begins
    Gloo's, or the same       | gloo:send           |          done: the work ends

Calls are matched with works in order, because Gloo performs works of the same kind in the order of
their calls. For NCCL, see ``nccl_profile``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringsim.exchange.nccl_profile import NcclRun
from ringsim.exchange.profile_file import Profile, read_profile
from ringsim.exchange.reading import (
    importing,
    list_files,
    make_payload,
    name_missing,
    read_bytes,
)
from ringsim.traces.documents import parse_json
from ringsim.traces.event_rows import EventRows
from ringsim.traces.events import ANY_SOURCE, IN_FLIGHT, NONE, OK, Group, Payload
from ringsim.traces.filtering import part_of_file

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace


PROFILES = (".json", ".json.gz")  # the extensions of files in a directory


class _Call(NamedTuple):
    """The meaning of a c10d operator.

    The fields hold ringsim's name for the operator, the work that the operator starts, and the
    positions of its inputs.
    """

    op: str
    work: str
    peer: int = NONE  # the input that holds the peer, or the root
    tag: int = NONE
    works: str = "one"  # "all": one work per rank in the group
    shards: bool = False  # whether the work's size is only one rank's share


_CALLS = {
    "c10d::send": _Call("isend", "send", peer=2, tag=3),
    "c10d::recv_": _Call("irecv", "recv", peer=2, tag=3),
    "c10d::recv_any_source_": _Call("irecv", "recvAnySource", tag=2),
    "c10d::allreduce_": _Call("all_reduce", "all_reduce"),
    "c10d::broadcast_": _Call("broadcast", "broadcast", peer=2),
    "c10d::reduce_": _Call("reduce", "reduce", peer=3),
    "c10d::allgather_": _Call("all_gather", "all_gather", shards=True),
    "c10d::_allgather_base_": _Call("all_gather_into_tensor", "all_gather", shards=True),
    "c10d::gather_": _Call("gather", "gather", peer=3, shards=True),
    "c10d::scatter_": _Call("scatter", "scatter", peer=3, shards=True),
    "c10d::_reduce_scatter_base_": _Call("reduce_scatter_tensor", "all_reduce"),
    "c10d::reduce_scatter_": _Call("reduce_scatter", "all_reduce", works="all", shards=True),
    "c10d::alltoall_": _Call("all_to_all", "all_to_all", shards=True),
    "c10d::alltoall_base_": _Call("all_to_all_single", "all_to_all"),
    "c10d::barrier": _Call("barrier", "barrier"),
    # this call itself waits; its messages appear as works
    "c10d::monitored_barrier_": _Call("monitored_barrier", ""),
}
_WORK = "gloo:"
# the profiler's name for each dtype -> torch's name
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "unsigned char": "uint8",
    "signed char": "int8",
    "short int": "int16",
    "int": "int32",
    "long int": "int64",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


def read_profiler(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Trace:
    """Reads ``torch.profiler`` files from the ranks of a run on Gloo or NCCL.

    ``torch.distributed`` operations become operations, and ``record_function`` blocks become spans.
    Other operators and kernels are left out. ``PP:2F0``, torch's annotation for a computation of a
    pipeline, becomes a span "forward" with the stage and the microbatch, and ``ProfilerStep#12``
    becomes "step 12", so that ``Trace.bubble`` finds the steps.

    On NCCL, an operation and a span have the times of their GPU kernels. A recv is posted when the
    GPU reaches it, so the time until the other GPU reaches the send counts as waiting for a late
    sender, and the rest as transfer. A span without kernels keeps its time in the program. The
    clocks are aligned by the kernels of the same operations, and ``Trace.clocks`` has the
    uncertainty. Operations on CPU tensors are left out.

    On Gloo, each rank must have been profiled with ``record_shapes=True``; otherwise, the profiler
    records neither peers nor sizes. The profiler never records when a rank began to wait, so
    ``wait_ns`` is unknown. Nor does it record an operation's group. ``read_profiler`` therefore
    treats all ranks as global ranks, and adds a note to the trace if the run had other groups. The
    clocks of different hosts are not aligned.

    Args:
        paths: the files written by ``export_chrome_trace``, one per rank, gzipped or not; or a
            directory that contains no other ``.json`` or ``.json.gz`` files. ``ringsim.load`` also
            accepts a file or a directory.

    Returns:
        The trace. Its notes list everything that the files lack. Operations whose other side is in
        a file that is missing do not count as unmatched.

    Raises:
        TraceFileError: a file is missing or is not a rank's profile, two files are from the same
            rank, or the run used neither Gloo nor NCCL.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> run = {"rank": 0, "world_size": 2, "backend": "nccl", "pg_config": []}
        >>> step = {"ph": "X", "cat": "user_annotation", "tid": 1, "ts": 0, "dur": 9.5}
        >>> profile = {"distributedInfo": run, "traceEvents": [step | {"name": "ProfilerStep#3"}]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = Path(directory, "rank0.json").write_text(json.dumps(profile))
        ...     trace = read_profiler(directory)
        >>> trace[0], trace.metadata["notes"][1]
        (rank 0: span 'step 3' from 0 ns to 9.5 µs, 'no file from rank 1')

    Source:
        torch 2.13: torch/csrc/distributed/c10d/Ops.cpp (operators and their arguments) and
        ProcessGroupGloo.cpp (names of works); for NCCL, see ``ringsim.exchange.nccl_profile``.
    """
    rows, nccl, profiles = EventRows(), NcclRun(), dict[int, Profile]()
    files = list_files(paths, lambda path: path.name.endswith(PROFILES))
    for path in files:
        data = read_bytes(path)
        with importing(path, "one rank's torch.profiler trace"):
            found = read_profile(parse_json(data))
            if found.rank in profiles:
                raise ValueError(f"two files are from rank {found.rank}; a run has one per rank")
            profiles[found.rank] = found
            for columns in found.list_spans():
                rows.add(found.rank, "span", **columns)
            if found.backend == "nccl":
                nccl.read(found)
            else:
                _add_operations(rows, found)
            found.slices.clear()  # they need much memory
    with importing(", ".join(map(str, files))[:200], "torch.profiler traces from one run"):
        return _join(rows, nccl, profiles)


def _join(rows: EventRows, nccl: NcclRun, profiles: dict[int, Profile]) -> Trace:
    """Returns the trace of a run whose files have been read."""
    size = max(found.world_size for found in profiles.values())
    backend, *others = {found.backend for found in profiles.values()}
    if others:
        raise ValueError("some of the ranks used Gloo and some used NCCL")
    notes = [
        "imported from torch.profiler: operations and spans have the times of their GPU kernels"
        if backend == "nccl"
        else "imported from torch.profiler, which does not record when a rank began to wait"
    ]
    notes += name_missing("file", profiles, size)
    metadata = {"world_size": size, "source": "measured", "backend": backend, "notes": notes}
    if backend == "gloo" and any(len(found.groups) > 1 for found in profiles.values()):
        notes.append(
            "the run had several groups, but the profiler does not record the group of an "
            "operation; ringsim treats all ranks as global ranks"
        )
    trace = nccl.join(rows, metadata) if backend == "nccl" else rows.trace(metadata)
    ranks = sorted(profiles)
    # otherwise, operations with other ranks would count as unmatched
    return part_of_file(trace, ranks, ranks, None, all_read=len(ranks) == size)


def _add_operations(rows: EventRows, found: Profile) -> None:
    """Adds a rank's Gloo operations."""
    world = Group("world", tuple(range(found.world_size)))
    waiting = defaultdict[str, deque[dict[str, Any]]](deque)
    ends = defaultdict[int, int](lambda: NONE)  # of barriers whose works are not operations
    for event in found.slices:
        name, thread = event["name"], event["tid"]
        if name in _CALLS and not _CALLS[name].work:
            ends[thread] = event["end_ns"]
        elif name.startswith(_WORK) and event["start_ns"] > ends[thread]:
            waiting[name.removeprefix(_WORK)].append(event)
    for event in found.slices:
        if (call := _CALLS.get(event["name"])) is None:
            continue
        queue = waiting[call.work]
        most = found.world_size if call.works == "all" else 1
        works = [queue.popleft() for _ in range(min(len(queue), most))]
        # a call without works itself waits
        done = max((work["end_ns"] for work in works), default=NONE)
        if not call.work:
            done = event["end_ns"]
        shards = found.world_size if call.shards else 1
        rows.add(
            found.rank,
            call.op,
            event["start_ns"],
            done_ns=done,
            status=OK if done != NONE else IN_FLIGHT,
            group=world,
            thread=event["thread"],
            tag=_input(event, call.tag),
            peer=ANY_SOURCE if call.work == "recvAnySource" else _input(event, call.peer),
            payload=_payload(works[0], shards) if works else None,
        )


def _input(event: dict[str, Any], place: int) -> int | None:
    if place == NONE:
        return None
    if "Concrete Inputs" not in event["args"]:
        raise ValueError("it contains neither peers nor sizes; profile with record_shapes=True")
    return int(event["args"]["Concrete Inputs"][place])


def _payload(work: dict[str, Any], times: int) -> Payload | None:
    """Returns a work's payload, which describes only the first tensor."""
    kinds, shapes = work["args"].get("Input type"), work["args"].get("Input Dims")
    if not kinds or not shapes or kinds[0] not in _DTYPES:
        return None
    shape = [times, *shapes[0]] if times > 1 else shapes[0]
    return make_payload(_DTYPES[kinds[0]], [shape])
