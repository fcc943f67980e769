"""Chakra execution traces, which ASTRA-sim takes: for each rank a file of nodes that need each other.

::

    run/ringsim.0.et      a GlobalMetadata, then the Nodes of rank 0, each after its length
    run/ringsim.1.et
    run/comm_group.json   {"1": [0, 1]}: the ranks of each group, by the name that the nodes of collectives give

The numbers of the fields are those of the published schema. Node durations are whole µs there; ringsim's files say the ns, too.

Source:
    schema/protobuf/et_def.proto of https://github.com/mlcommons/chakra; the attributes are those that its feeder reads
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from ringsim.errors import TraceFileError
from ringsim.exchange.programs import RECV, SEND, TOGETHER, WORK, Step, make_programs, replay
from ringsim.exchange.reading import parse_json, read_bytes, reading
from ringsim.exchange.wire import as_int64, bytes_field, fields, number, number_field, read_number, text_field
from ringsim.traces.events import NONE, Group
from ringsim.traces.files import write_whole

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.link import Link
    from ringsim.traces.value import Trace

__all__ = ["read_chakra", "to_chakra"]

VERSION: Final = "0.0.4"
GROUPS: Final = "comm_group.json"
# Node: id 1, name 2, type 3, ctrl_deps 4, data_deps 5, start_time_micros 6, duration_micros 7, attr 10.
ID, NAME, TYPE, CONTROL, DATA, DURATION, ATTRIBUTE = 1, 2, 3, 4, 5, 7, 10
COMPUTE, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7
# AttributeProto: name 1, int32 7, int64 9, uint64 13, bool 27, string 29.
ATTRIBUTE_NAME, INT32, INT64, UINT64, BOOL, STRING = 1, 7, 9, 13, 27, 29
_TYPES: Final = {WORK: COMPUTE, SEND: SENDS, RECV: RECEIVES, TOGETHER: COLLECTIVE}
# CollectiveCommType, by what the names of torch's operations begin with; the first that fits.
_COLLECTIVES: Final = {
    "all_reduce": 0, "reduce_scatter": 7, "all_gather": 2, "all_to_all": 6, "reduce": 1, "gather": 3, "scatter": 4, "broadcast": 5,
    "barrier": 9, "monitored_barrier": 9,
}  # fmt: skip
_OPS: Final = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter"),
    *("reduce_scatter", "barrier"),
)  # by CollectiveCommType
_NS: Final = "ringsim_ns"


def to_chakra(trace: Trace, directory: str | PathLike[str]) -> None:
    """Writes what the ranks of a trace did as Chakra execution traces, for ASTRA-sim and its relatives.

    The times of messages are not in them: these the simulator finds. What a thread did between its operations is work, except while it
    was blocked. Operations that met nobody are left out.

    Args:
        trace: any trace.
        directory: where to; made if it is not there. It must hold no files of another run.

    Raises:
        TraceFileError: a file cannot be written, there are files of another run, or the trace has a collective that Chakra has no word for.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "peer": [1, 0], "tag": [7, 7],
        ...     "post_ns": [0, 30], "wait_ns": [0, 30], "done_ns": [60, 70]}), {"world_size": 2})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trace.to_chakra(directory)
        ...     print(sorted(os.listdir(directory)))
        ['comm_group.json', 'ringsim.0.et', 'ringsim.1.et']

    Source:
        The schema of Chakra, see the module.
    """
    programs = make_programs(trace)
    # From 1: ASTRA-sim takes no group 0.
    together = dict.fromkeys(step.group for program in programs for step in program if step.group is not None)
    groups = {group: str(place) for place, group in enumerate(together, start=1)}
    files = [b"".join(_nodes(program, rank, groups)) for rank, program in enumerate(programs)]
    try:
        os.makedirs(directory, exist_ok=True)
        if any(name.endswith(".et") for name in os.listdir(directory)):  # ranks beyond those of this run would stay
            raise OSError("it holds files of another run")
    except (OSError, ValueError) as error:
        raise TraceFileError(
            f"A directory to export to must be writable, got {os.fsdecode(directory)}: {error}. Choose another."
        ) from error
    for rank, data in enumerate(files):
        write_whole(Path(directory, f"ringsim.{rank}.et"), partial(_write, data))
    named = json.dumps({name: list(group.ranks) for group, name in groups.items()}).encode()
    write_whole(Path(directory, GROUPS), partial(_write, named))


def _write(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def _nodes(program: list[Step], rank: int, groups: dict[Group, str]) -> Iterator[bytes]:
    yield _sized(text_field(1, VERSION))
    for place, step in enumerate(program):
        attributes = [_attribute("is_cpu_op", BOOL, 0)]
        if step.kind == WORK:
            attributes.append(_attribute(_NS, INT64, step.work_ns))
        else:
            attributes.append(_attribute("comm_size", INT64, step.size_bytes))
        if step.kind in (SEND, RECV):
            src, dst = (rank, step.peer) if step.kind == SEND else (step.peer, rank)
            attributes += [_attribute("comm_src", INT32, src), _attribute("comm_dst", INT32, dst), _attribute("comm_tag", INT32, step.tag)]
        elif step.group is not None:
            attributes += [_attribute("comm_type", INT64, _type(step.op)), _text_attribute("pg_name", groups[step.group])]
            if step.peer != NONE:
                attributes.append(_attribute("root", INT32, step.peer))
        attributes += [_attribute(name, INT32, getattr(step, name)) for name in ("stage", "microbatch") if getattr(step, name) != NONE]
        name = step.label or (f"{step.op} {'to' if step.kind == SEND else 'from'} {step.peer}" if step.kind in (SEND, RECV) else step.op)
        yield _sized(
            number_field(ID, place)
            + text_field(NAME, name or "work")
            + number_field(TYPE, _TYPES[step.kind])
            + (bytes_field(DATA, b"".join(map(number, step.needs))) if step.needs else b"")
            + number_field(DURATION, round(step.work_ns / 1000))
            + b"".join(attributes)
        )


def _type(op: str) -> int:
    for begin, kind in _COLLECTIVES.items():
        if op.startswith(begin):
            return kind
    raise TraceFileError(f"A collective must be one that Chakra has a word for, got {op!r}. Leave it out of the trace.")


def _sized(message: bytes) -> bytes:
    return number(len(message)) + message


def _attribute(name: str, kind: int, value: int) -> bytes:
    return bytes_field(ATTRIBUTE, text_field(ATTRIBUTE_NAME, name) + number_field(kind, value))


def _text_attribute(name: str, value: str) -> bytes:
    return bytes_field(ATTRIBUTE, text_field(ATTRIBUTE_NAME, name) + text_field(STRING, value))


def read_chakra(directory: str | PathLike[str], *, link: Link) -> Trace:
    """Reads Chakra execution traces, and runs them on the virtual clock.

    Every message leaves when it is posted, over a link of its own for each pair of ranks; ``ringsim.exchange.programs`` says how.
    Nodes that are neither messages nor collectives are work of their duration.

    Args:
        directory: holds a file ``<any name>.<rank>.et`` for each rank, and ``comm_group.json`` where collectives name their group.
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
            groups = {name: Group(f"group {name}", _ranks(ranks)) for name, ranks in parse_json(read_bytes(named)).items()}
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
        raise TraceFileError(f"A directory to import must be there, got {os.fsdecode(directory)}: {error}. Check the path.") from error
    found = {int(match[1]): Path(directory, name) for name in names if (match := re.fullmatch(r".*\.(\d{1,7})\.et", name))}
    if sorted(found) != list(range(len(found))) or not found:
        raise TraceFileError(
            f"Files of Chakra must be named <name>.<rank>.et for each rank from 0, got ranks {sorted(found)[:8]} "
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
    nodes = [dict[int, Any](_gather(message)) for message in _messages(data)][1:]  # the first is the metadata
    numbers = {node.get(ID, 0): place for place, node in enumerate(nodes)}
    if len(numbers) < len(nodes):
        raise ValueError("two nodes have one number")
    program = []
    for node in nodes:
        needs = tuple(sorted({numbers[need] for need in node[CONTROL] + node[DATA]}))
        program.append(_read_step(node, needs, rank, groups))
    return program


def _messages(data: bytes) -> Iterator[memoryview]:
    place, whole = 0, memoryview(data)
    while place < len(data):
        length, place = read_number(data, place)
        if length > len(data) - place:
            raise ValueError("a message is longer than its file")
        yield whole[place : place + length]
        place += length


def _gather(message: memoryview) -> list[tuple[int, Any]]:
    """Returns the fields of a node, with those that repeat as lists."""
    found: dict[int, Any] = {CONTROL: [], DATA: [], ATTRIBUTE: {}}
    value: Any
    for field, value in fields(message):
        if field in (CONTROL, DATA):
            found[field] += [value] if isinstance(value, int) else _packed(value)
        elif field == ATTRIBUTE:
            parts: dict[int, Any] = dict(fields(value))
            name = _text(parts.get(ATTRIBUTE_NAME, b""))
            for kind in (INT32, INT64, UINT64, BOOL):
                if kind in parts:
                    found[ATTRIBUTE][name] = as_int64(parts[kind])
            if STRING in parts:
                found[ATTRIBUTE][name] = _text(parts[STRING])
        else:
            found[field] = value
    return list(found.items())


def _packed(value: memoryview) -> list[int]:
    numbers, place = [], 0
    while place < len(value):
        one, place = read_number(value, place)
        numbers.append(one)
    return numbers


def _read_step(node: dict[int, Any], needs: tuple[int, ...], rank: int, groups: dict[str, Group]) -> Step:
    told, kind = node[ATTRIBUTE], node.get(TYPE, 0)
    where = {name: told[name] for name in ("stage", "microbatch") if name in told}
    if kind in (SENDS, RECEIVES):
        peer = told["comm_dst"] if kind == SENDS else told["comm_src"]
        mine = told.get("comm_src" if kind == SENDS else "comm_dst", rank)
        if mine != rank:
            raise ValueError(f"a message of rank {rank} is said to be one of rank {mine}")
        return Step(SEND if kind == SENDS else RECV, needs, peer=peer, tag=told.get("comm_tag", 0), size_bytes=told["comm_size"], **where)
    if kind == COLLECTIVE:
        group = groups[told["pg_name"]] if told.get("pg_name") in groups else None
        size = told.get("comm_size", 0)
        return Step(TOGETHER, needs, peer=told.get("root", NONE), size_bytes=size, op=_op(told["comm_type"]), group=group, **where)
    work_ns = told.get(_NS, node.get(DURATION, 0) * 1000)
    return Step(WORK, needs, work_ns=work_ns, label=_text(node.get(NAME, b"")), **where)


def _op(kind: Any) -> str:
    if not 0 <= kind < len(_OPS):
        raise ValueError(f"a collective is of kind {kind}")
    return _OPS[kind]


def _text(value: Any) -> str:
    if isinstance(value, int):  # of which bytes() would make so many zeros
        raise ValueError("a name is a number")
    return bytes(value).decode("utf-8")
