"""``trace.what_if()``: predicts how long a recorded run would take with changes.

The order of the run is replayed twice: with the changes, and without them. The two replays show
what the changes gain, and the replay without changes shows how well the order explains the run::

    recorded     |=============================|
    replayed     |============================|       the error of the replay
    predicted    |=====================|              the gain, compared with the replay

``trace.explain()`` tries a few changes to a slow run, and offers the one that gains most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.errors import ArgumentError, RingError, is_number, read_whole, say
from ringsim.link import Link, check_link
from ringsim.prediction.replaying import Edits, Order
from ringsim.provenance import describe_replay, name_error, percent_text
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OP_CODES
from ringsim.traces.findings import SLOW_KINDS
from ringsim.traces.units import time_text

if TYPE_CHECKING:
    from ringsim.traces.findings import Diagnosis
    from ringsim.traces.value import Trace

DOUBTFUL = 0.2  # a prediction is doubtful if the replay is off by more than this
# explain() offers a change only if it gains at least this share of the run, and more than the error
LEAST_GAIN = 0.05
MOST_EVENTS = 10_000  # explain() tries changes only to runs with at most this many events
SLOWER = 1.1  # a rank is slow if it computes for longer than this times the others' median
MOST_SLOW = 2  # how many slow ranks to try
# the metadata of the recorded run that also applies to the predicted one
_KEPT = (
    "format",
    "world_size",
    "backend",
    "comm_device",
    "machine",
    "versions",
    "date",
    "ranks",
    "ring_groups",
    "not_recorded",
    "complete",
    "ends",
)


def what_if(
    trace: Trace, ranks: Mapping[int, float] | None, link: Link | None, sends: str | None
) -> Trace:
    """Returns the prediction for ``Trace.what_if``, which describes the arguments."""
    if not isinstance(ranks, Mapping | None):
        raise ArgumentError(f"ranks must be a mapping, got {say(ranks)}. Use ranks={{2: 0.5}}.")
    for rank, factor in (ranks or {}).items():
        read_whole("a rank", rank, 0, trace.world_size - 1, hint="Choose a recorded rank.")
        if not is_number(factor) or factor <= 0:
            raise ArgumentError(
                f"the factor of rank {rank} must be a positive number, got {say(factor)}. Use "
                "0.5 for a rank that computes for half as long."
            )
    if link is not None:
        check_link("link", link)
    if sends not in (None, "isend"):
        raise ArgumentError(
            f'sends must be "isend" or None, got {say(sends)}. Use "isend" to predict asynchronous '
            "sends."
        )
    edits = Edits(ranks or {}, link, sends)
    order = _read_order(trace)
    return _label(trace, order.replay(Edits({})), order.replay(edits), edits)


def _read_order(trace: Trace) -> Order:
    """Returns the order of a recorded run.

    Raises:
        ArgumentError: the run was not recorded, did not finish, or is only a part of a run.
    """
    events, source = trace.events, trace.metadata.get("source")
    if source in ("simulated", "predicted"):
        remedy = "Simulate it again with inject or link, which is exact."
        if source == "predicted":
            remedy = "Pass all changes together to what_if() of the recorded run."
        raise ArgumentError(f"a run to predict from must be recorded, got a {source} one. {remedy}")
    if "part" in trace.metadata:
        raise ArgumentError(
            "a run to predict from must be whole, got a part of a run. Call what_if() first, then "
            "filter()."
        )
    is_stuck = (events.status == IN_FLIGHT) & (events.wait_ns != NONE) | (events.status == ERROR)
    if is_stuck.any() or trace.metadata.get("complete") is False or not trace.makespan_s:
        raise ArgumentError(
            "a run to predict from must have finished, got one with unfinished, failed or "
            "missing operations. See explain() for the reason."
        )
    return Order(trace)


def _label(trace: Trace, replayed: Trace, predicted: Trace, edits: Edits) -> Trace:
    """Returns the predicted run with the metadata that describes it."""
    error = replayed.makespan_s / trace.makespan_s - 1
    change = predicted.makespan_s / replayed.makespan_s - 1
    recorded, before, after = (
        time_text(run.makespan_s * 1e9) for run in (trace, replayed, predicted)
    )
    notes = [
        f"predicted: if {_describe(edits)}, this run would take {_compare(change)} "
        f"({name_error(error)}): {after} instead of {before}",
        f"the replay itself, without changes, takes {before}, and the run took {recorded}",
    ]
    if abs(error) > DOUBTFUL:
        notes.insert(0, "DOUBTFUL: the recorded order does not explain how long the run took")
    about: dict[str, Any] = {key: trace.metadata[key] for key in _KEPT if key in trace.metadata}
    about |= {
        "source": "predicted",
        "prediction": {
            "edits": _describe(edits),
            "recorded_s": trace.makespan_s,
            "replayed_s": replayed.makespan_s,
            "predicted_s": predicted.makespan_s,
        },
        "replay_error": error,
        "notes": [*notes, *trace.metadata.get("notes", ())],
    }
    return replace(predicted, metadata=about, recorded=trace)


def _describe(edits: Edits) -> str:
    said = [
        f"the computing of rank {rank} took {factor:.3g} times as long"
        for rank, factor in edits.ranks.items()
    ]
    if edits.link is not None:
        alpha_ns, beta_ns = edits.link.alpha_s * 1e9, edits.link.beta_s_per_byte * 1e9
        said.append(f"a message took {time_text(alpha_ns)} + {beta_ns:.3g} ns per byte")
    if edits.sends is not None:
        said.append("blocking sends were asynchronous")
    return " and ".join(said) or "nothing changed"


def _compare(change: float) -> str:
    return f"{percent_text(change)} {'less' if change < 0 else 'longer'}"


# -- advice


def advise(trace: Trace, diagnosis: Diagnosis) -> Diagnosis:
    """Returns the diagnosis of a slow run, with a note about the change that gains most.

    The changes are: a slow rank computes for as long as the other ranks, the link is twice as fast,
    and blocking sends are asynchronous. There is no note if none of them gains enough, or if the
    run has more than ``MOST_EVENTS`` events. For a predicted run, the note reports the error of its
    replay.

    Args:
        trace: the run.
        diagnosis: its diagnosis.
    """
    if error_text := describe_replay(trace.metadata):
        return replace(
            diagnosis, notes=(*diagnosis.notes, f"This run was predicted; {error_text}.")
        )
    if diagnosis.kind not in SLOW_KINDS or len(trace) > MOST_EVENTS:
        return diagnosis
    try:
        order = _read_order(trace)
        replayed_s = order.replay(Edits({})).makespan_s
        tried = [
            (1 - order.replay(edits).makespan_s / replayed_s, words, call)
            for edits, words, call in _list_changes(order)
        ]
    except RingError:  # this run cannot be replayed
        return diagnosis
    error = replayed_s / trace.makespan_s - 1
    gain, words, call = max(tried, default=(0.0, "", ""))
    if gain < max(LEAST_GAIN, abs(error)):
        return diagnosis
    note = (
        f"If {words}, this run would take {_compare(-gain)} (predicted; "
        f"{name_error(error)}): trace.what_if({call})."
    )
    return replace(diagnosis, notes=(*diagnosis.notes, note))


def _list_changes(order: Order) -> Iterator[tuple[Edits, str, str]]:
    """Yields the changes to try, each in words, and as arguments of ``what_if``."""
    took = order.computing_ns
    others = np.array([np.median(np.delete(took, rank)) for rank in range(len(took))])
    for rank in np.argsort(others - took)[:MOST_SLOW].tolist():
        if len(took) > 1 and took[rank] > SLOWER * others[rank] > 0:
            factor = float(f"{others[rank] / took[rank]:.2g}")
            yield (
                Edits({rank: factor}),
                f"rank {rank} computed for as long as the other ranks (median)",
                f"ranks={{{rank}: {factor:g}}}",
            )
    if order.link is not None:
        costs = order.link.alpha_s, order.link.beta_s_per_byte
        link = Link(*(float(f"{cost / 2:.2g}") for cost in costs))
        said = f"link=Link({link.alpha_s:g}, {link.beta_s_per_byte:g})"
        yield Edits({}, link), "messages took half as long", said
    if (order.trace.events.op == OP_CODES["send"]).any():
        yield Edits({}, sends="isend"), "blocking sends were asynchronous", 'sends="isend"'
