"""Rules for the collectives, compared with the same operations in one process.

Each is tested in several ways, with every dtype, and with every reduction.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from conformance import DTYPES, add_rule, make, rule, same, strided
from torch.distributed import ReduceOp

Tensors = list[torch.Tensor]
Fold = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Scene:
    """The setting of a case: its members, and how they call.

    The root is a place among the members.
    """

    dist: Any
    rank: int
    members: list[int]
    group: Any = None
    async_op: bool = False
    lay_out: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    dtype: torch.dtype = torch.float32
    op: ReduceOp = ReduceOp.SUM
    fold: Fold = operator.add
    root_place: int = -1

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.async_op}

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def place(self) -> int:
        return self.members.index(self.rank)

    @property
    def root(self) -> int:
        return self.members[self.root_place]

    def at_root(self, values: Any) -> Any:
        return values if self.rank == self.root else None

    def value(self, rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
        """The input of a rank."""
        return make(rank, shape, self.dtype, salt)

    def values(self, *shape: int, salt: int = 0) -> Tensors:
        return [self.value(rank, *shape, salt=salt) for rank in self.members]

    def mine(self, *shape: int, salt: int = 0) -> torch.Tensor:
        return self.lay_out(self.value(self.rank, *shape, salt=salt))

    def total(self, *shape: int, salt: int = 0) -> torch.Tensor:
        return functools.reduce(self.fold, self.values(*shape, salt=salt))

    def blanks(self, *shape: int) -> Tensors:
        """An empty tensor for each member."""
        return [self.blank(*shape) for _ in self.members]

    def blank(self, *shape: int) -> torch.Tensor:
        return self.lay_out(torch.zeros(shape, dtype=self.dtype))

    def end(self, handle: Any) -> None:
        """Waits if there is a handle, twice: the second wait returns immediately."""
        assert (handle is not None) is self.async_op
        if self.async_op:
            handle.wait()
            handle.wait()


def _broadcast(s: Scene) -> tuple[Tensors, Tensors]:
    x = s.mine(3, 2)
    s.end(s.dist.broadcast(x, s.root, **s.how))
    return [x], [s.value(s.root, 3, 2)]


def _all_reduce(s: Scene) -> tuple[Tensors, Tensors]:
    x = s.mine(4, 3)
    s.end(s.dist.all_reduce(x, s.op, **s.how))
    return [x], [s.total(4, 3)]


def _all_reduce_coalesced(s: Scene) -> tuple[Tensors, Tensors]:
    x = [s.mine(6), s.mine(2, 2, salt=1)]
    s.end(s.dist.all_reduce_coalesced(x, s.op, **s.how))
    return x, [s.total(6), s.total(2, 2, salt=1)]


def _reduce(s: Scene) -> tuple[Tensors, Tensors]:
    x = s.mine(3, 2)
    s.end(s.dist.reduce(x, s.root, s.op, **s.how))
    return s.at_root([x]) or [], s.at_root([s.total(3, 2)]) or []


def _all_gather(s: Scene) -> tuple[Tensors, Tensors]:
    out = s.blanks(2, 3)
    s.end(s.dist.all_gather(out, s.mine(2, 3), **s.how))
    return out, s.values(2, 3)


def _all_gather_into_tensor(
    s: Scene, name: str = "all_gather_into_tensor", stacked: bool = False
) -> tuple[Tensors, Tensors]:
    out = s.blank(s.size, 2, 3) if stacked else s.blank(2 * s.size, 3)
    s.end(getattr(s.dist, name)(out, s.mine(2, 3), **s.how))
    return [out], [(torch.stack if stacked else torch.cat)(s.values(2, 3))]


def _all_gather_coalesced(s: Scene) -> tuple[Tensors, Tensors]:
    out = [[s.blank(2, 3), s.blank(4)] for _ in s.members]
    s.end(s.dist.all_gather_coalesced(out, [s.mine(2, 3), s.mine(4, salt=1)], **s.how))
    wanted = zip(s.values(2, 3), s.values(4, salt=1), strict=True)
    return [tensor for row in out for tensor in row], [tensor for row in wanted for tensor in row]


def _gather(s: Scene) -> tuple[Tensors, Tensors]:
    out = s.at_root(s.blanks(3))
    s.end(s.dist.gather(s.mine(3), out, s.root, **s.how))
    return out or [], s.at_root(s.values(3)) or []


def _gather_single(s: Scene, name: str = "gather_single") -> tuple[Tensors, Tensors]:
    out = s.at_root(s.blank(s.size, 2, 3))
    s.end(getattr(s.dist, name)(s.mine(2, 3), out, s.root, **s.how))
    return [] if out is None else [out], s.at_root([torch.stack(s.values(2, 3))]) or []


def _scatter(s: Scene) -> tuple[Tensors, Tensors]:
    out, parts = s.blank(2, 3), [s.mine(2, 3, salt=place) for place in range(s.size)]
    s.end(s.dist.scatter(out, s.at_root(parts), s.root, **s.how))
    return [out], [s.value(s.root, 2, 3, salt=s.place)]


def _reduce_scatter(s: Scene) -> tuple[Tensors, Tensors]:
    out = s.blank(2, 3)
    s.end(
        s.dist.reduce_scatter(
            out, [s.mine(2, 3, salt=place) for place in range(s.size)], s.op, **s.how
        )
    )
    return [out], [s.total(2, 3, salt=s.place)]


def _reduce_scatter_tensor(
    s: Scene, name: str = "reduce_scatter_tensor"
) -> tuple[Tensors, Tensors]:
    out = s.blank(2, 3)
    s.end(getattr(s.dist, name)(out, s.mine(2 * s.size, 3), s.op, **s.how))
    return [out], [s.total(2 * s.size, 3)[2 * s.place : 2 * s.place + 2]]


def _all_to_all(s: Scene) -> tuple[Tensors, Tensors]:
    out = s.blanks(3)
    s.end(s.dist.all_to_all(out, [s.mine(3, salt=place) for place in range(s.size)], **s.how))
    return out, s.values(3, salt=s.place)


def _all_to_all_of_sizes(s: Scene) -> tuple[Tensors, Tensors]:
    out = [s.blank(place) for place in range(s.size)]
    s.end(s.dist.all_to_all(out, [s.mine(s.place, salt=place) for place in range(s.size)], **s.how))
    return out, [s.value(rank, place, salt=s.place) for place, rank in enumerate(s.members)]


def _all_to_all_single(s: Scene) -> tuple[Tensors, Tensors]:
    out = s.blank(2 * s.size, 3)
    s.end(s.dist.all_to_all_single(out, s.mine(2 * s.size, 3), **s.how))
    return [out], [
        torch.cat([value[2 * s.place : 2 * s.place + 2] for value in s.values(2 * s.size, 3)])
    ]


def _all_to_all_single_of_rows(s: Scene) -> tuple[Tensors, Tensors]:
    # some receive nothing
    rows = [[(sender + receiver) % 3 for receiver in range(s.size)] for sender in range(s.size)]
    inputs = [s.value(rank, sum(rows[place]), 2) for place, rank in enumerate(s.members)]
    received = [rows[place][s.place] for place in range(s.size)]
    out = s.blank(sum(received), 2)
    s.end(
        s.dist.all_to_all_single(out, s.lay_out(inputs[s.place]), received, rows[s.place], **s.how)
    )
    return [out], [
        torch.cat([torch.split(value, rows[place])[s.place] for place, value in enumerate(inputs)])
    ]


def _barrier(s: Scene) -> tuple[Tensors, Tensors]:
    s.end(s.dist.barrier(**s.how))
    return [], []


Case = Callable[[Scene], tuple[Tensors, Tensors]]
_PLAIN = (
    *(
        _broadcast,
        _all_reduce,
        _all_reduce_coalesced,
        _reduce,
        _all_gather,
        _all_gather_into_tensor,
    ),
    *(
        _all_gather_coalesced,
        _gather,
        _gather_single,
        _scatter,
        _reduce_scatter,
        _reduce_scatter_tensor,
    ),
    *(_all_to_all, _all_to_all_of_sizes, _all_to_all_single, _all_to_all_single_of_rows, _barrier),
)
CASES: dict[str, Case] = {
    **{case.__name__.strip("_"): case for case in _PLAIN},
    "all_gather_stacked": functools.partial(_all_gather_into_tensor, stacked=True),
    "all_gather_single": functools.partial(_all_gather_into_tensor, name="all_gather_single"),
    "gather_into_tensor": functools.partial(_gather_single, name="gather_into_tensor"),
    "reduce_scatter_single": functools.partial(
        _reduce_scatter_tensor, name="reduce_scatter_single"
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "blocking": {},
    "async": {"async_op": True},
    "strided": {"lay_out": strided},
    "in a group": {"async_op": True, "in_group": True},
}


def check_case(
    case: Case, dist: Any, rank: int, size: int, in_group: bool = False, **way: Any
) -> None:
    """Runs a case with all ranks, or with all but the first.

    Without the first, their places in the group differ from their ranks.
    """
    members = list(range(1, size) if in_group else range(size))
    group = dist.new_group(members) if in_group else None
    if rank in members:
        found, wanted = case(Scene(dist, rank, members, group, **way))
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)


for _name, _case in CASES.items():
    for _way, _changes in WAYS.items():
        add_rule(
            f"{_name}[{_way}]",
            functools.partial(check_case, _case, **_changes),
            2 if "in_group" in _changes else 1,
        )

# -- dtypes: data arrives exactly to the last bit

MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all_single",
)
for _move in MOVES:
    for _dtype in DTYPES:
        add_rule(
            f"{_move}_carries[{_dtype}]",
            functools.partial(check_case, CASES[_move], dtype=getattr(torch, _dtype)),
        )

# -- reductions, on small whole numbers, which are exact in every dtype and order

NUMBERS = {"sum": operator.add, "product": operator.mul, "min": torch.minimum, "max": torch.maximum}
BITS = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
FLOATS, INTEGERS = (
    ("float32", "float64", "float16", "bfloat16"),
    ("int8", "int32", "int64", "uint8"),
)
REDUCTIONS = [
    *((name, dtype) for name in NUMBERS for dtype in (*FLOATS, *INTEGERS)),
    *((name, dtype) for name in BITS for dtype in INTEGERS),
    *(
        ("sum", "complex64"),
        ("sum", "complex128"),
        ("sum", "int16"),
        ("min", "bool"),
        ("max", "bool"),
    ),
]
FEW = [
    ("sum", "float32"),
    ("max", "int64"),
    ("sum", "bfloat16"),
    ("product", "float64"),
    ("sum", "complex64"),
]
for _name in (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
):
    for _how, _dtype in REDUCTIONS if _name == "all_reduce" else FEW:
        _changes = {
            "op": getattr(ReduceOp, _how.upper()),
            "fold": {**NUMBERS, **BITS}[_how],
            "dtype": getattr(torch, _dtype),
        }
        add_rule(
            f"{_name}_reduces[{_how},{_dtype}]",
            functools.partial(check_case, CASES[_name], **_changes),
        )


@rule(each={"float32": torch.float32, "bfloat16": torch.bfloat16})
def all_reduce_averages(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = make(rank, dtype=dtype) * 12
    dist.all_reduce(tensor, ReduceOp.AVG)
    same(tensor, sum(make(each, dtype=dtype) for each in range(size)) * 12 / size)


@rule()
def all_reduce_of_any_floats_is_close_and_the_same_everywhere(
    dist: Any, rank: int, size: int
) -> None:
    inputs = [
        torch.randn(1000, generator=torch.Generator().manual_seed(each)) for each in range(size)
    ]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, torch.stack(inputs).double().sum(0).float())
    copies = [torch.empty(1000) for _ in range(size)]
    dist.all_gather(copies, tensor)
    for each in copies:
        same(each, tensor)


@rule(each={"empty": (0, 3), "number": (), "cube": (2, 3, 4)})
def all_reduce_takes_every_shape(dist: Any, rank: int, size: int, shape: tuple[int, ...]) -> None:
    tensor = make(rank, shape)
    dist.all_reduce(tensor)
    same(tensor, functools.reduce(operator.add, (make(each, shape) for each in range(size))))


# -- other rules


@rule(each={name: CASES[name] for name in ("broadcast", "reduce", "gather", "scatter")})
def every_rank_may_be_the_root(dist: Any, rank: int, size: int, case: Case) -> None:
    for root in range(size - 1):
        check_case(case, dist, rank, size, root_place=root)


@rule()
def the_root_is_rank_0_by_default(dist: Any, rank: int, size: int) -> None:
    tensors = [torch.empty(6) for _ in range(size)] if rank == 0 else None
    dist.gather(make(rank), tensors)
    tensor = torch.empty(6)
    dist.scatter(tensor, tensors)
    same(tensor, make(rank))


@rule(each={name: name for name in ("barrier", "monitored_barrier")})
def nobody_leaves_before_the_last_has_come(dist: Any, rank: int, size: int, name: str) -> None:
    time.sleep(0.02 * rank)
    came = time.monotonic()
    getattr(dist, name)()
    times = torch.tensor([came, time.monotonic()], dtype=torch.float64)
    everybodys = [torch.empty(2, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(everybodys, times)
    assert min(each[1].item() for each in everybodys) >= max(each[0].item() for each in everybodys)


@rule()
def empty_tensors_are_collected(dist: Any, rank: int, size: int) -> None:
    def empty() -> torch.Tensor:
        return torch.empty(0, 3)

    tensors = [empty() for _ in range(size)]
    dist.broadcast(empty(), 0)
    dist.all_gather(tensors, empty())
    dist.all_gather_into_tensor(empty(), empty())
    dist.all_to_all_single(empty(), empty())
    same(tensors[-1], empty())


@rule()
def tensors_with_gradients_are_carried(dist: Any, rank: int, size: int) -> None:
    weights = make(rank).requires_grad_()
    tensors = [torch.empty(6) for _ in range(size)]
    dist.all_gather(tensors, weights * 2)
    same(tensors[-1], make(size - 1) * 2)
    assert not tensors[-1].requires_grad


@rule()
def inputs_and_outputs_may_be_parts_of_one_tensor(dist: Any, rank: int, size: int) -> None:
    turned = torch.stack([make(each) for each in reversed(range(size))])
    rows = torch.stack([make(rank)] * size)
    dist.all_gather(list(rows)[::-1], rows[rank])
    same(rows, turned)
    rows = torch.stack([make(rank, salt=row) for row in range(size)])
    dist.scatter(rows[rank], list(rows) if rank == 0 else None)
    same(rows[rank], make(0, salt=rank))
    rows = torch.stack([make(rank)] * size)
    dist.gather(rows[0], list(rows) if rank == 0 else None)
    same(rows, turned.flip(0) if rank == 0 else rows)
