"""The backend ``mpi``: MPI through mpi4py, for ranks that ``mpirun`` (or ``srun``) has started.

Everything is begun without blocking and awaited with a limit, so that a rank that never answers ends in an error that names the
operation. An operation moves on while its process is inside some call of this backend: MPI has no thread of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import GroupMember

from ringsim.comm.backend import Backend
from ringsim.comm.mpi_group import MpiGroup
from ringsim.comm.mpi_handle import MpiHandle, to_seconds
from ringsim.comm.mpi_objects import MpiObjects
from ringsim.comm.mpi_operations import Job
from ringsim.comm.mpi_process import enter_job, import_mpi
from ringsim.comm.mpi_tape import MpiTapes
from ringsim.errors import ArgumentError, RingError, RunTimeout
from ringsim.traces.events import ERROR

__all__ = ["MpiBackend"]

_DEFAULT_TIMEOUT_S: Final = 1800.0  # torch's
_LEAVE_S: Final = 5.0  # how long destroy_process_group waits for sends that nobody has received
_EMPTY: Final = b""


class MpiBackend(MpiObjects, Backend):
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
            tapes=MpiTapes(mpi.Get_library_version().splitlines()[0].strip("\0 ")),
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
        found = self._enter("monitored_barrier", group)
        if found is None:
            return
        job, limit_s = self._working(), to_seconds(timeout) or found.timeout_s
        begun = job.tapes.post("monitored_barrier", found, -1, -1, [])
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


def _wait_or_abandon(handle: MpiHandle) -> None:
    try:
        handle.wait()
    except RunTimeout:
        handle.abandon()
        raise
