"""The arguments and the pairs of a ring, and errors in them."""

from __future__ import annotations

import inspect
import itertools
import os
import re
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

ACCESSORS = (
    get_comm_device,
    get_pipeline_parallel_pred_group,
    get_pipeline_parallel_succ_group,
)
GOOD: dict[str, Any] = {"head_ip": "127.0.0.1", "port": 29500, "world_size": 4, "rank": 2}
GOOD |= {"local_rank": 2, "comm_device": "cpu", "timeout_s": 30, "ring_ranks": None}
RULES = {
    "head_ip": ("an address or a host name", ["", b"127.0.0.1"]),
    "port": ("an integer from 1 to 65535", [0, 65536, "29500"]),
    "world_size": ("a positive integer", [0, 2.0, True]),
    "rank": ("an integer from 0 to 3", [4, -1, "0"]),
    "local_rank": ("a non-negative integer", [-1, "0"]),
    "comm_device": ("'cpu' or 'gpu'", ["tpu", "CPU", ["cpu"]]),
    "timeout_s": ("a positive number of seconds, .*", [0, -1.5, float("nan"), "30", True, 1e7]),
    "ring_order": ("'ranks' or 'hosts'", ["host"]),
}


def test_names_and_arguments_are_those_of_the_document() -> None:
    parameters = list(inspect.signature(initialize_distributed).parameters.values())[:6]
    names = "head_ip port world_size rank local_rank comm_device"
    assert [each.name for each in parameters] == names.split()
    assert {each.kind for each in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for accessor in (*ACCESSORS, ringsim.suppress_output):
        takes = ["rank"] if accessor is ringsim.suppress_output else []
        assert list(inspect.signature(accessor).parameters) == takes


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
        *((name, value, f"{name} must be {rule}")
          for name, (rule, values) in RULES.items() for value in values),
        ("ring_ranks", [], "ring_ranks must include this rank"),
        ("ring_ranks", [0, 1], "ring_ranks must include this rank"),
        ("ring_ranks", [2, 2], "ring_ranks must contain each rank only once"),
        ("ring_ranks", [2, 4], "each entry of ring_ranks must be .* from 0 to 3, got 4"),
        ("ring_ranks", [2, "3"], "each entry of ring_ranks must be .* from 0 to 3, got '3'"),
        ("ring_ranks", 2, "ring_ranks must be a sequence of ranks"),
        ("ring_ranks", "23", "ring_ranks must be a sequence of ranks"),
    ],
)  # fmt: skip
def test_wrong_argument(name: str, value: Any, rule: str) -> None:
    got = "" if ", got" in rule else f", got {re.escape(repr(value))}"
    with pytest.raises(ArgumentError, match="^" + rule + got) as caught:
        initialize_distributed(**{**GOOD, name: value})
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).endswith(".")
    if name not in ("world_size", "rank"):
        assert "(rank 2 of 4)" in str(caught.value)


def test_use_before_initialize_says_what_to_do() -> None:
    for use in (current_ring, *ACCESSORS):
        with pytest.raises(RingError, match=r"not in a ring\. Call initialize_distributed"):
            use()


@pytest.mark.parametrize(
    ("count", "local_rank", "words"),
    [
        (0, 0, r"torch finds no GPU or no NCCL \(rank 0 of 3, local_rank 0\)"),
        (2, 2, "local_rank must be less than 2, .*got 2"),
        (4, 1, None),
    ],
)
def test_local_rank_chooses_the_gpu(
    count: int, local_rank: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is selected before the rendezvous, because NCCL uses the current device."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: (chosen.append(device), 1 / 0)[0])
    monkeypatch.setattr("socket.socket", lambda *_: pytest.fail("no rendezvous without a GPU"))
    with pytest.raises(ArgumentError if words else ZeroDivisionError, match=words):
        initialize_distributed("127.0.0.1", 29500, 3, local_rank, local_rank, "gpu")
    assert chosen == ([] if words else [local_rank])


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
    command, environment = [sys.executable, "-c", program], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
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
