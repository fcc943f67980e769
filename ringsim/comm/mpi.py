"""The ``mpi`` backend for torch.distributed, for ranks started by ``mpirun`` (or ``srun``).

Torch reserves the name "mpi" for its own backend, which its wheels do not contain, so that place is
empty. ``register`` puts ringsim's backend there, so that ``init_process_group("mpi")`` and
``new_group`` work as torch documents them. No address is needed, because MPI connects the ranks.

While the ranks are connected, a rank that ends with an exception, or calls ``sys.exit`` with a
nonzero code, ends all ranks, because the other ranks would wait for it. Python calls no hook for
SystemExit, and an ``atexit`` handler does not get the exit code. But the interpreter reads the
attribute ``code`` of an uncaught exception. At that time, no Python frame is active, whereas a
program that catches the exception and reads the attribute has a frame.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

# public, although torch does not list it
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ringsim.comm.bootstrap import Card, RollCall, host, listen, reach
from ringsim.comm.mpi_group import LEAVE_S, MpiGroup, MpiJob
from ringsim.comm.python_group import DEFAULT_TIMEOUT
from ringsim.comm.torch_private import HAS_MPI, MAKE_GROUP
from ringsim.environment import find_address
from ringsim.errors import ArgumentError, RingError

_CODE: Any = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """The exception that ``sys.exit`` raises during the job."""

    on_end: Callable[[Any], None]

    @property
    def code(self) -> Any:  # type: ignore[override]  # a field in SystemExit
        """The status; calls ``on_end`` if the interpreter reads the status to end the process."""
        status = _CODE.__get__(self)
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            self.on_end(status)
        return status


# the name in reports and tracebacks
_Exit.__module__, _Exit.__qualname__, _Exit.__name__ = "builtins", "SystemExit", "SystemExit"


def watch_exit(abort: Callable[[int], Any]) -> Callable[[], None]:
    """Calls ``abort(code)`` when ``sys.exit`` ends this process with a nonzero code.

    The message of ``sys.exit`` is still shown. Returns a function that undoes the change.

    Args:
        abort: a function that ends all ranks.

    Example:
        >>> undo = watch_exit(print)
        >>> try:
        ...     sys.exit(3)
        ... except SystemExit as error:
        ...     error.code
        3
        >>> undo()
    """
    before = sys.exit
    statuses: list[Any] = []

    def exit_in_job(status: Any = None, /) -> NoReturn:
        error = _Exit() if status is None else _Exit(status)
        error.on_end = statuses.append
        raise error

    def end() -> None:
        if statuses and statuses[-1] not in (None, 0):
            abort(statuses[-1] if isinstance(statuses[-1], int) else 1)

    def undo() -> None:
        if sys.exit is exit_in_job:
            sys.exit = before
        atexit.unregister(end)

    sys.exit = exit_in_job
    atexit.register(end)
    return undo


# mpirun discards output that is still in its pipes when the job ends: the error would be lost
_LAST_WORDS_S = 0.2


def import_mpi() -> Any:
    """Returns ``mpi4py.MPI``; the first import starts MPI in this process.

    Raises:
        RingError: mpi4py is missing, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RingError(
            f"cannot load mpi4py for the mpi backend: {type(error).__name__}: {error}. Install "
            "mpi4py and an MPI library from PyPI: pip install 'ringsim[mpi]'."
        ) from error
    return MPI


def start_mpi() -> int:
    """Starts MPI in a process under ``mpirun``; returns the rank once all processes have started.

    The function then also unlinks MPICH's shared memory, so that killed ranks leave no file.
    """
    everybody = import_mpi().COMM_WORLD
    everybody.Barrier()
    with suppress(FileNotFoundError):  # no /proc on this system
        for name in re.findall(r"/dev/shm/mpich\S+", Path("/proc/self/maps").read_text()):
            Path(name).unlink(missing_ok=True)
    return int(everybody.Get_rank())


def enter_job(everybody: Any) -> Callable[[], None]:
    """Makes a failure of this rank end all ranks, because MPI and the others would wait forever.

    Returns a function that undoes the change.

    Args:
        everybody: the communicator of all ranks.
    """
    before, errors, entered = sys.excepthook, sys.stderr, True

    def end_job(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        everybody.Abort(code)

    def end_all(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not entered:
            before(kind, error, trace)
            return
        with redirect_stderr(errors):  # torch's own hook captures stderr until later
            before(kind, error, trace)
        end_job(1)

    sys.excepthook = end_all
    undo_exit = watch_exit(end_job)

    def undo() -> None:
        nonlocal entered
        entered = False
        undo_exit()
        if sys.excepthook is end_all:
            sys.excepthook = before

    return undo


# -- connecting the ranks


# torch's class for groups on the backend "mpi"; builds without MPI lack the name
_MPI_CLASS = (dist.distributed_c10d, "ProcessGroupMPI")


class _Maker:
    """The factory for groups on the "mpi" backend, in place of torch's own class.

    Attributes:
        world: the group of all ranks, or None while the ranks are not connected.
    """

    world: MpiGroup | None = None
    _made: MpiGroup | None = None

    def join(self, timeout: timedelta) -> MpiGroup:
        """Connects the ranks started by mpirun.

        Call this method on all ranks; it blocks until all ranks have called it.

        Args:
            timeout: the limit for connecting, and for every operation.

        Returns:
            The group of all ranks.

        Raises:
            RingError: mpi4py or the MPI library is missing.
            RunTimeout: not all ranks have called this method in time.
        """
        mpi = import_mpi()
        everybody = mpi.COMM_WORLD
        rank, size = everybody.Get_rank(), everybody.Get_size()
        job = MpiJob(mpi, everybody, None, itertools.count(1), {}, lambda: None)
        world = MpiGroup(job, everybody, range(size), 0, timeout)
        world.complete(everybody.Ibarrier(), f"init_process_group (rank {rank} of {size})")
        world.comm, job.control = everybody.Dup(), everybody.Dup()
        job.store = _share_store(world)
        card = Card(size, "cpu", tuple(range(size)))
        # a rank may leave before another one arrives
        roll = RollCall(job.store, rank, card, hosts=rank == 0, reused=True)
        undo = enter_job(everybody)

        def leave() -> None:
            # other ranks may still need to read an error from the store
            roll.leave(LEAVE_S)
            undo()
            self.world = None

        job.leave = leave
        self.world = world
        return world

    def create(self, ranks: Sequence[int]) -> MpiGroup | None:
        """Returns the group that ``wrap`` created; torch calls this method on the members."""
        made, self._made = self._made, None
        return made

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a wrapper for torch's function that creates groups.

        The wrapper first creates an MPI group on all ranks. It also passes on the store and the
        timeout, which torch's own MPI backend does not get.
        """
        signature = inspect.signature(call)

        @functools.wraps(call)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            values = given.arguments
            if values["backend"] == "mpi":
                ranks = values["global_ranks_in_group"]
                timeout = values.get("timeout") or DEFAULT_TIMEOUT
                if not ranks:
                    self._made = self.join(timeout)
                    values["store"] = self._made.job.store
                elif self.world is not None:
                    self._made = self.world.make_group(ranks, timeout)
                    desc = values.get("group_desc") or ""
                    if desc.startswith("ring:"):  # pair groups are named after their edge
                        values["group_name"] = desc
                else:
                    raise RingError(
                        "cannot create a group with the 'mpi' backend, because the default process "
                        f'group uses {dist.get_backend()!r}. Call init_process_group("mpi").'
                    )
            return call(*given.args, **given.kwargs)

        return make_group


def _share_store(world: MpiGroup) -> Any:
    """Returns a store that all ranks share; rank 0 hosts the store, on loopback if possible."""
    control, rank = world.job.control, world.rank()
    if world.size() == 1:
        return HashStore()
    limit_s = world.timeout.total_seconds()
    machines = control.allgather(world.job.mpi.Get_processor_name())
    place = store = None
    try:
        if rank == 0:
            listener = listen(find_address(machines), 0)
            place = listener.getsockname()[:2]
            store = host(listener, limit_s)
    finally:
        place = control.bcast(place)
    if place is None:
        raise RingError("rank 0 failed to host the shared store. See rank 0's error.")
    address, port = place
    return store or reach(address, port, limit_s)


def register() -> None:
    """Enables groups on MPI in torch.distributed, unless torch has MPI or mpi4py is missing."""
    if getattr(*HAS_MPI, True) or not hasattr(*MAKE_GROUP) or find_spec("mpi4py") is None:
        return
    maker = _Maker()
    setattr(*HAS_MPI, True)
    setattr(*_MPI_CLASS, maker)
    setattr(*MAKE_GROUP, maker.wrap(getattr(*MAKE_GROUP)))


def check_place(world_size: int, rank: int) -> None:
    """Raises ArgumentError unless a rank and a world size match MPI's values or are -1."""
    everybody = import_mpi().COMM_WORLD
    for what, wanted, is_value in (
        ("world_size", world_size, everybody.Get_size()),
        ("rank", rank, everybody.Get_rank()),
    ):
        if wanted not in (-1, is_value):
            raise ArgumentError(
                f"{what} must be {is_value}, as in MPI, or omitted, got {wanted}. Start the "
                "ranks with mpirun."
            )
