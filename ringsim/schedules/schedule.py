"""A pipeline schedule as plain data: the actions of each rank in order, without times.

This is 1F1B over three ranks with four microbatches. Each line is a rank, and time runs to the
right::

    rank 0   0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
    rank 1       1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
    rank 2           2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Each item is an *action*, in torch's text form: ``2F0`` is the forward pass of microbatch 0 on stage
2. The kinds of actions are::

    F  forward                           SEND_F, RECV_F   the output goes to the next stage; the
                                                          input comes from the previous one
    B  backward, all of it               SEND_B, RECV_B   the gradient goes to the previous stage;
                                                          it comes from the next one
    I  backward, the input's gradient    B = I + W: the previous stage waits for the input's
                                         gradient only; the weights' gradients
    W  backward, the weights' gradients  can be computed later, when the rank would be idle

An action names only its own stage. The other side of a message follows from the kind::

    stage 0         0F0 0SEND_F0 ------->                                ------> 0RECV_B0 0B0
    stage 1                     1RECV_F0 1F0 1SEND_F0 ...  1B0 1SEND_B0 /

A rank with two streams can run two computations at the same time, usually a forward and a backward.
Such a pair is written like torch's ``(0F3;7B1)OVERLAP_F_B``. In a row, a pair is two actions, the
first of which is an ``OverlappingAction``.

The published schedules are written as *phases*. A phase is a number of repetitions and the actions
to repeat. With 4 ranks and 8 microbatches, rank 0 of 1F1B is ``(3, "F"), (5, "F B"), (3, "B")``::

    3 times F       5 times F B                                            3 times B
    0F0 0F1 0F2     0F3 0B0  0F4 0B1  0F5 0B2  0F6 0B3  0F7 0B4            0B5 0B6 0B7

A word in a phase does not name its microbatch; it takes the next microbatch in the rank's order of
forwards or backwards. Actions are created only on access, so creating a schedule with a thousand
ranks and thousands of microbatches costs almost nothing.

A schedule contains only the order of the actions. The times follow from the costs: the executor
runs a schedule, ``evaluate`` and ``simulate_schedule`` time it, and ``plot_schedule`` draws it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ringsim.errors import ArgumentError, ScheduleError, check_integer, say

COMPUTE_KINDS = ("F", "B", "I", "W")
SEND_KINDS = ("SEND_F", "SEND_B")
RECV_KINDS = ("RECV_F", "RECV_B")

_TEXT = re.compile(
    rf"(\d{{1,9}})({'|'.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))})(\d{{1,9}})", re.ASCII
)
# for each kind of message action, the kind of the other side, and its distance in stages
_OTHER_SIDE = {
    "SEND_F": ("RECV_F", 1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", 1),
}


class Action(NamedTuple):
    """One action of a rank, for one microbatch on one stage.

    Attributes:
        stage: the index of the stage, from 0.
        kind: one of ``F``, ``B``, ``I``, ``W``, ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
        microbatch: the index of the microbatch, from 0.

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
        """Whether the action is a computation, rather than a send or a receive."""
        return self.kind in COMPUTE_KINDS

    @property
    def overlaps(self) -> bool:
        """Whether the action runs at the same time as the next one in its row."""
        return isinstance(self, OverlappingAction)

    @property
    def other_side(self) -> Action:
        """The matching action of a send or a recv."""
        kind, distance = _OTHER_SIDE[self.kind]
        return Action(self.stage + distance, kind, self.microbatch)


class OverlappingAction(Action):
    """The first of two computations that run at the same time; it equals the plain action."""

    __slots__ = ()


def join_pairs(row: Iterable[Action]) -> list[tuple[Action, ...]]:
    """Returns the actions of a row, of which two that overlap are one item."""
    rest = iter(row)
    return [(action, *islice(rest, action.overlaps)) for action in rest]


def parse_action(text: str) -> Action:
    """Parses one action.

    Args:
        text: the action in torch's form: stage, kind, microbatch.

    Returns:
        The action; ``str()`` converts it back to the text.

    Raises:
        ScheduleError: the text is not an action.

    Example:
        >>> parse_action("1SEND_F0")
        Action(stage=1, kind='SEND_F', microbatch=0)

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_Action``: the text form.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ScheduleError(
            "an action must consist of a stage, one of "
            f"{', '.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))}, and a microbatch, got "
            f"{say(text)}. Write, for example, 2F0 or 1SEND_F0."
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), kind, int(microbatch))


# the number of repetitions, and the words; a word is a kind, followed by a chunk (0, 1, ...) if the
# rank has several orders, and by "+" if the action overlaps with the next one
Phase = tuple[int, str]
# four arrays of equal length: stages, kinds (indexes into COMPUTE_KINDS), microbatches, overlaps
Columns = tuple[Any, Any, Any, Any]


class Order(NamedTuple):
    """The order in which a rank processes the microbatches of some stages.

    Each round of microbatches goes through all stages.

    Attributes:
        stages: the stages.
        rounds: the microbatches of each round.
    """

    stages: Sequence[int]
    rounds: Sequence[range]

    @classmethod
    def of_stage(cls, stage: int, num_microbatches: int) -> Order:
        """Returns the order of one stage, microbatch by microbatch."""
        return cls((stage,), (range(num_microbatches),))

    def list_places(self) -> tuple[Any, Any]:
        """Returns the stages and the microbatches as int32 arrays of equal length."""
        stage = [
            np.repeat(np.asarray(self.stages, dtype=np.int32), len(each)) for each in self.rounds
        ]
        microbatch = [
            np.tile(np.arange(each.start, each.stop, each.step, dtype=np.int32), len(self.stages))
            for each in self.rounds
        ]
        return np.concatenate(stage), np.concatenate(microbatch)


@dataclass(frozen=True)
class PhasedRow:
    """The actions of one rank, written as phases.

    ``F`` takes the next forward. ``B`` takes the next backward, and ``I`` only the input's half of
    it. ``W`` takes the weights' half of the oldest ``I`` that is still without its ``W``. A digit
    after the kind names the chunk. A ``W`` without a digit takes the oldest ``I`` of any chunk.

    Attributes:
        phases: the phases, each with its number of repetitions and its actions.
        forwards: for each chunk, the order of its forwards.
        backwards: for each chunk, the order of its backwards.
        num_microbatches: the number of microbatches; actions of later microbatches are left out. If
            a schedule's phases need more microbatches, the schedule is created for the larger
            number and then cut. The remaining actions cannot get stuck, because microbatches do not
            wait for each other.

    Example:
        >>> row = PhasedRow(
        ...     ((1, "F"), (1, "F I W"), (1, "I W")),
        ...     (Order.of_stage(0, 2),),
        ...     (Order.of_stage(0, 2),),
        ...     2,
        ... )
        >>> print(*row.actions)
        0F0 0F1 0I0 0W0 0I1 0W1
    """

    phases: tuple[Phase, ...]
    forwards: tuple[Order, ...]
    backwards: tuple[Order, ...]
    num_microbatches: int

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The actions, created on first use."""
        columns = (column.tolist() for column in self.columns())
        return tuple(
            (OverlappingAction if overlaps else Action)(stage, COMPUTE_KINDS[kind], microbatch)
            for stage, kind, microbatch, overlaps in zip(*columns, strict=True)
        )

    def columns(self) -> Columns:
        """Returns the actions as arrays."""
        names = sorted({word for _, words in self.phases for word in words.split()})
        coded = [
            (times, np.array([names.index(each) for each in words.split()], dtype=np.int8))
            for times, words in self.phases
        ]
        word = np.concatenate([np.tile(codes, times) for times, codes in coded])
        stage, microbatch = np.zeros((2, len(word)), dtype=np.int32)
        for orders, kinds in ((self.forwards, "F"), (self.backwards, "BI")):
            for chunk, order in enumerate(orders):
                some = np.array(
                    [name[0] in kinds and int(name[1:2] or 0) == chunk for name in names]
                )[word]
                stage[some], microbatch[some] = order.list_places()
        for code, name in enumerate(names):
            if name[0] == "W":
                some, first = (
                    word == code,
                    np.array([other[0] == "I" and name[1:] in ("", other[1:]) for other in names])[
                        word
                    ],
                )
                stage[some], microbatch[some] = stage[first], microbatch[first]
        kind = np.array([COMPUTE_KINDS.index(name[0]) for name in names], dtype=np.int8)[word]
        overlaps = np.array([name.endswith("+") for name in names])[word]
        kept = microbatch < self.num_microbatches
        return stage[kept], kind[kept], microbatch[kept], overlaps[kept]


class PhasedRows(Sequence[tuple["Action", ...]]):
    """The rows of all ranks, written as phases.

    A row's actions are created on access.

    Example:
        >>> orders = (Order.of_stage(0, 2),)
        >>> rows = PhasedRows([PhasedRow(((2, "F"), (2, "B")), orders, orders, 2)])
        >>> len(rows), " ".join(map(str, rows[0]))
        (1, '0F0 0F1 0B0 0B1')
    """

    def __init__(self, rows: Iterable[PhasedRow]) -> None:
        self.rows = tuple(rows)

    def __len__(self) -> int:
        """Returns the number of ranks."""
        return len(self.rows)

    def __getitem__(self, rank: Any) -> Any:
        """Returns a rank's actions or, for a slice, the actions of several ranks."""
        return (
            tuple(row.actions for row in self.rows[rank])
            if isinstance(rank, slice)
            else self.rows[rank].actions
        )

    def __eq__(self, other: object) -> bool:
        """Returns whether two schedules contain the same actions, in whatever form."""
        if isinstance(other, PhasedRows) and self.rows == other.rows:
            return True
        return (
            tuple(self) == tuple(other) if isinstance(other, PhasedRows | tuple) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline, in order.

    You can create a ``Schedule`` from any lists of actions. Use ``validate`` to check whether the
    schedule can work.

    Attributes:
        name: the name of the schedule, for example ``1f1b``.
        num_microbatches: the number of microbatches in a step.
        stage_ranks: for each stage, the rank that holds it.
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
    actions: Sequence[tuple[Action, ...]]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def lowered(self) -> bool:
        """Whether the actions include sends and recvs."""
        return not isinstance(self.actions, PhasedRows) and any(
            not action.is_compute for row in self.actions for action in row
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns a rank's stages, in model order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)


def phased(
    name: str,
    num_microbatches: int,
    phases: Sequence[Sequence[Phase]],
    stages: Sequence[Sequence[int]] | None = None,
    num_played: int | None = None,
) -> Schedule:
    """Returns a schedule in which the ranks perform the given phases.

    Each stage takes the microbatches in order.

    Args:
        name: the name of the schedule.
        num_microbatches: the number of microbatches.
        phases: the phases of each rank.
        stages: the stages of each rank, by chunk, or None for one stage per rank.
        num_played: the number of microbatches for which the phases are written, if it is larger
            than ``num_microbatches``; the extra actions are cut.
    """
    rows = []
    stages = stages or [[rank] for rank in range(len(phases))]
    for each, own in zip(phases, stages, strict=True):
        orders = tuple(Order.of_stage(stage, num_played or num_microbatches) for stage in own)
        rows.append(PhasedRow(tuple(each), orders, orders, num_microbatches))
    owners = {stage: rank for rank, own in enumerate(stages) for stage in own}
    return Schedule(
        name,
        num_microbatches,
        tuple(owners[stage] for stage in range(len(owners))),
        PhasedRows(rows),
    )


_LINE = re.compile(r"rank (\d{1,9}):(.*)", re.ASCII)
_SHARDING = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_PAIR = re.compile(r"\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B", re.ASCII)


def to_text(schedule: Schedule) -> str:
    """Writes a schedule as text, one line per rank.

    Args:
        schedule: the schedule, lowered or not.

    Returns:
        The text, which ``from_text`` can read.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> print(to_text(one_f_one_b(2, 2)), end="")
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    return "".join(
        " ".join([f"rank {rank}:", *_write_cells(row)]) + "\n"
        for rank, row in enumerate(schedule.actions)
    )


def _write_cells(row: Sequence[Action]) -> list[str]:
    return [
        f"({one};{other[0]})OVERLAP_F_B" if other else str(one) for one, *other in join_pairs(row)
    ]


def from_text(text: str, *, name: str = "own") -> Schedule:
    """Reads a schedule from text.

    Args:
        text: one line per rank, in order, in the form that ``to_text`` writes; empty lines are
            ignored, and so are the actions that torch adds for sharded parameters, as in
            ``from_csv``.
        name: the name of the schedule.

    Returns:
        The schedule. Use ``validate`` to check whether it can work.

    Raises:
        ScheduleError: a line or an action is invalid, or a stage is missing or on two ranks; the
            message gives the row and the column.

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
                f"a line must begin with 'rank {len(rows)}:', got {line.strip()[:40]!r} (line "
                f"{number}). Write one line per rank, in order."
            )
        rows.append(found[2].split())
    return _from_cells(rows, name)


def to_csv(schedule: Schedule) -> str:
    """Writes a schedule as CSV, in the format that ``torch.distributed.pipelining`` loads.

    Args:
        schedule: the schedule, lowered or not; torch reads a lowered schedule as ``compute_comms``,
            and any other schedule as ``compute_only``.

    Returns:
        The CSV text, with one row per rank and one cell per action.

    Example:
        >>> from ringsim.schedules import gpipe
        >>> to_csv(gpipe(2, 1)).split()
        ['0F0,0B0', '1F0,1B0']
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(_write_cells, schedule.actions))
    return buffer.getvalue()


def from_csv(text: str, *, name: str = "own") -> Schedule:
    r"""Reads a schedule from CSV, in the format that ``torch.distributed.pipelining`` dumps.

    Args:
        text: the CSV text, with one row per rank and one cell per action, or per pair of actions
            that overlap, such as ``(0F7;7B3)OVERLAP_F_B``. ``0UNSHARD``, ``0RESHARD`` and
            ``0REDUCE_GRAD``, which torch adds for sharded parameters, are ignored.
        name: the name of the schedule.

    Returns:
        The schedule. Use ``validate`` to check whether it can work.

    Raises:
        ScheduleError: a cell is not an action, or a stage is missing or on two ranks; the message
            gives the row and the column.

    Example:
        >>> [" ".join(map(str, row)) for row in from_csv("0F0,,0B0\n,1F0,1B0").actions]
        ['0F0 0B0', '1F0 1B0']

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_dump_csv`` and ``_load_csv``: the format.
    """
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(
            f"cannot read the schedule as CSV: {error}. Write one row per rank and one "
            "cell per action."
        ) from None
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
                        f"{action} is on rank {rank}, but stage {action.stage} is on rank "
                        f"{owners[action.stage]} ({where}). Move the action to the row of "
                        f"rank {owners[action.stage]}."
                    )
                actions[rank].append(action)
    if not owners:
        raise ScheduleError(
            "the schedule contains no actions. Write one row per rank, for example 0F0,0B0."
        )
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None:
        raise ScheduleError(
            f"stages must be numbered from 0 without gaps, got stage {max(owners)} but no stage "
            f"{missing}. Renumber the stages."
        )
    return Schedule(
        name=name,
        num_microbatches=1 + max(action.microbatch for row in actions for action in row),
        stage_ranks=tuple(owners[stage] for stage in range(len(owners))),
        actions=tuple(map(tuple, actions)),
    )


def _read_cell(cell: str, where: str) -> list[Action]:
    """Returns a cell's actions; there are none if the cell is empty or concerns sharding."""
    if not cell or _SHARDING.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    try:
        if pair is not None:
            return [OverlappingAction(*parse_action(pair[1])), parse_action(pair[2])]
        return [parse_action(cell)]
    except ScheduleError as error:
        raise ScheduleError(f"{error} ({where})") from None


_MOST_FORWARDS = 10**8  # over all microbatches and stages, as a limit on memory


def check_counts(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that is not an integer or is less than 1."""
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
    }
    for name, value in counts.items():
        check_integer(name, value, 1, "Pass a positive number.")


def check_size(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for an invalid count, or a step that is too large for memory."""
    check_counts(num_ranks, num_microbatches, num_chunks)
    size = num_ranks * num_microbatches * num_chunks
    if size > _MOST_FORWARDS:
        raise ArgumentError(
            "num_ranks and num_microbatches must be small enough for a step of at most "
            f"{_MOST_FORWARDS:,} forward passes, got {num_ranks} and {num_microbatches}. "
            "Use fewer."
        )
