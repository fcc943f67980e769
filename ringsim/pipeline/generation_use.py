"""What a trace of the generation ring says of its stages: how long their jobs took, and how busy they were while decoding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.traces.events import NONE, SPAN, Ints
from ringsim.traces.value import Trace

__all__ = ["StageUse", "measure_stage_use"]


class StageUse(NamedTuple):
    """What one stage did.

    Attributes:
        prefill_s: time of a prefill job, on average, in seconds.
        decode_s: time of a decode job, likewise.
        decode_use: share of the time in which it worked, over whole repetitions of the ring while it was decoding.
        idle_s: time without a job, from the first job of all stages to the last, in seconds.
    """

    prefill_s: float
    decode_s: float
    decode_use: float
    idle_s: float


def measure_stage_use(trace: Trace) -> list[StageUse]:
    """Measures how busy each stage of a generation ring was.

    For the share while decoding, the batches of the first round are looked at, from the first decode job of a stage until the last
    token's turn begins: so the filling and draining of the ring do not count.

    Args:
        trace: of one call of ``generate``, with three tokens or more for each prompt.

    Returns:
        One row a stage, in order.

    Raises:
        ArgumentError: the trace has no such call, or more than one.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> span = OP_CODES["span"]
        >>> events = make_events(
        ...     {
        ...         "rank": [0] * 4, "op": [span] * 4, "stage": [0] * 4, "microbatch": [0] * 4, "label": [0, 1, 1, 1],
        ...         "post_ns": [0, 600, 1000, 1400], "done_ns": [300, 700, 1100, 1500],
        ...     },
        ...     Tables(labels=("prefill", "decode")),
        ... )
        >>> measure_stage_use(Trace(events, {"world_size": 1}))[0].decode_use
        0.25
    """
    events = trace.events
    names = np.array([*trace.events.tables.labels, ""])[events.label]
    jobs = np.flatnonzero((events.kind == SPAN) & np.isin(names, ("prefill", "decode")) & (events.done_ns != NONE))
    if len(jobs) == 0:
        raise ArgumentError("trace must be of a call of generate, got one without its jobs. Record the ranks while they generate.")
    start, stop = events.post_ns[jobs].min(), events.done_ns[jobs].max()
    rows = []
    for stage in range(int(events.stage[jobs].max()) + 1):
        own = jobs[events.stage[jobs] == stage]
        took = events.done_ns[own] - events.post_ns[own]
        is_prefill = names[own] == "prefill"
        use = _decode_use(events.post_ns[own], took, is_prefill, events.microbatch[own])
        rows.append(StageUse(took[is_prefill].mean() * 1e-9, took[~is_prefill].mean() * 1e-9, use, (stop - start - took.sum()) * 1e-9))
    return rows


def _decode_use(start: Ints, took: Ints, is_prefill: Ints, batch: Ints) -> float:
    """Share of the time worked between the first decode job and the turn of the last token, in the first round."""
    in_turn = int(np.flatnonzero(~is_prefill)[0]) if not is_prefill.all() else 0  # the first round begins with one prefill a batch
    decode = np.flatnonzero(~is_prefill & (batch < in_turn))
    turns = len(decode) // in_turn if in_turn else 0
    if turns < 2 or (batch[is_prefill] == 0).sum() != 1:
        raise ArgumentError(
            "trace must be of one call of generate with max_new_tokens of 3 or more, got another. Record such a call alone."
        )
    whole = decode[: (turns - 1) * in_turn]
    return float(took[whole].sum() / (start[decode[len(whole)]] - start[decode[0]]))
