"""Several hosts that watch each other over the store.

What stands still everywhere, what fell silent, and what came back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, results
from test_gathering import finish_sending
from test_recording import PATIENCE, join
from torch.distributed.distributed_c10d import PrefixStore

import ringsim
from ringsim import Trace
from ringsim.diagnose.host_links import STALL_BYTES_PER_S
from ringsim.launch import hosts, joined
from ringsim.launch.gathering import Store, place_of
from ringsim.traces.events import IN_FLIGHT, OP_CODES, Group, Payload, Tables, make_events

UNTIL = (
    rf"ringsim ends no rank for this: the process group's time-out of {PATIENCE.seconds} s does .*"
)


def wait_for_each_other(directory: str, rank: int) -> list[str]:
    """Two ranks on two hosts: directories of parts that only their own ranks see.

    A thread ends the deadlock once it has been told of.
    """
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank}"
    joined.TAKE_OVER_S = hosts.LOOK_S = hosts.BEAT_S = hosts.STILL_S = 0.1  # type: ignore[misc]
    hosts.LOST_S = hosts.SLOW_S = 60.0  # type: ignore[misc]  # the machine may be busy
    path = join(directory, rank, 2)
    with ringsim.trace(path) as recording:
        watch = recording._hosts
        assert watch is not None

        def help_out() -> None:
            while not watch.said:
                time.sleep(0.01)
            dist.send(torch.zeros(1), 1)

        helper = threading.Thread(target=help_out)
        if rank == 0:
            helper.start()
        dist.recv(torch.zeros(1), 1 - rank)
        if rank == 1:
            dist.send(torch.zeros(1), 0)
        else:
            helper.join()
    finish_sending()
    return watch.said


def test_a_deadlock_between_hosts_is_told_with_rank_and_line(
    server: RankServer, tmp_path: Path
) -> None:
    said = results(server.run(wait_for_each_other, [(str(tmp_path), rank) for rank in range(2)]))
    assert len(said[0]) == 1, "the rest of the run is right"
    assert "nothing moves on any host (ranks 0, 1 on " in said[0][0]
    assert "deadlock: ranks 0 and 1 wait for each other" in said[0][0]
    assert f"{Path(__file__).name}:" in said[0][0]
    assert re.search(r"waits (for \d|in recv)", said[0][0])[0] == "waits in recv", (
        "for how long would be by nobody's clock"
    )
    assert (
        f"ringsim ends no rank for this: the process group's time-out of {PATIENCE.seconds} s does"
        in said[0][0]
    )
    assert said[1] == []
    assert said[0][0] in ringsim.load(tmp_path / "run.ringtrace").metadata["notes"]


def is_never_heard(directory: str, rank: int, entered: bool) -> list[str]:
    """Rank 1, on a host of its own, falls silent where it has just entered the block.

    Or before it, until rank 0 has told of it.
    """
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank}"
    hosts.LOST_S = 0.5  # type: ignore[misc]
    path, pid, told = join(directory, rank, 2), Path(directory, "pid"), Path(directory, "told")
    if rank:
        pid.write_text(str(os.getpid()))
        while not (entered or told.exists()):
            time.sleep(0.01)
    dist.barrier() if entered else None
    with ringsim.trace(path) as recording:
        watch = recording._hosts
        assert watch is not None

        def help_out() -> None:
            while not watch.said:
                time.sleep(0.01)
            told.touch()
            os.kill(int(pid.read_text()), signal.SIGCONT)

        if rank:
            os.kill(os.getpid(), signal.SIGSTOP if entered else signal.SIGCONT)
            dist.send(torch.zeros(1), 0)
        else:
            threading.Thread(target=help_out).start()
            dist.recv(torch.zeros(1), 1)
    finish_sending()
    return watch.said


@pytest.mark.parametrize("entered", [True, False])
def test_a_host_that_is_gone_before_its_first_word_is_told_of(
    entered: bool, server: RankServer, tmp_path: Path
) -> None:
    """Nothing used to be said for as long as the groups' time-out, 30 minutes by default."""
    said, _ = results(
        server.run(is_never_heard, [(str(tmp_path), rank, entered) for rank in range(2)])
    )
    if entered:
        assert re.fullmatch(
            rf"nothing has come from host \S+ \(rank 1\) for 0 s: it is lost, or cut off\. {UNTIL}",
            said[0],
        )
    else:
        late = (
            "rank 1 has not entered the recorded block (late, or lost while starting), and others "
            "wait: rank 0 waits in recv from 1 "
        )
        assert said[0].startswith(late)
        assert re.search(rf"at {Path(__file__).name}:\d+\. {UNTIL}$", said[0])
    assert said[0] in ringsim.load(tmp_path / "run.ringtrace").metadata["notes"]


def test_a_silent_host_is_named_and_so_is_a_link_that_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOOK_S": 0.02, "BEAT_S": 0.0, "LOST_S": 0.2}.items():
        monkeypatch.setattr(hosts, name, value)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )  # type: ignore[attr-defined]
    keys, beats = Store(store, "run"), Store(PrefixStore("hosts", store), "run")
    for rank, place in (
        (0, place_of(tmp_path)),
        (1, {"id": "far", "host": "node1"}),
        (2, {"id": "farther", "host": "node2"}),
    ):
        keys.put(f"at/{rank}", json.dumps({**place_of(tmp_path), **place, "start_ns": 1}).encode())
    watch = hosts.HostWatch(store, "run", 0, 3, tmp_path, lambda: "")

    def beat(place: str, number: int, took_s: float) -> None:
        beats.put(f"beat/{zlib.crc32(place.encode())}", json.dumps([number, 0, 0, took_s]).encode())

    def said(count: int) -> str:
        while len(watch.said) < count:
            time.sleep(0.01)
        return watch.said[-1]

    beat("far", 1, 0.0)
    beat("farther", hosts.OVER, 0.0)  # has left, and need say nothing more
    assert said(1).startswith(
        "nothing has come from host node1 (rank 1) for 0 s: it is lost, "
        "or cut off. ringsim ends no rank"
    )
    (end,) = watch.find_lost([1, 2])
    assert (end["rank"], end["state"], end["about"]) == (
        1,
        "unknown",
        "went silent: nothing has come from host node1 for 0 s",
    )
    assert watch.find_lost([2]) == []
    monkeypatch.setattr(hosts, "LOST_S", 60.0)  # the machine may be busy
    beat("far", 2, 300.1)
    assert "nothing came through from host node1 to" in said(2)
    assert "for 300.1 s; then the link recovered" in said(2)
    beat("far", hosts.OVER, 0.0)
    watch.stop()
    assert len(watch.said) == 2


HELD_UP = """
import atexit, sys, threading
from pathlib import Path
import torch.distributed as dist
from ringsim.launch import hosts

def stands():
    asked.set()
    ending.wait()
    return ""

asked, ending, hosts.BEAT_S = threading.Event(), threading.Event(), 0.0
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = hosts.HostWatch(store, "run", 0, 2, Path(sys.argv[1]), stands)
asked.wait()
atexit.register(lambda: print(watch._thread.is_alive()))  # the last to be called
watch.stop()
atexit.register(ending.set)  # the first
"""


def test_a_process_ends_only_after_a_beat_that_is_held_up(tmp_path: Path) -> None:
    """Otherwise the interpreter, which is ending, would abort when torch's store answers."""
    ended = subprocess.run(
        [sys.executable, "-c", HELD_UP, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr


def test_a_link_on_which_nothing_moves_is_named_by_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are on one host, rank 2 is on another.

    1 and 2 have posted both sides of a message, and rank 0 waits for rank 1.
    """
    monkeypatch.setattr(hosts, "LOOK_S", 60.0)  # nobody looks by himself
    here = place_of(tmp_path)
    watch = hosts.HostWatch(dist.HashStore(), "run", 0, 3, tmp_path, lambda: "stands")
    watch._places = {0: here, 1: here, 2: {**here, "id": "far", "host": "node1"}}
    ops = (("recv", 0, 1), ("send", 1, 2), ("recv", 2, 1))
    columns = {
        "op": [OP_CODES[op] for op, _, _ in ops],
        "rank": [rank for _, rank, _ in ops],
        "peer": [peer for _, _, peer in ops],
    }
    stuck = {
        "post_ns": [1, 2, 3],
        "wait_ns": [2, 3, 4],
        "done_ns": [-1] * 3,
        "status": [IN_FLIGHT] * 3,
        "tag": [0] * 3,
        "group": [0] * 3,
    }
    tables = Tables(groups=(Group("world", (0, 1, 2)),), payloads=(Payload("float32", (8,), 32),))
    watch._judge(
        Trace(make_events({**columns, **stuck, "payload": [0] * 3}, tables), {"world_size": 3})
    )
    store = Store(PrefixStore("hosts", dist.HashStore()), "run")
    store.put(f"beat/{zlib.crc32(b'far')}", b"[1, 7, 0, 0.0]")
    doubt, watch._doubt, watch._looked = watch._doubt, None, True
    assert doubt is not None
    assert doubt.may_take_s == pytest.approx(3 * 32 / STALL_BYTES_PER_S)
    watch._look(None, store, "stands")  # all stand from here on
    doubt.may_take_s = -hosts.LOST_S
    watch._doubt, watch._looked = doubt, True
    watch._look(None, store, "stands")
    watch._look(None, store, "")
    watch.stop()
    names = f"{here['host']} and node1" if here["host"] < "node1" else f"node1 and {here['host']}"
    assert [line.partition(", though")[0] for line in watch.said] == [
        f"nothing moves on the link between hosts {names}",
        f"nothing moved on the link between hosts {names} for about 0 s; then it recovered",
    ]
    assert "rank 0" not in watch.said[0], "a fellow victim"
