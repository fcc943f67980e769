"""Random programs that finish, as data, and a worker that runs them on either clock."""

from __future__ import annotations

import random
from typing import Any

import torch

import ringsim
from ringsim import comm as dist

Instruction = tuple[Any, ...]
Programs = list[list[Instruction]]


def draw_programs(seed: int, size: int = 4, *, collectives: bool = True) -> Programs:
    """Draws programs of messages, collectives and computing, none of which gets stuck.

    The ranks handle the messages in one order, and wait for each at some later point. No two
    computing times are equal, so that the order of a rank's operations shows in their times.
    """
    draw = random.Random(seed)
    programs: Programs = [[] for _ in range(size)]
    open_waits: list[list[int]] = [[] for _ in range(size)]
    handles = [0] * size

    def add(rank: int, *instruction: Any) -> None:
        programs[rank] += [("work", draw.randrange(1_000, 3_000_000) * 1e-9), instruction]

    def wait(rank: int) -> None:
        mine = open_waits[rank]
        add(rank, "wait", mine.pop(draw.randrange(len(mine))))

    for number in range(20):
        if collectives and draw.random() < 0.2:
            for rank in range(size):
                add(rank, "all_reduce", 1 << 20)  # large enough for a ring
            continue
        source, target = draw.sample(range(size), 2)
        numbers = draw.choice([1, 1, 3])
        for rank, peer, op in ((source, target, "send"), (target, source, "recv")):
            if draw.random() < 0.5:
                for part in range(numbers):
                    add(rank, op, peer, number, 1 << 10 + 8 * (part % 2))
                continue
            for part in range(numbers):
                add(rank, f"i{op}", peer, number, 1 << 10 + 8 * (part % 2))
                open_waits[rank].append(handles[rank])
                handles[rank] += 1
        for rank in range(size):
            if open_waits[rank] and draw.random() < 0.4:
                wait(rank)
    for rank in range(size):
        while open_waits[rank]:
            wait(rank)
    return programs


def make_asynchronous(programs: Programs) -> Programs:
    """Returns the programs with ``isend`` for ``send``, and waits for these at the ends."""
    changed: Programs = []
    for program in programs:
        kept = [index for index, one in enumerate(program) if one[0] in ("send", "isend", "irecv")]
        number = {index: place for place, index in enumerate(kept)}
        handles = [place for place, index in enumerate(kept) if program[index][0] != "send"]
        mine = [
            ("isend", *one[1:])
            if index in number and one[0] == "send"
            else ("wait", handles[one[1]])
            if one[0] == "wait"
            else one
            for index, one in enumerate(program)
        ]
        sends = [place for place, index in enumerate(kept) if program[index][0] == "send"]
        changed.append([*mine, *[("wait", place) for place in sends]])
    return changed


def follow(programs: Programs) -> None:
    """Runs this rank's program."""
    handles: list[Any] = []
    for op, *about in programs[dist.get_rank()]:
        match op:
            case "work":
                ringsim.compute(about[0])
            case "wait":
                handles[about[0]].wait()
            case "all_reduce":
                dist.all_reduce(torch.zeros(about[0] // 4))
            case _:
                peer, tag, size_bytes = about
                handle = getattr(dist, op)(torch.zeros(size_bytes // 4), peer, tag=tag)
                if op.startswith("i"):
                    handles.append(handle)
