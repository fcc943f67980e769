"""A pipeline on three hosts with one slow link between two of them, and the recording of its traces for lesson 11.

    python notebooks/data/hosts.py [directory]      writes hosts_dealt, hosts_grouped and hosts_reordered.ringtrace

Run it as root on Linux. The hosts are namespaces (a network, a name and a clock for each), joined by cables of limited speed. The default
directory is that of this file. Every run gives different times, so you run this by hand and commit the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import ringsim
from ringsim.pipeline import Costs, make_schedule, rehearse

HERE = Path(__file__).resolve().parent
AHEAD_S = (0, 5, 2)  # offset of each host's clock
SLOW = (1, 2)  # the hosts at the ends of the slow cable
RATES = {False: "400mbit", True: "50mbit"}
MICROBATCHES, SIZE_BYTES = 8, 256 * 1024
# The host of each rank, and the order of the ring.
RUNS = {
    "hosts_dealt": ([0, 1, 2, 0, 1, 2], None),
    "hosts_grouped": ([0, 0, 1, 1, 2, 2], None),
    "hosts_reordered": ([0, 0, 1, 1, 2, 2], [2, 3, 0, 1, 4, 5]),
}


def command(*words: str) -> None:
    subprocess.run(words, check=True)


def name_of(host: int) -> str:
    return f"ringsim-lesson-{host}"


def address_of(host: int) -> str:
    return f"198.51.100.{host + 1}"  # from a block reserved for examples


def make_hosts() -> None:
    """Creates the networks of the hosts, with a cable between each pair."""
    for host in range(len(AHEAD_S)):
        command("ip", "netns", "add", name_of(host))
        command("ip", "-n", name_of(host), "link", "set", "lo", "up")
    for host in range(len(AHEAD_S)):
        for other in range(host):
            command(
                "ip", "-n", name_of(host), "link", "add", f"to{other}", "type", "veth", "peer", "name", f"to{host}", "netns", name_of(other)
            )
            for here, there in ((host, other), (other, host)):
                end = ["dev", f"to{there}"]
                command("ip", "-n", name_of(here), "address", "add", f"{address_of(here)}/32", *end)
                command("ip", "-n", name_of(here), "link", "set", f"to{there}", "up")
                command("ip", "-n", name_of(here), "route", "add", address_of(there), *end, "src", address_of(here))
                rate = RATES[{here, there} == set(SLOW)]
                command("tc", "-n", name_of(here), "qdisc", "add", *end, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "1s")


def run(name: str, directory: Path) -> None:
    """Runs the pipeline, each rank on its host, and saves the trace of rank 0."""
    places, _ = RUNS[name]
    hosts = []
    for host, ahead_s in enumerate(AHEAD_S):
        ranks = [str(rank) for rank, place in enumerate(places) if place == host]
        words = ["ip", "netns", "exec", name_of(host), "unshare", "-u", "-T", "--monotonic", str(ahead_s), "--boottime", str(ahead_s), "-f"]
        words += ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", f"host{host}", sys.executable, __file__]
        interface = f"to{0 if host else 1}"
        environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "RINGSIM_HOST_RANKS": " ".join(ranks)}
        hosts.append(subprocess.Popen([*words, str(directory), name], env=environment))
    assert [host.wait() for host in hosts] == [0] * len(hosts)


def start_ranks(directory: Path, name: str) -> int:
    """Starts the ranks of a host, and waits for them."""
    ranks = os.environ.pop("RINGSIM_HOST_RANKS").split()
    variables = {"WORLD_SIZE": str(len(RUNS[name][0])), "MASTER_ADDR": address_of(0), "MASTER_PORT": "29500"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(directory), name], env=os.environ | variables | {"RANK": rank, "LOCAL_RANK": str(place)}
        )
        for place, rank in enumerate(ranks)
    ]
    return max(process.wait() for process in processes)


def rank(directory: Path, name: str) -> None:
    """Runs one rank."""
    ringsim.initialize_distributed(ring_ranks=RUNS[name][1])
    schedule = make_schedule("1f1b", len(AHEAD_S) * 2, MICROBATCHES)
    with ringsim.trace(directory / f"{name}.ringtrace") as recording:
        rehearse(schedule, Costs(forward=0.006, backward=0.012), size_bytes=SIZE_BYTES, steps=2)
    if ringsim.current_ring().rank == 0:
        trace = recording.trace.redact()
        trace.save(directory / f"{name}.ringtrace")
        print(f"{name}: {trace.summary()}", *trace.clocks, sep="\n")
    ringsim.destroy_distributed()


def record(directory: Path) -> None:
    """Records all runs."""
    try:
        make_hosts()
        for name in RUNS:
            run(name, directory)
    finally:
        for host in range(len(AHEAD_S)):
            with suppress(subprocess.CalledProcessError):
                command("ip", "netns", "delete", name_of(host))  # also deletes the cables


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    if "RINGSIM_HOST_RANKS" in os.environ:
        sys.exit(start_ranks(where, sys.argv[2]))
    if "RANK" in os.environ:
        rank(where, sys.argv[2])
    else:
        record(where)
