"""The backend ``mpi``: MPI through mpi4py, for ranks that ``mpirun`` (or ``srun``) has started.

Everything is begun without blocking and awaited with a limit, so that a rank that never answers ends in an error that names the
operation. An operation moves on while its process is inside some call of this backend: MPI has no thread of its own.

While the ranks are joined, a rank that ends by an exception, or by ``sys.exit`` with a code other than 0, ends all ranks: the others would
wait for it. Python calls no hook for SystemExit, and tells no handler of ``atexit`` with which code the process ends. But the interpreter
reads the attribute ``code`` of the exception that has reached it, and no frame of Python is below that look. Whoever catches it has one.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NoReturn

from torch.distributed import GroupMember, distributed_c10d

from ringsim.comm.mpi_transfers import Job, MpiGroup, MpiHandle, MpiRecords, MpiTransfers, to_seconds
from ringsim.comm.objects import OBJECTS
from ringsim.errors import ArgumentError, RingError, RunTimeout
from ringsim.traces.events import ERROR, OP_CODES

__all__ = ["MpiBackend", "watch_exit"]

_CODE: Final[Any] = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """What ``sys.exit`` raises while the job lasts."""

    on_end: Callable[[Any], None]

    @property
    def code(self) -> Any:  # type: ignore[override]
        """The status, for whoever caught this; the interpreter, which ends the process with it, is overheard."""
        status = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            self.on_end(status)
        return status


def watch_exit(abort: Callable[[int], Any]) -> Callable[[], None]:
    """Calls ``abort(code)`` when ``sys.exit`` ends this process with a code other than 0, its message shown; returns what undoes it.

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


_LAST_WORDS_S: Final = 0.2  # mpirun drops what is still in the pipes to it when the job is ended: the error would stay unseen


def import_mpi() -> Any:
    """Returns ``mpi4py.MPI``; the first import starts MPI in this process.

    Raises:
        RingError: it is missing, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RingError(
            f"mpi4py and an MPI library must be installed for the mpi backend, got {type(error).__name__}: {error}. "
            "Install both from PyPI: pip install 'ringsim[mpi]'."
        ) from error
    return MPI


def enter_job(everybody: Any) -> Callable[[], None]:
    """Lets a failure end all ranks, and torch's functions say where to go; returns what undoes both.

    Args:
        everybody: the communicator of all ranks.
    """

    def end_job(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        everybody.Abort(code)

    undo_hook = _end_all_ranks_on_failure(end_job)
    undo_exit = watch_exit(end_job)
    undo_signpost = _point_torch_to_ringsim()

    def undo() -> None:
        undo_signpost()
        undo_exit()
        undo_hook()

    return undo


def _end_all_ranks_on_failure(end_job: Callable[[int], None]) -> Callable[[], None]:
    """Lets an exception that ends this process end the job: the others would wait for it until their limits, and MPI at its end."""
    before = sys.excepthook

    def end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end_job(1)

    def undo() -> None:
        if sys.excepthook is end_all:
            sys.excepthook = before

    sys.excepthook = end_all
    return undo


def _point_torch_to_ringsim() -> Callable[[], None]:
    """Lets torch's own functions, which find no default group here, name those to call instead."""
    before = distributed_c10d._get_default_group

    def get_default_group() -> Any:
        try:
            return before()
        except ValueError as error:
            raise ArgumentError(
                "the functions of torch.distributed must have a process group of torch's, got none: MPI joins the ranks of this job. "
                "Call those of ringsim.comm, from ringsim import comm as dist; DeviceMesh is torch's alone."
            ) from error

    def undo() -> None:
        if distributed_c10d._get_default_group is get_default_group:
            distributed_c10d._get_default_group = before

    distributed_c10d._get_default_group = get_default_group
    return undo


_DEFAULT_TIMEOUT_S: Final = 1800.0  # torch's
_LEAVE_S: Final = 5.0  # how long destroy_process_group waits for sends that nobody has received
_EMPTY: Final = b""


class MpiBackend(MpiTransfers):
    """The functions of ``torch.distributed`` on MPI, for CPU tensors of every dtype.

    Example:
        >>> MpiBackend().supports("all_to_all_single"), MpiBackend().is_initialized()
        (True, False)
    """

    name = "mpi"

    # -- the job

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Joins the ranks that mpirun has started: all of them call it, and it blocks until all have.

        While the ranks are joined, an exception that ends one of them ends the whole job, and so does ``sys.exit`` with another code than
        0, for the others would wait for it.

        Args:
            backend: "mpi" or None.
            init_method: not needed here.
            timeout: limit of every operation; None for torch's, 30 minutes.
            world_size: -1, or as mpirun has it.
            rank: -1, or as mpirun has it.
            rest: torch's others, not needed here.
            named: the same by name.

        Raises:
            ArgumentError: ``world_size`` or ``rank`` differ from mpirun's, or ``backend`` is another.
            RingError: the ranks are joined already, or mpi4py or its MPI is missing.
            RunTimeout: not all ranks have come.
        """
        if self._job is not None:
            raise RingError(
                f"the mpi backend must be initialized once, got a second call ({self.here()}). Call destroy_process_group first."
            )
        if backend not in (None, "mpi"):
            raise ArgumentError(f'backend must be "mpi" or None with the mpi backend, got {backend!r}. For torch\'s: set_backend("torch").')
        mpi = import_mpi()
        everybody = mpi.COMM_WORLD
        for what, wanted, is_value in (("world_size", world_size, everybody.Get_size()), ("rank", rank, everybody.Get_rank())):
            if wanted not in (-1, is_value):
                raise ArgumentError(f"{what} must be {is_value} as MPI has it, or left out, got {wanted}. Start the ranks with mpirun.")
        timeout_s = to_seconds(timeout) or _DEFAULT_TIMEOUT_S
        MpiHandle(
            mpi, everybody.Ibarrier(), f"init_process_group (rank {everybody.Get_rank()} of {everybody.Get_size()})", timeout_s
        ).wait()
        world = MpiGroup(everybody.Dup(), tuple(range(everybody.Get_size())), "world", 0, timeout_s, "default_pg")
        control, token = everybody.Dup(), bytearray(uuid.uuid4().bytes)
        MpiHandle(mpi, control.Ibcast(token, 0), "init_process_group", timeout_s, keep=token).wait()
        self._job = Job(
            mpi=mpi,
            world=world,
            control=control,
            token=token.hex(),
            groups={world},
            numbers=itertools.count(1),
            blocks=itertools.count(1),
            records=MpiRecords(mpi.Get_library_version().splitlines()[0].strip("\0 ")),
            under_way={},
            undo=enter_job(everybody),
        )

    def destroy_process_group(self, group: Any = None) -> None:
        """Ends a group, or with None all of them; every member calls it when its messages are done.

        Sends that nobody waited for get a few seconds to be received; recvs are taken back.
        """
        job = self._working()
        found = self._find(group)
        if found is None:
            return
        if found is not job.world:
            job.groups.remove(found)
            found.comm.Free()
            return
        for handle in list(job.under_way):
            try:
                handle.wait(0.001 if handle.receives else _LEAVE_S)
            except RunTimeout:
                handle.abandon()
            except RingError:
                pass  # the program was told, or did not ask
        job.undo()
        self._job = None
        for each in sorted(job.groups, key=lambda group: group.number):  # a rank may wait here for the others: all go in one order
            each.comm.Free()
        job.control.Free()

    def name_block(self) -> str:
        """Returns a name that is the same on all ranks and another at each call, for files that they share; does not block."""
        job = self._working()
        return f"{job.token}-{next(job.blocks)}"

    def is_initialized(self) -> bool:
        """Returns whether the ranks are joined."""
        return self._job is not None

    # -- groups

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> Any:
        """Makes a group. All ranks call it in the same order with the same ranks, also those outside the group.

        Args:
            ranks: global ranks of the members, None for all.
            timeout: limit of an operation on the group; None for that of the default group.
            backend: "mpi" or None.
            pg_options: not needed here.
            use_local_synchronization: not to be used here: MPI needs all ranks.
            group_desc: what to call it, where one looks at it.
            device_id: not needed here.
            sort_ranks: whether rank 0 of the group is the least of ``ranks``, or the first.

        Returns:
            The group; on ranks outside ``GroupMember.NON_GROUP_MEMBER``.

        Raises:
            ArgumentError: a rank does not exist or is there twice, or the ranks of this call differ between the processes.
            RunTimeout: not all ranks have come.
        """
        job = self._working()
        world = job.world
        if backend not in (None, "mpi"):
            raise ArgumentError(f'backend must be "mpi" or None with the mpi backend, got {backend!r} ({self.here()}). Leave it out.')
        if use_local_synchronization:
            raise ArgumentError(
                f"use_local_synchronization must be False with the mpi backend, got True ({self.here()}). Call new_group on all ranks."
            )
        members = self._members(ranks, sort_ranks)
        number = self._agree("new_group", members)
        if not members:
            return GroupMember.NON_GROUP_MEMBER
        comm = world.comm.Create(world.comm.Get_group().Incl(list(members)))
        if comm == job.mpi.COMM_NULL:
            return GroupMember.NON_GROUP_MEMBER
        desc = group_desc or "undefined"
        name = desc if desc.startswith("ring:") else f"mpi:{number}"  # pair groups bear their edge, as on torch
        group = MpiGroup(comm, members, name, number, to_seconds(timeout) or world.timeout_s, desc)
        job.groups.add(group)
        return group

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here; where one does not, rank 0 of the group says which.

        Args:
            group: who meets.
            timeout: limit, a timedelta or seconds; None for the group's.
            wait_all_ranks: whether rank 0 names all missing ranks, or the first one.

        Raises:
            RunTimeout: a rank has not come.
        """
        found = self.enter("monitored_barrier", group)
        if found is None:
            return
        job, limit_s = self._working(), to_seconds(timeout) or found.timeout_s
        begun = job.records.post(OP_CODES["monitored_barrier"], found, -1, -1, [])
        if begun is not None:
            begun[0].wait(begun[1])
        try:
            if found.rank() == 0:
                self._count_all(found, limit_s, wait_all_ranks)
            else:
                what, head = f"monitored_barrier (rank {found.rank()} of {found.size()})", found.ranks[0]
                MpiHandle(job.mpi, job.control.Isend(_EMPTY, head, found.number), what, limit_s).wait()
                answer = MpiHandle(
                    job.mpi, job.control.Irecv(bytearray(0), head, found.number), what, limit_s, size_bytes=0, ranks=job.world.ranks
                )
                _wait_or_abandon(answer)
        except BaseException:
            if begun is not None:
                begun[0].complete(begun[1], ERROR)
            raise
        if begun is not None:
            begun[0].complete(begun[1])

    def _count_all(self, group: MpiGroup, limit_s: float, all_missing: bool) -> None:
        """Waits, on rank 0 of the group, for a word of each other rank, and answers all of them."""
        job, deadline, missing = self._working(), time.monotonic() + limit_s, []
        for rank in group.ranks[1:]:
            left_s = max(deadline - time.monotonic(), 0.001)
            request = job.control.Irecv(bytearray(0), rank, group.number)
            word = MpiHandle(job.mpi, request, f"monitored_barrier for rank {rank}", left_s, size_bytes=0, ranks=job.world.ranks)
            try:
                _wait_or_abandon(word)
            except RunTimeout:
                missing.append(rank)
                if not all_missing:
                    break
        if missing:
            raise RunTimeout(
                f'all ranks of group "{group.group_name}" must come to monitored_barrier within {limit_s:g} s, got none of '
                f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} ({self.here()}). See where they are."
            )
        for rank in group.ranks[1:]:
            MpiHandle(job.mpi, job.control.Isend(_EMPTY, rank, group.number), "monitored_barrier", limit_s).wait()

    def _agree(self, what: str, values: tuple[int, ...]) -> int:
        """Checks that all ranks of the world ask for the same, and returns how often they have agreed before.

        Raises:
            ArgumentError: they ask for different things.
            RunTimeout: not all ranks have come.
        """
        job = self._working()
        mine = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        everything = bytearray(8 * job.world.size())
        MpiHandle(
            job.mpi, job.control.Iallgather(mine, everything), f"{what} ({self.here()})", job.world.timeout_s, keep=(mine, everything)
        ).wait()
        others = [rank for rank in job.world.ranks if everything[8 * rank : 8 * rank + 8] != mine]
        number = next(job.numbers)
        if others:
            raise ArgumentError(
                f"the ranks given to {what} must be the same in all processes, got {list(values)} here ({self.here()}) and others on "
                f"rank {others[0]}. Call {what} for every group on every rank, in one order."
            )
        return number


for _name, _function in OBJECTS.items():
    setattr(MpiBackend, _name, _function)


def _wait_or_abandon(handle: MpiHandle) -> None:
    try:
        handle.wait()
    except RunTimeout:
        handle.abandon()
        raise
