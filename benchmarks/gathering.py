"""Measures the cost of gathering the parts of a run on rank 0.

The parts arrive over the store, and rank 0 writes a single file.

    python benchmarks/gathering.py [--events 10000000] [--ranks 64]

The script writes the parts in advance. Two processes without a shared directory then do the work
that ends a recorded block. One offers the parts of all ranks except rank 0 over torch's store, and
the other fetches the parts and writes the file. A third process hosts the store. The script prints
the rates, and the growth of each process. The goals are 50 MiB/s, 16 MiB for the store, and 64 MiB
for rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from paired import where
from trace_files import make_run

from ringsim.traces.events import NONE, RECORD
from ringsim.traces.recorder import Recorder

RUN_ID = "benchmark"


def write_parts(directories: tuple[Path, Path], count: int, ranks: int) -> int:
    """Writes the parts of a run: rank 0's into the first directory, all others into the second.

    Returns the size of the files in the second directory, in bytes.
    """
    for rank in range(ranks):
        trace = make_run(-(-count // ranks), 1)
        recorder = Recorder(directories[min(rank, 1)], rank, ranks)
        recorder.set_meta("run_id", RUN_ID)
        recorder.group("world", range(ranks))
        for payload in trace.events.tables.payloads:
            recorder.payload(payload.dtype, list(payload.shape), payload.size_bytes)
        path = recorder.directory / f"rank-{rank}.events"
        recorder.close()
        records = np.zeros(len(trace), dtype=RECORD)
        for name in RECORD.names or ():
            records[name] = getattr(trace.events, name)
        for name, value in (
            ("group", 0),
            ("label", NONE),
            ("file", NONE),
            ("peer", (rank + 1) % ranks),
        ):
            records[name] = value
        records["thread"] = 1
        path.write_bytes(records.tobytes())
    return sum(path.stat().st_size for path in directories[1].iterdir())


def memory_mib(what: str = "VmHWM", pid: int | None = None) -> float:
    """Returns the peak memory of a process, or its current memory (``VmRSS``)."""
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def take_part(role: str, port: int, directories: tuple[Path, Path], ranks: int) -> None:
    """Does the work of one of the two processes; rank 0 prints its time and memory."""
    from datetime import timedelta

    import torch.distributed as dist

    from ringsim.launch import gathering
    from ringsim.launch.block import BlockStore, place_of
    from ringsim.launch.merging import Merge

    store = BlockStore(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60)), RUN_ID)
    mine = directories[0 if role == "rank 0" else 1]
    place = {**place_of(mine), "id": role, "start_ns": 1}
    if role != "rank 0":
        for rank in range(1, ranks):
            store.put(f"at/{rank}", place)
        wanted = store.take("wants/1", lambda: True) or []
        gathering.send(store, 1, mine, wanted, asked=True)
        return
    while not store.has(f"at/{ranks - 1}"):
        time.sleep(0.01)
    warm = make_run(1000, 2)
    warm.save(mine / "warm.ringtrace")  # loads pyarrow
    before_mib, begin_s = memory_mib("VmRSS"), time.perf_counter()
    bring = gathering.Gathering(store, mine, ranks)
    bring.fetch([*range(1, ranks)], lambda: True)
    fetched_s, fetched_mib = time.perf_counter() - begin_s, memory_mib() - before_mib
    Merge(
        directory=mine,
        path=mine / "run.ringtrace",
        world_size=ranks,
        start_ns=0,
        origin={"world_size": ranks},
        said={},
        late=[],
        missing=bring.missing,
        watched=False,
    ).write()
    took_s = time.perf_counter() - begin_s - fetched_s
    bring.acknowledge(whole=True, keep=False)
    print(
        json.dumps(
            [
                bring.missing,
                fetched_s,
                fetched_mib,
                took_s,
                memory_mib() - before_mib,
                os.path.getsize(mine / "run.ringtrace"),
            ]
        )
    )


def main() -> int:
    """Writes the parts, starts the processes, and prints the results of rank 0."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, port, one, other = options.role
        take_part(role, int(port), (Path(one), Path(other)), options.ranks)
        return 0
    print(where())
    with tempfile.TemporaryDirectory() as directory:
        directories = Path(directory, "here"), Path(directory, "there")
        length = write_parts(directories, options.events, options.ranks)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before_mib = memory_mib("VmRSS")
        again = [sys.executable, __file__, "--ranks", str(options.ranks), "--role"]
        here = subprocess.Popen(
            [*again, "rank 0", str(store.port), *map(str, directories)], stdout=subprocess.PIPE
        )
        there = subprocess.Popen([*again, "sender", str(store.port), *map(str, directories)])
        said, highest_mib = b"", before_mib
        while here.poll() is None:
            highest_mib = max(highest_mib, memory_mib("VmRSS"))
            time.sleep(0.01)
        said = here.communicate()[0]
        there.wait()
    if here.returncode or there.returncode:
        return 1
    missing, fetched_s, fetched_mib, took_s, most_mib, size = json.loads(said)
    print(
        f"{options.events:,} events of {options.ranks} ranks, with {length / 2**20:.0f} MiB of "
        f"parts on the other host; missing: {missing or 'nothing'}"
    )
    print(
        f"fetched the parts in {fetched_s:.1f} s ({length / 2**20 / fetched_s:.0f} MiB/s); rank 0 "
        f"grew by {fetched_mib:.0f} MiB"
    )
    print(
        f"wrote the file ({size / 1e6:.1f} MB) in {took_s:.1f} s; rank 0 grew by {most_mib:.0f} "
        f"MiB in total, and the store by {highest_mib - before_mib:.0f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
