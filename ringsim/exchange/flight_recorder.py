"""Reads dumps from torch's flight recorder.

A dump contains a rank's last collectives, which torch keeps in memory until a job hangs. Each rank
leaves one file, ``<prefix><rank>``. The file is either a pickle (from NCCL's watchdog, at the path
in ``TORCH_FR_DUMP_TEMP_FILE``) or JSON (from torch's debug server, without the lines of the
program). An ordinary unpickler can be made to call any function. ringsim's unpickler accepts only
containers, strings and numbers, and calls nothing.

An entry records when the operation was issued. With NCCL, it also records when torch's watchdog saw
that the operation was done, which is slightly late. With Gloo, it records only whether the
operation is done. The job hangs in the operations that were not done at the time of the dump.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn

from ringsim.exchange.reading import (
    find_first,
    importing,
    list_files,
    list_left_out,
    make_payload,
    name_missing,
    read_bytes,
)
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.documents import parse_json
from ringsim.traces.event_rows import EventRows
from ringsim.traces.events import IN_FLIGHT, NONE, OK, OP_CODES, Group, Payload
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from os import PathLike

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
# backends' own names for torch's functions
SPELLINGS = {
    "_all_gather_base": "all_gather_into_tensor", "all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "allgather": "all_gather", "allreduce": "all_reduce",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_base": "all_to_all_single", "all_barrier": "barrier",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "all_to_allv": "all_to_all_single", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}  # fmt: skip
_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")
_RANK = re.compile(r"(\d+)(\.json|\.pkl|\.pickle)?(\.gz)?$")
_LIBRARY = re.compile(
    r"[/\\](torch|site-packages|dist-packages|lib[/\\]python[\d.]+|ringsim[/\\]comm)[/\\]|^<frozen "
)
MAX_RANKS = 1 << 20


def read_flight_recorder(paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> Trace:
    """Reads dumps from torch's flight recorder, to show which ranks hang and where.

    You can read dumps from NCCL, Gloo and other backends. ringsim matches the collectives on a
    group by sequence number. A dump keeps only the last 2,000 collectives, so older ones that are
    missing from any rank's dump are left out. ``explain()`` names the ranks that the others wait
    for. Dumps do not record the roots of collectives, and Gloo dumps contain no messages between
    two ranks. The clocks of different hosts are not aligned.

    Args:
        paths: the files, one per rank, whose names end with the rank's number (before ``.json`` or
            ``.pickle``), or a directory of such files.

    Returns:
        The trace. ``post_ns`` is the time at which an operation was issued. ``wait_ns`` is known
        only for the first operation that a rank has not finished: the rank counts as waiting for
        that operation from the moment it was issued.

    Raises:
        TraceFileError: a file is missing or is not a flight recorder dump, or two files are from
            the same rank.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> entry = {
        ...     "record_id": 0,
        ...     "process_group": ["0", "default_pg"],
        ...     "collective_seq_id": 1,
        ...     "profiling_name": "gloo:all_reduce",
        ...     "time_created_ns": 500,
        ...     "input_sizes": [[2]],
        ...     "output_sizes": [[2]],
        ...     "input_dtypes": ["Float"],
        ...     "retired": True,
        ... }
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for rank in range(2):
        ...         _ = Path(directory, f"dump_{rank}").write_text(
        ...             json.dumps({"version": "2.10", "entries": [entry]})
        ...         )
        ...     trace = read_flight_recorder(directory)
        >>> trace.to_pandas()[["rank", "op", "group", "size_bytes"]].to_numpy().tolist()
        [[0, 'all_reduce', 'world', 8], [1, 'all_reduce', 'world', 8]]

    Source:
        torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.10 of the format (torch 2.13).
    """
    dumps: dict[int, dict[str, Any]] = {}
    files = list_files(paths, lambda path: _RANK.search(path.name) and path.is_file())
    for path in files:
        data = read_bytes(path)
        with importing(path, "a dump from torch's flight recorder"):
            found = _RANK.search(os.fsdecode(path))
            if found is None or (rank := int(found[1])) >= MAX_RANKS:
                raise ValueError("its name does not end with a rank's number")
            if rank in dumps:
                raise ValueError(f"two files are from rank {rank}")
            dumps[rank] = _parse(data)
    with importing(", ".join(map(os.fsdecode, files))[:200], "flight recorder dumps from one run"):
        return _Run(dumps).trace()


class _Unpickler(pickle.Unpickler):
    """Reads only containers, strings and numbers.

    Any other object needs a callable, which the pickle has to look up by name.
    """

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        name = f"{module_name}.{global_name}"
        raise ValueError(
            f"it contains objects other than containers, strings and numbers ({name})"[:200]
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ValueError("it contains objects other than containers, strings and numbers")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        if data.lstrip()[:1] == b"{":
            dump = parse_json(data)
        else:
            for code, value, _ in pickletools.genops(data):
                # Bytearrays are refused, because Python 3.11 prints a SystemError for one that does
                # not fit into memory. Large memo numbers are refused, because Python allocates a
                # memo with that many entries.
                if code.name == "BYTEARRAY8" or (
                    code.name in ("PUT", "LONG_BINPUT") and int(value or 0) > len(data)
                ):
                    raise ValueError(
                        "it contains objects other than containers, strings and "
                        f"numbers ({code.name})"
                    )
            dump = _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    if not isinstance(dump, dict) or not str(dump.get("version", "")).startswith("2."):
        raise ValueError("it is not in version 2 of the dump format")
    return {
        **dump,
        "entries": sorted(dump.get("entries") or [], key=lambda entry: entry["record_id"]),
    }


class _Run:
    """The dumps from all ranks of a run, which the method ``trace`` converts to a trace."""

    def __init__(self, dumps: dict[int, dict[str, Any]]) -> None:
        self.dumps = dumps
        self.entries = [(rank, entry) for rank, dump in dumps.items() for entry in dump["entries"]]
        self.groups = self._find_groups()
        self.size = max(max(dumps) + 1, *(len(group.ranks) for group in self.groups.values()), 1)
        self.left_out: Counter[str] = Counter()

    def _find_groups(self) -> dict[str, Group]:
        """Returns the groups, keyed by torch's names for them.

        If a dump does not list a group's members, they are taken to be the ranks that use it.
        """
        told: dict[str, tuple[int, ...]] = {}
        users = defaultdict[str, set[int]](set)
        words: dict[str, str] = {}
        for dump in self.dumps.values():
            for name, about in (dump.get("pg_config") or {}).items():
                ranks = about["ranks"]
                if not isinstance(ranks, list):
                    ranks = json.loads(ranks)
                if ranks:
                    told[name] = tuple(ranks)
        for rank, entry in self.entries:
            name, word = map(str, entry["process_group"])
            users[name].add(rank)
            words[name] = word
        world = tuple(range(max(self.dumps) + 1))
        members = {
            name: world if words[name] == "default_pg" else tuple(sorted(using))
            for name, using in users.items()
        } | told
        return {
            name: name_group(name, words.get(name, ""), ranks) for name, ranks in members.items()
        }

    def trace(self) -> Trace:
        """Returns the trace."""
        rows = EventRows()
        first = find_first(
            (entry["process_group"][0], rank, entry["collective_seq_id"])
            for rank, entry in self.entries
            if not entry.get("is_p2p")
        )
        waiting = set[int]()  # an operation that is not done delays all later ones of its rank
        for rank, entry in self.entries:
            name, posted_ns = entry["process_group"][0], entry["time_created_ns"]
            if not entry.get("is_p2p") and entry["collective_seq_id"] < first[name]:
                self.left_out["that some rank's dump no longer contains"] += 1
            elif (columns := self._read_entry(entry, self.groups[name])) is not None:
                if columns["status"] == IN_FLIGHT and rank not in waiting:
                    columns["wait_ns"] = posted_ns
                    waiting.add(rank)
                rows.add(rank, post_ns=posted_ns, **columns)
        notes = ["imported from torch's flight recorder, which records when operations were issued"]
        notes += name_missing("dump", self.dumps, self.size)
        notes += list_left_out(self.left_out)
        backends = {str(entry["profiling_name"]).partition(":")[0] for _, entry in self.entries}
        about = {"backend": min(backends)} if len(backends) == 1 else {}
        return rows.trace({"world_size": self.size, "source": "measured", "notes": notes, **about})

    def _read_entry(self, entry: dict[str, Any], group: Group) -> dict[str, Any] | None:
        """Returns an operation's columns, or None if a trace cannot hold the operation."""
        spelled = str(entry["profiling_name"]).rpartition(":")[2]
        frames = entry.get("frames") or []
        message = _MESSAGE.fullmatch(spelled)
        op = SPELLINGS.get(spelled, spelled) if message is None else f"i{message[1]}"
        inner = [*takewhile(lambda frame: _LIBRARY.search(str(frame["filename"])), frames)]
        called = [
            frame["name"]
            for frame in inner
            if frame["name"] in COLLECTIVES and frame["name"] in OP_CODES
        ]
        op = called[-1] if called and message is None else op  # the function that the user called
        if op not in OP_CODES:
            self.left_out[f"of unknown kind ({op[:40]})"] += 1
            return None
        done_ns = entry.get("time_discovered_completed_ns") or NONE
        done = done_ns != NONE or entry.get("state") == "completed" or entry.get("retired") is True
        columns: dict[str, Any] = {
            "op": op,
            "group": group,
            "done_ns": done_ns,
            "status": OK if done else IN_FLIGHT,
            "payload": read_payload(op, entry, len(group.ranks)),
        }
        if message is not None:
            columns["peer"], columns["tag"] = group.ranks[int(message[4])], 0
        for frame in frames[len(inner) :][:1]:
            columns |= {"file": str(frame["filename"]), "line": int(frame["line"])}
        return columns


def name_group(name: str, word: str, ranks: tuple[int, ...]) -> Group:
    """Returns a group, given torch's name for the group, its description, and its members."""
    word = {"default_pg": "world", "undefined": ""}.get(word, word)
    return Group(word or f"group {name}", ranks)


def read_payload(op: str, entry: dict[str, Any], group_size: int) -> Payload | None:
    """Returns an operation's payload: the whole buffer, on which the bandwidth is based."""
    family = COLLECTIVES[op].family if op in COLLECTIVES else op
    side = "output" if family in ("all_gather", "scatter", "irecv") else "input"
    sizes = entry.get(f"{side}_sizes")
    dtypes = entry.get(f"{side}_dtypes") or entry.get("input_dtypes")
    if not sizes or not dtypes or dtypes[0] not in DTYPES:
        return None
    copies = group_size if family in ("gather", "scatter") else 1
    return make_payload(DTYPES[dtypes[0]], sizes, copies)
