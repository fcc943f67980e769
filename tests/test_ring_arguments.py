"""Every wrong argument of ``initialize_distributed`` ends in one sentence that names it, before a socket is opened."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ringsim.errors import ArgumentError, RingError
from ringsim.ring import groups
from ringsim.ring.groups import check_ring_arguments

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


def test_good_arguments_come_back() -> None:
    arguments = check_ring_arguments(**GOOD)
    assert {name: getattr(arguments, name) for name in GOOD if name != "ring_ranks"} == {
        name: GOOD[name] for name in GOOD if name != "ring_ranks"
    }
    assert arguments.ranks == (0, 1, 2, 3)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    arguments = check_ring_arguments(**{**GOOD, "rank": np.int64(2), "ring_ranks": np.array([2, 0])})
    assert type(arguments.rank) is int
    assert arguments.ranks == (2, 0)
    assert {type(rank) for rank in arguments.ranks} == {int}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("head_ip", None, "head_ip must be an address or a name as text, got None"),
        ("head_ip", "", "head_ip must be an address or a name as text, got ''"),
        ("head_ip", b"127.0.0.1", "head_ip must be an address or a name as text"),
        ("port", 0, "port must be a whole number from 1 to 65535, got 0"),
        ("port", 65536, "port must be a whole number from 1 to 65535, got 65536"),
        ("port", "29500", "port must be a whole number from 1 to 65535, got '29500'"),
        ("port", None, "port must be a whole number from 1 to 65535, got None"),
        ("world_size", 0, "world_size must be a whole number of 1 or more, got 0"),
        ("world_size", 2.0, "world_size must be a whole number of 1 or more, got 2.0"),
        ("world_size", True, "world_size must be a whole number of 1 or more, got True"),
        ("rank", 4, "rank must be a whole number from 0 to 3, got 4"),
        ("rank", -1, "rank must be a whole number from 0 to 3, got -1"),
        ("rank", "0", "rank must be a whole number from 0 to 3, got '0'"),
        ("local_rank", -1, "local_rank must be a whole number of 0 or more, got -1"),
        ("local_rank", "0", "local_rank must be a whole number of 0 or more, got '0'"),
        ("comm_device", "tpu", "comm_device must be 'cpu' or 'gpu', got 'tpu'"),
        ("comm_device", "CPU", "comm_device must be 'cpu' or 'gpu', got 'CPU'"),
        ("comm_device", None, "comm_device must be 'cpu' or 'gpu', got None"),
        ("comm_device", ["cpu"], "comm_device must be 'cpu' or 'gpu', got"),
        ("timeout_s", 0, "timeout_s must be a number of seconds above 0, got 0"),
        ("timeout_s", -1.5, "timeout_s must be a number of seconds above 0, got -1.5"),
        ("timeout_s", float("nan"), "timeout_s must be a number of seconds above 0, got nan"),
        ("timeout_s", float("inf"), "timeout_s must be a number of seconds above 0, got inf"),
        ("timeout_s", "30", "timeout_s must be a number of seconds above 0, got '30'"),
        ("timeout_s", True, "timeout_s must be a number of seconds above 0, got True"),
        ("ring_ranks", [], "ring_ranks must include the rank that passes it, got \\[\\]"),
        ("ring_ranks", [0, 1], "ring_ranks must include the rank that passes it, got \\[0, 1\\]"),
        ("ring_ranks", [2, 2], "ring_ranks must not name a rank twice, got \\[2, 2\\]"),
        ("ring_ranks", [2, 4], "each of ring_ranks must be a whole number from 0 to 3, got 4"),
        ("ring_ranks", [2, "3"], "each of ring_ranks must be a whole number from 0 to 3, got '3'"),
        ("ring_ranks", 2, "ring_ranks must be a sequence of ranks, got 2"),
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
    from ringsim import ring

    for use in (ring.current_ring, ring.get_comm_device, ring.get_pipeline_parallel_pred_group, ring.get_pipeline_parallel_succ_group):
        with pytest.raises(RingError, match="the ring must exist before it is used, got none"):
            use()


def test_gpu_without_a_gpu_says_so_and_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ringsim import ring

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(groups, "meet", lambda *_: pytest.fail("nobody must be met without a GPU"))
    with pytest.raises(
        ArgumentError, match=r"comm_device must be 'cpu' where torch finds no GPU with NCCL, got 'gpu' \(rank 0 of 1, local_rank 0\)"
    ):
        ring.initialize_distributed("127.0.0.1", 29500, 1, 0, 0, "gpu")


def test_more_ranks_than_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ringsim import ring

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("there is no such GPU"))
    with pytest.raises(ArgumentError, match="local_rank must be below the number of GPUs of this machine, 2, got 2"):
        ring.initialize_distributed("127.0.0.1", 29500, 3, 2, 2, "gpu")


def test_cuda_is_never_touched_for_cpu() -> None:
    """On a CPU build ``torch.cuda.set_device`` raises, and on a CUDA build it would start CUDA in every rank."""
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
        [sys.executable, "-c", program], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
