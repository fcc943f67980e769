"""Processes and sockets, read from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

# Variables that launchers and schedulers set, and that torch.distributed, Gloo or ringsim read.
# Tests must not see those of the caller.
RANK_VARIABLES = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *(
        "TORCHELASTIC_",
        "SLURM_",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "PMIX_",
        "GLOO_",
        "NCCL_",
        "TORCH_DISTRIBUTED_",
        "RINGSIM_",
    ),
)


def descendants(pid: int) -> dict[int, str]:
    """Returns the descendants of a process: pid -> name."""
    children: dict[int, str] = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has just ended
        tasks = []
    for task in tasks:
        for child in map(int, read(task / "children").split()):
            children |= {child: read(Path(f"/proc/{child}/comm")).strip(), **descendants(child)}
    return children


def read(file: Path) -> str:
    """Returns the text of a file in /proc, "" if the process or thread has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def gone(pid: int) -> bool:
    """Returns whether a process has ended; a zombie counts as ended."""
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] in ([], ["Z"])


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Waits for a condition.

    Returns whether it became true before the limit, which prevents hangs.
    """
    deadline = time.monotonic() + limit_s
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true  # not evaluated again, because it may have changed since


def listening() -> set[str]:
    """Returns the addresses on which this process listens, in hexadecimal."""
    return {address for address, _ in _list_listening("self")}


def listening_ports(pid: int) -> list[int]:
    """Returns the ports on which a process listens."""
    return [int(port, 16) for _, port in _list_listening(pid)]


def _list_listening(pid: int | str) -> list[list[str]]:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has just closed it
            links.append(os.readlink(fd))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = ("tcp", "tcp6", "udp", "udp6")
    lines = [
        (name, line.split())
        for name in tables
        for line in read(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]
    ]
    return [
        words[1].split(":")
        for name, words in lines
        if words[9] in inodes and (words[3] == "0A" or name.startswith("udp"))
    ]
