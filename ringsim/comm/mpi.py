"""The backend ``mpi``: MPI through mpi4py, for ranks that ``mpirun`` (or ``srun``) has started.

Everything is begun without blocking and awaited with a limit, so that a rank that never answers
ends in an error that names the operation. An operation moves on while its process is inside some
call of this backend: MPI has no thread of its own.

While the ranks are joined, a rank that ends by an exception, or by ``sys.exit`` with a code other
than 0, ends all ranks: the others would wait for it. Python calls no hook for SystemExit, and tells
no handler of ``atexit`` with which code the process ends. But the interpreter reads the attribute
``code`` of the exception that has reached it, and no frame of Python is below that look. Whoever
catches it has one.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NoReturn

from torch.distributed import GroupMember

from ringsim.comm.mpi_transfers import (
    Job,
    MpiGroup,
    MpiHandle,
    MpiRecords,
    MpiTransfers,
    to_seconds,
)
from ringsim.comm.objects import OBJECTS
from ringsim.errors import ArgumentError, RingError, RunTimeout
from ringsim.traces.events import ERROR, NONE, OK, OP_CODES

__all__ = ["MpiBackend", "watch_exit"]

_CODE: Final[Any] = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """What ``sys.exit`` raises while the job lasts."""

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
            f"{type(error).__name__}: {error}. "
            "Install both from PyPI: pip install 'ringsim[mpi]'."
        ) from error
    return MPI


def enter_job(everybody: Any) -> Callable[[], None]:
    """Lets a failure of this rank end all ranks: the others would wait for it, and MPI at its end.

    Returns what undoes it. Where a function of torch itself has failed because torch knows of no
    ranks here, the error names what to call instead.

    Args:
        everybody: the communicator of all ranks.
    """
    before = sys.excepthook

    def end_job(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        everybody.Abort(code)

    def end_all(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ValueError) and "Default process group" in str(error):
            error.add_note(
                "MPI joins the ranks of this job, and torch.distributed knows nothing of them. "
                "Call the functions of ringsim.comm: "
                "from ringsim import comm as dist. What takes a ProcessGroup, such as "
                "DeviceMesh, is torch's alone."
            )
        before(kind, error, trace)
        end_job(1)

    sys.excepthook = end_all
    undo_exit = watch_exit(end_job)

    def undo() -> None:
        undo_exit()
        if sys.excepthook is end_all:
            sys.excepthook = before

    return undo


_DEFAULT_TIMEOUT_S: Final = 1800.0  # torch's
_LEAVE_S: Final = 5.0  # how long destroy_process_group waits for sends that nobody has received


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
        """Joins the ranks that mpirun has started.

        All of them call it, and it blocks until all have.

        Args:
            backend: "mpi" or None.
            init_method: not needed here.
            timeout: limit of every operation; None for torch's, 30 minutes.
            world_size: -1, or as mpirun has it.
            rank: -1, or as mpirun has it.
            rest: torch's others, not needed here.
            named: the same by name.

        Raises:
            ArgumentError: ``world_size`` or ``rank`` differ from mpirun's, or ``backend`` is
                another.
            RingError: the ranks are joined already, or mpi4py or its MPI is missing.
            RunTimeout: not all ranks have come.
        """
        if self._job is not None:
            raise RingError(
                f"the mpi backend must be initialized once, got a second call ({self.here()}). "
                "Call destroy_process_group first."
            )
        if backend not in (None, "mpi"):
            raise ArgumentError(
                f'backend must be "mpi" or None with the mpi backend, got {backend!r}. For '
                'torch\'s: set_backend("torch").'
            )
        mpi = import_mpi()
        everybody = mpi.COMM_WORLD
        for what, wanted, is_value in (
            ("world_size", world_size, everybody.Get_size()),
            ("rank", rank, everybody.Get_rank()),
        ):
            if wanted not in (-1, is_value):
                raise ArgumentError(
                    f"{what} must be {is_value} as MPI has it, or left out, got {wanted}. Start "
                    "the ranks with mpirun."
                )
        timeout_s = to_seconds(timeout) or _DEFAULT_TIMEOUT_S
        what = f"init_process_group (rank {everybody.Get_rank()} of {everybody.Get_size()})"
        MpiHandle(mpi, everybody.Ibarrier(), what, timeout_s).wait()
        world = MpiGroup(
            everybody.Dup(), tuple(range(everybody.Get_size())), "world", 0, timeout_s, "default_pg"
        )
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
        found = self.find_group(group)
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
        # a rank may wait here for the others: all go in one order
        for each in sorted(job.groups, key=lambda group: group.number):
            each.comm.Free()
        job.control.Free()

    def name_block(self) -> str:
        """Returns a name that is the same on all ranks and another at each call.

        For files that they share; does not block.
        """
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
        """Makes a group.

        All ranks call it in the same order with the same ranks, also those outside the group.

        Args:
            ranks: global ranks of the members, None for all.
            timeout: limit of an operation on the group; None for that of the default group.
            backend: "mpi" or None.
            pg_options: not needed here.
            use_local_synchronization: not to be used here: MPI needs all ranks.
            group_desc: what to call it.
            device_id: not needed here.
            sort_ranks: whether rank 0 of the group is the least of ``ranks``, or the first.

        Returns:
            The group; on ranks outside ``GroupMember.NON_GROUP_MEMBER``.

        Raises:
            ArgumentError: a rank does not exist or is there twice, or the ranks of this call differ
                between the processes.
            RunTimeout: not all ranks have come.
        """
        job = self._working()
        world = job.world
        if backend not in (None, "mpi"):
            raise ArgumentError(
                f'backend must be "mpi" or None with the mpi backend, got {backend!r} '
                f"({self.here()}). Leave it out."
            )
        if use_local_synchronization:
            raise ArgumentError(
                "use_local_synchronization must be False with the mpi backend, got True "
                f"({self.here()}). Call new_group on all ranks."
            )
        members = self._members(ranks, sort_ranks)
        number = self._agree("new_group", members)
        if not members:
            return GroupMember.NON_GROUP_MEMBER
        comm = world.comm.Create(world.comm.Get_group().Incl(list(members)))
        if comm == job.mpi.COMM_NULL:
            return GroupMember.NON_GROUP_MEMBER
        desc = group_desc or "undefined"
        # pair groups bear their edge, as on torch
        name = desc if desc.startswith("ring:") else f"mpi:{number}"
        group = MpiGroup(comm, members, name, number, to_seconds(timeout) or world.timeout_s, desc)
        job.groups.add(group)
        return group

    def monitored_barrier(
        self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        """Blocks until every rank of the group has come here.

        Where one does not, rank 0 of the group says which.

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
        begun = job.records.post(OP_CODES["monitored_barrier"], found, NONE, NONE, [])
        if begun is not None:
            begun[0].wait(begun[1])
        status = ERROR
        try:
            if found.rank() == 0:
                self._count_all(found, limit_s, wait_all_ranks)
            else:
                what = f"monitored_barrier (rank {found.rank()} of {found.size()})"
                self._tell(found.ranks[0], found, what, limit_s)
                self._hear(found.ranks[0], found, what, limit_s)
            status = OK
        finally:
            if begun is not None:
                begun[0].complete(begun[1], status)

    def _count_all(self, group: MpiGroup, limit_s: float, all_missing: bool) -> None:
        """Waits, on rank 0 of the group, for a word of each other rank, and answers all of them."""
        deadline, missing = time.monotonic() + limit_s, []
        for rank in group.ranks[1:]:
            try:
                self._hear(
                    rank,
                    group,
                    f"monitored_barrier for rank {rank}",
                    max(deadline - time.monotonic(), 0.001),
                )
            except RunTimeout:
                missing.append(rank)
                if not all_missing:
                    break
        if missing:
            raise RunTimeout(
                f'all ranks of group "{group.group_name}" must come to monitored_barrier within '
                f"{limit_s:g} s, got none of "
                f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} "
                f"({self.here()}). See where they are."
            )
        for rank in group.ranks[1:]:
            self._tell(rank, group, "monitored_barrier", limit_s)

    def _tell(self, rank: int, group: MpiGroup, what: str, limit_s: float) -> None:
        """Sends a word without content to a global rank."""
        job = self._working()
        MpiHandle(job.mpi, job.control.Isend(b"", rank, group.number), what, limit_s).wait()

    def _hear(self, rank: int, group: MpiGroup, what: str, limit_s: float) -> None:
        """Waits for such a word.

        Takes the recv back where none comes within the limit, and raises RunTimeout.
        """
        job = self._working()
        request = job.control.Irecv(bytearray(0), rank, group.number)
        word = MpiHandle(job.mpi, request, what, limit_s, size_bytes=0, ranks=job.world.ranks)
        try:
            word.wait()
        except RunTimeout:
            word.abandon()
            raise

    def _agree(self, what: str, values: tuple[int, ...]) -> int:
        """Checks that all ranks ask for the same.

        Returns how often they have agreed before.

        Raises:
            ArgumentError: they ask for different things.
            RunTimeout: not all ranks have come.
        """
        job = self._working()
        mine = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        everything = bytearray(8 * job.world.size())
        request = job.control.Iallgather(mine, everything)
        MpiHandle(
            job.mpi,
            request,
            f"{what} ({self.here()})",
            job.world.timeout_s,
            keep=(mine, everything),
        ).wait()
        others = [rank for rank in job.world.ranks if everything[8 * rank : 8 * rank + 8] != mine]
        number = next(job.numbers)
        if others:
            raise ArgumentError(
                f"the ranks given to {what} must be the same in all processes, got "
                f"{list(values)} here ({self.here()}) and others on "
                f"rank {others[0]}. Call {what} for every group on every rank, in one order."
            )
        return number


for _name, _function in OBJECTS.items():
    setattr(MpiBackend, _name, _function)
