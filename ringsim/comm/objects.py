"""Python objects as the bytes that travel in their place.

Object forms: a pickled object travels as two messages, its size and its bytes.

Every member calls, in the same order; they block. As with torch's own, unpickling runs what the sender says: use them among ranks that
trust each other, or with ``weights_only`` (torch 2.15), which carries plain data only. ``device`` is where the bytes lie on their way.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import torch

from ringsim.comm.backend import FALLBACK_TAG, Backend
from ringsim.comm.built import Handle, Member, wait_for_source
from ringsim.errors import ArgumentError

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "pack",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "unpack",
]


BUILT: Final = (  # the operations on objects that can be built
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list", "send_object_list"),
)


def pack(value: Any, weights_only: bool) -> bytes:
    """Returns an object as bytes: pickled, or with ``weights_only`` as ``torch.save`` writes it."""
    if not weights_only:
        return pickle.dumps(value)
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes, weights_only: bool) -> Any:
    """Returns the object that ``pack`` packed.

    Example:
        >>> unpack(pack({"step": 3}, weights_only=False), weights_only=False)
        {'step': 3}
    """
    return torch.load(io.BytesIO(packed), weights_only=True) if weights_only else pickle.loads(packed)


def _copy(value: Any, weights_only: bool) -> Any:
    """Returns what a rank receives that sends an object to itself."""
    return unpack(pack(value, weights_only), weights_only)


def _post(member: Member, value: Any, rank: int, weights_only: bool, device: Any = None) -> list[Any]:
    """Begins to send an object to a member; returns the handles."""
    payload = torch.frombuffer(bytearray(pack(value, weights_only)), dtype=torch.uint8).to(device or "cpu")
    size = torch.tensor([payload.numel()], dtype=torch.int64, device=payload.device)
    return [member.send(size, rank), member.send(payload, rank)]


def _take(member: Member, rank: int, weights_only: bool, device: Any = None) -> Any:
    """Receives an object from a member."""
    size = torch.empty(1, dtype=torch.int64, device=device)
    member.recv(size, rank).wait()
    return _take_payload(member, rank, size, weights_only)


def _take_payload(member: Member, rank: int, size: torch.Tensor, weights_only: bool) -> Any:
    """Receives an object whose size has come."""
    payload = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    member.recv(payload, rank).wait()
    return unpack(payload.cpu().numpy().tobytes(), weights_only)


def _wait(works: list[Any]) -> None:
    Handle(works, lambda: None).wait()


def all_gather_object(backend: Backend, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """``all_gather_object``: everyone sends to everyone."""
    member = Member(backend, group, "all_gather_object")
    if member.rank < 0:
        return
    member.check_list(object_list, "object_list")
    works = [work for rank in member.others for work in _post(member, obj, rank, weights_only)]
    for rank in range(member.size):
        object_list[rank] = _copy(obj, weights_only) if rank == member.rank else _take(member, rank, weights_only)
    _wait(works)


def gather_object(
    backend: Backend,
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """``gather_object``: everyone sends to the destination."""
    member = Member(backend, group, "gather_object")
    if member.rank < 0:
        return
    root = member.root(dst, group_dst, "dst", default=0)
    if member.rank != root:
        _wait(_post(member, obj, root, weights_only))
        return
    member.check_list(object_gather_list, "object_gather_list")
    for rank in range(member.size):
        # It is a list: check_list has raised otherwise.
        object_gather_list[rank] = _copy(obj, weights_only) if rank == root else _take(member, rank, weights_only)  # type: ignore[index]


def scatter_object_list(
    backend: Backend,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """``scatter_object_list``: the source sends to each."""
    member = Member(backend, group, "scatter_object_list")
    if member.rank < 0:
        return
    if not scatter_object_output_list:
        raise ArgumentError(
            f"scatter_object_output_list must be a list with a place for the object, got {scatter_object_output_list!r}. Use [None]."
        )
    root = member.root(src, group_src, "src", default=0)
    if member.rank != root:
        scatter_object_output_list[0] = _take(member, root, weights_only)
        return
    values = member.check_list(scatter_object_input_list, "scatter_object_input_list")
    works = [work for rank in member.others for work in _post(member, values[rank], rank, weights_only)]
    scatter_object_output_list[0] = _copy(values[root], weights_only)
    _wait(works)


def broadcast_object_list(
    backend: Backend,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """``broadcast_object_list``: the source sends the list to each."""
    member = Member(backend, group, "broadcast_object_list")
    if member.rank < 0:
        return
    root = member.root(src, group_src, "src", default=0)
    if member.rank == root:
        _wait([work for rank in member.others for work in _post(member, object_list, rank, weights_only, device)])
        return
    _fill(object_list, _take(member, root, weights_only, device))


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
    """``send_object_list``: the list as one object. ``use_batch`` means nothing here."""
    del use_batch
    member = Member(backend, group, "send_object_list")
    if member.rank >= 0:
        _wait(_post(member, object_list, member.root(dst, group_dst, "dst"), weights_only, device))


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
    """``recv_object_list``; returns the sender's global rank, -1 outside the group. ``use_batch`` means nothing here."""
    del use_batch
    member = Member(backend, group, "recv_object_list")
    if member.rank < 0:
        return -1
    if src is not None or group_src is not None:
        root = member.root(src, group_src, "src")
        _fill(object_list, _take(member, root, weights_only, device))
        return member.ranks[root]
    size = torch.empty(1, dtype=torch.int64, device=device)
    work = backend.irecv(size, None, group, FALLBACK_TAG)
    work.wait()
    source = wait_for_source(backend, work, None, group, None)
    _fill(object_list, _take_payload(member, member.ranks.index(source), size, weights_only))
    return source


def _fill(object_list: list[Any], values: list[Any]) -> None:
    """Puts what has come into the receiver's list."""
    if len(object_list) != len(values):
        raise ArgumentError(
            f"object_list must have {len(values)} places as the sender's has, got {len(object_list)}. Use [None] * {len(values)}."
        )
    object_list[:] = values
