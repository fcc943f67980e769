"""The check for the lesson on ring attention: blocks that travel while the ranks attend."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringsim
from ringsim.check.examination import (
    WIDTH,
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    judge_rounds,
    sides,
)
from ringsim.traces.value import Trace

_COUNT_HINT = (
    "In each of N - 1 rounds, send the block that you received last, and receive the next one. The "
    "last round only attends."
)
_BLOCK_HINT = (
    "Begin with your own block, and continue with the block that has arrived. Receive into a new "
    "tensor, torch.empty_like(block), because a block that you send or attend to must not change."
)
_OVERLAP_HINT = (
    "In each round, post dist.isend and dist.irecv, call attend(block), and then wait for both "
    "handles. The next round continues with the block that has arrived."
)


def ring_attention(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks an exchange of blocks around a ring that overlaps with attention.

    ``function(block, attend)`` receives this rank's keys and values, a tensor of shape (2, length,
    width), and calls ``attend(block)`` once with the block of each rank. Every rank must post N - 1
    sends to its successor and N - 1 recvs from its predecessor, on the groups of these edges. Each
    message must be in flight during a call of ``attend``. The attention of each rank's queries must
    be that of a single process. The check uses 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages and the calls of ``attend``.

    Example:
        >>> print(ring_attention(lambda block, attend: attend(block), seed=1).reason)
        Rank 0 of 3 must send 2 blocks to its successor, but sent none.
    """
    return examine("ring_attention", function, _judge, seed)


def _judge(examination: Examination) -> str:
    where = judge_rounds(examination, _attend_on_rank, "block", _COUNT_HINT, _judge_attention)
    return f"Right {where}: the attention is exact, and every message overlaps with it."


def _attend_on_rank(function: Answer, secret: int) -> bool:
    """Returns whether this rank's attention is that of a single process."""
    import torch  # here, so that a process that only starts ranks does not load it
    from torch import distributed as dist
    from torch.nn.functional import scaled_dot_product_attention

    torch.manual_seed(secret)
    query, blocks = torch.rand(3, WIDTH), torch.rand(dist.get_world_size(), 2, 4, WIDTH)
    attended: list[Any] = []

    def attend(block: Any) -> None:
        with ringsim.span("attend"):
            before = block.clone()
            ringsim.compute(0.002)  # long enough for a message to arrive
            attended.append((before + block) / 2)  # neither, if the block has changed

    function(blocks[dist.get_rank()].clone(), attend)
    if len(attended) != len(blocks):
        return False
    found, due = (
        scaled_dot_product_attention(query, *torch.cat([*each], 1)) for each in (attended, blocks)
    )
    return torch.allclose(found, due)


def _judge_attention(trace: Trace) -> None:
    """Raises ``Wrong`` unless message k is in flight during call k of ``attend``, not longer.

    Before this, it raises ``Wrong`` for a wrong result.
    """
    if False in trace.results:
        raise Wrong(
            f"Rank {trace.results.index(False)} of {trace.world_size} must attend to the block of "
            "each rank once, but its attention is not that of a single process.",
            _BLOCK_HINT,
        )
    events = trace.events
    attends = events.spans(lambda label: label == "attend")
    for side in sides(trace):
        messages = events.select(side.events)
        calls = events.select(attends & (events.rank == side.rank))
        during = calls.post_ns[:-1], calls.done_ns[:-1]
        order = messages.post_ns, *during, messages.wait_ns, calls.post_ns[1:]
        if (np.diff(order, axis=0) < 0).any():
            raise Wrong(
                f"{side.who} must post each {side.verb} before it calls attend, and wait for it "
                "between this call and the next one.",
                _OVERLAP_HINT,
            )
