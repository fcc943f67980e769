"""Python objects among simulated ranks: the operations, sizes and tags that torch's functions have on real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ringsim.comm.objects import pack, unpack
from ringsim.errors import ArgumentError
from ringsim.simulator import collectives
from ringsim.traces.events import OP_CODES

if TYPE_CHECKING:
    from ringsim.simulator.rank import SimulatedRank

__all__ = ["OBJECTS"]

_SEND, _RECV = OP_CODES["send_object_list"], OP_CODES["recv_object_list"]
_CPU: Final = torch.device("cpu")  # whatever the default device is: objects have data

# As methods of a rank; see torch.distributed for the arguments. First sizes travel, then bytes. They block.


def send_object_list(
    rank: SimulatedRank,
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,  # noqa: ARG001 - torch's signature
    weights_only: bool = False,
) -> None:
    """Sends objects to one rank; ``use_batch`` means nothing here."""
    _check_device(rank, device)
    for tensor in _pack_all(rank, object_list, weights_only):
        rank.begin_send(tensor, dst, group, 0, group_dst, _SEND).wait()


def recv_object_list(
    rank: SimulatedRank,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,  # noqa: ARG001 - torch's signature
    weights_only: bool = False,
) -> int:
    """Receives as many objects as the list is long, from anybody where no source is given; ``use_batch`` means nothing here.

    Returns:
        The sender's global rank.
    """
    _check_device(rank, device)
    sizes = _empty(len(object_list), torch.int64)
    handle = rank.begin_recv(sizes, src, group, 0, group_src, _RECV)
    handle.wait()
    data = _empty(int(sizes.sum()), torch.uint8)
    rank.begin_recv(data, handle.peer, group, 0, None, _RECV).wait()
    object_list[:] = _unpack_all(data, sizes, weights_only)
    return handle.peer


def broadcast_object_list(
    rank: SimulatedRank,
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gives all ranks the root's objects. The root is rank 0 where none is given."""
    found = rank.enter("broadcast_object_list", group)
    if found is None:
        return
    _check_device(rank, device)
    root = rank._root(found, "src", src, group_src)
    if found.rank() == root:
        for tensor in _pack_all(rank, object_list, weights_only):
            collectives.broadcast(rank, tensor, None, group, False, root)
        return
    sizes = _empty(len(object_list), torch.int64)
    collectives.broadcast(rank, sizes, None, group, False, root)
    data = _empty(int(sizes.sum()), torch.uint8)
    collectives.broadcast(rank, data, None, group, False, root)
    object_list[:] = _unpack_all(data, sizes, weights_only)


def all_gather_object(rank: SimulatedRank, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False) -> None:
    """Fills each rank's list with everybody's object, by rank."""
    found = rank.enter("all_gather_object", group)
    if found is None:
        return
    _check_length(rank, "object_list", object_list, found.size())
    data = _to_tensor(pack(obj, weights_only))
    sizes, longest = _exchange_sizes(rank, data, group, found.size())
    parts = _make_parts(found.size(), longest)
    collectives.all_gather(rank, parts, _pad(data, longest), group)
    object_list[:] = [_unpack(part, size, weights_only) for part, size in zip(parts, sizes, strict=True)]


def gather_object(
    rank: SimulatedRank,
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Fills the root's list with everybody's object, by rank. The root is rank 0 where none is given."""
    found = rank.enter("gather_object", group)
    if found is None:
        return
    root = rank._root(found, "dst", dst, group_dst)
    is_root = found.rank() == root
    if is_root:
        _check_length(rank, "object_gather_list", object_gather_list, found.size())
    data = _to_tensor(pack(obj, weights_only))
    sizes, longest = _exchange_sizes(rank, data, group, found.size())
    parts = _make_parts(found.size(), longest) if is_root else None
    collectives.gather(rank, _pad(data, longest), parts, None, group, False, root)
    if parts is not None and object_gather_list is not None:
        object_gather_list[:] = [_unpack(part, size, weights_only) for part, size in zip(parts, sizes, strict=True)]


def scatter_object_list(
    rank: SimulatedRank,
    scatter_object_output_list: Any,
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Puts each rank's object of the root's list into its own. The root is rank 0 where none is given."""
    found = rank.enter("scatter_object_list", group)
    if found is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"scatter_object_output_list must be a list with a place for the object, got {scatter_object_output_list!r} "
            f"({rank.here()}). Use [None]."
        )
    root = rank._root(found, "src", src, group_src)
    pieces: list[Tensor] = []
    longest = _empty(1, torch.int64)
    if found.rank() == root:
        _check_length(rank, "scatter_object_input_list", scatter_object_input_list, found.size())
        pieces = [_to_tensor(pack(each, weights_only)) for each in scatter_object_input_list or ()]
        longest = _tell_sizes([max(len(piece) for piece in pieces)])
    collectives.broadcast(rank, longest, None, group, False, root)
    mine, size = _empty(int(longest), torch.uint8), _empty(1, torch.int64)
    collectives.scatter(rank, mine, [_pad(piece, int(longest)) for piece in pieces], None, group, False, root)
    collectives.scatter(rank, size, [_tell_sizes([len(piece)]) for piece in pieces], None, group, False, root)
    scatter_object_output_list[0] = _unpack(mine, int(size), weights_only)


# -- what they share


def _exchange_sizes(rank: SimulatedRank, data: Tensor, group: Any, count: int) -> tuple[list[int], int]:
    """Returns how many bytes each rank has, and the most."""
    sizes = _empty(count, torch.int64)
    collectives.all_gather(rank, list(sizes.split(1)), _tell_sizes([len(data)]), group)
    return sizes.tolist(), int(sizes.max())


def _pack_all(rank: SimulatedRank, objects: Any, weights_only: bool) -> tuple[Tensor, Tensor]:
    """Returns the sizes of the packed objects, shape (objects), and their bytes, shape (bytes)."""
    if not isinstance(objects, list | tuple) or not objects:
        raise ArgumentError(f"object_list must be a list of at least one object, got {objects!r} ({rank.here()}). Put one into it.")
    packed = [pack(each, weights_only) for each in objects]
    return _tell_sizes([len(each) for each in packed]), _to_tensor(b"".join(packed))


def _check_device(rank: SimulatedRank, device: Any) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ArgumentError(f'device must be "cpu" or None in a simulation, got {device} ({rank.here()}). Leave it out.')


def _check_length(rank: SimulatedRank, what: str, objects: Any, count: int) -> None:
    if not isinstance(objects, list) or len(objects) != count:
        got = f"one of {len(objects)}" if isinstance(objects, list) else repr(objects)
        raise ArgumentError(f"{what} must be a list of {count}, one for each rank of the group, got {got} ({rank.here()}). Fill it up.")


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=_CPU)


def _tell_sizes(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64, device=_CPU)


def _to_tensor(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _make_parts(count: int, size: int) -> list[Tensor]:
    return list(_empty(count * size, torch.uint8).split(size))


def _pad(data: Tensor, size: int) -> Tensor:
    padded = torch.zeros(size, dtype=torch.uint8, device=_CPU)
    padded[: len(data)] = data
    return padded


def _unpack(data: Tensor, size: int, weights_only: bool) -> Any:
    return unpack(data[:size].numpy().tobytes(), weights_only)


def _unpack_all(data: Tensor, sizes: Tensor, weights_only: bool) -> list[Any]:
    """Returns the objects whose bytes lie behind each other."""
    return [_unpack(piece, len(piece), weights_only) for piece in data.split(sizes.tolist())]


OBJECTS: Final = (*(send_object_list, recv_object_list, broadcast_object_list, all_gather_object, gather_object, scatter_object_list),)
