"""Operations that a backend does not have, built from the messages that every backend has.

Also reductions of our own. All members of the group call a collective, in the same order, as they
would call torch's. Reductions go in the order of the ranks, so every rank gets the same bits: sums
and products of floats may differ from torch's in the last ones, all else is the same.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from ringsim.comm.backend import FALLBACK_TAG, Backend, run_collective
from ringsim.comm.collectives import (
    READINGS,
    Call,
    OpaqueGroup,
    for_receiving,
    for_sending,
    name_function,
    name_of_reduction,
)
from ringsim.errors import ArgumentError, RingError
from ringsim.state import get_state
from ringsim.traces.events import ERROR, OK
from ringsim.traces.recorder import Recorder

__all__ = [
    *(
        "BUILT",
        "Handle",
        "batch_isend_irecv",
        "built",
        "check_reduction",
        "find_own",
        "find_refusal",
        "monitored_barrier",
    ),
    *("new_subgroups", "new_subgroups_by_enumeration", "recv", "reduce_parts", "send", "source_of"),
]

_STEPS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_OF_COMPLEX: Final = ("SUM", "AVG")  # torch.distributed sums complex numbers as pairs of real ones


def check_reduction(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the function of two tensors that an operation repeats.

    Raises ArgumentError for all but torch's eight plain ones.
    """
    step = (
        _STEPS.get(name_of_reduction(op)) if isinstance(op, ReduceOp | ReduceOp.RedOpType) else None
    )
    if step is None:
        words = f"op must be one of {', '.join(_STEPS)} where ringsim.comm adds up itself, got {op}"
        raise ArgumentError(f"{words}. Use one of these, or another backend.")
    return step


@functools.cache
def find_refusal(dtype: torch.dtype, how: str) -> str:
    """Returns why torch does not reduce tensors of a dtype in a way, "" where it does.

    It is asked to do so with one number.

    Args:
        dtype: of the tensors.
        how: the name of the operation in ``ReduceOp``.

    Example:
        >>> find_refusal(torch.int64, "SUM"), find_refusal(torch.int64, "AVG")
        ('', "result type Float can't be cast to the desired output type Long")
    """
    if dtype.is_complex and how not in _OF_COMPLEX:
        return f"torch reduces complex numbers by {' and '.join(_OF_COMPLEX)} only"
    number = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        total = check_reduction(getattr(ReduceOp, how))(number, number)
        if how == "AVG":
            total.div_(1)
    except RuntimeError as error:
        return str(error)
    return ""


def reduce_parts(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Combines tensors of one shape.

    The first with the second, the result with the third, and so on. A sum of floats depends on its
    order: that of a ring or a tree differs in the last bits. All else is exact.

    Args:
        parts: one tensor of each rank, in order.
        op: one of ``ReduceOp``; AVG divides the sum by how many there are, whole numbers towards
            zero.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ArgumentError: the operation is none of torch's eight plain ones.

    Example:
        >>> reduce_parts([torch.tensor([1, 5]), torch.tensor([3, 4])], ReduceOp.MAX).tolist()
        [3, 5]
    """
    step = check_reduction(op)
    result = parts[0].clone()
    for part in parts[1:]:
        result = step(result, part)
    if op == ReduceOp.AVG:
        whole = not (result.is_floating_point() or result.is_complex())
        result = torch.div(result, len(parts), rounding_mode="trunc" if whole else None)
    return result


class Handle:
    """Stands for several operations under way, and for what is left to do once they are complete.

    Args:
        works: handles of the operations; None among them is passed over.
        finish: what is left to do then, once: copy to where the results belong, add up.
        results: the tensors that hold the result.

    Example:
        >>> done = Handle([], lambda: print("finished"))
        >>> done.wait(), done.is_completed()
        finished
        (True, True)
    """

    def __init__(
        self,
        works: Iterable[Any],
        finish: Callable[[], Any] | None = None,
        results: Iterable[torch.Tensor] = (),
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Any] | None = finish or (lambda: None)
        self._results = list(results)
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        # records, besides those of the operations, that the wait completes
        self._slots: list[int] = []

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Has the wait complete the record at ``slot``; False where it is over."""
        with self._lock:
            if self._finish is None:
                return False
            self._recorder = recorder
            self._slots.append(slot)
            return True

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operations are complete and the results are in place.

        The second time it returns at once.

        Args:
            timeout: limit for each operation, as its backend takes it (torch: a ``timedelta``);
                None for the group's own.

        Returns:
            True.
        """
        with self._lock:
            recorder: Any = self._recorder if self._recorder is get_state().recorder else None
            slots = [] if recorder is None else self._slots
            for slot in slots:
                recorder.wait(slot)
            status = ERROR
            try:
                self._wait(timeout)
                status = OK
            finally:
                for slot in slots:
                    recorder.complete(slot, status)
            self._recorder = None
        return True

    def _wait(self, timeout: Any) -> None:
        while self._works:
            self._works[0].wait() if timeout is None else self._works[0].wait(timeout)
            del self._works[0]  # a second wait for a message of Gloo would break the connection
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Returns whether the results are in place. Gloo tells of messages only in ``wait``."""
        if self._finish is not None and all(work.is_completed() for work in self._works):
            self.wait()
        return self._finish is None

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        self.wait()
        return self._results

    def done(self) -> bool:
        """``is_completed``, as futures spell it: torch's coalesced forms return a future."""
        return self.is_completed()

    def value(self) -> list[torch.Tensor]:
        """``result``, as futures spell it."""
        return self.result()

    def get_future(self) -> Any:
        """Returns a ``torch.futures.Future`` of the result; a thread waits for it."""
        future: Any = torch.futures.Future()

        def wait() -> None:
            try:
                future.set_result(self.result())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=wait, name="ringsim-future", daemon=True).start()
        return future


# -- collectives


def built(backend: Backend, call: Call) -> Handle:
    """Begins a collective by messages, flat ones.

    All are posted before any is waited for, so ranks block each other in no order.

    Args:
        backend: carries the messages.
        call: the collective.

    Returns:
        The handle; its wait puts the results in place.

    Raises:
        ArgumentError: the reduction is none of torch's eight plain ones.
    """
    if call.op is not None:
        check_reduction(call.op)
    group, me = call.group, call.group.rank()
    given = group.given if isinstance(group, OpaqueGroup) else group
    others = [rank for rank in range(group.size()) if rank != me]
    incoming = [_places_for(call, rank) for rank in range(group.size())]
    landed = [
        (place, for_sending(tensor).clone())
        for tensor, place in zip(_gifts_to(call, me), incoming[me], strict=True)
    ]
    works = []
    for rank in others:
        for place in incoming[rank]:
            buffer = for_receiving(place)
            works.append(backend.irecv(buffer.view(-1), group.ranks[rank], given, FALLBACK_TAG))
            if buffer is not place:
                landed.append((place, buffer))
    gifts = [(tensor, group.ranks[rank]) for rank in others for tensor in _gifts_to(call, rank)]
    works += [
        backend.isend(for_sending(tensor).view(-1), rank, given, FALLBACK_TAG)
        for tensor, rank in gifts
    ]

    def finish() -> None:
        for place, value in landed:
            place.copy_(value.view_as(place))
        if call.op is not None:
            # none where this is not the root
            for output, parts in zip(call.outputs, zip(*incoming, strict=True), strict=False):
                output.copy_(reduce_parts(parts, call.op).view_as(output))

    return Handle(works, finish, call.results)


def _gifts_to(call: Call, rank: int) -> Sequence[torch.Tensor]:
    """Returns the tensors that this rank gives to a rank of the group, itself included."""
    match call.collective.family:
        case "broadcast":
            return call.inputs if call.group.rank() == call.root else ()
        case "reduce" | "gather":
            return call.inputs if rank == call.root else ()
        case "scatter":
            return (call.inputs[rank],) if call.group.rank() == call.root else ()
        case "all_reduce" | "all_gather":
            return call.inputs
        case "reduce_scatter" | "all_to_all":
            return (call.inputs[rank],)
    return (torch.zeros(1, dtype=torch.int32),)  # a barrier


def _places_for(call: Call, rank: int) -> Sequence[torch.Tensor]:
    """Returns where that goes which a rank of the group gives to this one.

    A buffer where it is to be reduced.
    """
    match call.collective.family:
        case "broadcast" | "scatter":
            return call.outputs if rank == call.root else ()
        case "gather" | "all_gather":
            count = len(call.inputs)
            return call.outputs[rank * count : (rank + 1) * count]
        case "all_to_all":
            return (call.outputs[rank],)
        case "reduce":
            return _empty(call.outputs) if call.group.rank() == call.root else ()
        case "all_reduce" | "reduce_scatter":
            return _empty(call.outputs)
    return (torch.zeros(1, dtype=torch.int32),)


def _empty(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def monitored_barrier(
    backend: Backend, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """``monitored_barrier``: every rank reports to the first, which answers all.

    Raises:
        RingError: on the first rank, a rank did not come in time; with ``wait_all_ranks`` the
            message names all of them.
    """
    members = backend.enter("monitored_barrier", group)
    if members is None:
        return
    head, *others = members.ranks

    def report(rank: int) -> Any:
        return backend.isend(torch.zeros(1, dtype=torch.int32), rank, group, FALLBACK_TAG)

    def listen(rank: int) -> Any:
        return backend.irecv(torch.zeros(1, dtype=torch.int32), rank, group, FALLBACK_TAG)

    if members.rank() > 0:
        Handle([report(head), listen(head)]).wait(timeout)
        return
    missing: dict[int, Exception] = {}
    for rank, work in [(rank, listen(rank)) for rank in others]:
        try:
            Handle([work]).wait(timeout)
        except (RuntimeError, OSError, RingError) as error:
            missing[rank] = error
            if not wait_all_ranks:
                break
    if missing:
        raise RingError(
            f"all ranks must reach monitored_barrier, got none of ranks {list(missing)} in time. "
            "Look where they are."
        ) from next(iter(missing.values()))
    Handle([report(rank) for rank in others]).wait(timeout)


# -- messages and groups


def send(
    backend: Backend,
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """``send`` from ``isend``."""
    work = backend.isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    backend: Backend,
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """``recv`` from ``irecv``; returns the sender's global rank, -1 outside the group."""
    work = backend.irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    if src is not None:
        return src
    return backend.get_process_group_ranks(group)[
        source_of(work) if group_src is None else group_src
    ]


def source_of(work: Any) -> int:
    """Returns the rank within the group that a message came from, by its complete handle."""
    return int(work._source_rank() if hasattr(work, "_source_rank") else work.source_rank())


def batch_isend_irecv(backend: Backend, p2p_op_list: list[Any]) -> list[Any]:
    """``batch_isend_irecv``: one operation after the other."""
    if not p2p_op_list:
        raise ArgumentError(
            f"p2p_op_list must be a list of one P2POp or more, got {p2p_op_list!r}. Make them "
            "with ringsim.comm.P2POp."
        )
    works = [
        getattr(backend, each.op.__name__)(each.tensor, each.peer, each.group, each.tag)
        for each in p2p_op_list
    ]
    return [work for work in works if work is not None]


def new_subgroups_by_enumeration(
    backend: Backend,
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Any = None,
    backend_name: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> tuple[Any, list[Any]]:
    """``new_subgroups_by_enumeration`` from ``new_group``.

    Returns this rank's group, None if it is in none, and all groups.
    """
    del backend_name, pg_options, group_desc
    every = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    if not every or len(set(every)) != len(every):
        raise ArgumentError(
            "ranks_per_subgroup_list must name every rank at most once, got "
            f"{ranks_per_subgroup_list!r}. Part them."
        )
    groups = [backend.new_group(list(ranks), timeout) for ranks in ranks_per_subgroup_list]
    rank = backend.get_rank()
    own = next(
        (
            group
            for group, ranks in zip(groups, ranks_per_subgroup_list, strict=True)
            if rank in ranks
        ),
        None,
    )
    return own, groups


def new_subgroups(
    backend: Backend,
    group_size: int | None = None,
    group: Any = None,
    timeout: Any = None,
    backend_name: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> tuple[Any, list[Any]]:
    """``new_subgroups`` from ``new_group``.

    Neighbours of ``group_size`` each (which must be given: there are no GPUs to count).
    """
    del backend_name, pg_options, group_desc
    ranks = backend.get_process_group_ranks(group)
    if not group_size or len(ranks) % group_size:
        raise ArgumentError(
            f"group_size must divide the {len(ranks)} ranks, got {group_size!r} (new_subgroups). "
            "Say how many belong together."
        )
    return new_subgroups_by_enumeration(
        backend, [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)], timeout
    )


def find_own(backend: Backend, op: str) -> Callable[..., Any] | None:
    """Returns the backend's own operation of that name, or of another spelling of it.

    None where it has none.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.
    """
    if backend.supports(op):
        return getattr(backend, op)  # type: ignore[no-any-return]  # named at run time
    spellings = READINGS[op].names if op in READINGS else ()
    return next((getattr(backend, name) for name in spellings if backend.supports(name)), None)


def _collective(name: str) -> Callable[..., Any]:
    """Returns the function that does a collective by messages: like torch's, after the backend."""

    def by_messages(backend: Backend, *args: Any, **kwargs: Any) -> Handle | None:
        handle: Handle | None = run_collective(backend, built, name, *args, **kwargs)
        return handle

    parameters = [
        inspect.Parameter("backend", inspect.Parameter.POSITIONAL_ONLY),
        *READINGS[name].signature.parameters.values(),
    ]
    doc = f"``{name}`` by messages; the arguments are torch's."
    # what it was given
    return name_function(by_messages, name, doc, inspect.Signature(parameters))  # type: ignore[no-any-return]


# by name: functions of a backend and torch's arguments
BUILT: Final[dict[str, Callable[..., Any]]] = {
    **{name: _collective(name) for name in READINGS},
    "send": send,
    "recv": recv,
    "batch_isend_irecv": batch_isend_irecv,
    "monitored_barrier": monitored_barrier,
    "new_subgroups": new_subgroups,
    "new_subgroups_by_enumeration": new_subgroups_by_enumeration,
}
