"""What every operation on MPI does: find its group, be written down, begin, and leave a handle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import GroupMember

from ringsim.comm.membership import Membership
from ringsim.comm.mpi_buffers import size_of
from ringsim.comm.mpi_group import MpiGroup
from ringsim.comm.mpi_handle import MpiHandle
from ringsim.comm.mpi_tape import MpiTapes
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, NONE

_MANY_UNDER_WAY: Final = 64  # from here on, each new operation looks for handles that nobody waits for


class Job(NamedTuple):
    """The process's part in MPI, from ``init_process_group`` to ``destroy_process_group``.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        world: all ranks.
        control: a communicator of all ranks for ringsim's own messages.
        token: the same on all ranks, and no other job's.
        groups: the groups that exist, ``world`` among them.
        numbers: of the groups to come.
        blocks: of the recorded blocks to come.
        tapes: writes operations down.
        under_way: operations that may not be done yet, in the order of posting: what MPI reads or writes must not go away.
        undo: takes back what else was changed in the process.
    """

    mpi: Any
    world: MpiGroup
    control: Any
    token: str
    groups: set[MpiGroup]
    numbers: Iterator[int]
    blocks: Iterator[int]
    tapes: MpiTapes
    under_way: dict[MpiHandle, None]
    undo: Callable[[], None]


class Started(NamedTuple):
    """What MPI has begun.

    Attributes:
        request: mpi4py's.
        keep: what must live until it is done.
        finish: brings the result to its place.
        results: the tensors that hold it; None for those that the size is reckoned from.
    """

    request: Any
    keep: Any = None
    finish: Callable[[], None] | None = None
    results: Sequence[torch.Tensor] | None = None


class MpiOperations(Membership):
    """The common part of messages, collectives and object lists."""

    _job: Job | None = None

    def _working(self) -> Job:
        """Returns the job.

        Raises:
            RingError: there is none.
        """
        if self._job is None:
            raise RingError(
                "the mpi backend must be initialized before it is used, got a call before init_process_group or after "
                'destroy_process_group. Call ringsim.comm.init_process_group("mpi") on every rank.'
            )
        return self._job

    def _find(self, group: Any) -> MpiGroup | None:
        """Returns a group given as torch's functions take it; None where this rank is outside.

        Raises:
            RingError: the backend is not initialized, or the group was destroyed.
            ArgumentError: it is no group of this backend.
        """
        job = self._working()
        if group is None:
            return job.world
        if group is GroupMember.NON_GROUP_MEMBER:
            return None
        if not isinstance(group, MpiGroup):
            raise ArgumentError(
                f"group must be one of the mpi backend, got {group!r} ({self.here()}). Make it with ringsim.comm.new_group, and call "
                "ringsim.comm's functions, not torch.distributed's: DeviceMesh and ProcessGroup are torch's own."
            )
        if group not in job.groups:
            raise RingError(f"the group must exist, got {group} after it was destroyed ({self.here()}). Make a new one: new_group.")
        return group

    def _enter(self, op: str, group: Any) -> MpiGroup | None:
        """Returns the group of an operation; outside of it warns, as torch does, and returns None."""
        found = self._find(group)
        if found is None:
            rank = self._working().world.rank()
            warnings.warn(f"{op} does nothing on rank {rank}, which is not in the group.", stacklevel=3)
        return found

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        world = self._working().world
        return f"rank {world.rank()} of {world.size()}"

    def _begin(
        self,
        op: str,
        group: MpiGroup,
        start: Callable[[], Started],
        tensors: Sequence[torch.Tensor],
        *,
        copies: int = 1,
        peer: int = NONE,
        tag: int = NONE,
        what: str = "",
        receives: torch.Tensor | None = None,
    ) -> MpiHandle:
        """Begins an operation and writes it down.

        Args:
            op: as torch spells it.
            group: where.
            start: hands the operation to MPI.
            tensors: what its size is reckoned from.
            copies: how many times they count.
            peer: the other side, or the root, a global rank.
            tag: of a message.
            what: the operation in words, for errors; default the operation and the group.
            receives: the tensor that a message is received into.
        """
        job = self._working()
        begun = job.tapes.post(op, group, peer, tag, tensors, copies)
        try:
            started = start()
        except BaseException as error:
            if begun is not None:
                begun[0].complete(begun[1], ERROR)
            if isinstance(error, job.mpi.Exception):
                raise RingError(f"{op} must be carried by MPI, got its error {error} ({self.here()}).") from error
            raise
        handle = MpiHandle(
            job.mpi,
            started.request,
            f'{what or op} (rank {group.rank()} of {group.size()} of group "{group.group_name}")',
            group.timeout_s,
            keep=started.keep,
            finish=started.finish,
            size_bytes=None if receives is None else size_of(receives),
            ranks=group.ranks,
            results=tensors if started.results is None else started.results,
            under_way=job.under_way,
        )
        if begun is not None:
            handle.record(*begun)
        if len(job.under_way) >= _MANY_UNDER_WAY:
            for each in list(job.under_way):
                each.is_completed()  # which lets go of it
        return handle

    def _collect(
        self,
        op: str,
        group: MpiGroup,
        start: Callable[[], Started],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        *,
        copies: int = 1,
        root: int = NONE,
        timeout: Any = None,
    ) -> MpiHandle | None:
        """Begins a collective; waits for it unless ``async_op``. Where there is a root, it is a group rank."""
        peer = NONE if root == NONE else group.ranks[root]
        handle = self._begin(op, group, start, tensors, copies=copies, peer=peer)
        if async_op:
            return handle
        handle.wait(timeout)
        return None
