"""Python objects among ranks: packed into bytes, which travel as tensors do.

Operations, sizes and tags are those of torch's own functions: sizes travel first, then bytes, padded to the longest where all ranks give
some. All functions block. As with torch's, unpickling runs what the sender says: use them among ranks that trust each other, or with
``weights_only`` (torch 2.15), which carries plain data only. ``device`` is where the bytes lie on their way.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from ringsim.comm.backend import Backend
from ringsim.comm.built import BUILT, find_own, source_of
from ringsim.comm.collectives import Members, check_list, root_of
from ringsim.errors import ArgumentError
from ringsim.traces.events import OP_CODES

__all__ = ["OBJECTS"]

_SEND, _RECV = OP_CODES["send_object_list"], OP_CODES["recv_object_list"]


class _Carrier:
    """Carries objects on one group of a backend.

    Args:
        backend: carries the tensors.
        group: as the caller gave it.
        device: where tensors are made, None for the CPU whatever the default device is: objects have data.
        weights_only: whether objects are packed by ``torch.save``, not pickled.
    """

    def __init__(self, backend: Backend, group: Any, device: Any, weights_only: bool) -> None:
        self._backend, self._group, self._weights_only = backend, group, weights_only
        self._device = torch.device("cpu" if device is None else device)

    def run(self, op: str, *args: Any) -> None:
        """Runs an operation on tensors; the group comes last."""
        function = find_own(self._backend, op) or partial(BUILT[op], self._backend)
        function(*args, self._group)

    def empty(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a tensor to be filled."""
        return torch.empty(count, dtype=dtype, device=self._device)

    def lengths(self, *lengths: int) -> torch.Tensor:
        """Returns numbers of bytes as a tensor."""
        return torch.tensor(lengths, dtype=torch.int64, device=self._device)

    def pack(self, value: Any) -> torch.Tensor:
        """Returns an object as a tensor of bytes."""
        file = io.BytesIO()
        torch.save(value, file) if self._weights_only else pickle.dump(value, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(self._device, copy=True)

    def unpack(self, data: torch.Tensor, length: int) -> Any:
        """Returns the object in the first ``length`` bytes of a tensor."""
        packed = io.BytesIO(data[:length].cpu().numpy().tobytes())
        return torch.load(packed, weights_only=True) if self._weights_only else pickle.load(packed)

    def pack_all(self, values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lengths of packed objects, shape (objects), and their bytes one after the other."""
        if not isinstance(values, list | tuple) or not values:
            raise ArgumentError(f"object_list must be a list of at least one object, got {values!r}. Put the objects into a list.")
        packed = [self.pack(each) for each in values]
        return self.lengths(*map(len, packed)), torch.cat(packed)

    def receive_all(self, values: list[Any], receive: Callable[[torch.Tensor], Any]) -> None:
        """Fills a list with objects: first their lengths are received, then their bytes."""
        lengths = self.empty(len(values), torch.int64)
        receive(lengths)
        data = self.empty(int(lengths.sum()))
        receive(data)
        values[:] = [self.unpack(piece, len(piece)) for piece in data.split(lengths.tolist())]

    def pad(self, data: torch.Tensor, length: int) -> torch.Tensor:
        """Returns bytes with zeros behind them."""
        return torch.nn.functional.pad(data, (0, length - len(data)))

    def collect(self, value: Any, size: int, target: list[Any] | None, gather: Callable[[torch.Tensor, Any], None]) -> None:
        """Fills ``target`` with everybody's object, by rank; ``gather`` brings the bytes of all where there is one."""
        data, lengths = self.pack(value), self.empty(size, torch.int64)
        self.run("all_gather", list(lengths.split(1)), self.lengths(len(data)))
        longest = int(lengths.max())
        parts = None if target is None else [self.empty(longest) for _ in range(size)]
        gather(self.pad(data, longest), parts)
        if target is not None and parts is not None:
            target[:] = map(self.unpack, parts, lengths.tolist())


def send_object_list(
    backend: Backend,
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Sends objects to one rank. ``use_batch`` changes nothing here."""
    del use_batch
    if backend.enter("send_object_list", group) is None:
        return
    begin: Any = partial(backend.begin_send, op=_SEND) if hasattr(backend, "begin_send") else backend.isend  # recorded as what it is
    for tensor in _Carrier(backend, group, device, weights_only).pack_all(object_list):
        begin(tensor, dst, group, 0, group_dst).wait()


def recv_object_list(
    backend: Backend,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receives as many objects as the list is long, from anybody where no source is given. ``use_batch`` changes nothing here.

    Returns:
        The sender's global rank, -1 outside the group.
    """
    del use_batch
    members = backend.enter("recv_object_list", group)
    if members is None:
        return -1
    begin: Any = partial(backend.begin_recv, op=_RECV) if hasattr(backend, "begin_recv") else backend.irecv
    source: tuple[int | None, int | None] = src, group_src

    def receive(tensor: torch.Tensor) -> None:
        nonlocal source
        handle = begin(tensor, source[0], group, 0, source[1])
        handle.wait()
        source = None, source_of(handle)  # the bytes come from whom the lengths came from

    _Carrier(backend, group, device, weights_only).receive_all(object_list, receive)
    return members.ranks[source[1] or 0]


def broadcast_object_list(
    backend: Backend,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gives all ranks the root's objects. The root is rank 0 where none is given."""
    members = backend.enter("broadcast_object_list", group)
    if members is None:
        return
    carrier = _Carrier(backend, group, device, weights_only)
    root, is_root = _find_root(members, "src", src, group_src)
    if is_root:
        for tensor in carrier.pack_all(object_list):
            carrier.run("broadcast", tensor, root)
    else:
        carrier.receive_all(object_list, lambda tensor: carrier.run("broadcast", tensor, root))


def all_gather_object(backend: Backend, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """Fills each rank's list with everybody's object, by rank."""
    members = backend.enter("all_gather_object", group)
    if members is None:
        return
    check_list(members, "object_list", object_list, members.size())
    carrier = _Carrier(backend, group, None, weights_only)
    carrier.collect(obj, members.size(), object_list, lambda data, parts: carrier.run("all_gather", parts, data))


def gather_object(
    backend: Backend,
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Fills the root's list with everybody's object, by rank. The root is rank 0 where none is given."""
    members = backend.enter("gather_object", group)
    if members is None:
        return
    root, is_root = _find_root(members, "dst", dst, group_dst)
    if is_root:
        check_list(members, "object_gather_list", object_gather_list, members.size())
    carrier, target = _Carrier(backend, group, None, weights_only), object_gather_list if is_root else None
    carrier.collect(obj, members.size(), target, lambda data, parts: carrier.run("gather", data, parts, root))


def scatter_object_list(
    backend: Backend,
    scatter_object_output_list: Any,
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts each rank's object of the root's list first in its own list. The root is rank 0 where none is given."""
    members = backend.enter("scatter_object_list", group)
    if members is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"scatter_object_output_list must be a list with a place for the object, got {scatter_object_output_list!r} "
            f"({members.here()}). Pass [None]."
        )
    root, is_root = _find_root(members, "src", src, group_src)
    carrier = _Carrier(backend, group, None, weights_only)
    pieces: list[torch.Tensor] = []
    longest = carrier.empty(1, torch.int64)
    if is_root:
        values = check_list(members, "scatter_object_input_list", scatter_object_input_list, members.size())
        pieces = [carrier.pack(each) for each in values]
        longest = carrier.lengths(max(map(len, pieces)))
    carrier.run("broadcast", longest, root)
    mine, length = carrier.empty(int(longest)), carrier.empty(1, torch.int64)
    carrier.run("scatter", mine, [carrier.pad(piece, int(longest)) for piece in pieces] or None, root)
    carrier.run("scatter", length, [carrier.lengths(len(piece)) for piece in pieces] or None, root)
    scatter_object_output_list[0] = carrier.unpack(mine, int(length))


def _find_root(members: Members, what: str, global_rank: Any, group_rank: Any) -> tuple[int, bool]:
    """Returns the global rank of a root, and whether this rank is it."""
    root = root_of(members, what, global_rank, group_rank)
    return members.ranks[root], members.rank() == root


OBJECTS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function
    for function in (all_gather_object, broadcast_object_list, gather_object, recv_object_list, scatter_object_list, send_object_list)
}
