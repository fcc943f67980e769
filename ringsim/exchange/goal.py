"""GOAL, the input of LogGOPSim and ATLAHS.

A text with a graph of calc, send and recv for each rank.

::

    num_ranks 2

    rank 0 {
    l0: calc 1500                      work of 1500 ns
    l1: send 4096b to 1 tag 3
    l1 requires l0                     l1 begins when l0 is over; "irequires": when it has begun
    }

Source:
    T. Hoefler, C. Siebert, A. Lumsdaine, "Group Operation Assembly Language - A Flexible Way to
    Express Collective Communication", ICPP 2009; the grammar in txt2bin.re of
    https://github.com/spcl/LogGOPSim
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ringsim.exchange.programs import RECV, SEND, TOGETHER, WORK, Step, make_programs, replay
from ringsim.exchange.reading import read_bytes, reading
from ringsim.link import Link
from ringsim.traces.collectives import make_rounds
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.events import Group
    from ringsim.traces.value import Trace

__all__ = ["read_goal", "to_goal"]

MAX_RANKS: Final = 10**6
# one without an end takes the rest: looked for once, not each time
_COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_RANK: Final = re.compile(r"rank\s+(\d+)\s*\{([^{}]*)\}")
_LINE: Final = re.compile(
    r"(?:([A-Za-z]\w*)\s*:\s*)?(?:calc\s+(\d+)|(send|recv)\s+(\d+)\s*b\s+(?:to|"
    r"from)\s+(\d+)(?:\s+tag\s+(\d+))?)"
    r"(?:\s+cpu\s+(\d+))?(?:\s+nic\s+\d+)?"
)
_NEED: Final = re.compile(r"([A-Za-z]\w*)\s+(i?requires)\s+([A-Za-z]\w*)")


def to_goal(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes what the ranks of a trace did as a program for LogGOPSim and ATLAHS.

    Times of work in ns. It does not hold the times of messages, which the simulator works out.
    Whatever a thread did between its operations is work, except while it was blocked. Collectives
    are spelled out as the messages of ``ringsim.traces.collectives``. Operations without a partner
    are left out.

    Args:
        trace: any trace.
        path: where to, usually ``*.goal``; an existing file is replaced.

    Raises:
        TraceFileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(
        ...     make_events(
        ...         {
        ...             "rank": [0, 1],
        ...             "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...             "peer": [1, 0],
        ...             "tag": [7, 7],
        ...             "post_ns": [0, 30],
        ...             "wait_ns": [0, 30],
        ...             "done_ns": [60, 70],
        ...         }
        ...     ),
        ...     {"world_size": 2},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_goal(f"{directory}/run.goal")
        ...     print(Path(directory, "run.goal").read_text().split("rank 1")[1].strip())
        {
        l0: calc 30
        l1: recv 1b from 0 tag 7
        l1 requires l0
        }

    Source:
        The grammar of LogGOPSim, see the module.
    """
    programs = make_programs(trace)
    write_whole(
        path,
        lambda file: file.writelines(line.encode("ascii") + b"\n" for line in _lines(programs)),
    )


def _lines(programs: list[list[Step]]) -> Iterator[str]:
    # from here on the tags of collectives
    first = max((step.tag for program in programs for step in program), default=0) + 1
    bases: dict[Group, int] = {}
    for rank, program in enumerate(programs):
        for step in program:
            if step.group is not None and step.group.ranks[0] == rank:
                bases.setdefault(step.group, 0)
                bases[step.group] += 1
    for group, count in bases.items():
        bases[group], first = first, first + count
    yield f"num_ranks {len(programs)}"
    for rank, program in enumerate(programs):
        yield f"\nrank {rank} {{"
        for number, step in enumerate(_spell_out(program, rank, bases)):
            if step.kind == WORK:
                yield f"l{number}: calc {step.work_ns}" + (
                    f" cpu {step.thread}" if step.thread else ""
                )
            else:
                way = "to" if step.kind == SEND else "from"
                cpu = f" cpu {step.thread}" if step.thread else ""
                yield (
                    f"l{number}: {step.kind} {max(step.size_bytes, 1)}b {way} {step.peer} tag "
                    f"{step.tag}{cpu}"
                )
            yield from (f"l{number} requires l{need}" for need in step.needs)
        yield "}"


def _spell_out(program: list[Step], rank: int, bases: dict[Group, int]) -> list[Step]:
    """Returns a program in which collectives are spelled out as messages."""
    steps: list[Step] = []
    ends: list[tuple[int, ...]] = []  # for each step of the program, the new ones that end it
    counts: dict[Group, int] = {}
    for step in program:
        needs = tuple(sorted({end for need in step.needs for end in ends[need]}))
        if step.kind != TOGETHER or step.group is None:
            ends.append((len(steps),))
            steps.append(replace(step, needs=needs))
            continue
        ranks, place = step.group.ranks, step.group.ranks.index(rank)
        tag = bases[step.group] + counts.get(step.group, 0)
        counts[step.group] = counts.get(step.group, 0) + 1
        root = ranks.index(step.peer) if step.peer in ranks else 0
        for messages in make_rounds(step.op, len(ranks), root, step.size_bytes):
            sends = [(SEND, to, amount) for source, to, amount in messages if source == place]
            recvs = [(RECV, source, amount) for source, to, amount in messages if to == place]
            first = len(steps)
            for kind, other, amount in sends + recvs:
                steps.append(
                    Step(
                        kind,
                        needs=needs,
                        peer=ranks[other],
                        tag=tag,
                        size_bytes=amount,
                        thread=step.thread,
                    )
                )
            needs = tuple(range(first, len(steps))) or needs
        ends.append(needs)
    return steps


def read_goal(path: str | PathLike[str], *, link: Link) -> Trace:
    r"""Reads a program in GOAL and runs it on the virtual clock.

    Every message leaves when it is posted, over a link of its own for each pair of ranks; a rank's
    work on one CPU is done in order. ``ringsim.exchange.programs`` says how; LogGOPSim's overheads
    and gaps are left out.

    Args:
        path: the file, text; it may be gzipped.
        link: what a message costs.

    Returns:
        A simulated trace: calc as spans, messages as isend and irecv.

    Raises:
        ArgumentError: ``link`` is no Link.
        TraceFileError: there is no such file, it is something else, or the program cannot run to
            its end.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = Path(directory, "run.goal")
        ...     _ = path.write_text(
        ...         "num_ranks 2\nrank 0 {\nsend 1000b to 1\n}\nrank 1 {\nrecv 1000b from 0\n}\n"
        ...     )
        ...     read_goal(
        ...         path, link=Link(alpha_s=1e-6, beta_s_per_byte=1e-9)
        ...     ).events.done_ns.tolist()
        [1000, 2000]

    Source:
        The grammar of LogGOPSim, see the module.
    """
    data = read_bytes(path)
    with reading(path, "a program in GOAL"):
        return replay(_parse(data.decode("ascii")), link, "GOAL")


def _parse(text: str) -> list[list[Step]]:
    text = _COMMENT.sub(" ", text)
    found = re.match(r"\s*num_ranks\s+(\d+)\s", text)
    if found is None or not 0 < int(found[1]) <= MAX_RANKS:
        raise ValueError("it does not begin with num_ranks and a number")
    count, blocks, place = int(found[1]), dict[int, str](), found.end()
    for block in _RANK.finditer(text, place):
        if text[place : block.start()].strip():
            raise ValueError(
                f"{text[place : block.start()].strip()[:40]!r} stands outside of the ranks"
            )
        rank = int(block[1])
        if rank >= count or rank in blocks:
            raise ValueError(f"rank {rank} is not one of {count}, or stands there twice")
        blocks[rank] = block[2]
        place = block.end()
    if text[place:].strip():
        raise ValueError(f"{text[place:].strip()[:40]!r} stands outside of the ranks")
    if len(blocks) < count:  # so that no small file asks for a million ranks
        raise ValueError(f"num_ranks is {count}, and {len(blocks)} ranks are there")
    return [_parse_rank(blocks[rank]) for rank in range(count)]


def _parse_rank(text: str) -> list[Step]:
    steps: list[Step] = []
    numbers: dict[str, int] = {}
    needs: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        found = _LINE.fullmatch(line)
        if found is not None:
            label, work, kind, size, peer, tag, cpu = found.groups()
            if label is not None:
                numbers[label] = len(steps)
            if kind is None:
                steps.append(Step(WORK, work_ns=int(work), label="calc", thread=int(cpu or 0)))
            else:
                steps.append(
                    Step(
                        kind,
                        peer=int(peer),
                        tag=int(tag or 0),
                        size_bytes=int(size),
                        thread=int(cpu or 0),
                    )
                )
            continue
        wanted = _NEED.fullmatch(line)
        if wanted is None or wanted[1] not in numbers or wanted[3] not in numbers:
            raise ValueError(
                f"{line[:60]!r} is no line of GOAL that can be read here, or names a label that "
                "is not there"
            )
        (needs if wanted[2] == "requires" else after).setdefault(numbers[wanted[1]], []).append(
            numbers[wanted[3]]
        )
    return [
        replace(step, needs=tuple(needs.get(i, ())), after=tuple(after.get(i, ())))
        for i, step in enumerate(steps)
    ]
