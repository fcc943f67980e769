"""A group of ranks on MPI: a communicator, and which global rank stands where in it.

The handle of an operation on MPI: waits with a limit, and without taking the processor from the ranks that work.

What every operation on MPI does: find its group, be written down, begin, and leave a handle.

Point-to-point messages on MPI.

Reductions on MPI: by MPI where it has the type, else in torch, in the order of the ranks.

The collectives that reduce, on MPI.

Collectives on MPI.

Each is one nonblocking operation of MPI, and what must be done with its result. Data that is only moved travels as bytes, whatever its
dtype; what is reduced is reduced by MPI, or, where MPI has not the type, gathered and reduced in torch in the order of the ranks.

Lists of Python objects on MPI, pickled: first their sizes travel, then their bytes, as in ``torch.distributed``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import GroupMember, ReduceOp

from ringsim.comm.backend import Membership, to_index
from ringsim.comm.collectives import (
    check_alike,
    check_count,
    check_tensor,
    check_tensors,
    flatten,
    for_receiving,
    for_sending,
    size_of,
    unflatten,
)
from ringsim.comm.mpi_tape import MpiTapes
from ringsim.errors import ArgumentError, MessageMismatch, RingError, RunTimeout
from ringsim.state import get_state
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE
from ringsim.traces.recorder import Recorder


@dataclass(frozen=True, eq=False)
class MpiGroup:
    """The ranks that share a communicator; answers what a ``ProcessGroup`` is asked, and is passed as ``group=``.

    Attributes:
        comm: the mpi4py communicator.
        ranks: the members, global ranks, in the group's order.
        group_name: "world", or a name that is the same on all members.
        number: the same on all members, and no other group's; the world's is 0.
        timeout_s: limit of one operation on the group, in seconds.
        group_desc: what the user called it.
        places: the place of each member, by its global rank.
    """

    comm: Any = field(repr=False)
    ranks: tuple[int, ...]
    group_name: str
    number: int = field(repr=False)
    timeout_s: float = field(repr=False)
    group_desc: str = field(default="", repr=False)
    places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {rank: place for place, rank in enumerate(self.ranks)})

    def __getattr__(self, name: str) -> Any:
        """Says what to do instead to torch's own functions, which look for the methods of ``ProcessGroup``."""
        raise AttributeError(
            f'the group of a call of torch.distributed must be one of torch\'s own, got group "{self.group_name}" of MPI, which has no '
            f"{name}. Use the functions of ringsim.comm: from ringsim import comm as dist."
        )

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns this process's place in the group."""
        place: int = self.comm.Get_rank()
        return place

    def place_of(self, what: str, global_rank: int | None, group_rank: int | None) -> int:
        """Returns the group rank that is meant by one of the two.

        Args:
            what: "dst" or "src", for the error.
            global_rank: a global rank, or None.
            group_rank: a place in the group, or None.

        Raises:
            ArgumentError: both or none are given, or the group has no such rank.
        """
        if (global_rank is None) == (group_rank is None):
            given = "none" if global_rank is None else f"{global_rank} and {group_rank}"
            raise ArgumentError(f"one of {what} and group_{what} must be given, got {given} ({self._here()}). Leave one of them out.")
        if global_rank is None:
            place = to_index(f"group_{what}", group_rank)
            if not 0 <= place < len(self.ranks):
                raise ArgumentError(
                    f"group_{what} must be a rank of the group, from 0 to {len(self.ranks) - 1}, got {place} ({self._here()}). "
                    f"Its global ranks are {_shorten(self.ranks)}."
                )
            return place
        try:
            return self.places[to_index(what, global_rank)]
        except KeyError:
            raise ArgumentError(
                f"{what} must be a global rank of the group, one of {_shorten(self.ranks)}, got {global_rank} ({self._here()}). "
                f"To count within the group, use group_{what}."
            ) from None

    def _here(self) -> str:
        return f'rank {self.rank()} of {len(self.ranks)} of group "{self.group_name}"'


def _shorten(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:6]))}, ..., {ranks[-1]}]"


_YIELDS: Final = 200  # looks at a request with nothing but a step aside between them, before sleeping
_FIRST_SLEEP_S: Final = 20e-6
_LAST_SLEEP_S: Final = 1e-3


class MpiHandle:
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

    __slots__ = (
        "_error",
        "_finish",
        "_keep",
        "_lock",
        "_mpi",
        "_over",
        "_ranks",
        "_recorder",
        "_request",
        "_results",
        "_size_bytes",
        "_slots",
        "_source",
        "_timeout_s",
        "_under_way",
        "_what",
    )

    def __init__(
        self,
        mpi: Any,
        request: Any,
        what: str,
        timeout_s: float,
        *,
        keep: Any = None,
        finish: Callable[[], None] | None = None,
        size_bytes: int | None = None,
        ranks: tuple[int, ...] = (),
        results: Sequence[torch.Tensor] = (),
        under_way: dict[MpiHandle, None] | None = None,
    ) -> None:
        self._mpi = mpi
        self._request = request
        self._what = what
        self._timeout_s = timeout_s
        self._keep = keep
        self._finish = finish
        self._size_bytes = size_bytes
        self._ranks = ranks
        self._results = list(results)
        self._under_way = under_way
        if under_way is not None:
            under_way[self] = None
        self._source = -1
        self._error: RingError | None = None
        self._over = False
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._slots: list[int] = []

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

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Waits until the operation is done, on this rank; a second wait returns at once.

        Args:
            timeout: the limit, in seconds or as a timedelta; None, or 0, for the group's.

        Returns:
            True.

        Raises:
            RunTimeout: the limit is over. The operation goes on, and can be waited for again.
            MessageMismatch: the message has another size than the tensor.
            RingError: MPI reports something else.
        """
        limit_s = to_seconds(timeout) or self._timeout_s
        recorder, slots = self._recorder, self._slots
        if recorder is None or recorder is not get_state().recorder:
            return self._wait(limit_s)
        for slot in slots:
            recorder.wait(slot)
        try:
            self._wait(limit_s)
        except BaseException:
            for slot in slots:
                recorder.complete(slot, ERROR)
            raise
        if self._source >= 0:
            recorder.amend(slots[0], peer=self._ranks[self._source])
        for slot in slots:
            recorder.complete(slot)
        self._recorder = None
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

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """Returns a ``torch.futures.Future`` of ``result()``; a thread waits for it."""
        future: Any = torch.futures.Future()  # its set_exception is typed to take a result

        def complete() -> None:
            try:
                future.set_result(self.result())
            except BaseException as error:  # it belongs to who asks the future
                future.set_exception(error)

        threading.Thread(target=complete, name="ringsim-future", daemon=True).start()
        return future

    def abandon(self) -> None:
        """Gives up an operation that nobody will wait for: a recv is taken back, the rest is left to MPI."""
        with self._lock:
            if not self._over and self.receives:
                self._request.Cancel()
                self._request.Wait()
                what = f"{self._what} must be done before the process group is destroyed"
                self._error = RingError(f"{what}, got neither a message nor a wait. Wait for it first.")
                self._end()

    def _wait(self, limit_s: float) -> bool:
        if self._test():
            return True
        begin = time.monotonic()
        for _ in range(_YIELDS):
            os.sched_yield()
            if self._test():
                return True
        sleep_s = _FIRST_SLEEP_S
        while time.monotonic() - begin < limit_s:
            time.sleep(sleep_s)
            if self._test():
                return True
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)
        raise RunTimeout(
            f"{self._what} must be answered within {limit_s:g} s, got no answer. See what the other ranks do, or allow more time."
        )

    def _test(self) -> bool:
        """Asks MPI, which also moves every other operation of this process on; takes over what is done."""
        if not self._over:
            with self._lock:
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


class MpiMessages(MpiOperations):
    """``send``, ``recv`` and their kin, as ``torch.distributed`` has them; see there for the arguments.

    Tensors of every dtype travel as bytes. One that is not contiguous is copied. Nobody sends to itself, as on Gloo.
    """

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> MpiHandle | None:
        """Begins to send; does not block. The tensor must not change until the handle has been waited for."""
        return self._send("isend", tensor, dst, group, tag, group_dst)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> MpiHandle | None:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self._receive("irecv", tensor, src, group, tag, group_src)

    def send(self, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
        """Sends; blocks until the tensor may change, which for a large one is when its receiver has posted."""
        handle = self._send("send", tensor, dst, group, tag, group_dst)
        if handle is not None:
            handle.wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
        """Receives; blocks. Returns the sender's global rank, -1 outside the group."""
        handle = self._receive("recv", tensor, src, group, tag, group_src)
        if handle is None:
            return -1
        handle.wait()
        found = self._find(group)
        return -1 if found is None else found.ranks[handle.source_rank()]

    def batch_isend_irecv(self, p2p_op_list: Sequence[Any]) -> list[MpiHandle]:
        """Begins several messages; does not block. The order of sends against recvs does not matter.

        Args:
            p2p_op_list: ``P2POp`` of ``isend`` and ``irecv``, with one group.

        Returns:
            A handle for each.

        Raises:
            ArgumentError: the list is empty, or holds something else.
        """
        if not isinstance(p2p_op_list, list) or not p2p_op_list:
            raise ArgumentError(f"p2p_op_list must be a list of at least one P2POp, got {p2p_op_list!r} ({self.here()}).")
        calls = []
        for each in p2p_op_list:
            name = getattr(getattr(each, "op", None), "__name__", "")
            if name not in ("isend", "irecv"):
                raise ArgumentError(f"p2p_op_list must hold P2POps of isend and irecv, got {each!r} ({self.here()}). Use dist.P2POp.")
            if each.group is not p2p_op_list[0].group:
                raise ArgumentError(f"all P2POps of a batch must have one group, got two ({self.here()}). Make a batch for each group.")
            calls.append((name == "isend", each))
        handles = [
            self._send("batch_isend", each.tensor, each.peer, each.group, each.tag, None)
            if sends
            else self._receive("batch_irecv", each.tensor, each.peer, each.group, each.tag, None)
            for sends, each in calls
        ]
        return [handle for handle in handles if handle is not None]

    def _send(self, op: str, tensor: Any, dst: int | None, group: Any, tag: int, group_dst: int | None) -> MpiHandle | None:
        found = self._enter(op, group)
        if found is None:
            return None
        job = self._working()
        values = check_tensor("tensor", tensor)
        place = self._peer(op, "dst", found, dst, group_dst)
        tag = self._check_tag(job, op, tag)
        plain = for_sending(values)

        def start() -> Started:
            request = found.comm.Isend([_buffer(job, plain), size_of(plain), job.mpi.BYTE], place, tag)
            return Started(request, plain)

        peer = found.ranks[place]
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=f"{op} to rank {peer}, tag {tag}")

    def _receive(self, op: str, tensor: Any, src: int | None, group: Any, tag: int, group_src: int | None) -> MpiHandle | None:
        found = self._enter(op, group)
        if found is None:
            return None
        job = self._working()
        values = check_tensor("tensor", tensor)
        anybody = src is None and group_src is None
        place = job.mpi.ANY_SOURCE if anybody else self._peer(op, "src", found, src, group_src)
        tag = self._check_tag(job, op, tag)
        stage, bring = for_receiving(values)

        def start() -> Started:
            request = found.comm.Irecv([_buffer(job, stage), size_of(stage), job.mpi.BYTE], place, tag)
            return Started(request, stage, bring)

        peer = ANY_SOURCE if anybody else found.ranks[place]
        whom = "anybody" if anybody else f"rank {peer}"
        return self._begin(op, found, start, [values], peer=peer, tag=tag, what=f"{op} from {whom}, tag {tag}", receives=values)

    def _peer(self, op: str, what: str, group: MpiGroup, global_rank: int | None, group_rank: int | None) -> int:
        place = group.place_of(what, global_rank, group_rank)
        if place == group.rank():
            raise ArgumentError(f"{what} must be another rank, got this rank itself ({op}, {self.here()}). Copy the tensor instead.")
        return place

    def _check_tag(self, job: Job, op: str, tag: int) -> int:
        number = to_index("tag", tag)
        highest = job.world.comm.Get_attr(job.mpi.TAG_UB)
        if not 0 <= number <= highest:
            raise ArgumentError(f"tag must be from 0 to {highest} on this MPI, got {number} ({op}, {self.here()}). Choose another.")
        return number


def _buffer(job: Job, tensor: torch.Tensor) -> Any:
    return job.mpi.buffer.fromaddress(tensor.data_ptr(), size_of(tensor))


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
_OPS: Final = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_IN_TORCH: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE: Final = ("BAND", "BOR", "BXOR")


class Reduction(NamedTuple):
    """How to reduce tensors of one dtype.

    Attributes:
        name: what MPI calls the operation.
        type_name: what MPI calls the type, None where it has none and torch does the sums.
        averages: whether the sum is divided by the number of ranks.
    """

    name: str
    type_name: str | None
    averages: bool

    def finish(self, total: torch.Tensor, count: int) -> None:
        """Turns a sum of ``count`` tensors into what was asked for, in place."""
        if self.averages:
            total.div_(count)

    def reduce_in_order(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Returns ``parts[0] op parts[1] op ...``, from left to right, in the parts' dtype.

        Example:
            >>> plan_reduction(torch.bfloat16, ReduceOp.SUM).reduce_in_order([torch.ones(2, dtype=torch.bfloat16)] * 3)
            tensor([3., 3.], dtype=torch.bfloat16)
        """
        total = parts[0].clone()
        for part in parts[1:]:
            torch_op = _IN_TORCH[self.name]
            total = torch_op(total, part)
        self.finish(total, len(parts))
        return total


def plan_reduction(dtype: torch.dtype, op: Any) -> Reduction:
    """Returns how to reduce a dtype by an operation of torch's.

    Args:
        dtype: the tensors' dtype; a complex one is summed as pairs of real numbers, by who calls.
        op: a ``torch.distributed.ReduceOp``.

    Raises:
        ArgumentError: nobody can: bits of floats, the mean of integers, the least of complex numbers, any sum of 8-bit floats.
    """
    name = next((name for known, name in _OPS.items() if op == known), None)
    if name is None:
        rule = ", ".join(str(known).rpartition(".")[2] for known in _OPS)
        raise ArgumentError(f"op must be one of {rule} with the mpi backend, got {op!r}. Choose one of them.")
    averages = op == ReduceOp.AVG
    is_number = dtype.is_floating_point or dtype.is_complex
    refused = (
        (is_number and name in _BITWISE)
        or (averages and not is_number)
        or (dtype.is_complex and name != "SUM")
        or (dtype.is_floating_point and dtype.itemsize == 1)
    )
    if refused:
        raise ArgumentError(f"op must be one that {dtype} has, got {op} (mpi backend). Convert the tensor, or choose another operation.")
    return Reduction(name, _TYPES.get(dtype), averages)


_SUM: Final = ReduceOp.SUM


class MpiReducing(MpiOperations):
    """The collectives of ``torch.distributed`` that reduce; see there for the arguments, and ``MpiCollectives`` for who calls them."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Reduces everybody's tensor in place, with the result on all ranks."""
        found = self._enter("all_reduce", group)
        if found is None:
            return None
        values = check_tensor("tensor", tensor)
        return self._reduce_everywhere("all_reduce", found, [values], op, async_op)

    def all_reduce_coalesced(self, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
        found = self._enter("all_reduce_coalesced", group)
        if found is None:
            return None
        values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
        if not values:
            raise ArgumentError(f"tensors must be at least one, got an empty list ({self.here()}). Leave the call out on all ranks.")
        check_alike("tensors", values, values[0], same_shape=False)
        return self._reduce_everywhere("all_reduce_coalesced", found, values, op, async_op)

    def _reduce_everywhere(self, name: str, group: MpiGroup, tensors: list[torch.Tensor], op: Any, async_op: bool) -> MpiHandle | None:
        reduction = plan_reduction(tensors[0].dtype, op)
        if len(tensors) == 1:
            stage, bring = for_receiving(_real(tensors[0]))
            if bring is not None:
                stage.copy_(_real(tensors[0]))
        else:
            stage = torch.cat([for_sending(_real(tensor)).reshape(-1) for tensor in tensors])

            def bring() -> None:
                for tensor, piece in zip(tensors, stage.split([_real(tensor).numel() for tensor in tensors]), strict=True):
                    _real(tensor).copy_(piece.view_as(_real(tensor)))

        def start() -> Started:
            in_mpi = self._numbers(reduction, stage)
            if in_mpi is None:
                everything = torch.empty((group.size(), *stage.shape), dtype=stage.dtype)
                request = group.comm.Iallgather(self._bytes(stage), self._bytes(everything, group.size()))
                return Started(request, (stage, everything), _then(lambda: stage.copy_(reduction.reduce_in_order(everything)), bring))
            request = group.comm.Iallreduce(self._working().mpi.IN_PLACE, in_mpi, self._op(reduction))
            return Started(request, stage, _then(lambda: reduction.finish(stage, group.size()), bring))

        return self._collect(name, group, start, tensors, async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> MpiHandle | None:
        """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
        found = self._enter("reduce", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("dst", dst, group_dst)
        reduction, is_root = plan_reduction(values.dtype, op), found.rank() == root
        mine = for_sending(_real(values))
        total = torch.empty_like(mine) if is_root else mine

        def finish() -> None:
            reduction.finish(total, found.size())
            _real(values).copy_(total)

        def start() -> Started:
            in_mpi = self._numbers(reduction, mine)
            if in_mpi is None:
                everything = torch.empty((found.size() if is_root else 0, *mine.shape), dtype=mine.dtype)
                receive = self._bytes(everything, found.size()) if is_root else None
                request = found.comm.Igather(self._bytes(mine), receive, root)
                reduce = (lambda: _real(values).copy_(reduction.reduce_in_order(everything))) if is_root else None
                return Started(request, (mine, everything), reduce and _then(reduce, None))
            receive = self._numbers(reduction, total) if is_root else None
            request = found.comm.Ireduce(in_mpi, receive, self._op(reduction), root)
            return Started(request, (mine, total), finish if is_root else None)

        return self._collect("reduce", found, start, [values], async_op, root=root)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
        found = self._enter("reduce_scatter", group)
        if found is None:
            return None
        result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
        check_count("input_list", inputs, found.size())
        check_alike("input_list", inputs, result, same_shape=False)
        if inputs[found.rank()].numel() != result.numel():
            raise ArgumentError(
                f"output must be as large as input_list[{found.rank()}], {inputs[found.rank()].numel()} elements, got {result.numel()} "
                f"({self.here()}). Make it so."
            )
        counts = [_real(each).numel() for each in inputs]
        flat = torch.cat([for_sending(_real(each)).reshape(-1) for each in inputs])
        return self._reduce_and_scatter("reduce_scatter", found, result, flat, counts, inputs, op, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> MpiHandle | None:
        """Reduces everybody's tensor, and gives each rank its part of it."""
        found = self._enter("reduce_scatter_tensor", group)
        if found is None:
            return None
        result, values = check_tensor("output", output), check_tensor("input", input)
        check_alike("output", [result], values, same_shape=False)
        self._check_parts("input", values, "output", result, found)
        counts = [_real(result).numel()] * found.size()
        flat = for_sending(_real(values)).reshape(-1)
        return self._reduce_and_scatter("reduce_scatter_tensor", found, result, flat, counts, [values], op, async_op)

    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_tensor

    def _reduce_and_scatter(
        self,
        name: str,
        group: MpiGroup,
        output: torch.Tensor,
        flat: torch.Tensor,
        counts: list[int],
        inputs: list[torch.Tensor],
        op: Any,
        async_op: bool,
    ) -> MpiHandle | None:
        """Reduces ``flat``, shape (sum of counts), and brings the part of ``counts`` that is this rank's into ``output``."""
        reduction, mine = plan_reduction(output.dtype, op), counts[group.rank()]
        part = torch.empty(mine, dtype=flat.dtype)

        def bring() -> None:
            _real(output).copy_(part.view_as(_real(output)))

        def start() -> Started:
            in_mpi = self._numbers(reduction, flat)
            if in_mpi is None:
                size = flat.element_size()
                everything = torch.empty((group.size(), mine), dtype=flat.dtype)
                offsets = [sum(counts[:place]) * size for place in range(group.size())]
                send = [self._memory(flat), ([count * size for count in counts], offsets), self._working().mpi.BYTE]
                request = group.comm.Ialltoallv(send, self._bytes(everything, group.size()))
                return Started(
                    request, (flat, everything), _then(lambda: part.copy_(reduction.reduce_in_order(everything)), bring), [output]
                )
            request = group.comm.Ireduce_scatter(in_mpi, self._numbers(reduction, part), counts, self._op(reduction))
            return Started(request, (flat, part, counts), _then(lambda: reduction.finish(part, group.size()), bring), [output])

        return self._collect(name, group, start, inputs, async_op)

    # -- what the collectives share

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self._working().mpi.buffer.fromaddress(tensor.data_ptr(), size_of(tensor))

    def _bytes(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """Returns a plain tensor as MPI takes it; with ``parts`` as so many equal pieces, one for each rank."""
        return [self._memory(tensor), size_of(tensor) // parts, self._working().mpi.BYTE]

    def _numbers(self, reduction: Reduction, tensor: torch.Tensor) -> list[Any] | None:
        """Returns a plain tensor as MPI takes it to reduce it, None where it cannot."""
        if reduction.type_name is None:
            return None
        return [self._memory(tensor), tensor.numel(), getattr(self._working().mpi, reduction.type_name)]

    def _op(self, reduction: Reduction) -> Any:
        return getattr(self._working().mpi, reduction.name)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _then(first: Callable[[], Any], second: Callable[[], None] | None) -> Callable[[], None]:
    def both() -> None:
        first()
        if second is not None:
            second()

    return both


class MpiCollectives(MpiReducing):
    """The collectives of ``torch.distributed``; see there for the arguments.

    Every rank of the group calls them, in the same order. They block until this rank's part is done; with ``async_op=True`` they return
    a handle. Outside the group they do nothing.
    """

    def broadcast(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> MpiHandle | None:
        """Gives all ranks the root's tensor."""
        found = self._enter("broadcast", group)
        if found is None:
            return None
        values = check_tensor("tensor", tensor)
        root = found.place_of("src", src, group_src)
        is_root = found.rank() == root
        stage, bring = (for_sending(values), None) if is_root else for_receiving(values)

        def start() -> Started:
            return Started(found.comm.Ibcast(self._bytes(stage), root), stage, bring)

        return self._collect("broadcast", found, start, [values], async_op, root=root)

    def all_gather(self, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Fills each rank's list with everybody's tensor, by rank."""
        found = self._enter("all_gather", group)
        if found is None:
            return None
        values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
        check_count("tensor_list", outputs, found.size())
        check_alike("tensor_list", outputs, values)
        return self._gather_everywhere("all_gather", found, [values], [[output] for output in outputs], async_op)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Fills each rank's output with everybody's input behind each other, by rank."""
        found = self._enter("all_gather_into_tensor", group)
        if found is None:
            return None
        values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
        check_alike("output_tensor", [output], values, same_shape=False)
        self._check_parts("output_tensor", output, "input_tensor", values, found)
        plain, (stage, bring) = for_sending(values), for_receiving(output)

        def start() -> Started:
            request = found.comm.Iallgather(self._bytes(plain), self._bytes(stage, found.size()))
            return Started(request, (plain, stage), bring)

        return self._collect("all_gather_into_tensor", found, start, [output], async_op)

    _all_gather_base = all_gather_single = all_gather_into_tensor

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Fills the list of each rank with everybody's list of tensors."""
        found = self._enter("all_gather_coalesced", group)
        if found is None:
            return None
        inputs = check_tensors("input_tensor_list", input_tensor_list)
        check_count("output_tensor_lists", output_tensor_lists, found.size())
        outputs = [check_tensors(f"output_tensor_lists[{place}]", each) for place, each in enumerate(output_tensor_lists)]
        for place, each in enumerate(outputs):
            check_count(f"output_tensor_lists[{place}]", each, len(inputs))
            for output, values in zip(each, inputs, strict=True):
                check_alike(f"output_tensor_lists[{place}]", [output], values)
        return self._gather_everywhere("all_gather_coalesced", found, inputs, outputs, async_op)

    def _gather_everywhere(
        self, op: str, group: MpiGroup, inputs: list[torch.Tensor], outputs: list[list[torch.Tensor]], async_op: bool
    ) -> MpiHandle | None:
        mine, everything = flatten(inputs), [output for each in outputs for output in each]
        flat = torch.empty(len(mine) * group.size(), dtype=torch.uint8)

        def start() -> Started:
            request = group.comm.Iallgather(self._bytes(mine), self._bytes(flat, group.size()))
            return Started(request, (mine, flat), lambda: unflatten(flat, everything))

        return self._collect(op, group, start, everything, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Any = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> MpiHandle | None:
        """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "dst", dst, group_dst)
        outputs = self._list_at_root("gather_list", gather_list, values, found, root)
        mine = for_sending(values)
        flat = torch.empty(size_of(mine) * len(outputs), dtype=torch.uint8)

        def start() -> Started:
            request = found.comm.Igather(self._bytes(mine), self._bytes(flat, found.size()) if outputs else None, root)
            return Started(request, (mine, flat), lambda: unflatten(flat, outputs), outputs)

        return self._collect("gather", found, start, [values], async_op, copies=found.size(), root=root)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> MpiHandle | None:
        """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
        found = self._enter("scatter", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "src", src, group_src)
        inputs = self._list_at_root("scatter_list", scatter_list, values, found, root)
        flat, (stage, bring) = flatten(inputs), for_receiving(values)

        def start() -> Started:
            request = found.comm.Iscatter(self._bytes(flat, found.size()) if inputs else None, self._bytes(stage), root)
            return Started(request, (flat, stage), bring)

        return self._collect("scatter", found, start, [values], async_op, copies=found.size(), root=root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> MpiHandle | None:
        """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
        found = self._enter("all_to_all_single", group)
        if found is None:
            return None
        values, result = check_tensor("input", input), check_tensor("output", output)
        check_alike("output", [result], values, same_shape=False)
        sent = [rows * _row_size(values) for rows in self._cut("input", values, input_split_sizes, found)]
        received = [rows * _row_size(result) for rows in self._cut("output", result, output_split_sizes, found)]
        plain, (stage, bring) = for_sending(values), for_receiving(result)

        def start() -> Started:
            byte = self._working().mpi.BYTE
            send = [self._memory(plain), (sent, _offsets(sent)), byte]
            receive = [self._memory(stage), (received, _offsets(received)), byte]
            return Started(found.comm.Ialltoallv(send, receive), (plain, stage), bring, [result])

        return self._collect("all_to_all_single", found, start, [values], async_op)

    def all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Sends each rank its tensor of the input list, and fills the output list with what comes from each."""
        found = self._enter("all_to_all", group)
        if found is None:
            return None
        inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
        check_count("input_tensor_list", inputs, found.size())
        check_count("output_tensor_list", outputs, found.size())
        check_alike("input_tensor_list", inputs, inputs[0], same_shape=False)
        check_alike("output_tensor_list", outputs, inputs[0], same_shape=False)
        sent, received = [size_of(each) for each in inputs], [size_of(each) for each in outputs]
        flat, result = flatten(inputs), torch.empty(sum(received), dtype=torch.uint8)

        def start() -> Started:
            byte = self._working().mpi.BYTE
            send = [self._memory(flat), (sent, _offsets(sent)), byte]
            receive = [self._memory(result), (received, _offsets(received)), byte]
            return Started(found.comm.Ialltoallv(send, receive), (flat, result), lambda: unflatten(result, outputs), outputs)

        return self._collect("all_to_all", found, start, inputs, async_op)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> MpiHandle | None:
        """Blocks until every rank of the group has come here."""
        found = self._enter("barrier", group)
        if found is None:
            return None
        return self._collect("barrier", found, lambda: Started(found.comm.Ibarrier()), [], async_op, timeout=timeout)

    def _list_at_root(self, what: str, tensors: Any, like: torch.Tensor, group: MpiGroup, root: int) -> list[torch.Tensor]:
        """Returns the list that only the root has, checked; on other ranks an empty one."""
        if group.rank() != root:
            if tensors:
                raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({self.here()}).")
            return []
        outputs = check_tensors(what, tensors)
        check_count(what, outputs, group.size())
        check_alike(what, outputs, like)
        return outputs


def _row_size(tensor: torch.Tensor) -> int:
    return size_of(tensor) // max(tensor.shape[0], 1)


def _offsets(sizes: list[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets


class MpiObjects(MpiMessages, MpiCollectives):
    """The functions of ``torch.distributed`` for objects; see there for the arguments. Only receive from ranks you trust: it is pickle."""

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        """Sends objects to one rank; blocks."""
        _check_device(device)
        sizes, data = _pack(object_list)
        for tensor in (sizes, data):
            handle = self._send("send_object_list", tensor, dst, group, 0, group_dst)
            if handle is not None:
                handle.wait()

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        """Receives as many objects as the list is long, from anybody where no source is given; blocks.

        Returns:
            The sender's global rank, -1 outside the group.
        """
        _check_device(device)
        sizes = torch.empty(len(object_list), dtype=torch.int64)
        handle = self._receive("recv_object_list", sizes, src, group, 0, group_src)
        found = self._find(group)
        if handle is None or found is None:
            return -1
        handle.wait()
        source = handle.source_rank()
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        handle = self._receive("recv_object_list", data, None, group, 0, source)
        if handle is not None:
            handle.wait()
        object_list[:] = _unpack(data, sizes)
        return found.ranks[source]

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
    ) -> None:
        """Gives all ranks of the group the root's objects: collective, blocks."""
        _check_device(device)
        found = self._enter("broadcast_object_list", group)
        if found is None:
            return
        root = found.place_of("src", src, group_src)
        is_root = found.rank() == root
        sizes, data = _pack(object_list) if is_root else (torch.empty(len(object_list), dtype=torch.int64), torch.empty(0))
        self.broadcast(sizes, None, group, False, root)
        if not is_root:
            data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        self.broadcast(data, None, group, False, root)
        if not is_root:
            object_list[:] = _unpack(data, sizes)

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Gives all ranks of the group everybody's object, by rank: collective, blocks."""
        found = self._enter("all_gather_object", group)
        if found is None:
            return
        _check_length("object_list", object_list, found.size())
        _, data = _pack([obj])
        sizes, longest = self._exchange_sizes(data, group, found.size())
        everything = torch.empty(found.size() * longest, dtype=torch.uint8)
        self.all_gather_into_tensor(everything, _pad(data, longest), group)
        object_list[:] = _unpack_padded(everything, sizes, longest)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        """Gives the root everybody's object, by rank: collective, blocks."""
        found = self._enter("gather_object", group)
        if found is None:
            return
        root = self._root(found, "dst", dst, group_dst)
        is_root = found.rank() == root
        if is_root:
            _check_length("object_gather_list", object_gather_list, found.size())
        _, data = _pack([obj])
        sizes, longest = self._exchange_sizes(data, group, found.size())
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in found.ranks] if is_root else None
        self.gather(_pad(data, longest), parts, None, group, False, root)
        if parts is not None and object_gather_list is not None:
            object_gather_list[:] = _unpack_padded(torch.cat(parts), sizes, longest)

    def scatter_object_list(
        self,
        scatter_object_output_list: Any,
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        """Puts into the first place of each rank's output list that rank's object of the root's input list: collective, blocks."""
        found = self._enter("scatter_object_list", group)
        if found is None:
            return
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise ArgumentError(f"scatter_object_output_list must be a list of 1 or more, got {scatter_object_output_list!r}. Pass [None].")
        root = self._root(found, "src", src, group_src)
        pieces: list[torch.Tensor] = []
        sizes = torch.empty(found.size(), dtype=torch.int64)
        if found.rank() == root:
            _check_length("scatter_object_input_list", scatter_object_input_list, found.size())
            pieces = [_pack([each])[1] for each in scatter_object_input_list or []]
            sizes = torch.tensor([len(piece) for piece in pieces])
        self.broadcast(sizes, None, group, False, root)
        longest = int(sizes.max())
        mine = torch.empty(longest, dtype=torch.uint8)
        self.scatter(mine, [_pad(piece, longest) for piece in pieces], None, group, False, root)
        (scatter_object_output_list[0],) = _unpack(mine, sizes[found.rank()].reshape(1))

    def _exchange_sizes(self, data: torch.Tensor, group: Any, count: int) -> tuple[torch.Tensor, int]:
        """Returns how many bytes each rank has, and the most."""
        sizes = torch.empty(count, dtype=torch.int64)
        self.all_gather_into_tensor(sizes, torch.tensor([len(data)]), group)
        return sizes, int(sizes.max())


def _pack(objects: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sizes of the pickled objects, shape (objects), and their bytes, shape (bytes)."""
    if not isinstance(objects, list | tuple) or not objects:
        raise ArgumentError(f"object_list must be a list of at least one object, got {objects!r}. Put the objects into a list.")
    pickled = [pickle.dumps(each) for each in objects]
    data = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
    return torch.tensor([len(each) for each in pickled]), data


def _unpack(data: torch.Tensor, sizes: torch.Tensor) -> list[Any]:
    """Returns the objects that lie behind each other in ``data``."""
    text, objects, offset = bytes(data.numpy()), [], 0
    for size in sizes.tolist():
        objects.append(pickle.loads(text[offset : offset + size]))
        offset += size
    return objects


def _unpack_padded(data: torch.Tensor, sizes: torch.Tensor, longest: int) -> list[Any]:
    """Returns the objects of which one begins every ``longest`` bytes."""
    text = bytes(data.numpy())
    return [pickle.loads(text[place * longest : place * longest + size]) for place, size in enumerate(sizes.tolist())]


def _pad(data: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: len(data)] = data
    return padded


def _check_device(device: Any) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ArgumentError(f'device must be "cpu" or None with the mpi backend, got {device}. Leave it out.')


def _check_length(what: str, objects: Any, count: int) -> None:
    if not isinstance(objects, list) or len(objects) != count:
        got = f"one of {len(objects)}" if isinstance(objects, list) else repr(objects)
        raise ArgumentError(f"{what} must be a list with a place for each of the {count} ranks, got {got}. Pass [None] * {count}.")
