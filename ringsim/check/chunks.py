"""The second exercise of the lesson on the communication layer: an all-reduce that goes round the ring in chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.neighbours import ALONE_HINT, RAISED_HINT, judge_way
from ringsim.check.result import CheckResult
from ringsim.traces.events import NONE, RECV, SEND
from ringsim.traces.value import Trace, count

__all__ = ["ring_all_reduce"]

Numbers = list[float]
_ITEM_BYTES: Final = 4  # float32
_WHOLE_HINT: Final = (
    "The whole tensor goes round here. Cut it into N chunks, tensor.chunk(N), and send one chunk at a time: in step s, rank r sends "
    "chunk (r - s) % N and receives chunk (r - s - 1) % N."
)
_HALF_HINT: Final = (
    "That is one of the two halves. First N - 1 steps in which what arrives is added to my chunk (reduce-scatter), then N - 1 steps in "
    "which what arrives replaces it (all-gather)."
)
_BYTES_HINT: Final = (
    "There are 2 (N - 1) steps, and in each every rank sends one chunk, an N-th of the tensor, and receives another: "
    "for step in range(2 * (N - 1))."
)
_SUM_HINT: Final = (
    "In the first N - 1 steps add what arrives to the chunk of that number, in the last N - 1 put it in its place. Receive into a fresh "
    "tensor, and pass on a chunk only after the one that arrived in the step before has been dealt with."
)


def ring_all_reduce(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks an all-reduce made of messages between neighbours: reduce-scatter, then all-gather.

    ``function(tensor)`` gets this rank's own numbers, a float32 tensor of one dimension whose length N divides, and returns the sum of all
    ranks' tensors. Every rank must have sent 2 (N - 1) / N times the bytes of the tensor, no more and no less, all of them to its
    successor, on the group of that edge; the bytes are read from the trace. It is run on 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: what sizes and numbers are drawn from; None to draw the seed, too.

    Returns:
        The verdict; its trace shows what was really sent.

    Example:
        >>> print(ring_all_reduce(lambda tensor: tensor, seed=1).reason)
        Rank 0 of 3 must send 2 * 2/3 * 492 = 656 bytes, sent none.

    Source:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009: the algorithm and its bytes.
    """
    return examine("ring_all_reduce", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5, 6]), 1]
    sentence, shown_trace = "", None
    for world_size in sizes:
        length = world_size * draw.randrange(5, 50)
        secret = draw.randrange(10**9)
        trace = examination.run(_reduce_on_rank, world_size, length, secret, judge_early_end=_judge_way, hint=RAISED_HINT)
        _judge_way(trace)
        sent = _judge_bytes(trace, length * _ITEM_BYTES)
        _judge_sums(trace, length)
        if world_size == max(sizes):
            sentence = f"{_formula(world_size, length * _ITEM_BYTES)} = {sent}"
            shown_trace = trace
    return (
        f"Right in rings of {', '.join(map(str, sorted(sizes)[:-1]))} and {max(sizes)} ranks; in the last, each sent {sentence} bytes.",
        shown_trace,
    )


def _judge_way(trace: Trace) -> None:
    judge_way(trace, "chunks")


def _formula(world_size: int, size_bytes: int) -> str:
    return f"2 * {world_size - 1}/{world_size} * {size_bytes}"


def _reduce_on_rank(function: Callable[..., Any], length: int, secret: int) -> tuple[Numbers, Numbers | str]:
    """Makes this rank's numbers and returns them with the answer."""
    import torch  # here: who only starts ranks does not load it

    from ringsim.ring import current_ring

    draw = random.Random(f"{secret}/{current_ring().rank}")
    numbers = [float(draw.randrange(1, 1000)) for _ in range(length)]
    answer = function(torch.tensor(numbers))
    if not isinstance(answer, torch.Tensor):
        return numbers, shown(answer)
    if answer.shape != (length,):
        return numbers, f"a tensor of shape {tuple(answer.shape)}"
    return numbers, answer.tolist()


def _judge_bytes(trace: Trace, size_bytes: int) -> int:
    """Every rank must have sent what the formula says; returns how many bytes that is."""
    events, size = trace.events, trace.world_size
    due = 2 * (size - 1) * size_bytes // size

    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(reason, hint, world_size=size, trace=trace)

    for rank in range(size):
        for kind, verb, done in ((SEND, "send", "sent"), (RECV, "receive", "received")):
            payloads = events.payload[(events.rank == rank) & (events.kind == kind)]
            found = sum(events.tables.payloads[number].size_bytes for number in payloads.tolist() if number != NONE)
            if found != due:
                whole, half = (size - 1) * size_bytes, due // 2
                hint = _HALF_HINT if found == half else _WHOLE_HINT if found in (whole, 2 * whole) else _BYTES_HINT
                amount = f"{found} in {count(len(payloads), 'message')}" if len(payloads) else "none"
                raise wrong(f"Rank {rank} of {size} must {verb} {_formula(size, size_bytes)} = {due} bytes, {done} {amount}.", hint)
    if trace.unmatched:
        raise wrong(f"Every send needs its recv, and {trace.unmatched[0]!r}.", "Use the same tag on both sides, or none.")
    return due


def _judge_sums(trace: Trace, length: int) -> None:
    """Every rank must return the sum of all tensors."""
    size = trace.world_size
    results: Sequence[tuple[Numbers, Numbers | str]] = trace.results
    due = [sum(column) for column in zip(*(numbers for numbers, _ in results), strict=True)]
    for rank, (numbers, answer) in enumerate(results):
        if answer == due:
            continue
        who = f"Rank {rank} of {size}"
        if isinstance(answer, str):
            reason = f"{who} must return a tensor of shape ({length},), got {answer}."
            hint = "The function must end in a return on every rank. torch.cat(chunks) joins chunks to one tensor."
            raise Wrong(reason, hint, world_size=size, trace=trace)
        place = next(place for place in range(length) if answer[place] != due[place])
        own = ", its own number alone" if answer[place] == numbers[place] else ""
        reason = (
            f"{who} must return the sum of all tensors: number {place}, in chunk {place // (length // size)}, must be "
            f"{shown(due[place])}, got {shown(answer[place])}{own}."
        )
        raise Wrong(reason, ALONE_HINT if size == 1 else _SUM_HINT, world_size=size, trace=trace)
