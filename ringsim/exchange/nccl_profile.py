"""Finds NCCL's operations in torch.profiler files, and compares the clocks of the ranks.

torch records each call. NCCL launches a kernel within the call, or for a batch when it ends::

    program's thread   | record: send |   | record: send | record: recv | nccl:coalesced |
                         launch                                           launch
    GPU                           | kernel |                                     |  kernel  |
                            post, wait   done                              post, wait     done

An operation has the times of its kernel. Kernels wait for each other, so ``post_ns`` is the moment
when the GPU reached the operation, and the rest of ringsim finds the GPU that was late.

The clocks are compared by the kernels of collectives, which end together.

Source:
    torch 2.13: torch/csrc/profiler/util.cpp (the entries of a record) and
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (the names of collectives).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ringsim.exchange.flight_recorder import SPELLINGS, read_payload
from ringsim.exchange.profile_file import NCCL, RECORD, Profile, Stretch, take_kernels
from ringsim.exchange.reading import find_first, list_left_out
from ringsim.traces.clocks import KERNELS, REFERENCE, UNKNOWN, align_run
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.event_rows import EventRows
from ringsim.traces.events import OP_CODES, OP_NAMES, Events, Ints
from ringsim.traces.matching import CollectiveCalls
from ringsim.traces.value import Trace

BATCH = "nccl:coalesced"
_NOT_CALLS = ("wait", "init")
_PEERS = {"send": "Dst Rank", "recv": "Src Rank"}


class NcclRun:
    """The NCCL operations of a run, collected file by file."""

    def __init__(self) -> None:
        self._left_out = Counter[str]()
        # each operation's rank, sequence number if it is a collective that has one, and columns
        self._operations: list[tuple[int, int | None, dict[str, Any]]] = []

    def read(self, found: Profile) -> None:
        """Reads a rank's operations."""
        for event, kernels, is_batch in _list_calls(found):
            args, called = event["args"], event["args"].get("Collective name")
            group = found.groups.get(args.get("Process Group Name"))
            op = SPELLINGS.get(called, str(called))
            if key := _PEERS.get(called):
                op = f"batch_i{called}" if is_batch else f"i{called}"
            if op not in OP_CODES:
                self._left_out[f"of unknown kind ({op[:40]})"] += 1
            elif kernels is None:
                self._left_out["without a kernel in the file"] += 1
            elif group is None:
                self._left_out["on groups that the file does not list"] += 1
            elif key and args.get(key) not in group.ranks:
                self._left_out["whose peer is missing in the file, or not in the group"] += 1
            else:
                start_ns, end_ns = kernels
                columns = {"op": op, "group": group, "thread": event["thread"]}
                columns |= {"post_ns": start_ns, "wait_ns": start_ns, "done_ns": end_ns}
                tensors = {
                    "input_sizes": [[args["In msg nelems"]]],
                    "output_sizes": [[args["Out msg nelems"]]],
                    "input_dtypes": [args["dtype"]],
                }
                columns["payload"] = read_payload(op, tensors, len(group.ranks))
                if key:
                    columns |= {"peer": args[key], "tag": 0}
                number = None if key else args.get("Seq")  # each rank numbers its own messages
                self._operations.append((found.rank, number, columns))
        if lost := int(found.kernels[:, NCCL].sum()):
            self._left_out["of which the file has only the kernel"] += lost

    def join(self, rows: EventRows, metadata: dict[str, Any]) -> Trace:
        """Returns the trace, given its spans; all times are on the clock of the first rank."""
        first = find_first(
            (columns["group"], rank, number)
            for rank, number, columns in self._operations
            if number is not None
        )
        for rank, number, columns in self._operations:
            if number is None or number >= first[columns["group"]]:
                rows.add(rank, **columns)
            else:
                self._left_out["that some rank called before its file begins"] += 1
        notes = metadata["notes"] + list_left_out(self._left_out)
        trace = rows.trace(metadata)
        events, clocks, _ = align_run(trace.events, _compare_clocks(trace.events), None)
        return replace(trace, events=events, metadata=metadata | {"notes": notes, "clocks": clocks})


def _list_calls(found: Profile) -> Iterator[tuple[dict[str, Any], Stretch | None, bool]]:
    """Yields each call, the times of its kernels, and whether the call is part of a batch.

    A batch's slice follows the calls in the batch, which have no kernels of their own.
    """
    waiting = defaultdict[int, list[dict[str, Any]]](list)
    ends = defaultdict[int, int](int)
    for event in found.slices:
        thread, called = event["thread"], event["args"].get("Collective name")
        if event["name"] not in (RECORD, BATCH) or event["end_ns"] <= ends[thread]:
            continue  # something else, or part of another call
        kernels = take_kernels(found.kernels, event)
        if event["name"] == BATCH:
            yield from ((call, kernels, True) for call in waiting.pop(thread, ()))
            continue
        ends[thread] = event["end_ns"]
        if called in _PEERS and kernels is None:
            waiting[thread].append(event)
        elif called not in _NOT_CALLS:
            yield event, kernels, False
    for calls in waiting.values():
        yield from ((call, None, False) for call in calls)


def _compare_clocks(events: Events) -> list[dict[str, Any]]:
    """Returns ``metadata["clocks"]``: each rank has its own clock, compared with the first rank's.

    A rank that shares no collective with the first rank is compared with a rank that has already
    been compared.
    """
    calls, ranks = CollectiveCalls.of(events), np.unique(events.rank).tolist()
    times = defaultdict[int, dict[int, Stretch]](dict)
    for call, at in zip(calls.call.tolist(), calls.event.tolist(), strict=True):
        if not COLLECTIVES[OP_NAMES[events.op[at]]].root:  # otherwise, some ranks end early
            times[events.rank[at]][call] = events.wait_ns[at], events.done_ns[at]
    compared = ranks[:1]
    clocks = {
        rank: {
            "ranks": [rank],
            "how": REFERENCE if rank in compared else UNKNOWN,
            "samples": [[0, 0, 0]],
        }
        for rank in ranks
    }
    for known in compared:
        for rank in sorted(clocks.keys() - compared):
            if shared := times[rank].keys() & times[known].keys():
                mine, other = ([times[one][call] for call in shared] for one in (rank, known))
                clocks[rank] |= _compare(np.array(mine), np.array(other), clocks[known])
                compared.append(rank)
    return [*clocks.values()]


def _compare(mine: Ints, other: Ints, known: dict[str, Any]) -> dict[str, Any]:
    """Compares a clock with a known one, given the starts and ends of the same kernels.

    The ends differ, but rarely by more than the shortest kernel took.
    """
    _, more, doubt = known["samples"][0]
    ahead = other[:, 1] - mine[:, 1]
    offset = int(np.median(ahead))
    shortest = np.diff([mine, other]).min()
    error = int(np.abs(ahead - offset).max() + shortest)
    sample = [int(np.median(mine[:, 1])), offset + more, error + doubt]
    return {"how": KERNELS, "samples": [sample]}
