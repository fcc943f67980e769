"""The check for the lesson on tensor parallelism: a layer whose matrices are cut among ranks."""

from __future__ import annotations

from ringsim.check.examination import WIDTH, Answer, CheckResult, Examination, Wrong, examine
from ringsim.check.replicas import SIZES, judge_calls, make_group
from ringsim.traces.units import count

_NAMES = ("output", "gradient of x", "gradient of up", "gradient of down")
_CALLS = [f"all_reduce of {WIDTH * WIDTH * 8} bytes"] * 2  # the output and the gradient of x
_SUM_HINT = (
    "Add up the outputs of all ranks in the group before you return them, and the gradients of x "
    "in the backward pass. The sum of the outputs passes its gradient on unchanged."
)


def tensor_parallel(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks two matrix products whose matrices are cut among the ranks of a group.

    ``function(x, up, down, group)`` receives the whole input, this rank's columns of the first
    matrix and its rows of the second matrix, all in float64, and returns the whole
    ``relu(x @ up) @ down`` on each rank of the group. The output and the gradients of all three
    tensors must be those of a single process. Each rank must call ``all_reduce`` once in the
    forward pass and once in the backward pass, with a tensor of the size of ``x``. The check uses
    several groups at the same time.

    Args:
        function: the answer.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the last run.

    Example:
        >>> print(tensor_parallel(lambda x, up, down, group: x @ up @ down, seed=1).reason)
        With 2 groups of 2 ranks, the output of rank 0 is not that of a single process.
    """
    return examine("tensor_parallel", function, _judge, seed)


def _judge(examination: Examination) -> str:
    for groups, members in SIZES:
        about = f"With {count(groups, 'group')} of {members} ranks"
        trace = examination.run(
            _train_on_rank, groups * members, groups, examination.random.randrange(10**9)
        )
        for rank, are_right in enumerate(trace.results):
            if False in are_right:
                name = _NAMES[are_right.index(False)]
                reason = f"{about}, the {name} of rank {rank} is not that of a single process."
                raise Wrong(reason, _SUM_HINT)
        judge_calls(trace, about, _CALLS, _SUM_HINT, stages=groups)
    return "Right in groups of 2 and 3 ranks, with one all_reduce in each direction."


def _train_on_rank(function: Answer, groups: int, secret: int) -> list[bool]:
    """Returns whether the output and each gradient are those of a single process."""
    import torch  # here, so that a process that only starts ranks does not load it
    from torch import distributed as dist

    group = make_group(groups)
    size = dist.get_world_size(group)
    torch.manual_seed(secret)
    shape = 2 + 2 * size, WIDTH, WIDTH
    x, weights, *parts = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mine = x, *parts[dist.get_rank(group) :: size]
    outputs = (
        function(*mine, group),
        torch.relu(x @ torch.cat(parts[:size], 1)) @ torch.cat(parts[size:]),
    )
    found, due = (
        (output, *torch.autograd.grad((output * weights).sum(), mine)) for output in outputs
    )
    return [*map(torch.allclose, found, due)]
