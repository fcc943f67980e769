"""What a ring is built from, without ranks.

Its arguments, its pairs, and what it asks of a backend that only takes notes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as native
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import comm as dist
from ringsim import (
    current_ring,
    destroy_distributed,
    get_comm_device,
    get_pipeline_parallel_pred_group,
    get_pipeline_parallel_succ_group,
    initialize_distributed,
)
from ringsim.errors import ArgumentError, Deadlock, RingError
from ringsim.ring import groups
from ringsim.ring.groups import (
    all_pairs,
    check_ring_arguments,
    pair_name,
    pairs_of,
)

GOOD: dict[str, Any] = {
    "head_ip": "127.0.0.1",
    "port": 29500,
    "world_size": 4,
    "rank": 2,
    "local_rank": 2,
    "comm_device": "cpu",
    "timeout_s": 30,
    "ring_ranks": None,
}


def test_names_and_arguments_are_those_of_the_document() -> None:
    parameters = list(inspect.signature(initialize_distributed).parameters.values())
    assert [each.name for each in parameters[:6]] == [
        "head_ip",
        "port",
        "world_size",
        "rank",
        "local_rank",
        "comm_device",
    ]
    assert {each.kind for each in parameters[:6]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in (
        "get_pipeline_parallel_pred_group",
        "get_pipeline_parallel_succ_group",
        "get_comm_device",
        "suppress_output",
    ):
        assert list(inspect.signature(getattr(ringsim, name)).parameters) == (
            ["rank"] if name == "suppress_output" else []
        )


def test_good_arguments_come_back() -> None:
    arguments = check_ring_arguments(**GOOD)
    assert {**vars(arguments), "ring_ranks": None} == {
        **GOOD,
        "ranks": (0, 1, 2, 3),
        "by_hosts": False,
    }
    numpys = check_ring_arguments(**{**GOOD, "rank": np.int64(2), "ring_ranks": np.array([2, 0])})
    assert (numpys.rank, numpys.ranks) == (2, (2, 0))
    assert {type(number) for number in (numpys.rank, *numpys.ranks)} == {int}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(
            ("head_ip", value, "head_ip must be an address or a name as text, got ")
            for value in (None, "", b"127.0.0.1")
        ),
        *(
            ("port", value, f"port must be a whole number from 1 to 65535, got {value!r}")
            for value in (0, 65536, "29500", None)
        ),
        *(
            ("world_size", value, f"world_size must be a whole number of 1 or more, got {value!r}")
            for value in (0, 2.0, True)
        ),
        *(
            ("rank", value, f"rank must be a whole number from 0 to 3, got {value!r}")
            for value in (4, -1, "0")
        ),
        *(
            ("local_rank", value, f"local_rank must be a whole number of 0 or more, got {value!r}")
            for value in (-1, "0")
        ),
        *(
            ("comm_device", value, "comm_device must be 'cpu' or 'gpu', got ")
            for value in ("tpu", "CPU", None, ["cpu"])
        ),
        *(
            ("timeout_s", value, f"timeout_s must be a number of seconds above 0, got {value!r}")
            for value in (0, -1.5, float("nan"), float("inf"), "30", True)
        ),
        ("ring_ranks", [], "ring_ranks must include the rank that passes it, got \\[\\]"),
        ("ring_ranks", [0, 1], "ring_ranks must include the rank that passes it, got \\[0, 1\\]"),
        ("ring_ranks", [2, 2], "ring_ranks must not name a rank twice, got \\[2, 2\\]"),
        ("ring_ranks", [2, 4], "each of ring_ranks must be a whole number from 0 to 3, got 4"),
        ("ring_ranks", [2, "3"], "each of ring_ranks must be a whole number from 0 to 3, got '3'"),
        ("ring_ranks", 2, "ring_ranks must be a sequence of ranks, got 2"),
        ("ring_order", "host", "ring_order must be 'ranks' or 'hosts', got 'host'"),
        ("ring_ranks", "23", "ring_ranks must be a sequence of ranks, got '23'"),
    ],
)
def test_wrong_argument(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ArgumentError, match="^" + rule) as caught:
        check_ring_arguments(**{**GOOD, name: value})
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).endswith(".")
    if name not in ("world_size", "rank"):
        assert "(rank 2 of 4)" in str(caught.value)


def test_use_before_initialize_says_what_to_do() -> None:
    for use in (
        current_ring,
        get_comm_device,
        get_pipeline_parallel_pred_group,
        get_pipeline_parallel_succ_group,
    ):
        with pytest.raises(RingError, match="the ring must exist before it is used, got none"):
            use()


@pytest.mark.parametrize(
    ("has_gpu", "local_rank", "words"),
    [
        (
            False,
            0,
            (
                r"comm_device must be 'cpu' where torch finds no GPU with NCCL, got 'gpu' \(rank 0 "
                r"of 3, local_rank 0\)"
            ),
        ),
        (True, 2, "local_rank must be below the number of GPUs of this machine, 2, got 2"),
    ],
)
def test_a_gpu_that_is_not_there_opens_nothing(
    has_gpu: bool, local_rank: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("there is no such GPU"))
    monkeypatch.setattr(groups, "meet", lambda *_: pytest.fail("nobody must be met without a GPU"))
    with pytest.raises(ArgumentError, match=words):
        initialize_distributed("127.0.0.1", 29500, 3, local_rank, local_rank, "gpu")


def test_local_rank_chooses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody is met: NCCL takes the current device."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: (chosen.append(device), 1 / 0)[0])
    with pytest.raises(ZeroDivisionError):
        initialize_distributed("127.0.0.1", 29500, 8, 6, 2, "gpu")
    assert chosen == [2]


def test_cuda_is_never_touched_for_cpu() -> None:
    """On a CPU build ``torch.cuda.set_device`` raises.

    On a CUDA build it would start CUDA in every rank.
    """
    program = """
import torch
def refuse(*arguments): raise SystemExit("touched CUDA")
for name in ("set_device", "is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
from ringsim.comm.bootstrap import listen
from ringsim.ring import destroy_distributed, initialize
listener = listen("127.0.0.1", 0)
initialize("127.0.0.1", listener.getsockname()[1], 1, 0, 0, "cpu", listen_socket=listener)
destroy_distributed()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- pairs ---


RINGS = st.lists(st.integers(0, 500), min_size=2, max_size=70, unique=True)


@given(RINGS)
def test_i_send_on_the_group_that_my_successor_receives_on(ring: list[int]) -> None:
    for place, rank in enumerate(ring):
        pred_pair, succ_pair = pairs_of(rank, ring) or pytest.fail(
            "a ring of two or more has pairs"
        )
        assert pred_pair == (ring[place - 1], rank)
        assert succ_pair == (rank, ring[(place + 1) % len(ring)])
        assert (pairs_of(succ_pair[1], ring) or [None])[0] == succ_pair
    assert all_pairs(ring) == [(pairs_of(rank, ring) or ())[1] for rank in ring]
    assert len({pair_name(pair) for pair in all_pairs(ring)}) == len(ring)


# --- on a backend other than torch ---


@st.composite
def worlds(draw: st.DrawFn) -> list[list[int]]:
    """Returns the ring of each rank: a world of up to eight, cut into rings at random."""
    order = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=4)) | {0, len(order)})
    rings = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
    return [next(ring for ring in rings if rank in ring) for rank in range(len(order))]


@given(worlds())
def test_each_rank_gets_the_groups_of_its_own_ring(rings: list[list[int]]) -> None:
    def join() -> list[Any]:
        rank = current_ring().rank
        destroy_distributed()
        initialize_distributed(ring_ranks=rings[rank])
        ring = current_ring()
        ends = ring.pred_group, ring.succ_group
        found = [
            group and (group.group_desc, native.get_process_group_ranks(group)) for group in ends
        ]
        destroy_distributed()
        return [ring.ranks, *found]

    link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=0.0)
    results = ringsim.simulate(join, world_size=len(rings), link=link).results
    for rank, (ranks, pred_group, succ_group) in enumerate(results):
        ring = rings[rank]
        assert ranks == tuple(ring)
        if len(ring) == 1:
            assert pred_group is succ_group is None
            continue
        place = ring.index(rank)
        pred, succ = ring[place - 1], ring[(place + 1) % len(ring)]
        assert pred_group == (f"ring:{pred}>{rank}", sorted([pred, rank]))
        assert succ_group == (f"ring:{rank}>{succ}", sorted([rank, succ]))


class Lazy:
    """Messages that connect as NCCL's do.

    The first of a group in each direction holds its caller until the other side comes, irecv too.
    """

    all_reduce = staticmethod(dist.all_reduce)

    def __init__(self) -> None:
        self._met: set[object] = set()

    def post(self, what: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        if (what, group) not in self._met:
            self._met.add((what, group))
            (dist.send if what is dist.isend else dist.recv)(torch.zeros(1), peer, group=group)
        return what(tensor, peer, group=group)

    def send(self, tensor: torch.Tensor, peer: int, group: Any) -> None:
        self.post(dist.isend, tensor, peer, group).wait()

    def recv(self, tensor: torch.Tensor, peer: int, group: Any) -> None:
        self.post(dist.irecv, tensor, peer, group).wait()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("forward", [True, False])
def test_once_pairs_have_connected_every_rank_may_receive_first(
    size: int, *, forward: bool
) -> None:
    def receive_first(*, connected: bool) -> float:
        ring, lazy, arriving = current_ring(), Lazy(), torch.zeros(1)
        if connected:
            groups.connect(
                ring.rank, ring.ranks, (ring.pred_group, ring.succ_group), torch.zeros(1), lazy
            )
        ends = [(ring.pred, ring.pred_group), (ring.succ, ring.succ_group)]
        source, target = ends if forward else reversed(ends)
        works = [
            lazy.post(dist.irecv, arriving, *source),
            lazy.post(dist.isend, torch.tensor([float(ring.rank)]), *target),
        ]
        for work in works:
            work.wait()
        return float(arriving)

    run = functools.partial(
        ringsim.simulate,
        receive_first,
        world_size=size,
        link=ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.0),
    )
    step = -1 if forward else 1
    assert run(kwargs={"connected": True}).results == [(rank + step) % size for rank in range(size)]
    with pytest.raises(Deadlock):
        run(kwargs={"connected": False})


@pytest.mark.parametrize(("size", "exchanges"), [(1, 0), (2, 2), (3, 3), (64, 2), (65, 3)])
def test_pairs_connect_edge_by_edge(size: int, exchanges: int) -> None:
    """An exchange is a message each way and an all_reduce of two, four latencies in all."""

    def in_order() -> None:
        ring = current_ring()
        groups.connect(
            ring.rank, ring.ranks, (ring.pred_group, ring.succ_group), torch.zeros(1), dist
        )

    link = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.0)
    assert ringsim.simulate(in_order, world_size=size, link=link).makespan_s == 4 * exchanges
