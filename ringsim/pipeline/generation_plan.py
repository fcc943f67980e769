"""What each stage of a generation ring does, step by step: plain data, which the ranks execute and the tests play.

A *job* is one token of one batch of prompts at one stage. All stages take the jobs in the same order: in each round T batches take turns,
token by token. With N = 2 stages, T = 2 batches a and b, and n = 3 tokens::

    job              a0   b0   a1   b1   a2   b2
    rank 0 receives   -    -   a0   b0   a1   b1      the token that the last stage made, over the edge that closes the ring
    rank 0 sends      -   a0   b0   a1   b1   a2  b2  its hidden state; the last one in a step of its own
    rank 1 receives  a0   b0   a1   b1   a2   b2
    rank 1 sends      -   a0   b0   a1   b1    -   -  the token; the last token of a batch stays

The output of a job is sent when the next job starts. Where messages are synchronous, rank 0 receives before it sends, and all others send
before they receive: if everybody sent first, nobody would ever receive.

Source:
    FlexLLMGen (FMInference/FlexLLMGen, commit 004ffef), ``flexllmgen/dist_flex_opt.py``, ``generation_loop_normal``: the order of jobs
    and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringsim.pipeline.partition_plan import by_count

__all__ = ["Job", "Step", "plan_batches", "plan_jobs", "plan_steps"]


class Job(NamedTuple):
    """One token of one batch at one stage: ``token`` 0 reads the prompts, the others decode."""

    batch: int
    token: int

    @property
    def name(self) -> str:
        """What the job is called in the timeline: "prefill" or "decode"."""
        return "decode" if self.token else "prefill"


class Step(NamedTuple):
    """What a rank does next: send the output of a job, receive the input of a job, compute a job; each may be None."""

    send: Job | None
    receive: Job | None
    compute: Job | None


def plan_batches(num_prompts: int, num_inner_iterations: int, batch_size: int | None = None) -> list[list[int]]:
    """Shares prompts out into batches, as evenly as can be: T for each round, and as many rounds as it takes.

    Args:
        num_prompts: how many there are, 1 or more.
        num_inner_iterations: T.
        batch_size: prompts in a batch, at most; None for one round, however large its batches are.

    Returns:
        The numbers of the prompts in each batch. The number of batches is a multiple of T, so that every round is full; where the
        prompts do not suffice, the first one is there once more.

    Example:
        >>> plan_batches(5, num_inner_iterations=2)
        [[0, 1, 2], [3, 4]]
        >>> plan_batches(5, num_inner_iterations=2, batch_size=2)
        [[0, 1], [2], [3], [4]]
        >>> plan_batches(1, num_inner_iterations=2)
        [[0], [0]]
    """
    per_round = num_prompts if batch_size is None else batch_size * num_inner_iterations
    num_batches = num_inner_iterations * -(-num_prompts // per_round)
    return [list(numbers) or [0] for numbers in by_count(num_prompts, num_batches)]


def plan_jobs(num_batches: int, num_inner_iterations: int, num_tokens: int) -> list[Job]:
    """Lists the jobs in the order in which every stage takes them.

    Args:
        num_batches: batches of prompts, a multiple of T; T take turns in a round.
        num_inner_iterations: T.
        num_tokens: n, tokens generated for each prompt.

    Example:
        >>> [f"{'abcd'[job.batch]}{job.token}" for job in plan_jobs(num_batches=4, num_inner_iterations=2, num_tokens=2)]
        ['a0', 'b0', 'a1', 'b1', 'c0', 'd0', 'c1', 'd1']
    """
    rounds = [range(first, first + num_inner_iterations) for first in range(0, num_batches, num_inner_iterations)]
    return [Job(batch, token) for batches in rounds for token in range(num_tokens) for batch in batches]


def plan_steps(stage: int, num_stages: int, jobs: list[Job], num_tokens: int) -> Iterator[Step]:
    """Yields what a stage does, one step a job and a last one that sends what is left.

    Args:
        stage: its number, from 0.
        num_stages: N.
        jobs: as ``plan_jobs`` lists them.
        num_tokens: n, as there.

    Example:
        >>> jobs = plan_jobs(num_batches=2, num_inner_iterations=2, num_tokens=2)
        >>> for step in plan_steps(1, 2, jobs, num_tokens=2):
        ...     print(*(f"{'ab'[job.batch]}{job.token}" if job else "--" for job in step))
        -- a0 a0
        a0 b0 b0
        b0 a1 a1
        -- b1 b1
        -- -- --
    """
    before: Job | None = None
    for job in (*jobs, None):
        sends = before is not None and num_stages > 1 and not (stage == num_stages - 1 and before.token == num_tokens - 1)
        receives = job is not None and num_stages > 1 and not (stage == 0 and job.token == 0)
        yield Step(before if sends else None, job if receives else None, job)
        before = job
