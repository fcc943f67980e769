"""The checks for the lesson on stages: dividing layers, and sending a tensor of any shape."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import numpy as np

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Numbers,
    Side,
    Wrong,
    examine,
    judge_rings,
    listed,
    plain_tensor,
    refuse_text,
    shown,
)
from ringsim.traces.units import count
from ringsim.traces.value import Trace

Cut = list[list[int]]  # for each stage, its layers
_ENTRIES_HINT = (
    "Return a list with one entry per stage, even for a stage without layers: range(3, 3) is an "
    "empty range."
)
_LOST_HINT = (
    "With num_layers // num_stages layers per stage, num_layers % num_stages layers remain. Give "
    "one of them to each of the first num_layers % num_stages stages."
)
_ORDER_HINT = (
    "Divide the layers from front to back: each stage begins where the previous stage ends. Keep "
    "the next start in a variable."
)
_BALANCE_HINT = (
    "A pipeline is as fast as its slowest stage. Do not give all remaining layers to one stage: "
    "give one more layer to each of the first num_layers % num_stages stages."
)
_ITEM_BYTES = 4  # float32
_MOST_DIMENSIONS = 4
Shape = tuple[int, ...]
_RAISED_HINT = (
    "Stages form a line: rank 0 has no predecessor, the last rank has no successor, and a single "
    "rank has neither. A recv needs a tensor of the same size as the tensor that is sent, so send "
    "the shape first. Tensors that you send must be contiguous."
)
_TWO_MESSAGES_HINT = (
    "Send two messages for each tensor: first one int64 tensor with the number of dimensions and "
    "the dimensions, and then the payload. A message for each dimension would cost several "
    "latencies."
)
_FIXED_HINT = (
    "The receiver must create a tensor for the header before it knows the shape, so the size of "
    "the header must not depend on the shape. Tensors have at most 4 dimensions here: pad the "
    "header with zeros."
)
_VALUE_HINT = (
    "Receive into torch.empty(shape) with the shape from the header, and return that tensor. Send "
    "tensor.contiguous()."
)


def partition(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that divides a model's layers among stages.

    ``function(num_layers, num_stages)`` returns a list with the layers of each stage, as ranges or
    lists of numbers. Every layer must occur once, in order, and the stages must differ by at most
    one layer; with more stages than layers, some stages are empty. The check calls the function on
    a separate rank, so that it can stop an endless loop.

    Args:
        function: the answer.
        seed: the seed for generating the sizes, or None for a random seed.

    Returns:
        The verdict, with its reason.

    Example:
        >>> def whole_shares_only(num_layers, num_stages):
        ...     share = num_layers // num_stages
        ...     return [range(stage * share, (stage + 1) * share) for stage in range(num_stages)]
        >>> print(partition(whole_shares_only, seed=1).reason)
        With 10 layers and 4 stages, 2 layers are missing, beginning with layer 8.
    """
    return examine("partition", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    sizes = [(8, 4), (10, 4), (4, 4), (3, 4), (1, 3), (5, 1), (0, 2)]
    sizes += [(draw.randrange(5, 100), draw.randrange(2, 20)) for _ in range(5)]
    for (num_layers, num_stages), answer in examination.ask(sizes, _read_cut):
        _judge_cut(num_layers, num_stages, answer)
    return (
        f"Right for {len(sizes)} models, including some with empty stages: every layer occurs "
        "once, in order, and the stages are balanced."
    )


def _read_cut(answer: Any) -> Cut:
    return [[int(layer) for layer in layers] for layers in refuse_text(answer)]


def _judge_cut(num_layers: int, num_stages: int, cut: Cut | str) -> None:
    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(
            f"With {count(num_layers, 'layer')} and {count(num_stages, 'stage')}, {reason}.", hint
        )

    if isinstance(cut, str):
        raise wrong(
            f"your answer must be a list of ranges, one for each stage, got {cut}",
            "Return a list such as [range(0, 2), range(2, 4)].",
        )
    if len(cut) != num_stages:
        reason = f"your answer must have one entry for each stage, but has {len(cut)}"
        raise wrong(reason, _ENTRIES_HINT)
    given = [layer for layers in cut for layer in layers]
    strange = [layer for layer in given if not 0 <= layer < num_layers]
    if strange:
        raise wrong(
            f"there is no layer {strange[0]}",
            "Layers are numbered from 0 to num_layers - 1, and range(a, b) ends before b.",
        )
    lost = sorted(set(range(num_layers)) - set(given))
    if lost:
        are = "is" if len(lost) == 1 else "are"
        reason = f"{count(len(lost), 'layer')} {are} missing, beginning with layer {lost[0]}"
        raise wrong(reason, _LOST_HINT)
    twice = [layer for layer in given if given.count(layer) > 1]
    if twice:
        raise wrong(f"layer {twice[0]} occurs more than once", _ORDER_HINT)
    if given != list(range(num_layers)):
        raise wrong(f"the layers must be in order, got {shown(cut)}", _ORDER_HINT)
    lengths = [len(layers) for layers in cut]
    if max(lengths) - min(lengths) > 1:
        raise wrong(
            f"stages must differ by at most one layer, got {shown(lengths)} layers", _BALANCE_HINT
        )


def hand_over(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that sends a tensor to the next stage, which does not know its shape.

    The check calls ``function(tensor)`` on every rank with a float32 tensor of 1 to 4 dimensions,
    with a different shape on each rank. The function sends its tensor to the next rank and returns
    the tensor from the previous rank. Stages form a line: rank 0 receives nothing and returns None,
    and the last rank sends nothing. Each tensor travels in two messages on the pair group: a header
    whose size is the same for all shapes, and the payload. The check uses 1, 2, 3 and more ranks.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and shapes, or None for a random seed.

    Returns:
        The verdict; its trace shows the messages.

    Example:
        >>> print(hand_over(lambda tensor: None, seed=1).reason)
        Rank 0 of 3 must send 2 messages to rank 1, a header and a payload, but sent none.
    """
    return examine("hand_over", function, _judge_hand_over, seed)


def _judge_hand_over(examination: Examination) -> str:
    sizes = [3, 2, examination.random.choice([4, 5]), 1]
    headers: dict[int, Shape] = {}
    judge_rings(
        examination,
        _hand_over_on_rank,
        "tensors",
        sizes,
        functools.partial(_judge_messages, headers),
        _judge_values,
        _RAISED_HINT,
    )
    (size_bytes,) = headers
    return f"Right on {listed(sizes)} ranks: a header of {size_bytes} bytes, then the payload."


def _hand_over_on_rank(function: Answer, secret: int) -> tuple[Numbers | str, Numbers | str | None]:
    """Calls the answer with this rank's tensor; returns the tensor and the result.

    Neighbours' shapes differ in the number of dimensions. The numbers count up from 1000 times the
    rank, along the first dimension first.
    """
    import torch  # here, so that a process that only starts ranks does not load it

    from ringsim.ring import current_ring

    rank = current_ring().rank
    draw = random.Random(f"{secret}/{rank}")
    shape = [draw.randrange(2, 8) for _ in range(1 + (rank + secret) % _MOST_DIMENSIONS)]
    numbers = 1000 * rank + np.arange(math.prod(shape), dtype=np.float32)
    # not contiguous, as activations may be
    tensor = torch.from_numpy(numbers.reshape(shape, order="F"))
    own = plain_tensor(tensor)
    answer = function(tensor)
    return own, None if answer is None else plain_tensor(answer)


def _judge_messages(headers: dict[int, Shape], trace: Trace, side: Side) -> None:
    """Raises ``Wrong`` unless each tensor travels as a fixed-size header and a payload."""
    found = trace.events.size_bytes[side.events].tolist()
    source, target = (side.rank, side.peer) if side.is_send else (side.peer, side.rank)
    if source >= target:
        if found:
            messages = count(len(found), "message")
            reason = f"{side.who} {side.done} {messages}, but the line of stages ends there."
            raise Wrong(reason, _RAISED_HINT)
        return
    direction = f"{'to' if side.is_send else 'from'} rank {side.peer}"
    side.judge(2, f"2 messages {direction}, a header and a payload", _TWO_MESSAGES_HINT)
    header_bytes, payload_bytes = found
    shape, numbers = trace.results[source][0]
    due_bytes = len(numbers) * _ITEM_BYTES
    if payload_bytes != due_bytes:
        due = f"a payload of {due_bytes} bytes for shape {shape} after the header"
        raise side.wrong(due, f"{payload_bytes} bytes", _VALUE_HINT)
    headers.setdefault(header_bytes, shape)
    if len(headers) > 1:
        (first, of), (second, other) = headers.items()
        reason = (
            f"The header must have the same size for all shapes, but has {first} bytes for "
            f"shape {of} and {second} bytes for shape {other}."
        )
        raise Wrong(reason, _FIXED_HINT)


def _judge_values(trace: Trace) -> None:
    """Raises ``Wrong`` unless each rank returns the previous rank's tensor, or None."""
    for rank, (_, answer) in enumerate(trace.results):
        who = f"Rank {rank} of {trace.world_size}"
        if rank == 0:
            if answer is not None:
                tensor = "a tensor" if isinstance(answer, tuple) else answer
                reason = f"{who} has no predecessor and must return None, but returned {tensor}."
                raise Wrong(reason, _RAISED_HINT)
            continue
        due = trace.results[rank - 1][0]
        if not isinstance(answer, tuple) or answer[0] != due[0]:
            got = f"shape {answer[0]}" if isinstance(answer, tuple) else answer
            reason = f"{who} must return a tensor of shape {due[0]}, but returned {got}."
            raise Wrong(reason, _VALUE_HINT)
        if answer != due:
            reason = (
                f"{who} must return the numbers of rank {rank - 1}, but returned different "
                "numbers, or the same numbers in a different order."
            )
            raise Wrong(reason, _VALUE_HINT)
