"""The log of communication: what it sums up, and when the record of a user's own operation ends."""

from __future__ import annotations

import gc
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ringsim.comm import configure, timed_op
from ringsim.comm.handles import Handle
from ringsim.comm.log import read_settings
from ringsim.comm.log_table import LogRow, LogTable, is_operation, make_rows, straggler_ns
from ringsim.comm.mpi_group import Job, MpiGroup
from ringsim.comm.torch_hooks import uninstall
from ringsim.errors import ArgumentError, RunTimeout
from ringsim.state import change_state, get_state
from ringsim.traces.events import (
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    OP_NAMES,
    Events,
    Group,
    Payload,
    Tables,
    make_events,
)
from ringsim.traces.recorder import Recorder
from ringsim.traces.runs import join_events, read_parts

WORLD, PAIR = Group("world", (0, 1, 2, 3)), Group("pair", (1, 3))
TABLES = Tables(
    (WORLD, PAIR),
    (Payload("uint8", (1000,), 1000), Payload("uint8", (4000,), 4000)),
    ("gradients", "mine"),
)
REPEATING = TABLES._replace(labels=("all_reduce",))
SOME = [11, 13, 17, 19, 23, 29, 400]
US = 1000  # ns


def operations(text: str, **columns: list[int]) -> Events:
    """Makes events from text such as "0,1 barrier 0 - - 10 10 30; 1 isend 1 0 - 40 50 60".

    Ranks, operation, group, payload, label, post, wait and done, times in microseconds; "-" is
    none. ``columns`` replaces first values.
    """
    table: dict[str, list[int]] = {
        name: []
        for name in ("rank", "op", "group", "payload", "label", "post_ns", "wait_ns", "done_ns")
    }
    for line in text.split(";"):
        ranks, op, *numbers = line.split()
        for rank in ranks.split(","):
            values = [
                NONE if number == "-" else int(number) * (US if place > 2 else 1)
                for place, number in enumerate(numbers)
            ]
            for column, value in zip(
                table.values(), (int(rank), OP_CODES[op], *values), strict=True
            ):
                column.append(value)
    table["status"] = [IN_FLIGHT if value == NONE else OK for value in table["done_ns"]]
    for name, values in columns.items():
        table[name] = values + table.get(name, [])[len(values) :]
    return make_events(table, TABLES)


def reductions(ranks: str, group: int, durations: list[int]) -> Events:
    lines = [
        f"{rank} all_reduce {group} 0 - {1000 * k} {1000 * k} {1000 * k + each}"
        for rank in ranks.split(",")
        for k, each in enumerate(durations)
    ]
    return operations(";".join(lines))


def rows_of(events: Events, first: Any = None, **options: Any) -> tuple[LogRow, ...]:
    return make_rows(
        events, np.zeros(len(events), dtype=bool) if first is None else np.array(first), **options
    )


NAN = math.nan
FOUR = "0,1,2,3"
Case = tuple[Events, list[bool] | None, dict[str, Any]]


def case(events: Events, first: list[bool] | None = None, **expected: Any) -> Case:
    """What the program did, and what its one row says."""
    return events, first, expected


P10, P90 = np.percentile(SOME * 4, [10, 90])
ASYNCHRONOUS = case(
    operations("0 isend 1 0 - 0 80 100"),
    mean_us=100,
    overlap_mean_us=80,
    blocked_mean_us=20,
    lower_bound=True,
)
FIRST_ALONE = case(
    reductions(FOUR, 0, [7]), [True] * 4, first_mean_us=7, mean_us=NAN, algbw_gb_per_s=NAN
)
UNDONE = operations(
    "0 isend 1 0 - 0 0 90; 0 isend 1 0 - 0 0 10; 0 isend 1 0 - 20 - -", status=[ERROR]
)
LABELLED = make_events(
    {"rank": [0, 1], "op": [OP_CODES["all_reduce"]] * 2, "group": [1, 1], "label": [0, NONE]},
    REPEATING,
)
ROWS: dict[str, Case] = {
    # DeepSpeed 0.19.8 logs five operations of 10 ms as 13.8, 23.9, 37.7, 47.8 and 57.8 ms: its
    # timer is read without being reset.
    "each operation counts its own time": case(
        reductions(FOUR, 0, [10] * 5), count=5, mean_us=10, p10_us=10, p90_us=10, total_us=50
    ),
    "statistics are those of numpy": case(
        reductions(FOUR, 0, SOME),
        mean_us=np.mean(SOME),
        median_us=19,
        total_us=sum(SOME),
        p10_us=P10,
        p90_us=P90,
    ),
    # DeepSpeed 0.19.8 takes the size of the world for every group, and doubles the algorithm
    # bandwidth of all_reduce.
    "bus bandwidth of four": case(
        reductions(FOUR, 0, [10]), group_size=4, algbw_gb_per_s=0.1, busbw_gb_per_s=0.15
    ),
    "bus bandwidth of a pair": case(
        reductions("1,3", 1, [10]), group_size=2, algbw_gb_per_s=0.1, busbw_gb_per_s=0.1
    ),
    # DeepSpeed 0.19.8 takes the full input and multiplies it by the number of ranks.
    "reduce_scatter is not multiplied by the ranks again": case(
        operations("0,1,2,3 reduce_scatter_tensor 0 1 - 0 0 10"),
        size_bytes=4000,
        algbw_gb_per_s=0.4,
        busbw_gb_per_s=0.3,
    ),
    "first messages are kept apart": case(
        reductions(FOUR, 0, [700, 10, 10]),
        [True, False, False] * 4,
        first_count=4,
        first_mean_us=700,
        count=3,
        mean_us=10,
        total_us=720,
    ),
    "only first messages leave no steady state": FIRST_ALONE,
    # DeepSpeed 0.19.8 times an asynchronous operation on the CPU at the moment it is posted only.
    "an asynchronous operation keeps post, wait and done apart": ASYNCHRONOUS,
    "a label that is the name of the operation says nothing more": case(
        LABELLED, name="all_reduce", count=1
    ),
    "what is not done is counted and not timed": case(
        UNDONE, count=3, in_flight=1, failed=1, mean_us=10, total_us=10
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_the_row_says(what: str) -> None:
    events, first, expected = ROWS[what]
    (row,) = rows_of(events, first)
    assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, nan_ok=True)


def test_rows_are_by_name_operation_group_size_and_size() -> None:
    events = operations(
        "0 all_reduce 0 0 - 0 0 5; 0 all_reduce 0 1 - 1 1 5; 0 all_reduce 0 0 0 2 2 5; 1 "
        "all_reduce 1 0 - 3 3 5; 1 isend 1 0 - 4 4 5"
    )
    assert [(row.name, row.op, row.group_size, row.size_bytes) for row in rows_of(events)] == [
        ("all_reduce", "all_reduce", 2, 1000),
        ("all_reduce", "all_reduce", 4, 1000),
        ("all_reduce", "all_reduce", 4, 4000),
        ("gradients", "all_reduce", 4, 1000),
        ("isend", "isend", 2, 1000),
    ]
    # DeepSpeed 0.19.8 ends the process where its table lacks an operation (all_gather_object,
    # monitored_barrier, ...).
    every = sorted(set(OP_NAMES) - {"mark"})
    rows = rows_of(operations(";".join(f"0 {op} 0 0 1 0 0 10" for op in every)))
    assert [(row.name, row.op, row.count) for row in rows] == [("mine", op, 1) for op in every]


# When each operation waited for another rank, us, and the mean in its row.
STRAGGLERS: dict[str, tuple[Events, list[int], dict[str, float]]] = {
    "the wait for the last rank": (
        operations(
            "0 barrier 0 - - 0 0 100; 1 barrier 0 - - 20 20 100; 2 barrier 0 - - 60 60 100; 3 "
            "barrier 0 - - 40 40 100"
        ),
        [60, 40, 0, 20],
        {"barrier": 30},
    ),
    "the wait for a message's other side": (
        operations("1 isend 1 0 - 50 50 90; 3 irecv 1 0 - 0 0 90", peer=[3, 1]),
        [0, 50],
        {"isend": 0, "irecv": 50},
    ),
    # DeepSpeed 0.19.8 reduces the list of records over all ranks, and hangs or fails where one has
    # more than another.
    "no equal records": (
        operations(
            "0 barrier 0 - - 0 0 9; 0 barrier 0 - - 10 10 19; 1 barrier 0 - - 5 5 9; 1 "
            "all_reduce 1 0 - 6 6 9; 3 all_reduce 1 0 - 8 8 9"
        ),
        [NONE, NONE, NONE, 2, 0],
        {"barrier": NAN, "all_reduce": 1},
    ),
    "a call under timed_op that failed is one": (
        operations("0,1,2 span 0 0 1 0 - 9; 3 span 0 0 1 5 - 9", status=[ERROR]),
        [5, 5, 5, 0],
        {"span": 10 / 3},
    ),
    "a collective that was refused is no record": (
        operations(
            "0 barrier 0 - - 0 - -; 0 barrier 0 - - 4 4 100; 1 barrier 0 - - 20 20 100;"
            "2 barrier 0 - - 60 60 100; 3 barrier 0 - - 40 40 100",
            status=[ERROR, OK, OK, OK, OK],
        ),
        [NONE, 56, 40, 0, 20],
        {"barrier": 29},
    ),
}


@pytest.mark.parametrize("what", STRAGGLERS)
def test_straggler_time_is(what: str) -> None:
    events, expected, means = STRAGGLERS[what]
    assert [NONE if math.isnan(each) else each / US for each in straggler_ns(events)] == expected
    assert {row.op: row.straggler_mean_us for row in rows_of(events)} == pytest.approx(
        means, nan_ok=True
    )
    assert all(math.isnan(row.straggler_mean_us) for row in rows_of(events, one_clock=False))


def test_spans_and_marks_of_the_program_are_no_operations() -> None:
    events = operations("0 span - - 0 0 - 5; 0 span 0 0 1 0 - 5; 0 mark - - 0 0 - 0")
    assert is_operation(events).tolist() == [False, True, False]


def test_joining_keeps_what_names_mean() -> None:
    other = Tables(
        (PAIR, Group("third", (0, 2))),
        (Payload("int8", (3,), 3), TABLES.payloads[1]),
        ("mine", "yours"),
    )
    left = operations("0 barrier 1 1 0 0 0 1")
    right = make_events(
        {
            "rank": [1, 0],
            "op": [OP_CODES["barrier"]] * 2,
            "group": [0, 1],
            "payload": [0, 1],
            "label": [1, NONE],
        },
        other,
    )
    joined = join_events([left, right])
    tables = joined.tables
    assert [tables.groups[number] for number in joined.group] == [PAIR, PAIR, other.groups[1]]
    assert [tables.payloads[number] for number in joined.payload] == [
        TABLES.payloads[1],
        other.payloads[0],
        TABLES.payloads[1],
    ]
    assert [None if number == NONE else tables.labels[number] for number in joined.label] == [
        "gradients",
        "yours",
        None,
    ]
    assert len(set(tables.groups)) == len(tables.groups)
    assert joined.seq.tolist() == [0, 0, 1]


def test_the_table_as_text_through_the_store_and_in_pandas() -> None:
    rows = rows_of(reductions(FOUR, 0, [7, 9]), [True, False] * 4, one_clock=False)
    table = LogTable(rows, 4, (0, 1), ("ranks 2 and 3 are late",), True)
    back = LogTable.from_json(table.to_json())
    assert json.dumps(back.to_dict()) == json.dumps(table.to_dict())  # NaN is not equal to itself
    assert str(back) == str(table)
    assert "note: ranks 2 and 3 are late" in str(back)
    frame = table.to_pandas()
    assert frame.loc[0, ["name", "count", "mean_us"]].tolist() == ["all_reduce", 2, 9.0]
    empty = LogTable(rows_of(join_events([])))
    assert (empty.rows, str(empty)) == ((), "Communication of 1 rank: nothing was logged")
    assert list(empty.to_pandas()) == list(frame)
    assert ">= 10 MB/s" in str(LogTable(rows_of(*ASYNCHRONOUS[:2])))
    assert str(LogTable(rows_of(*FIRST_ALONE[:2]))).split()[-2:] == ["-", "-"]


# -- settings


class Section:  # as in DeepSpeed's own objects
    enabled, prof_all, prof_ops, verbose, debug = True, False, ("all_reduce",), False, True


DEEPSPEED = SimpleNamespace(comms_config=SimpleNamespace(comms_logger=Section()))
SECTION = {
    "comms_logger": {"enabled": True, "prof_all": True, "prof_ops": ["isend"]},
    "train_batch_size": 8,
}


@pytest.mark.parametrize(
    ("config", "arguments", "settings"),
    [
        (
            SECTION,
            {"prof_all": False},
            {"enabled": True, "prof_all": False, "prof_ops": frozenset({"isend"})},
        ),
        (
            DEEPSPEED,
            {"verbose": True},
            {
                "enabled": True,
                "prof_all": False,
                "prof_ops": frozenset({"all_reduce"}),
                "verbose": True,
                "debug": True,
            },
        ),
        (object(), {"verbose": True, "debug": None}, {"verbose": True}),
        (None, {"enabled": "yes"}, "enabled must be True or False, got 'yes'"),
        (
            None,
            {"prof_ops": "all_reduce"},
            "prof_ops must be a list of names, got 'all_reduce'",
        ),
        (None, {"prof_ops": [1]}, "prof_ops must be a list of names"),
        (
            {"comms_logger": {"style": "pigeon"}},
            {},
            'style must be "ringsim" or "deepspeed", got \'pigeon\'',
        ),
        ({"comms_logger": {"debug": 1}}, {}, "debug must be True or False, got 1"),
    ],
)
def test_settings_come_from_arguments_before_the_configuration(
    config: Any, arguments: dict[str, Any], settings: Any
) -> None:
    if isinstance(settings, dict):
        assert read_settings(config, **arguments) == settings
    else:
        with pytest.raises(ArgumentError, match=settings):
            read_settings(config, **arguments)


# -- the record of a user's own operation

MPI = SimpleNamespace(
    Exception=RuntimeError,
    SUM="sum",
    Get_library_version=lambda: "MPI",
    FLOAT="float",
    buffer=SimpleNamespace(fromaddress=lambda *_: None),
)


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, 0, 2)
    change_state(recorder=recorder)
    configure(enabled=True)
    yield recorder
    configure(enabled=False)
    recorder.close()


class Request:
    """Is done when the test says so."""

    done = False

    def Test(self, status: Any = None) -> bool:  # noqa: N802 - mpi4py's name
        return self.done


def begin_on_mpi(request: Request) -> Any:
    """Returns what ``all_reduce(async_op=True)`` returns on MPI."""
    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Iallreduce=lambda *_: request)
    job = Job(MPI, comm, None, itertools.count(1), {}, lambda: None)
    return MpiGroup(job, comm, (0, 1), 0).allreduce([torch.ones(2)])


def begin_built(request: Request) -> Handle:
    """Returns what an operation that is built from others returns."""

    def finish() -> None:
        if not request.done:
            raise RunTimeout("the built operation must be answered, got no answer. Wait again.")

    return Handle([], finish)


@timed_op
def sum_up(tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    return begin()


def last_span(directory: Path) -> dict[str, int]:
    """Returns status and times of the span that began last."""
    events, _ = read_parts(directory)
    place = [place for place, op in enumerate(events.op) if OP_NAMES[op] == "span"][-1]
    return {
        name: int(getattr(events, name)[place])
        for name in ("status", "post_ns", "wait_ns", "done_ns")
    }


@pytest.mark.parametrize("begin", [begin_on_mpi, begin_built])
def test_it_ends_with_the_wait_and_one_in_vain_fails_it(
    begin: Callable[[Request], Any], logged: Recorder, tmp_path: Path
) -> None:
    request = Request()
    handle = sum_up(torch.ones(2), lambda: begin(request))
    assert last_span(tmp_path)["status"] == IN_FLIGHT
    with pytest.raises(RunTimeout):
        handle.wait(0.01)
    assert last_span(tmp_path)["status"] == ERROR
    request.done, waited_ns = True, time.monotonic_ns()
    handle.wait()
    span = last_span(tmp_path)
    assert span["status"] == OK
    assert span["done_ns"] >= span["wait_ns"] >= waited_ns - logged.start_ns > span["post_ns"]
    handle.wait()
    assert last_span(tmp_path) == span

    def begin_and_wait() -> Any:
        waited = begin(request)
        waited.wait()
        return waited

    handle = sum_up(torch.ones(2), begin_and_wait)
    before = last_span(tmp_path)
    assert before["status"] == OK
    assert before["post_ns"] > span["done_ns"]
    handle.wait()
    assert last_span(tmp_path) == before

    request.done = False
    handle = sum_up(torch.ones(2), lambda: begin(request))
    configure(enabled=False)
    change_state(recorder=None)
    logged.close()
    request.done = True
    assert handle.wait()  # a handle that outlives the recorder writes nothing
    assert last_span(tmp_path)["status"] == IN_FLIGHT


@pytest.mark.parametrize("result", [None, 3, [1, 2], math.inf])
def test_what_is_no_handle_ends_it(result: Any, logged: Recorder, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        sum_up()  # type: ignore[call-arg]
    assert sum_up(torch.ones(2), lambda: result) is result
    assert last_span(tmp_path)["status"] == OK


def test_a_log_that_is_never_stopped_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    configure(enabled=True)
    assert [path.name.startswith("ringsim-log-") for path in tmp_path.iterdir()] == [True]
    uninstall(get_state().log.records.recorder)
    change_state(log=None)
    gc.collect()  # as the end of the process does
    assert list(tmp_path.iterdir()) == []
