"""Operations that are built from messages: what they say, where they are recorded. What they do is in the conformance suite."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as native
from conformance import FAMILIES
from hidden import Hiding

import ringsim
from ringsim import comm
from ringsim.comm.built import reduce_parts
from ringsim.comm.functions import FALLBACKS
from ringsim.errors import ArgumentError
from ringsim.traces.events import OP_NAMES

pytestmark = pytest.mark.timeout(100)


def warn_twice() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.set_backend(Hiding("all_reduce"))
        for _ in range(2):
            comm.all_reduce(torch.ones(1))  # warned of here
    return [(each.category, str(each.message), each.filename, each.lineno) for each in caught]


def refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("Backend gloo does not support reduce_scatter\nException raised from reduce_scatter at Backend.hpp")


def be_refused(log: bool) -> list[Any]:
    """As torch 2.15 says of gather_single on Gloo: torch has the function, what is below it has not."""
    found = torch.zeros(1)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(native.ProcessGroup, "reduce_scatter", refuse)
        comm.configure(enabled=log, verbose=log)
        for _ in range(2):
            comm.reduce_scatter(found, [torch.ones(1)])  # warned of here
        comm.configure(enabled=False)
    assert found.item() == 1
    return [(each.category, str(each.message), each.filename, each.lineno) for each in caught]


@pytest.mark.parametrize(("worker", "args"), [(warn_twice, ()), (be_refused, (False,)), (be_refused, (True,))])
def test_a_built_operation_warns_once_at_the_users_line(worker: Any, args: Any) -> None:
    (category, message, file, line), *others = ringsim.trace(worker, world_size=1, args=args).results[0]
    assert others == []
    assert category is RuntimeWarning
    assert ("'torch' has no reduce_scatter" if args else "'hiding' has no all_reduce") in message
    assert file == __file__
    assert "# warned of here" in Path(file).read_text().splitlines()[line - 1]


def add_up() -> None:
    comm.set_backend(Hiding())
    comm.all_reduce(torch.ones(3))  # added up here


def test_messages_of_a_built_operation_stand_at_the_users_line() -> None:
    trace = ringsim.trace(add_up, world_size=3)
    events = trace.events
    (line,) = {int(line) for line in events.line}
    assert "# added up here" in Path(__file__).read_text().splitlines()[line - 1]
    assert {events.tables.files[file] for file in events.file} == {__file__}
    assert {OP_NAMES[op] for op in events.op} == {"isend", "irecv"}
    assert len(trace.messages) == 3 * 2
    assert trace.unmatched == []


def test_everything_that_communicates_can_be_built() -> None:
    assert set(comm._FUNCTIONS) - {"isend", "irecv"} <= set(FALLBACKS)
    tested = "\n".join(Path(__file__).with_name(f"conformance_{family}.py").read_text() for family in FAMILIES)
    assert {name for name in FALLBACKS if name not in tested} == {"new_subgroups_by_enumeration"}


def carry_plain_data() -> list[Any]:
    found: list[Any] = [None]
    FALLBACKS["all_gather_object"](comm.cdb, found, {"rank": 0}, None, True)
    return found


def test_objects_may_travel_as_plain_data() -> None:
    assert ringsim.trace(carry_plain_data, world_size=1).results == [[{"rank": 0}]]


def test_reduction_that_cannot_be_built_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"op must be one of SUM, AVG, .*"):
        reduce_parts([torch.ones(1)], "PREMUL_SUM")
