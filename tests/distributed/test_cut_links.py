"""Recordings on several hosts when a link is cut, or a rank or host is killed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_rows import DOCUMENT
from rank_server import Ended, RankServer
from test_gathering import finish_sending
from test_hosts import HOSTS_FILE
from test_other_network import HERE, command, make_machines

import ringsim
from ringsim.cli import main
from ringsim.errors import name_ranks

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
DOWN_S = 3
PATIENCE_S = 60


def enter_host(machine: str, name: str, private: str) -> None:
    """Moves this process, which has one thread, to a host with its own network and names."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{machine}") as network:
        assert libc.setns(network.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    script = 'hostname "$0" && mount --make-rprivate / && mount --bind "$1" /etc/hosts'
    subprocess.run(["sh", "-c", script, name, f"{private}/hosts"], check=True)


def messages(rank: int, directory: Path) -> None:
    """Ranks 0 and 1 exchange messages until the file ``enough`` exists."""
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
    """A worker, the ranks per host, the accident, and the limit of the group's operations."""

    program: Callable[[int, Path], None]
    ranks: tuple[int, ...]
    happens: Callable[[Happening], None]
    limit_s: int = PATIENCE_S
    cables: tuple[str, ...] = ("cable",)

    def host(self, rank: int) -> int:
        return sum(rank >= after for after in itertools.accumulate(self.ranks))


@dataclass(frozen=True)
class Happening:
    """A running case."""

    case: Case
    machines: tuple[str, ...]
    directory: Path

    def go_on(self) -> None:
        """Lets the ranks record after all have joined; then causes the accident."""
        ranks = range(sum(self.case.ranks))
        for rank in ranks:
            self.wait_for(f"joined-{rank}")
        listened = self.listeners()
        assert all(host.count("LISTEN") for host in listened), "Gloo must listen"
        (self.directory / "record").touch()
        for rank in ranks:
            self.wait_for(f"going-{rank}")
        assert self.listeners() == listened, (
            "recording, watching and comparing clocks must not listen anywhere"
        )
        self.case.happens(self)

    def wait_for(self, name: str, words: str = "") -> None:
        """Waits until a file exists and contains some words."""
        deadline = time.monotonic() + PATIENCE_S
        while not ((path := self.directory / name).exists() and words in path.read_text()):
            assert time.monotonic() < deadline, (
                f"{name} must contain {words!r}: {path.read_text() if path.exists() else None}"
            )
            time.sleep(0.01)

    def listeners(self) -> list[str]:
        """Returns the listening sockets of each host."""
        return [
            command("ip", "netns", "exec", name, "ss", "--tcp", "--udp", "--listening", "--numeric")
            for name in self.machines
        ]

    def link(self, cable: str, state: str, host: int = 1) -> None:
        command("ip", "-n", self.machines[host], "link", "set", cable, state)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(int((self.directory / f"pid-{rank}").read_text()), signal.SIGKILL)


def down_for_a_while(case: Happening) -> None:
    case.link("cable", "down")
    time.sleep(DOWN_S)
    case.link("cable", "up")
    case.wait_for("said-0", "then the link recovered")
    (case.directory / "enough").touch()


def down_for_good(case: Happening) -> None:
    """Cuts the one of two networks that carries the messages."""
    case.link("data", "down")
    case.wait_for("said-0", "although both sides have posted")
    case.link("data", "up")
    case.wait_for("said-0", "then the link recovered")
    (case.directory / "enough").touch()


def rank_dies(case: Happening) -> None:
    case.kill(2)


def host_dies(case: Happening) -> None:
    """Cuts off and kills the host of the last rank."""
    last = len(case.machines) - 1
    case.link("cable", "down", last)
    case.kill(*(rank for rank in range(sum(case.case.ranks)) if case.case.host(rank) == last))


def host_of_rank_0_dies(case: Happening) -> None:
    case.link("cable", "down", 0)
    case.kill(*range(case.case.ranks[0]))


def wait_for_rank_0(rank: int, directory: Path) -> None:
    dist.recv(torch.zeros(1), 1 - min(rank, 1))


CASES = {
    "down for a while": Case(messages, (1, 1), down_for_a_while),
    "down for good": Case(messages, (1, 1), down_for_good, cables=("cable", "data")),
    "a rank dies": Case(waits, (2, 2), rank_dies),
    "a host dies": Case(waits, (2, 2), host_dies, 8),
    "rank 0's host dies": Case(wait_for_rank_0, (1, 2, 1), host_of_rank_0_dies, 8),
}


def be_rank(name: str, machines: tuple[str, ...], directory: str, rank: int) -> None:
    case, place = CASES[name], Path(directory)
    host = case.host(rank)
    enter_host(machines[host], f"node{host}", directory)
    sys.stderr = (place / f"said-{rank}").open("w", buffering=1)
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    os.environ |= {"RINGSIM_PARTS": f"{directory}/node{host}", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    os.environ["GLOO_SOCKET_IFNAME"] = case.cables[-1]
    size, limit = sum(case.ranks), timedelta(seconds=case.limit_s)
    address = f"tcp://{HERE}:29500"
    dist.init_process_group("gloo", address, limit, world_size=size, rank=rank)
    (place / f"joined-{rank}").touch()
    while not (place / "record").exists():
        time.sleep(0.01)
    with contextlib.suppress(RuntimeError), ringsim.trace(place / "run.ringtrace") as recording:
        watch = recording._hosts
        while (
            sum(host.beat.number > 0 for host in [*watch.hosts.values()]) < len(machines) - 1
            if rank == 0
            else not (place / "going-0").exists()
        ):
            time.sleep(0.01)
        (place / f"going-{rank}").touch()
        case.program(rank, place)
    finish_sending()


@pytest.fixture(scope="module")
def ended(
    server: RankServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, list[Ended]]]]:
    """Runs all cases; returns the directory of each, and the ends of its ranks."""
    with ExitStack() as made:
        asked, happenings = [], {}
        for number, (name, case) in enumerate(CASES.items()):
            directory = tmp_path_factory.mktemp("case")
            (directory / "hosts").write_text(HOSTS_FILE)
            machines = made.enter_context(make_machines(str(number), len(case.ranks), case.cables))
            happenings[name] = Happening(case, machines, directory)
            asked += [(name, machines, str(directory), rank) for rank in range(sum(case.ranks))]
        with ThreadPoolExecutor(len(CASES)) as pool:
            happen = [pool.submit(happening.go_on) for happening in happenings.values()]
            found = server.run(be_rank, asked, limit_s=100)
            for one in happen:
                one.result()
        ends = list(zip(asked, found, strict=True))
        yield {
            name: (happening.directory, [end for words, end in ends if words[0] == name])
            for name, happening in happenings.items()
        }


def expected(row: str) -> tuple[str, tuple[int, ...]]:
    """Returns the kind of finding and the ranks in a row of tests/distributed/faults.md."""
    (line,) = re.findall(rf"^\| {row} \|.*$", DOCUMENT.read_text(), re.MULTILINE)
    _, _, _, kind, ranks, _ = (cell.strip() for cell in line.strip("|").split("|"))
    return kind, tuple(int(rank) for rank in ranks.split(",") if rank)


def said(case: tuple[Path, list[Ended]], rank: int) -> list[str]:
    return (case[0] / f"said-{rank}").read_text().splitlines()


def lasted_s(finding: Any) -> float:
    """Returns the time for which a link stalled."""
    found = re.match(
        r"nothing moved on the link between hosts node0 and node1 for (\d+\.?\d*) s, and then ",
        finding.message,
    )
    assert found is not None, finding.message
    return float(found[1])


def test_a_link_that_was_down_is_told_of_once_it_is_back(
    ended: dict[str, tuple[Path, list[Ended]]],
) -> None:
    """Both traces used to have no note.

    Or one about two hosts that had not compared their only clock.
    """
    case = ended["down for a while"]
    trace = ringsim.load(case[0] / "run.ringtrace")
    (line,) = said(case, 0)
    found = re.fullmatch(
        r"\[rank 0\] ringsim: (nothing arrived from host node1 at node0 for (\d+\.\d) s; "
        r"then the link recovered)",
        line,
    )
    assert found is not None, line
    assert float(found[2]) > DOWN_S - 1, "at most a second may be missing"
    assert (trace.metadata["complete"], trace.metadata["notes"]) == (True, [found[1]])
    finding = trace.explain().findings[0]
    assert (finding.kind, finding.ranks) == expected("h1")
    assert lasted_s(finding) > DOWN_S - 1


def test_a_link_that_is_down_for_good_is_named_while_both_sides_have_posted(
    ended: dict[str, tuple[Path, list[Ended]]],
) -> None:
    case = ended["down for good"]
    text = "\n".join(said(case, 0))
    link = "on the link between hosts node0 and node1"
    waits = rf"rank [01] waits in (send to|recv from) [01] .* at {Path(__file__).name}:"
    lasts = rf"nothing moves {link}, although both sides have posted their operations\.\n  {waits}"
    assert re.search(lasts, text), "either the send or the recv must be named"
    assert re.search(rf"nothing moved {link} for about \d+ s; then the link recovered", text)
    trace = ringsim.load(case[0] / "run.ringtrace")
    finding = trace.explain().findings[0]
    assert (trace.metadata["complete"], finding.kind, finding.ranks) == (True, *expected("h2"))
    assert lasted_s(finding) > 5, "until rank 0 had reported it"


def test_a_rank_that_dies_on_another_host_is_named_and_its_fellow_victims_are_not(
    ended: dict[str, tuple[Path, list[Ended]]],
) -> None:
    """Rank 0 cannot see that it died; a rank on the same host can.

    It used to be "not recorded", and no rank was stuck.
    """
    trace = ringsim.load(ended["a rank dies"][0] / "run.ringtrace")
    (finding,) = trace.explain().findings
    assert (finding.kind, finding.ranks) == expected("h3")
    assert "\n  rank 2 died inside the recorded block" in finding.message
    assert [one.ranks for one in finding.consequences] == [(1,)]


def test_a_host_that_dies_is_named_and_its_fellow_victims_are_not(
    ended: dict[str, tuple[Path, list[Ended]]],
) -> None:
    case = ended["a host dies"]
    (sentence,) = said(case, 0)
    silent = "nothing has arrived from host node1 (ranks 2, 3) for 5 s: the host is lost"
    assert sentence.startswith(f"[rank 0] ringsim: {silent}")
    assert "ringsim does not end ranks for this reason, but the process group's timeout" in sentence
    (finding,) = ringsim.load(case[0] / "run.ringtrace").explain().findings
    assert (finding.kind, finding.ranks) == expected("h4")
    assert "ranks 2 and 3 went silent: nothing has arrived from host node1" in finding.message


def test_where_rank_0s_host_dies_one_rank_of_each_other_says_how_to_join_the_parts(
    ended: dict[str, tuple[Path, list[Ended]]],
) -> None:
    """Its link is down, so the store neither answers nor fails.

    Ranks used to wait for it for many minutes.
    """
    name = "rank 0's host dies"
    case, ranks = ended[name], CASES[name].ranks
    assert [one.how for one in case[1]] == ["killed"] * ranks[0] + ["returned"] * sum(ranks[1:])
    parts, file = [], ""
    for rank in range(ranks[0], sum(ranks)):
        lines = said(case, rank)
        if CASES[name].host(rank) == CASES[name].host(rank - 1):
            assert lines == [], "another rank of this host must report it"
            continue
        (line,) = lines
        found = re.search(r"They are in (\S+)\. Join .*: ringsim merge (\S+) DIRECTORY", line)
        assert found is not None, line
        file = found[2]
        parts.append(found[1])
    assert main(["merge", file, *parts]) == 0
    trace = ringsim.load(file)
    assert {*trace.events.rank} == {*range(ranks[0], sum(ranks))}
    assert f"{name_ranks(range(ranks[0]))} left no record" in trace.metadata["notes"]
    assert "has no send" not in str(trace.explain())
