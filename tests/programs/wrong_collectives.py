"""Wrong programs with ``torch.distributed`` alone: rows 72 to 84 of faults.md."""

from __future__ import annotations

import datetime as dt

import torch
import torch.distributed as dist
from fault_programs import EASE, fault


def tensor(count: int = 4) -> torch.Tensor:
    return torch.zeros(count)


# -- ranks take different branches


@fault("72a", **EASE)
def only_the_first_reports_the_loss() -> None:
    loss = tensor(1)
    if dist.get_rank() == 0:
        dist.reduce(loss, 0)  # here
    dist.barrier()  # here


@fault("72b", **EASE)
def only_the_first_waits_for_its_checkpoint() -> None:
    if dist.get_rank() == 0:
        dist.barrier()  # here
    dist.all_reduce(tensor())  # here


@fault("73a", **EASE)
def one_has_nothing_to_do() -> None:
    if dist.get_rank() == 1:
        return
    dist.all_reduce(tensor())  # here


@fault("73b", **EASE)
def one_stops_early() -> None:
    loss = torch.tensor(1.0)
    for step in range(4):
        dist.all_reduce(loss)  # here
        if step == 1 + dist.get_rank():
            break
    dist.broadcast(loss, 0)  # here


@fault("73c", **EASE)
def loaders_of_other_lengths() -> None:
    for _batch in range(3 + dist.get_rank()):
        dist.all_reduce(tensor())  # here


@fault("73d", **EASE)
def one_skips_a_bad_batch() -> None:
    for batch in range(3):
        try:
            if dist.get_rank() == 1 and batch == 1:
                raise ValueError("corrupt sample")
            dist.all_reduce(tensor(8))  # here
        except ValueError:
            continue
        dist.all_reduce(tensor(2))  # here


@fault("73e", size=3, **EASE)
def one_takes_another_branch() -> None:
    if dist.get_rank() == 2:
        dist.all_gather([tensor() for _ in range(3)], tensor())  # here
    else:
        dist.all_reduce(tensor())  # here


# -- objects


@fault("74a", **EASE)
def only_the_first_broadcasts_its_settings() -> None:
    settings = [{"lr": 0.1}]
    if dist.get_rank() == 0:
        dist.broadcast_object_list(settings, 0)  # here
    dist.barrier()  # here


@fault("74b", **EASE)
def all_gather_object_against_gather_object() -> None:
    if dist.get_rank() == 0:
        found: list[object] = [None, None]
        dist.all_gather_object(found, "a")  # here
    else:
        dist.gather_object("b", None, 0)  # here


@fault("74c", **EASE)
def gather_object_to_different_ranks() -> None:
    mine = dist.get_rank()
    dist.gather_object("a", [None, None], mine)  # here


@fault("74d", **EASE)
def lists_of_objects_of_different_lengths() -> None:
    dist.broadcast_object_list(["a", "b"] if dist.get_rank() == 0 else ["a"], 0)  # here


@fault("74e", **EASE)
def an_object_is_sent_and_a_tensor_received() -> None:
    if dist.get_rank() == 0:
        dist.send_object_list(["a" * 100], 1)  # here
    else:
        dist.recv(tensor(), 0)  # here


# -- sizes, roots, order


@fault("75a", **EASE)
def parts_to_scatter_that_disagree() -> None:
    count = 4 + dist.get_rank()
    dist.reduce_scatter_tensor(tensor(count), tensor(2 * count))  # here


@fault("75b", **EASE)
def parts_to_gather_that_disagree() -> None:
    count = 4 + dist.get_rank()
    dist.all_gather_into_tensor(tensor(2 * count), tensor(count))  # here


@fault("75c", **EASE)
def the_last_batch_is_smaller() -> None:
    batch = tensor(4 - dist.get_rank())
    dist.all_gather([torch.empty_like(batch) for _ in range(2)], batch)  # here


@fault("75d", **EASE)
def parts_to_exchange_that_disagree() -> None:
    """The splits of the two ranks do not match."""
    splits = [1, 3]
    dist.all_to_all_single(tensor(), tensor(), splits, splits)  # here


@fault("76a", **EASE)
def gathered_by_nobody() -> None:
    dist.gather(tensor(), None, 0)  # here


@fault("76b", **EASE)
def scattered_by_the_wrong_rank() -> None:
    parts = [tensor(), tensor()] if dist.get_rank() == 1 else None
    dist.scatter(tensor(), parts, 0)  # here


@fault("76c", **EASE)
def reduced_to_different_ranks() -> None:
    dist.reduce(tensor(), dist.get_rank())  # here


@fault("77a", **EASE)
def started_in_another_order() -> None:
    gradients = [tensor(4), tensor(8)]
    order = gradients if dist.get_rank() == 0 else gradients[::-1]
    works = [dist.all_reduce(each, async_op=True) for each in order]  # here
    for work in works:
        work.wait()


@fault("77b", **EASE)
def of_one_size_in_another_order() -> bool:
    first, second = torch.ones(4), torch.full((4,), 10.0)
    order = [first, second] if dist.get_rank() == 0 else [second, first]
    for each in order:
        dist.all_reduce(each)
    return bool(first[0] == 11.0 and second[0] == 11.0)  # the program wanted 2.0 and 20.0


# -- groups


@fault("78a", size=3, **EASE)
def made_by_its_members_alone() -> None:
    """This works until the ranks create the next group."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1])  # here
    dist.new_group([0, 1, 2])  # here


@fault("78b", size=3, **EASE)
def a_root_outside_the_group() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        dist.broadcast(tensor(), 0, group=group)  # here


@fault("78c", size=3, **EASE)
def a_collective_of_others() -> bool:
    """For ranks outside the group, torch only warns and returns."""
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor(), group=group)
    return True


@fault("78d", size=3, **EASE)
def three_groups_of_two() -> None:
    """Each rank begins with the group in which it is the first member."""
    groups = [dist.new_group([first, (first + 1) % 3]) for first in range(3)]
    rank = dist.get_rank()
    for group in (groups[rank], groups[rank - 1]):
        dist.all_reduce(tensor(), group=group)  # here


# -- messages


@fault("79a", **EASE)
def no_modulo() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor(), 1)
    else:
        dist.recv(tensor(), rank - 1)
        dist.send(tensor(), rank + 1)  # here


@fault("79b", size=3, **EASE)
def a_chain_that_is_no_ring() -> None:
    """Every rank waits for the previous one, including rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(tensor(), (rank - 1) % size)  # here
    dist.send(tensor(), (rank + 1) % size)


@fault("79c", size=3, **EASE)
def left_and_right_change_places() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    ops = [
        dist.P2POp(dist.isend, tensor(), left, tag=1),
        dist.P2POp(dist.irecv, tensor(), left, tag=1),
    ]
    ops += [
        dist.P2POp(dist.isend, tensor(), right, tag=2),
        dist.P2POp(dist.irecv, tensor(), right, tag=2),
    ]
    for work in dist.batch_isend_irecv(ops):  # here
        work.wait()  # here


@fault("79d", **EASE)
def one_side_of_a_batch() -> None:
    if dist.get_rank() == 0:
        ops = [dist.P2POp(dist.isend, tensor(), 1), dist.P2POp(dist.irecv, tensor(), 1)]
        for work in dist.batch_isend_irecv(ops):  # here
            work.wait()  # here
    else:
        dist.recv(tensor(), 0)


@fault("80a", size=3, **EASE)
def workers_are_never_told_to_stop() -> None:
    if dist.get_rank() == 0:
        for task in range(4):
            worker = 1 + task % 2
            dist.send(torch.tensor([task]), worker)
            dist.recv(torch.tensor([0]), worker)
        return
    while True:
        task_ = torch.tensor([0])
        dist.recv(task_, 0)  # here
        if task_ < 0:
            return
        dist.send(task_, 0)


@fault("80b", size=3, **EASE)
def one_result_too_many_is_waited_for() -> None:
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.recv(tensor())  # here
    else:
        dist.send(tensor(), 0)


@fault("80c", **EASE)
def an_answer_is_waited_for_on_both_sides() -> None:
    """A server answers with a separate tag, and a client asks twice."""
    if dist.get_rank() == 0:
        dist.send(tensor(), 1, tag=1)
        dist.send(tensor(), 1, tag=1)  # here
    else:
        dist.recv(tensor(), 0, tag=1)
        dist.send(tensor(), 0, tag=2)  # here


@fault("81", **EASE)
def polls_for_what_never_comes() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(tensor(), 1)
        while not work.is_completed():  # here
            pass


@fault("82", size=3, **EASE)
def a_monitored_barrier_in_a_loop_of_other_length() -> None:
    for _ in range(3 - dist.get_rank() // 2):
        dist.monitored_barrier(timeout=dt.timedelta(seconds=1))  # here


# -- when the program ends


@fault("83a", size=3, **EASE)
def finally_a_barrier() -> None:
    try:
        if dist.get_rank() == 1:
            raise ValueError("bad batch")  # here
        dist.all_reduce(tensor())  # here
    finally:
        dist.barrier()  # here


@fault("83b", size=3, **EASE)
def an_assertion_fails() -> None:
    loss = torch.tensor(float("nan") if dist.get_rank() == 2 else 1.0)
    assert not loss.isnan(), "the loss is NaN"  # here
    dist.all_reduce(loss)


@fault("83c", **EASE)
def another_error_in_its_place() -> None:
    try:
        [][dist.get_rank() - 1 :][0] if dist.get_rank() else dist.recv(tensor(), 1)  # here
    except IndexError as error:
        raise RuntimeError("cannot load the shard") from error


@fault("84a", **EASE)
def average_of_integers() -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.int64), op=dist.ReduceOp.AVG)  # here


@fault("84b", **EASE)
def gathered_into_too_few() -> None:
    dist.all_gather([tensor()], tensor())  # here
