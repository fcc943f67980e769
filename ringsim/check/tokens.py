"""The first exercise of the lesson on the generation ring: what a stage exchanges with its neighbours, in an order that never jams."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ringsim.check.examination import Examination, Wrong, examine, shown
from ringsim.check.neighbours import RAISED_HINT, judge_way
from ringsim.check.result import CheckResult
from ringsim.schedules.generation import plan_jobs, plan_steps
from ringsim.traces.events import RECV, SEND
from ringsim.traces.value import Trace, count

__all__ = ["token_ring"]

NUM_TOKENS: Final = 4
VOCABULARY: Final = 1_000_003
_COUNT_HINT: Final = "Send output unless it is None, and receive into space unless that is None: some calls have only one of the two."
_VALUE_HINT: Final = "Receive into space itself, dist.recv(space, ...): what is put into another tensor does not reach the stage."


def token_ring(function: Callable[..., Any], *, seed: int | None = None) -> CheckResult:
    """Checks a function that exchanges messages with the neighbours in a generation ring.

    ``function(output, space)`` sends ``output`` to the successor, on its group, and fills ``space`` with what comes from the predecessor,
    on its group; each is an int64 tensor of shape (1,), or None where there is nothing. It is called between one job and the next, on
    every rank of rings of 2, 3 and more, with as many batches on their way as there are ranks; a stage does a sum in place of its layers.

    Args:
        function: the answer.
        seed: what sizes and numbers are drawn from; None to draw the seed, too.

    Returns:
        The verdict; its trace shows what was really sent.

    Example:
        >>> print(token_ring(lambda output, space: None, seed=1).reason)
        Rank 0 of 3 must send 12 outputs, sent none.
    """
    return examine("token_ring", function, _judge, seed)


def _judge(examination: Examination) -> tuple[str, Trace | None]:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5])]
    trace = None
    for world_size in sizes:
        secret = draw.randrange(10**9)
        trace = examination.run(_generate_on_rank, world_size, secret, judge_early_end=_judge_way, hint=f"{_COUNT_HINT} {RAISED_HINT}")
        _judge_way(trace)
        _judge_counts(trace)
        _judge_tokens(trace)
    return f"Right in rings of 2, 3 and {sizes[-1]} ranks: none of them jams, and every token is the right one.", trace


def _judge_way(trace: Trace) -> None:
    judge_way(trace, "outputs")


def _generate_on_rank(function: Callable[..., Any], secret: int) -> tuple[int, list[list[int]]]:
    """Does this rank's jobs; returns its number and, on the last rank, the tokens of each batch."""
    import torch  # here: who only starts ranks does not load it

    from ringsim.ring import current_ring

    rank, size = current_ring().rank, current_ring().world_size
    number = random.Random(f"{secret}/{rank}").randrange(VOCABULARY)
    tokens: list[list[int]] = [[] for _ in range(size)]
    output = None
    for step in plan_steps(rank, size, plan_jobs(size, size, NUM_TOKENS), NUM_TOKENS):
        space = torch.full((1,), -1) if step.receive else None
        if step.send or step.receive:
            function(output if step.send else None, space)
        if step.compute is not None:
            x = torch.tensor([step.compute.batch]) if space is None else space
            output = _work(x, number)
            tokens[step.compute.batch].append(int(output))
    return number, tokens if rank == size - 1 else []


def _work(x: Any, number: int) -> Any:
    """What a stage does in place of its layers; x is a tensor of shape (1,), or a number."""
    return (x * 31 + number) % VOCABULARY


def _judge_counts(trace: Trace) -> None:
    """Every rank must have sent and received what the plan says."""
    events, size = trace.events, trace.world_size
    for rank in range(size):
        steps = list(plan_steps(rank, size, plan_jobs(size, size, NUM_TOKENS), NUM_TOKENS))
        due = {SEND: sum(step.send is not None for step in steps), RECV: sum(step.receive is not None for step in steps)}
        for kind, verb, done, thing in ((SEND, "send", "sent", "output"), (RECV, "receive", "received", "input")):
            number = int(np.count_nonzero((events.rank == rank) & (events.kind == kind)))
            if number != due[kind]:
                reason = f"Rank {rank} of {size} must {verb} {count(due[kind], thing)}, {done} {number or 'none'}."
                raise Wrong(reason, _COUNT_HINT, world_size=size, trace=trace)
    if trace.unmatched:
        reason = f"Every send needs its recv, and {trace.unmatched[0]!r}."
        raise Wrong(reason, "Use the same tag on both sides, or none.", world_size=size, trace=trace)


def _judge_tokens(trace: Trace) -> None:
    """The last rank must have made the tokens that one process makes."""
    size = trace.world_size
    numbers = [number for number, _ in trace.results]
    for batch, tokens in enumerate(trace.results[-1][1]):
        x = batch
        for place, token in enumerate(tokens):
            for number in numbers:
                x = _work(x, number)
            if token != x:
                reason = f"Token {place} of batch {batch} must be {x}, got {shown(token)}, in the ring of {count(size, 'rank')}."
                raise Wrong(reason, _VALUE_HINT, world_size=size, trace=trace)
