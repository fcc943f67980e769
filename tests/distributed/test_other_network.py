"""Tests that another machine cannot reach the ports that a run opens.

The machines are network namespaces, each with a cable to a switch; the network of the testing
machine is not touched. Creating namespaces needs privileges. Without them the test is skipped, and
``test_launch`` checks the addresses in /proc.
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

# the machines' network, invisible to others
ADDRESSES = HERE, THERE, _ = "198.51.100.1", "198.51.100.2", "198.51.100.3"
PROGRAM = Path(__file__).with_name("reachable_ports.py")


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def make_machines(
    label: str, count: int = 2, cables: Sequence[str] = ("cable",)
) -> Iterator[tuple[str, ...]]:
    """Yields the names of network namespaces, each with a cable to a switch."""
    names = [f"ringsim-{label}-{number}-{os.getpid()}" for number in range(count)]
    switch = f"ringsim-{label}-switch-{os.getpid()}"
    made = []
    try:
        try:
            for name in (switch, *names):
                command("ip", "netns", "add", name)
                made.append(name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"a network namespace cannot be made here: {getattr(error, 'stderr', '') or error}"
            )
        for network, cable in enumerate(cables):
            command("ip", "-n", switch, "link", "add", cable, "up", "type", "bridge")
            for number, name in enumerate(names):
                plug = f"{cable}{number}"
                ends = f"{cable} type veth peer name {plug} netns {switch}"
                command("ip", "-n", name, "link", "add", *ends.split())
                command("ip", "-n", switch, "link", "set", plug, "master", cable, "up")
                address = ipaddress.ip_address(ADDRESSES[number]) + 8 * network
                command("ip", "-n", name, "address", "add", f"{address}/29", "dev", cable)
                command("ip", "-n", name, "link", "set", cable, "up")
        for name in names:
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield tuple(names)
    finally:
        for name in made:
            command("ip", "netns", "delete", name)  # also removes its cables


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """Yields the names of two, or of more, network namespaces that reach each other."""
    with make_machines("one", getattr(request, "param", 2)) as names:
        yield names


def test_no_socket_of_a_run_is_reachable_from_another_network(machines: tuple[str, ...]) -> None:
    here, there = machines
    printed = command("ip", "netns", "exec", here, sys.executable, str(PROGRAM), HERE, there)
    # earlier lines are reports of ranks that connected by themselves
    said = json.loads(printed.splitlines()[-1])
    assert said["cable works"], "a port that is open to all machines must be found"
    assert all(ports for run in said["ports"] for ports in run), (
        "every rank must listen, because Gloo's pairs connect to it"
    )
    assert said["reachable"] == [[], []]
