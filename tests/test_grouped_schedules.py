"""Schedules whose messages are carried out in order, as on NCCL.

They are compared with ranks that post the same messages on the virtual clock, with hangs that users
of torch reported, and with torch's own order of sends and receives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
import torch.distributed as dist
from matplotlib.text import Text
from simulated_runs import now_s
from test_schedule_simulation import attempt, draw_costs, draw_schedule, move_posts
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
)

import ringsim
from ringsim import Link, explore, simulate, simulate_schedule
from ringsim.cli import main
from ringsim.errors import ArgumentError, Deadlock, ScheduleError
from ringsim.pipeline import (
    Costs,
    Schedule,
    evaluate,
    from_csv,
    from_text,
    lower,
    rehearse,
    to_csv,
    validate,
)
from ringsim.schedules import SCHEDULE_NAMES, lower_in_step, make_schedule
from ringsim.schedules.cures import try_cures
from ringsim.schedules.lowering import get_recv
from ringsim.schedules.programs import Instruction, Receive, Send, Wait, run_programs

mpl.use("Agg")

IN_ORDER = ("grouped", "paired", "grouped(4)", "paired(4)", "grouped(2)")
LINK = Link(alpha_s=2.0, beta_s_per_byte=0.25)
# the classes of torch that lower their schedules, with the stages per rank
CLASSES = {
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def torch_makes(name: str, num_ranks: int, num_microbatches: int) -> dict[int, list[Any]]:
    """Returns the computations of a schedule of torch."""
    chunks = CLASSES.get(name, 1)
    rows = get_schedule_ops(name, num_ranks, num_microbatches, num_stages_per_rank=chunks)
    return {rank: [one for one in row if one is not None] for rank, row in enumerate(rows)}


def read(rows: dict[int, list[Any]], name: str) -> Schedule:
    return from_csv("\n".join(",".join(map(str, rows[rank])) for rank in sorted(rows)), name=name)


def torch_lowers(
    name: str, num_ranks: int, num_microbatches: int, *, sharded: bool = False
) -> Schedule:
    """Returns a schedule of torch with torch's sends and receives."""
    actions = torch_makes(name, num_ranks, num_microbatches)
    owners = {}
    for rank, row in actions.items():
        for action in row:
            for one in action.sub_actions or (action,):
                owners[one.stage_index] = rank
    if sharded:
        actions = {
            rank: _add_reduce_grad(_add_unshard_reshard(row), num_microbatches)
            for rank, row in actions.items()
        }
    return read(_add_send_recv(actions, owners.__getitem__, len(owners)), name)


def defer(schedule: Schedule) -> Schedule:
    """Moves each receive immediately before the computation that needs it."""
    rows = []
    for row in schedule.actions:
        kept: list[Any] = []
        for action in row:
            if action.is_compute:
                kept += filter(None, [get_recv(action, schedule.stage_ranks)])
            if not action.kind.startswith("RECV"):
                kept.append(action)
        rows.append(tuple(kept))
    return replace(schedule, actions=tuple(rows))


def receive_first(schedule: Schedule, rank: int) -> Schedule:
    """Swaps each receive of a rank with a send just before it."""
    row = [*schedule.actions[rank]]
    for place, (first, second) in enumerate(pairwise(row)):
        if first.kind.startswith("SEND") and second.kind.startswith("RECV"):
            row[place : place + 2] = second, first
    rows = [*schedule.actions]
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


def blocking(*posts: Instruction) -> list[Instruction]:
    """Writes a program of blocking sends and receives."""
    return [one for place, post in enumerate(posts) for one in (post, Wait(2 * place))]


# -- programs


def test_posts_begin_in_order_and_a_batch_begins_as_one() -> None:
    both_send = [[Send(1), Receive(1), Wait(0), Wait(1)], [Send(0), Receive(0), Wait(0), Wait(1)]]
    assert run_programs(both_send).blocked == ()
    for semantics in ("grouped", "paired"):
        stuck = run_programs(both_send, semantics=semantics)
        assert [(each.rank, each.post, each.head, each.peer) for each in stuck.cycle] == [
            (0, 0, 0, 1),
            (1, 0, 0, 0),
        ]
    for semantics in ("grouped(0)", "paired(8)"):
        assert run_programs(both_send, semantics=semantics).blocked == ()
    batched: list[list[Instruction]] = [
        [Send(1, joins=True), Receive(1), Wait(1)],
        [Send(0, joins=True), Receive(0), Send(0), Wait(0), Wait(2)],
    ]
    batched[0] += [Receive(1), Wait(3)]
    run = run_programs(batched, latency=3, semantics="grouped")
    #          batch   the next message
    # rank 0   0 - 3   3 - 6
    assert ([times[-1] for times in run.times], run.blocked) == ([(3, 6), (3, 6)], ())


def test_the_message_of_a_batch_that_holds_it_up_is_named() -> None:
    # the send leaves; the batch waits for its receive, which rank 1 sends only after its own wait
    programs: list[list[Instruction]] = [
        [Send(1, joins=True), Receive(1), Wait(1)],
        [Receive(0, tag=1), Wait(0), Receive(0), Send(0)],
    ]
    stuck = run_programs(programs, semantics="grouped(0)").blocked
    assert [(each.rank, each.head) for each in stuck] == [(0, 1), (1, 0)]


def test_a_communicator_for_each_pair_delays_only_its_two_ranks() -> None:
    # rank 0 sends to 1, which receives from 2 first; rank 2 receives from 0 first
    programs = [
        [Send(1), Send(2), Wait(0), Wait(1)],
        [Receive(2), Receive(0), Wait(0), Wait(1)],
        [Receive(0), Send(1), Wait(0), Wait(1)],
    ]
    run = run_programs(programs, semantics="grouped")
    assert [(each.rank, each.head, each.peer) for each in run.cycle] == [
        (0, 0, 1),
        (1, 0, 2),
        (2, 0, 0),
    ]
    assert run_programs(programs, latency=1, semantics="paired").blocked == ()


# -- the same messages posted by simulated ranks


def perform(steps: list[tuple[Schedule, Costs, list[int]]]) -> dict[str, float]:
    """Performs one of the steps on the ranks that belong to it; returns when computations end."""
    first = [*accumulate((step.num_ranks for step, *_ in steps), initial=0)]
    number = next(number for number, end in enumerate(first[1:]) if dist.get_rank() < end)
    (schedule, costs, sizes), begin = steps[number], first[number]
    posted, ends = {}, {}
    for action in schedule.actions[dist.get_rank() - begin]:
        if action.is_compute:
            recv = get_recv(action, schedule.stage_ranks)
            if recv is not None:
                posted.pop(recv).wait()
            ringsim.compute(float(costs.get_duration(action)))
            ends[str(action)] = now_s()
        else:
            post = dist.isend if action.kind.startswith("SEND") else dist.irecv
            other = action.other_side.stage
            payload = torch.zeros(sizes[min(action.stage, other)], dtype=torch.uint8)
            posted[action] = post(payload, begin + schedule.stage_ranks[other])
    for each in posted.values():
        each.wait()
    return ends


def draw_step(chance: random.Random) -> tuple[Schedule, Costs, list[int]]:
    """Draws a lowered schedule, which may hang, whole costs, and sizes of messages."""
    while True:
        drawn = draw_schedule(chance)
        lowered = lower_in_step(drawn) if chance.random() < 0.6 else lower(drawn)
        if lowered.lowered:
            costs = Costs(*([chance.randint(1, 9) for _ in drawn.stage_ranks] for _ in "FIW"))
            sizes = [chance.choice((2, 4, 8)) for _ in drawn.stage_ranks[1:]]
            return move_posts(lowered, chance), costs, sizes


def compare_with_ranks(semantics: str, seeds: range) -> int:
    """Compares verdicts and times with those of simulated ranks; returns the number of hangs."""
    steps = [draw_step(random.Random(seed)) for seed in seeds]
    size = sum(step.num_ranks for step, *_ in steps)
    try:
        trace = simulate(perform, world_size=size, args=(steps,), link=LINK, semantics=semantics)
    except Deadlock as stuck:
        trace = stuck.trace
    results, hangs = iter(trace.results), 0
    for seed, (step, costs, sizes) in zip(seeds, steps, strict=True):
        of_ranks = [next(results) for _ in range(step.num_ranks)]
        known = {"link": LINK, "size_bytes": sizes, "semantics": semantics}
        found = attempt(simulate_schedule, step, costs, **known)
        if semantics in ("grouped", "paired"):  # the sizes do not matter
            exact = attempt(evaluate, step, costs, semantics=semantics)
            assert len(exact) == len(found), seed
        if len(found) == 2:  # a deadlock
            hangs += 1
            assert None in of_ranks, seed
            continue
        expected = {name: end for ends in of_ranks for name, end in ends.items()}
        assert {str(action): end for action, end in found[0].items()} == expected, seed
    return hangs


def test_verdicts_and_times_are_those_of_ranks() -> None:
    assert 0 < compare_with_ranks("grouped", range(12)) < 12


@pytest.mark.parametrize("semantics", IN_ORDER)
def test_500_verdicts_and_times_are_those_of_ranks(semantics: str) -> None:
    assert 0 < compare_with_ranks(semantics, range(100, 200)) < 100


@pytest.mark.parametrize("semantics", ["grouped", "paired", "grouped(0)", "paired(9)"])
def test_both_evaluators_agree_and_the_path_is_the_step(semantics: str) -> None:
    for seed in range(8):
        chance = random.Random(seed)
        schedule = draw_schedule(chance)
        costs = draw_costs(chance, schedule.num_stages)
        moved = [move_posts(low, chance) for low in (lower(schedule), lower_in_step(schedule))]
        for each in (schedule, *moved):
            found = attempt(simulate_schedule, each, costs, semantics=semantics)
            assert found == attempt(evaluate, each, costs, semantics=semantics)
            if len(found) > 2:
                hops = simulate_schedule(each, costs, semantics=semantics).critical_path.hops
                assert sum(hop.end - hop.start for hop in hops) == found[1]
                assert all(first.end == then.start for first, then in pairwise(hops))


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_pipeline_steps_use_a_group_for_each_pair(name: str) -> None:
    step, costs = make_schedule(name, 4, 6), Costs(2.0, 1.0, 3.0)
    run = simulate_schedule(step, costs, link=LINK, size_bytes=8, semantics="paired")
    trace = simulate(
        rehearse,
        world_size=4,
        args=(step, costs),
        kwargs={"size_bytes": 8},
        link=LINK,
        semantics="grouped",
    )
    assert trace.bubble().makespan == pytest.approx(1e9 * run.makespan)


# -- schedules


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_ringsims_schedules_never_hang(name: str) -> None:
    schedule = make_schedule(name, 4, 6)
    for semantics in IN_ORDER:
        validate(schedule, semantics)
        validate(lower_in_step(schedule), semantics)
    # a receive on one side is posted before a send that the other side posts later
    with pytest.raises(ScheduleError, match="lower_in_step") as caught:
        validate(lower(make_schedule("1f1b", 4, 6)), "grouped")
    assert isinstance(caught.value.__cause__, Deadlock)


@pytest.mark.parametrize("name", CLASSES)
def test_torchs_order_of_sends_and_receives_does_not_hang(name: str) -> None:
    for num_ranks in (2, 4):
        schedule = torch_lowers(name, num_ranks, 2 * CLASSES[name] * num_ranks)
        for semantics in ("grouped", "paired", "grouped(65536)"):
            validate(schedule, semantics)


@pytest.mark.parametrize("name", CLASSES)
def test_torchs_classes_on_2_to_8_ranks(name: str) -> None:
    for num_ranks in range(2, 9):
        size = num_ranks, 2 * CLASSES[name] * num_ranks
        alone, lowered = read(torch_makes(name, *size), name), torch_lowers(name, *size)
        # actions for sharded parameters are ignored
        sharded = torch_lowers(name, *size, sharded=True)
        for each in (lowered, sharded):
            rows = [tuple(one for one in row if one.is_compute) for row in each.actions]
            assert to_csv(replace(each, actions=tuple(rows))) == to_csv(alone)
        for semantics in IN_ORDER:
            for each in (alone, lowered, sharded):
                validate(each, semantics)
        for each, costs in product((alone, lowered), (Costs(), Costs(overlap=1))):
            run = simulate_schedule(each, costs, semantics="grouped")
            assert run.makespan == evaluate(each, costs, "grouped").makespan
        if name == "Interleaved1F1B":
            with pytest.raises(ScheduleError, match="cheapest first: "):
                validate(defer(lowered), "grouped")


def test_torchs_1f1b_is_wrong_on_its_last_rank() -> None:
    for num_ranks in range(2, 9):
        rows = torch_makes("1F1B", num_ranks, 2 * num_ranks)
        with pytest.raises(ScheduleError, match=f"no forward pass for microbatch {2 * num_ranks} "):
            validate(read(rows, "1f1b"))


def hang(schedule: Schedule) -> tuple[str, Any]:
    """Returns the message and the cycle for a schedule that hangs."""
    with pytest.raises(Deadlock) as caught:
        evaluate(schedule, Costs(), "grouped")
    return str(caught.value), caught.value.diagnosis


def test_receives_deferred_to_their_computation_hang_where_users_reported() -> None:
    """The order of pytorch PR 172833, with 2 ranks and 4 stages, which hung on two nodes.

    The report: rank 0 was stuck at ``0SEND_F1, 2RECV_F0, 2F0``, rank 1 at ``1SEND_F0, 1RECV_F1,
    1F1``. With the swap on odd ranks: ``0SEND_F2, 2RECV_B0, 2B0``, while ``3SEND_B0`` on rank 1
    never ended. On one node, where small sends leave, the same order did not hang.
    """
    deferred = defer(torch_lowers("Interleaved1F1B", 2, 8))
    text, cycle = hang(deferred)
    assert (
        "rank 0 waits in 2F0 behind 0SEND_F1 for 1RECV_F1 on rank 1, which comes after 1SEND_F0; "
        "rank 1 waits in 1F1 behind 1SEND_F0 for 2RECV_F0 on rank 0, which comes after 0SEND_F1."
    ) in text
    assert [(rank, str(action)) for rank, action in cycle] == [(0, "2F0"), (1, "1F1")]
    validate(deferred, "grouped(65536)")

    text, cycle = hang(receive_first(deferred, 1))
    assert (
        "rank 0 waits in 2B0 behind 0SEND_F2 for 1RECV_F2 on rank 1, which comes after 3SEND_B0; "
        "rank 1 waits in 1F2 behind 3SEND_B0 for 2RECV_B0 on rank 0, which comes after 0SEND_F2."
    ) in text
    assert cycle.plot().get_title(loc="left") == "Deadlock: ranks 0 and 1"
    words = [text.get_text() for text in cycle.plot().figure.findobj(Text)]
    assert "simulated: virtual clock, grouped" in words
    assert "<img" in cycle._repr_mimebundle_()["text/html"]  # what a notebook shows
    assert "0 → 1: 2B0 behind 0SEND_F2" in [text.get_text().strip() for text in cycle.plot().texts]


def test_cures_are_tried_and_the_cheapest_comes_first() -> None:
    # each rank sends before it receives
    crossed = from_text(
        "rank 0: 0F0 0F1 0SEND_F0 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1\n"
        "rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1"
    )
    text, _ = hang(crossed)
    cures = try_cures(crossed, Costs(latency=1), "grouped")
    helps = {name: end for name, end in cures.items() if end is not None}
    assert [*cures][: len(helps)] == sorted(helps, key=lambda name: helps[name])
    assert "receive before sending on odd ranks" in helps
    assert "receive before sending on even ranks" not in helps
    assert all(name in text for name in cures)


def test_unknown_semantics_are_refused() -> None:
    step = make_schedule("1f1b", 2, 2)
    for name in ("eager", "grouped()", "buffered(5)", "grouped(-1)", 5):
        for time in (evaluate, simulate_schedule):
            with pytest.raises(ArgumentError, match="one of rendezvous, buffered, grouped, paired"):
                time(step, Costs(), semantics=name)


# -- programs under several semantics


def exchange(how: str) -> None:
    peer, rank = 1 - dist.get_rank(), dist.get_rank()
    mine, theirs = torch.zeros(2), torch.zeros(2)
    if how == "batch on one side" and rank == 0:
        posts = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        handles = dist.batch_isend_irecv(posts)
    elif how == "receive first on one side" and rank == 0:
        handles = [dist.irecv(theirs, peer), dist.isend(mine, peer)]
    else:
        handles = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
    for handle in handles:
        handle.wait()


@pytest.mark.parametrize(
    ("how", "hangs"),
    [
        ("send first", {"paired", "grouped", "grouped(7)"}),
        ("receive first on one side", set()),
        # without a communicator for all messages, a batch meets only batches
        ("batch on one side", {"paired", "paired(8)"}),
    ],
)
def test_a_table_shows_where_a_program_hangs(how: str, hangs: set[str]) -> None:
    names = ["buffered", "rendezvous", "paired(8)", "grouped(7)", "paired", "grouped"]
    table = ringsim.compare_semantics(
        exchange, world_size=2, args=(how,), link=LINK, semantics=names
    )
    assert [row.semantics for row in table.rows] == names
    assert {row.semantics for row in table.rows if row.error} == hangs
    assert all(isinstance(row.error, Deadlock | None) for row in table.rows)
    assert "no recv is from any source" in repr(table)
    assert repr(table).count("never: ") == len(hangs)


# -- the command line and the explorers

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
peer = 1 - dist.get_rank()
sending = dist.isend(torch.zeros(8), peer)
dist.recv(torch.zeros(8), peer)
sending.wait()
"""
STEP = """
[model]
forward_ms = 1
backward_ms = 2
activation_kib = 1
[ring]
ranks = 2
[schedule]
semantics = "{}"
actions = '''
{}'''
[link]
latency_us = 0
bandwidth_gb_per_s = 1
"""
CROSSED = (
    "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1 "
    "0RECV_B0 0B0 0RECV_B1 0B1\n"
    "rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 "
    "1SEND_B1\n"
)


@pytest.mark.parametrize(
    ("semantics", "hangs"), [("grouped", True), ("grouped(65536)", False), ("rendezvous", False)]
)
def test_the_command_knows_the_semantics(
    semantics: str, hangs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, description = tmp_path / "train.py", tmp_path / "step.toml"
    script.write_text(SCRIPT)
    description.write_text(STEP.format(semantics, CROSSED))
    for arguments in (["--semantics", semantics, str(script)], [str(description)]):
        assert main(["simulate", *arguments]) == hangs
        said = capsys.readouterr()
        assert ("wait" in said.err) == hangs


def test_explorers_know_grouped_messages() -> None:
    rows = [
        explore.schedule().frame(left="1f1b", right="none", latency=0.5, messages=messages).table
        for messages in ("buffered", "grouped")
    ]
    assert rows[0] != rows[1]
    frame = explore.deadlock().frame(semantics="grouped")
    assert "The run never ends. The rule predicts a deadlock" in frame.text
