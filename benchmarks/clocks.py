"""Measures how well two hosts know the offset between their clocks.

The true offset is known, because the hosts are network namespaces, and one of them has a time
namespace.

    python benchmarks/clocks.py [--runs 100] [--busy PROCESSES] [--skew-s 5] [--ranks 1]

Each run is a recorded block in which messages travel around all ranks. The script prints the error
of the offset, and whether the error was always within the uncertainty. It also prints the number of
messages that arrived before they were sent (before and after alignment), and the time that
comparing clocks adds to entering and leaving a block. Creating the hosts requires root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paired import where

ADDRESSES = ("198.51.100.1", "198.51.100.2")
NAMES = tuple(f"ringsim-clock-{os.getpid()}-{number}" for number in range(2))
MESSAGES = 20
BUSY = "while True: pass"
SHIFT_CLOCK = Path(__file__).parent.parent / "tests" / "programs" / "shift_clock.py"


def run_rank(rank: int, size: int, runs: int, directory: str) -> None:
    """Records blocks, and compares clocks only in every other block.

    Rank 0 prints the time that each block took, and the offsets of its clocks.
    """
    import torch
    import torch.distributed as dist

    import ringsim
    from ringsim.launch import clocks, recording
    from ringsim.traces.clocks import unalign
    from ringsim.traces.value import Trace

    dist.init_process_group(
        "gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=size
    )
    switched: Any = recording
    for number in range(-2, 2 * runs):  # the first two do not count
        switched.ClockComparison = clocks.ClockComparison if number % 2 else lambda *_: None
        dist.barrier()
        begin = time.perf_counter()
        with ringsim.trace(f"{directory}/run.ringtrace") as recorded:
            inside = time.perf_counter()
            for _ in range(MESSAGES):
                sent = dist.isend(torch.zeros(8), (rank + 1) % size)
                dist.recv(torch.zeros(8), (rank - 1) % size)
                sent.wait()  # type: ignore[union-attr]
            inside = time.perf_counter() - inside
        dist.barrier()
        took_s = time.perf_counter() - begin - inside
        if rank == 0 and number >= 0:
            trace = recorded.trace
            told = [(clock.offset_ns, clock.uncertainty_ns) for clock in trace.clocks[1:]]
            raw = Trace(
                unalign(trace.events, trace.metadata.get("clocks", [])), {"world_size": size}
            )
            print(
                json.dumps(
                    [
                        number % 2,
                        took_s,
                        told,
                        int(raw.messages.early.sum()),
                        int(trace.messages.early.sum()),
                    ]
                ),
                flush=True,
            )
    dist.destroy_process_group()


@contextlib.contextmanager
def hosts(skew_s: float) -> Iterator[list[list[str]]]:
    """Creates two hosts, and yields a command prefix for each of them."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    made = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
            made.append(name)
        ip(
            "-n",
            NAMES[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            NAMES[1],
        )
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            for link in ("cable", "lo"):
                ip("-n", name, "link", "set", link, "up")
        with tempfile.NamedTemporaryFile("w") as names:
            names.write(
                "".join(f"{address} host{number}\n" for number, address in enumerate(ADDRESSES))
                + "127.0.0.1 localhost\n"
            )
            names.flush()
            at_home = (
                "hostname $1 && mount --make-rprivate / && mount --bind $2 /etc/hosts || exit 1; "
                'shift 2; exec "$@"'
            )
            time_of: tuple[list[str], list[str]] = (
                [],
                [sys.executable, str(SHIFT_CLOCK), str(round(skew_s * 1e9))],
            )
            unshare = ["unshare", "-m", "-u", "-p", "-f", "--mount-proc"]
            yield [
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    *unshare,
                    *time_of[number],
                    "sh",
                    "-c",
                    at_home,
                    "sh",
                    f"host{number}",
                    names.name,
                ]
                for number, name in enumerate(NAMES)
            ]
    finally:
        for name in made:
            ip("netns", "delete", name)


def main() -> int:
    """Runs all blocks, and prints a line for each result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        help="the number of processes that compute in the background (default: 0)",
    )
    parser.add_argument(
        "--skew-s",
        type=float,
        default=5,
        help="the seconds by which the second host's clock is off (default: 5)",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="the number of ranks on each host (default: 1)"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = 2 * options.ranks
    if options.rank is not None:
        run_rank(options.rank, size, options.runs, options.directory)
        return 0
    print(where())
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    try:
        with tempfile.TemporaryDirectory() as directory, hosts(options.skew_s) as prefixes:
            again = [
                sys.executable,
                __file__,
                "--runs",
                str(options.runs),
                "--ranks",
                str(options.ranks),
                "--directory",
                directory,
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [*prefixes[rank // options.ranks], *again, "--rank", str(rank)],
                    env=environment,
                    stdout=subprocess.PIPE,
                )
                for rank in range(size)
            ]
            said = [rank.communicate()[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                return 1
    finally:
        for process in busy:
            process.kill()
    rows = [json.loads(line) for line in said[0].splitlines()]
    with_clocks = [row for row in rows if row[0]]
    found = [tuple(clock) for row in with_clocks for clock in row[2]]
    off_ns = [abs(offset_ns + round(options.skew_s * 1e9)) for offset_ns, _ in found]
    within = sum(off <= bound for off, (_, bound) in zip(off_ns, found, strict=True))
    bound_us, off_us = (
        statistics.median(bound for _, bound in found) / 1e3,
        [off / 1e3 for off in off_ns],
    )
    print(
        f"error of the offset: {statistics.median(off_us):.1f} us (median), {max(off_us):.1f} us "
        "(maximum)"
    )
    print(
        f"stated uncertainty: {bound_us:.1f} us (median); the error was smaller in {within} of "
        f"{len(found)} runs"
    )
    early = [sum(row[column] for row in with_clocks) for column in (3, 4)]
    print(
        f"of {len(with_clocks) * MESSAGES * size} messages, {early[0]} arrived before they were "
        f"sent according to the clocks, and {early[1]} after alignment"
    )
    took_ms = [[1e3 * row[1] for row in rows if row[0] == kind] for kind in (0, 1)]
    without, with_them = map(statistics.median, took_ms)
    print(
        f"entering and leaving a block took {without:.1f} ms without comparing clocks, and "
        f"{with_them:.1f} ms with comparing them (medians)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
