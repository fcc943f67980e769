"""The ring on a backend other than torch: which groups are asked for in which order, by a backend that only writes down."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringsim.comm import set_backend
from ringsim.comm.backend import Backend
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.ring import current_ring, destroy_distributed, initialize, initialize_distributed
from ringsim.ring.groups import build_on_backend, check_ring_arguments


class Paper(Backend):
    """A rank of a world that does not exist; a group is its name and members."""

    name = "paper"

    def __init__(self, rank: int, rings: list[list[int]], joined: bool = False) -> None:
        self.place, self.rings, self.joined = rank, rings, joined
        self.calls: list[Any] = []

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("init", args, kwargs))
        self.joined = True

    def new_group(self, ranks: Any = None, *args: Any, timeout: Any = None, group_desc: Any = None) -> Any:
        self.calls.append((group_desc, ranks, timeout))
        return (group_desc, ranks)

    def destroy_process_group(self, group: Any = None) -> None:
        self.calls.append(("destroy", group))
        self.joined = self.joined and group is not None

    def is_initialized(self) -> bool:
        return self.joined

    def get_rank(self, group: Any = None) -> int:
        return self.place

    def get_world_size(self, group: Any = None) -> int:
        return len(self.rings)

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(group[1])

    def all_gather(self, rows: list[torch.Tensor], row: torch.Tensor) -> None:
        for mine, ring in zip(rows, self.rings, strict=True):
            mine[: len(ring)] = torch.tensor(ring)
            mine[len(ring) :] = -1
        assert torch.equal(row, rows[self.place])

    def isend(self, *args: Any, **kwargs: Any) -> Any:
        raise RingError("nothing is sent")

    irecv = isend


@st.composite
def worlds(draw: st.DrawFn) -> list[list[int]]:
    """Returns the ring of each rank: a world of up to eight, cut into rings at random."""
    order = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=4)) | {0, len(order)})
    rings = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
    return [next(ring for ring in rings if rank in ring) for rank in range(len(order))]


@given(worlds())
def test_all_ranks_ask_for_the_same_groups_and_keep_their_own(rings: list[list[int]]) -> None:
    asked = []
    for rank, ring in enumerate(rings):
        backend = Paper(rank, rings, joined=True)
        wanted = check_ring_arguments("127.0.0.1", 1, len(rings), rank, 0, "cpu", 7, ring)
        with ExitStack() as undo:
            pred_group, succ_group = build_on_backend(backend, wanted, undo)
            asked.append(list(backend.calls))
        if len(ring) == 1:
            assert pred_group is succ_group is None
            continue
        place = ring.index(rank)
        pred, succ = ring[place - 1], ring[(place + 1) % len(ring)]
        assert pred_group == (f"ring:{pred}>{rank}", [pred, rank])
        assert succ_group == (f"ring:{rank}>{succ}", [rank, succ])
        ended = backend.calls[len(asked[-1]) :]
        assert sorted(ended) == sorted([("destroy", pred_group), ("destroy", succ_group)])  # and not the world of somebody else
    assert all(each == asked[0] for each in asked)
    assert sorted(name for name, _, _ in asked[0]) == sorted({name for name, _, _ in asked[0]})
    assert len(asked[0]) == sum(len(ring) > 1 for ring in rings)  # as many edges as ranks in rings of two or more
    assert {timeout for _, _, timeout in asked[0]} <= {timedelta(seconds=7)}


def test_the_world_is_joined_and_left_with_the_ring() -> None:
    backend = Paper(1, [[0, 1]] * 2)
    set_backend(backend)
    initialize("10.0.0.1", 29500, 2, 1, 0, "cpu", timeout_s=3)
    assert backend.calls[0] == ("init", (), {"timeout": timedelta(seconds=3), "world_size": 2, "rank": 1})
    succ_group: Any = current_ring().succ_group
    assert succ_group == ("ring:1>0", [1, 0])
    before = list(backend.calls)
    initialize_distributed()  # what is left out, the ring says
    assert backend.calls == before
    destroy_distributed()
    assert backend.calls == [*before, ("destroy", None)]


def test_a_world_that_the_script_has_left_takes_the_ring_with_it() -> None:
    backend = Paper(0, [[0, 1]] * 2)
    set_backend(backend)
    initialize("10.0.0.1", 29500, 2, 0, 0, "cpu")
    first = current_ring()
    backend.destroy_process_group()
    initialize("10.0.0.1", 29500, 2, 0, 0, "cpu")
    assert current_ring() is not first
    assert backend.calls.count(("destroy", None)) == 1


def test_what_does_not_fit_is_refused() -> None:
    set_backend(Paper(1, [[0, 1], [1]]))
    with pytest.raises(ArgumentError, match=r"comm_device must be 'cpu' on the backend 'paper', got 'gpu' \(rank 1 of 2\)"):
        initialize("10.0.0.1", 29500, 2, 1, 0, "gpu")
    with pytest.raises(RendezvousFailed, match=r"ring_ranks must be the same .* \[0, 1\] on rank 0 and \[1\] on rank 1 \(rank 1 of 2\)"):
        initialize("10.0.0.1", 29500, 2, 1, 0, "cpu", ring_ranks=[1])
    set_backend(Paper(1, [[0, 1]] * 2, joined=True))
    with pytest.raises(ArgumentError, match=r"rank must be 1 as in the default process group that exists, got 0 \(rank 1 of 2\)"):
        initialize("10.0.0.1", 29500, 2, 0, 0, "cpu")
