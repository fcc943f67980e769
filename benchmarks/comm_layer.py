"""Measures the time that ``ringsim.comm`` adds to torch's own calls.

The log is off, on without a selection, or on. Run ``python benchmarks/comm_layer.py`` (which takes
about two minutes), or add ``--quick``. With ``--deepspeed``, the script also measures DeepSpeed's
layer in the same three states. It installs DeepSpeed in a separate environment, or uses the given
Python. The cost is the CPU time of the calling thread on torch's fake backend, which sends nothing.
Each method runs in its own process, and the methods alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from turns import OPERATIONS, difference, install_deepspeed, measure, serve

OFF_GOAL_NS = 150.0
STATES = ("off", "on, not selected", "on")
OURS = tuple(f"ringsim {state}" for state in (*STATES, "on, named"))
THEIRS = tuple(f"DeepSpeed {state}" for state in STATES)
# DeepSpeed's logger becomes slower with every operation that it has logged, so its turns are short.
TURNS = {"DeepSpeed on, not selected": 500, "DeepSpeed on": 50}


@contextmanager
def prepare(method: str) -> Iterator[Callable[[int], float]]:
    """Prepares one method in this process.

    Returns a function that runs n operations and returns the CPU time per operation in ns.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.zeros(2)
    layer, _, state = method.partition(" ")
    isend, named = dist.isend, {}
    with ExitStack() as stack:
        if layer == "ringsim":
            from ringsim import comm

            isend = comm.isend
            if state != "off":
                comm.configure(enabled=True, prof_all=state != "on, not selected", prof_ops=[])
                stack.callback(comm.configure, enabled=False)
            if state == "on, named":
                named = {"log_name": "mine"}
        elif layer == "DeepSpeed":
            import deepspeed.comm

            deepspeed.comm.init_distributed(
                dist_backend="fake", verbose=False, dist_init_required=False
            )
            deepspeed.comm.configure(
                enabled=state != "off", prof_all=state == "on", prof_ops=[], verbose=False
            )
            isend = deepspeed.comm.isend
        elif state == "recorded":
            from ringsim.comm.torch_hooks import install, uninstall
            from ringsim.traces.recorder import Recorder

            recorder = Recorder(
                stack.enter_context(tempfile.TemporaryDirectory()), rank=0, world_size=2
            )
            install(recorder)
            stack.callback(uninstall, recorder)

        def run(count: int) -> float:
            start_ns = time.thread_time_ns()
            for _ in range(count):
                isend(tensor, 1, **named).wait()
            return (time.thread_time_ns() - start_ns) / count

        yield run


def main() -> None:
    """Prints a table, and whether the goal was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run only few rounds")
    parser.add_argument(
        "--deepspeed",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="also measure DeepSpeed, in PYTHON or in a new environment",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(prepare(options.serve))
        return
    from paired import against_itself, where

    rounds = 8 if options.quick else 60
    interpreters = dict.fromkeys(("torch", "torch again", "torch recorded", *OURS), sys.executable)
    with tempfile.TemporaryDirectory() as directory:
        if options.deepspeed is not None:
            interpreters |= dict.fromkeys(THEIRS, options.deepspeed or install_deepspeed(directory))
        times = measure(__file__, interpreters, rounds, TURNS)
    print(where())
    print(f"{'isend and wait':30}{'CPU/operation':>16}{'beyond torch, us (95 %)':>32}")
    for method, measured in times.items():
        beyond, low, high = (value / 1e3 for value in difference(measured, times["torch"]))
        print(
            f"{method:30}{statistics.median(measured) / 1e3:13.2f} us{beyond:14.2f} ({low:.2f} "
            f".. {high:.2f})"
        )
    print(against_itself(times["torch"]))
    off, low, high = difference(times["ringsim off"], times["torch"])
    verdict = "met" if off <= OFF_GOAL_NS else "missed"
    print(
        f"with the log off, a call takes {off:.0f} ns ({low:.0f} .. {high:.0f}) longer than in "
        f"torch; the goal of {OFF_GOAL_NS:.0f} ns was {verdict}"
    )
    on, low, high = (
        value / 1e3 for value in difference(times["ringsim on"], times["torch recorded"])
    )
    print(
        f"with the log on, a call takes {on:.2f} us ({low:.2f} .. {high:.2f}) longer than with "
        "the recorder alone"
    )
    if options.deepspeed is not None:
        first, last = (times["DeepSpeed on"][place] / 1e3 for place in (0, -1))
        print(
            f"DeepSpeed's logger takes {first:.0f} us at first, and {last:.0f} us after "
            f"{rounds * TURNS['DeepSpeed on']} operations"
        )
        print(
            f"(each turn has {OPERATIONS} operations, or {TURNS['DeepSpeed on']} if DeepSpeed logs)"
        )


if __name__ == "__main__":
    main()
