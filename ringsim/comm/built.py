"""How a rank adds up what the others have sent: in the order of the ranks, so that every rank gets the same bits.

The handle of an operation that is made of several others.

A rank as a member of a group: what the fallbacks ask of a backend.

Point-to-point operations, barriers and groups, built from those that every backend has.

Collectives on tensors, built from other collectives where the backend has one that does, else from ``isend`` and ``irecv``.

Every member calls, in the same order, as with the native operation. All messages of an operation are posted before it waits for any, so
no order of ranks can block; with ``async_op`` the handle does the rest in ``wait``. Outside the group they do nothing and return None.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from ringsim.comm.backend import FALLBACK_TAG, Backend
from ringsim.errors import ArgumentError, RingError
from ringsim.state import get_state
from ringsim.traces.events import ERROR
from ringsim.traces.recorder import Recorder

__all__ = [
    "Handle",
    "Member",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "check_reduction",
    "find_refusal",
    "gather",
    "gather_single",
    "monitored_barrier",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "reduce",
    "reduce_parts",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
    "wait_for_source",
]

BUILT: Final = (  # the operations that can be built
    *("all_gather", "all_gather_coalesced", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "gather", "gather_single", "monitored_barrier", "new_subgroups"),
    *("new_subgroups_by_enumeration", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter", "send"),
)
_STEPS: Final[tuple[tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...]] = (
    (ReduceOp.SUM, torch.add),
    (ReduceOp.AVG, torch.add),
    (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.MIN, torch.minimum),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
)
_OF_COMPLEX: Final = ("SUM", "AVG")  # torch.distributed sums complex numbers as pairs of real ones


def check_reduction(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the function of two tensors that an operation repeats.

    Raises:
        ArgumentError: the operation is none of torch's eight plain ones.
    """
    for known, step in _STEPS:
        if op == known:
            return step
    names = ", ".join(str(known).rpartition(".")[2] for known, _ in _STEPS)
    raise ArgumentError(f"op must be one of {names} where ringsim.comm adds up itself, got {op}. Use one of these, or another backend.")


@functools.cache
def find_refusal(dtype: torch.dtype, how: str) -> str:
    """Returns why torch does not reduce tensors of a dtype in a way, "" where it does: it is asked to do so with one number.

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
    """Combines tensors of one shape, the first with the second, the result with the third, and so on.

    A sum of floats depends on its order: that of a ring or a tree differs in the last bits. All else is exact.

    Args:
        parts: one tensor of each rank, in order.
        op: one of ``ReduceOp``; AVG divides the sum by how many there are, whole numbers towards zero.

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
    """Stands for several operations that are under way, and for what is left to do once they are complete.

    Args:
        works: handles of the operations; None among them is passed over.
        finish: what is left to do then, once (copy to where the results belong, add up).
        results: the tensors that hold the result.

    Example:
        >>> done = Handle([], lambda: print("finished"))
        >>> done.wait(), done.is_completed()
        finished
        (True, True)
    """

    def __init__(self, works: Iterable[Any], finish: Callable[[], None], results: Iterable[torch.Tensor] = ()) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], None] | None = finish
        self._results = list(results)
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        self._slots: list[int] = []  # records, besides those of the operations, that the wait completes

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Has the wait complete the record at ``slot``; False where it is over."""
        with self._lock:
            if self._finish is None:
                return False
            self._recorder = recorder
            self._slots.append(slot)
            return True

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operations are complete and the results are in place; the second time it returns at once.

        Args:
            timeout: limit for each operation, as its backend takes it (torch: a ``timedelta``); None for the group's own.

        Returns:
            True.
        """
        with self._lock:
            recorder = self._recorder if self._recorder is get_state().recorder else None
            if recorder is None:
                self._wait(timeout)
                return True
            for slot in self._slots:
                recorder.wait(slot)
            try:
                self._wait(timeout)
            except BaseException:
                for slot in self._slots:
                    recorder.complete(slot, ERROR)
                raise
            for slot in self._slots:
                recorder.complete(slot)
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


class Member:
    """This rank within one group of one backend. Ranks here count within the group.

    Args:
        backend: what carries the messages.
        group: the group, None for all ranks.
        op: the operation that is built, for errors.

    Attributes:
        ranks: the global ranks of the group, in order.
        rank: this rank, -1 outside the group.
    """

    def __init__(self, backend: Backend, group: Any, op: str) -> None:
        self.backend = backend
        self.group = group
        self.op = op
        self.rank = backend.get_rank(group)
        self.ranks = backend.get_process_group_ranks(group) if self.rank >= 0 else []
        self.others = [rank for rank in range(len(self.ranks)) if rank != self.rank]

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def native(self, *ops: str) -> tuple[str, Callable[..., Any]] | None:
        """Returns the first of ``ops`` that the backend itself has, None if it has none of them."""
        return next(((op, getattr(self.backend, op)) for op in ops if op != self.op and self.backend.supports(op)), None)

    def root(self, rank: int | None, group_rank: int | None, name: str, default: int | None = None) -> int:
        """Returns the rank that an operation starts or ends at, within the group.

        Args:
            rank: as the caller gave it, global.
            group_rank: or within the group.
            name: of the argument, for errors.
            default: the global rank if neither is given.

        Raises:
            ArgumentError: neither or both are given, or it is no member.
        """
        if rank is not None and group_rank is not None:
            raise ArgumentError(f"{name} must be given once, got {name}={rank} and group_{name}={group_rank} ({self.op}). Leave one out.")
        if group_rank is None:
            rank = default if rank is None else rank
            if rank not in self.ranks:
                raise ArgumentError(f"{name} must be one of {self.ranks}, got {rank!r} ({self.op}). Name a global rank of the group.")
            return self.ranks.index(rank)
        if not 0 <= group_rank < self.size:
            raise ArgumentError(f"group_{name} must be in 0..{self.size - 1}, got {group_rank!r} ({self.op}). Name a rank of the group.")
        return group_rank

    def check_list(self, tensors: Sequence[Any] | None, name: str) -> list[Any]:
        """Returns ``tensors`` as a list, which must have one entry for each rank."""
        found = list(tensors or ())
        if len(found) != self.size:
            raise ArgumentError(f"{name} must have one entry for each of {self.size} ranks, got {len(found)} ({self.op}). Fill it up.")
        return found

    def check_tensor(self, tensor: Any, name: str, like: torch.Tensor | None = None) -> None:
        """Raises unless ``tensor`` is one, with the dtype and as many elements as ``like``."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {tensor!r} ({self.op}). Pass a tensor.")
        if like is not None and (tensor.dtype, tensor.numel()) != (like.dtype, like.numel()):
            raise ArgumentError(
                f"{name} must have the dtype and size of what it goes with, {tuple(like.shape)} {like.dtype}, got {tuple(tensor.shape)} "
                f"{tensor.dtype} ({self.op}). Make them alike."
            )

    def check_tensors(self, tensors: Sequence[Any] | None, name: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Returns ``tensors`` as a list, which must have a tensor for each rank, all of one dtype."""
        found = self.check_list(tensors, name)
        for tensor in found:
            self.check_tensor(tensor, name)
            if tensor.dtype != (dtype or found[0].dtype):
                raise ArgumentError(
                    f"{name} must have one dtype, {dtype or found[0].dtype}, got {tensor.dtype} ({self.op}). Make them alike."
                )
        return found

    def send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begins to send to another member; returns the handle."""
        return self.backend.isend(tensor.detach().contiguous(), self.ranks[rank], self.group, FALLBACK_TAG)

    def recv(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begins to receive from another member into a contiguous tensor; returns the handle."""
        return self.backend.irecv(tensor, self.ranks[rank], self.group, FALLBACK_TAG)

    def recv_into(self, tensor: torch.Tensor, rank: int) -> tuple[Any, Callable[[], Any]]:
        """Begins to receive into any tensor; returns the handle, and what puts the message in place once it has come."""
        if tensor.is_contiguous():
            return self.recv(tensor, rank), _nothing
        buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return self.recv(buffer, rank), lambda: tensor.copy_(buffer)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[[], None]]:
        """Begins to send ``outgoing[i]`` to rank i and to receive ``incoming[i]`` from it; what is for oneself is copied later.

        Returns:
            The handles, and what puts the results in place once they are complete.
        """
        own = outgoing[self.rank].detach().clone()  # before anything comes in: the two lists may share memory
        received = [self.recv_into(incoming[rank], rank) for rank in self.others]
        works = [work for work, _ in received] + [self.send(outgoing[rank], rank) for rank in self.others]

        def finish() -> None:
            for _, place in received:
                place()
            incoming[self.rank].copy_(own.view_as(incoming[self.rank]))

        return works, finish

    def share(self, tensor: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """Begins to show a tensor to all members; returns the handles, and the tensors of all, filled once they are complete.

        By ``all_gather`` where the backend has it, else by messages.
        """
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in self.ranks]
        native = self.native("all_gather")
        if native:
            return [native[1](parts, own, self.group, True)], parts
        parts[self.rank] = own.clone()
        works = [self.recv(parts[rank], rank) for rank in self.others] + [self.send(own, rank) for rank in self.others]
        return works, parts

    @staticmethod
    def end(works: Sequence[Any], finish: Callable[[], Any], results: Sequence[torch.Tensor], async_op: bool) -> Handle | None:
        """Returns a handle for an asynchronous operation; waits for another."""
        handle = Handle(works, finish, results)
        if async_op:
            return handle
        handle.wait()
        return None


def _nothing() -> None:
    """The message is in its place already."""


def send(
    backend: Backend, tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """``send`` from ``isend``."""
    work = backend.isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    backend: Backend, tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> int:
    """``recv`` from ``irecv``; returns the sender's global rank, -1 outside the group."""
    work = backend.irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    return wait_for_source(backend, work, src, group, group_src)


def wait_for_source(backend: Backend, work: Any, src: int | None, group: Any, group_src: int | None) -> int:
    """Returns the global rank that a message came from, given the handle, which is complete, and what the caller asked for."""
    if src is not None:
        return src
    if group_src is None:
        group_src = work._source_rank() if hasattr(work, "_source_rank") else work.source_rank()
    return backend.get_process_group_ranks(group)[group_src]


def batch_isend_irecv(backend: Backend, p2p_op_list: list[Any]) -> list[Any]:
    """``batch_isend_irecv``: one operation after the other."""
    if not p2p_op_list:
        raise ArgumentError(f"p2p_op_list must be a list of one P2POp or more, got {p2p_op_list!r}. Make them with ringsim.comm.P2POp.")
    works = [getattr(backend, each.op.__name__)(each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]
    return [work for work in works if work is not None]


def barrier(backend: Backend, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Handle | None:
    """``barrier``: every rank shows a number to every other. ``device_ids`` means nothing here, ``timeout`` limits each message."""
    del device_ids
    member = Member(backend, group, "barrier")
    if member.rank < 0:
        return None
    native = member.native("all_reduce")
    token = torch.zeros(1, dtype=torch.int32)
    if native:
        works = [native[1](token, torch.distributed.ReduceOp.SUM, group, True)]
    else:
        works, _ = member.share(token)
    handle = Handle(works, lambda: None)
    if async_op:
        return handle
    handle.wait(timeout)
    return None


def monitored_barrier(backend: Backend, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """``monitored_barrier``: every rank reports to the first, which answers all.

    Raises:
        RingError: on the first rank, a rank did not come in time; with ``wait_all_ranks`` the message names all of them.
    """
    member = Member(backend, group, "monitored_barrier")
    if member.rank < 0:
        return
    token = torch.zeros(1, dtype=torch.int32)
    if member.rank > 0:
        Handle([member.send(token, 0), member.recv(torch.zeros_like(token), 0)], lambda: None).wait(timeout)
        return
    missing = []
    for rank, work in [(rank, member.recv(torch.zeros_like(token), rank)) for rank in member.others]:
        try:
            Handle([work], lambda: None).wait(timeout)
        except (RuntimeError, OSError, RingError) as error:
            missing.append((member.ranks[rank], error))
            if not wait_all_ranks:
                break
    if missing:
        ranks = [rank for rank, _ in missing]
        raise RingError(f"all ranks must reach monitored_barrier, got none of ranks {ranks} in time. Look where they are.") from missing[0][
            1
        ]
    Handle([member.send(token, rank) for rank in member.others], lambda: None).wait(timeout)


def new_subgroups_by_enumeration(
    backend: Backend,
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Any = None,
    backend_name: Any = None,
    pg_options: Any = None,
    group_desc: Any = None,
) -> tuple[Any, list[Any]]:
    """``new_subgroups_by_enumeration`` from ``new_group``; returns this rank's group, None if it is in none, and all groups."""
    del backend_name, pg_options, group_desc
    every = [rank for ranks in ranks_per_subgroup_list for rank in ranks]
    if not every or len(set(every)) != len(every):
        raise ArgumentError(f"ranks_per_subgroup_list must name every rank at most once, got {ranks_per_subgroup_list!r}. Part them.")
    groups = [backend.new_group(list(ranks), timeout) for ranks in ranks_per_subgroup_list]
    rank = backend.get_rank()
    own = next((group for group, ranks in zip(groups, ranks_per_subgroup_list, strict=True) if rank in ranks), None)
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
    """``new_subgroups`` from ``new_group``: neighbours of ``group_size`` each (which must be given: there are no GPUs to count)."""
    del backend_name, pg_options, group_desc
    ranks = backend.get_process_group_ranks(group)
    if not group_size or len(ranks) % group_size:
        raise ArgumentError(
            f"group_size must divide the {len(ranks)} ranks, got {group_size!r} (new_subgroups). Say how many belong together."
        )
    return new_subgroups_by_enumeration(backend, [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)], timeout)


_SUM: Any = ReduceOp.SUM
Tensors = Sequence[torch.Tensor]


def broadcast(
    backend: Backend,
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """``broadcast``: the source sends to each."""
    member = Member(backend, group, "broadcast")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(src, group_src, "src")
    if member.rank == root:
        return member.end([member.send(tensor, rank) for rank in member.others], _nothing, [tensor], async_op)
    work, place = member.recv_into(tensor, root)
    return member.end([work], place, [tensor], async_op)


def all_reduce(backend: Backend, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_reduce``: everyone shows its tensor to everyone, and adds up."""
    member = Member(backend, group, "all_reduce")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    check_reduction(op)
    works, parts = member.share(tensor)
    return member.end(works, lambda: tensor.copy_(reduce_parts(parts, op)), [tensor], async_op)


def all_reduce_coalesced(backend: Backend, tensors: Tensors, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_reduce_coalesced``: one after the other."""
    member = Member(backend, group, "all_reduce_coalesced")
    if member.rank < 0:
        return None
    native = member.native("all_reduce")
    if native is None:
        return member.end([all_reduce(backend, tensor, op, group, True) for tensor in tensors], _nothing, tensors, async_op)
    buffers = [tensor.contiguous() for tensor in tensors]  # Gloo adds up strided tensors wrongly (torch 2.13)

    def finish() -> None:
        for tensor, buffer in zip(tensors, buffers, strict=True):
            tensor.copy_(buffer)

    return member.end([native[1](buffer, op, group, True) for buffer in buffers], finish, tensors, async_op)


def reduce(
    backend: Backend,
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``reduce``: everyone sends to the destination, which adds up. Elsewhere ``tensor`` stays as it is."""
    member = Member(backend, group, "reduce")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    check_reduction(op)
    root = member.root(dst, group_dst, "dst")
    if member.rank != root:
        return member.end([member.send(tensor, root)], _nothing, [tensor], async_op)
    own = tensor.detach().contiguous()
    parts = [own if rank == root else torch.empty_like(own) for rank in range(member.size)]
    works = [member.recv(parts[rank], rank) for rank in member.others]
    return member.end(works, lambda: tensor.copy_(reduce_parts(parts, op)), [tensor], async_op)


def all_gather(backend: Backend, tensor_list: Tensors, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_gather``: everyone sends to everyone; through one large tensor where the backend has that."""
    member = Member(backend, group, "all_gather")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    outputs = member.check_tensors(tensor_list, "tensor_list", tensor.dtype)
    member.check_tensor(outputs[member.rank], "tensor_list", tensor)
    native = member.native("all_gather_single", "all_gather_into_tensor")
    if native and len({output.shape for output in outputs}) == 1:
        flat = torch.empty(member.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        work = native[1](flat, tensor.detach().reshape(-1), group, True)
        return member.end([work], lambda: _spread(flat, outputs), outputs, async_op)
    works, finish = member.exchange([tensor] * member.size, outputs)
    return member.end(works, finish, outputs, async_op)


def all_gather_single(
    backend: Backend, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_gather_single`` and ``all_gather_into_tensor``: ``all_gather`` into parts of the output."""
    member = Member(backend, group, "all_gather_single")
    if member.rank < 0:
        return None
    _check_shards(member, output_tensor, input_tensor, "output_tensor", "input_tensor")
    works, parts = member.share(input_tensor)
    return member.end(works, lambda: _join(parts, output_tensor), [output_tensor], async_op)


def all_gather_coalesced(
    backend: Backend, output_tensor_lists: Sequence[Tensors], input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_gather_coalesced``: one after the other. ``output_tensor_lists[rank][i]`` takes input i of a rank, as in torch."""
    member = Member(backend, group, "all_gather_coalesced")
    if member.rank < 0:
        return None
    native = member.native("all_gather")
    works, results = [], []
    for place, tensor in enumerate(input_tensor_list):
        outputs = [outputs[place] for outputs in member.check_list(output_tensor_lists, "output_tensor_lists")]
        works.append(native[1](outputs, tensor, group, True) if native else all_gather(backend, outputs, tensor, group, True))
        results += outputs
    return member.end(works, _nothing, results, async_op)


def gather(
    backend: Backend,
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``gather``: everyone sends to the destination."""
    member = Member(backend, group, "gather")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(dst, group_dst, "dst", default=0)
    if member.rank != root:
        return member.end([member.send(tensor, root)], _nothing, [], async_op)
    outputs = member.check_tensors(gather_list, "gather_list", tensor.dtype)
    member.check_tensor(outputs[root], "gather_list", tensor)
    received = [member.recv_into(outputs[rank], rank) for rank in member.others]
    own = tensor.detach().clone()

    def finish() -> None:
        for _, place in received:
            place()
        outputs[root].copy_(own)

    return member.end([work for work, _ in received], finish, outputs, async_op)


def gather_single(
    backend: Backend,
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``gather_single`` and ``gather_into_tensor`` (torch 2.15): as ``gather``, into parts of one tensor."""
    member = Member(backend, group, "gather_single")
    if member.rank < 0:
        return None
    root = member.root(dst, group_dst, "dst", default=0)
    own = tensor.detach().contiguous()
    parts = [torch.empty_like(own) for _ in member.ranks]
    if member.rank == root:
        if gather_tensor is None:
            raise ArgumentError("gather_tensor must be given on the destination rank, got None (gather_single). Make one for all parts.")
        _check_shards(member, gather_tensor, tensor, "gather_tensor", "tensor")
    finish = _nothing if member.rank != root or gather_tensor is None else lambda: _join(parts, gather_tensor)
    native = member.native("gather")
    if native:
        works = [native[1](own, parts if member.rank == root else None, None, group, True, root)]
    elif member.rank == root:
        parts[root] = own.clone()
        works = [member.recv(parts[rank], rank) for rank in member.others]
    else:
        works = [member.send(own, root)]
    return member.end(works, finish, [] if gather_tensor is None else [gather_tensor], async_op)


def scatter(
    backend: Backend,
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """``scatter``: the source sends to each."""
    member = Member(backend, group, "scatter")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(src, group_src, "src", default=0)
    if member.rank != root:
        work, place = member.recv_into(tensor, root)
        return member.end([work], place, [tensor], async_op)
    inputs = member.check_tensors(scatter_list, "scatter_list", tensor.dtype)
    member.check_tensor(inputs[root], "scatter_list", tensor)
    works = [member.send(inputs[rank], rank) for rank in member.others]
    return member.end(works, lambda: tensor.copy_(inputs[root]), [tensor], async_op)


def reduce_scatter(
    backend: Backend, output: torch.Tensor, input_list: Tensors, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``reduce_scatter``: everyone sends to each its part, which adds up."""
    member = Member(backend, group, "reduce_scatter")
    if member.rank < 0:
        return None
    member.check_tensor(output, "output")
    inputs = member.check_tensors(input_list, "input_list", output.dtype)
    member.check_tensor(inputs[member.rank], "input_list", output)
    return _reduce_parts_of_all(member, output, inputs, op, async_op)


def reduce_scatter_single(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Handle | None:
    """``reduce_scatter_single`` and ``reduce_scatter_tensor``: from ``reduce_scatter``, else as that is."""
    member = Member(backend, group, "reduce_scatter_single")
    if member.rank < 0:
        return None
    _check_shards(member, input, output, "input", "output")
    parts = [part.view_as(output) for part in input.detach().reshape(-1).chunk(member.size)] if output.numel() else [output] * member.size
    native = member.native("reduce_scatter")
    if native:
        buffer = torch.empty_like(output, memory_format=torch.contiguous_format)
        return member.end([native[1](buffer, parts, op, group, True)], lambda: output.copy_(buffer), [output], async_op)
    return _reduce_parts_of_all(member, output, parts, op, async_op)


def _reduce_parts_of_all(member: Member, output: torch.Tensor, inputs: Tensors, op: Any, async_op: bool) -> Handle | None:
    """By messages: the members that have nothing for me send zeros, too."""
    check_reduction(op)
    incoming = [torch.empty_like(inputs[member.rank], memory_format=torch.contiguous_format) for _ in range(member.size)]
    works, place = member.exchange(inputs, incoming)

    def finish() -> None:
        place()
        output.copy_(reduce_parts(incoming, op))

    return member.end(works, finish, [output], async_op)


def all_to_all(
    backend: Backend, output_tensor_list: Tensors, input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_to_all``: a message for every pair of ranks."""
    member = Member(backend, group, "all_to_all")
    if member.rank < 0:
        return None
    outputs = member.check_tensors(output_tensor_list, "output_tensor_list")
    inputs = member.check_tensors(input_tensor_list, "input_tensor_list", outputs[0].dtype)
    member.check_tensor(inputs[member.rank], "input_tensor_list", outputs[member.rank])
    works, finish = member.exchange(inputs, outputs)
    return member.end(works, finish, outputs, async_op)


def all_to_all_single(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Handle | None:
    """``all_to_all_single``: ``all_to_all`` of parts along the first dimension."""
    member = Member(backend, group, "all_to_all_single")
    if member.rank < 0:
        return None
    inputs = member.check_tensors(_split(member, input, input_split_sizes, "input_split_sizes"), "input")
    outputs = member.check_tensors(_split(member, output, output_split_sizes, "output_split_sizes"), "output", input.dtype)
    member.check_tensor(inputs[member.rank], "input", outputs[member.rank])
    works, finish = member.exchange(inputs, outputs)
    return member.end(works, finish, [output], async_op)


def _split(member: Member, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str) -> Tensors:
    """Cuts a tensor along its first dimension, one piece for each rank."""
    member.check_tensor(tensor, name.partition("_")[0])
    rows = len(tensor)
    if not sizes:
        if rows % member.size:
            raise ArgumentError(
                f"{name} must be given where {member.size} ranks do not divide {rows} rows, got None. Say who gets how many."
            )
        sizes = [rows // member.size] * member.size
    if len(sizes) != member.size or sum(sizes) != rows:
        raise ArgumentError(f"{name} must be {member.size} numbers that add up to {rows}, got {list(sizes)}. Count the rows.")
    return torch.split(tensor, list(sizes))


def _check_shards(member: Member, whole: torch.Tensor, shard: torch.Tensor, whole_name: str, shard_name: str) -> None:
    member.check_tensor(whole, whole_name)
    member.check_tensor(shard, shard_name)
    if whole.numel() != member.size * shard.numel() or whole.dtype != shard.dtype:
        raise ArgumentError(
            f"{whole_name} must be {member.size} times as large as {shard_name} and of its dtype, got {tuple(whole.shape)} {whole.dtype} "
            f"and {tuple(shard.shape)} {shard.dtype} ({member.op}). Make it so."
        )


def _join(parts: Tensors, output: torch.Tensor) -> None:
    """Puts the parts of all ranks one after the other into ``output``, whatever its shape."""
    output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))


def _spread(flat: torch.Tensor, outputs: Tensors) -> None:
    """Puts the equal pieces of ``flat`` into ``outputs``, in order."""
    for place, output in enumerate(outputs):
        count = output.numel()
        output.copy_(flat[place * count : (place + 1) * count].view(output.shape))
