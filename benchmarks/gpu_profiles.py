"""Measures the time to read the torch.profiler files of a run on 64 GPUs, with a million events.

Run ``python benchmarks/gpu_profiles.py``. The goal is 20 s. The script writes files of the size and
with the entries of real ones: of each 60 events, 10 belong to a message or a collective. It also
measures how long Python's JSON parser takes for the same files, and that the clocks, which are up
to a minute apart, are aligned.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ringsim
from ringsim.provenance import footer, machine, versions

RANKS = 64
GOAL_S = 20.0
OPERATORS = 10  # per message or collective, with five events each
KERNEL = {"queued": 0, "device": 0, "context": 1, "stream": 7, "registers per thread": 202,
          "shared memory": 49152, "blocks per SM": 0.969697, "warps per SM": 7.757576,
          "grid": [128, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 12}  # fmt: skip
SHAPES = {"Record function id": 0, "Sequence number": 40, "Fwd thread id": 0,
          "Concrete Inputs": ["", "", "1", "0"], "Input type": ["c10::BFloat16", "c10::BFloat16"],
          "Input Strides": [[4096, 1], [4096, 1]],
          "Input Dims": [[4096, 4096], [4096, 4096]]}  # fmt: skip


def list_events(rank: int, count: int, ahead_us: float) -> Iterator[dict[str, Any]]:
    """Yields the events of one rank: in each step, a message to a neighbour, or an all-reduce."""
    at, number, step = 0.0, 0, 0
    while number < count:
        step += 1
        begun = at
        for operator in range(OPERATORS):
            start = ahead_us + 100.0 * operator + at
            number += 5
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 604,
                      "tid": 604, "ts": start + 2, "dur": 5.5,
                      "args": {"External id": number, "cbid": 211,
                               "correlation": number}}  # fmt: skip
            kernel = {"ph": "X", "cat": "kernel", "name": "void cutlass::Kernel2<cutlass_80_gemm>",
                      "pid": 0, "tid": 7, "ts": start + 500, "dur": 95.25,
                      "args": {"External id": number, "correlation": number, **KERNEL}}  # fmt: skip
            flow = {"id": number, "pid": 604, "tid": 604, "ts": start + 2, "cat": "ac2g"}
            yield {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 604, "tid": 604,
                   "ts": start, "dur": 20.5,
                   "args": {"External id": number, "Ev Idx": number, **SHAPES}}  # fmt: skip
            yield launch
            yield {"ph": "s", "name": "ac2g", **flow}
            yield kernel
            yield {"ph": "f", "bp": "e", "name": "ac2g", **flow}
        at += 1000
        yield from list_call(rank, step, number, ahead_us + at)
        number += 10
        at += 100
        letter = "FB"[step % 2]
        yield {"ph": "X", "cat": "user_annotation", "name": f"PP:{rank}{letter}{step // 2}",
               "pid": 604, "tid": 604, "ts": ahead_us + begun, "dur": 1000,
               "args": {"External id": number, "Ev Idx": number}}  # fmt: skip


def list_call(rank: int, step: int, number: int, at: float) -> Iterator[dict[str, Any]]:
    """Yields the nine events of a message or, in every fourth step, of an all-reduce."""
    pair = rank + (1 if (rank + step) % 2 else -1)
    called = "allreduce" if step % 4 == 0 or not 0 <= pair < RANKS else ("recv", "send")[rank % 2]
    if step % 4 and called == "allreduce":  # the ranks at the ends have no neighbour
        return
    told = {"Collective name": called, "In msg nelems": 65536, "Out msg nelems": 65536,
            "Group size": RANKS, "dtype": "BFloat16", "In split size": "[]",
            "Out split size": "[]", "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": "[0, 1, ..., 63]"}  # fmt: skip
    told |= {"Seq": step // 4} if called == "allreduce" else {}
    told |= {"send": {"Dst Rank": pair}, "recv": {"Src Rank": pair}}.get(called, {})
    place = {"pid": 604, "tid": 604}
    gpu = {"pid": 0, "tid": 16, "ts": at + 800 + rank / 10, "dur": 90 - rank / 10}
    flow = {"id": number, **place, "ts": at + 8, "cat": "ac2g", "name": "ac2g"}
    external = {"External id": number}
    yield {"ph": "X", "cat": "cpu_op", "name": f"c10d::{called}_", **place, "ts": at, "dur": 50,
           "args": external | SHAPES}  # fmt: skip
    yield {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", **place, "ts": at + 5,
           "dur": 40, "args": external | SHAPES | told}  # fmt: skip
    yield {"ph": "X", "cat": "user_annotation", "name": f"nccl:{called}", **place, "ts": at + 6,
           "dur": 30, "args": external | SHAPES}  # fmt: skip
    yield {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", **place, "ts": at + 8,
           "dur": 5, "args": external | {"cbid": 652, "correlation": number + 1}}  # fmt: skip
    yield {"ph": "s", **flow}
    yield {"ph": "X", "cat": "gpu_user_annotation", "name": f"nccl:{called}", **gpu,
           "args": external}  # fmt: skip
    yield {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv(args)", **gpu,
           "args": external | KERNEL | told | {"correlation": number + 1}}  # fmt: skip
    yield {"ph": "f", "bp": "e", **flow}


def write_run(directory: Path, events: int) -> int:
    """Writes the files of a run, and returns the number of their events."""
    count = 0
    for rank in range(RANKS):
        told = list(list_events(rank, events // RANKS, ahead_us=rank * 1e6))
        count += len(told)
        info = {"backend": "nccl", "rank": rank, "world_size": RANKS, "pg_count": 1,
                "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": RANKS,
                               "backend_config": "cuda:nccl",
                               "ranks": [*range(RANKS)]}]}  # fmt: skip
        document = {"schemaVersion": 1, "distributedInfo": info,
                    "baseTimeNanoseconds": 1790857026000000000, "traceEvents": told}  # fmt: skip
        packed = gzip.compress(json.dumps(document).encode(), compresslevel=1)
        (directory / f"rank{rank}_trace.json.gz").write_bytes(packed)
    return count


def main() -> None:
    """Writes the files, reads them, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events in all files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        count = write_run(Path(directory), options.events)
        files = sorted(Path(directory).iterdir())
        begun, begun_cpu = time.perf_counter(), time.process_time()
        trace = ringsim.load(directory)
        took, took_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        begun, size = time.process_time(), 0
        for path in files:
            data = gzip.decompress(path.read_bytes())
            size += len(data)
            json.loads(data)
        parsing = time.process_time() - begun
    apart = max(abs(clock.offset_ns + 1e9 * clock.ranks[0]) for clock in trace.clocks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{RANKS} files, {count:,} events, {size / 1e6:.0f} MB unpacked")
    print(f"read in {took:.1f} s ({took_cpu:.1f} s of CPU time; the goal is {GOAL_S:.0f} s)")
    print(f"of which unpacking and Python's JSON parser: {parsing:.1f} s of CPU time")
    print(f"{len(trace):,} operations and spans, {len(trace.messages):,} messages, {peak} MiB")
    print(f"clocks wrong by at most {apart / 1000:.1f} us, {len(trace.unmatched)} unmatched")
    print(footer({"source": "measured", "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
