"""Chakra execution traces, the input of ASTRA-sim.

A file for each rank, with nodes that depend on each other.

::

    run/ringsim.0.et     a GlobalMetadata, then the Nodes of rank 0, each after its length
    run/ringsim.1.et
    run/comm_group.json  {"1": [0, 1]}: the ranks of each group, by the name that nodes of
                         collectives refer to

Durations of nodes are whole µs; in the files that ringsim writes, an attribute has the ns.

Source:
    schema/protobuf/et_def.proto of https://github.com/mlcommons/chakra; the attributes are those
    that its feeder reads
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from ringsim.errors import TraceFileError
from ringsim.exchange.programs import RECV, SEND, TOGETHER, WORK, Step, make_programs, replay
from ringsim.exchange.reading import read_bytes, reading
from ringsim.exchange.schemas import chakra_messages, plain_text
from ringsim.traces.events import NONE, Group, parse_json
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.link import Link
    from ringsim.traces.value import Trace

__all__ = ["read_chakra", "to_chakra"]

VERSION: Final = "0.0.4"
GROUPS: Final = "comm_group.json"
COMPUTES, SENDS, RECEIVES, MEETS = 4, 5, 6, 7  # NodeType
_TYPES: Final = {WORK: COMPUTES, SEND: SENDS, RECV: RECEIVES, TOGETHER: MEETS}
# CollectiveCommType by number; 8 is a reduce_scatter of blocks.
_OPS: Final = (
    *(
        "all_reduce",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "broadcast",
        "all_to_all",
        "reduce_scatter",
    ),
    *("reduce_scatter", "barrier"),
)
_NS: Final = "ringsim_ns"


def to_chakra(trace: Trace, directory: str | PathLike[str]) -> None:
    """Writes what the ranks of a trace did as Chakra traces, for ASTRA-sim and its relatives.

    They do not hold the times of messages, which the simulator works out. Whatever a thread did
    between its operations is work, except while it was blocked. Operations without a partner are
    left out.

    Args:
        trace: any trace.
        directory: where to; made if it does not exist. It must hold no files of another run.

    Raises:
        TraceFileError: a file cannot be written, there are files of another run, or Chakra has no
            name for one of the collectives.

    Example:
        >>> import tempfile
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
        ...     trace.to_chakra(directory)
        ...     print(sorted(os.listdir(directory)))
        ['comm_group.json', 'ringsim.0.et', 'ringsim.1.et']

    Source:
        The schema of Chakra, see the module.
    """
    programs = make_programs(trace)
    # From 1: ASTRA-sim takes no group 0.
    together = dict.fromkeys(
        step.group for program in programs for step in program if step.group is not None
    )
    groups = {group: str(place) for place, group in enumerate(together, start=1)}
    files = [_encode(program, rank, groups) for rank, program in enumerate(programs)]
    try:
        os.makedirs(directory, exist_ok=True)
        # ranks beyond those of this run would stay
        if any(name.endswith(".et") for name in os.listdir(directory)):
            raise OSError("it holds files of another run")
    except (OSError, ValueError) as error:
        raise TraceFileError(
            f"A directory to export to must be writable, got {os.fsdecode(directory)}: {error}. "
            "Choose another."
        ) from error
    for rank, data in enumerate(files):
        write_whole(Path(directory, f"ringsim.{rank}.et"), partial(_write, data))
    named = json.dumps({name: list(group.ranks) for group, name in groups.items()}).encode()
    write_whole(Path(directory, GROUPS), partial(_write, named))


def _write(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def _encode(program: list[Step], rank: int, groups: dict[Group, str]) -> bytes:
    kinds, file = chakra_messages(), BytesIO()
    serialize_length_prefixed(kinds.GlobalMetadata(version=VERSION), file)
    for place, step in enumerate(program):
        is_message = step.kind in (SEND, RECV)
        name = step.label or (
            f"{step.op} {'to' if step.kind == SEND else 'from'} {step.peer}"
            if is_message
            else step.op
        )
        node = kinds.Node(
            id=place,
            name=plain_text(name or "work"),
            type=_TYPES[step.kind],
            data_deps=step.needs,
            duration_micros=round(step.work_ns / 1000),
            attr=_describe(step, rank, groups),
        )
        serialize_length_prefixed(node, file)
    return file.getvalue()


def _describe(step: Step, rank: int, groups: dict[Group, str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [{"name": "is_cpu_op", "bool_val": False}]
    if step.kind == WORK:
        told.append({"name": _NS, "int64_val": step.work_ns})
    else:
        told.append({"name": "comm_size", "int64_val": step.size_bytes})
    numbers: dict[str, int] = {}
    if step.kind in (SEND, RECV):
        src, dst = (rank, step.peer) if step.kind == SEND else (step.peer, rank)
        numbers |= {"comm_src": src, "comm_dst": dst, "comm_tag": step.tag}
    elif step.group is not None:
        told += [
            {"name": "comm_type", "int64_val": _find_type(step.op)},
            {"name": "pg_name", "string_val": groups[step.group]},
        ]
        numbers |= {"root": step.peer} if step.peer != NONE else {}
    numbers |= {
        name: getattr(step, name) for name in ("stage", "microbatch") if getattr(step, name) != NONE
    }
    return told + [{"name": name, "int32_val": value} for name, value in numbers.items()]


def _find_type(op: str) -> int:
    """Returns Chakra's number for an operation.

    By the longest of its names that the operation begins with.
    """
    words = [word for word in _OPS if op.removeprefix("monitored_").startswith(word)]
    if not words:
        raise TraceFileError(
            f"A collective must be one that Chakra can name, got {op!r}. Leave it out of the trace."
        )
    return _OPS.index(max(words, key=len))


def read_chakra(directory: str | PathLike[str], *, link: Link) -> Trace:
    """Reads Chakra execution traces, and runs them on the virtual clock.

    Every message leaves when it is posted, over a link of its own for each pair of ranks;
    ``ringsim.exchange.programs`` says how. Nodes that are neither messages nor collectives are work
    of their duration.

    Args:
        directory: holds a file ``<any name>.<rank>.et`` for each rank, and ``comm_group.json``
            where collectives name their group.
        link: what a message costs.

    Returns:
        A simulated trace: work as spans, messages as isend and irecv.

    Raises:
        ArgumentError: ``link`` is no Link.
        TraceFileError: a file is missing or something else, or the program cannot run to its end.

    Source:
        The schema of Chakra, see the module.
    """
    paths = _find(directory)
    groups: dict[str, Group] = {}
    named = Path(directory, GROUPS)
    if named.exists():
        with reading(named, "groups of ranks by name"):
            groups = {
                name: Group(f"group {name}", _ranks(ranks))
                for name, ranks in parse_json(read_bytes(named)).items()
            }
    programs = []
    for rank, path in enumerate(paths):
        data = read_bytes(path)
        with reading(path, "a Chakra execution trace"):
            programs.append(_read_program(data, rank, groups))
    with reading(directory, "Chakra execution traces of one run"):
        return replay(programs, link, "Chakra execution traces")


def _find(directory: str | PathLike[str]) -> list[Path]:
    try:
        names = os.listdir(directory)
    except (OSError, ValueError) as error:
        raise TraceFileError(
            f"A directory to import must be there, got {os.fsdecode(directory)}: {error}. Check "
            "the path."
        ) from error
    found = {
        int(match[1]): Path(directory, name)
        for name in names
        if (match := re.fullmatch(r".*\.(\d{1,7})\.et", name))
    }
    if sorted(found) != list(range(len(found))) or not found:
        raise TraceFileError(
            "Files of Chakra must be named <name>.<rank>.et for each rank from 0, got ranks "
            f"{sorted(found)[:8]} "
            f"in {os.fsdecode(directory)}. Put those of one run, and no others, into a directory."
        )
    return [found[rank] for rank in range(len(found))]


def _ranks(value: Any) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or not all(type(rank) is int and rank >= 0 for rank in value)
        or len(set(value)) < len(value)
    ):
        raise ValueError("the ranks of a group are not different numbers")
    return tuple(value)


def _read_program(data: bytes, rank: int, groups: dict[str, Group]) -> list[Step]:
    kinds, stream = chakra_messages(), BytesIO(data)
    parse_length_prefixed(kinds.GlobalMetadata, stream)
    nodes = list(iter(lambda: parse_length_prefixed(kinds.Node, stream), None))
    numbers = {node.id: place for place, node in enumerate(nodes)}
    if len(numbers) < len(nodes):
        raise ValueError("two nodes have one number")
    return [
        _read_step(
            node,
            tuple(sorted({numbers[need] for need in (*node.ctrl_deps, *node.data_deps)})),
            rank,
            groups,
        )
        for node in nodes
    ]


def _read_step(node: Any, needs: tuple[int, ...], rank: int, groups: dict[str, Group]) -> Step:
    told: dict[str, Any] = {
        one.name: value
        for one in node.attr
        for field, value in one.ListFields()
        if field.name != "name"
    }
    where = {name: told[name] for name in ("stage", "microbatch") if name in told}
    if node.type in (SENDS, RECEIVES):
        peer = told["comm_dst"] if node.type == SENDS else told["comm_src"]
        mine = told.get("comm_src" if node.type == SENDS else "comm_dst", rank)
        if mine != rank:
            raise ValueError(f"a message of rank {rank} is said to be one of rank {mine}")
        kind = SEND if node.type == SENDS else RECV
        return Step(
            kind,
            needs,
            peer=peer,
            tag=told.get("comm_tag", 0),
            size_bytes=told["comm_size"],
            **where,
        )
    if node.type == MEETS:
        group, size = groups.get(told.get("pg_name", "")), told.get("comm_size", 0)
        return Step(
            TOGETHER,
            needs,
            peer=told.get("root", NONE),
            size_bytes=size,
            op=_find_op(told["comm_type"]),
            group=group,
            **where,
        )
    return Step(
        WORK, needs, work_ns=told.get(_NS, node.duration_micros * 1000), label=node.name, **where
    )


def _find_op(kind: Any) -> str:
    if not 0 <= kind < len(_OPS):
        raise ValueError(f"a collective is of kind {kind}")
    return _OPS[kind]
