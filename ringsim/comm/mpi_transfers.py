"""Groups, handles, messages and collectives on MPI.

Each operation is one nonblocking operation of MPI, and what must be done with its result. Data that
is only moved travels as bytes, whatever its dtype. What is reduced is reduced by MPI; where MPI
does not have the type, it is gathered, and reduced in torch in the order of the ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from ringsim.comm.backend import Backend, Membership
from ringsim.comm.built import Handle, check_reduction, find_refusal, reduce_parts
from ringsim.comm.collectives import (
    Call,
    Members,
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

# looks at a request with nothing but a step aside between them, before sleeping
_YIELDS: Final = 200
_FIRST_SLEEP_S: Final = 20e-6
_LAST_SLEEP_S: Final = 1e-3
# from here on, each new operation looks for handles that nobody waits for
_MANY_UNDER_WAY: Final = 64
# The names of MPI's types and operations, which must not be looked up before MPI is wanted.
_TYPES: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    **{
        getattr(torch, f"{kind}{bits}"): f"{kind}{bits}_t".upper()
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
_OPS: Final = {"AVG": "SUM", "PRODUCT": "PROD"}  # the others have torch's names


@dataclass(frozen=True, eq=False)
class MpiGroup(Members):
    """The ranks that share a communicator."""

    kind = "MPI"
    comm: Any = field(repr=False)  # the mpi4py communicator
    ranks: tuple[int, ...]  # the members, global ranks, in the group's order
    group_name: str  # "world", or a name that is the same on all members
    # the same on all members, and no other group's; the world's is 0
    number: int = field(repr=False)
    timeout_s: float = field(repr=False)  # limit of one operation on the group, in seconds
    group_desc: str = field(default="", repr=False)  # what the user called it
    # the place of each member, by its global rank
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
    """An operation that MPI has begun.

    It moves on while some thread of this process is inside MPI: in a wait, or in another call.

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
        under_way: holds the handle until it is done, so that what MPI reads or writes does not go
            away with a handle that was dropped.
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
        self._mpi, self._request, self._what, self._timeout_s, self._keep = (
            mpi,
            request,
            what,
            timeout_s,
            keep,
        )
        self._size_bytes, self._ranks = size_bytes, ranks
        self._under_way = {} if under_way is None else under_way
        self._under_way[self] = None
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
        """Has the wait complete the record at ``slot`` too.

        False where nobody is going to wait, or another recorder is told.
        """
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
        """Gives up an operation that nobody will wait for.

        A recv is taken back, the rest is left to MPI.
        """
        with self._testing:
            if not self._over and self.receives:
                self._request.Cancel()
                self._request.Wait()
                what = f"{self._what} must be done before the process group is destroyed"
                self._error = RingError(
                    f"{what}, got neither a message nor a wait. Wait for it first."
                )
                self._end()

    def _wait(self, timeout: timedelta | float | None) -> None:
        """Waits until the operation is done, on this rank.

        Raises:
            RunTimeout: the limit, by default the group's, is over. The operation goes on, and can
                be waited for again.
            MessageMismatch: the message has another size than the tensor.
            RingError: MPI reports something else.
        """
        limit_s, begin, looks, sleep_s = (
            to_seconds(timeout) or self._timeout_s,
            time.monotonic(),
            0,
            _FIRST_SLEEP_S,
        )
        while not self._test():
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() - begin >= limit_s:
                raise RunTimeout(
                    f"{self._what} must be answered within {limit_s:g} s, got no answer. See "
                    "what the other ranks do, or allow more time."
                )
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)
        if (
            self._recorder is not None
            and self._recorder is get_state().recorder
            and self._source >= 0
        ):
            self._recorder.amend(self._slots[0], peer=self._ranks[self._source])

    def _test(self) -> bool:
        """Asks MPI, which also moves every other operation of this process on.

        Takes over what is done.
        """
        with self._testing:
            if not self._over and not self._take_over():
                return False
        if self._error is not None:
            raise self._error
        return True

    def _take_over(self) -> bool:
        """Asks MPI, and brings the result to its place if it is there.

        Returns whether the operation is over, well or not.
        """
        status = None if self._size_bytes is None else self._mpi.Status()
        try:
            if not self._request.Test(status):
                return False
            if status is not None:
                self._source = status.Get_source()
                if (size_bytes := status.Get_count(self._mpi.BYTE)) != self._size_bytes:
                    self._error = self._mismatch(
                        f"a message of {size_bytes} bytes from rank {self._ranks[self._source]}"
                    )
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
        self._under_way.pop(self, None)

    def _mismatch(self, message: str) -> MessageMismatch:
        return MessageMismatch(
            f"the tensor of {self._what} must be as large as the message, got {self._size_bytes} "
            f"bytes for {message}. "
            "Compare dtype and shape on both sides."
        )

    def _explain(self, error: Any) -> RingError:
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return self._mismatch("a longer one")
        return RingError(
            f"{self._what} must be carried by MPI, got its error {error}. "
            "See what the other ranks do."
        )


def to_seconds(timeout: timedelta | float | None) -> float:
    """Returns a limit in seconds, 0 where there is none.

    Raises ArgumentError where it is no time, or negative.
    """
    if timeout is None:
        return 0.0
    seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ArgumentError(
            f"timeout must be a number of seconds or a timedelta, 0 or more, got {timeout!r}. Or "
            "leave it out."
        )
    return float(seconds)


class MpiRecords:
    """Tells the recorder that is at work of operations on MPI.

    ``library`` is the MPI library and its version, for the trace.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._recorder: Recorder | None = None
        self._posts: dict[int, Callable[..., int | None]] = {}

    def post(
        self,
        op: int,
        group: MpiGroup,
        peer: int,
        tag: int,
        tensors: Sequence[torch.Tensor],
        copies: int = 1,
    ) -> tuple[Recorder, int] | None:
        """Writes down that an operation begins, of the size of so many copies of the tensors.

        Returns who recorded it, and where.
        """
        recorder = get_state().recorder
        if recorder is None:
            return None
        if recorder is not self._recorder:
            self._recorder, self._posts = recorder, {}
            recorder.set_meta("backend", "mpi")
            recorder.set_meta("mpi_library", self._library)
        post = self._posts.get(op) or self._posts.setdefault(op, recorder.make_post(op))
        slot = post(
            recorder.group(group.group_name, group.ranks),
            peer,
            tag,
            recorder.payload(*describe(tensors, copies)),
        )
        return None if slot is None else (recorder, slot)


class Job(NamedTuple):
    """The process's part in MPI, from ``init_process_group`` to ``destroy_process_group``."""

    mpi: Any  # the module ``mpi4py.MPI``
    world: MpiGroup  # all ranks
    control: Any  # a communicator of all ranks for ringsim's own messages
    token: str  # the same on all ranks, and no other job's
    groups: set[MpiGroup]  # the groups that exist, ``world`` among them
    numbers: Iterator[int]  # of the groups to come
    blocks: Iterator[int]  # of the recorded blocks to come
    records: MpiRecords  # writes operations down
    # operations that may not be done yet, in the order of posting: what MPI reads or writes must
    # not go away
    under_way: dict[MpiHandle, None]
    undo: Callable[[], None]  # takes back what else was changed in the process


class _Started(NamedTuple):
    """What MPI has begun.

    Its request, what must live until it is done, and what brings the result to its place.
    """

    request: Any
    keep: Any = None
    finish: Callable[[], Any] | None = None


class MpiTransfers(Membership, Backend):
    """Messages and collectives as ``torch.distributed`` has them; see there for the arguments.

    Tensors of every dtype travel as bytes. Several of one call, and one that is not contiguous, are
    copied. Nobody sends to itself, as on Gloo. Every rank of a group calls a collective, in the
    same order.
    """

    direct = True
    _job: Job | None = None

    def _working(self) -> Job:
        """Returns the job; raises RingError where there is none."""
        if self._job is None:
            raise RingError(
                "the mpi backend must be initialized before it is used, got a call before "
                "init_process_group or after "
                'destroy_process_group. Call ringsim.comm.init_process_group("mpi") on every rank.'
            )
        return self._job

    def _everybody(self) -> MpiGroup:
        return self._working().world

    def _exists(self, group: Any) -> bool:
        return group in self._working().groups

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return self._everybody().here()

    # -- messages

    def begin_send(
        self,
        tensor: Any,
        dst: Any,
        group: Any,
        tag: Any,
        group_dst: Any,
        op: int = OP_CODES["isend"],
    ) -> MpiHandle | None:
        """Begins to send; ``op`` is what it is recorded as."""
        found = self.enter("isend", group)
        if found is None:
            return None
        mpi, values = self._working().mpi, found.check("tensor", tensor)
        place, tag, plain = (
            self._peer("dst", found, dst, group_dst),
            self._check_tag(tag),
            for_sending(values),
        )

        def start() -> _Started:
            return _Started(found.comm.Isend(_as_mpi(mpi, _as_bytes(plain)), place, tag), plain)

        peer = found.ranks[place]
        return self._begin(
            op, found, start, [values], f"isend to rank {peer}, tag {tag}", peer, tag
        )

    def begin_recv(
        self,
        tensor: Any,
        src: Any,
        group: Any,
        tag: Any,
        group_src: Any,
        op: int = OP_CODES["irecv"],
    ) -> MpiHandle | None:
        """Begins to receive, from anybody where no source is given.

        ``op`` is what it is recorded as.
        """
        found = self.enter("irecv", group)
        if found is None:
            return None
        mpi, values, anybody = (
            self._working().mpi,
            found.check("tensor", tensor),
            src is None and group_src is None,
        )
        place = mpi.ANY_SOURCE if anybody else self._peer("src", found, src, group_src)
        tag, stage = self._check_tag(tag), for_receiving(values)

        def start() -> _Started:
            request = found.comm.Irecv(_as_mpi(mpi, _as_bytes(stage)), place, tag)
            return _Started(
                request, stage, None if stage is values else lambda: values.copy_(stage)
            )

        peer = ANY_SOURCE if anybody else found.ranks[place]
        what = f"irecv from {'anybody' if anybody else f'rank {peer}'}, tag {tag}"
        return self._begin(op, found, start, [values], what, peer, tag, size_bytes=values.nbytes)

    def _peer(
        self, what: str, group: MpiGroup, global_rank: int | None, group_rank: int | None
    ) -> int:
        place = group.place_of(what, global_rank, group_rank)
        if place == group.rank():
            raise ArgumentError(
                f"{what} must be another rank, got this rank itself ({self.here()}). Copy the "
                "tensor instead."
            )
        return place

    def _check_tag(self, tag: int) -> int:
        job, number = self._working(), to_index("tag", tag)
        highest = job.world.comm.Get_attr(job.mpi.TAG_UB)
        if not 0 <= number <= highest:
            raise ArgumentError(
                f"tag must be from 0 to {highest} on this MPI, got {number} ({self.here()}). "
                "Choose another."
            )
        return number

    # -- collectives

    def start(self, call: Call) -> MpiHandle:
        """Begins a collective."""
        group: Any = call.group
        mpi, begin = self._working().mpi, _STARTERS.get(call.collective.family, _move)
        if call.op is not None:
            check_reduction(call.op)
            dtype = call.given[0].dtype
            if refusal := find_refusal(dtype, name_of_reduction(call.op)):
                raise ArgumentError(
                    f"op must be one that {dtype} has, got {call.op} ({refusal}). Convert the "
                    "tensor, or choose another."
                )
        code, peer = (
            OP_CODES[call.recorded_name],
            NONE if call.root == NONE else group.ranks[call.root],
        )
        carried, copies, results = call.carried, call.copies, call.results
        return self._begin(
            code,
            group,
            lambda: begin(mpi, group.comm, call),
            carried,
            call.name,
            peer,
            copies=copies,
            results=results,
        )

    def _begin(
        self,
        op: int,
        group: MpiGroup,
        start: Callable[[], _Started],
        tensors: Sequence[torch.Tensor],
        what: str,
        peer: int,
        tag: int = NONE,
        *,
        copies: int = 1,
        size_bytes: int | None = None,
        results: Sequence[torch.Tensor] = (),
    ) -> MpiHandle:
        """Begins an operation, which ``start`` hands to MPI, and writes it down.

        See ``MpiRecords.post`` and ``MpiHandle``.
        """
        job = self._working()
        begun = job.records.post(op, group, peer, tag, tensors, copies)
        try:
            request, keep, finish = start()
        except BaseException as error:
            if begun is not None:
                begun[0].complete(begun[1], ERROR)
            if isinstance(error, job.mpi.Exception):
                raise RingError(
                    f"{what} must be carried by MPI, got its error {error} ({self.here()})."
                ) from error
            raise
        handle = MpiHandle(
            *(job.mpi, request, f"{what} ({group.here()})", group.timeout_s),
            keep=keep,
            finish=finish,
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


def _move(mpi: Any, comm: Any, call: Call) -> _Started:
    """Begins what only moves data."""
    count, given, (taken, finish) = call.group.size(), _flatten(call.given), _to_fill(call)
    match call.collective.family:
        case "all_gather":
            request = comm.Iallgather(_as_mpi(mpi, given), _as_mpi(mpi, taken, count))
        case "gather":
            request = comm.Igather(
                _as_mpi(mpi, given), _as_mpi(mpi, taken, count) if call.outputs else None, call.root
            )
        case "scatter":
            request = comm.Iscatter(
                _as_mpi(mpi, given, count) if call.inputs else None, _as_mpi(mpi, taken), call.root
            )
        case "all_to_all":
            request = comm.Ialltoallv(
                _in_pieces(mpi, given, call.inputs), _in_pieces(mpi, taken, call.outputs)
            )
        case _:
            request = comm.Ibarrier()
    return _Started(request, (given, taken), finish)


def _broadcast(mpi: Any, comm: Any, call: Call) -> _Started:
    tensor, is_root = call.taken[0], call.group.rank() == call.root
    data = for_sending(tensor) if is_root else for_receiving(tensor)
    finish = None if is_root or data is tensor else lambda: tensor.copy_(data)
    return _Started(comm.Ibcast(_as_mpi(mpi, _as_bytes(data)), call.root), data, finish)


def _reduce(mpi: Any, comm: Any, call: Call) -> _Started:
    """Begins all_reduce, and reduce, whose result is wanted on the root only."""
    everywhere = call.root == NONE
    wanted = everywhere or call.group.rank() == call.root
    mine, outputs = (
        _join_numbers(call.given),
        [_real(tensor) for tensor in call.taken] if wanted else [],
    )
    if numbers := _as_numbers(mpi, mine):
        rows = torch.empty((int(wanted), len(mine)), dtype=mine.dtype)
        receive, op = _as_numbers(mpi, rows) if wanted else None, _op_of(mpi, call)
        request = (
            comm.Iallreduce(numbers, receive, op)
            if everywhere
            else comm.Ireduce(numbers, receive, op, call.root)
        )
    else:
        rows = torch.empty((call.group.size() if wanted else 0, len(mine)), dtype=mine.dtype)
        send, receive = (
            _as_mpi(mpi, _as_bytes(mine)),
            _as_mpi(mpi, _as_bytes(rows), call.group.size()) if wanted else None,
        )
        request = (
            comm.Iallgather(send, receive) if everywhere else comm.Igather(send, receive, call.root)
        )
    return _Started(request, (mine, rows), lambda: _complete_reduction(call, rows, outputs))


def _reduce_scatter(mpi: Any, comm: Any, call: Call) -> _Started:
    parts, output = [_real(each) for each in call.inputs], _real(call.outputs[0])
    mine, counts = _join_numbers(parts), [part.numel() for part in parts]
    if numbers := _as_numbers(mpi, mine):
        rows = torch.empty((1, output.numel()), dtype=mine.dtype)
        request = comm.Ireduce_scatter(numbers, _as_numbers(mpi, rows), counts, _op_of(mpi, call))
    else:
        rows = torch.empty((call.group.size(), output.numel()), dtype=mine.dtype)
        request = comm.Ialltoallv(
            _in_pieces(mpi, _as_bytes(mine), parts), _as_mpi(mpi, _as_bytes(rows), len(rows))
        )
    return _Started(
        request, (mine, rows, counts), lambda: _complete_reduction(call, rows, [output])
    )


def _complete_reduction(call: Call, rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Fills the outputs from a total that MPI has made, one row.

    Or from the parts of all ranks, which torch reduces.
    """
    if not outputs:
        return
    if rows.dtype not in _TYPES:
        total = reduce_parts(list(rows), call.op)
    else:
        total = rows[0].div_(call.group.size()) if name_of_reduction(call.op) == "AVG" else rows[0]
    for output, piece in zip(
        outputs, total.split([output.numel() for output in outputs]), strict=True
    ):
        output.copy_(piece.view_as(output))


# by family; `_move` begins the others
_STARTERS: Final[dict[str, Callable[[Any, Any, Call], _Started]]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}


# -- tensors as MPI takes them


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed.

    Any other as it is.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _join_numbers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of the numbers in several tensors, one after the other."""
    return torch.cat([for_sending(_real(tensor)).reshape(-1) for tensor in tensors])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor, shape (bytes), sharing its memory."""
    # one element may have any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_mpi(mpi: Any, data: torch.Tensor, parts: int = 1) -> list[Any]:
    """Returns bytes as MPI takes them.

    With ``parts`` as so many equal pieces, one for each rank.
    """
    return [mpi.buffer.fromaddress(data.data_ptr(), len(data)), len(data) // parts, mpi.BYTE]


def _in_pieces(mpi: Any, data: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[Any]:
    """Returns bytes as MPI takes them in pieces of different sizes, one for each rank."""
    sizes = [piece.nbytes for piece in pieces]
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    return [mpi.buffer.fromaddress(data.data_ptr(), len(data)), (sizes, offsets), mpi.BYTE]


def _as_numbers(mpi: Any, tensor: torch.Tensor) -> list[Any] | None:
    """Returns a plain tensor as MPI takes it to reduce it, None where it cannot."""
    if tensor.dtype not in _TYPES:
        return None
    return [
        mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes),
        tensor.numel(),
        getattr(mpi, _TYPES[tensor.dtype]),
    ]


def _op_of(mpi: Any, call: Call) -> Any:
    name = name_of_reduction(call.op)
    return getattr(mpi, _OPS.get(name, name))


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of several tensors one after the other, shape (bytes).

    A single plain one is not copied.
    """
    if len(tensors) == 1:
        return _as_bytes(for_sending(tensors[0]))
    return torch.cat(
        [torch.empty(0, dtype=torch.uint8), *(_as_bytes(for_sending(tensor)) for tensor in tensors)]
    )


def _to_fill(call: Call) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns the bytes to be filled for what is taken, shape (bytes), and what brings them there.

    None where they are there already.
    """
    taken = call.taken
    # which MPI forbids to be filled
    storages = {each.untyped_storage().data_ptr() for each in call.given}
    if (
        len(taken) == 1
        and is_plain(taken[0])
        and taken[0].untyped_storage().data_ptr() not in storages
    ):
        return _as_bytes(taken[0]), None
    sizes = [tensor.nbytes for tensor in taken]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)

    def bring() -> None:
        for tensor, piece in zip(taken, flat.split(sizes), strict=True):
            plain = torch.empty(tensor.shape, dtype=tensor.dtype)
            _as_bytes(plain).copy_(piece)
            tensor.copy_(plain)

    return flat, bring
