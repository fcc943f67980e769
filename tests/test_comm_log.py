"""The log of communication: what it sums up, and when the record of a user's own operation ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ringsim.comm import configure, timed_op
from ringsim.comm.built import Handle
from ringsim.comm.log import read_settings
from ringsim.comm.log_table import LogRow, LogTable, is_operation, make_rows, straggler_ns
from ringsim.comm.mpi_transfers import MpiGroup, MpiHandle, MpiRecords
from ringsim.errors import ArgumentError, RunTimeout
from ringsim.state import change_state, get_state
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, OP_CODES, OP_NAMES, Events, Group, Payload, Tables, make_events
from ringsim.traces.parts import join_events, read_parts
from ringsim.traces.recorder import Recorder

WORLD, PAIR = Group("world", (0, 1, 2, 3)), Group("pair", (1, 3))
TABLES = Tables((WORLD, PAIR), (Payload("uint8", (1000,), 1000), Payload("uint8", (4000,), 4000)), ("gradients", "mine"))
REPEATING = TABLES._replace(labels=("all_reduce",))
SOME = [11, 13, 17, 19, 23, 29, 400]
US = 1000  # ns


def operations(rows: list[tuple[Any, ...]]) -> Events:
    """Makes events from (rank, op, group, payload, label, post, wait, done), times in microseconds."""
    names = ("rank", "op", "group", "payload", "label", "post_ns", "wait_ns", "done_ns")
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    columns["op"] = [OP_CODES[op] for op in columns["op"]]
    for name in ("post_ns", "wait_ns", "done_ns"):
        columns[name] = [NONE if value is None else value * US for value in columns[name]]
    columns["status"] = [IN_FLIGHT if value == NONE else OK for value in columns["done_ns"]]
    return make_events(columns, TABLES)


def reductions(ranks: tuple[int, ...], group: int, durations: list[int]) -> Events:
    return operations(
        [(rank, "all_reduce", group, 0, NONE, 1000 * k, 1000 * k, 1000 * k + each) for rank in ranks for k, each in enumerate(durations)]
    )


def rows_of(events: Events, first: Any = None, **options: Any) -> tuple[LogRow, ...]:
    return make_rows(events, np.zeros(len(events), dtype=bool) if first is None else np.array(first), **options)


NAN = math.nan
# What the program did, and what its one row says.
ROWS: dict[str, tuple[Events, list[bool] | None, dict[str, Any]]] = {
    # DeepSpeed 0.19.8 logs five operations of 10 ms as 13.8, 23.9, 37.7, 47.8 and 57.8 ms: its timer is read without being reset.
    "each operation counts its own time": (
        reductions((0, 1, 2, 3), 0, [10_000] * 5),
        None,
        {"count": 5, "mean_us": 10_000, "median_us": 10_000, "p10_us": 10_000, "p90_us": 10_000, "total_us": 50_000},
    ),
    "statistics are those of numpy": (
        reductions((0, 1, 2, 3), 0, SOME),
        None,
        {"mean_us": np.mean(SOME), "median_us": 19, "total_us": sum(SOME)}
        | dict(zip(("p10_us", "p90_us"), np.percentile(SOME * 4, [10, 90]), strict=True)),
    ),
    # DeepSpeed 0.19.8 takes the size of the world for every group, and doubles the algorithm bandwidth of all_reduce.
    "bus bandwidth of four": (
        reductions((0, 1, 2, 3), 0, [10]),
        None,
        {"group_size": 4, "algbw_gb_per_s": 0.1, "busbw_gb_per_s": 0.15},
    ),
    "bus bandwidth of a pair": (reductions((1, 3), 1, [10]), None, {"group_size": 2, "algbw_gb_per_s": 0.1, "busbw_gb_per_s": 0.1}),
    # DeepSpeed 0.19.8 takes the full input and multiplies it by the number of ranks.
    "reduce_scatter is not multiplied by the ranks again": (
        operations([(rank, "reduce_scatter_tensor", 0, 1, NONE, 0, 0, 10) for rank in range(4)]),
        None,
        {"size_bytes": 4000, "algbw_gb_per_s": 0.4, "busbw_gb_per_s": 0.3},
    ),
    "first messages are kept apart": (
        reductions((0, 1, 2, 3), 0, [700_000, 10, 10]),
        [True, False, False] * 4,
        {"first_count": 4, "first_mean_us": 700_000, "count": 3, "mean_us": 10, "p90_us": 10, "total_us": 700_020},
    ),
    "only first messages leave no steady state": (
        reductions((0, 1, 2, 3), 0, [7]),
        [True] * 4,
        {"first_mean_us": 7, "mean_us": NAN, "algbw_gb_per_s": NAN},
    ),
    # DeepSpeed 0.19.8 times an asynchronous operation on the CPU at the moment it is posted only.
    #   post 0 ........ wait 80 === done 100
    "an asynchronous operation keeps post, wait and done apart": (
        operations([(0, "isend", 1, 0, NONE, 0, 80, 100)]),
        None,
        {"mean_us": 100, "overlap_mean_us": 80, "blocked_mean_us": 20, "lower_bound": True},
    ),
    "a label that is the name of the operation says nothing more": (
        make_events({"rank": [0, 1], "op": [OP_CODES["all_reduce"]] * 2, "group": [1, 1], "label": [0, NONE]}, REPEATING),
        None,
        {"name": "all_reduce", "count": 1},
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_the_row_says(what: str) -> None:
    events, first, expected = ROWS[what]
    (row,) = rows_of(events, first)
    assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, nan_ok=True)


def test_a_bandwidth_says_when_it_is_a_lower_bound_or_missing() -> None:
    assert ">= 0.010" in str(LogTable(rows_of(operations([(0, "isend", 1, 0, NONE, 0, 80, 100)]))))
    assert "-" in str(LogTable(rows_of(reductions((0, 1, 2, 3), 0, [7]), [True] * 4)))


@pytest.mark.parametrize("op", sorted(set(OP_NAMES) - {"mark"}))
def test_every_operation_can_be_logged(op: str) -> None:
    # DeepSpeed 0.19.8 ends the process where its table lacks an operation (all_gather_object, monitored_barrier, ...).
    (row,) = rows_of(operations([(0, op, 0, 0, 1, 0, 0, 10)]))
    assert (row.name, row.op, row.count) == ("mine", op, 1)


def test_rows_are_by_name_operation_group_size_and_size() -> None:
    events = operations(
        [
            (0, "all_reduce", 0, 0, NONE, 0, 0, 5),
            (0, "all_reduce", 0, 1, NONE, 10, 10, 15),
            (0, "all_reduce", 0, 0, 0, 20, 20, 25),
            (1, "all_reduce", 1, 0, NONE, 30, 30, 35),
            (1, "isend", 1, 0, NONE, 40, 40, 45),
        ]
    )
    assert [(row.name, row.op, row.group_size, row.size_bytes) for row in rows_of(events)] == [
        ("all_reduce", "all_reduce", 2, 1000),
        ("all_reduce", "all_reduce", 4, 1000),
        ("all_reduce", "all_reduce", 4, 4000),
        ("gradients", "all_reduce", 4, 1000),
        ("isend", "isend", 2, 1000),
    ]


def test_what_is_not_done_is_counted_and_not_timed() -> None:
    events = operations(
        [(0, "isend", 1, 0, NONE, 0, 0, 10), (0, "isend", 1, 0, NONE, 20, None, None), (0, "isend", 1, 0, NONE, 30, 30, 90)]
    )
    events.status[2] = ERROR
    (row,) = rows_of(events)
    assert (row.count, row.in_flight, row.failed, row.mean_us, row.total_us) == (3, 1, 1, 10, 10)


def test_straggler_time_is_the_wait_for_the_last_rank() -> None:
    # rank 0  post 0  ==============.. done 100     waits 60 for rank 2
    # rank 1     post 20 ===========.. done 100     waits 40
    # rank 2              post 60 ==.. done 100     is the straggler
    # rank 3         post 40 =======.. done 100     waits 20
    events = operations([(rank, "barrier", 0, NONE, NONE, post, post, 100) for rank, post in enumerate((0, 20, 60, 40))])
    assert straggler_ns(events).tolist() == [60 * US, 40 * US, 0, 20 * US]
    (row,) = rows_of(events)
    assert row.straggler_mean_us == 30


def test_straggler_time_of_a_message_is_the_wait_for_its_other_side() -> None:
    events = operations([(1, "isend", 1, 0, NONE, 50, 50, 90), (3, "irecv", 1, 0, NONE, 0, 0, 90)])
    events.peer[:] = [3, 1]
    assert straggler_ns(events).tolist() == [0, 50 * US]


def test_straggler_time_needs_no_equal_records() -> None:
    # DeepSpeed 0.19.8 reduces the list of records over all ranks, and hangs or fails where one has more than another.
    events = join_events(
        [
            operations([(0, "barrier", 0, NONE, NONE, 0, 0, 9), (0, "barrier", 0, NONE, NONE, 10, 10, 19)]),
            operations([(1, "barrier", 0, NONE, NONE, 5, 5, 9), (1, "all_reduce", 1, 0, NONE, 6, 6, 9)]),
            operations([(3, "all_reduce", 1, 0, NONE, 8, 8, 9)]),
        ]
    )
    assert [None if math.isnan(each) else each for each in straggler_ns(events)] == [None, None, None, 2 * US, 0]


def test_several_clocks_give_no_straggler_time() -> None:
    (row,) = rows_of(reductions((0, 1, 2, 3), 0, [10]), one_clock=False)
    assert math.isnan(row.straggler_mean_us)


def test_spans_and_marks_of_the_program_are_no_operations() -> None:
    events = operations([(0, "span", NONE, NONE, 0, 0, None, 5), (0, "span", 0, 0, 1, 0, None, 5), (0, "mark", NONE, NONE, 0, 0, None, 0)])
    assert is_operation(events).tolist() == [False, True, False]


def test_no_events_no_rows() -> None:
    assert rows_of(join_events([])) == ()
    assert str(LogTable(())) == "Communication of 1 rank: nothing was logged"


def test_joining_keeps_what_names_mean() -> None:
    other = Tables((PAIR, Group("third", (0, 2))), (Payload("int8", (3,), 3), TABLES.payloads[1]), ("mine", "yours"))
    left = operations([(0, "barrier", 1, 1, 0, 0, 0, 1)])
    right = make_events({"rank": [1, 0], "op": [OP_CODES["barrier"]] * 2, "group": [0, 1], "payload": [0, 1], "label": [1, NONE]}, other)
    joined = join_events([left, right])
    tables = joined.tables
    assert [tables.groups[number] for number in joined.group] == [PAIR, PAIR, other.groups[1]]
    assert [tables.payloads[number] for number in joined.payload] == [TABLES.payloads[1], other.payloads[0], TABLES.payloads[1]]
    assert [None if number == NONE else tables.labels[number] for number in joined.label] == ["gradients", "yours", None]
    assert len(set(tables.groups)) == len(tables.groups)
    assert joined.seq.tolist() == [0, 0, 1]


def test_table_survives_the_store() -> None:
    rows = rows_of(reductions((0, 1, 2, 3), 0, [7, 9]), [True, False] * 4, one_clock=False)
    table = LogTable(rows, 4, (0, 1), ("ranks 2 and 3 are late",), True)
    back = LogTable.from_json(table.to_json())
    assert json.dumps(back.to_dict()) == json.dumps(table.to_dict())  # NaN is not equal to itself
    assert str(back) == str(table)
    assert "note: ranks 2 and 3 are late" in str(back)


def test_table_as_pandas_has_a_column_for_each_field() -> None:
    table = LogTable(rows_of(reductions((0, 1, 2, 3), 0, [7, 9])))
    frame = table.to_pandas()
    assert frame.loc[0, ["name", "count", "mean_us"]].tolist() == ["all_reduce", 2, 8.0]
    assert list(LogTable(()).to_pandas()) == list(frame)


# -- settings


def test_settings_come_from_arguments_before_the_configuration() -> None:
    section = {"enabled": True, "prof_all": True, "verbose": False, "prof_ops": ["isend"]}
    settings = read_settings({"comms_logger": section, "train_batch_size": 8}, None, False, None, None, None)
    assert settings == {"enabled": True, "prof_all": False, "verbose": False, "prof_ops": frozenset({"isend"})}


def test_settings_are_read_from_deepspeeds_own_objects() -> None:
    class Section:
        enabled, prof_all, prof_ops, verbose, debug = True, False, ("all_reduce",), False, True

    class Comms:
        comms_logger = Section()

    class Config:
        comms_config = Comms()

    assert read_settings(Config(), None, None, None, None, None)["prof_ops"] == frozenset({"all_reduce"})
    assert read_settings(object(), None, None, None, True, None) == {"verbose": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "yes", None, None, None, None), "enabled must be True or False, got 'yes'"),
        ((None, None, None, "all_reduce", None, None), "prof_ops must be a list of names, got 'all_reduce'"),
        ((None, None, None, [1], None, None), "prof_ops must be a list of names"),
        (({"comms_logger": {"debug": 1}}, None, None, None, None, None), "debug must be True or False, got 1"),
    ],
)
def test_wrong_settings_are_one_clear_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_settings(*arguments)


MPI = SimpleNamespace(Exception=RuntimeError, BYTE="byte")


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


def begin_on_mpi(request: Request) -> MpiHandle:
    """Returns what ``all_reduce(async_op=True)`` of the MPI backend returns."""
    recorder = get_state().recorder
    group = MpiGroup(SimpleNamespace(Get_rank=lambda: 0), (0, 1), "world", 0, 30.0)
    handle = MpiHandle(MPI, request, "all_reduce", 30.0)
    if recorder is not None:
        begun = MpiRecords("MPI").post(OP_CODES["all_reduce"], group, -1, -1, [torch.ones(2)])
        assert begun is not None
        handle.record(*begun)
    return handle


def begin_built(request: Request) -> Handle:
    """Returns what an operation that is built from others returns."""

    def finish() -> None:
        if not request.done:
            raise RunTimeout("the built operation must be answered, got no answer. Wait again.")

    return Handle([], finish)


BEGINNERS: dict[str, Callable[[Request], Any]] = {"mpi": begin_on_mpi, "built": begin_built}


@timed_op
def sum_up(tensor: torch.Tensor, begin: Callable[[], Any]) -> Any:
    return begin()


def span_of(directory: Path) -> dict[str, int]:
    """Returns status and times of the one span there is."""
    events, _ = read_parts(directory)
    (place,) = [place for place, op in enumerate(events.op) if OP_NAMES[op] == "span"]
    return {name: int(getattr(events, name)[place]) for name in ("status", "post_ns", "wait_ns", "done_ns")}


@pytest.mark.parametrize("kind", BEGINNERS)
def test_it_ends_with_the_wait_and_one_in_vain_fails_it(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    handle = sum_up(torch.ones(2), lambda: BEGINNERS[kind](request))
    assert span_of(tmp_path)["status"] == IN_FLIGHT
    with pytest.raises(RunTimeout):
        handle.wait(0.01)
    assert span_of(tmp_path)["status"] == ERROR
    request.done, waited_ns = True, time.monotonic_ns()
    handle.wait()
    span = span_of(tmp_path)
    assert span["status"] == OK
    assert span["done_ns"] >= span["wait_ns"] >= waited_ns - logged.start_ns > span["post_ns"]
    handle.wait()
    assert span_of(tmp_path) == span


@pytest.mark.parametrize("kind", BEGINNERS)
def test_it_ends_at_return_where_the_function_has_waited(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    request.done = True

    def begin_and_wait() -> Any:
        handle = BEGINNERS[kind](request)
        handle.wait()
        return handle

    handle = sum_up(torch.ones(2), begin_and_wait)
    before = span_of(tmp_path)
    assert before["status"] == OK
    handle.wait()
    assert span_of(tmp_path) == before


@pytest.mark.parametrize("kind", BEGINNERS)
def test_a_handle_that_outlives_the_recorder_writes_nothing(kind: str, logged: Recorder, tmp_path: Path) -> None:
    request = Request()
    handle = sum_up(torch.ones(2), lambda: BEGINNERS[kind](request))
    configure(enabled=False)
    change_state(recorder=None)
    logged.close()
    request.done = True
    assert handle.wait()
    assert span_of(tmp_path)["status"] == IN_FLIGHT


@pytest.mark.parametrize("result", [None, 3, [1, 2], math.inf])
def test_what_is_no_handle_ends_it(result: Any, logged: Recorder, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        sum_up()  # type: ignore[call-arg]
    assert sum_up(torch.ones(2), lambda: result) is result
    assert span_of(tmp_path)["status"] == OK
