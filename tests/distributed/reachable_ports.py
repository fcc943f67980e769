"""A program for one of two connected machines.

It finds the ports of a run that the other machine can reach.

    python reachable_ports.py ADDRESS-OF-THIS-ONE NAMESPACE-OF-THE-OTHER

It prints, as JSON, the ports that ranks listen on, the ports that were open to the other machine,
and whether a port that should be open was open.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import ringsim

KNOCK = """
import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.socket() as door:
        door.settimeout(2)
        if door.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def reachable(ports: list[int], here: str, there: str) -> list[int]:
    words = ["ip", "netns", "exec", there, sys.executable, "-c", KNOCK, here, *map(str, ports)]
    return [
        int(port)
        for port in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    ]


def listening() -> list[int]:
    """Returns the ports on which this process listens, from /proc."""
    inodes = {os.readlink(fd)[8:-1] for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        int(words[1].split(":")[1], 16)
        for words in lines
        if words[9] in inodes and words[3] == "0A"
    ]


def rank(here: str, there: str) -> tuple[list[list[int]], list[int]]:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ports: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ports, listening())
    found = (
        reachable([port for each in ports for port in each], here, there)
        if dist.get_rank() == 0
        else []
    )
    dist.barrier()  # until then, all of them listen
    return ports, found


if __name__ == "__main__":
    with socket.create_server(("", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        cable_works = reachable([port], *sys.argv[1:]) == [port]
    results = [
        ringsim.trace(rank, world_size=2, args=sys.argv[1:], ring=ring).results[0]
        for ring in (True, False)
    ]
    print(
        json.dumps(
            {
                "cable works": cable_works,
                "ports": [ports for ports, _ in results],
                "reachable": [found for _, found in results],
            }
        )
    )
