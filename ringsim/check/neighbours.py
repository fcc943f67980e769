"""The rule of the exercises on the ring: messages go to the successor, on the group of that edge, and there is nothing else."""

from __future__ import annotations

from typing import Final

import numpy as np

from ringsim.check.examination import Wrong
from ringsim.traces.events import COLLECTIVE, NONE, OP_NAMES, RECV, SEND
from ringsim.traces.value import Trace

__all__ = ["ALONE_HINT", "RAISED_HINT", "judge_way"]

ALONE_HINT: Final = "A ring of one has no groups (both are None) and nobody to send to: range(ring.world_size - 1) is empty there."
RAISED_HINT: Final = (
    "Each pair group joins two ranks only: ring.succ goes with ring.succ_group, ring.pred with ring.pred_group. In a ring of one "
    "there are no groups, and nothing to send."
)
_GROUP_HINT: Final = (
    "Name the group in every call: dist.isend(..., ring.succ, group=ring.succ_group), dist.recv(..., ring.pred, group=ring.pred_group)."
)


def judge_way(trace: Trace, things: str) -> None:
    """Raises ``Wrong`` unless every message goes to the successor, on the group of that edge; also for a run that did not end.

    Args:
        trace: of the run.
        things: what the exercise calls that which is sent, in the plural.
    """
    events, size = trace.events, trace.world_size

    def wrong(reason: str, hint: str) -> Wrong:
        return Wrong(reason, hint, world_size=size, trace=trace)

    for index in np.flatnonzero(np.isin(events.kind, (SEND, RECV, COLLECTIVE))).tolist():
        rank, peer, kind = int(events.rank[index]), int(events.peer[index]), events.kind[index]
        who, op = f"Rank {rank} of {size}", OP_NAMES[events.op[index]]
        if size == 1:
            raise wrong(f"A rank alone has nobody to talk to, and called {op}.", ALONE_HINT)
        if kind == COLLECTIVE:
            raise wrong(
                f"{who} called {op}, and only messages between neighbours are allowed.",
                f"The sum can be had from sends and recvs alone: pass {things} on, and add up what arrives.",
            )
        pred, succ = (rank - 1) % size, (rank + 1) % size
        verb, due, other, role = ("sent to", succ, pred, "successor") if kind == SEND else ("received from", pred, succ, "predecessor")
        if peer != due:
            found = f"rank {peer}, its {'predecessor' if role == 'successor' else 'successor'}" if peer == other else f"rank {peer}"
            found = found if peer >= 0 else "any rank"
            raise wrong(
                f"{who} {verb} {found}, and {things} must {'go to' if kind == SEND else 'come from'} its {role}, rank {due}.",
                f"Send to ring.succ on ring.succ_group, receive from ring.pred on ring.pred_group: {things} go clockwise in the picture.",
            )
        group = events.tables.groups[events.group[index]].name if events.group[index] != NONE else "none"
        edge = f"ring:{rank}>{succ}" if kind == SEND else f"ring:{pred}>{rank}"
        if group != edge:
            raise wrong(f'{who} {verb} rank {peer} on the group "{group}", and must do so on its {role} group "{edge}".', _GROUP_HINT)
