"""Rules for wrong arguments: every calling rank gets a Python error, and ranks can continue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from conformance import add_rule, make, refused, rule

Calls = Callable[[Any, int, int], list[Callable[[], Any]]]


def all_are_refused(calls: Calls, dist: Any, rank: int, size: int) -> None:
    """Fails unless every call raises an error, and the ranks can still communicate."""
    for call in calls(dist, rank, size):
        refused(call)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def empty(count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype)


def tensors(count: int, size: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [empty(size, dtype) for _ in range(count)]


INTS, DOUBLES = torch.int32, torch.float64
WRONG: dict[str, tuple[int, Calls]] = {  # by rule: the least world size, and the calls
    "nobody_sends_to_itself": (1, lambda d, r, n: [lambda: d.send(make(r), r)]),
    "a_peer_is_given_once": (
        2,
        lambda d, r, n: [
            lambda: d.isend(make(r), (r + 1) % n, group_dst=(r + 1) % n),
            lambda: d.irecv(make(r), (r + 1) % n, group_src=(r + 1) % n),
            lambda: d.broadcast(make(r), 0, group_src=0),
        ],
    ),
    "a_tag_is_not_negative": (
        2,
        lambda d, r, n: [
            lambda: d.isend(make(r), (r + 1) % n, tag=-1),
            lambda: d.irecv(make(r), (r + 1) % n, tag=-1),
        ],
    ),
    "a_message_is_a_tensor": (
        2,
        lambda d, r, n: [lambda: d.isend([1.0], (r + 1) % n), lambda: d.irecv("text", (r + 1) % n)],
    ),
    "a_collective_takes_tensors": (
        1,
        lambda d, r, n: [
            lambda: d.all_reduce(1.0),
            lambda: d.broadcast("text", 0),
            lambda: d.all_gather([make(r)] * (n - 1) + ["text"], make(r)),
        ],
    ),
    "a_root_must_exist": (
        1,
        lambda d, r, n: [
            lambda: d.broadcast(make(r), n),
            lambda: d.broadcast(make(r), -1),
            lambda: d.reduce(make(r), n),
        ],
    ),
    "all_gather_needs_a_place_for_each": (
        1,
        lambda d, r, n: [
            lambda: d.all_gather(tensors(n + 1), make(r)),
            lambda: d.all_gather(tensors(n - 1), make(r)),
        ],
    ),
    "all_gather_needs_one_dtype": (
        1,
        lambda d, r, n: [
            lambda: d.all_gather(tensors(n, dtype=INTS), make(r)),
            lambda: d.all_gather_into_tensor(empty(6 * n, DOUBLES), make(r)),
        ],
    ),
    "all_gather_needs_one_shape": (
        1,
        lambda d, r, n: [
            lambda: d.all_gather(tensors(n, 7), make(r)),
            lambda: d.all_gather_into_tensor(empty(6 * n + 1), make(r)),
        ],
    ),
    "all_to_all_needs_one_tensor_for_each": (
        1,
        lambda d, r, n: [
            lambda: d.all_to_all(tensors(n + 1), tensors(n)),
            lambda: d.all_to_all_single(empty(2 * n), make(r, (2 * n,)), [2] * n, [1] * n),
            lambda: d.all_to_all_single(empty(2 * n, INTS), make(r, (2 * n,))),
        ],
    ),
    "reduce_scatter_needs_one_tensor_for_each": (
        1,
        lambda d, r, n: [
            lambda: d.reduce_scatter(empty(), [make(r)] * (n + 1)),
            lambda: d.reduce_scatter_tensor(empty(), make(r, (6 * n + 1,))),
        ],
    ),
    "a_group_has_ranks_that_exist": (
        1,
        lambda d, r, n: [lambda: d.new_group([0, n]), lambda: d.new_group([0, 0])],
    ),
    "a_batch_is_a_list_of_p2p_ops": (
        2,
        lambda d, r, n: [
            lambda: d.batch_isend_irecv([]),
            lambda: d.batch_isend_irecv([make(r)]),
            lambda: d.P2POp(d.all_reduce, make(r), (r + 1) % n),
        ],
    ),
    "a_group_is_made_by_new_group": (
        1,
        lambda d, r, n: [lambda: d.all_reduce(make(r), group="the world")],
    ),
}
for _name, (_least, _calls) in WRONG.items():
    add_rule(_name, partial(all_are_refused, _calls), _least)

PEERS: dict[str, Callable[[int], Any]] = {
    "too high": lambda n: n,
    "negative": lambda n: -1,
    "no integer": lambda n: "1",
}
for _kind, _wrong in {**PEERS, "none": lambda n: None}.items():
    _sends: Calls = lambda d, r, n, wrong=_wrong: [  # type: ignore[misc]  # noqa: E731
        lambda: d.isend(make(r), wrong(n)),
        lambda: d.send(make(r), wrong(n)),
    ]
    add_rule(f"a_receiver_must_exist[{_kind}]", partial(all_are_refused, _sends))
for _kind, _wrong in PEERS.items():
    _recvs: Calls = lambda d, r, n, wrong=_wrong: [lambda: d.irecv(make(r), wrong(n))]  # type: ignore[misc]  # noqa: E731
    add_rule(f"a_sender_must_exist[{_kind}]", partial(all_are_refused, _recvs))


@rule()
def a_root_needs_its_list(dist: Any, rank: int, size: int) -> None:
    # only this one, so that no rank waits for a root that raises
    mine = [dist.new_group([each]) for each in range(size)][rank]
    calls = [
        lambda: dist.gather(make(rank), None, rank, group=mine),
        lambda: dist.gather(make(rank), tensors(2), rank, group=mine),
        lambda: dist.scatter(make(rank), None, rank, group=mine),
        lambda: dist.scatter(make(rank), [make(rank)] * 2, rank, group=mine),
    ]
    all_are_refused(lambda *_: calls, dist, rank, size)
