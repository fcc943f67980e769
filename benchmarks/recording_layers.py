"""Measures each part of the cost of recording a Gloo message.

Two ranks send 8 bytes back and forth. The script adds the parts of recording one after another: a
Python function around each method of torch, the record of the post, the look-up of the group and
the payload, the dictionary of handles, the record of the wait, the record of the end, and the rest
of ringsim. Each layer includes the previous ones, and the layers alternate. Run ``python
benchmarks/recording_layers.py`` (which takes about two minutes).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from paired import against_itself, where

LAYERS = {
    "off": "torch alone",
    "methods": "a Python function around send, recv and wait",
    "post": "+ the record of the post: the program's line, the time, 72 bytes",
    "names": "+ the look-up of group, peer, dtype and shape",
    "handles": "+ the dictionary of open handles",
    "wait": "+ the time when the wait begins",
    "done": "+ the time when it ends",
    "ringsim": "all of ringsim: checks, batches, failures",
}
MESSAGES = 300


class Cost(NamedTuple):
    """The cost of an operation: CPU time in us, page faults, and context switches."""

    cpu_us: float
    user_us: float
    faults: float
    switches: float


def measure(exchange: Callable[[], None]) -> Cost:
    """Returns this thread's cost per operation during an exchange of ``MESSAGES``."""
    before, start_s = resource.getrusage(resource.RUSAGE_THREAD), time.thread_time()
    exchange()
    cpu_s, after = time.thread_time() - start_s, resource.getrusage(resource.RUSAGE_THREAD)
    count = 2 * MESSAGES
    return Cost(
        cpu_s / count * 1e6,
        (after.ru_utime - before.ru_utime) / count * 1e6,
        (after.ru_minflt - before.ru_minflt) / count,
        (after.ru_nvcsw - before.ru_nvcsw) / count,
    )


def run_rank(rank: int, directory: str, rounds: int, results: Any) -> None:
    """Measures every layer on one of two Gloo ranks; rank 0 returns the costs by layer."""
    import torch
    import torch.distributed as dist
    from torch.distributed import ProcessGroup, Work

    from ringsim.comm.numbering import RECV_NAMES, SEND_NAMES
    from ringsim.comm.torch_hooks import install, put, uninstall
    from ringsim.traces.recorder import Recorder

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2
    )
    tensor, other = torch.zeros(8, dtype=torch.uint8), 1 - rank
    recorder = Recorder(directory, rank, 2, max_records=1 << 22)
    recorder.sites.declare_library(
        os.path.dirname(torch.__file__), speaker=dist.distributed_c10d.__file__
    )
    group, payload = recorder.group("world", [0, 1]), recorder.payload("uint8", [8], 8)
    groups = {id(dist.group.WORLD): (group, {0: 0, 1: 1})}
    payloads = {tensor.dtype: {tensor.shape: payload}}
    pending: dict[Work, Any] = {}

    def wrap_message(layer: str, name: str, ops: dict[str, int]) -> Callable[..., Any]:
        call, post = getattr(ProcessGroup, name), recorder.make_post(ops[f"i{name}"], ops)

        def only_call(self: ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
            return call(self, tensors, peer, tag)

        def only_post(self: ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
            post(group, peer, tag, payload)
            return call(self, tensors, peer, tag)

        def look_up(self: ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
            number, ranks = groups[id(self)]
            shape = payloads[tensors[0].dtype][tensors[0].shape]
            slot = post(number, ranks[peer], tag, shape)
            work = call(self, tensors, peer, tag)
            if layer != "names":
                pending[work] = slot
            return work

        return {"methods": only_call, "post": only_post}.get(layer, look_up)

    def wrap_wait(layer: str) -> Callable[..., Any]:
        call, begin, end = Work.wait, recorder.wait, recorder.complete

        def wait(self: Work) -> Any:
            slot = pending.pop(self, None)
            if layer in ("wait", "done"):
                begin(slot)
            result = call(self)
            if layer == "done":
                end(slot)
            return result

        return wait

    def exchange() -> None:
        for _ in range(MESSAGES):
            for sender in (0, 1):
                if sender == rank:
                    dist.send(tensor, other)
                else:
                    dist.recv(tensor, other)

    costs: dict[str, list[Cost]] = {layer: [] for layer in LAYERS}
    order = random.Random(0)  # the same on both ranks
    for number in range(rounds + 1):
        for layer in order.sample(list(costs), len(costs)):
            with ExitStack() as stack:
                if layer == "ringsim":
                    install(recorder)
                    stack.callback(uninstall, recorder)
                elif layer != "off":
                    originals = put(
                        {
                            (ProcessGroup, "send"): wrap_message(layer, "send", SEND_NAMES),
                            (ProcessGroup, "recv"): wrap_message(layer, "recv", RECV_NAMES),
                            (Work, "wait"): wrap_wait(layer),
                        }
                    )
                    stack.callback(put, originals)
                cost = measure(exchange)
            if number:  # the first round warms up
                costs[layer].append(cost)
    dist.destroy_process_group()
    recorder.close()
    if rank == 0:
        results.put(costs)


def main() -> None:
    """Prints the cost of each layer, compared with torch alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=run_rank, args=(rank, directory, options.rounds, results))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        costs: dict[str, list[Cost]] = results.get()
        for process in ranks:
            process.join()
    print(where())
    print(
        f"{'per operation':70}{'CPU, us':>9}{'beyond':>8}{'user':>7}{'faults':>8}{'switches':>10}"
    )
    for layer, text in LAYERS.items():
        median = Cost(*(statistics.median(column) for column in zip(*costs[layer], strict=True)))
        beyond = statistics.median(
            one.cpu_us - off.cpu_us for one, off in zip(costs[layer], costs["off"], strict=True)
        )
        print(
            f"{layer + ': ' + text:70}{median.cpu_us:9.1f}{beyond:8.1f}{median.user_us:7.1f}"
            f"{median.faults:8.2f}{median.switches:10.2f}"
        )
    print(against_itself([one.cpu_us for one in costs["off"]]))


if __name__ == "__main__":
    main()
