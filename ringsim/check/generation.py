"""The checks for the lesson on the generation ring: its messages and its number of batches."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

from ringsim.check.examination import (
    RAISED_HINT,
    Answer,
    CheckResult,
    Examination,
    Side,
    Wrong,
    examine,
    judge_rings,
    listed,
    plain_number,
    shown,
)
from ringsim.schedules.generation import can_finish, plan_jobs, plan_steps, steady_use
from ringsim.traces.units import count
from ringsim.traces.value import Trace

NUM_TOKENS = 4
VOCABULARY = 1_000_003
_COUNT_HINT = (
    "Send output unless it is None, and receive into space unless space is None: some calls pass "
    "only one of the two."
)
_VALUE_HINT = (
    "Receive into `space` itself, with dist.recv(space, ...): the stage does not see any other "
    "tensor."
)
WANTED = Fraction(4, 5)
Setting = tuple[int, bool]


def token_ring(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that exchanges messages with the neighbours in a generation ring.

    ``function(output, space)`` sends ``output`` to the successor, on the successor's group, and
    receives into ``space`` from the predecessor, on the predecessor's group. Each is an int64
    tensor of shape (1,), or None if there is nothing to send or receive. The check uses rings of 2,
    3 and more ranks, with as many batches in the ring as ranks, and every rank calls the function
    between its jobs. Instead of running layers, a stage computes a sum.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages.

    Example:
        >>> print(token_ring(lambda output, space: None, seed=1).reason)
        Rank 0 of 3 must send 12 outputs, but sent none.
    """
    return examine("token_ring", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    sizes = [3, 2, draw.choice([4, 5])]
    hint = f"{_COUNT_HINT} {RAISED_HINT}"
    judge_rings(examination, _generate_on_rank, "outputs", sizes, _judge_side, _judge_tokens, hint)
    return f"Right in rings of {listed(sizes)} ranks: no ring gets stuck, and every token is right."


def _generate_on_rank(function: Answer, secret: int) -> tuple[int, list[list[float | str]]]:
    """Runs this rank's jobs; returns the rank and, on the last rank, the tokens of each batch."""
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim.ring import current_ring

    rank, size = current_ring().rank, current_ring().world_size
    number = random.Random(f"{secret}/{rank}").randrange(VOCABULARY)
    tokens: list[list[float | str]] = [[] for _ in range(size)]
    output = None
    for step in plan_steps(rank, size, plan_jobs(size, size, NUM_TOKENS), NUM_TOKENS):
        space = torch.full((1,), -1) if step.receive else None
        if step.send or step.receive:
            function(output if step.send else None, space)
        if step.compute is not None:
            x = torch.tensor([step.compute.batch]) if space is None else space
            output = _work(x, number)
            tokens[step.compute.batch].append(plain_number(output))
    return number, tokens if rank == size - 1 else []


def _work(x: Any, number: int) -> Any:
    """Computes a stage without layers, from a tensor of shape (1,) or a number."""
    return (x * 31 + number) % VOCABULARY


def _judge_side(trace: Trace, side: Side) -> None:
    """Raises ``Wrong`` unless a rank sends, or receives, as many messages as planned."""
    size = trace.world_size
    steps = plan_steps(side.rank, size, plan_jobs(size, size, NUM_TOKENS), NUM_TOKENS)
    number = sum((step.send if side.is_send else step.receive) is not None for step in steps)
    side.judge(number, count(number, "output" if side.is_send else "input"), _COUNT_HINT)


def _judge_tokens(trace: Trace) -> None:
    """Raises ``Wrong`` unless the last rank has generated the same tokens as a single process."""
    numbers = [number for number, _ in trace.results]
    for batch, tokens in enumerate(trace.results[-1][1]):
        x = batch
        for place, token in enumerate(tokens):
            for number in numbers:
                x = _work(x, number)
            if token != x:
                reason = (
                    f"In the ring of {count(trace.world_size, 'rank')}, token {place} of batch "
                    f"{batch} must be {x}, but is {shown(token)}."
                )
                raise Wrong(reason, _VALUE_HINT)


def inner_iterations(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that chooses the settings of a generation ring.

    ``function(N)`` returns (T, async_comm). A ring of N stages must finish with T inner iterations,
    and each stage must work at least 80 % of the time while decoding. T must be as small as
    possible, because every batch in the ring needs a cache on every stage. The check calls the
    function on a separate rank, so that it can stop an endless loop.

    Args:
        function: the answer.
        seed: the seed for generating the sizes, or None for a random seed.

    Returns:
        The verdict.

    Example:
        >>> print(inner_iterations(lambda N: (N, False), seed=1).reason)
        With 10 stages, (10, False) keeps a stage busy 100 % of the time, but 8 inner iterations would be enough for 80 %.
    """  # noqa: E501
    return examine("inner_iterations", function, _judge_settings, seed)


def _judge_settings(examination: Examination) -> str:
    draw = examination.random
    sizes = [10, 4, 2, 5, 1, draw.randrange(6, 10), draw.randrange(11, 100)]
    for (size,), answer in examination.ask([(size,) for size in sizes], _read_setting):
        _judge_setting(size, answer)
    return f"Right for {listed(sizes)} stages."


def _read_setting(answer: Any) -> Setting | str:
    turns, async_comm = answer
    return (int(turns), bool(async_comm)) if int(turns) == turns >= 1 else shown(answer)


def _judge_setting(size: int, answer: Setting | str) -> None:
    stages = count(size, "stage")

    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(f"With {stages}, {reason}", hint)

    if isinstance(answer, str):
        raise wrong(
            "your answer must be a pair that consists of a positive integer and True or False, "
            f"got {answer}.",
            "Return a pair such as (4, False).",
        )
    turns, async_comm = answer
    if not can_finish(size, turns, async_comm):
        limits = "1 to 2 N - 1" if async_comm else "2 to N"
        raise wrong(
            f"the ring never finishes with {answer}.",
            f"Look at the map: with async_comm={async_comm}, a ring finishes if T is from "
            f"{limits}.",
        )
    use = steady_use(size, turns, async_comm)
    percent = f"{100 * float(use):.0f} %"
    if use < WANTED:
        form = "min(T / N, 1)" if async_comm else "(T - 1) / (N - 1)"
        hint = (
            f"With async_comm={async_comm}, a stage works {form} of the time. Which T makes this "
            "share 80 %? Round up, but keep a result that is already an integer."
        )
        raise wrong(
            f"{answer} keeps a stage busy {percent} of the time, which is less than 80 %.", hint
        )
    fewest = math.ceil(WANTED * size)  # T / N of the time, with async_comm
    if turns > fewest:
        hint = (
            "Which value of async_comm needs fewer batches for the same share? Do not round up "
            "more than needed."
        )
        raise wrong(
            f"{answer} keeps a stage busy {percent} of the time, but "
            f"{count(fewest, 'inner iteration')} would be enough for 80 %.",
            hint,
        )
