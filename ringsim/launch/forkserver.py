r"""A server process that has torch loaded and forks ranks.

The server forks ranks in milliseconds, and ensures that no rank outlives the launcher. It differs
from the fork server of ``multiprocessing`` in three ways: ranks do not import the caller's main
module again; one message forks several ranks, even ahead of time (*parked* ranks wait for a job);
and the ranks end with the launcher, however it ends::

    launcher ----------- control socket ----------> fork server ---- fork ----> rank 0, rank 1, ...
        \---------------- one channel for each rank ------------------------------/

When the launcher ends, its end of the control socket closes. The server then kills its ranks,
removes their directories and exits. If the server dies, the kernel ends the ranks
(PR_SET_PDEATHSIG), for which Python has no public function.

Each rank leads a process group. When it ends, the server ends the rest of the group, such as a
``DataLoader``'s workers, records the rank's exit, and only then closes its channel. Otherwise, a
process forked by the rank would keep the channel and the connections to the other ranks open. A
process that left the group (``start_new_session=True``) continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ringsim.launch.job import RankConfig
from ringsim.launch.system import name_process

FDS_PER_MESSAGE = 200  # the kernel passes at most 253 descriptors with one message
_MESSAGE_BYTES = 1 << 16
_PARENT_CHECK_S = 0.25  # time between two checks that the launcher is still the parent
_PR_SET_PDEATHSIG = 1


@dataclass
class _Family:
    """The ranks of one run that the server has forked."""

    config: RankConfig
    pids: dict[int, int] = field(default_factory=dict)  # pid -> rank
    channels: dict[int, int] = field(default_factory=dict)  # pid -> the rank's end of its channel
    parked_until: float = math.inf
    over: bool = False  # its directory is no longer needed


class Server:
    """Forks ranks, reaps them and records their exits.

    Args:
        control: the socket for the launcher's messages.
        on_interrupt: the ranks' SIGINT handler; Ctrl-C in a terminal does not reach the ranks.
    """

    def __init__(self, control: socket.socket, on_interrupt: Any) -> None:
        self._control, self._on_interrupt = control, on_interrupt
        self._launcher = os.getppid()
        self._sets: dict[str, _Family] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def serve(self) -> None:
        """Serves until the launcher is gone, then ends all ranks."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while os.getppid() == self._launcher:
                ready = {key.fileobj for key, _ in selector.select(_PARENT_CHECK_S)}
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                self._reap()
                if self._control in ready and not self._receive():
                    break
                for family in self._sets.values():
                    if time.monotonic() > family.parked_until:
                        self._end(family)
        # the launcher is gone; the records of a run with a path remain
        for family in self._sets.values():
            self._end(family, keep=family.config.keep)
        deadline = time.monotonic() + 5
        while self._sets and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)

    def _receive(self) -> bool:
        """Handles one message; returns False if the launcher has closed its end."""
        try:
            text, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, FDS_PER_MESSAGE)
        except ConnectionResetError:
            # the launcher has left an answer unread; its earlier messages can still be read
            return True
        if not text:
            return False
        message = json.loads(text)
        family = self._sets.get(message["set"])
        if "number" in message:  # a question
            yes = message["do"] == "answer" or (family is not None and self._take(family))
            # the launcher is gone, as the next message will show
            with contextlib.suppress(OSError):
                self._control.send(json.dumps([message["number"], yes]).encode())
        elif message["do"] == "fork":
            self._fork(message, fds)
        elif family is None:  # all its ranks have ended
            if message["do"] == "end":
                shutil.rmtree(message["directory"], ignore_errors=True)
        else:
            self._end(family, keep=message["do"] == "kill")
        return True

    def _take(self, family: _Family) -> bool:
        """Assigns parked ranks to a call; returns whether that succeeded.

        The assignment fails if some of the ranks have ended or are ending.
        """
        taken = (
            len(family.pids) == family.config.world_size and time.monotonic() <= family.parked_until
        )
        if taken:
            family.parked_until = math.inf
        return taken

    def _fork(self, message: dict[str, Any], fds: list[int]) -> None:
        """Forks the ranks ``first, first + 1, ...``, one per channel in ``fds``."""
        config = RankConfig(**message["config"])
        ranks = self._sets.setdefault(message["set"], _Family(config))
        ranks.parked_until = time.monotonic() + message["park_s"]
        server = os.getpid()
        for index, fd in enumerate(fds):
            rank = message["first"] + index
            pid = os.fork()
            if pid == 0:
                others = [other for one in self._sets.values() for other in one.channels.values()]
                self._become_rank(config.for_rank(rank), fd, [*others, *fds[index + 1 :]], server)
            ranks.pids[pid], ranks.channels[pid] = rank, fd

    def _become_rank(self, config: RankConfig, fd: int, others: list[int], server: int) -> None:
        """Turns this fork into a rank; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, self._on_interrupt)
            for other in (
                *others,
                self._control.fileno(),
                self._wake_read.fileno(),
                self._wake_write.fileno(),
            ):
                os.close(other)
            os.setpgid(0, 0)
            # Python has no function that ends a child with its parent
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the line above
                os._exit(1)
            from ringsim.launch import rank

            rank.main(Connection(fd), config)
        except BaseException:  # rank.main exits by itself, unless it cannot catch an error
            traceback.print_exc()
        finally:
            os._exit(70)

    def _reap(self) -> None:
        """Cleans up after ranks that have ended.

        It ends the ranks' remaining processes, records their exits, and closes their channels.
        """
        for name, ranks in list(self._sets.items()):
            for pid, rank in list(ranks.pids.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                with contextlib.suppress(OSError):  # no such group: the rank ended immediately
                    # before it is reaped, because its number may then be reused
                    os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                del ranks.pids[pid]
                with contextlib.suppress(OSError):  # the launcher has already removed the directory
                    ranks.config.for_rank(rank).file("exit").write_text(
                        f"{os.waitstatus_to_exitcode(status)} {time.monotonic_ns()}"
                    )
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=ranks.channels.pop(pid)) as channel,
                ):
                    channel.shutdown(socket.SHUT_RDWR)  # for all processes that have it open
            if not ranks.pids:
                del self._sets[name]
                if ranks.over:
                    shutil.rmtree(ranks.config.directory, ignore_errors=True)

    def _end(self, ranks: _Family, *, keep: bool = False) -> None:
        """Kills the remaining ranks, and then removes their directory."""
        ranks.over = ranks.over or not keep
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)


def main(control_fd: int) -> None:
    """Loads the modules that every rank needs, then serves.

    Args:
        control_fd: this process's end of the control socket.
    """
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the launcher
    name_process("ringsim-server")
    from ringsim.launch.rank import warm_up  # imports torch and all other modules of a rank

    warm_up()
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page of the server
    Server(socket.socket(fileno=control_fd), on_interrupt).serve()
    sys.stdout.flush()
    os._exit(0)
