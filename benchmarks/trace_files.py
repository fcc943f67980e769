"""Measures the time to save, load and explain a million events, and the size of the file.

The script compares ringsim's format with Chrome JSON. Run ``python benchmarks/trace_files.py``. The
goals are 0.5 s, 0.2 s, 1 s and 12 MB. The formats alternate, so a busy machine slows down both.
JSON has an advantage, because the time to convert columns to dictionaries and back does not count.

With ``--part 10``, the script writes a run of 64 ranks and 100 million events. In separate
processes, it loads one rank, loads a tenth of the time of one rank, and runs ``ringsim show`` on
the whole file. The goals are 2 s for each part, and 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringsim.provenance import footer, machine, versions
from ringsim.traces.events import NONE, OK, OP_CODES, OP_NAMES, Group, Payload, Tables, make_events
from ringsim.traces.files import GROUP_ROWS, load
from ringsim.traces.value import Trace

RANKS = 8
GOALS = {"save": (0.5, "s"), "load": (0.2, "s"), "explain": (1.0, "s"), "size": (12.0, "MB")}
# the operations of a stage for each microbatch: forward, then backward
STEP = [OP_CODES[name] for name in ("irecv", "span", "isend", "irecv", "span", "isend")]


def make_run(count: int, ranks: int = RANKS) -> Trace:
    """Returns the run of a pipeline on a ring.

    For each microbatch, each rank has two recvs, two sends and two spans, with gaps as random as in
    a real run.
    """
    rng = np.random.default_rng(0)
    rank = np.repeat(np.arange(ranks), -(-count // ranks))[:count]
    place = np.arange(count) - np.searchsorted(rank, rank)  # the index within the rank
    op = np.array(STEP)[place % len(STEP)]
    message, receives, forward = (
        op != OP_CODES["span"],
        op == OP_CODES["irecv"],
        place % len(STEP) < 3,
    )
    from_pred = receives == forward  # whether the peer is the predecessor
    pred, succ = (rank - 1) % ranks, (rank + 1) % ranks
    microbatch = place // len(STEP) % 32

    elapsed = np.cumsum(1500 + rng.exponential(12_000, count).astype(np.int64))
    post = elapsed - elapsed[np.searchsorted(rank, rank)]
    wait = post + 1000 + rng.exponential(4000, count).astype(np.int64)
    done = np.where(message, wait, post) + 500 + rng.exponential(30_000, count).astype(np.int64)
    columns = {
        "rank": rank,
        "op": op,
        "group": np.where(message, 1 + np.where(from_pred, pred, rank), NONE),
        "peer": np.where(message, np.where(from_pred, pred, succ), NONE),
        "tag": np.where(message, 2 * microbatch + forward, NONE),
        "payload": np.where(message, 0, NONE),
        "stage": rank,
        "microbatch": microbatch,
        "label": np.where(message, NONE, forward),
        "file": np.where(message, 0, NONE),
        "line": np.where(message, 10 + place % len(STEP), NONE),
        "post_ns": post,
        "wait_ns": np.where(message, wait, NONE),
        "done_ns": done,
        "status": np.full(count, OK),
    }
    pairs = tuple(
        Group(f"ring:{one}>{(one + 1) % ranks}", tuple(sorted((one, (one + 1) % ranks))))
        for one in range(ranks)
    )
    payloads = (Payload("float32", (4, 1024), 16384),)
    tables = Tables(
        (Group("world", tuple(range(ranks))), *pairs),
        payloads,
        ("backward", "forward"),
        ("train.py",),
    )
    metadata = {
        "format": 1,
        "world_size": ranks,
        "source": "measured",
        "machine": machine(),
        "versions": versions(),
    }
    return Trace(make_events(columns, tables), metadata)


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Returns the same events in the format of Chrome's trace viewer."""
    events, sizes = trace.events, trace.events.size_bytes
    columns = (
        events.rank,
        events.op,
        events.post_ns,
        events.done_ns,
        events.peer,
        events.tag,
        sizes,
        events.microbatch,
    )
    return [
        {
            "name": OP_NAMES[op],
            "ph": "X",
            "ts": post / 1e3,
            "dur": (done - post) / 1e3,
            "pid": rank,
            "tid": 0,
            "args": {"peer": peer, "tag": tag, "size_bytes": size, "microbatch": microbatch},
        }
        for rank, op, post, done, peer, tag, size, microbatch in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def timed(action: Callable[[], Any]) -> float:
    """Returns the seconds that ``action`` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def first_load(path: str) -> float:
    """Returns the seconds to load a file in a fresh interpreter, which must import pyarrow."""
    code = (
        "import time; from ringsim.traces.files import load; t = time.perf_counter(); "
        f"load({path!r}); print(time.perf_counter() - t)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )


def measure(count: int, repeats: int, directory: str) -> dict[str, dict[str, list[float]]]:
    """Saves and loads both formats in turn.

    Returns the seconds or megabytes, by action and by format.
    """
    trace = make_run(count)
    events = chrome_events(trace)
    ours, theirs = os.path.join(directory, "run.ringtrace"), os.path.join(directory, "run.json")
    found: dict[str, dict[str, list[float]]] = {
        what: {"ringtrace": [], "json": []} for what in GOALS
    }
    found["first load"] = {"ringtrace": [], "json": []}

    def dump() -> None:
        with open(theirs, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)

    def parse() -> None:
        with open(theirs, encoding="utf-8") as file:
            json.load(file)

    for _ in range(repeats):
        found["save"]["ringtrace"].append(timed(lambda: trace.save(ours)))
        found["save"]["json"].append(timed(dump))
        found["load"]["ringtrace"].append(timed(lambda: load(ours)))
        found["load"]["json"].append(timed(parse))
        found["explain"]["ringtrace"].append(timed(load(ours).explain))
        found["first load"]["ringtrace"].append(first_load(ours))
    found["size"] = {
        "ringtrace": [os.path.getsize(ours) / 1e6],
        "json": [os.path.getsize(theirs) / 1e6],
    }
    if load(ours) != trace:
        raise SystemExit("the loaded trace differs from the saved trace")
    return found


def write_long(path: str, turns: int) -> int:
    """Writes a run of 64 ranks that repeats the same events ``turns`` times, rank by rank.

    Returns the number of events.
    """
    trace = make_run(10_000_000, 64)
    trace.save(path)
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read("meta.json"))
        table = pq.read_table(io.BytesIO(archive.read("events.parquet")))
    times = ["seq", "post_ns", "wait_ns", "done_ns"]
    look = {
        "use_dictionary": [name for name in table.column_names if name not in times],
        "column_encoding": dict.fromkeys(times, "DELTA_BINARY_PACKED"),
        "write_statistics": ["rank", "post_ns"],
    }
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path)) as file:
        with pq.ParquetWriter(
            file.name,
            table.schema,
            compression="zstd",
            compression_level=1,
            write_page_checksum=True,
            **look,
        ) as writer:
            for start, end in itertools.pairwise(
                np.searchsorted(trace.events.rank, np.arange(65)).tolist()
            ):
                once = table.slice(start, end - start)
                last_ns = pc.max(once["done_ns"]).as_py() + 1
                for turn in range(turns):
                    added = {
                        name: turn * (end - start if name == "seq" else last_ns) for name in times
                    }
                    columns = {
                        name: pc.add(once[name], pa.scalar(added.get(name, 0), once[name].type))
                        for name in table.column_names
                    }
                    writer.write_table(
                        pa.table(columns, schema=table.schema), row_group_size=GROUP_ROWS
                    )
        meta["events"] = len(trace.events) * turns
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("meta.json", json.dumps(meta))
            archive.write(file.name, "events.parquet")
    return int(meta["events"])


def measure_alone(call: str, count: str) -> tuple[float, float, int]:
    """Evaluates a call in a separate process.

    Returns the seconds that it took, the peak memory in MiB, and the number of events.
    """
    code = (
        "import time; from ringsim.traces.files import load; from ringsim.traces.summary import "
        "count_file; start = time.perf_counter(); "
        f"got = {call}; took = time.perf_counter() - start; "
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')); "
        f"print(took, int(peak.split()[1]) / 1024, {count})"
    )
    seconds, mebibytes, number = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), float(mebibytes), int(number)


def measure_parts(turns: int, repeats: int) -> None:
    """Prints the time and memory to read parts of a long run, and to summarise the run."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "long.ringtrace")
        count = write_long(path, turns)
        print(
            f"{count:,} events of 64 ranks, {os.path.getsize(path) / 1e6:.0f} MB; median of "
            f"{repeats} (min .. max)"
        )
        end_s = load(path, ranks=7).events.done_ns.max() * 1e-9
        parts = [
            f"load({path!r}, {asked})"
            for asked in ("ranks=7", f"ranks=7, between_s=(0, {end_s / 10:.6g})")
        ]
        for call, number in (
            *((part, "len(got)") for part in parts),
            (f"count_file({path!r})", "got.num_events"),
        ):
            found = [measure_alone(call, number) for _ in range(repeats)]
            seconds = sorted(one[0] for one in found)
            print(
                f"{call.replace(repr(path), 'path')}: {found[0][2]:,} events, "
                f"{statistics.median(seconds):.2f} s "
                f"({seconds[0]:.2f} .. {seconds[-1]:.2f}), {max(one[1] for one in found):.0f} MiB"
            )


def main() -> None:
    """Prints the table, and whether the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--part",
        type=int,
        metavar="TURNS",
        help="read parts of a run with TURNS times ten million events",
    )
    arguments = parser.parse_args()
    if arguments.part:
        measure_parts(arguments.part, arguments.repeats)
        return
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments.events, arguments.repeats, directory)
    where = footer(
        {
            "source": "measured",
            "machine": machine(),
            "date": datetime.now(tz=UTC).date().isoformat(),
        }
    )
    print(f"{arguments.events:,} events, median of {arguments.repeats} (min .. max); {where}")
    print(f"{'':11} {'.ringtrace':>28} {'Chrome JSON':>28} {'ratio':>7}   goal")
    for what, formats in found.items():
        goal, unit = GOALS.get(what, (None, "s"))
        middle = {name: statistics.median(values) for name, values in formats.items() if values}
        cells = [
            f"{middle[name]:8.3f} ({min(formats[name]):.3f} .. {max(formats[name]):.3f}) {unit}"
            if name in middle
            else "-"
            for name in formats
        ]
        ratio = f"{middle['json'] / middle['ringtrace']:6.0f}x" if "json" in middle else ""
        verdict = (
            ""
            if goal is None
            else f"{goal} {unit}: {'met' if middle['ringtrace'] <= goal else 'missed'}"
        )
        print(f"{what:11} {cells[0]:>28} {cells[1]:>28} {ratio:>7}   {verdict}")


if __name__ == "__main__":
    main()
