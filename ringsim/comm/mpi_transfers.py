"""Groups, handles, messages and collectives on MPI.

Each operation is one nonblocking operation of MPI, and what must be done with its result. Data that is only moved travels as bytes,
whatever its dtype. What is reduced is reduced by MPI; where MPI does not have the type, it is gathered, and reduced in torch in the order
of the ranks.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import GroupMember

from ringsim.comm.backend import Backend, Membership
from ringsim.comm.built import Handle, check_reduction, find_refusal, reduce_parts
from ringsim.comm.collectives import (
    Call,
    Members,
    check_batch,
    check_dense,
    describe,
    for_receiving,
    for_sending,
    is_plain,
    name_of_reduction,
    to_index,
)
from ringsim.errors import ArgumentError, MessageMismatch, RingError, RunTimeout
from ringsim.state import get_state
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES
from ringsim.traces.recorder import Recorder

__all__ = ["Job", "MpiGroup", "MpiHandle", "MpiRecords", "MpiTransfers", "to_seconds"]

_YIELDS: Final = 200  # looks at a request with nothing but a step aside between them, before sleeping
_FIRST_SLEEP_S: Final = 20e-6
_LAST_SLEEP_S: Final = 1e-3
_MANY_UNDER_WAY: Final = 64  # from here on, each new operation looks for handles that nobody waits for
_BATCH: Final = {"isend": OP_CODES["batch_isend"], "irecv": OP_CODES["batch_irecv"]}
# The names of MPI's types and operations, which must not be looked up before MPI is wanted.
_TYPES: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_OPS: Final = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}


@dataclass(frozen=True, eq=False)
class MpiGroup(Members):
    """The ranks that share a communicator.

    Attributes:
        comm: the mpi4py communicator.
        ranks: the members, global ranks, in the group's order.
        group_name: "world", or a name that is the same on all members.
        number: the same on all members, and no other group's; the world's is 0.
        timeout_s: limit of one operation on the group, in seconds.
        group_desc: what the user called it.
        places: the place of each member, by its global rank.
    """

    kind = "MPI"
    comm: Any = field(repr=False)
    ranks: tuple[int, ...]
    group_name: str
    number: int = field(repr=False)
    timeout_s: float = field(repr=False)
    group_desc: str = field(default="", repr=False)
    places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {rank: place for place, rank in enumerate(self.ranks)})

    def rank(self) -> int:
        """Returns this process's place in the group."""
        place: int = self.comm.Get_rank()
        return place

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that MPI can carry."""
        return check_dense(what, tensor, "with the mpi backend")


class MpiHandle(Handle):
    """An operation that MPI has begun. It moves on while some thread of this process is inside MPI: in a wait, or in another call.

    Args:
        mpi: the module ``mpi4py.MPI``.
        request: mpi4py's request.
        what: the operation and its peer, for errors.
        timeout_s: the limit of ``wait()``, in seconds, where it is given none.
        keep: what must live until the operation is done: tensors whose memory MPI reads or writes.
        finish: brings the result to its place, when the request is done.
        size_bytes: for a message that is received, the size that it must have.
        ranks: for a message that is received, the global rank of each rank of the group.
        results: the tensors that hold the result, once it is there.
        under_way: holds the handle until it is done, so that what MPI reads or writes does not go away with a handle that was dropped.
    """

    def __init__(
        self,
        mpi: Any,
        request: Any,
        what: str,
        timeout_s: float,
        *,
        keep: Any = None,
        finish: Callable[[], Any] | None = None,
        size_bytes: int | None = None,
        ranks: tuple[int, ...] = (),
        results: Sequence[torch.Tensor] = (),
        under_way: dict[MpiHandle, None] | None = None,
    ) -> None:
        super().__init__((), finish, results)
        self._mpi = mpi
        self._request = request
        self._what = what
        self._timeout_s = timeout_s
        self._keep = keep
        self._size_bytes = size_bytes
        self._ranks = ranks
        self._under_way = under_way
        if under_way is not None:
            under_way[self] = None
        self._source = -1
        self._error: RingError | None = None
        self._over = False
        self._testing = threading.Lock()

    @property
    def receives(self) -> bool:
        """Whether this is a message that is received."""
        return self._size_bytes is not None

    def record(self, recorder: Recorder, slot: int) -> None:
        """Has the wait written down at ``slot`` of ``recorder``."""
        self._recorder, self._slots = recorder, [slot]

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Has the wait complete the record at ``slot`` too; False where nobody is going to wait, or another recorder is told."""
        if self._recorder is not recorder:
            return False
        self._slots.append(slot)
        return True

    def is_completed(self) -> bool:
        """Returns whether the operation is done, well or not; does not block."""
        try:
            return self._test()
        except RingError:
            return True

    def source_rank(self) -> int:
        """Returns the group rank that a received message came from, -1 before it has come."""
        return self._source

    _source_rank = source_rank  # as torch spells it

    def abandon(self) -> None:
        """Gives up an operation that nobody will wait for: a recv is taken back, the rest is left to MPI."""
        with self._testing:
            if not self._over and self.receives:
                self._request.Cancel()
                self._request.Wait()
                what = f"{self._what} must be done before the process group is destroyed"
                self._error = RingError(f"{what}, got neither a message nor a wait. Wait for it first.")
                self._end()

    def _wait(self, timeout: timedelta | float | None) -> None:
        """Waits until the operation is done, on this rank.

        Raises:
            RunTimeout: the limit, by default the group's, is over. The operation goes on, and can be waited for again.
            MessageMismatch: the message has another size than the tensor.
            RingError: MPI reports something else.
        """
        limit_s, begin, looks, sleep_s = to_seconds(timeout) or self._timeout_s, time.monotonic(), 0, _FIRST_SLEEP_S
        while not self._test():
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() - begin >= limit_s:
                raise RunTimeout(
                    f"{self._what} must be answered within {limit_s:g} s, got no answer. See what the other ranks do, or allow more time."
                )
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)
        if self._recorder is not None and self._recorder is get_state().recorder and self._source >= 0:
            self._recorder.amend(self._slots[0], peer=self._ranks[self._source])

    def _test(self) -> bool:
        """Asks MPI, which also moves every other operation of this process on; takes over what is done."""
        if not self._over:
            with self._testing:
                if not self._take_over():
                    return False
        if self._error is not None:
            raise self._error
        return True

    def _take_over(self) -> bool:
        """Asks MPI, and brings the result to its place if it is there; returns whether the operation is over, well or not."""
        if self._over:  # another thread was first
            return True
        status = None if self._size_bytes is None else self._mpi.Status()
        try:
            if not self._request.Test(status):
                return False
            if status is not None:
                self._receive(status.Get_source(), status.Get_count(self._mpi.BYTE))
        except self._mpi.Exception as error:
            self._error = self._explain(error)
            self._error.__cause__ = error
        try:
            if self._finish is not None and self._error is None:
                self._finish()
        finally:
            self._end()
        return True

    def _end(self) -> None:
        """Lets go of what the operation needed."""
        self._request = self._finish = self._keep = None
        self._over = True
        if self._under_way is not None:
            self._under_way.pop(self, None)

    def _receive(self, source: int, size_bytes: int) -> None:
        self._source = source
        if size_bytes != self._size_bytes:
            self._error = MessageMismatch(
                f"the tensor of {self._what} must be as large as the message, got {self._size_bytes} bytes for a message of {size_bytes} "
                f"bytes from rank {self._ranks[source]}. Compare dtype and shape on both sides."
            )

    def _explain(self, error: Any) -> RingError:
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return MessageMismatch(
                f"the tensor of {self._what} must be as large as the message, got {self._size_bytes} bytes for a longer one. "
                "Compare dtype and shape on both sides."
            )
        return RingError(f"{self._what} must be carried by MPI, got its error {error}. See what the other ranks do.")


def to_seconds(timeout: timedelta | float | None) -> float:
    """Returns a limit in seconds, 0 where there is none.

    Raises:
        ArgumentError: it is no time, or negative.
    """
    if timeout is None:
        return 0.0
    seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ArgumentError(f"timeout must be a number of seconds or a timedelta, 0 or more, got {timeout!r}. Or leave it out.")
    return float(seconds)


class MpiRecords:
    """Tells the recorder that is at work of operations on MPI.

    Args:
        library: the MPI library and its version, for the trace.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._recorder: Recorder | None = None
        self._posts: dict[int, Callable[..., int | None]] = {}

    def post(
        self, op: int, group: MpiGroup, peer: int, tag: int, tensors: Sequence[torch.Tensor], copies: int = 1
    ) -> tuple[Recorder, int] | None:
        """Writes down that an operation begins.

        Args:
            op: its code.
            group: where.
            peer: global rank of the other side or of the root, NONE or ANY_SOURCE.
            tag: of a message, else NONE.
            tensors: what its size is computed from.
            copies: how many times they count; see ``ringsim.comm.collectives.describe``.

        Returns:
            Who recorded it, and where; None where nobody records.
        """
        recorder = get_state().recorder
        if recorder is None:
            return None
        if recorder is not self._recorder:
            self._recorder, self._posts = recorder, {}
            recorder.set_meta("backend", "mpi")
            recorder.set_meta("mpi_library", self._library)
        post = self._posts.get(op) or self._posts.setdefault(op, recorder.make_post(op))
        payload = recorder.payload(*describe(list(tensors), copies))
        slot = post(recorder.group(group.group_name, group.ranks), peer, tag, payload)
        return None if slot is None else (recorder, slot)


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
        records: writes operations down.
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
    records: MpiRecords
    under_way: dict[MpiHandle, None]
    undo: Callable[[], None]


class _Started(NamedTuple):
    """What MPI has begun: its request, what must live until it is done, and what brings the result to its place."""

    request: Any
    keep: Any = None
    finish: Callable[[], Any] | None = None


class MpiTransfers(Membership, Backend):
    """Messages and collectives as ``torch.distributed`` has them; see there for the arguments.

    Tensors of every dtype travel as bytes. One that is not contiguous is copied. Nobody sends to itself, as on Gloo. Every rank of a group
    calls a collective, in the same order.
    """

    direct = True
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

    def enter(self, op: str, group: Any) -> MpiGroup | None:
        """Returns the group of an operation; outside of it warns, as torch does, and returns None."""
        found = self._find(group)
        if found is None:
            rank = self._working().world.rank()
            warnings.warn(f"{op} does nothing on rank {rank}, which is not in the group.", stacklevel=3)
        return found

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return self._working().world.here()

    # -- messages

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> MpiHandle | None:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        return self.begin_send(tensor, dst, group, tag, group_dst)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> MpiHandle | None:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self.begin_recv(tensor, src, group, tag, group_src)

    def send(self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Sends; blocks until the tensor may change, which for a large one is when its receiver has posted."""
        handle = self.begin_send(tensor, dst, group, tag, group_dst, OP_CODES["send"])
        if handle is not None:
            handle.wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receives; blocks. Returns the sender's global rank, -1 outside the group."""
        handle = self.begin_recv(tensor, src, group, tag, group_src, OP_CODES["recv"])
        if handle is None:
            return -1
        handle.wait()
        return self.get_process_group_ranks(group)[handle.source_rank()]

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[MpiHandle]:
        """Begins several messages; does not block. The order of sends against recvs does not matter.

        Args:
            p2p_op_list: ``P2POp`` of ``isend`` and ``irecv``, with one group.

        Returns:
            A handle for each.

        Raises:
            ArgumentError: the list is empty, or holds something else.
        """
        begin: dict[str, Callable[..., MpiHandle | None]] = {"isend": self.begin_send, "irecv": self.begin_recv}
        calls = check_batch(p2p_op_list, self.here())
        handles = [begin[name](each.tensor, each.peer, each.group, each.tag, None, _BATCH[name]) for name, each in calls]
        return [handle for handle in handles if handle is not None]

    def begin_send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
        op: int = OP_CODES["isend"],
    ) -> MpiHandle | None:
        """Begins to send; ``op`` is what it is recorded as."""
        found = self.enter("isend", group)
        if found is None:
            return None
        job, values = self._working(), found.check("tensor", tensor)
        place, tag, plain = self._peer("dst", found, dst, group_dst), self._check_tag(tag), for_sending(values)

        def start() -> _Started:
            return _Started(found.comm.Isend(_as_mpi(job.mpi, _as_bytes(plain)), place, tag), plain)

        peer = found.ranks[place]
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=f"isend to rank {peer}, tag {tag}")

    def begin_recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
        op: int = OP_CODES["irecv"],
    ) -> MpiHandle | None:
        """Begins to receive; ``op`` is what it is recorded as."""
        found = self.enter("irecv", group)
        if found is None:
            return None
        job, values, anybody = self._working(), found.check("tensor", tensor), src is None and group_src is None
        place = job.mpi.ANY_SOURCE if anybody else self._peer("src", found, src, group_src)
        tag, stage = self._check_tag(tag), for_receiving(values)

        def start() -> _Started:
            request = found.comm.Irecv(_as_mpi(job.mpi, _as_bytes(stage)), place, tag)
            return _Started(request, stage, None if stage is values else lambda: values.copy_(stage))

        peer = ANY_SOURCE if anybody else found.ranks[place]
        what = f"irecv from {'anybody' if anybody else f'rank {peer}'}, tag {tag}"
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=what, size_bytes=_size_of(values))

    def _peer(self, what: str, group: MpiGroup, global_rank: int | None, group_rank: int | None) -> int:
        place = group.place_of(what, global_rank, group_rank)
        if place == group.rank():
            raise ArgumentError(f"{what} must be another rank, got this rank itself ({self.here()}). Copy the tensor instead.")
        return place

    def _check_tag(self, tag: int) -> int:
        job, number = self._working(), to_index("tag", tag)
        highest = job.world.comm.Get_attr(job.mpi.TAG_UB)
        if not 0 <= number <= highest:
            raise ArgumentError(f"tag must be from 0 to {highest} on this MPI, got {number} ({self.here()}). Choose another.")
        return number

    # -- collectives

    def start(self, call: Call) -> MpiHandle:
        """Begins a collective."""
        group: Any = call.group
        mpi, begin = self._working().mpi, _STARTERS[call.collective.family]
        if call.op is not None:
            check_reduction(call.op)
        if call.op is not None and (refusal := find_refusal(call.inputs[0].dtype, name_of_reduction(call.op))):
            dtype = call.inputs[0].dtype
            raise ArgumentError(f"op must be one that {dtype} has, got {call.op} ({refusal}). Convert the tensor, or choose another.")

        def start() -> _Started:
            return begin(mpi, group.comm, call)

        peer = NONE if call.root == NONE else group.ranks[call.root]
        return self._begin(
            OP_CODES[call.recorded_name], group, start, call.carried, copies=call.copies, peer=peer, results=call.results, what=call.name
        )

    def _begin(
        self,
        op: int,
        group: MpiGroup,
        start: Callable[[], _Started],
        tensors: Sequence[torch.Tensor],
        *,
        what: str,
        copies: int = 1,
        peer: int = NONE,
        tag: int = NONE,
        size_bytes: int | None = None,
        results: Sequence[torch.Tensor] = (),
    ) -> MpiHandle:
        """Begins an operation and writes it down.

        Args:
            op: its code.
            group: where.
            start: hands the operation to MPI.
            tensors: what its size is computed from.
            what: the operation in words, for errors.
            copies: how many times the tensors count.
            peer: the other side, or the root, a global rank.
            tag: of a message.
            size_bytes: of the tensor that a message is received into.
            results: the tensors that hold the result.
        """
        job = self._working()
        begun = job.records.post(op, group, peer, tag, tensors, copies)
        try:
            started = start()
        except BaseException as error:
            if begun is not None:
                begun[0].complete(begun[1], ERROR)
            if isinstance(error, job.mpi.Exception):
                raise RingError(f"{what} must be carried by MPI, got its error {error} ({self.here()}).") from error
            raise
        handle = MpiHandle(
            job.mpi,
            started.request,
            f"{what} ({group.here()})",
            group.timeout_s,
            keep=started.keep,
            finish=started.finish,
            size_bytes=size_bytes,
            ranks=group.ranks,
            results=results,
            under_way=job.under_way,
        )
        if begun is not None:
            handle.record(*begun)
        if len(job.under_way) >= _MANY_UNDER_WAY:
            for each in list(job.under_way):
                each.is_completed()  # which lets go of it
        return handle


# -- how MPI begins each family of collectives: a request, and what is done when it has ended


def _broadcast(mpi: Any, comm: Any, call: Call) -> _Started:
    is_root = call.group.rank() == call.root
    data = for_sending(call.inputs[0]) if is_root else for_receiving(call.outputs[0])
    finish = None if is_root or data is call.outputs[0] else lambda: call.outputs[0].copy_(data)
    return _Started(comm.Ibcast(_as_mpi(mpi, _as_bytes(data)), call.root), data, finish)


def _all_gather(mpi: Any, comm: Any, call: Call) -> _Started:
    mine, (everything, finish) = _flatten(call.inputs), _to_fill(call)
    return _Started(comm.Iallgather(_as_mpi(mpi, mine), _as_mpi(mpi, everything, call.group.size())), (mine, everything), finish)


def _gather(mpi: Any, comm: Any, call: Call) -> _Started:
    mine, (everything, finish) = _flatten(call.inputs), _to_fill(call)
    receive = _as_mpi(mpi, everything, call.group.size()) if call.outputs else None
    return _Started(comm.Igather(_as_mpi(mpi, mine), receive, call.root), (mine, everything), finish)


def _scatter(mpi: Any, comm: Any, call: Call) -> _Started:
    everything, (mine, finish) = _flatten(call.inputs), _to_fill(call)
    send = _as_mpi(mpi, everything, call.group.size()) if call.inputs else None
    return _Started(comm.Iscatter(send, _as_mpi(mpi, mine), call.root), (everything, mine), finish)


def _all_to_all(mpi: Any, comm: Any, call: Call) -> _Started:
    sent, (received, finish) = _flatten(call.inputs), _to_fill(call)
    request = comm.Ialltoallv(_in_pieces(mpi, sent, call.inputs), _in_pieces(mpi, received, call.outputs))
    return _Started(request, (sent, received), finish)


def _barrier(mpi: Any, comm: Any, call: Call) -> _Started:
    del mpi, call
    return _Started(comm.Ibarrier())


def _reduce(mpi: Any, comm: Any, call: Call) -> _Started:
    """For all_reduce as well: the result is wanted on all ranks, or on the root."""
    count, everywhere = call.group.size(), call.root == NONE
    wanted = everywhere or call.group.rank() == call.root
    mine = torch.cat([for_sending(_real(tensor)).reshape(-1) for tensor in call.inputs])
    total = torch.empty_like(mine) if wanted else None
    numbers = _as_numbers(mpi, mine)
    if numbers is not None:
        receive, op = None if total is None else _as_numbers(mpi, total), getattr(mpi, _OPS[name_of_reduction(call.op)])
        request = comm.Iallreduce(numbers, receive, op) if everywhere else comm.Ireduce(numbers, receive, op, call.root)
        everything = None
    else:
        everything = torch.empty((count if wanted else 0, *mine.shape), dtype=mine.dtype)
        receive = _as_mpi(mpi, _as_bytes(everything), count) if wanted else None
        send = _as_mpi(mpi, _as_bytes(mine))
        request = comm.Iallgather(send, receive) if everywhere else comm.Igather(send, receive, call.root)

    def finish() -> None:
        if total is not None:
            result = _complete_reduction(call, total, everything)
            for output, piece in zip(call.outputs, result.split([_real(tensor).numel() for tensor in call.outputs]), strict=True):
                _real(output).copy_(piece.view_as(_real(output)))

    return _Started(request, (mine, total, everything), finish)


def _reduce_scatter(mpi: Any, comm: Any, call: Call) -> _Started:
    counts, size = [_real(each).numel() for each in call.inputs], call.group.size()
    flat = torch.cat([for_sending(_real(each)).reshape(-1) for each in call.inputs])
    part = torch.empty(counts[call.group.rank()], dtype=flat.dtype)
    numbers = _as_numbers(mpi, flat)
    if numbers is not None:
        everything = None
        request = comm.Ireduce_scatter(numbers, _as_numbers(mpi, part), counts, getattr(mpi, _OPS[name_of_reduction(call.op)]))
    else:
        everything = torch.empty((size, len(part)), dtype=flat.dtype)
        send = _in_pieces(mpi, _as_bytes(flat), [_real(each) for each in call.inputs])
        request = comm.Ialltoallv(send, _as_mpi(mpi, _as_bytes(everything), size))

    def finish() -> None:
        output = _real(call.outputs[0])
        output.copy_(_complete_reduction(call, part, everything).view_as(output))

    return _Started(request, (flat, part, everything, counts), finish)


_STARTERS: Final[dict[str, Callable[[Any, Any, Call], _Started]]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def _complete_reduction(call: Call, total: torch.Tensor, everything: torch.Tensor | None) -> torch.Tensor:
    """Returns what was asked for, from a sum that MPI has made in ``total``, or from the parts of all ranks."""
    if everything is not None:
        return reduce_parts(list(everything), call.op)
    return total.div_(call.group.size()) if name_of_reduction(call.op) == "AVG" else total


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# -- tensors as MPI takes them


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor, shape (bytes), sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_mpi(mpi: Any, data: torch.Tensor, parts: int = 1) -> list[Any]:
    """Returns bytes as MPI takes them; with ``parts`` as so many equal pieces, one for each rank."""
    return [mpi.buffer.fromaddress(data.data_ptr(), len(data)), len(data) // parts, mpi.BYTE]


def _in_pieces(mpi: Any, data: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[Any]:
    """Returns bytes as MPI takes them in pieces of different sizes, one for each rank."""
    sizes = [_size_of(piece) for piece in pieces]
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    return [mpi.buffer.fromaddress(data.data_ptr(), len(data)), (sizes, offsets), mpi.BYTE]


def _as_numbers(mpi: Any, tensor: torch.Tensor) -> list[Any] | None:
    """Returns a plain tensor as MPI takes it to reduce it, None where it cannot."""
    if tensor.dtype not in _TYPES:
        return None
    return [mpi.buffer.fromaddress(tensor.data_ptr(), _size_of(tensor)), tensor.numel(), getattr(mpi, _TYPES[tensor.dtype])]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the bytes of tensors that lie in memory one after the other: parts of one tensor need not be copied. None for others."""
    start = end = tensors[0].storage_offset()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.dtype != tensors[0].dtype or not _share_memory(tensor, tensors[0]):
            return None
        if tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    return _as_bytes(tensors[0].as_strided((end - start,), (1,)))


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of several tensors one after the other, shape (bytes)."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    joined = _joined(tensors)
    return torch.cat([_as_bytes(for_sending(tensor)) for tensor in tensors]) if joined is None else joined


def _to_fill(call: Call) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns the bytes to be filled for the outputs, shape (bytes), and what brings them there; None where they are there already."""
    outputs = call.outputs
    aliased = any(_share_memory(one, other) for one in outputs for other in call.inputs)  # which MPI forbids
    joined = _joined(outputs) if outputs and not aliased else None
    if joined is not None:
        return joined, None
    sizes = [_size_of(tensor) for tensor in outputs]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)

    def bring() -> None:
        for tensor, piece in zip(outputs, flat.split(sizes), strict=True):
            plain = torch.empty(tensor.shape, dtype=tensor.dtype)
            _as_bytes(plain).copy_(piece)
            tensor.copy_(plain)

    return flat, bring
