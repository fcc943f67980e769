"""Two hosts, and what becomes of a recording when the link between them is cut, or ranks and hosts are killed: all cases at once.

The hosts are namespaces that forked ranks enter. Each case waits for what ranks say, never for a time, but for a link that is down for 3 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_rows import DOCUMENT
from rank_server import Ended, RankServer
from test_gathering import finish_sending
from test_other_network import HERE, THERE, command, make_machines

import ringsim
from ringsim.cli import main

pytestmark = pytest.mark.timeout(120)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
DOWN_S = 3
PATIENCE_S = 60


def enter_host(machine: str, name: str, private: str) -> None:
    """Moves this process, which has one thread, to a host of its own network and names."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{machine}") as network:
        assert libc.setns(network.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    script = 'hostname "$0" && mount --make-rprivate / && mount --bind "$1" /etc/hosts'
    subprocess.run(["sh", "-c", script, name, f"{private}/hosts"], check=True)


def messages(rank: int, directory: Path) -> None:
    """Ranks 0 and 1 exchange messages until the file ``enough`` is there."""
    on = torch.ones(1)
    while on.item():
        if rank == 0:
            on.fill_(float(not (directory / "enough").exists()))
            dist.send(on, 1)
            dist.recv(torch.zeros(1), 1)
        else:
            dist.recv(on, 0)
            dist.send(torch.zeros(1), 0)
        time.sleep(0.005)


def waits(rank: int, directory: Path) -> None:
    """Ranks 0 and 3 wait for rank 2, which is in no operation, and rank 1 waits for rank 0."""
    if rank == 2:
        signal.pause()
    dist.recv(torch.zeros(1), {0: 2, 1: 0, 3: 2}[rank])


@dataclass(frozen=True)
class Case:
    """What the ranks do, how many are on each host, what happens to them, and the limit of the group's operations."""

    program: Callable[[int, Path], None]
    ranks: tuple[int, int]
    happens: Callable[[Happening], None]
    limit_s: int = PATIENCE_S
    cables: tuple[str, ...] = ("cable",)


@dataclass(frozen=True)
class Happening:
    """A case that is under way."""

    machines: tuple[str, str]
    directory: Path

    def wait_for(self, name: str, words: str = "") -> None:
        """Waits until a file is there, and has some words in it."""
        deadline = time.monotonic() + PATIENCE_S
        while not ((path := self.directory / name).exists() and words in path.read_text()):
            assert time.monotonic() < deadline, f"{name} must say {words!r}: {path.read_text() if path.exists() else None}"
            time.sleep(0.01)

    def listeners(self) -> list[str]:
        """Returns what listens on both hosts."""
        return [command("ip", "netns", "exec", name, "ss", "--tcp", "--udp", "--listening", "--numeric") for name in self.machines]

    def link(self, cable: str, state: str) -> None:
        command("ip", "-n", self.machines[1], "link", "set", cable, state)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(int((self.directory / f"pid-{rank}").read_text()), signal.SIGKILL)


def down_for_a_while(case: Happening) -> None:
    case.wait_for("going-0")
    case.link("cable", "down")
    time.sleep(DOWN_S)
    case.link("cable", "up")
    case.wait_for("said-0", "then the link recovered")
    (case.directory / "enough").touch()


def down_for_good(case: Happening) -> None:
    """Of two networks the one that carries the messages; it comes back so that the ranks can end."""
    case.wait_for("going-0")
    case.link("data", "down")
    case.wait_for("said-0", "though both sides have posted")
    case.link("data", "up")
    case.wait_for("said-0", "then it recovered")
    (case.directory / "enough").touch()


def rank_dies(case: Happening) -> None:
    for rank in range(4):
        case.wait_for(f"joined-{rank}")
    listened = case.listeners()
    assert all(host.count("LISTEN") for host in listened), "Gloo's"
    (case.directory / "record").touch()
    for rank in range(4):
        case.wait_for(f"going-{rank}")
    assert case.listeners() == listened, "recording listens nowhere"
    case.kill(2)


def host_dies(case: Happening) -> None:
    for rank in range(4):
        case.wait_for(f"going-{rank}")
    case.link("cable", "down")
    case.kill(2, 3)


def host_of_rank_0_dies(case: Happening) -> None:
    for rank in range(4):
        case.wait_for(f"going-{rank}")
    case.link("cable", "down")
    case.kill(0, 1)


def wait_for_rank_0(rank: int, directory: Path) -> None:
    dist.recv(torch.zeros(1), 1 - min(rank, 1))


CASES = {
    "down for a while": Case(messages, (1, 1), down_for_a_while),
    "down for good": Case(messages, (1, 1), down_for_good, cables=("cable", "data")),
    "a rank dies": Case(waits, (2, 2), rank_dies),
    "a host dies": Case(waits, (2, 2), host_dies, 8),
    "rank 0's host dies": Case(wait_for_rank_0, (2, 2), host_of_rank_0_dies, 8),
}


def be_rank(name: str, machines: tuple[str, str], directory: str, rank: int) -> None:
    case, place = CASES[name], Path(directory)
    host = int(rank >= case.ranks[0])
    enter_host(machines[host], f"node{host}", directory)
    sys.stderr = (place / f"said-{rank}").open("w", buffering=1)
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    os.environ |= {"RINGSIM_PARTS": f"{directory}/node{host}", "GLOO_SOCKET_IFNAME": case.cables[-1], "TORCH_CPP_LOG_LEVEL": "FATAL"}
    limit = timedelta(seconds=case.limit_s)
    dist.init_process_group("gloo", init_method=f"tcp://{HERE}:29500", rank=rank, world_size=sum(case.ranks), timeout=limit)
    (place / f"joined-{rank}").touch()
    while name == "a rank dies" and not (place / "record").exists():
        time.sleep(0.01)
    with contextlib.suppress(RuntimeError), ringsim.trace(place / "run.ringtrace") as recording:
        while not (recording._hosts._heard if rank == 0 else (place / "going-0").exists()):  # type: ignore[union-attr]
            time.sleep(0.01)
        (place / f"going-{rank}").touch()
        case.program(rank, place)
    finish_sending()


@pytest.fixture(scope="module")
def ended(server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, list[Ended]]]]:
    """Runs all cases; where each left its files, and how its ranks ended."""
    with ExitStack() as made:
        asked, happenings = [], {}
        for number, (name, case) in enumerate(CASES.items()):
            directory = tmp_path_factory.mktemp("case")
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} node0\n{THERE} node1\n")
            machines = made.enter_context(make_machines(str(number), case.cables))
            happenings[name] = Happening(machines, directory)
            asked += [(name, machines, str(directory), rank) for rank in range(sum(case.ranks))]
        with ThreadPoolExecutor(len(CASES)) as pool:
            happen = [pool.submit(CASES[name].happens, happening) for name, happening in happenings.items()]
            found = server.run(be_rank, asked, limit_s=100)
            for one in happen:
                one.result()
        yield {
            name: (happening.directory, [end for end, words in zip(found, asked, strict=True) if words[0] == name])
            for name, happening in happenings.items()
        }


def expected(row: str) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of finding and the ranks that docs/faults.md has in one of its rows."""
    (line,) = re.findall(rf"^\| {row} \|.*$", DOCUMENT.read_text(), re.MULTILINE)
    _, _, _, kind, ranks, _ = (cell.strip() for cell in line.strip("|").split("|"))
    return kind, tuple(int(rank) for rank in ranks.split(",") if rank)


def said(case: tuple[Path, list[Ended]], rank: int) -> list[str]:
    return (case[0] / f"said-{rank}").read_text().splitlines()


def test_a_link_that_was_down_is_told_of_once_it_is_back(ended: dict[str, tuple[Path, list[Ended]]]) -> None:
    """Both traces used to say nothing, or that two hosts had not compared the one clock that they have."""
    case = ended["down for a while"]
    trace = ringsim.load(case[0] / "run.ringtrace")
    (line,) = said(case, 0)
    found = re.fullmatch(
        r"\[rank 0\] ringsim: (nothing came through from host node1 to node0 for (\d+\.\d) s; then the link recovered)", line
    )
    assert found is not None, line
    assert float(found[2]) > DOWN_S - 1, "of which a second may pass between two beats"
    assert (trace.metadata["complete"], trace.metadata["notes"]) == (True, [found[1]])


def test_a_link_that_is_down_for_good_is_named_while_both_sides_have_posted(ended: dict[str, tuple[Path, list[Ended]]]) -> None:
    case = ended["down for good"]
    first, second = said(case, 0)
    where = "nothing moves on the link between hosts node0 and node1, though both sides have posted: "
    assert re.search(rf"{where}rank [01] waits in (send to|recv from) [01] .* at {Path(__file__).name}:", first), (
        "a send may be done already"
    )
    assert re.search(r"nothing moved on the link between hosts node0 and node1 for about \d+ s; then it recovered", second)
    assert ringsim.load(case[0] / "run.ringtrace").metadata["complete"]


def test_a_rank_that_dies_on_another_host_is_named_and_its_fellow_victims_are_not(ended: dict[str, tuple[Path, list[Ended]]]) -> None:
    """Rank 0 cannot see that it died; a rank beside it can. It used to be "not recorded", and nobody stuck for good."""
    trace = ringsim.load(ended["a rank dies"][0] / "run.ringtrace")
    (finding,) = trace.explain().findings
    assert (finding.kind, finding.ranks) == expected("h3")
    assert "but rank 2 died within the recorded block" in finding.message
    assert [one.ranks for one in finding.consequences] == [(1,)]


def test_a_host_that_dies_is_named_and_its_fellow_victims_are_not(ended: dict[str, tuple[Path, list[Ended]]]) -> None:
    case = ended["a host dies"]
    assert said(case, 0) == ["[rank 0] ringsim: nothing has come from host node1 (ranks 2, 3) for 5 s: it is lost, or cut off"]
    (finding,) = ringsim.load(case[0] / "run.ringtrace").explain().findings
    assert (finding.kind, finding.ranks) == expected("h4")
    assert "ranks 2 and 3 are lost: nothing has come from host node1" in finding.message


def test_where_rank_0s_host_dies_one_rank_of_each_other_says_how_to_join_the_parts(ended: dict[str, tuple[Path, list[Ended]]]) -> None:
    """Its link is down, so the store does not answer, and does not fail: ranks used to wait for it, for many minutes."""
    case = ended["rank 0's host dies"]
    assert [one.how for one in case[1]] == ["killed", "killed", "returned", "returned"]
    assert said(case, 3) == []
    (line,) = said(case, 2)
    found = re.search(r"They are in (\S+): .* by ringsim merge (\S+) DIRECTORY", line)
    assert found is not None, line
    assert main(["merge", found[2], found[1]]) == 0
    trace = ringsim.load(found[2])
    assert "ranks 0 and 1 left no record" in trace.metadata["notes"]
    assert "has no send" not in str(trace.explain())
