"""Traces made by hand, for tests of pictures, and traces of pipelines made from schedules.

The schedules are evaluated, and the ranks take the evaluated times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from trace_file import NONE, OPS, load_columns, make_trace

from ringsim import Trace
from ringsim.pipeline import Evaluation, evaluate
from ringsim.schedules import make_schedule

MS = 1_000_000

METADATA: dict[str, Any] = {
    "format": 1,
    "run_id": "synthetic",
    "source": "measured",
    "backend": "gloo",
    "comm_device": "cpu",
    "date": "2026-11-20",
    "machine": {"cpu": "Example CPU", "cores": 2},
    "versions": {"ringsim": "0.1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.4.0"},
    "not_recorded": [],
    "complete": True,
    "notes": [],
}


class Group(NamedTuple):
    """A group and its members."""

    name: str
    ranks: tuple[int, ...]


class Story:
    """Records events one by one, by name; ``trace()`` makes a trace of them."""

    def __init__(self, world_size: int, *, ring: bool = True) -> None:
        self.world_size = world_size
        edges = (
            [(rank, (rank + 1) % world_size) for rank in range(world_size)]
            if ring and world_size > 1
            else []
        )
        self.groups = [Group("world", tuple(range(world_size)))]
        self.groups += [Group(f"ring:{a}>{b}", tuple(sorted((a, b)))) for a, b in edges]
        self.ring_groups = [[f"ring:{a}>{b}", [a, b]] for a, b in edges]
        self.rows: list[dict[str, Any]] = []

    def op(self, rank: int, op: str, times_ms: tuple[float, float, float], **more: Any) -> None:
        """Adds one event; a negative time is missing, and ``file=0`` means "ring.py".

        ``size_bytes`` gives a payload of numbers, ``carries`` its dtype, shape and size.
        """
        post, wait, done = (round(time * MS) if time >= 0 else NONE for time in times_ms)
        row = dict(zip(("post_ns", "wait_ns", "done_ns"), (post, wait, done), strict=True))
        row |= {"rank": rank, "op": OPS.index(op), "status": 2 if done >= 0 else 1}
        if more.get("file") == 0:
            more["file"] = "/home/student/ring.py"
        if "size_bytes" in more:
            more["payload"] = self._payload(more.pop("size_bytes"))
        if "carries" in more:
            more["payload"] = more.pop("carries")
        self.rows.append(row | more)

    def _payload(self, size_bytes: int) -> tuple[str, tuple[int, ...], int]:
        return "float32", (size_bytes // 4,), size_bytes

    def span(self, rank: int, name: str, start_ms: float, end_ms: float, **more: Any) -> None:
        """Adds a span."""
        self.op(rank, "span", (start_ms, -1, end_ms), label=name, **more)

    def message(
        self, src: int, dst: int, send_ms: tuple[float, float, float],
        recv_ms: tuple[float, float, float], size_bytes: int = 4096,
        tag: int = 0, group: str | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Adds a send and its recv, by default on the ring's group from src to dst."""
        name = group or f"ring:{src}>{dst}"
        shared = {"group": name, "tag": tag, "size_bytes": size_bytes, **more}
        self.op(src, "isend", send_ms, peer=dst, **shared)
        self.op(dst, "irecv", recv_ms, peer=src, **shared)

    def trace(self, **metadata: Any) -> Trace:
        """Returns the trace, with its events ordered by rank and in posting order."""
        about = {"world_size": self.world_size, "ring_groups": self.ring_groups}
        rows = sorted(self.rows, key=lambda row: (row["rank"], row["post_ns"]))
        return make_trace(rows, groups=self.groups, **METADATA | about | metadata)


def pipeline(world_size: int = 4, microbatches: int = 4, *, size_bytes: int = 64 * 1024) -> Trace:
    """A forward pass of a pipeline with a slow last stage.

    At the end, a token returns to rank 0.
    """
    story = Story(world_size)
    free = [0.0] * world_size
    for microbatch in range(microbatches):
        arrives = 0.0
        for rank in range(world_size):
            where = {"stage": rank, "microbatch": microbatch}
            cost = 2.6 if rank == world_size - 1 else 1.6 + 0.2 * ((rank + microbatch) % 3)
            start = max(free[rank], arrives)
            end = start + cost
            story.span(rank, "forward", start, end, **where)
            story.span(rank, "attention", start + 0.1, start + cost * 0.45, **where)
            story.span(rank, "mlp", start + cost * 0.5, end - 0.1, **where)
            free[rank] = end + 0.1
            if rank < world_size - 1:
                ready = max(free[rank + 1], 0.02)
                done = max(end + 0.55, ready + 0.4)
                post = free[rank + 1] - (0.8 if microbatch else 0)
                story.message(
                    rank,
                    rank + 1,
                    (end, end + 0.05, done),
                    (max(post, 0.0), ready, done + 0.05),
                    size_bytes,
                    tag=microbatch,
                    **where,
                )
                free[rank], arrives = done + 0.05, done + 0.1
    if world_size > 1:
        last = free[-1]
        story.message(
            world_size - 1,
            0,
            (last, last, last + 0.4),
            (free[0], free[0], last + 0.45),
            1024,
            tag=99,
        )
        free[0] = free[-1] = last + 0.5
    for rank in range(world_size):
        story.op(rank, "barrier", (free[rank] + 1, free[rank] + 1, max(free) + 1.6), group="world")
        story.op(rank, "mark", (free[rank] + 0.8, -1, -1), label="epoch end", status=2)
    return story.trace(ranks=[{"rank": rank, "pid": 4210 + rank} for rank in range(world_size)])


def many_events(count: int = 100_000, world_size: int = 8) -> Trace:
    """A long run of short messages around a ring.

    Each round has a span, a send and a recv per rank; ``count`` events in total.
    """
    rounds = count // (3 * world_size)
    rank = np.repeat(np.arange(world_size), 3 * rounds)
    step = np.tile(np.repeat(np.arange(rounds), 3), world_size)
    what = np.tile(np.arange(3), world_size * rounds)  # 0 span, 1 isend, 2 irecv
    random = np.random.default_rng(1)
    begin = step * 100_000 + random.integers(0, 20_000, len(step))
    post = begin + np.choose(what, [0, 40_000, 38_000])
    wait = np.choose(what, [NONE, begin + 42_000, begin + 60_000])
    done = begin + np.choose(what, [38_000, 60_000, 75_000])
    span, isend, irecv = map(OPS.index, ("span", "isend", "irecv"))
    columns = {
        "rank": rank,
        "op": np.choose(what, [span, isend, irecv]),
        "post_ns": post,
        "wait_ns": wait,
        "done_ns": done,
        "peer": np.choose(what, [NONE, (rank + 1) % world_size, (rank - 1) % world_size]),
        "group": np.choose(what, [NONE, rank + 1, (rank - 1) % world_size + 1]),
        "tag": np.where(what == 0, NONE, 0),
        "payload": np.where(what == 0, NONE, 0),
        "label": np.where(what == 0, 0, NONE),
    }
    story = Story(world_size)
    tables = {
        "groups": [group._asdict() for group in story.groups],
        "payloads": [{"dtype": "float32", "shape": [1024], "size_bytes": 4096}],
        "labels": ["compute"],
    }
    about = {"world_size": world_size, "ring_groups": story.ring_groups}
    return load_columns(columns, tables, **METADATA | about)


UNIT_MS = 2.0  # the time in a trace for one unit of the evaluation
GAP_MS = 3.0  # between steps
LABELS = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


def trace_of(
    *evaluations: Evaluation, ranks: Sequence[int] | None = None, name: str | None = None
) -> Trace:
    """Returns a trace of steps, one after another.

    ``ranks`` gives the rank of the trace for each place of the schedules. On all ranks, every step
    span covers the whole step and a little more, as on real ranks that wait for their messages.
    """
    places = range(evaluations[0].schedule.num_ranks) if ranks is None else ranks
    story = Story(max(places) + 1)
    begin = 1.0
    for evaluation in evaluations:
        add_step(story, evaluation, begin, places, name or evaluation.schedule.name)
        begin += float(evaluation.makespan) * UNIT_MS + GAP_MS
    return story.trace()


def add_step(
    story: Story, evaluation: Evaluation, begin: float, places: Sequence[int], name: str
) -> None:
    """Adds one step to a story, starting at ``begin``."""

    def at(time: float) -> float:
        return begin + float(time) * UNIT_MS

    for place, rank in enumerate(places):
        story.span(rank, f"step {name}", begin - 0.5, at(evaluation.makespan) + 0.5)
        for action, start, end in evaluation.get_computations(place):
            story.span(
                rank,
                LABELS[action.kind],
                at(start),
                at(end),
                stage=action.stage,
                microbatch=action.microbatch,
            )
    for message in evaluation.messages:
        if message.arrived > message.posted:
            times = (at(message.posted), at(message.posted), at(message.arrived))
            story.message(
                places[message.source],
                places[message.rank],
                times,
                times,
                group="world",
                tag=message.send.microbatch,
            )


def known(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Evaluation:
    """Returns a published schedule with the evaluator's times: forward 1, backward 2."""
    return evaluate(make_schedule(name, num_ranks, num_microbatches, num_chunks))
