"""Hosts that watch each other over the store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, results
from test_gathering import finish_sending
from test_recording import PATIENCE, join

import ringsim

UNTIL = (
    "ringsim does not end ranks for this reason, but the process group's timeout of "
    rf"{PATIENCE.seconds} s does .*"
)


def set_limits(limits: dict[str, float]) -> None:
    """Sets time limits of the watch in this process."""
    for name, limit_s in limits.items():
        pytest.MonkeyPatch().setattr(f"ringsim.launch.{name}", limit_s)


def wait_for_each_other(directory: str, rank: int) -> list[str]:
    """Two ranks wait for each other, with separate directories of parts, as on two hosts."""
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank}"
    often = {"joined.TAKE_OVER_S", "hosts.LOOK_S", "hosts.BEAT_S", "hosts.STILL_S"}
    # the machine may be busy
    set_limits({**dict.fromkeys(often, 0.1), "hosts.LOST_S": 60.0, "hosts.SLOW_S": 60.0})
    path = join(directory, rank, 2)
    with ringsim.trace(path) as recording:
        watch = recording._hosts

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
    ranks = [(str(tmp_path), rank) for rank in range(2)]
    said, silent = results(server.run(wait_for_each_other, ranks))
    (sentence,) = said  # the rest of the run is right
    # without the waiting time, which is unknown
    waits = rf"rank 0 waits in recv from 1 .* at {Path(__file__).name}:\d+"
    stuck = (
        r"nothing moves on any host \(ranks 0, 1 on .*\)\. (?s:.*)deadlock: .*\.\n"
        rf" +{waits}\n(?s:.*) {UNTIL}"
    )
    assert re.fullmatch(stuck, sentence)
    assert silent == []
    assert sentence in ringsim.load(tmp_path / "run.ringtrace").metadata["notes"]


def is_never_heard(directory: str, rank: int, entered: bool) -> list[str]:
    """Rank 1, on its own host, falls silent just after it has entered the block."""
    os.environ["RINGSIM_PARTS"] = f"{directory}/host-{rank}"
    set_limits({"hosts.LOST_S": 0.5})
    path, pid, told = join(directory, rank, 2), Path(directory, "pid"), Path(directory, "told")
    if rank:
        pid.write_text(str(os.getpid()))
        while not (entered or told.exists()):
            time.sleep(0.01)
    dist.barrier() if entered else None
    with ringsim.trace(path) as recording:
        watch = recording._hosts

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
    """There used to be no message until the groups' timeout, 30 minutes by default."""
    ranks = [(str(tmp_path), rank, entered) for rank in range(2)]
    said, _ = results(server.run(is_never_heard, ranks))
    words = r"nothing has arrived from host \S+ \(rank 1\) for 0 s: the host is lost or cut off\."
    if not entered:
        words = r"rank 1 has not entered the recorded block .*, and other ranks are waiting\."
        words += rf"\n  rank 0 waits in recv from 1 .*at {Path(__file__).name}:\d+\n "
    assert re.fullmatch(f"{words} {UNTIL}", said[0])
    assert said[0] in ringsim.load(tmp_path / "run.ringtrace").metadata["notes"]
