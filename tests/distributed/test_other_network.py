"""What a run on this machine opens cannot be reached from another machine, and nobody else's user can read what it leaves.

The two machines are two network namespaces with a cable between them; the network of the machine that runs the test is not touched.
Making them takes the right to; without it the test is skipped, and ``test_launch`` looks at the addresses in /proc.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringsim
from ringsim.launch.ranks import get_launcher

HERE, THERE = "198.51.100.1", "198.51.100.2"  # of the two machines, which nobody else sees
PROGRAM = Path(__file__).with_name("reachable_ports.py")


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=90).stdout


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with a cable between them."""
    names = (f"ringsim-here-{os.getpid()}", f"ringsim-there-{os.getpid()}")
    made = []
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
                made.append(name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a network namespace cannot be made here: {getattr(error, 'stderr', '') or error}")
        command("ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HERE, THERE), strict=True):
            command("ip", "-n", name, "address", "add", f"{address}/30", "dev", "cable")
            command("ip", "-n", name, "link", "set", "cable", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            command("ip", "netns", "delete", name)  # takes the cable along


def test_no_socket_of_a_run_is_reachable_from_another_network(machines: tuple[str, str]) -> None:
    here, there = machines
    printed = command("ip", "netns", "exec", here, sys.executable, str(PROGRAM), HERE, there)
    said = json.loads(printed.splitlines()[-1])  # before it, ranks that joined by themselves say so
    assert said["cable works"], "what listens everywhere is found"
    assert all(ports for run in said["ports"] for ports in run), "every rank listens: Gloo's pairs connect to it"
    assert said["reachable"] == [[], []]


def test_what_a_run_leaves_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directories are 0700 while the ranks run, whatever the umask allows: nobody else gets at the files in them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    get_launcher().close()  # parked ranks have their directory elsewhere

    def modes() -> dict[str, int]:
        return {str(path.relative_to(tmp_path)): path.lstat().st_mode for path in tmp_path.rglob("*")}

    before = os.umask(0)
    try:
        found = ringsim.trace(modes, world_size=2).results[0]
    finally:
        get_launcher().close()
        os.umask(before)
    directories = {name: stat.S_IMODE(mode) for name, mode in found.items() if stat.S_ISDIR(mode)}
    files = [name for name, mode in found.items() if not stat.S_ISDIR(mode)]
    assert any(name.endswith(".events") for name in files), "the look found what the ranks write"
    assert set(directories.values()) == {0o700}, directories
    assert all("/" in name for name in files), "every file lies in one of them"
