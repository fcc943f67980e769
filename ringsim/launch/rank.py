"""Runs a rank from start to end.

::

    join the group and the ring,
    begin to record                (both ahead of time if the rank is parked)
    take a job                     adopt the environment, directory, sys.path and affinity of the
                                   caller; unpickle the function
    send "loaded", wait for "go"   so that all ranks start together
    run the function, recorded
    send the result                and wait for "bye": if rank 0 ended early, the rendezvous store
                                   would end with it

A rank of a session repeats this from the job on, with new files for each call, until "bye".

A thread reads the channel from the start, so that a rank notices immediately when its launcher is
gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringsim.comm import bootstrap, torch_hooks
from ringsim.comm.backends import set_backend
from ringsim.comm.ended_groups import end_groups
from ringsim.comm.injecting import install_with
from ringsim.comm.mpi import import_mpi
from ringsim.diagnose.failure import (
    call_to_end,
    note_failed_threads,
    read_verdict,
    report_exception,
)
from ringsim.diagnose.variables import describe_error, describe_stack
from ringsim.errors import RingError
from ringsim.faults import jitter_of, slowed_by
from ringsim.launch import process, worlds
from ringsim.launch.debugging import RankDebugger
from ringsim.launch.job import ALONE, Job, RankConfig, configure_loggers, show_lines
from ringsim.launch.namespace import Namespace
from ringsim.launch.protocol import (
    ASK,
    IDLE,
    OVER,
    STOP,
    VARIABLES,
    WAKE,
    WAKE_S,
    WHERE,
    answer,
)
from ringsim.launch.results import describe_unpicklable, write_result
from ringsim.launch.system import shut_connections
from ringsim.ring.printing import restore_output
from ringsim.ring.ring import initialize
from ringsim.state import change_state, get_state
from ringsim.traces.frames import current_frames
from ringsim.traces.recorder import Recorder

HEAD = "127.0.0.1"
_PORT_POLL_S = 0.001


def main(channel: Connection, config: RankConfig) -> NoReturn:
    """Runs a rank from start to end, as the launcher requests on ``channel``; does not return."""
    name_process("ringsim-parked")
    _redirect_output(config)
    if config.comm_device == ALONE:
        name_process("ringsim-clock")
        process.become(channel, config, _enter)
    calls = _Calls(channel, config)
    if config.stays:
        calls.serve()
    has_returned = calls.run(config)
    _flush_output()
    while config.backend == "mpi" and calls.inbox.empty():
        # MPI messages progress only during MPI calls; and mpirun may end all ranks with one
        import_mpi().COMM_WORLD.Iprobe()
        time.sleep(_PORT_POLL_S)
    if has_returned:
        calls.inbox.get()  # "bye"
    os._exit(int(not has_returned))  # an interpreter with torch takes 0.2 s to finalize


class _Calls(process.Caller):
    """Runs this rank's calls: one, or those of a session, one after the other."""

    def __init__(self, channel: Connection, config: RankConfig) -> None:
        super().__init__(channel, config)
        self._woken = threading.Event()  # the connections have been shut, for a verdict
        self.listen()
        self._namespace = Namespace() if config.stays else None
        self._epoch = 0  # of the groups
        self._port = 0  # of the rendezvous, once the rank has joined the others
        self._door: socket.socket | None = None  # for groups that the program creates again
        self._kept: Any = None  # must stay alive
        self._has_entered = self._is_interruptible = False
        # groups with operations that earlier calls have left in flight
        self._open_groups: set[str] = set()
        self._steps: Counter[str] = Counter()  # of optimizers in this call, begun and done

    def serve(self) -> NoReturn:
        """Runs the calls of a session until the launcher ends it."""
        signal.signal(signal.SIGINT, self._interrupt)
        register_optimizer_step_pre_hook(lambda *_: self._steps.update(["begun"]))
        register_optimizer_step_post_hook(lambda *_: self._steps.update(["done"]))
        name_process("ringsim-idle")
        while (message := self.inbox.get()) != "bye":
            if message != STOP:  # which came after the call's end
                job = pickle.loads(message)
                if job.epoch != self._epoch:
                    self._leave()
                    self._epoch = job.epoch
                config = replace(self._config, directory=job.directory)
                _redirect_output(config)
                self._woken.clear()
                self._steps.clear()
                self.run(config, job)
                _flush_output()
                name_process("ringsim-idle")
                steps = self._steps["begun"], self._steps["done"]
                self.say(IDLE, (dist.is_initialized(), steps))
        os._exit(0)

    def _leave(self) -> None:
        """Ends the groups, of which some ranks may be gone."""
        shut_connections(None, self._channel.fileno())
        restore_output()
        change_state(ring=None)
        end_groups()
        self._port, self._kept, self._open_groups = 0, None, set()

    def _interrupt(self, number: int, frame: Any) -> None:
        """Raises KeyboardInterrupt in the program, but not in ringsim's own work."""
        if self._is_interruptible:
            signal.default_int_handler(number, frame)

    def _stop(self) -> None:
        """Stops at a breakpoint of the program."""
        RankDebugger(self.ask, lambda: f"rank {self._config.rank}").set_trace(sys._getframe(1))

    def run(self, config: RankConfig, job: Job | None = None) -> bool:
        """Runs one call, whose files ``config`` names; returns whether its function has returned.

        The launcher receives the result, or the error.
        """
        try:
            self._join()
            recorder = _start_recording(config)
            stop = note_failed_threads(recorder, lambda: self.say("woken", False))
            try:
                result = self._run(recorder, config, job)
            finally:
                torch_hooks.uninstall(recorder)
                self._open_groups |= recorder.list_open_groups()
                recorder.close()
                stop()
            self.say("result", _write_result(result, config))
        except BaseException as error:  # the launcher must receive any error
            if get_state().debug:
                self.say(VARIABLES, describe_error(error))
            self.say("failed", report_exception(config.rank, error))
            return False
        return True

    def _join(self) -> None:
        """Joins the other ranks, unless this rank has."""
        if not self._port:
            self._port, self._door, self._kept = _join(self._config)
            os.environ["MASTER_PORT"] = str(self._port)

    def _run(self, recorder: Recorder, config: RankConfig, job: Job | None) -> Any:
        """Runs one call, recorded, and returns its result."""
        recorder.is_settled = lambda group: bool(self._namespace) and group not in self._open_groups
        recorder.on_failure = functools.partial(self._raise_verdict, recorder)
        self.say("ready", os.getpid())
        job = job or pickle.loads(self.inbox.get())
        self._take(job, config, recorder)
        function = load_job(job, config.rank, self._namespace)
        recorder.hooks.on_imports()
        self.say("loaded", torch.get_num_threads())
        if self.inbox.get() != "go":
            raise KeyboardInterrupt
        self._is_interruptible = True
        try:
            result = function()
        finally:
            self._is_interruptible = False
        recorder.hooks.check_end()
        return result

    def _take(self, job: Job, config: RankConfig, recorder: Recorder) -> None:
        """Sets up this rank for a job before the program's code is loaded.

        The later calls of a session find the rank as the earlier ones left it.
        """
        name_process(f"ringsim-rank{config.rank}")
        recorder.world = job.epoch
        if self._has_entered:
            show_lines(job.lines)
        else:
            self._has_entered = True
            variables = launcher_variables(config.rank, config.world_size, self._port)
            # connect to the existing store, do not open another
            _enter(job, {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"})
            _start_computing(job, config)
            worlds.enter_rank(Path(self._config.directory), self._end)
        if self._door is not None:  # in the background, because a name server may be slow
            host = functools.partial(bootstrap.host, self._door, self._config.timeout_s)
            self._kept, self._door = bootstrap.BackgroundCall(host), None
        if job.debug:
            sys.breakpointhook = self._stop
            change_state(debug=True)
            # processes that the program forks have no channel
            os.register_at_fork(after_in_child=_forget_breakpoints)
        recorder.set_meta("num_threads", torch.get_num_threads())
        recorder.set_meta("argv", job.argv)
        if job.check != "basic" or job.inject:
            torch_hooks.uninstall(recorder)
            install_with(job.inject, recorder, job.check)
            slowdown, jitter = (
                slowed_by(job.inject, config.rank),
                jitter_of(job.inject, config.rank),
            )
            change_state(slowdown=slowdown, jitter=jitter)

    # -- messages

    def hear(self, message: Any) -> None:
        """Handles a message of the launcher or of its watcher."""
        main, recorder = threading.main_thread().ident or 0, get_state().recorder
        if message == WHERE and get_state().debug:
            self.say(VARIABLES, describe_stack(current_frames()[main]))
        if message == WHERE and recorder is not None:  # the rank is about to be ended
            with contextlib.suppress(ValueError):  # the recording is just ending
                recorder.complete_times()
        if message in (ASK, WHERE):
            self.say(message, answer(message))
        elif message == WAKE:
            if self._config.backend is None:  # an MPI wait looks for a verdict by itself
                shut_connections(_read_port(self._config), self._channel.fileno())
            self._woken.set()
        elif message == STOP:
            self.inbox.put(message)
            _silence_cpp()
            shut_connections(None, self._channel.fileno())
            signal.pthread_kill(main, signal.SIGINT)
        elif message[0] == OVER:
            self._woken.clear()
            with contextlib.suppress(ValueError):  # the recording is just ending
                if recorder is not None:
                    recorder.complete_as_failed(message[1])
        else:
            self.inbox.put(message)

    def _raise_verdict(self, recorder: Recorder) -> None:
        """Raises the verdict on this rank, if there is one, after a wait has failed.

        The launcher is notified.
        """
        verdict = read_verdict(recorder.directory)
        if verdict is not None and recorder.rank in verdict.ranks:
            if recorder.rank in verdict.waiting:
                self._woken.wait(WAKE_S)  # otherwise, new connections would also be shut
            self.say("woken", True)
            raise verdict.error

    def _end(self, error: Exception) -> NoReturn:
        """Ends the rank and its child processes, whatever its main thread does."""
        self.say("failed", report_exception(self._config.rank, error))
        os._exit(1)


def _forget_breakpoints() -> None:
    sys.breakpointhook = sys.__breakpointhook__


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the worker may have closed or replaced it
            stream.flush()


def warm_up() -> None:
    """Loads the lazily imported parts of numpy and torch once, before ranks are forked."""
    # takes 0.3 s: otherwise loaded by the first backward pass from a gradient
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    process.preload()
    _seed(0)
    with tempfile.TemporaryDirectory(prefix="ringsim-") as directory:
        recorder = _start_recording(RankConfig(directory, 0, 1, "cpu", 1.0, ring=False))
        torch_hooks.uninstall(recorder)
        recorder.close()


def name_process(name: str) -> None:
    """Names this process for `ps` and `ringsim doctor`, if the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def _redirect_output(config: RankConfig) -> None:
    """Redirects all output of this process, including output from C++, to a file.

    The file is in the run's directory, and survives the process.
    """
    fd = os.open(config.file("out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = shown = _line_writer(1)
    sys.stderr = _line_writer(2)
    faulthandler.enable(config.file("crash").open("w"), all_threads=False)

    def hide(text: str) -> None:  # keeps hidden text in the same file
        shown.write(f"{config.mark}{text}{config.mark}")
        shown.flush()

    change_state(hidden_output=hide)


def _silence_cpp() -> None:
    """Drops the standard error, on which torch would describe lost connections at length."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _line_writer(fd: int) -> TextIO:
    return io.TextIOWrapper(
        io.FileIO(fd, "w", closefd=False),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _join(config: RankConfig) -> tuple[int, socket.socket | None, Any]:
    """Joins the other ranks.

    Returns:
        The port of the rendezvous; on rank 0 of a ring, the socket that reserves it, because a Gloo
        ring is closed to later ranks; and the object that must stay alive for it.
    """
    if config.rank == 0:
        listener = bootstrap.listen(HEAD, 0)
        port: int = listener.getsockname()[1]
        partial = config.port_file.with_suffix(".new")
        partial.write_text(str(port))
        partial.replace(config.port_file)
    else:
        listener = None
        port = _read_port(config)
    if config.backend is not None:
        set_backend(config.backend)
    interface = bootstrap.loopback_interface()
    if interface is not None and (config.backend is not None or not config.ring):
        # for Gloo groups that the script or worker creates
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if config.ring:
        place = config.world_size, config.rank, config.rank, config.comm_device
        descriptor = -1 if listener is None else listener.fileno()
        initialize(HEAD, port, *place, timeout_s=config.timeout_s, listen_socket=listener)
        # NCCL connects to the store again for later groups
        closes = descriptor >= 0 and config.comm_device == "cpu"
        return port, bootstrap.close_door(descriptor, HEAD, port) if closes else None, None
    # The script or worker creates its own groups over this store, which it finds in the same way as
    # torchrun's.
    return port, None, bootstrap.host(listener, config.timeout_s) if listener is not None else None


def _read_port(config: RankConfig) -> int:
    """Waits until rank 0 has written the rendezvous port, and returns it."""
    deadline = time.monotonic() + config.timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return int(config.port_file.read_text())
        time.sleep(_PORT_POLL_S)
    raise TimeoutError(f"rank 0 did not open the rendezvous within {config.timeout_s:g} s")


def _enter(job: Job, variables: dict[str, str]) -> None:
    """Adopts the caller's environment, directory, import path, arguments, loggers and cells."""
    kept = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME",) if name in os.environ}
    wanted = {**kept, **job.environ, **variables}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    )
    os.chdir(job.cwd)
    if job.script is None:
        sys.path[:] = job.path
    else:
        sys.path[:] = [job.cwd if job.module else os.path.dirname(job.script), *job.path]
    sys.argv[:] = job.argv
    configure_loggers(job.loggers)
    show_lines(job.lines)


def _start_computing(job: Job, config: RankConfig) -> None:
    """Adopts the caller's processors and seeds the random number generators."""
    if job.affinity:
        os.sched_setaffinity(0, job.affinity)
    cores = len(job.affinity) or os.cpu_count() or 1
    if config.world_size >= cores and "OMP_NUM_THREADS" not in job.environ:
        torch.set_num_threads(1)
    _seed(job.seed + config.rank)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (
        torch.version.cuda
        or torch.version.hip
        or torch.version.xpu
        or torch.backends.mps.is_built()
    ):
        torch.manual_seed(seed)
    else:
        # Not for the devices that this torch does not support: torch would record the call stack
        # for them, 0.7 MB in every rank.
        torch.default_generator.manual_seed(seed)


def launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns torchrun's variables, so that programs written for it run unchanged."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HEAD,
        "MASTER_PORT": str(port),
    }


def load_job(job: Job, rank: int, namespace: Namespace | None) -> Callable[[], Any]:
    """Returns the function to run, in the namespace of a session."""
    if job.only is not None and rank not in job.only:
        return lambda: None
    if job.call is not None:
        load = pickle.loads if namespace is None else namespace.load
        worker, args, kwargs = load(job.call)
        return functools.partial(call_to_end, functools.partial(worker, *args, **kwargs))
    run = functools.partial(
        runpy.run_module if job.module else runpy.run_path, str(job.script), run_name="__main__"
    )
    return lambda: call_to_end(run) and None  # its names are not a result


def _start_recording(config: RankConfig) -> Recorder:
    """Starts recording every message."""
    recorder = Recorder(Path(config.directory), config.rank, config.world_size)
    torch_hooks.install(recorder)
    return recorder


def _write_result(result: Any, config: RankConfig) -> list[tuple[int, int]]:
    try:
        return write_result(result, config.file("result"))
    except OSError as error:
        raise RingError(
            f"cannot write the worker's result to the run's directory: {error} (rank {config.rank} "
            f"of {config.world_size}). Free some space, or set TMPDIR to another directory."
        ) from None
    except Exception as error:
        where = f"rank {config.rank} of {config.world_size}"
        raise TypeError(describe_unpicklable(result, error, where)) from None
