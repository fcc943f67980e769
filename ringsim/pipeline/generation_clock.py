"""The generation ring on a clock, without ranks: the plan that the ranks execute, with times for its jobs."""

from __future__ import annotations

from ringsim.pipeline.generation_plan import Step, plan_jobs, plan_steps
from ringsim.pipeline.programs import Compute, Operation, Receive, Run, Send, Time, Wait, run_programs

__all__ = ["time_generation"]


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
    """Times the generation ring by playing it, with any setting; ``generation_map`` has the closed forms of some.

    Args:
        num_stages: N, 1 or more; all take equally long.
        num_inner_iterations: T, 1 or more.
        num_rounds: G, how often T new batches start, 1 or more.
        num_tokens: n, tokens generated for each prompt, 1 or more.
        prefill: time of a stage to read a batch of prompts, in any unit.
        decode: time of a stage for one token of a batch, in the same unit.
        async_comm: whether a step's send and receive are posted together.
        latency: how long a message takes, in the same unit.

    Returns:
        When each operation of each stage began and ended, and who waits for ever where it never ends.

    Example:
        >>> run = time_generation(4, 4, num_rounds=1, num_tokens=16, prefill=5, decode=1)
        >>> max(times[-1][1] for times in run.times)
        95
        >>> [f"stage {stuck.rank} waits for {stuck.peer}" for stuck in time_generation(2, 3, 1, 2, 1, 1).cycle]
        ['stage 0 waits for 1', 'stage 1 waits for 0']
    """
    jobs = plan_jobs(num_rounds * num_inner_iterations, num_inner_iterations, num_tokens)
    programs = []
    for stage in range(num_stages):
        operations: list[Operation] = []
        for step in plan_steps(stage, num_stages, jobs, num_tokens):
            operations += _list_messages(step, stage, num_stages, len(operations), async_comm)
            if step.compute is not None:
                operations.append(Compute(decode if step.compute.token else prefill))
        programs.append(operations)
    return run_programs(programs, latency=latency)


def _list_messages(step: Step, stage: int, num_stages: int, position: int, async_comm: bool) -> list[Operation]:
    """Returns the posts and waits of a step; ``position`` is where they begin in the stage's list."""
    posts: list[Operation] = []
    if step.send is not None:
        posts.append(Send((stage + 1) % num_stages))
    if step.receive is not None:
        posts.append(Receive((stage - 1) % num_stages))
    if async_comm:
        return [*posts, *(Wait(position + index) for index in range(len(posts)))]
    if stage == 0:
        posts.reverse()  # stage 0 receives first
    return [operation for index, post in enumerate(posts) for operation in (post, Wait(position + 2 * index))]
