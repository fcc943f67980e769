"""Lists of Python objects on MPI, pickled: first their sizes travel, then their bytes, as in ``torch.distributed``."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ringsim.comm.mpi_collectives import MpiCollectives
from ringsim.comm.mpi_messages import MpiMessages
from ringsim.errors import ArgumentError


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
