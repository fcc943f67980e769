"""``ringsim.calibration_worker``, a worker that provides the input for ``ringsim.calibrate``.

The worker runs on two ranks for a few seconds. It has four parts, each of which isolates some of
the constants::

    ping-pong              the processor time per message, with marks before and after
    both ways together     how many messages stall, and for how long
    collectives            the time that Gloo takes before a collective's first message
    computing and sending  links, posting, sleeping, and the program's own time around them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ringsim import comm as dist
from ringsim.compute_costs import PROCESSOR, compute
from ringsim.errors import ArgumentError
from ringsim.traces.spans import mark

_COMPUTED_S = (0.001, 0.003)
_MARKED = 5  # ping-pongs between two marks
_FLOAT_BYTES = 4


def calibration_worker(
    sizes_bytes: Sequence[int] = (256, 65536, 1048576), repeats: int = 60
) -> None:
    """Sends messages, calls collectives and computes, as input for ``ringsim.calibrate``.

    A trace of this worker shows every constant. Call it on both ranks at the same time, on an idle
    machine. The call blocks for a few seconds.

    Args:
        sizes_bytes: the message sizes, at least two.
        repeats: the number of messages of each size.

    Raises:
        ArgumentError: the run does not have exactly two ranks.

    Example:
        >>> import ringsim
        >>> trace = ringsim.trace(
        ...     ringsim.calibration_worker,
        ...     world_size=2,
        ...     kwargs={"sizes_bytes": (256, 65536), "repeats": 10},
        ... )
        >>> ringsim.calibrate(trace).missing
        ()
    """
    if dist.get_world_size() != 2:
        raise ArgumentError(
            f"world_size must be 2 for calibration_worker, got {dist.get_world_size()}. Run "
            "calibration_worker on two ranks."
        )
    for size_bytes in sizes_bytes:
        _send(size_bytes, repeats)
        _call_collectives(size_bytes, repeats)
    _mark_processor_time()  # because the rest of the processor time is computing
    for size_bytes in sizes_bytes:
        for seconds in _COMPUTED_S:
            _compute_and_send(size_bytes, seconds, repeats // 4)


def _send(size_bytes: int, repeats: int) -> None:
    """Sends messages to the other rank and back, then in both directions at the same time."""
    rank = dist.get_rank()
    peer, here = 1 - rank, torch.zeros(size_bytes // _FLOAT_BYTES)
    there = torch.zeros_like(here)
    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for number in range(repeats + 1):
        if number % _MARKED == 0:  # often, because intervals with stalled messages are left out
            _mark_processor_time()
        first(here, peer)
        second(there, peer)
    for _ in range(repeats):
        sending = dist.isend(here, peer)
        assert sending is not None  # None only outside the group
        dist.recv(there, peer)
        sending.wait()


def _compute_and_send(size_bytes: int, seconds: float, rounds: int) -> None:
    """Makes rank 1 wait for a result from rank 0, then rank 0 for a result from rank 1.

    The waiting rank alternates between ``recv`` and ``irecv``.
    """
    for sender in (0, 1):
        here = torch.zeros(size_bytes // _FLOAT_BYTES)
        for number in range(rounds):
            if dist.get_rank() == sender:
                compute(seconds)
                dist.send(here, 1 - sender)
            elif number % 2:
                dist.recv(here, sender)
            else:
                receiving = dist.irecv(here, sender)
                assert receiving is not None  # None only outside the group
                receiving.wait()


def _call_collectives(size_bytes: int, repeats: int) -> None:
    whole = torch.zeros(size_bytes // _FLOAT_BYTES)
    halves = list(torch.zeros_like(whole).chunk(2))
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.broadcast(whole, 0),
        lambda: dist.all_reduce(whole),
        lambda: dist.all_gather(halves, whole[: len(whole) // 2]),
        dist.barrier,
    )
    for call in calls:
        for _ in range(repeats // 2):
            call()


def _mark_processor_time() -> None:
    mark(f"{PROCESSOR}{time.process_time()!r} {time.thread_time()!r} s")
