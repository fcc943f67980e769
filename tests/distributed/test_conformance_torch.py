"""The conformance suite on torch (Gloo), and on a backend that has only what the protocol asks for, so that all the rest is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import conformance
import pytest
import torch.distributed as dist
from conformance_collectives import WAYS

import ringsim
from ringsim import comm
from ringsim.comm.backend import Backend
from ringsim.errors import RingError

DTYPES = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "uint64")
MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all_single")
GLOO = {  # what Gloo cannot do, in torch 2.13
    **{f"{move}_carries[{dtype}]": "Invalid scalar type" for move in MOVES for dtype in DTYPES},
    **{f"gather_carries[{dtype}]": "Invalid scalar type" for dtype in ("complex64", "complex128")},
    "strided_tensors_are_sent": "input tensor has to be contiguous",
    "strided_tensors_are_received": "input tensor has to be contiguous",
    **{f"all_gather_stacked[{way}]": "invalid tensor size" for way in WAYS},
    **{f"all_to_all_of_sizes[{way}]": "invalid tensor size" for way in WAYS},
    **{f"{name}[strided]": "Tensors must be contiguous" for name in ("all_to_all_single", "all_to_all_single_of_rows")},
    "all_reduce_reduces[sum,int16]": "Invalid scalar type",
    # These are silent without a recorder: Gloo takes the bytes as if the tensor were contiguous.
    **{f"{name}[strided]": "wrong values" for name in ("broadcast", "all_reduce", "reduce", "scatter", "reduce_scatter")},
    "a_receiver_must_exist[too high]": "Gloo reads beyond the end of its list of peers: SIGSEGV",
    "a_receiver_must_exist[negative]": "the same",
    "a_sender_must_exist[too high]": "Gloo looks for the peer until the time-out",
    "a_sender_must_exist[negative]": "the same",
    "a_wait_ends_at_its_limit[seconds]": "Gloo closes the connection of a message that was late",
    "a_wait_ends_at_its_limit[timedelta]": "the same",
}

_OF_MESSAGES = ("strided_tensors_are", "a_receiver", "a_sender", "a_wait_ends")
LEAST = {  # what Gloo's messages cannot do, and what is built from them does not say
    **{name: reason for name, reason in GLOO.items() if name.startswith(_OF_MESSAGES)},
    "is_completed_turns_true_without_a_wait": "Gloo tells of messages only in wait()",
}


class Least(Backend):
    """Gloo with nothing but what the protocol asks for: everything else is built from messages."""

    name = "least"
    init_process_group = staticmethod(dist.init_process_group)
    new_group = staticmethod(dist.new_group)
    destroy_process_group = staticmethod(dist.destroy_process_group)
    is_initialized = staticmethod(dist.is_initialized)
    get_rank = staticmethod(dist.get_rank)
    get_world_size = staticmethod(dist.get_world_size)
    get_process_group_ranks = staticmethod(dist.get_process_group_ranks)
    isend = staticmethod(dist.isend)
    irecv = staticmethod(dist.irecv)


def keep_the_rules(directory: str, make_backend: Callable[[], Backend] | None, skips: dict[str, str]) -> None:
    """Runs the rules on one rank."""
    warnings.simplefilter("ignore")  # what is built is announced
    if make_backend is not None:
        comm.set_backend(make_backend())
    conformance.run_rules(comm, directory, skips)


@pytest.mark.parametrize(("make_backend", "skips"), [(None, GLOO), (Least, LEAST)], ids=["torch", "messages alone"])
def test_the_rules_are_kept(tmp_path: Path, make_backend: Callable[[], Backend] | None, skips: dict[str, str]) -> None:
    """With four ranks: groups of one to three of them are among the rules, and simulated ranks keep all rules at every size."""

    def run() -> str:
        try:
            ringsim.trace(keep_the_rules, world_size=4, args=(str(tmp_path), make_backend, skips), timeout_s=20, limit_s=100)
        except RingError as error:
            return str(error)
        return ""

    conformance.check_job(tmp_path, 4, skips, run)
