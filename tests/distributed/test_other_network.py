"""What a run on this machine opens cannot be reached from another machine.

The two machines are two network namespaces with a cable between them; the network of the machine that runs the test is not touched.
Making them takes the right to; without it the test is skipped, and ``test_launch`` looks at the addresses in /proc.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE, THERE = "198.51.100.1", "198.51.100.2"  # of the two machines, which nobody else sees
PROGRAM = Path(__file__).with_name("reachable_ports.py")


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=90).stdout


@contextmanager
def make_machines(label: str, cables: Sequence[str] = ("cable",)) -> Iterator[tuple[str, str]]:
    """Yields the names of two network namespaces with cables between them, each a network of its own; skips where it cannot make them."""
    names = (f"ringsim-{label}-here-{os.getpid()}", f"ringsim-{label}-there-{os.getpid()}")
    made = []
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
                made.append(name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a network namespace cannot be made here: {getattr(error, 'stderr', '') or error}")
        for number, cable in enumerate(cables):
            command("ip", "-n", names[0], "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", names[1])
            for name, address in zip(names, (HERE, THERE), strict=True):
                there = ipaddress.ip_address(address) + 4 * number
                command("ip", "-n", name, "address", "add", f"{there}/30", "dev", cable)
                command("ip", "-n", name, "link", "set", cable, "up")
        for name in names:
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            command("ip", "netns", "delete", name)  # takes its cables along


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with a cable between them."""
    with make_machines("one") as names:
        yield names


def test_no_socket_of_a_run_is_reachable_from_another_network(machines: tuple[str, str]) -> None:
    here, there = machines
    printed = command("ip", "netns", "exec", here, sys.executable, str(PROGRAM), HERE, there)
    said = json.loads(printed.splitlines()[-1])  # before it, ranks that joined by themselves say so
    assert said["cable works"], "what listens everywhere is found"
    assert all(ports for run in said["ports"] for ports in run), "every rank listens: Gloo's pairs connect to it"
    assert said["reachable"] == [[], []]
