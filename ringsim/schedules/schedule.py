"""What a rank of a pipeline does, one action at a time, in the text form of torch: ``2F0`` is the forward pass of microbatch 0 on stage 2.

The kinds::

    F       forward                            SEND_F  the output goes to the next stage       RECV_F  the input comes from the one before
    B       backward, all of it                SEND_B  the gradient goes to the stage before   RECV_B  the gradient comes from the next one
    I       backward, the input's gradient     B = I + W: the input's gradient is what the stage before waits for; the weights'
    W       backward, the weights' gradients   gradients can wait until the rank would be idle

An action names its own stage only, for the other side follows from the kind::

    stage 0         0F0 0SEND_F0 ------->                                ------> 0RECV_B0 0B0
    stage 1                     1RECV_F0 1F0 1SEND_F0 ...  1B0 1SEND_B0 /

A pipeline schedule as plain data: for each rank, the list of what it does, in its order.

1F1B over three ranks and four microbatches, one line a rank, time to the right::

    rank 0   0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
    rank 1       1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
    rank 2           2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

The value holds the order alone, without the gaps: when something happens follows from what it costs. The executor runs it, the evaluator
times it, the pictures draw it.

Schedules as text, to read, to write by hand, and to exchange with torch.

As text, one line a rank::

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

As CSV, in the form of torch: one row a rank, one cell an action. An empty cell is a planned pause; a list without times needs none::

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

Which rank has which stage, and how many microbatches there are, follows from the actions.

What every generator of schedules asks of its arguments.

One rank's row of a schedule, written as phases: how many times, and what each time.

The row of rank 0 in 1F1B, for 4 ranks and 8 microbatches, is ``(3, "F"), (5, "F B"), (3, "B")``::

    3 times F       5 times F B                                            3 times B
    0F0 0F1 0F2     0F3 0B0  0F4 0B1  0F5 0B2  0F6 0B3  0F7 0B4            0B5 0B6 0B7

Which microbatch a word means need not be said: the next one, in the rank's order of forwards or of backwards.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ringsim.errors import ArgumentError, ScheduleError, check_integer

__all__ = [
    "COMPUTE_KINDS",
    "RECV_KINDS",
    "SEND_KINDS",
    "Action",
    "Phase",
    "Place",
    "Schedule",
    "check_counts",
    "check_size",
    "from_csv",
    "from_text",
    "one_chunk",
    "parse_action",
    "play",
    "to_csv",
    "to_text",
]

COMPUTE_KINDS: Final = ("F", "B", "I", "W")
SEND_KINDS: Final = ("SEND_F", "SEND_B")
RECV_KINDS: Final = ("RECV_F", "RECV_B")

_TEXT: Final = re.compile(rf"(\d{{1,9}})({'|'.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))})(\d{{1,9}})", re.ASCII)
# Of a message: the kind of the other side, and how many stages away that is.
_OTHER_SIDE: Final = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}


class Action(NamedTuple):
    """One thing that a rank does for one microbatch on one stage.

    Attributes:
        stage: index of the stage, from 0.
        kind: one of ``F``, ``B``, ``I``, ``W``, ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
        microbatch: index of the microbatch, from 0.

    Example:
        >>> action = Action(1, "SEND_F", 0)
        >>> str(action), action.is_compute, str(action.other_side)
        ('1SEND_F0', False, '2RECV_F0')
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """Whether the rank computes, rather than sends or receives."""
        return self.kind in COMPUTE_KINDS

    @property
    def other_side(self) -> Action:
        """The action that meets this send or recv.

        Raises:
            ArgumentError: this action is no message.
        """
        if self.kind not in _OTHER_SIDE:
            raise ArgumentError(f"an action with another side must be a send or a recv, got {self}. Look at is_compute first.")
        kind, distance = _OTHER_SIDE[self.kind]
        return Action(self.stage + distance, kind, self.microbatch)


def parse_action(text: str) -> Action:
    """Reads one action.

    Args:
        text: the action as torch writes it: stage, kind, microbatch.

    Returns:
        The action; ``str()`` of it gives the text back.

    Raises:
        ScheduleError: the text is none.

    Example:
        >>> parse_action("1SEND_F0")
        Action(stage=1, kind='SEND_F', microbatch=0)

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_Action``: the text form.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"an action must be a stage, one of {', '.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))}, and a microbatch, got {text!r}. "
            "Write for example 2F0 or 1SEND_F0."
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), kind, int(microbatch))


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in order.

    Any lists make a ``Schedule``; ``validate`` says whether they can work.

    Attributes:
        name: what to call it, for example ``1f1b``.
        num_microbatches: how many microbatches a step is cut into.
        stage_ranks: for each stage, the rank that has it.
        actions: for each rank, its actions in order.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
        >>> [" ".join(map(str, row)) for row in schedule.actions]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
        >>> schedule.num_ranks, schedule.num_stages, schedule.stages_of(1), schedule.lowered
        (2, 2, (1,), False)
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks the schedule is for."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into, over all ranks."""
        return len(self.stage_ranks)

    @property
    def lowered(self) -> bool:
        """Whether the sends and recvs are among the actions."""
        return any(not action.is_compute for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank has, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)


_LINE: Final = re.compile(r"rank (\d{1,9}):(.*)", re.ASCII)
_SHARDING: Final = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_OVERLAP: Final = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)


def to_text(schedule: Schedule) -> str:
    """Writes a schedule as text, one line a rank.

    Args:
        schedule: the schedule, lowered or not.

    Returns:
        The lines; ``from_text`` reads them.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> print(to_text(one_f_one_b(2, 2)), end="")
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    return "".join(" ".join([f"rank {rank}:", *map(str, row)]) + "\n" for rank, row in enumerate(schedule.actions))


def from_text(text: str, *, name: str = "own") -> Schedule:
    """Reads a schedule from text.

    Args:
        text: one line a rank, in order, as ``to_text`` writes them; empty lines are passed over.
        name: what to call the schedule.

    Returns:
        The schedule. Whether it can work, ``validate`` says.

    Raises:
        ScheduleError: a line or an action is none, or a stage is on two ranks or missing; the message says in which row and column.

    Example:
        >>> from_text("rank 0: 0F0 0B0").actions
        ((Action(stage=0, kind='F', microbatch=0), Action(stage=0, kind='B', microbatch=0)),)
    """
    rows: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or int(found[1]) != len(rows):
            raise ScheduleError(
                f"a line must begin with 'rank {len(rows)}:', got {line.strip()[:40]!r} (line {number}). Write one line a rank."
            )
        rows.append(found[2].split())
    return _from_cells(rows, name)


def to_csv(schedule: Schedule) -> str:
    """Writes a schedule as CSV, in the form that ``torch.distributed.pipelining`` loads.

    Args:
        schedule: the schedule, lowered or not; torch reads one with sends and recvs as ``compute_comms``, else as ``compute_only``.

    Returns:
        One row a rank, one cell an action.

    Example:
        >>> from ringsim.schedules import gpipe
        >>> to_csv(gpipe(2, 1)).split()
        ['0F0,0B0', '1F0,1B0']
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([map(str, row) for row in schedule.actions])
    return buffer.getvalue()


def from_csv(text: str, *, name: str = "own") -> Schedule:
    r"""Reads a schedule from CSV, in the form that ``torch.distributed.pipelining`` dumps.

    Args:
        text: one row a rank, one cell an action. ``(0F7;7B3)OVERLAP_F_B`` is read as ``0F7`` and then ``7B3``; ``0UNSHARD``, ``0RESHARD``
            and ``0REDUCE_GRAD``, what torch does around a pipeline with sharded parameters, are passed over.
        name: what to call the schedule.

    Returns:
        The schedule. Whether it can work, ``validate`` says.

    Raises:
        ScheduleError: a cell is no action, or a stage is on two ranks or missing; the message says in which row and column.

    Example:
        >>> [" ".join(map(str, row)) for row in from_csv("0F0,,0B0\n,1F0,1B0").actions]
        ['0F0 0B0', '1F0 1B0']

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_dump_csv`` and ``_load_csv``: the form.
    """
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"a schedule must be CSV, got text that is not ({error}). Write one row a rank, one cell an action.") from None
    return _from_cells(rows, name)


def _from_cells(rows: Iterable[list[str]], name: str) -> Schedule:
    actions: list[list[Action]] = []
    owners: dict[int, int] = {}  # the rank of each stage
    for rank, cells in enumerate(rows):
        actions.append([])
        for column, cell in enumerate(cells, start=1):
            where = f"row {rank + 1}, column {column}"
            for action in _read_cell(cell.strip(), where):
                if owners.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"a stage must be on one rank, got {action} on rank {rank} where stage {action.stage} is on rank "
                        f"{owners[action.stage]} ({where}). Move the action to that row."
                    )
                actions[rank].append(action)
    if not owners:
        raise ScheduleError("a schedule must have at least one action, got none. Write one row a rank, for example 0F0,0B0.")
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None:
        raise ScheduleError(f"stages must be numbered from 0 without gaps, got {max(owners)} and no stage {missing}. Number them again.")
    return Schedule(
        name=name,
        num_microbatches=1 + max(action.microbatch for row in actions for action in row),
        stage_ranks=tuple(owners[stage] for stage in range(len(owners))),
        actions=tuple(map(tuple, actions)),
    )


def _read_cell(cell: str, where: str) -> list[Action]:
    """Reads the actions of a cell: both of torch's overlapped pair, none of an empty cell or one that is about shards."""
    if not cell or _SHARDING.fullmatch(cell):
        return []
    pair = _OVERLAP.fullmatch(cell)
    try:
        return [parse_action(text.strip()) for text in (pair[1].split(";") if pair else [cell])]
    except ScheduleError as error:
        raise ScheduleError(f"{error} ({where})") from None


_MOST_FORWARDS: Final = 10**8  # of all microbatches on all stages: what a machine may hold


def check_counts(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that is no whole number, or less than 1."""
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, value in counts.items():
        check_integer(name, value, 1, "Say how many the pipeline has.")


def check_size(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that breaks its rule, or a step that is too large to be held."""
    check_counts(num_ranks, num_microbatches, num_chunks)
    size = num_ranks * num_microbatches * num_chunks
    if size > _MOST_FORWARDS:
        raise ArgumentError(
            f"num_ranks and num_microbatches must make a step of {_MOST_FORWARDS:,} forward passes or fewer, got {num_ranks} and "
            f"{num_microbatches}. Take fewer."
        )


Phase = tuple[int, str]  # how many times, and the words: a kind, and the chunk where the rank has several orders
Place = tuple[int, int]  # stage and microbatch


def one_chunk(stage: int, num_microbatches: int) -> list[Place]:
    """Returns the places of one stage, microbatch after microbatch."""
    return [(stage, microbatch) for microbatch in range(num_microbatches)]


def play(
    phases: Iterable[Phase], forwards: Mapping[str, Iterable[Place]], backwards: Mapping[str, Iterable[Place]], num_microbatches: int
) -> tuple[Action, ...]:
    """Returns the row that phases describe.

    ``F`` takes the next forward; ``B`` and ``I`` take the next backward, whole or the input's half; ``W`` takes the oldest weights' half
    that an ``I`` has left over. A digit after the kind says of which chunk.

    Args:
        phases: how many times, and what.
        forwards: for each chunk ("" where words name none), its places in the order of their forwards.
        backwards: the same for backwards.
        num_microbatches: actions of microbatches from this one on are left out. So a schedule whose phases need many microbatches is made
            for that many, and cut: the order of what stays cannot get stuck, for microbatches do not wait for each other.

    Returns:
        The actions, in order.
    """
    sources = {"F": {chunk: iter(places) for chunk, places in forwards.items()}}
    sources["B"] = sources["I"] = {chunk: iter(places) for chunk, places in backwards.items()}
    split: list[tuple[str, Place]] = []  # chunk and place of each I whose W is still to come
    row = []
    for times, words in phases:
        for word in words.split() * times:
            kind, chunk = word[0], word[1:]
            if kind == "W":
                oldest = next(index for index, (other, _) in enumerate(split) if chunk in ("", other))
                place = split.pop(oldest)[1]
            else:
                place = next(sources[kind][chunk])
            if kind == "I":
                split.append((chunk, place))
            row.append(Action(place[0], kind, place[1]))
    return tuple(action for action in row if action.microbatch < num_microbatches)
