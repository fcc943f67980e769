"""The conformance suite on Gloo, and on a backend with messages only, where the rest is built."""

from __future__ import annotations

import os
import re
import warnings
from datetime import timedelta
from pathlib import Path

import conformance
import modest_backend
from conformance_collectives import WAYS

import ringsim
from ringsim import comm, simulate
from ringsim.errors import RingError

DTYPES = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16", "uint32", "uint64")
MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all_single",
)
GLOO = {  # unsupported by Gloo, in torch 2.13
    **{f"{move}_carries[{dtype}]": "Invalid scalar type" for move in MOVES for dtype in DTYPES},
    **{f"gather_carries[{dtype}]": "Invalid scalar type" for dtype in ("complex64", "complex128")},
    "strided_tensors_are_sent": "input tensor has to be contiguous",
    "strided_tensors_are_received": "input tensor has to be contiguous",
    **{f"all_gather_stacked[{way}]": "invalid tensor size" for way in WAYS},
    **{f"all_to_all_of_sizes[{way}]": "invalid tensor size" for way in WAYS},
    **{
        f"{name}[strided]": "Tensors must be contiguous"
        for name in ("all_to_all_single", "all_to_all_single_of_rows")
    },
    "all_reduce_reduces[sum,int16]": "Invalid scalar type",
    # No error without a recorder: Gloo takes the bytes as if the tensor were contiguous.
    **{
        f"{name}[strided]": "wrong values"
        for name in ("broadcast", "all_reduce", "reduce", "scatter", "reduce_scatter")
    },
    "a_receiver_must_exist[too high]": "Gloo reads beyond the end of its list of peers: SIGSEGV",
    "a_receiver_must_exist[negative]": "the same",
    "a_sender_must_exist[too high]": "Gloo looks for the peer until the timeout",
    "a_sender_must_exist[negative]": "the same",
    "a_wait_ends_at_its_limit[seconds]": "Gloo closes the connection of a message that was late",
    "a_wait_ends_at_its_limit[timedelta]": "the same",
}

_OF_MESSAGES = ("strided_tensors_are", "a_receiver", "a_sender", "a_wait_ends")
LEAST = {  # unsupported by Gloo's messages, without an error from operations built on them
    **{name: reason for name, reason in GLOO.items() if name.startswith(_OF_MESSAGES)},
    "inputs_and_outputs_may_be_parts_of_one_tensor": (
        "a message may arrive where another has not left yet"
    ),
    "is_completed_turns_true_without_a_wait": "Gloo reports messages only in wait()",
}


LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
COLUMNS = ["op", "group", "peer", "tag", "size_bytes", "dtype", "shape", "status"]
# Operations that Gloo lacks are built. Gloo takes complex numbers as pairs, reports only in wait()
# that an operation is done if it is coalesced, and refuses arguments below the recorder.
RECORDED_OTHERWISE = re.compile(
    r"^gather_(single|into_tensor)|complex|_coalesced\[(async|in a group)|without_a_wait|future|"
    r"_needs_|_must_exist|_that_exist|_is_given_once|_is_not_negative"
)


def keep_the_rules(directory: str, backend: str, skips: dict[str, str]) -> None:
    """Runs the rules on one rank."""
    warnings.simplefilter("ignore")  # built operations warn
    if backend == "modest":
        modest_backend.register()
        comm.set_backend("modest")
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        limit = timedelta(seconds=20)
        comm.init_process_group(init_method=f"file://{directory}/store", timeout=limit, **place)
    conformance.run_rules(comm, directory, skips)


def check_rules(directory: Path, backend: str, skips: dict[str, str]) -> ringsim.Trace:
    """Checks the rules with four ranks.

    Groups of one to three of them are among the rules, and simulated ranks follow all rules at
    every size.
    """
    traces: list[ringsim.Trace] = []

    def run() -> str:
        try:
            traces.append(
                ringsim.trace(
                    keep_the_rules,
                    world_size=4,
                    args=(str(directory), backend, skips),
                    ring=backend == "gloo",
                    timeout_s=20,
                    limit_s=100,
                )
            )
        except RingError as error:
            return str(error)
        return ""

    conformance.check_job(directory, 4, skips, run)
    return traces[0]


def records_of(trace: ringsim.Trace) -> dict[str, list[tuple[str, ...]]]:
    """Returns the records in the span of each rule, by rank; in order, unless messages race."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for row in trace.to_pandas().itertuples():
        if row.op == "span":
            records = found.setdefault(row.label, [])
        else:
            records.append((str(row.rank), *(str(getattr(row, column)) for column in COLUMNS)))
    return {name: sorted(each) if "anybody" in name else each for name, each in found.items()}


def test_messages_alone_keep_the_rules(tmp_path: Path) -> None:
    check_rules(tmp_path, "modest", LEAST)


def test_torch_keeps_the_rules_and_simulated_ranks_record_the_same(tmp_path: Path) -> None:
    real = records_of(check_rules(tmp_path, "gloo", GLOO))
    simulated = records_of(
        simulate(keep_the_rules, world_size=4, args=(str(tmp_path), "gloo", GLOO), link=LINK)
    )
    names = [name for name in real if not RECORDED_OTHERWISE.search(name)]
    assert len(names) > 200
    for name in names:
        assert real[name] == simulated[name], name
