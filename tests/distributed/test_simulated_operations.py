"""The same worker on real ranks and on simulated ones: the same results, records, and places for a failure to stand in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from pipeline_cases import Case, gradients, make_microbatches, make_model

import ringsim
from ringsim import comm as dist
from ringsim.errors import RankFailed
from ringsim.pipeline import generate
from ringsim.pipeline.training import train_step_pipeline
from ringsim.pipeline.transformer import SmallTransformer
from ringsim.schedules import SCHEDULE_NAMES
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left_behind")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
SIZE = 3
SAME = ["rank", "op", "group", "peer", "tag", "size_bytes", "dtype", "shape", "status"]


def place() -> int:
    return ringsim.current_ring().rank


def at_root(value: Any) -> Any:
    return value if place() == 1 else None


def several(count: int = 6) -> list[torch.Tensor]:
    return [torch.ones(count) for _ in range(SIZE)]


def batch() -> None:
    ring = ringsim.current_ring()
    both: list[Any] = [dist.P2POp(dist.isend, torch.ones(6), ring.succ), dist.P2POp(dist.irecv, torch.empty(6), ring.pred)]
    for handle in dist.batch_isend_irecv(both):
        handle.wait()


def from_anybody() -> int | None:
    if place() == 0:
        return dist.recv(torch.ones(6))
    return dist.send(torch.ones(6), 0) if place() == 1 else None


def send_objects(**how: Any) -> Any:
    given: list[Any] = [{"a": 1}, "x" * 100]
    received: list[Any] = [None, None]
    if place() == 0:
        return dist.send_object_list(given, 2, **how)
    return (dist.recv_object_list(received, 0, **how), received) if place() == 2 else None


def gather_objects() -> list[Any]:
    received = [None] * SIZE
    dist.all_gather_object(received, "x" * 10 * place())
    return received


def broadcast_objects() -> list[Any]:
    objects = ["xyz", {"a": 2}] if place() == 1 else [None, None]
    dist.broadcast_object_list(objects, 1)
    return objects


def gather_objects_at_root() -> Any:
    received = at_root([None] * SIZE)
    dist.gather_object(("g", "x" * place()), received, 1)
    return received


def scatter_objects() -> list[Any]:
    received = [None, "stays"]
    dist.scatter_object_list(received, at_root(["x" * 50, 1, None]), 1)
    return received


def objects_in_a_group() -> Any:
    group = dist.new_group([2, 0])
    received = [None] * 2
    if place() != 1:
        dist.all_gather_object(received, place(), group=group)
        dist.broadcast_object_list(received, group_src=1, group=group)
    return received


def share_memory() -> Any:
    """Inputs and outputs are parts of one tensor."""
    first, second, third = ((torch.arange(6.0) + 10 * place()).reshape(3, 2) for _ in range(3))
    dist.all_gather([first[2], first[1], first[0]], first[place()])
    dist.scatter(second[1], at_root(list(second)), 1)
    dist.gather(third[0], at_root([third[1], third[0], third[2]]), 1)
    return first.tolist(), second.tolist(), third.tolist()


def make_groups() -> list[float]:
    """Groups of some, of all, and of one; a rank outside waits for nobody."""
    rank = place()
    some, everyone = dist.new_group([0, 2]), dist.new_group()
    dist.new_group([2, 0], sort_ranks=False)
    dist.new_group([1])
    tensor = torch.tensor([float(rank)])
    if rank != 1:
        dist.all_reduce(tensor, group=some)
    dist.all_reduce(tensor, group=everyone)
    return tensor.tolist()


OPERATIONS: dict[str, Callable[[], Any]] = {
    "send": lambda: dist.send(torch.ones(6), 1, tag=5) if place() == 0 else dist.recv(torch.ones(6), 0, tag=5) if place() == 1 else None,
    "batch_isend_irecv": batch,
    "recv from anybody": from_anybody,
    "broadcast": lambda: dist.broadcast(torch.ones(6), 1),
    "all_reduce": lambda: dist.all_reduce(torch.ones(6)),
    "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([torch.ones(6), torch.ones(2)]),
    "reduce": lambda: dist.reduce(torch.ones(6), 1),
    "all_gather": lambda: dist.all_gather(several(), torch.ones(6)),
    "all_gather_coalesced": lambda: dist.all_gather_coalesced([several()[:2] for _ in range(SIZE)], several()[:2]),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(18), torch.ones(6)),
    "all_gather_single": lambda: dist.all_gather_single(torch.empty(18), torch.ones(6)),
    "gather": lambda: dist.gather(torch.ones(6), at_root(several()), 1),
    "scatter": lambda: dist.scatter(torch.ones(6), at_root(several()), 1),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(6), several()),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6)),
    "reduce_scatter_single": lambda: dist.reduce_scatter_single(torch.empty(2), torch.ones(6)),
    "all_to_all": lambda: dist.all_to_all(several(2), several(2)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6)),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "new_group": lambda: str(dist.new_group([2, 0]) is None),
    "new_subgroups": lambda: len(dist.new_subgroups(1)[1]),
    "send_object_list": send_objects,
    "send_object_list in a batch": lambda: send_objects(use_batch=True),
    "all_gather_object": gather_objects,
    "broadcast_object_list": broadcast_objects,
    "gather_object": gather_objects_at_root,
    "scatter_object_list": scatter_objects,
    "objects in a group": objects_in_a_group,
    "parts of one tensor": share_memory,
    "groups of some, of all, and of one": make_groups,
}


def do_each() -> dict[str, Any]:
    """Does all operations, each within a span of its name."""
    results = {}
    for name, operation in OPERATIONS.items():
        with ringsim.span(name):
            results[name] = operation()
    return results


def records(trace: Trace) -> dict[str, list[tuple[str, ...]]]:
    """Returns what was recorded in each span, by rank and in order."""
    found: dict[str, list[tuple[str, ...]]] = {name: [] for name in OPERATIONS}
    frame, name = trace.to_pandas(), ""
    for _, row in frame.iterrows():
        if row.op == "span":
            name = row.label
        else:
            found[name].append(tuple(str(row[column]) for column in SAME))
    return found


@pytest.fixture(scope="module")
def both() -> tuple[Trace, Trace]:
    return ringsim.trace(do_each, world_size=SIZE, limit_s=100), simulate(do_each, world_size=SIZE, link=LINK)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_recorded_and_ends_as_on_real_ranks(both: tuple[Trace, Trace], name: str) -> None:
    real, simulated = both
    assert records(simulated)[name] == records(real)[name]
    assert records(real)[name]
    assert [each[name] for each in simulated.results] == [each[name] for each in real.results]


def test_both_can_be_compared(both: tuple[Trace, Trace]) -> None:
    real, simulated = both
    found = ringsim.compare(real, simulated)  # raises where one has an operation that the other has not
    assert found.operations.count > 60, found.operations  # those that took any time


def exchange_objects() -> None:
    gather_objects()
    dist.barrier()
    send_objects()
    dist.all_gather_single(torch.empty(6), torch.ones(2))


@pytest.mark.parametrize("at_op", [1, 3, 5])
def test_a_failure_stands_in_the_place_of_the_same_operation(at_op: int) -> None:
    done = []
    for start in (ringsim.trace, lambda *args, **named: simulate(*args, **named, link=LINK)):
        with pytest.raises(RankFailed, match=f"operation {at_op}") as error:
            start(exchange_objects, world_size=SIZE, inject=[ringsim.Fail(0, at_op)])
        assert error.value.trace is not None
        frame = error.value.trace.to_pandas()
        done.append(frame[frame["rank"] == 0][["op", "tag", "size_bytes"]].astype(str).values.tolist())
    assert done[0] == done[1]
    assert len(done[0]) == at_op


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduce_everything() -> dict[tuple[str, str, str], str]:
    """Tells which reductions of which dtypes are refused, and what the others give; all ranks go on together."""
    found = {}
    size = ringsim.current_ring().world_size

    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(place() + 1, place() + 1 + count).to(dtype)

    for dtype in DTYPES:
        for name in REDUCTIONS:
            op = getattr(dist.ReduceOp, name)
            tensor, output = make(2 * size, dtype), make(2, dtype)
            ways: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda: dist.all_reduce(tensor, op),  # noqa: B023 - called in this round
                "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([tensor], op),  # noqa: B023
                "reduce": lambda: dist.reduce(tensor, 0, op),  # noqa: B023
                "reduce_scatter": lambda: dist.reduce_scatter(output, list(tensor.split(2)), op),  # noqa: B023
                "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(output, tensor, op),  # noqa: B023
            }
            for way, reduce in ways.items():
                result = output if "scatter" in way else tensor
                try:
                    reduce()
                    if way == "reduce" and place():
                        tensor = make(2 * size, dtype)  # it is the root's alone
                    found[way, name, str(dtype)] = str(result.tolist()) if way != "reduce" or not place() else "sent"
                except (RuntimeError, ValueError):
                    found[way, name, str(dtype)] = "refused"
    return found


def test_the_same_reductions_are_refused() -> None:
    real = ringsim.trace(reduce_everything, world_size=2).results
    simulated = simulate(reduce_everything, world_size=2, link=LINK).results
    for mine, theirs in zip(real, simulated, strict=True):
        assert len(mine) == 5 * len(DTYPES) * len(REDUCTIONS)
        assert {key: (value, theirs[key]) for key, value in mine.items() if value != theirs[key]} == {}
        assert 0 < list(mine.values()).count("refused") < len(mine)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SAME_OF_A_PROGRAM = [
    "rank",
    "op",
    "group",
    "peer",
    "tag",
    "size_bytes",
    "dtype",
    "stage",
    "microbatch",
    "label",
    "line",
    "status",
]


def on_both(worker: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> tuple[Trace, Trace]:
    real = ringsim.trace(worker, world_size=world_size, args=args, **options)
    return real, simulate(worker, world_size=world_size, args=args, link=LINK, **options)


def check_same(real: Trace, simulated: Trace) -> None:
    frames = [trace.to_pandas()[[name for name in SAME_OF_A_PROGRAM if name in trace.to_pandas()]] for trace in (real, simulated)]
    assert len(frames[0]) == len(frames[1])
    for name in frames[0]:
        ours, theirs = (frame[name].astype(str).tolist() for frame in frames)
        assert ours == theirs, name


def ring_worker(rounds: int) -> tuple[float, float, list[float]]:
    """The worker of the README, with random numbers."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank)) + torch.rand(1)
    for number in range(rounds):
        arriving = torch.empty_like(token)
        recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
        dist.isend(token, ring.succ, group=ring.succ_group).wait()
        recv.wait()
        with ringsim.span("compute", microbatch=number):
            token = arriving + float(np.random.random())
    total = torch.tensor([ring.rank])
    dist.all_reduce(total)
    dist.broadcast(token, 0)
    dist.barrier()
    return token[0].item(), token[-1].item(), total.tolist()


def test_the_ring_of_the_readme() -> None:
    real, simulated = on_both(ring_worker, 4, 3, seed=7)
    assert real.results == simulated.results
    check_same(real, simulated)


def train(names: list[str]) -> list[Any]:
    torch.set_num_threads(1)
    said = []
    for name in names:
        case = Case(dtype=torch.float32)
        model = make_model(case)
        loss = train_step_pipeline(model, *make_microbatches(case), schedule=name)
        said.append((name, loss, {key: grad.numpy().tobytes() for key, grad in gradients(model).items()}))
    return said


def test_every_schedule_gives_the_same_bits() -> None:
    real, simulated = on_both(train, 3, list(SCHEDULE_NAMES))
    for mine, theirs in zip(real.results, simulated.results, strict=True):
        for (name, loss, grads), (_, other_loss, other_grads) in zip(mine, theirs, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-6), name  # summed over the ranks, in another order
            assert grads == other_grads, name
    check_same(real, simulated)


def tell() -> list[list[int]]:
    torch.manual_seed(3)
    model = SmallTransformer(61, hidden_size=32, num_layers=5, num_heads=4, max_length=64).double()
    return generate(model, [[1, 2, 3], [7], [8, 9]], 4)


def test_generation_gives_the_same_tokens() -> None:
    real, simulated = on_both(tell, 3)
    assert real.results == simulated.results
    check_same(real, simulated)
