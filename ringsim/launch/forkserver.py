r"""A process that has torch loaded and never computes.

It forks ranks in milliseconds, and makes sure that none outlives the launcher. It differs from the
fork server of ``multiprocessing`` in three ways: ranks do not import the caller's main module
again; one message forks several ranks, also ahead of time (*parked* ranks wait for a job); and
however the launcher ends, they end too::

    launcher ----------- control socket ----------> fork server ---- fork ----> rank 0, rank 1, ...
        \---------------- one channel for each rank ------------------------------/

When the launcher ends, its end of the control socket closes. The server then kills its ranks,
removes their directories and exits. If the server dies, the kernel ends the ranks
(PR_SET_PDEATHSIG): nothing public does that.

Each rank leads a process group. When it ends, the server ends what is left of the group, such as
the workers of a ``DataLoader``, writes down how the rank ended, and only then closes its channel: a
process that the rank forked would otherwise keep the channel open, and the connections to the other
ranks too. A process that left the group (``start_new_session=True``) goes on.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from ringsim.launch.job import RankConfig

FDS_PER_MESSAGE: Final = 200  # the kernel passes at most 253 descriptors with one message
_MESSAGE_BYTES: Final = 1 << 16
_PARENT_CHECK_S: Final = 0.25  # how often to check that the launcher is still our parent
_PR_SET_PDEATHSIG: Final = 1


@dataclass
class _Family:
    """The ranks of one run as the server has forked them."""

    config: RankConfig
    pids: dict[int, int] = field(default_factory=dict)  # pid -> rank
    channels: dict[int, int] = field(default_factory=dict)  # pid -> the rank's end of its channel
    parked_until: float = math.inf
    over: bool = False  # nobody needs its directory any more


class Server:
    """Forks ranks, reaps them and writes down how they ended.

    Args:
        control: the socket on which the launcher's messages come.
        on_interrupt: what ranks do on SIGINT; a terminal's does not reach them.
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
        # the launcher is gone; a run that was given a path leaves its records there
        for family in self._sets.values():
            self._end(family, keep=family.config.keep)
        deadline = time.monotonic() + 5
        while self._sets and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)

    def _receive(self) -> bool:
        """Obeys one message; False when the launcher has closed its end."""
        try:
            text, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, FDS_PER_MESSAGE)
        except ConnectionResetError:
            # the launcher has left with an answer unread: what it said before that can still be
            # read
            return True
        if not text:
            return False
        message = json.loads(text)
        family = self._sets.get(message["set"])
        if "number" in message:  # a question
            yes = message["do"] == "answer" or (family is not None and self._take(family))
            # the launcher has left meanwhile, which the next message tells
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
        """Returns whether parked ranks are a call's from now on.

        They are not if some have ended, or are about to.
        """
        taken = (
            len(family.pids) == family.config.world_size and time.monotonic() <= family.parked_until
        )
        if taken:
            family.parked_until = math.inf
        return taken

    def _fork(self, message: dict[str, Any], fds: list[int]) -> None:
        """Forks the ranks ``first, first + 1, ...``, one for each channel in ``fds``."""
        config = RankConfig(**message["config"])
        ranks = self._sets.setdefault(message["set"], _Family(config))
        ranks.parked_until = (
            math.inf if message["park_s"] is None else time.monotonic() + message["park_s"]
        )
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
            # nothing in Python asks the kernel to end a child with its parent
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the line above
                os._exit(1)
            from ringsim.launch import rank

            rank.main(Connection(fd), config)
        finally:
            os._exit(70)  # rank.main exits by itself; this is for what it could not catch

    def _reap(self) -> None:
        """Cleans up after ranks that have ended.

        Ends what they left running, writes down how they ended, closes their channels.
        """
        for name, ranks in list(self._sets.items()):
            for pid, rank in list(ranks.pids.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                with contextlib.suppress(OSError):  # no such group: the rank ended at once
                    # before it is reaped: afterwards its number may be another's
                    os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                del ranks.pids[pid]
                with contextlib.suppress(OSError):  # the launcher has removed the directory already
                    ranks.config.for_rank(rank).file("exit").write_text(
                        f"{os.waitstatus_to_exitcode(status)} {time.monotonic_ns()}"
                    )
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=ranks.channels.pop(pid)) as channel,
                ):
                    channel.shutdown(socket.SHUT_RDWR)  # for all processes that have it
            if not ranks.pids:
                del self._sets[name]
                if ranks.over:
                    shutil.rmtree(ranks.config.directory, ignore_errors=True)

    def _end(self, ranks: _Family, *, keep: bool = False) -> None:
        """Kills the ranks that are still there, and removes their directory once they are gone."""
        ranks.over = ranks.over or not keep
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)


def main(control_fd: int) -> None:
    """Loads what every rank needs, then serves.

    Args:
        control_fd: this process's end of the control socket.
    """
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's business
    with contextlib.suppress(OSError):
        with open("/proc/self/comm", "w") as name:
            name.write("ringsim-server")
    from ringsim.launch.rank import warm_up  # imports torch and everything that a rank needs

    warm_up()
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page of the server
    Server(socket.socket(fileno=control_fd), on_interrupt).serve()
    sys.stdout.flush()
    os._exit(0)
