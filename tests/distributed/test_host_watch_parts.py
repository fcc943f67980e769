"""Rank 0 of several hosts: its messages about a silent host, and about a link that is down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ringsim import Trace
from ringsim.diagnose.host_links import STALL_BYTES_PER_S
from ringsim.launch import hosts
from ringsim.launch.block import Store, place_of
from ringsim.traces.events import IN_FLIGHT, OP_CODES, Group, Payload, Tables, make_events


def rank_0(directory: Path, world_size: int) -> Any:
    """A replacement of rank 0's recorder."""
    return SimpleNamespace(rank=0, world_size=world_size, directory=directory)


def test_a_silent_host_is_named_and_so_is_a_link_that_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LOOK_S": 0.02, "BEAT_S": 0.0, "LOST_S": 0.2}.items():
        monkeypatch.setattr(hosts, name, value)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    keys = Store(store, "run")
    beats, here = keys.within("hosts"), {**place_of(tmp_path), "start_ns": 1}
    places = {}, {"id": "far", "host": "node1"}, {"id": "farther", "host": "node2"}
    for rank, place in enumerate(places):
        keys.put(f"at/{rank}", json.dumps({**here, **place}).encode())
    watch = hosts.watch_hosts(keys, rank_0(tmp_path, 3), lambda: "")

    def beat(place: str, number: int, took_s: float) -> None:
        beats.put(f"beat/{zlib.crc32(place.encode())}", json.dumps([number, 0, 0, took_s]).encode())

    def said(count: int) -> str:
        while len(watch.said) < count:
            time.sleep(0.01)
        return watch.said[-1]

    beat("far", 1, 0.0)
    beat("farther", hosts.OVER, 0.0)  # has left, and need not send more
    assert said(1).startswith(
        "nothing has arrived from host node1 (rank 1) for 0 s: it is lost, "
        "or cut off. ringsim ends no rank"
    )
    (end,) = watch.find_lost([1, 2])
    assert (end["rank"], end["state"]) == (1, "unknown")
    assert end["about"] == "went silent: nothing has arrived from host node1 for 0 s"
    assert watch.find_lost([2]) == []
    monkeypatch.setattr(hosts, "LOST_S", 60.0)  # the machine may be busy
    beat("far", 2, 300.1)
    assert "nothing arrived from host node1 to" in said(2)
    assert "for 300.1 s; then the link recovered" in said(2)
    beat("far", hosts.OVER, 0.0)
    watch.stop()
    assert len(watch.said) == 2


HELD_UP = """
import atexit, sys, threading
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from ringsim.launch import hosts
from ringsim.launch.block import Store

def stands():
    asked.set()
    ending.wait()
    return ""

asked, ending, hosts.BEAT_S = threading.Event(), threading.Event(), 0.0
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
recorder = SimpleNamespace(rank=0, world_size=2, directory=Path(sys.argv[1]))
watch = hosts.watch_hosts(Store(store, "run"), recorder, stands)
asked.wait()
atexit.register(lambda: print(watch._thread.is_alive()))  # the last to be called
watch.stop()
atexit.register(ending.set)  # the first
"""


def test_a_process_ends_only_after_a_beat_that_is_held_up(tmp_path: Path) -> None:
    """Otherwise, the ending interpreter would abort when torch's store answers."""
    ended = subprocess.run(
        [sys.executable, "-c", HELD_UP, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr


def test_a_link_on_which_nothing_moves_is_named_by_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are on one host, and rank 2 is on another.

    Ranks 1 and 2 have posted both sides of a message, and rank 0 waits for rank 1.
    """
    keys, here = Store(dist.HashStore(), "run"), {**place_of(tmp_path), "start_ns": 1}
    for rank, place in enumerate(({}, {}, {"id": "far", "host": "node1"})):
        keys.put(f"at/{rank}", json.dumps({**here, **place}).encode())
    monkeypatch.setattr(Store, "clone", lambda keys: keys)
    watch = hosts.Judge(keys, rank_0(tmp_path, 3), lambda: "stands")
    hosts.Beat(number=1, state=7).put(keys.within("hosts"), "far")
    watch._look("stands")  # from here on, all stand still
    ops = (("recv", 0, 1), ("send", 1, 2), ("recv", 2, 1))
    stuck = {"post_ns": [1, 2, 3], "wait_ns": [2, 3, 4], "done_ns": [-1] * 3, "tag": [0] * 3}
    names = {"status": [IN_FLIGHT] * 3, "group": [0] * 3, "payload": [0] * 3}
    op, rank, peer = zip(*[(OP_CODES[op], rank, peer) for op, rank, peer in ops], strict=True)
    tables = Tables(groups=(Group("world", (0, 1, 2)),), payloads=(Payload("float32", (8,), 32),))
    events = make_events({"op": op, "rank": rank, "peer": peer, **stuck, **names}, tables)
    watch._judge(Trace(events, {"world_size": 3}))
    watch._explained = True
    assert watch._doubt.may_take_s == pytest.approx(3 * 32 / STALL_BYTES_PER_S)
    watch._doubt.may_take_s = -hosts.LOST_S  # it has already lasted
    watch._look("stands")
    watch._look("")
    link = "on the link between hosts " + " and ".join(sorted([here["host"], "node1"]))
    assert [line.partition(", although")[0] for line in watch.said] == [
        f"nothing moves {link}",
        f"nothing moved {link} for about 0 s; then the link recovered",
    ]
    assert "rank 0" not in watch.said[0], "rank 0 only waits for rank 1"
