"""An independent reckoning of schedules: times of all actions by going over them until nothing changes, and schedules drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

from ringsim.link import Link
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.lowering import get_needs, get_recv
from ringsim.schedules.schedule import Action, Schedule

Price = Callable[[Action], Time]
Links = dict[tuple[int, int], Link]


def reckon_links(
    lowered: Schedule, costs: Costs, links: Links, sizes: list[int], semantics: str, slower: Action | None = None, by: float = 0
) -> dict[Action, Time]:
    """Finds when each computation ends where messages take their links, one of them slower ``by`` some time."""

    def link_of(send: Action) -> Link:
        return links[lowered.stage_ranks[send.stage], lowered.stage_ranks[send.other_side.stage]]

    ends = reckon(
        lowered,
        lambda action: costs.get_duration(action) + (by if action == slower else 0),
        lambda send: sizes[min(send.stage, send.other_side.stage)] * link_of(send).beta_s_per_byte,
        lambda send: link_of(send).alpha_s,
        rendezvous=semantics == "rendezvous",
    )
    return {action: end for action, end in ends.items() if action.is_compute}


def draw_links(chance: random.Random, ranks: int) -> Links:
    return {pair: Link(chance.random(), chance.random()) for pair in product(range(ranks), repeat=2)}


def reckon(lowered: Schedule, duration: Price, occupancy: Price, latency: Price, *, rendezvous: bool) -> dict[Action, Time]:
    """Finds when each computation ends, and when the message of each receive arrives.

    Args:
        lowered: a schedule with its sends and receives, free of circles.
        duration: of a computation.
        occupancy: of a send: how long its message keeps the link from rank to rank, which takes messages in the order of their sends.
        latency: of a send.
        rendezvous: whether a message starts only when its receive is posted, too.
    """
    ends: dict[Action, Time] = {}
    while True:
        before, posts = dict(ends), {}
        for row in lowered.actions:
            clock: Time = 0
            for action in row:
                if action.is_compute:
                    recv = get_recv(action, lowered.stage_ranks)
                    clock = max(clock, ends.get(recv, 0) if recv is not None else 0) + duration(action)
                    ends[action] = clock
                else:
                    posts[action] = clock
        free: dict[tuple[int, int], Time] = {}
        for rank, row in enumerate(lowered.actions):
            for send in row:
                if send.kind.startswith("SEND"):
                    recv = send.other_side
                    channel = rank, lowered.stage_ranks[recv.stage]
                    start = max(posts[send], free.get(channel, 0), posts[recv] if rendezvous else 0)
                    free[channel] = start + occupancy(send)
                    ends[recv] = free[channel] + latency(send)
        if ends == before:
            return ends


def draw_schedule(chance: random.Random) -> Schedule:
    """Draws a whole step that nobody has named: any placement, whole and split backwards, in any order that can end."""
    ranks, microbatches = chance.randint(1, 4), chance.randint(1, 5)
    stage_ranks = tuple(chance.randrange(ranks) for _ in range(chance.randint(1, 6)))
    todo = set()
    for stage in range(len(stage_ranks)):
        for microbatch in range(microbatches):
            todo |= {Action(stage, kind, microbatch) for kind in chance.choice(("FB", "FIW"))}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while todo:
        ready = sorted(action for action in todo if _is_ready(action, stage_ranks, done))
        action = chance.choice(ready)
        todo.remove(action)
        done.add(action)
        rows[stage_ranks[action.stage]].append(action)
    return Schedule("drawn", microbatches, stage_ranks, tuple(map(tuple, rows)))


def _is_ready(action: Action, stage_ranks: tuple[int, ...], done: set[Action]) -> bool:
    """Whether all that a computation needs is done, wherever that is."""
    for need in get_needs(action, stage_ranks):
        if need[0].is_compute:
            if done.isdisjoint(need):
                return False
        else:
            made = need[0].other_side
            makers = {Action(made.stage, kind, made.microbatch) for kind in (("F",) if made.kind == "SEND_F" else ("B", "I"))}
            if done.isdisjoint(makers):
                return False
    return True


def move_posts(lowered: Schedule, chance: random.Random) -> Schedule:
    """Posts some messages later than `lower` does, in the same order; whether the ranks still come to an end is not said."""
    rows = []
    for row in map(list, lowered.actions):
        for place in range(len(row) - 1):
            first, second = row[place : place + 2]
            own = get_recv(second, lowered.stage_ranks) if second.is_compute else None
            if not first.is_compute and second.is_compute and first != own and chance.random() < 0.4:
                row[place], row[place + 1] = second, first
        rows.append(tuple(row))
    return Schedule(lowered.name, lowered.num_microbatches, lowered.stage_ranks, tuple(rows))
