"""Tests that programs written for version 0.2.0 run unchanged on both clocks.

``golden/programs_0_2`` contains the programs of its README, docs and lessons. This file works out
their expected results.
"""

from __future__ import annotations

import doctest
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn import functional

import ringsim
from ringsim.errors import Deadlock, RankFailed, RingError
from ringsim.pipeline import SmallTransformer

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "tests" / "golden" / "programs_0_2"
sys.path.append(str(PLACE))
import communication  # noqa: E402
import lessons  # noqa: E402
import pages  # noqa: E402
import pages_comm  # noqa: E402

for module in (communication, lessons, pages, pages_comm):
    cloudpickle.register_pickle_by_value(module)  # like cells of a notebook

LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
Worker = Callable[..., Any]


def run(clock: str, worker: Worker, world_size: int, *args: Any) -> ringsim.Trace:
    if clock == "real":
        return ringsim.trace(worker, world_size=world_size, args=args, limit_s=100)
    return ringsim.simulate(worker, world_size=world_size, args=args, link=LINK, limit_s=100)


def of_pred(size: int) -> list[float]:
    return [float((rank - 1) % size) for rank in range(size)]


def pairs_of(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Returns the members of the groups with the predecessor and the successor."""
    return sorted([(rank - 1) % size, rank]), sorted([rank, (rank + 1) % size])


VALUES = torch.arange(12.0)
CASES: dict[str, tuple[Worker, int, tuple[Any, ...], list[Any]]] = {
    "README": (pages.worker, 4, (3,), [(rank - 3) % 4 + 3.0 for rank in range(4)]),
    "simulation.md": (pages_comm.pass_round, 4, (), [4.0, 1.0, 2.0, 3.0]),
    "using.md": (pages_comm.pass_on, 5, (), of_pred(5)),
    "00 squares": (lessons.worker, 4, (), [0, 1, 4, 9]),
    "00 lists": (lessons.remember, 4, (), [[rank] for rank in range(4)]),
    "00 work": (lessons.work_and_pass, 4, (), of_pred(4)),
    "00 shares": (lessons.sum_share_solution, 3, ([1, 2, 3, 4, 5],), [5, 7, 3]),
    "01 one rank": (lessons.pass_once, 1, (), [None]),
    "01 two ranks": (lessons.pass_once, 2, (), [1.0, 0.0]),
    "01 five ranks": (lessons.pass_once, 5, (), of_pred(5)),
    "01 groups": (lessons.my_groups, 4, (), [pairs_of(rank, 4) for rank in range(4)]),
    "01 no groups": (lessons.pass_without_groups, 4, (), of_pred(4)),
    "01 round": (lessons.pass_round_solution, 4, (VALUES,), [4 * VALUES] * 4),
    "01 pairs": (lessons.list_pairs, 3, (), [[(0, 1), (1, 2), (2, 0)]] * 3),
    "02 in order": (lessons.exchange_in_order, 3, ("RSS",), [None] * 3),
    "02 alternately": (lessons.exchange_in_order, 4, ("SRSR", 20_000), [None] * 4),
    "02 order": (lessons.by_order_solution, 3, (VALUES,), [VALUES] * 3),
    "02 isend": (lessons.by_isend_solution, 3, (VALUES,), [VALUES] * 3),
    "02 batch": (lessons.by_batch_solution, 2, (VALUES,), [VALUES] * 2),
    "08 all_reduce": (communication.ring_all_reduce_solution, 3, (VALUES,), [3 * VALUES] * 3),
    "08 swap": (communication.swap, 2, ("isend, then irecv",), [True] * 2),
    "08 tags": (communication.by_tag, 2, ("",), [True] * 2),
}


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("name", CASES)
def test_an_old_worker_gives_what_it_gave(name: str, clock: str) -> None:
    worker, size, args, expected = CASES[name]
    for found, wanted in zip(run(clock, worker, size, *args).results, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted)
        else:
            assert found == wanted


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_prints_of_an_old_worker_are_kept(clock: str) -> None:
    output = run(clock, lessons.quiet_worker, 4).output
    assert output == [f"said by rank {rank}\n" for rank in range(4)]


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_an_old_worker_that_is_wrong_ends_as_it_did(clock: str) -> None:
    for worker, args in ((lessons.all_send_first, ()), (lessons.exchange_in_order, ("SSS",))):
        with pytest.raises(Deadlock) as stuck:
            run(clock, worker, 3, *args)
        assert set(stuck.value.diagnosis.findings[0].ranks) == {0, 1, 2}
        frame = stuck.value.trace.to_pandas()
        assert frame[frame["status"] != "ok"]["op"].tolist() == ["send"] * 3
    with pytest.raises(RankFailed, match="IndexError: list index out of range") as failed:
        run(clock, lessons.careless, 4)
    assert failed.value.rank == 3  # there are three layers


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_stages_by_hand_have_the_gradient_of_one_process(clock: str) -> None:
    first, second = lessons.first, lessons.second
    loss = second(first(lessons.data)).square().mean()
    (expected,) = torch.autograd.grad(loss, [first.weight])
    results = run(clock, lessons.one_microbatch, 2).results
    torch.testing.assert_close(results[0], expected)


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_step_of_a_pipeline_has_the_loss_of_one_process(clock: str) -> None:
    torch.manual_seed(0)
    model = SmallTransformer(vocab_size=50, num_layers=5)
    tokens = torch.stack([torch.randint(50, (2, 9)) for _ in range(4)]).flatten(0, 1)
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    alone = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    for loss, report in run(clock, pages_comm.worker, 2).results:
        assert loss == pytest.approx(alone, rel=1e-5)
        assert report


def test_a_round_takes_what_the_link_says() -> None:
    trace = run("virtual", pages_comm.pass_round, 100)
    assert trace.results[0] == 100.0
    message_s = LINK.alpha_s + 1024 * LINK.beta_s_per_byte
    assert trace.makespan_s == pytest.approx(100 * (1e-3 + message_s))


def test_a_rehearsal_sends_what_its_schedule_says() -> None:
    """With GPipe, each of eight microbatches needs one message in each direction."""
    for clock in ("real", "virtual"):
        messages = run(clock, pages.two_sizes, 2).to_pandas("messages")
        counts = messages.groupby(["src", "dst", "size_bytes"]).size()
        assert counts.to_dict() == {
            (src, 1 - src, size): 8 for src in (0, 1) for size in (1024, 262_144)
        }


# -- ringsim.comm


def test_the_semantics_of_three_backends() -> None:
    """NCCL pairs messages in the order of posting, whatever their tags."""
    ways = ["send, then recv", "isend, then irecv", "batch_isend_irecv"]
    endings = {
        how: [
            communication.ending(communication.swap, how, semantics)
            for semantics in ("rendezvous", "grouped", "buffered")
        ]
        for how in ways
    }
    assert endings == {
        "send, then recv": ["deadlock", "deadlock", "right"],
        "isend, then irecv": ["right", "deadlock", "right"],
        "batch_isend_irecv": ["right", "right", "right"],
    }
    by_tag = [
        communication.ending(communication.by_tag, "", semantics)
        for semantics in ("rendezvous", "grouped", "buffered")
    ]
    assert by_tag == ["right", "WRONG NUMBERS", "right"]


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_the_log_has_busy_bandwidths(clock: str) -> None:
    for log in run(clock, communication.train, 4).results:
        reductions = log[log["name"] == "all_reduce"]
        assert sorted(reductions["group_size"]) == [2, 4]
        for row in reductions.itertuples():
            expected = 2 * (row.group_size - 1) / row.group_size
            assert row.busbw_gb_per_s / row.algbw_gb_per_s == pytest.approx(expected)
        assert {"loss", "average"} <= set(log["name"])


def reduce_with_the_names_of_deepspeed() -> tuple[float, list[str]]:
    from ringsim.comm import deepspeed as dist

    dist.configure(enabled=True, prof_all=True)
    tensor = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.all_reduce(tensor, log_name="gradients")
    summary = dist.log_summary(show_straggler=False)
    return tensor[0].item(), sorted(summary or [])


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_program_with_the_names_of_deepspeed(clock: str) -> None:
    results = run(clock, reduce_with_the_names_of_deepspeed, 2).results
    assert [value for value, _ in results] == [2.0, 2.0]  # the maximum 1, doubled by the sum


@pytest.mark.parametrize("file", ["backend.py", "communication_backend.py"])
def test_a_backend_that_is_an_object_is_told_what_takes_its_place(file: str) -> None:
    """Backends of 0.2.0 no longer run, because ringsim now uses torch's backends."""
    program = compile((PLACE / file).read_text(), file, "exec")
    with pytest.raises(
        RingError, match=r"backends are now torch's own\. (Derive a class from|Use)"
    ):
        exec(program, {"__name__": "main"})


# -- sessions, and cells


def test_the_sessions_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # because the sessions load a trace of the figures
    text = (PLACE / "pipeline.md").read_text().replace("```\n", "\n")
    session = doctest.DocTestParser().get_doctest(text, {}, "pipeline.md", None, 0)
    assert len(session.examples) > 30
    lines: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL  # words may change
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(session, out=lines.append)
    assert not lines, "".join(lines)


def test_a_cell_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a cell of lesson 00."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "ringsim")
    code = 'print("rank", ring.rank, "hears from", ring.pred, "and talks to", ring.succ)'
    shell.run_cell_magic("ring", "-n 4", code)
    shown = capsys.readouterr().out
    for rank in range(4):
        words = f"rank {rank} hears from {(rank - 1) % 4} and talks to {(rank + 1) % 4}"
        assert words in shown
