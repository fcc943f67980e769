"""Python objects among ranks: packed into bytes, which travel as tensors do.

Operations, sizes and tags are those of torch's own functions: sizes travel first, then bytes,
padded to the longest where all ranks give some. All functions block. As with torch's, unpickling
runs what the sender says: use them among ranks that trust each other, or with ``weights_only``
(torch 2.15), which carries plain data only. ``device`` is where the bytes lie on their way.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any, Final

import torch

from ringsim.comm.backend import Backend
from ringsim.comm.built import BUILT, find_own, source_of
from ringsim.comm.collectives import Members, check_list, make_signature, name_function, root_of
from ringsim.errors import ArgumentError
from ringsim.traces.events import OP_CODES

__all__ = ["OBJECTS"]


class _Call:
    """A call of an operation on objects, and what carries its tensors.

    Args:
        backend: carries the tensors.
        members: who is in the group.
        given: the arguments, by name.
    """

    def __init__(self, backend: Backend, members: Members, given: Mapping[str, Any]) -> None:
        self.backend, self.members, self.given = backend, members, given
        self.group, self._weights_only = given["group"], given["weights_only"]
        device = given.get("device")
        # not the default device: objects have data
        self._device = torch.device("cpu" if device is None else device)

    def find_root(self, what: str) -> tuple[int, bool]:
        """Returns the global rank of the root, and whether this rank is it."""
        root = root_of(self.members, what, self.given[what], self.given[f"group_{what}"])
        return self.members.ranks[root], self.members.rank() == root

    def run(self, op: str, *args: Any) -> None:
        """Runs an operation on tensors; the group comes last."""
        function = find_own(self.backend, op) or partial(BUILT[op], self.backend)
        function(*args, self.group)

    def begin(self, op: str, tensor: torch.Tensor, peer: int | None, group_peer: int | None) -> Any:
        """Begins a message that is recorded as one of ``op``, where the backend can."""
        kind = op.partition("_")[0]
        if hasattr(self.backend, f"begin_{kind}"):
            return getattr(self.backend, f"begin_{kind}")(
                tensor, peer, self.group, 0, group_peer, OP_CODES[op]
            )
        return getattr(self.backend, f"i{kind}")(tensor, peer, self.group, 0, group_peer)

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

    def pack_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lengths of the packed objects of ``object_list``, and their bytes.

        The lengths have shape (objects); the bytes follow one another.
        """
        values = self.given["object_list"]
        if not isinstance(values, list | tuple) or not values:
            raise ArgumentError(
                f"object_list must be a list of at least one object, got {values!r}. Put the "
                "objects into a list."
            )
        packed = [self.pack(each) for each in values]
        return self.lengths(*map(len, packed)), torch.cat(packed)

    def receive_all(self, receive: Callable[[torch.Tensor], Any]) -> None:
        """Fills ``object_list``.

        First the lengths of the objects are received, then their bytes.
        """
        values = self.given["object_list"]
        lengths = self.empty(len(values), torch.int64)
        receive(lengths)
        data = self.empty(int(lengths.sum()))
        receive(data)
        values[:] = [self.unpack(piece, len(piece)) for piece in data.split(lengths.tolist())]

    def pad(self, data: torch.Tensor, length: int) -> torch.Tensor:
        """Returns bytes with zeros behind them."""
        return torch.nn.functional.pad(data, (0, length - len(data)))

    def collect(
        self, target: list[Any] | None, gather: Callable[[torch.Tensor, Any], None]
    ) -> None:
        """Fills ``target`` with everybody's object, by rank.

        ``gather`` brings the bytes of all where there is one.
        """
        data, size = self.pack(self.given["obj"]), self.members.size()
        lengths = self.empty(size, torch.int64)
        self.run("all_gather", list(lengths.split(1)), self.lengths(len(data)))
        longest = int(lengths.max())
        parts = None if target is None else [self.empty(longest) for _ in range(size)]
        gather(self.pad(data, longest), parts)
        if target is not None and parts is not None:
            target[:] = map(self.unpack, parts, lengths.tolist())


OBJECTS: Final[dict[str, Callable[..., Any]]] = {}  # by name: after the backend torch's arguments


def _operation(
    arguments: str, outside: int | None = None
) -> Callable[[Callable[[_Call], Any]], Callable[[_Call], Any]]:
    """Makes torch's function, with these arguments, of what is done within the group.

    ``outside`` is what it returns elsewhere.
    """
    signature = make_signature(arguments)

    def make(inside: Callable[[_Call], Any]) -> Callable[[_Call], Any]:
        name = inside.__name__

        def function(backend: Backend, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            members = backend.enter(name, bound.arguments["group"])
            return outside if members is None else inside(_Call(backend, members, bound.arguments))

        parameters = [
            Parameter("backend", Parameter.POSITIONAL_OR_KEYWORD),
            *signature.parameters.values(),
        ]
        OBJECTS[name] = name_function(
            function, name, inside.__doc__, signature.replace(parameters=parameters)
        )
        return inside

    return make


@_operation(
    "object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False, "
    "weights_only=False"
)
def send_object_list(call: _Call) -> None:
    """Sends objects to one rank. ``use_batch`` changes nothing here."""
    for tensor in call.pack_all():
        call.begin("send_object_list", tensor, call.given["dst"], call.given["group_dst"]).wait()


@_operation(
    (
        "object_list, src=None, group=None, device=None, group_src=None, use_batch=False, "
        "weights_only=False"
    ),
    outside=-1,
)
def recv_object_list(call: _Call) -> int:
    """Receives as many objects as the list is long, from anybody where no source is given.

    ``use_batch`` changes nothing here.

    Returns:
        The sender's global rank, -1 outside the group.
    """
    source: tuple[int | None, int | None] = call.given["src"], call.given["group_src"]

    def receive(tensor: torch.Tensor) -> None:
        nonlocal source
        handle = call.begin("recv_object_list", tensor, *source)
        handle.wait()
        source = None, source_of(handle)  # the bytes come from whom the lengths came from

    call.receive_all(receive)
    return call.members.ranks[source[1] or 0]


@_operation("object_list, src=None, group=None, device=None, group_src=None, weights_only=False")
def broadcast_object_list(call: _Call) -> None:
    """Gives all ranks the root's objects. The root is rank 0 where none is given."""
    root, is_root = call.find_root("src")
    if is_root:
        for tensor in call.pack_all():
            call.run("broadcast", tensor, root)
    else:
        call.receive_all(lambda tensor: call.run("broadcast", tensor, root))


@_operation("object_list, obj, group=None, weights_only=False")
def all_gather_object(call: _Call) -> None:
    """Fills each rank's list with everybody's object, by rank."""
    target = call.given["object_list"]
    check_list(call.members, "object_list", target, call.members.size())
    call.collect(target, lambda data, parts: call.run("all_gather", parts, data))


@_operation(
    "obj, object_gather_list=None, dst=None, group=None, group_dst=None, weights_only=False"
)
def gather_object(call: _Call) -> None:
    """Fills the root's list with everybody's object, by rank.

    The root is rank 0 where none is given.
    """
    root, is_root = call.find_root("dst")
    target = call.given["object_gather_list"] if is_root else None
    if is_root:
        check_list(call.members, "object_gather_list", target, call.members.size())
    call.collect(target, lambda data, parts: call.run("gather", data, parts, root))


@_operation(
    "scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, "
    "group_src=None, weights_only=False"
)
def scatter_object_list(call: _Call) -> None:
    """Puts each rank's object of the root's list first in its own list.

    The root is rank 0 where none is given.
    """
    target = call.given["scatter_object_output_list"]
    if not isinstance(target, list) or not target:
        raise ArgumentError(
            "scatter_object_output_list must be a list with a place for the object, got "
            f"{target!r} ({call.members.here()}). Pass [None]."
        )
    root, is_root = call.find_root("src")
    pieces: list[torch.Tensor] = []
    longest = call.empty(1, torch.int64)
    if is_root:
        name = "scatter_object_input_list"
        pieces = [
            call.pack(each)
            for each in check_list(call.members, name, call.given[name], call.members.size())
        ]
        longest = call.lengths(max(map(len, pieces)))
    call.run("broadcast", longest, root)
    mine, length = call.empty(int(longest)), call.empty(1, torch.int64)
    call.run("scatter", mine, [call.pad(piece, int(longest)) for piece in pieces] or None, root)
    call.run("scatter", length, [call.lengths(len(piece)) for piece in pieces] or None, root)
    target[0] = call.unpack(mine, int(length))
