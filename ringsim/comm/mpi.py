"""The backend ``mpi`` of torch.distributed, for ranks that ``mpirun`` (or ``srun``) has started.

torch keeps the name "mpi" for a backend of its own, which its wheels are built without, and has a
place for it that is empty then. ``register`` puts ours there: so ``init_process_group("mpi")`` and
``new_group`` work as torch documents them, and no address is needed, for MPI joins the ranks.

While the ranks are joined, a rank that ends by an exception, or by ``sys.exit`` with a code other
than 0, ends all ranks: the others would wait for it. Python calls no hook for SystemExit, and tells
no handler of ``atexit`` with which code the process ends. But the interpreter reads the attribute
``code`` of the exception that has reached it, and no frame of Python is below that look. Whoever
catches it has one.
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
from typing import Any, Final, NoReturn

import torch.distributed as dist

# public, though torch lists it nowhere
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ringsim.comm.bootstrap import host, listen, reach
from ringsim.comm.mpi_group import LEAVE_S, Job, MpiGroup
from ringsim.comm.python_group import DEFAULT_TIMEOUT
from ringsim.comm.torch_private import HAS_MPI, MAKE_GROUP
from ringsim.environment import HERE, address_towards
from ringsim.errors import ArgumentError, RingError

__all__ = ["check_place", "import_mpi", "register", "start_mpi", "watch_exit"]

_CODE: Final[Any] = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """The exception that ``sys.exit`` raises while the job lasts."""

    on_end: Callable[[Any], None]

    @property
    def code(self) -> Any:  # type: ignore[override]  # a field there, to be overheard here
        """The status, for whoever caught this.

        The interpreter, which ends the process with it, is overheard.
        """
        status = _CODE.__get__(self)
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            self.on_end(status)
        return status


# as reports and tracebacks name it
_Exit.__module__, _Exit.__qualname__, _Exit.__name__ = "builtins", "SystemExit", "SystemExit"


def watch_exit(abort: Callable[[int], Any]) -> Callable[[], None]:
    """Calls ``abort(code)`` when ``sys.exit`` ends this process with a code other than 0.

    Its message is shown; returns what undoes it.

    Args:
        abort: ends all ranks.

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


# mpirun drops what is still in the pipes to it when the job is ended: the error would stay unseen
_LAST_WORDS_S: Final = 0.2


def import_mpi() -> Any:
    """Returns ``mpi4py.MPI``; the first import starts MPI in this process.

    Raises:
        RingError: it is missing, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RingError(
            "mpi4py and an MPI library must be installed for the mpi backend, got "
            f"{type(error).__name__}: {error}. Install both from PyPI: pip install 'ringsim[mpi]'."
        ) from error
    return MPI


def start_mpi() -> int:
    """Starts MPI in a process of ``mpirun``'s, and returns the rank once it has started in all.

    Then MPICH's shared memory loses its name, so that ranks that are killed leave no file.
    """
    everybody = import_mpi().COMM_WORLD
    everybody.Barrier()
    with suppress(FileNotFoundError):  # of /proc
        for name in re.findall(r"/dev/shm/mpich\S+", Path("/proc/self/maps").read_text()):
            Path(name).unlink(missing_ok=True)
    return int(everybody.Get_rank())


def enter_job(everybody: Any) -> Callable[[], None]:
    """Lets a failure of this rank end all ranks: the others would wait for it, and MPI at its end.

    Returns what undoes it.

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
        with redirect_stderr(errors):  # torch's own hook collects what is written, for later
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


# -- joining


# what torch calls for groups of the backend "mpi"; builds without MPI lack the name
_MPI_CLASS: Final = (dist.distributed_c10d, "ProcessGroupMPI")
_LEFT: Final = "ringsim/left"
_LOOK_S: Final = 0.002


class _Maker:
    """Makes the groups of the backend "mpi", in the place of torch's class of that name.

    Attributes:
        world: the group of all ranks, None while they are not joined.
    """

    def __init__(self) -> None:
        self.world: MpiGroup | None = None
        self._made: MpiGroup | None = None

    def join(self, timeout: timedelta) -> MpiGroup:
        """Joins the ranks that mpirun has started; all of them call it, and it blocks until then.

        Args:
            timeout: limit for that, and of every operation.

        Returns:
            The group of all ranks.

        Raises:
            RingError: mpi4py or its MPI is missing.
            RunTimeout: not all ranks have come.
        """
        mpi = import_mpi()
        everybody = mpi.COMM_WORLD
        rank, size = everybody.Get_rank(), everybody.Get_size()
        job = Job(mpi, everybody, None, itertools.count(1), {}, lambda: None)
        world = MpiGroup(job, everybody, range(size), 0, timeout)
        world.complete(everybody.Ibarrier(), f"init_process_group (rank {rank} of {size})")
        world.comm, job.control = everybody.Dup(), everybody.Dup()
        job.store = _share_store(world)
        undo = enter_job(everybody)

        def leave() -> None:
            _leave_store(job.store, rank, size)
            undo()
            self.world = None

        job.leave = leave
        self.world = world
        return world

    def create(self, ranks: Sequence[int]) -> MpiGroup | None:
        """Returns the group that ``wrap`` has made; torch calls it on its members."""
        made, self._made = self._made, None
        return made

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns torch's function that creates groups, which makes ours first, on all ranks.

        Torch's own MPI gets neither a store nor a limit; both are handed on here.
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
                    if desc.startswith("ring:"):  # pair groups bear their edge
                        values["group_name"] = desc
                else:
                    raise RingError(
                        "the default process group must be on MPI if another group is to be, got "
                        f'the backend {dist.get_backend()!r}. Call init_process_group("mpi").'
                    )
            return call(*given.args, **given.kwargs)

        return make_group


def _share_store(world: MpiGroup) -> Any:
    """Returns a store that all ranks share; rank 0 hosts it, on loopback if all are there."""
    control, rank = world.job.control, world.rank()
    if world.size() == 1:
        return HashStore()
    limit_s = world.timeout.total_seconds()
    machines = control.allgather(world.job.mpi.Get_processor_name())
    others = [machine for machine in machines if machine != machines[0]]
    place = store = None
    try:
        if rank == 0:
            listener = listen(address_towards(others[0]) if others else HERE, 0)
            place = listener.getsockname()[:2]
            store = host(listener, limit_s)
    finally:
        place = control.bcast(place)
    if place is None:
        raise RingError("rank 0 must host the store that all ranks share, got an error there.")
    address, port = place
    return store or reach(address, port, limit_s)


def _leave_store(store: Any, rank: int, size: int) -> None:
    """Takes leave of the store; rank 0, which hosts it, stays until the others have, some seconds.

    Somebody may still read there why the ranks part.
    """
    with suppress(RuntimeError):  # rank 0 has gone
        if rank > 0:
            store.add(_LEFT, 1)
            return
        deadline = time.monotonic() + LEAVE_S
        while store.add(_LEFT, 0) < size - 1 and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def register() -> None:
    """Lets torch.distributed make groups on MPI, unless it can, or mpi4py is missing."""
    if getattr(*HAS_MPI, True) or not hasattr(*MAKE_GROUP) or find_spec("mpi4py") is None:
        return
    maker = _Maker()
    setattr(*HAS_MPI, True)
    setattr(*_MPI_CLASS, maker)
    setattr(*MAKE_GROUP, maker.wrap(getattr(*MAKE_GROUP)))


def check_place(world_size: int, rank: int) -> None:
    """Raises ArgumentError unless a rank and a number of ranks are MPI's, or -1."""
    everybody = import_mpi().COMM_WORLD
    for what, wanted, is_value in (
        ("world_size", world_size, everybody.Get_size()),
        ("rank", rank, everybody.Get_rank()),
    ):
        if wanted not in (-1, is_value):
            raise ArgumentError(
                f"{what} must be {is_value} as MPI has it, or left out, got {wanted}. Start "
                "the ranks with mpirun."
            )
