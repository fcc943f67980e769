"""The arguments and the pairs of a ring, and errors in them."""

from __future__ import annotations

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
from ringsim import (
    current_ring,
    destroy_distributed,
    get_comm_device,
    get_pipeline_parallel_pred_group,
    get_pipeline_parallel_succ_group,
    initialize_distributed,
)
from ringsim.errors import ArgumentError, RingError

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


def test_arguments_may_be_numpys() -> None:
    def join() -> tuple[Any, ...]:
        destroy_distributed()
        rank = native.get_rank() if native.is_initialized() else int(os.environ["RANK"])
        numbers = np.array([1, 0])
        initialize_distributed(rank=numbers[1 - rank], ring_ranks=numbers)
        ring = current_ring()
        return ring.rank, ring.ranks, {type(each) for each in (ring.rank, *ring.ranks)}

    link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=0.0)
    results = ringsim.simulate(join, world_size=2, link=link).results
    assert results == [(rank, (1, 0), {int}) for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(
            ("head_ip", value, "head_ip must be an address or a host name, got ")
            for value in ("", b"127.0.0.1")
        ),
        *(
            ("port", value, f"port must be an integer from 1 to 65535, got {value!r}")
            for value in (0, 65536, "29500")
        ),
        *(
            ("world_size", value, f"world_size must be a positive integer, got {value!r}")
            for value in (0, 2.0, True)
        ),
        *(
            ("rank", value, f"rank must be an integer from 0 to 3, got {value!r}")
            for value in (4, -1, "0")
        ),
        *(
            ("local_rank", value, f"local_rank must be a non-negative integer, got {value!r}")
            for value in (-1, "0")
        ),
        *(
            ("comm_device", value, "comm_device must be 'cpu' or 'gpu', got ")
            for value in ("tpu", "CPU", ["cpu"])
        ),
        *(
            ("timeout_s", value, f"timeout_s must be a positive number of seconds, got {value!r}")
            for value in (0, -1.5, float("nan"), float("inf"), "30", True)
        ),
        ("ring_ranks", [], "ring_ranks must include this rank, got \\[\\]"),
        ("ring_ranks", [0, 1], "ring_ranks must include this rank, got \\[0, 1\\]"),
        ("ring_ranks", [2, 2], "ring_ranks must contain each rank only once, got \\[2, 2\\]"),
        ("ring_ranks", [2, 4], "each entry of ring_ranks must be an integer from 0 to 3, got 4"),
        (
            "ring_ranks",
            [2, "3"],
            "each entry of ring_ranks must be an integer from 0 to 3, got '3'",
        ),
        ("ring_ranks", 2, "ring_ranks must be a sequence of ranks, got 2"),
        ("ring_order", "host", "ring_order must be 'ranks' or 'hosts', got 'host'"),
        ("ring_ranks", "23", "ring_ranks must be a sequence of ranks, got '23'"),
    ],
)
def test_wrong_argument(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ArgumentError, match="^" + rule) as caught:
        initialize_distributed(**{**GOOD, name: value})
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
        with pytest.raises(RingError, match="this rank is in no ring yet"):
            use()


@pytest.mark.parametrize(
    ("has_gpu", "local_rank", "words"),
    [
        (
            False,
            0,
            (
                r"comm_device is 'gpu', but torch finds no GPU or no NCCL \(rank 0 "
                r"of 3, local_rank 0\)"
            ),
        ),
        (True, 2, "local_rank must be less than 2, got 2"),
    ],
)
def test_a_gpu_that_is_not_there_opens_nothing(
    has_gpu: bool, local_rank: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("there is no such GPU"))
    monkeypatch.setattr("socket.socket", lambda *_: pytest.fail("no rendezvous without a GPU"))
    with pytest.raises(ArgumentError, match=words):
        initialize_distributed("127.0.0.1", 29500, 3, local_rank, local_rank, "gpu")


def test_local_rank_chooses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is selected before the rendezvous, because NCCL uses the current device."""
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
from ringsim import destroy_distributed, initialize_distributed
initialize_distributed(world_size=1, comm_device="cpu")
destroy_distributed()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# -- pairs, on the virtual clock


@st.composite
def worlds(draw: st.DrawFn) -> list[list[int]]:
    """Returns the ring of each rank, in a world of up to eight ranks randomly cut into rings."""
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
        pairs = [(name, pair) for name, pair in ring.group_pairs if rank in pair]
        return [ring.ranks, len(ring.group_pairs), pairs, *found]

    link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=0.0)
    results = ringsim.simulate(join, world_size=len(rings), link=link).results
    for rank, (ranks, count, pairs, pred_group, succ_group) in enumerate(results):
        ring = rings[rank]
        assert ranks == tuple(ring)
        if len(ring) == 1:
            assert pred_group is succ_group is None
            assert count == 0
            continue
        assert count == len(ring)
        place = ring.index(rank)
        pred, succ = ring[place - 1], ring[(place + 1) % len(ring)]
        expected = [(f"ring:{a}>{b}", (a, b)) for a, b in ((pred, rank), (rank, succ))]
        assert sorted(pairs) == sorted(expected)
        assert pred_group == (f"ring:{pred}>{rank}", sorted([pred, rank]))
        assert succ_group == (f"ring:{rank}>{succ}", sorted([rank, succ]))
