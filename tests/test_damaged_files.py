"""Tests with 20,000 damaged files of all kinds that ringsim reads.

Each file is refused with a ringsim error or read completely, using little memory. `make soak` reads
a million files (benchmarks/soak_files.py).
"""

from __future__ import annotations

import json
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from matplotlib.figure import Figure
from part_files import two_ranks
from test_bandwidths import damage_table
from test_exchange_viewers import READERS, write_small
from trace_mutations import DATA, Choose, change_meta, flip, mutate, read_in_full, real_files

from ringsim import load
from ringsim.cli.description import read_description
from ringsim.errors import RingError
from ringsim.pipeline import from_csv, from_text, to_csv, to_text
from ringsim.schedules import make_schedule
from ringsim.traces import bandwidths

INPUTS = 20_000  # the number of files of all kinds together
# slower kinds get fewer files
SLOW = {"trace": 600, "a part of a trace": 300, "parts of a run": 400, "bandwidths": 600}
# one out of this number of loaded files is read in full, which takes longer than loading
ASKED = 20
DRAWN = 1000  # one out of this number is also drawn
# the limit beyond the current memory; a 5 kB file that needs more has misled its reader
MEMORY_BYTES = 2 * 2**30

WHOLES = real_files()
DESCRIPTION = Path(__file__).parent.parent / "docs" / "examples" / "pipeline.toml"


def damage(data: bytes, choose: Choose) -> bytes:
    """Damages the bytes, or the values that they encode."""
    with suppress(ValueError):  # the file is not JSON
        return change_meta(data, choose) if choose(0, 1) else flip(data, choose)
    return flip(data, choose)


class Kind(NamedTuple):
    """A kind of file: how to write, damage and read it, and how to use all its content."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    ask: Callable[[Any, bool], Any] = lambda trace, draw: read_in_full(trace, draw=draw)
    damage: Callable[[bytes, Choose], bytes] = damage


def write_run(path: Path) -> None:
    parts = path / "run.ringtrace.parts"
    parts.mkdir(parents=True)
    two_ranks(parts)
    about = {"run_id": "r1", "world_size": 2, "start_ns": 10**9, "notes": ["n"]}
    (parts / "run.json").write_text(json.dumps(about))


def ask_table(table: bandwidths.Bandwidths, draw: bool) -> None:
    assert table.describe()
    assert repr(table)
    assert len(table.to_pandas()) == len(table)
    assert set(table.fits) <= set(table.series())
    if draw:
        table.plot(ax=Figure().add_subplot())


STEP = make_schedule("interleaved_1f1b", 2, 4, num_chunks=2)
KINDS = {
    "trace": Kind(lambda path: path.touch(), load, damage=lambda _, choose: mutate(WHOLES, choose)),
    "a part of a trace": Kind(
        lambda path: path.touch(),
        lambda path: load(path, ranks=0, between_s=(0, 1e-3)),
        damage=lambda _, choose: mutate(WHOLES, choose),
    ),
    "parts of a run": Kind(write_run, lambda path: load(path / "run.ringtrace")),
    "bandwidths": Kind(
        lambda path: path.write_bytes((DATA / "bandwidth-gloo.json").read_bytes()),
        bandwidths.load,
        ask_table,
        damage_table,
    ),
    "description": Kind(
        lambda path: path.write_bytes(DESCRIPTION.read_bytes()),
        read_description,
        lambda found, _: found.schedule,
    ),
    "schedule as text": Kind(
        lambda path: path.write_text(to_text(STEP)),
        lambda path: from_text(path.read_text("latin-1")),
        lambda found, _: to_csv(found),
    ),
    "schedule as csv": Kind(
        lambda path: path.write_text(to_csv(STEP)),
        lambda path: from_csv(path.read_text("latin-1")),
        lambda found, _: to_text(found),
    ),
} | {
    name: Kind(lambda path, name=name: write_small(name, path), read)
    for name, read in READERS.items()
}


def read_damaged(kind: Kind, path: Path, whole: list[tuple[Path, bytes]], choose: Choose) -> bool:
    """Damages one of the written files, reads all of them, and restores the file.

    Any error that is not a ringsim error propagates.
    """
    file, content = whole[choose(0, len(whole) - 1)]
    file.write_bytes(kind.damage(content, choose))
    try:
        found = kind.read(path)
    except RingError as error:
        assert str(error).isprintable()  # noqa: PT017  # whether it is raised depends on the damage
        return False
    finally:
        file.write_bytes(content)
    if choose(1, ASKED) == 1:
        with suppress(RingError):
            kind.ask(found, choose(1, DRAWN // ASKED) == 1)
    return True


def read_many(name: str, path: Path, numbers: range) -> int:
    """Reads one damaged file of a kind per number; returns how many loaded."""
    if not path.exists():
        KINDS[name].write(path)
    whole = [
        (file, file.read_bytes())
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file()
    ]
    loaded = 0
    for number in numbers:
        choose = random.Random(f"{name} {number}").randint
        try:
            loaded += read_damaged(KINDS[name], path, whole, choose)
        except Exception as error:
            raise AssertionError(f"{name}, number {number}: {error!r}") from error
    return loaded


@pytest.fixture(autouse=True)
def limited_memory() -> Iterator[None]:
    """Limits the memory, so that large allocations fail visibly."""
    statm = Path("/proc/self/statm")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        now_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", KINDS)
def test_damage_gives_one_error(name: str) -> None:
    count = SLOW.get(name) or (INPUTS - sum(SLOW.values())) // (len(KINDS) - len(SLOW)) + 1
    # files on a disk take longer to write than to read
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as directory:
        assert 0 < read_many(name, Path(directory, "x"), range(count)) <= count
