"""Launching: ranks that start processes of their own. Those keep a dead rank's channel and connections open, unless they end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import running_script
from processes import gone, until

import ringsim
from ringsim.errors import PeerExited, RankFailed, RingError
from ringsim.launch.ranks import EXIT_S

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]

LONG_S = 50.0  # what a child would take
KEPT: list[object] = []  # what a rank must not drop


def fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(LONG_S)
        os._exit(0)
    return pid


def start_process() -> int:
    return subprocess.Popen(["sleep", str(LONG_S)]).pid


def start_process_with_all_files() -> int:
    return subprocess.Popen(["sleep", str(LONG_S)], close_fds=False).pid


def load_in_workers() -> int:
    data = torch.utils.data.TensorDataset(torch.arange(100_000))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, num_workers=2))
    next(batches)
    KEPT.append(batches)
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(1)


def fail() -> None:
    raise ValueError("no such layer")


def come_back() -> None:
    pass


def ends_with_a_child(begin: Callable[[], int], end: Callable[[], None], written: Path) -> None:
    if dist.get_rank() == 1:
        written.write_text(str(begin()))
        end()
        return
    dist.recv(torch.zeros(4), 1)


@pytest.mark.parametrize(
    ("begin", "end", "kind"),
    [
        (fork, kill, "peer_exited"),
        (fork, leave, "rank_failed"),
        (fork, fail, "rank_failed"),
        (fork, come_back, "peer_exited"),
        (start_process, kill, "peer_exited"),
        (start_process_with_all_files, kill, "peer_exited"),
        (load_in_workers, kill, "peer_exited"),
        (load_in_workers, fail, "rank_failed"),
    ],
)
def test_end_of_a_rank_is_seen_though_its_child_lives(begin: Callable[[], int], end: Callable[[], None], kind: str, tmp_path: Path) -> None:
    """A killed rank was found out when its child ended; whoever else had one, it took 5 s more to go on."""
    with pytest.raises(RankFailed if end is not come_back else PeerExited) as caught:
        ringsim.trace(ends_with_a_child, world_size=2, args=(begin, end, tmp_path / "pid"), limit_s=30)
    error, child = caught.value, int((tmp_path / "pid").read_text())
    assert until(lambda: gone(child), 1.0), "the child is left"
    assert error.diagnosis is not None
    assert (error.diagnosis.kind, 1 in error.diagnosis.findings[0].ranks) == (kind, True), str(error.diagnosis)
    assert error.trace is not None
    first_ns, last_ns = error.trace.metadata["given_up_ns"], error.trace.metadata["end_ns"]
    assert last_ns - first_ns < EXIT_S * 1e9  # for a channel that stays open it is waited that long


def has_a_child(written: Path) -> int:
    if dist.get_rank() == 1:
        written.write_text(str(fork()))
    return dist.get_rank()


def test_child_of_a_rank_that_has_returned_ends_with_it(tmp_path: Path) -> None:
    assert ringsim.trace(has_a_child, world_size=2, args=(tmp_path / "pid",), limit_s=30).results == [0, 1]
    child = int((tmp_path / "pid").read_text())
    assert until(lambda: gone(child), 1.0), "the child is left"


def leaves_a_service(written: Path) -> None:
    if dist.get_rank() == 1:
        written.write_text(str(subprocess.Popen(["sleep", str(LONG_S)], start_new_session=True).pid))
        raise ValueError("no such layer")
    dist.recv(torch.zeros(4), 1)


def test_a_process_with_a_session_of_its_own_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="no such layer"):
        ringsim.trace(leaves_a_service, world_size=2, args=(tmp_path / "pid",), limit_s=30)
    service = int((tmp_path / "pid").read_text())
    assert not gone(service)
    os.kill(service, signal.SIGKILL)
    assert until(lambda: gone(service), 5.0)


PARENTS = """
    import os, subprocess, sys, time
    import ringsim
    def worker():
        print(subprocess.Popen(["sleep", "50"]).pid, force=True)
        time.sleep(50)
    ringsim.trace(worker, world_size=2)
"""


def test_no_child_of_a_rank_outlives_the_launcher(tmp_path: Path) -> None:
    with running_script(tmp_path, PARENTS) as script:
        assert script.stdout is not None
        pids = [int(script.stdout.readline().split()[-1]) for _ in range(2)]
        os.kill(script.pid, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids), 2.0), "a child is left"
