"""Tries every order of a program's operations that makes a difference.

Two steps of different ranks race if their order makes a difference and is not decided by a step
between them. If the races of all tried orders are reversed, one after another, every other order is
equivalent to a tried one, from which it differs only in steps that commute::

    order 0, 1, 2                 rank 0 receives the message of rank 1; the two sends race
    -> try order 0, 2, 1          rank 0 receives the message of rank 2

No order is tried to its end twice, because ranks sleep: after rank 1 has been tried in a state,
orders that begin with another rank let rank 1 sleep until a step that races with its step.

Source: P. Abdulla, S. Aronis, B. Jonsson and K. Sagonas, "Optimal dynamic partial order reduction",
POPL 2014 (the algorithm "source-DPOR").
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from ringsim.launch.process import Process
from ringsim.simulator.orders import Choice, OrderedSimulation
from ringsim.simulator.simulation import Outcome, run_in


def explore_here(_: Process, most: int, seed: int, limit_s: float | None, *run: Any) -> Any:
    """Tries orders until one fails, each in a fork of this process.

    Args:
        most: the most orders to try.
        seed: the seed of the sequence in which the orders are tried.
        limit_s: the time limit for each order, or None.
        run: the arguments of the simulation.

    Returns:
        The number of orders tried, the number of orders left, and the arguments of the simulation
        for the order that failed, or None.
    """
    draw, inboxes = random.Random(seed), set[object]()
    while True:
        tried = 0
        covered: dict[tuple[int, ...], set[int]] = {}  # the ranks that need not be tried any more
        left: list[tuple[tuple[int, ...], set[int]]] = [((), set())]
        while left and tried < most:
            order, asleep = left.pop(draw.randrange(len(left)))
            how = order, asleep, inboxes
            failed, (halted, choices, found) = _try(limit_s, *how, *run) or (True, ({}, (), set()))
            tried += not halted  # otherwise, equivalent orders are tried anyway
            if failed:
                return tried, len(left), how
            if not inboxes.issuperset(found):
                break
            ranks = tuple(choice.rank for choice in choices)
            for place in range(len(order), len(ranks)):
                covered[ranks[:place]] = {*choices[place].asleep, ranks[place]}
            for place, firsts in _find_races(choices, inboxes):
                before = ranks[:place]
                known = covered[before]
                if not firsts & known:
                    for rank in sorted(firsts)[:1] or choices[place].steps.keys() - known:
                        left.append(((*before, rank), known.copy()))
                        known.add(rank)
        else:
            return tried, len(left), None
        inboxes |= found  # begin again, because more operations race


def _find_races(choices: Sequence[Choice], inboxes: set[object]) -> Iterator[tuple[int, set[int]]]:
    """Finds the races of an order.

    Yields:
        For each race, the number of its first step, and the ranks of which one must go first in an
        order with the reversed race, or no ranks if these are unknown.
    """
    before: list[set[int]] = []  # for each step, the steps that come before it in equivalent orders
    for late, (steps, _, rank) in enumerate(choices):
        past, races = set[int](), list[int]()
        for early in reversed(range(late)):
            first = choices[early]
            follows = first.rank == rank or early == steps[rank].cause
            if early in past or not (
                follows or first.steps[first.rank].races(steps[rank], inboxes)
            ):
                continue
            past |= before[early] | {early}
            if not follows:
                races.append(early)
        before.append(past)
        for early in races:
            free = {at for at in range(early + 1, late) if early not in before[at]} | {late}
            firsts = {choices[at].rank for at in free if not before[at] & free}
            yield early, firsts & choices[early].steps.keys()


def _try(limit_s: float | None, *run: Any) -> Any:
    """Runs an order in a fork of this process.

    Returns:
        Whether the order failed, and facts about its choices; or None if the fork died, or exceeded
        the time limit.
    """
    reads, writes = Pipe(duplex=False)
    fork = get_context("fork").Process(target=_run_order, args=(writes, *run))
    fork.start()
    writes.close()
    try:
        return reads.recv() if reads.poll(limit_s) else None
    except EOFError:
        return None
    finally:
        fork.kill()
        fork.join()


def _run_order(channel: Connection, *run: Any) -> None:
    def finish(outcome: Outcome) -> None:
        channel.send((outcome.error is not None, outcome.more))
        os._exit(0)

    process: Any = SimpleNamespace(finish=finish)
    finish(run_in(OrderedSimulation, process, *run))
