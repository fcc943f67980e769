"""Plans and times the token ring, and checks whether the ring can finish.

The plans are plain data, without ranks. A *job* is one token of one batch of prompts at one stage.
All stages take the jobs in the same order: in each round, T batches take turns, token by token.
With N = 2 stages, T = 2 batches (a and b), and n = 3 tokens::

    job              a0   b0   a1   b1   a2   b2
    rank 0 receives   -    -   a0   b0   a1   b1      the last stage's token, over the edge that
                                                      closes the ring
    rank 0 sends      -   a0   b0   a1   b1   a2  b2  its hidden state; the last one in a separate
                                                      step
    rank 1 receives  a0   b0   a1   b1   a2   b2
    rank 1 sends      -   a0   b0   a1   b1    -   -  the token; the last token of a batch stays

A stage sends the output of a job when the next job starts. With synchronous messages, rank 0
receives before it sends, and all other ranks send before they receive. If all ranks sent first, no
stage would ever receive. ``pipeline.generation`` executes this plan, and ``time_generation`` times
it.

For the closed form, N stages share the layers of a model. T groups of prompts (*inner iterations*)
are in progress at the same time, so that a stage has work while a token goes around::

    T = 1    stage 0  a . . a . .          one group: a stage works 1/N of the time
             stage 1  . a . . a .
             stage 2  . . a . . a
    T = N    stage 0  a b c a b c          as many groups as stages: all stages work
             stage 1  . a b c a b
             stage 2  . . a b c a

A send ends when the other side receives (as on Gloo, at every size), so a ring can also be too
full: then every stage holds an output that no other stage takes. Both effects determine the share
of time in which a stage works once the prompts are read. A share of 0 means that nothing moves::

    N = 4, T     1    2    3    4    5    6    7    8
    synchronous  0   1/3  2/3   1    0    0    0    0
    asynchronous 1/4 1/2  3/4   1   3/4  1/2  1/4   0

Source:
    FlexLLMGen (FMInference/FlexLLMGen, commit 004ffef), ``flexllmgen/dist_flex_opt.py``,
    ``generation_loop_normal``: the order of jobs and messages. The closed form was derived for
    ringsim by simulating that loop, and ringsim's tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from ringsim.errors import ScheduleError, check_integer
from ringsim.schedules.costs import Time
from ringsim.schedules.partition import by_count
from ringsim.schedules.programs import Compute, Instruction, Receive, Run, Send, Wait, run_programs


class TokenJob(NamedTuple):
    """One token of one batch at one stage. ``token`` 0 reads the prompts; later tokens decode."""

    batch: int
    token: int

    @property
    def name(self) -> str:
        """The job's name in the timeline: "prefill" or "decode"."""
        return "decode" if self.token else "prefill"


class RingStep(NamedTuple):
    """One step of a rank.

    The rank sends the output of a job, receives the input of a job, and computes a job. Each of the
    three may be None.
    """

    send: TokenJob | None
    receive: TokenJob | None
    compute: TokenJob | None


def plan_batches(
    num_prompts: int, num_inner_iterations: int, batch_size: int | None = None
) -> list[list[int]]:
    """Divides prompts into batches as evenly as possible.

    Each round has T batches, and there are as many rounds as needed.

    Args:
        num_prompts: the number of prompts, at least 1.
        num_inner_iterations: T.
        batch_size: the largest number of prompts in a batch, or None for a single round with
            batches of any size.

    Returns:
        For each batch, the numbers of its prompts. The number of batches is a multiple of T, so
        that every round is full. If there are too few prompts, the first prompt is repeated.

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


def plan_jobs(num_batches: int, num_inner_iterations: int, num_tokens: int) -> list[TokenJob]:
    """Lists the jobs in the order in which every stage takes them.

    The number of batches must be a multiple of T. The T batches of a round take turns.

    Example:
        >>> [
        ...     f"{'abcd'[job.batch]}{job.token}"
        ...     for job in plan_jobs(num_batches=4, num_inner_iterations=2, num_tokens=2)
        ... ]
        ['a0', 'b0', 'a1', 'b1', 'c0', 'd0', 'c1', 'd1']
    """
    rounds = [
        range(first, first + num_inner_iterations)
        for first in range(0, num_batches, num_inner_iterations)
    ]
    return [
        TokenJob(batch, token)
        for batches in rounds
        for token in range(num_tokens)
        for batch in batches
    ]


def plan_steps(
    stage: int, num_stages: int, jobs: list[TokenJob], num_tokens: int
) -> Iterator[RingStep]:
    """Yields a stage's steps: one step per job, and a final step that sends the last output.

    The jobs come from `plan_jobs`.

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
    before: TokenJob | None = None
    for job in (*jobs, None):
        sends = (
            before is not None
            and num_stages > 1
            and not (stage == num_stages - 1 and before.token == num_tokens - 1)
        )
        receives = job is not None and num_stages > 1 and not (stage == 0 and job.token == 0)
        yield RingStep(before if sends else None, job if receives else None, job)
        before = job


def order_posts(step: RingStep, stage: int, async_comm: bool) -> list[list[bool]]:
    """Returns the posts of a step, of which True is the send, in the order of a stage.

    The stage waits for all posts in a list before it goes on to the next list.

    Example:
        >>> step = RingStep(TokenJob(0, 0), TokenJob(1, 0), TokenJob(1, 0))
        >>> order_posts(step, 0, False), order_posts(step, 1, False), order_posts(step, 1, True)
        ([[False], [True]], [[True], [False]], [[True, False]])
    """
    posts = [True] * (step.send is not None) + [False] * (step.receive is not None)
    if async_comm:
        return [posts]
    return [[sends] for sends in (posts if stage else reversed(posts))]  # stage 0 receives first


def time_generation(
    num_stages: int,
    num_inner_iterations: int,
    num_rounds: int,
    num_tokens: int,
    prefill: Time,
    decode: Time,
    *,
    async_comm: bool = False,
    latency: Time = 0,
) -> Run:
    """Times the generation ring by simulating it, with any settings.

    Args:
        num_stages: N, at least 1; all stages are equally fast.
        num_inner_iterations: T, at least 1.
        num_rounds: G, the number of rounds, each of which starts T new batches; at least 1.
        num_tokens: n, the number of tokens generated for each prompt, at least 1.
        prefill: the time that a stage takes to read a batch of prompts, in any unit.
        decode: the time that a stage takes for one token of a batch, in the same unit.
        async_comm: whether a step's send and receive are posted together.
        latency: a message's travel time, in the same unit.

    Returns:
        The start and end of each operation of each stage and, if the ring never finishes, the
        stages that wait forever.

    Example:
        >>> run = time_generation(4, 4, num_rounds=1, num_tokens=16, prefill=5, decode=1)
        >>> max(times[-1][1] for times in run.times)
        95
        >>> [
        ...     f"stage {stuck.rank} waits for {stuck.peer}"
        ...     for stuck in time_generation(2, 3, 1, 2, 1, 1).cycle
        ... ]
        ['stage 0 waits for 1', 'stage 1 waits for 0']
    """
    jobs = plan_jobs(num_rounds * num_inner_iterations, num_inner_iterations, num_tokens)
    programs = []
    for stage in range(num_stages):
        operations: list[Instruction] = []
        for step in plan_steps(stage, num_stages, jobs, num_tokens):
            for posts in order_posts(step, stage, async_comm):
                first = len(operations)
                operations += [
                    Send((stage + 1) % num_stages) if sends else Receive((stage - 1) % num_stages)
                    for sends in posts
                ]
                operations += map(Wait, range(first, len(operations)))
            if step.compute is not None:
                operations.append(Compute(decode if step.compute.token else prefill))
        programs.append(operations)
    return run_programs(programs, latency=latency)


_STARVED = (
    "stage 0 receives before it sends, so it waits for a token that "
    "depends on an output that it has not sent yet"
)
_FULL = (
    "a stage holds one job, so stage 0 waits to send the next job while the last stage waits "
    "to send a token to stage 0"
)
_FULLER = (
    "a stage holds at most two jobs, one finished and one arriving, so "
    "each stage waits for space on the next stage"
)


def steady_use(num_stages: int, num_inner_iterations: int, async_comm: bool = False) -> Fraction:
    """Returns the fraction of time that a stage spends computing during decoding in a full ring.

    The formula assumes that all stages are equally fast and that messages take no time. Measured
    fractions are lower.

    Args:
        num_stages: N, at least 1.
        num_inner_iterations: T, the number of groups of prompts in progress, at least 1.
        async_comm: whether the sends and receives of a step are posted together instead of one
            after another.

    Returns:
        With synchronous messages, (T - 1) / (N - 1) for T <= N, otherwise 0. With asynchronous
        messages, T / N for T <= N, and (2N - T) / N above that, down to 0. With one stage, 1.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        >>> [str(steady_use(4, T)) for T in range(1, 6)]
        ['0', '1/3', '2/3', '1', '0']
        >>> [str(steady_use(4, T, async_comm=True)) for T in range(1, 9)]
        ['1/4', '1/2', '3/4', '1', '3/4', '1/2', '1/4', '0']
    """
    _check_positive(num_stages=num_stages, num_inner_iterations=num_inner_iterations)
    if num_stages == 1:
        return Fraction(1)
    if async_comm:
        return Fraction(
            max(min(num_inner_iterations, 2 * num_stages - num_inner_iterations), 0), num_stages
        )
    return (
        Fraction(num_inner_iterations - 1, num_stages - 1)
        if num_inner_iterations <= num_stages
        else Fraction(0)
    )


def can_finish(num_stages: int, num_inner_iterations: int, async_comm: bool = False) -> bool:
    """Returns whether the ring finishes if more than one token is generated.

    If only one token is generated, the ring finishes with any settings.

    Args:
        num_stages: N, at least 1.
        num_inner_iterations: T, at least 1.
        async_comm: whether the sends and receives of a step are posted together.

    Returns:
        Whether 2 <= T <= N (synchronous) or T <= 2N - 1 (asynchronous). Always True for one stage.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        >>> [T for T in range(1, 10) if can_finish(4, T)]
        [2, 3, 4]
        >>> [T for T in range(1, 10) if can_finish(4, T, async_comm=True)]
        [1, 2, 3, 4, 5, 6, 7]
    """
    return steady_use(num_stages, num_inner_iterations, async_comm) > 0


def check_can_finish(
    num_stages: int, num_inner_iterations: int, num_tokens: int, async_comm: bool = False
) -> None:
    """Raises an error if a ring would never finish, before any rank sends anything.

    The arguments have the same meaning as in `time_generation`.

    Raises:
        ScheduleError: the ring would never finish; the message gives the reason, and settings that
            work.
        ArgumentError: a number is less than 1.

    Example:
        >>> check_can_finish(4, 4, num_tokens=16)
        >>> check_can_finish(4, 5, num_tokens=16)
        Traceback (most recent call last):
        ...
        ringsim.errors.ScheduleError: num_inner_iterations must be from 2 to 4 with 4 stages and synchronous messages, got 5: a stage holds \
one job, so stage 0 waits to send the next job while the last stage waits to send a token to stage 0. Use 4, or async_comm=True.
    """  # noqa: E501
    _check_positive(num_tokens=num_tokens)
    if can_finish(num_stages, num_inner_iterations, async_comm) or num_tokens == 1:
        return
    least, most = (1, 2 * num_stages - 1) if async_comm else (2, num_stages)
    kind, reason = (
        ("asynchronous", _FULLER)
        if async_comm
        else ("synchronous", _STARVED if num_inner_iterations == 1 else _FULL)
    )
    other = (
        ", or async_comm=True"
        if not async_comm and can_finish(num_stages, num_inner_iterations, async_comm=True)
        else ""
    )
    raise ScheduleError(
        f"num_inner_iterations must be {f'from {least} to {most}' if least < most else most} with "
        f"{num_stages} stages and {kind} messages, "
        f"got {num_inner_iterations}: {reason}. Use "
        f"{min(max(num_inner_iterations, least), most)}{other}."
    )


def count_messages(num_stages: int, num_batches: int, num_tokens: int) -> int:
    """Returns the total number of messages, counting hidden states and tokens.

    The total is num_batches (n N - 1), or 0 for one stage. For each token of a batch, its hidden
    state crosses N - 1 edges, and the token returns over the edge that closes the ring. A batch's
    last token stays on the last stage.

    Raises:
        ArgumentError: a number is less than 1.

    Example:
        >>> count_messages(num_stages=4, num_batches=8, num_tokens=16)
        504

    Source:
        FlexLLMGen's loop: G T k (n N - 1) messages for G rounds of T inner iterations with k GPU
        batches each.
    """
    _check_positive(num_stages=num_stages, num_batches=num_batches, num_tokens=num_tokens)
    return num_batches * (num_tokens * num_stages - 1) if num_stages > 1 else 0


def _check_positive(**numbers: object) -> None:
    for name, number in numbers.items():
        check_integer(name, number, 1, "Pass a positive number.")
