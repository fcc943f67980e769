"""Handles programs that create their own world.

These programs call ``init_process_group``, or start processes that do::

    a rank with a world from ringsim calls it   it joins that world
    a process started by a rank calls it        the run ends, because there are two launchers
    a process of a program without ranks from
    ringsim calls it                            the process is recorded from then to its end

Such processes are started by ``multiprocessing``, forked or spawned.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringsim.diagnose.failure import call_to_end
from ringsim.errors import ArgumentError, RingError, StartsRanks
from ringsim.state import start_thread

# Modules for recording are imported on use, because a rank's data loaders also load this module.

_TOLD = "starts-ranks"  # the file in which a process notifies the rank that started it
_LOOK_S = 0.1
_END_S = 5.0  # the time that the process then waits to be ended with its rank


# -- in a rank


def enter_rank(directory: Path, end: Callable[[RingError], None]) -> None:
    """Prepares a rank for a program that may create its own worlds.

    It is called once, before the program's code is loaded.

    Args:
        directory: the directory of the run.
        end: a function that ends the rank with an error; called from a thread.
    """
    refuse = _make_refusal(directory, os.getpid())
    _join_on_init(refuse)
    listener: list[threading.Thread] = []

    def listen() -> None:
        while not (directory / _TOLD).exists():
            time.sleep(_LOOK_S)
        end(_two_launchers())

    def on_start() -> tuple[Any, ...]:
        if not listener:
            listener.append(start_thread("children", listen))
        return _make_refusal, directory, os.getpid(), dist.is_initialized()

    _follow_processes(on_start)


def _join_on_init(refuse: Callable[[], None]) -> None:
    """Makes the program's first ``init_process_group`` join an existing world."""
    call = dist.init_process_group

    @functools.wraps(call)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        refuse()
        if not dist.is_initialized():
            return call(*args, **kwargs)
        wanted = inspect.signature(call).bind(*args, **kwargs).arguments
        check_world(
            wanted,
            "ringsim.trace",
            "Omit it, or pass ring=False to ringsim.trace, so that the worker creates its own "
            "group.",
        )
        dist.init_process_group = distributed_c10d.init_process_group = call
        if wanted.get("timeout") is not None:
            # a world exists
            dist.group.WORLD.set_timeout(wanted["timeout"])  # type: ignore[union-attr]
        if dist.get_rank() == 0:
            world = f"{dist.get_backend()}, {dist.get_world_size()} ranks"
            sys.stderr.write(
                f"ringsim: init_process_group joined the existing process group ({world}).\n"
            )
        return None

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def check_world(wanted: dict[str, Any], maker: str, remedy: str) -> None:
    """Raises ArgumentError unless arguments of ``init_process_group`` fit the default group.

    Args:
        wanted: the arguments.
        maker: the function of ringsim that created the group.
        remedy: the advice if they do not fit.
    """
    by_variables = wanted.get("init_method") in (None, "env://") and wanted.get("store") is None
    for name, value in (
        ("backend", dist.get_backend()),
        ("world_size", dist.get_world_size()),
        ("rank", dist.get_rank()),
    ):
        given = wanted.get(name, -1)
        if given == -1 and by_variables:
            given = os.environ.get(name.upper(), -1)
        if given in (None, -1) or re.fullmatch(f"((cpu|cuda):)?{value}", str(given).lower()):
            continue
        raise ArgumentError(
            f"{name} must be {value!r}, as in the process group created by {maker}, got {given!r} "
            f"(rank {dist.get_rank()} of {dist.get_world_size()}). {remedy}"
        )


def _make_refusal(directory: Path, rank_pid: int, joined: bool = False) -> Callable[[], None]:
    """Patches torch's rendezvous, so that calling it in a rank's child process ends the run.

    Args:
        directory: the directory of the run.
        rank_pid: the process of the rank, which may create worlds.
        joined: whether the rank was in a world; its other processes may then create another world,
            but not from the launcher's variables.
    """
    port = os.environ.get("MASTER_PORT")
    # a public function, under the name that torch uses
    call = distributed_c10d.rendezvous  # type: ignore[attr-defined]

    def refuse() -> None:
        if os.getpid() != rank_pid:
            (directory / _TOLD).touch()
            time.sleep(_END_S)
            raise _two_launchers()

    def rendezvous(url: str, *args: Any, **kwargs: Any) -> Any:
        if not joined or url.startswith("env://"):
            refuse()
        where = os.environ.get("MASTER_PORT", "") if url.startswith("env://") else url
        if url.startswith(("env://", "tcp://")) and not re.search(rf"\b{port}\b", where):
            # the program's own port, on which its rank 0 will listen
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        return call(url, *args, **kwargs)

    distributed_c10d.rendezvous = rendezvous  # type: ignore[attr-defined]
    return refuse


def _two_launchers() -> StartsRanks:
    return StartsRanks(
        "both ringsim and the program start ranks: a process started by a rank calls "
        "init_process_group. Omit -n (ringsim trace SCRIPT). In Python, pass ringsim.trace the "
        "function that each rank runs, not the function that starts the ranks."
    )


# -- in a program that creates its own worlds

_SHARED_STORE = (
    "ringsim: if ranks were restarted, torchrun's store still contains the addresses of the old "
    "ranks, and torch's init_process_group may use them. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "on all machines, or call ringsim.initialize_distributed()."
)


def record_program(
    script: str, arguments: Sequence[str], path: Path, *, check: str = "basic", module: bool = False
) -> Path | None:
    """Runs a script in this process, and records the world that it creates or joins.

    A process that the script starts may also do so.

    Args:
        script: the path of a Python file.
        arguments: its arguments.
        path: the file that rank 0 writes at its end, if one of these processes is rank 0.
        check: see ``ringsim.trace``.
        module: whether ``script`` is the name of a module.

    Returns:
        The file, if this process has written it.
    """
    leave = record_worlds(path, check)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(script))
    try:
        call_to_end(
            functools.partial(
                runpy.run_module if module else runpy.run_path, script, run_name="__main__"
            )
        )
    except RuntimeError as error:  # Gloo's own errors are plain RuntimeErrors
        joining = any(
            frame.name == "init_process_group"
            for frame in traceback.extract_tb(error.__traceback__)
        )
        shared = (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        )
        if joining and shared:
            error.add_note(_SHARED_STORE)
        raise
    finally:
        written = leave()
    return written


def record_worlds(path: Path, check: str) -> Callable[[], Path | None]:
    """Records this process and its child processes, each from joining a world to its end.

    Returns a function that ends the recording here.
    """
    from ringsim.comm.torch_hooks import put
    from ringsim.comm.torch_private import SET_DEFAULT, present
    from ringsim.launch.recording import Recording

    call, recordings = getattr(*SET_DEFAULT), list[Recording]()

    def leave() -> Path | None:
        written = None
        error = sys.exception()
        if isinstance(error, SystemExit):
            error = None if error.code in (None, 0) else error.__context__ or error
        while recordings:
            recording = recordings.pop()
            recording.__exit__(None if error is None else type(error), error, None)
            written = recording.written
        put(present({SET_DEFAULT: call}))
        return written

    def set_default(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(group, *args, **kwargs)
        if group is not None and not recordings:
            recordings.append(Recording(path, check=check).__enter__())
            # the end of a multiprocessing process; that of the program comes before
            Finalize(None, leave, exitpriority=0)
        return result

    put(present({SET_DEFAULT: set_default}))
    _follow_processes(lambda: (record_worlds, path, check))
    return leave


# -- for the processes that a program starts


class _Arrival:
    """An object that is pickled with a new process, and calls a function there.

    The call happens after the program's main module is loaded.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _follow_processes(on_start: Callable[[], tuple[Any, ...]]) -> None:
    """Makes unforked ``multiprocessing`` processes begin with a call.

    ``on_start`` returns the call.
    """
    call = BaseProcess.start

    @functools.wraps(call)
    def start(self: BaseProcess) -> None:
        # all attributes of a process object are pickled
        self.ringsim = _Arrival(*on_start())  # type: ignore[attr-defined]
        call(self)

    BaseProcess.start = start  # type: ignore[method-assign]
