"""Reads and checks calls to collectives, and converts them to one form for all backends.

``read_call`` turns a call to a ``torch.distributed`` function into a ``Call``, which contains the
tensors that this rank gives and gets, the root, and the reduction. All checks are in this module. A
single tensor in the call (``all_gather_into_tensor``, ``all_to_all_single``, ...) is cut into one
tensor per rank, so that a backend only has to support nine families::

    family          inputs                  outputs                   effect
    broadcast       [tensor]                [tensor]                  outputs <- the root's inputs
    reduce          [tensor]                [tensor]                  the root's outputs <- all
                                                                      inputs, reduced
    all_reduce      tensors                 the same tensors          outputs <- all inputs, reduced
    all_gather      k tensors               k for each rank, by rank  outputs <- the inputs of all
    gather          [tensor]                one per rank, at the root outputs <- the inputs of all
    scatter         one per rank, at root   [tensor]                  outputs <- this rank's part of
                                                                      the root's inputs
    reduce_scatter  one per rank            [tensor]                  outputs <- this rank's part of
                                                                      all inputs, reduced
    all_to_all      one per rank            one per rank              outputs[i] <- this rank's part
                                                                      of rank i's inputs
    barrier         none                    none

``METHODS`` maps the methods of ``ProcessGroup``, through which torch's own calls are recorded, to
the same rows. Sizes follow nccl-tests: S is the size of the whole buffer from which the bandwidth
is computed, and is the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import FunctionType
from typing import Any, cast

import torch
from torch.distributed import ReduceOp

from ringsim.errors import Refused
from ringsim.traces.collectives import COLLECTIVES, Collective
from ringsim.traces.events import NONE, OP_CODES

# -- the members


class Members:
    """The members of a group, as seen from one of its ranks.

    Args:
        ranks: the global ranks of the members, in the group's order.
        place: this rank's place in the group.
        group_name: the name, such as "world" or "ring:2>3", which is the same on all members.
        check: a replacement for the method ``check``.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        group_name: str,
        check: Callable[[str, Any], torch.Tensor] | None = None,
    ) -> None:
        self.ranks, self._place, self.group_name = ranks, place, group_name
        if check is not None:
            self.check = check  # type: ignore[assignment, method-assign]

    def rank(self) -> int:
        """Returns this rank's place in the group, or -1 outside it."""
        return self._place

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return len(self.ranks)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that the backend supports, detached from its history.

        Raises Refused for any other value.
        """
        return cast(torch.Tensor, tensor.detach())

    def here(self) -> str:
        """Returns a description of this rank for errors."""
        return f'rank {self.rank()} of {len(self.ranks)} in group "{self.group_name}"'


# -- the table


_ONE = "a tensor"
_LIST = "a tensor for each rank"
_SOME = "any number of tensors"
_LISTS = "a list of tensors for each rank"
_WHOLE = "a tensor with an equal part for each rank"
_ROWS = "a tensor with some rows for each rank"


Tensors = Sequence[torch.Tensor]
# the name of an argument with tensors that a rank gives or takes, and the argument's form
_Side = tuple[str, str]
_NOTHING = ("", _ONE)
_DEFAULTS = {
    "": inspect.Parameter.empty,
    "None": None,
    "False": False,
    "0": 0,
    "SUM": ReduceOp.SUM,
}


def make_signature(arguments: str, **meanings: Any) -> inspect.Signature:
    """Returns the signature for arguments that are written as in a function definition.

    ``meanings`` contains the values of names used as defaults; SUM is torch's unless ``meanings``
    contains it.

    Example:
        >>> make_signature("tensor, dst=0")
        <Signature (tensor, dst=0)>
    """
    defaults = _DEFAULTS | meanings
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    pairs = (each.partition("=") for each in arguments.split(", "))
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=defaults[default]) for name, _, default in pairs]
    )


def name_function(
    function: Any, name: str, doc: str | None, signature: inspect.Signature, module: str
) -> FunctionType:
    """Sets the name, docstring, signature and module of a generated function, and returns it."""
    made: FunctionType = function
    made.__name__ = made.__qualname__ = name
    made.__doc__ = doc
    made.__module__ = module
    made.__signature__ = signature  # type: ignore[attr-defined]
    made.__annotations__ = {
        each.name: each.annotation
        for each in signature.parameters.values()
        if each.annotation is not each.empty
    }
    if signature.return_annotation is not signature.empty:
        made.__annotations__["return"] = signature.return_annotation
    return made


class Reading:
    """The rules for reading calls to one collective.

    The rules cover functions of ``torch.distributed`` and methods of ``ProcessGroup``.

    Args:
        names: the names of torch's functions; traces use the first name.
        arguments: the arguments of these functions.
        gives: the argument with the tensors that a rank gives.
        takes: the argument with the tensors that a rank fills; omitted if both arguments are the
            same.
        methods: the methods of ``ProcessGroup``, if their names differ. Their arguments are the
            tensors taken, the tensors given, and the options.
        raw: whether Gloo ignores the tensors' strides and uses their memory as it is, so that gaps
            or a different order of elements produce garbage.

    Attributes:
        op: the code of the operation, used if the stack frames do not show a more specific one.
        shards: whether S is computed from one rank's shard, multiplied by the group size.
    """

    def __init__(
        self,
        names: str,
        arguments: str,
        gives: _Side = _NOTHING,
        takes: _Side = _NOTHING,
        *,
        methods: str = "",
        raw: bool = False,
    ) -> None:
        self.names, self.methods, self.raw = names.split(), (methods or names).split(), raw
        self.collective: Collective = COLLECTIVES[self.names[0]]
        self.gives, self.takes = gives, gives if takes is _NOTHING else takes
        self.in_place = takes is _NOTHING
        self.op = OP_CODES.get(self.names[0], OP_CODES[self.collective.name])
        self.shards = self.collective.family in ("gather", "scatter")
        self.sized_by_taken = self.collective.family in ("all_gather", "scatter")
        self.signature = make_signature(arguments)
        self._defaults = {each.name: each.default for each in self.signature.parameters.values()}
        self._required = {
            name for name, default in self._defaults.items() if default is inspect.Parameter.empty
        }

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name.

        Raises TypeError if torch's function does not accept the arguments.
        """
        values = {**dict(zip(self._defaults, args, strict=False)), **kwargs}
        if (
            len(values) != len(args) + len(kwargs)
            or not self._required <= values.keys() <= self._defaults.keys()
        ):
            self.signature.bind(*args, **kwargs)  # raises the right error
        return {**self._defaults, **values}


_ROOTED = "group=None, async_op=False, group_{}=None"
_TO, _FROM = _ROOTED.format("dst"), _ROOTED.format("src")
_PLAIN = "group=None, async_op=False"
_TENSOR = ("tensor", _ONE)
_ROWS_OF_TABLE = (
    Reading("broadcast", f"tensor, src=None, {_FROM}", _TENSOR, raw=True),
    Reading("all_reduce", f"tensor, op=SUM, {_PLAIN}", _TENSOR, methods="allreduce", raw=True),
    Reading(
        "all_reduce_coalesced",
        f"tensors, op=SUM, {_PLAIN}",
        ("tensors", _SOME),
        methods="allreduce_coalesced",
    ),
    Reading("reduce", f"tensor, dst=None, op=SUM, {_TO}", _TENSOR, raw=True),
    Reading(
        "all_gather",
        f"tensor_list, tensor, {_PLAIN}",
        _TENSOR,
        ("tensor_list", _LIST),
        methods="allgather",
    ),
    Reading(
        "all_gather_coalesced",
        f"output_tensor_lists, input_tensor_list, {_PLAIN}",
        ("input_tensor_list", _SOME),
        ("output_tensor_lists", _LISTS),
        methods="allgather_coalesced allgather_into_tensor_coalesced all_gather_single_coalesced",
    ),
    Reading(
        "all_gather_into_tensor all_gather_single",
        f"output_tensor, input_tensor, {_PLAIN}",
        ("input_tensor", _ONE),
        ("output_tensor", _WHOLE),
        methods="_allgather_base all_gather_single",
    ),
    Reading(
        "gather",
        f"tensor, gather_list=None, dst=None, {_TO}",
        _TENSOR,
        ("gather_list", _LIST),
    ),
    Reading(
        "gather_into_tensor gather_single",
        f"tensor, gather_tensor=None, dst=None, {_TO}",
        _TENSOR,
        ("gather_tensor", _WHOLE),
    ),
    Reading(
        "scatter",
        f"tensor, scatter_list=None, src=None, {_FROM}",
        ("scatter_list", _LIST),
        _TENSOR,
        raw=True,
    ),
    Reading(
        "reduce_scatter",
        f"output, input_list, op=SUM, {_PLAIN}",
        ("input_list", _LIST),
        ("output", _ONE),
    ),
    Reading(
        "reduce_scatter_tensor reduce_scatter_single",
        f"output, input, op=SUM, {_PLAIN}",
        ("input", _WHOLE),
        ("output", _ONE),
        methods=(
            "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced "
            "reduce_scatter_single_coalesced"
        ),
    ),
    Reading(
        "all_to_all",
        f"output_tensor_list, input_tensor_list, {_PLAIN}",
        ("input_tensor_list", _LIST),
        ("output_tensor_list", _LIST),
        methods="alltoall",
    ),
    Reading(
        "all_to_all_single",
        f"output, input, output_split_sizes=None, input_split_sizes=None, {_PLAIN}",
        ("input", _ROWS),
        ("output", _ROWS),
        methods="alltoall_base all_to_all_single",
    ),
    Reading("barrier", f"{_PLAIN}, device_ids=None, timeout=None"),
)
METHODS = {  # by the method of ProcessGroup
    **{method: row for row in _ROWS_OF_TABLE for method in row.methods},
    "monitored_barrier": Reading(
        "monitored_barrier", "group=None, timeout=None, wait_all_ranks=False"
    ),
}
READINGS = {name: row for row in _ROWS_OF_TABLE for name in row.names}  # by torch's function
_Cut = Callable[[torch.Tensor], Tensors]


@dataclass
class Call:
    """One rank's call to a collective, already read and checked.

    Attributes:
        name: the name of the called function.
        group: the group; the ranks below are ranks within this group.
        given: the tensors that this rank gives, as in the table above, or one tensor with all of
            them.
        taken: the tensors that this rank gets, in the same form.
        carried: the tensors from which the size is computed.
        copies: the factor for their size: the group size if they are one rank's share, else 1.
        results: the user's tensors that hold the result.
        root: the root, or NONE if there is none.
        op: the reduction, or None if there is none.
        cut_given: a function that cuts the single given tensor into one tensor per rank; None if
            several tensors are given.
        cut_taken: the corresponding function for the single taken tensor.
    """

    name: str
    group: Members
    given: Tensors
    taken: Tensors
    carried: Tensors = ()
    copies: int = 1
    results: Tensors = ()
    root: int = NONE
    op: Any = None
    cut_given: _Cut | None = None
    cut_taken: _Cut | None = None

    @property
    def collective(self) -> Collective:
        """The kind of collective."""
        return COLLECTIVES[self.name]

    @property
    def tensors(self) -> Tensors:
        """The tensors that this rank contributes or fills, without duplicates."""
        return self.given if self.given is self.taken else (*self.given, *self.taken)

    @property
    def recorded_name(self) -> str:
        """The name in traces, which do not use torch's newer names for gathers."""
        return self.name if self.name in OP_CODES else self.collective.name

    @cached_property
    def inputs(self) -> Tensors:
        """The tensors that this rank contributes, as in the table above."""
        return self.cut_given(self.given[0]) if self.cut_given and self.given else self.given

    @cached_property
    def outputs(self) -> Tensors:
        """The tensors that this rank fills, as in the table above, in the user's memory."""
        return self.cut_taken(self.taken[0]) if self.cut_taken and self.taken else self.taken


def read_call(name: str, arguments: Mapping[str, Any], group: Members) -> Call:
    """Reads and checks a call to a torch.distributed collective.

    Args:
        name: the name of the function.
        arguments: all arguments of the function, by name; see ``Reading.bind``. A root is a rank of
            the group.
        group: the group, of which this rank is a member.

    Raises:
        Refused: an argument is invalid.
    """
    reading = READINGS[name]
    row, gives, takes = reading.collective, reading.gives, reading.takes
    call = Call(name, group, (), ())
    if row.family == "barrier":
        return call
    if row.root:
        call.root = arguments[f"group_{row.root}"]
        if not 0 <= call.root < group.size():
            raise Refused(
                f"group_{row.root} must be a rank of the group, from 0 to {group.size() - 1}, got "
                f"{call.root} ({group.here()}). Count ranks from 0."
            )
    if row.reduces:
        call.op = arguments["op"]
    if reading.in_place and gives[1] == _ONE:
        tensors = [group.check(gives[0], arguments[gives[0]])]
        call.given = call.taken = call.carried = call.results = tensors
        return call
    at_root = call.root == NONE or group.rank() == call.root
    call.given = _read_side(group, gives, arguments, at_root or row.family != "scatter")
    call.taken = (
        call.given
        if reading.in_place
        else _read_side(group, takes, arguments, at_root or row.family != "gather", call.given)
    )
    call.cut_given, call.cut_taken = (_make_cut(group, side, arguments) for side in (gives, takes))
    _check_together(reading, call)
    call.carried = call.taken if reading.sized_by_taken else call.given
    call.copies = group.size() if reading.shards else 1
    call.results = (
        [arguments[takes[0]]] if call.taken and takes[1] in (_ONE, _WHOLE, _ROWS) else call.taken
    )
    return call


def _read_side(
    group: Members,
    side: _Side,
    arguments: Mapping[str, Any],
    is_held: bool,
    given: Tensors = (),
) -> Tensors:
    """Returns the checked tensors of an argument, or none if only the root has any."""
    what, form = side
    value = arguments[what]
    if not is_held:
        return ()
    if form == _LIST:
        return check_tensors(group, what, value, group.size())
    if form == _SOME:
        tensors = check_tensors(group, what, value)
        if not tensors:
            raise Refused(
                f"{what} must contain at least one tensor, got an empty list ({group.here()}). "
                "Skip the call on all ranks."
            )
        return tensors
    if form == _LISTS:
        _check_count(group, what, value, group.size())
        rows = (
            check_tensors(group, f"{what}[{place}]", row, len(given))
            for place, row in enumerate(value)
        )
        return [tensor for row in rows for tensor in row]
    return [group.check(what, value)]


def _make_cut(group: Members, side: _Side, arguments: Mapping[str, Any]) -> _Cut | None:
    what, form = side
    if form == _ROWS:
        return partial(_cut_rows, group, what, arguments[f"{what}_split_sizes"])
    return partial(_cut_evenly, group) if form == _WHOLE else None


def _cut_evenly(group: Members, whole: torch.Tensor) -> Tensors:
    """Returns equal parts of a tensor's elements, one per rank.

    The parts share the tensor's memory if they will be written to.
    """
    if not whole.is_contiguous() and whole.shape[0] % group.size() == 0:
        return list(whole.split(whole.shape[0] // group.size()))
    return list(whole.reshape(group.size(), whole.numel() // group.size()))


def _cut_rows(group: Members, what: str, sizes: Any, tensor: torch.Tensor) -> Tensors:
    """Returns each rank's rows of a tensor, split according to ``sizes`` or else evenly."""
    if tensor.dim() == 0:
        raise Refused(
            f"{what} must have at least one dimension, got a scalar ({group.here()}). Reshape "
            "the tensor to (1,)."
        )
    length, count = tensor.shape[0], group.size()
    if not sizes and length % count:
        raise Refused(
            f"the first dimension of {what} must be a multiple of {count}, the number of ranks, "
            f"got {length} ({group.here()}). Pass {what}_split_sizes."
        )
    rows = [int(size) for size in sizes] if sizes else [length // count] * count
    if len(rows) != count or min(rows) < 0 or sum(rows) != length:
        raise Refused(
            f"{what}_split_sizes must be {count} lengths that add up to {length}, got {rows} "
            f"({group.here()}). Correct the lengths."
        )
    return list(tensor.split(rows))


# -- checks


def check_dense(what: str, tensor: torch.Tensor, where: str, *, meta: bool = False) -> torch.Tensor:
    """Returns a dense tensor on the CPU, detached from its history.

    Args:
        what: the name of the argument, for the error.
        tensor: the argument.
        where: the reason for the rule, for the error.
        meta: whether the tensor may also be on the meta device.

    Raises:
        Refused: the tensor is not dense, or is on a different device.
    """
    if (
        not (tensor.is_cpu or (meta and tensor.is_meta))
        or tensor.layout is not torch.strided
        or tensor.is_quantized
    ):
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (
            " (quantized)" if tensor.is_quantized else ""
        )
        device = "the CPU or the meta device" if meta else "the CPU"
        raise Refused(
            f"{what} must be a dense tensor on {device} {where}, got {kind}. Convert the tensor "
            "with tensor.cpu().to_dense()."
        )
    return tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor


def _check_count(group: Members, what: str, values: Sequence[Any], count: int | None) -> None:
    """Raises Refused if ``count`` is given and an argument does not have ``count`` entries."""
    if count is not None and len(values) != count:
        raise Refused(
            f"{what} must have {count} entries, got {len(values)} ({group.here()}). Pass one entry "
            "per rank, in order."
        )


def check_tensors(
    group: Members, what: str, tensors: Sequence[Any], count: int | None = None
) -> list[torch.Tensor]:
    """Checks tensors, and if ``count`` is given, their number; returns supported tensors."""
    _check_count(group, what, tensors, count)
    return [group.check(f"{what}[{place}]", tensor) for place, tensor in enumerate(tensors)]


def _check_together(reading: Reading, call: Call) -> None:
    """Checks that a call's tensors have the same dtype and matching shapes or sizes.

    Raises:
        Refused: the tensors do not match.
    """
    group, given, taken = call.group, call.given, call.taken
    family = reading.collective.family
    (gives, gives_form), (takes, takes_form) = reading.gives, reading.takes
    like = (given or taken)[0]
    for what, tensors in ((gives, given), (takes, taken)):
        for place, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype:
                raise Refused(
                    f"{what}[{place}] must be {like.dtype}, like the other tensors in the call, "
                    f"got {tensor.dtype} ({group.here()}). Use the same dtype for all tensors."
                )
    if reading.in_place or not given or not taken:
        return
    if _WHOLE in (gives_form, takes_form):
        sides = [(gives, given[0]), (takes, taken[0])]
        if takes_form == _WHOLE:
            sides.reverse()
        (what, whole), (other, part) = sides
        if whole.numel() != part.numel() * group.size():
            raise Refused(
                f"{what} must have {group.size()} times as many elements as {other} "
                f"({part.numel()}), got {whole.numel()} ({group.here()}). Change the size of one "
                "tensor."
            )
        if whole is taken[0] and not whole.is_contiguous() and whole.shape[0] % group.size():
            raise Refused(
                f"{what} must be contiguous, got strides {whole.stride()} ({group.here()}). Pass "
                "tensor.contiguous()."
            )
    elif family in ("reduce_scatter", "all_to_all"):
        place = group.rank() if family == "all_to_all" else 0
        gift, room = call.inputs[group.rank()].numel(), call.outputs[place].numel()
        if gift != room:
            raise Refused(
                f"the number of elements that this rank sends to itself is {gift}, but {takes} "
                f"has room for {room} ({group.here()}). Use the same size on both sides."
            )
    else:
        what, many, few = takes, taken, given
        if family == "scatter":
            what, many, few = gives, given, taken
        for place, tensor in enumerate(many):
            shape = few[place % len(few)].shape
            if tensor.shape != shape:
                raise Refused(
                    f"{what}[{place}] must have the shape {tuple(shape)}, like the other tensor "
                    f"in the call, got {tuple(tensor.shape)} ({group.here()}). Use the same "
                    "shape for both tensors."
                )


# -- the memory layout of tensors


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are contiguous in memory, as they are in a message."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def for_sending(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it is plain, else a plain copy."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def for_receiving(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it is plain, else a plain buffer to receive into."""
    if is_plain(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements, in any order, have gaps between them in memory.

    Example:
        >>> has_gaps(torch.zeros(4, 4)[:, :2]), has_gaps(torch.zeros(3, 4).t())
        (True, False)
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    next_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != next_stride:
                return True
            next_stride *= size
    return False


# -- calls of the methods of ProcessGroup

# The keywords for the tensors, which differ between torch's overloads.
_TAKEN_NAMES = (
    "tensors",
    "tensor",
    "output_tensors",
    "output_tensor",
    "output",
    "output_lists",
    "outputs",
)
_GIVEN_NAMES = ("input_tensors", "input_tensor", "input", "inputs", "inputTensor")


def find_tensors(
    reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Returns the tensors from which a call's size is computed, as a flat list.

    Args:
        reading: the rules for the method.
        args: the positional arguments of the call, without the group.
        kwargs: the keyword arguments of the call.
    """
    if not reading.gives[0]:
        return []
    first = reading.in_place or reading.sized_by_taken
    place, names = (0, _TAKEN_NAMES) if first else (1, _GIVEN_NAMES)
    return _flatten(
        args[place] if len(args) > place else [kwargs[name] for name in names if name in kwargs]
    )


def find_unfit(reading: Reading, tensors: Tensors, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Returns a tensor that would make a call do nothing or return wrong results, or None.

    Such a tensor has no data, or has gaps that Gloo ignores.
    """
    if reading.op == OP_CODES["scatter"]:
        tensors = [*tensors, *_flatten(args[1:2])]  # the tensors that the root sends
    for tensor in tensors:
        if tensor.is_meta or (reading.raw and has_gaps(tensor)):
            return tensor
    return None


def _flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flatten(item)]


def find_root(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the group rank of a call's root, or NONE if the call has no root."""
    if not reading.collective.root:
        return NONE
    place = 1 if reading.in_place else 2
    value = args[place] if len(args) > place else kwargs.get("opts", kwargs.get("root", 0))
    return int(getattr(value, "rootRank", value))


def find_splits(
    reading: Reading, group_size: int, args: tuple[Any, ...]
) -> tuple[tuple[int, ...], ...]:
    """Returns the bytes that an all_to_all sends to, and receives from, each rank in its group.

    The result is empty for other collectives, and for a call that torch rejects on its own rank,
    because such a call never reaches another rank.

    Example:
        >>> find_splits(METHODS["alltoall_base"], 2, (torch.zeros(4), torch.zeros(4), [1, 3], []))
        ((8, 8), (4, 12))
        >>> find_splits(METHODS["alltoall_base"], 2, (torch.zeros(4), torch.zeros(4), [1, 2], []))
        ()
    """
    if reading.collective.family != "all_to_all":
        return ()
    both = tuple(
        _split_bytes(args[side], args[2 + side] if len(args) > 2 + side else (), group_size)
        for side in (1, 0)
    )
    return both if all(both) else ()


def _split_bytes(given: Any, rows: Any, group_size: int) -> tuple[int, ...]:
    if not isinstance(given, torch.Tensor):
        return tuple(each.nbytes for each in given) if len(given) == group_size else ()
    length = len(given)
    rows = rows or [length // group_size] * group_size
    if len(rows) != group_size or sum(rows) != length:
        return ()
    row_bytes = given.nbytes // max(length, 1)
    return tuple(row_bytes * count for count in rows)


def find_reduction(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the name of a call's reduction, such as "SUM", or "" if the call has none."""
    if not reading.collective.reduces:
        return ""
    for value in (*args[1 if reading.in_place else 2 :], *kwargs.values()):
        op = getattr(value, "reduceOp", value)
        if isinstance(op, _REDUCTIONS):
            return name_of_reduction(op)
    return "SUM"


_REDUCTIONS = (ReduceOp, ReduceOp.RedOpType)


@cache  # torch takes a microsecond to return the name
def name_of_reduction(op: Any) -> str:
    """Returns torch's name for a reduction.

    Example:
        >>> name_of_reduction(ReduceOp.MAX)
        'MAX'
    """
    return str(getattr(op, "op", op)).rpartition(".")[2]


def describe(tensors: Tensors, copies: int) -> tuple[str, tuple[int, ...], int]:
    """Returns the dtype, the shape and the size in bytes of an operation's data.

    Args:
        tensors: the tensors of the operation; several tensors of the same shape are described as
            (number, *shape), other tensors as (elements,).
        copies: the factor by which their size is multiplied: the group size if the tensors are one
            rank's shard, else 1.

    Example:
        >>> (
        ...     describe([torch.zeros(2, 3), torch.zeros(2, 3)], 1),
        ...     describe([torch.zeros(4)], 3),
        ...     describe([], 1),
        ... )
        (('float32', (2, 2, 3), 48), ('float32', (3, 4), 48), ('', (), 0))
    """
    if not tensors:
        return "", (), 0
    shapes = {tuple(tensor.shape) for tensor in tensors}
    count = len(tensors) * copies
    if len(shapes) > 1:
        shape: tuple[int, ...] = (copies * sum(tensor.numel() for tensor in tensors),)
    else:
        shape = (count, *shapes.pop()) if count > 1 else shapes.pop()
    size_bytes = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return str(tensors[0].dtype).removeprefix("torch."), shape, size_bytes
