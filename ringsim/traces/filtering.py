"""Selects part of a trace by ranks, time range, operations, groups or steps.

A part is a trace like any other, except that some of its operations may be *apart*. An operation is
apart if the part does not contain its other side or, for a collective, the events of every rank
that called it. Such an operation matches nothing, so that no later message takes the place of one
that was left out. It does not count as unmatched, because it had a partner. ``metadata["part"]``
lists the indices of these operations among the events, and describes the selection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from ringsim.errors import ArgumentError, read_whole, say
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, OP_NAMES, RECV, SEND, Ints
from ringsim.traces.matching import CollectiveCalls, refused
from ringsim.traces.steps import count_steps, number_steps
from ringsim.traces.value import Trace, part_of

Numbers = SupportsIndex | Iterable[SupportsIndex]
Names = str | Iterable[str]
Stretch = tuple[float, float]

_SAID = 8  # how many numbers or names to list before "and n more"


def filter_trace(
    trace: Trace,
    ranks: Numbers | None,
    between_s: Stretch | None,
    ops: Names | None,
    groups: Names | None,
    steps: Numbers | None,
) -> Trace:
    """Returns the events that meet all conditions; see ``Trace.filter``."""
    events = trace.events
    kept, said = np.ones(len(events), dtype=bool), []
    if ranks is not None:
        chosen = _read_numbers("ranks", ranks, trace.world_size)
        kept &= np.isin(events.rank, chosen)
        said.append(_say("ranks", chosen))
    if between_s is not None:
        begin_s, end_s = _read_stretch(between_s)
        # an operation that is not done lasts until the end of the run
        is_open = (events.done_ns == NONE) & (events.op != OP_CODES["mark"])
        kept &= is_open | (events.last_ns >= begin_s * 1e9)
        kept &= events.post_ns <= end_s * 1e9
        said.append(f"from {between_s[0]} s to {between_s[1]} s")
    if ops is not None:
        names = _read_names("ops", ops, OP_NAMES, [OP_NAMES[code] for code in np.unique(events.op)])
        kept &= np.isin(events.op, [OP_CODES[name] for name in names])
        said.append(_say("ops", names))
    if groups is not None:
        known = [group.name for group in events.tables.groups]
        names = _read_names("groups", groups, known, known)
        kept &= np.isin(
            events.group, [number for number, name in enumerate(known) if name in names]
        )
        said.append(_say("groups", names))
    if steps is not None:
        chosen = _read_numbers("steps", steps, count_steps(events))
        kept &= np.isin(number_steps(events), chosen)
        said.append(_say("steps", chosen))
    return trace if kept.all() else take(trace, kept, said)


def choose(
    world_size: int, ranks: Numbers | None, between_s: Stretch | None
) -> tuple[Sequence[int], float]:
    """Returns the selected ranks in ascending order and the end of the selection in seconds."""
    chosen = range(world_size) if ranks is None else _read_numbers("ranks", ranks, world_size)
    return chosen, np.inf if between_s is None else _read_stretch(between_s)[1]


def part_of_file(
    trace: Trace,
    chosen: Sequence[int],
    ranks: Numbers | None,
    between_s: Stretch | None,
    *,
    all_read: bool,
) -> Trace:
    """Returns the events that meet the conditions, from a file that was only partly read.

    Args:
        trace: the events that were read; they include all events of the chosen ranks up to the end
            of the time range.
        chosen: the selected ranks, as ``choose`` returns them.
        ranks: the ranks as the user gave them.
        between_s: the time range as the user gave it.
        all_read: whether the trace contains the whole run.
    """
    if all_read:
        return trace.filter(ranks=ranks, between_s=between_s)
    events = trace.events
    mine = np.isin(events.rank, chosen)
    groups = (set(group.ranks) for group in events.tables.groups)
    whole = np.array([*(ranks.issubset(chosen) for ranks in groups), True])  # the last: no group
    apart = np.isin(events.kind, (SEND, RECV)) & ~np.isin(events.peer, chosen)
    apart |= (events.kind == COLLECTIVE) & ~whole[events.group]
    apart &= ~refused(events)
    apart[trace.apart] = True
    read = _make_part(trace, mine, apart, [] if ranks is None else [_say("ranks", chosen)])
    if between_s is None:
        return read
    calls = CollectiveCalls.of(read.events, read.apart)
    open_calls = calls.event[~calls.complete[calls.call]]
    # the operations whose other side may have been posted later
    late = np.concatenate([read.apart, read.messages.unmatched, open_calls])
    every = np.arange(len(read.events))
    return _make_part(read, every, np.isin(every, late), []).filter(between_s=between_s)


def take(trace: Trace, kept: Ints, said: Sequence[str] = ()) -> Trace:
    """Returns the selected events as a trace that lists the operations that are apart."""
    events, messages = trace.events, trace.messages
    apart = np.isin(np.arange(len(events)), trace.apart)
    apart[messages.send] |= ~kept[messages.recv]
    apart[messages.recv] |= ~kept[messages.send]
    calls = CollectiveCalls.of(events, trace.apart)
    apart[calls.event] |= np.isin(calls.call, calls.call[~kept[calls.event]])
    return _make_part(trace, kept, apart, said)


def _make_part(trace: Trace, kept: Ints, apart: Ints, said: Sequence[str]) -> Trace:
    part = {
        "of": [*part_of(trace.metadata)["of"], *said],
        "apart": np.flatnonzero(apart[kept]).tolist(),
    }
    return replace(
        trace, events=trace.events.select(kept), metadata=trace.metadata | {"part": part}
    )


def _read_stretch(between_s: Stretch) -> Stretch:
    try:
        begin_s, end_s = map(float, between_s)
    except (TypeError, ValueError):
        begin_s, end_s = np.nan, np.nan
    if not begin_s <= end_s:
        raise ArgumentError(
            "between_s must be two times in seconds from the start of the run, the earlier one "
            f"first, got {say(between_s)}. Use, for example, between_s=(0.5, 0.7)."
        )
    return begin_s, end_s


def _read_numbers(name: str, value: Any, count: int) -> list[int]:
    if not count:
        raise ArgumentError(
            f"cannot select {name}={say(value)}: this trace has no {name}. Omit {name}."
        )
    try:
        given = list(value)
    except TypeError:
        given = [value]
    hint = "Pass one number or several."
    return sorted({read_whole(name, one, 0, count - 1, hint=hint) for one in given})


def _read_names(name: str, value: Any, known: Sequence[str], there: Sequence[str]) -> list[str]:
    try:
        names = [value] if isinstance(value, str) else list(dict.fromkeys(value))
        unknown = [one for one in names if one not in known]
    except TypeError:
        names, unknown = [], [value]
    if unknown:
        listed = ", ".join(map(repr, there[:_SAID]))
        more = f" and {len(there) - _SAID} more" if len(there) > _SAID else ""
        hint = f"Choose from {listed}{more}." if there else f"Omit {name}: the trace has none."
        raise ArgumentError(f"{name} must be in this trace, got {say(unknown[0])}. {hint}")
    return names


def _say(name: str, values: Sequence[object]) -> str:
    more = f" and {len(values) - _SAID} more" if len(values) > _SAID else ""
    return f"{name} {', '.join(map(str, values[:_SAID])) or 'none'}{more}"
