"""Fallbacks on real ranks: with the fast operation hidden, the slow one gives the same bits as torch's own."""

from __future__ import annotations

import itertools
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as native
from hidden import CASES, Hiding, Scene

import ringsim
from ringsim import comm
from ringsim.comm.functions import FALLBACKS
from ringsim.errors import ArgumentError
from ringsim.traces.events import OP_NAMES

pytestmark = pytest.mark.timeout(100)
SIZES = (1, 4)  # the conformance of a backend of messages alone has the others
WAYS = (("one", False, True), ("one", True, False), ("all", False, False), ("all", True, True))  # backend, async_op, strided
DTYPES = (torch.float32, torch.uint8)  # sums of a few small whole numbers are exact in both
TWINS = (
    {"all_gather_single", "all_gather_into_tensor"},
    {"reduce_scatter_single", "reduce_scatter_tensor"},
    {"gather_single", "gather_into_tensor"},
)


def hide(op: str) -> Hiding:
    """Hides an operation and its other spelling."""
    return Hiding(op, *next((twins for twins in TWINS if op in twins), ()))


def compare_all() -> tuple[int, list[str]]:
    """Runs every case natively and built, in every way; returns how many, and which differ."""
    warnings.simplefilter("ignore")
    rank, size = native.get_rank(), native.get_world_size()
    later = list(range(1, size)) or [0]
    groups = [(None, list(range(size))), (native.new_group(later), later)]
    count, different = 0, []
    for (name, (op, case)), (group, members), (backend, async_op, strided) in itertools.product(CASES.items(), groups, WAYS):
        scene = {"rank": rank, "members": members, "group": group, "async_op": async_op}
        for dtype in DTYPES:
            comm.set_backend("torch")
            expected = case(Scene(native, **scene, dtype=dtype))
            comm.set_backend(hide(op) if backend == "one" else Hiding())
            found = case(Scene(comm, **scene, dtype=dtype, strided=strided))
            count += 1
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                different.append(f"{name} {dtype} {backend} group={members} async={async_op} strided={strided}: {found} {expected}")
    comm.set_backend("torch")
    return count, different


@pytest.mark.parametrize("size", SIZES)
def test_built_operations_give_the_bits_of_the_native_ones(size: int) -> None:
    for count, different in ringsim.trace(compare_all, world_size=size).results:
        assert count > 250
        assert different == []


def talk_objects(backend: Any) -> list[Any]:
    """Sends objects in every form; returns what came."""
    comm.set_backend(backend)
    rank, size = comm.get_rank(), comm.get_world_size()
    words = {"rank": rank, "text": "x" * (10 * rank + 1)}
    everyone: list[Any] = [None] * size
    comm.all_gather_object(everyone, words)
    gathered: list[Any] = [None] * size if rank == size - 1 else []
    comm.gather_object(words, gathered or None, dst=size - 1)
    scattered: list[Any] = [None]
    comm.scatter_object_list(scattered, [("for", i) for i in range(size)] if rank == 0 else None, src=0)
    shown = [rank, words] if rank == size - 1 else [None, None]
    comm.broadcast_object_list(shown, group_src=size - 1)
    passed: list[Any] = [None, None]
    source = -1
    if rank == 0 and size > 1:
        comm.send_object_list([1, "two"], 1)
    elif rank == 1:
        source = comm.recv_object_list(passed, 0)
    if backend != "torch":
        plain: list[Any] = [None] * size
        FALLBACKS["all_gather_object"](comm.cdb, plain, {"rank": rank}, None, True)
        assert plain == [{"rank": other} for other in range(size)]
    comm.barrier()
    comm.monitored_barrier(timeout=timedelta(seconds=20))
    return [everyone, gathered, scattered, shown, passed, source]


@pytest.mark.parametrize("size", SIZES)
def test_built_object_forms_carry_the_same_objects(size: int) -> None:
    expected = ringsim.trace(talk_objects, world_size=size, args=("torch",)).results
    assert ringsim.trace(talk_objects, world_size=size, args=(Hiding(),)).results == expected


def talk_messages() -> list[Any]:
    """Sends messages with everything hidden but ``isend`` and ``irecv``."""
    comm.set_backend(Hiding())
    rank, size = comm.get_rank(), comm.get_world_size()
    token, found = torch.tensor([rank]), torch.tensor([-1])
    sources: list[int] = []
    if rank == 0:
        sources = sorted(comm.recv(found) for _ in range(1, size))  # from anybody
    else:
        comm.send(token, 0)
    ops = [comm.P2POp(comm.isend, token, (rank + 1) % size, tag=5), comm.P2POp(native.irecv, found, group_peer=(rank - 1) % size, tag=5)]
    for work in comm.batch_isend_irecv(ops):
        work.wait()
    future = comm.all_reduce(token, async_op=True).get_future()
    future.wait()
    own, groups = comm.new_subgroups(1)
    return [sources, int(found), int(token), comm.get_process_group_ranks(own), len(groups)]


def test_built_messages_arrive() -> None:
    for rank, found in enumerate(ringsim.trace(talk_messages, world_size=3).results):
        assert found == [[1, 2] if rank == 0 else [], (rank - 1) % 3, 0 + 1 + 2, [rank], 3]


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


def fail_and_go_on() -> list[str]:
    comm.set_backend(Hiding())
    said = []
    for wrong in (
        lambda: comm.all_gather([], torch.ones(1)),
        lambda: comm.broadcast(torch.ones(1)),
        lambda: comm.broadcast(torch.ones(1), src=7),
        lambda: comm.all_gather_single(torch.ones(3), torch.ones(1)),
        lambda: comm.all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], None),
        lambda: comm.batch_isend_irecv([]),
        lambda: comm.split_group(),
        lambda: comm.DeviceMesh,
    ):
        try:
            wrong()
        except ringsim.errors.RingError as error:
            said.append(str(error))
    comm.barrier()
    return said


def test_wrong_arguments_are_refused_and_the_job_goes_on() -> None:
    said = ringsim.trace(fail_and_go_on, world_size=2).results[0]
    assert [each.split(" must")[0] for each in said] == [
        *("tensor_list", "src or group_src", "src", "output_tensor", "output_split_sizes", "p2p_op_list"),
        *("ringsim.comm.split_group", "ringsim.comm.DeviceMesh"),
    ]
    assert all("'hiding'" in each for each in said[-2:])


def test_everything_that_communicates_can_be_built() -> None:
    assert set(comm._FUNCTIONS) - {"isend", "irecv"} <= set(FALLBACKS)
    tested = {op for op, _ in CASES.values()}
    others = {name for name in FALLBACKS if "object" in name or "barrier" in name or "subgroups" in name}
    assert tested | others | {"send", "recv", "batch_isend_irecv"} == set(FALLBACKS)


def test_reduction_that_cannot_be_built_is_named() -> None:
    from ringsim.comm.built import reduce_parts

    with pytest.raises(ArgumentError, match=r"op must be one of SUM, AVG, .*"):
        reduce_parts([torch.ones(1)], "PREMUL_SUM")
