"""The checks of the lesson on schedules: 1F1B, and an order that fills its bubble."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import pytest
from verdicts import verdict

from ringsim import check
from ringsim.pipeline import one_f_one_b, zb_h1

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Answer = Callable[..., Any]


def written_down(rank: int, p: int, m: int) -> list[str]:
    warm_up = min(p - rank - 1, m)
    row = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        row += [f"{rank}F{i + warm_up}", f"{rank}B{i}"]
    return row + [f"{rank}B{i}" for i in range(m - warm_up, m)]


def generated(rank: int, p: int, m: int) -> Iterable[Any]:
    return one_f_one_b(p, m).actions[rank]


def as_one_text(rank: int, p: int, m: int) -> str:
    return " ".join(written_down(rank, p, m))


def all_forwards_first(rank: int, p: int, m: int) -> list[str]:
    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)]


def one_at_a_time(rank: int, p: int, m: int) -> list[str]:
    return [f"{rank}{kind}{i}" for i in range(m) for kind in "FB"]


def one_forward_more(rank: int, p: int, m: int) -> list[str]:
    return written_down(rank, p + 1, m)


def one_forward_less(rank: int, p: int, m: int) -> list[str]:
    return written_down(rank, max(p - 1, rank + 1), m)


def only_with_enough(rank: int, p: int, m: int) -> list[str]:
    return written_down(rank, p, m) if m >= p else one_at_a_time(rank, p, m)


def backwards_from_the_last(rank: int, p: int, m: int) -> list[str]:
    return all_forwards_first(rank, p, m)[:m] + [f"{rank}B{i}" for i in reversed(range(m))]


def in_a_circle(rank: int, p: int, m: int) -> list[str]:
    return one_at_a_time(rank, p, m) if rank == 0 or m < 2 else [f"{rank}F1", f"{rank}B1", *one_at_a_time(rank, p, m)[:2]]


def with_halves(rank: int, p: int, m: int) -> list[str]:
    return [half for action in written_down(rank, p, m) for half in ([action] if "F" in action else [action.replace("B", x) for x in "IW"])]


@pytest.mark.parametrize("answer", [written_down, generated, as_one_text])
def test_schedule_passes_1f1b(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.schedule, answer, seed)
        assert result.passed, result
        assert result.trace is not None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (all_forwards_first, "With 2 ranks and 4 microbatches rank 0 holds 4 live activations at a time, and may hold 2."),
        (one_forward_more, "With 2 ranks and 4 microbatches rank 0 holds 3 live activations at a time, and may hold 2."),
        (one_at_a_time, "With 2 ranks and 4 microbatches the step takes 24 units, and must take 15 at most."),
        (one_forward_less, "With 2 ranks and 4 microbatches the step takes 24 units, and must take 15 at most."),
        (only_with_enough, "With 4 ranks and 2 microbatches the step takes 24 units, and must take 15 at most."),
        (with_halves, "1F1B does a backward in one piece, got 0I0."),
        (in_a_circle, "With 2 ranks and 4 microbatches: stage 1 must do the forward pass of microbatch 2, got none (rank 1). Add 1F2."),
        (lambda rank, p, m: written_down(rank, p, m)[:-1], "stage 0 must do the backward pass of microbatch 3, got none (rank 0)."),
        (lambda rank, p, m: written_down(rank, p, m) * 2, "must be done once, got a second one (rank 0, position 8). Take one out."),
        (lambda rank, p, m: written_down(rank, p, m)[::-1], "0B3 must come after 0F3, got it before or without (rank 0, position 0)."),
        (lambda rank, p, m: written_down(rank, p, m + 1), "0F4 must be of a microbatch below 4, got 4 (rank 0, position 7)."),
        (lambda rank, p, m: written_down(0, p, m), "0F0 must be done by rank 0, which has stage 0, got rank 1"),
        (lambda rank, p, m: ["forward 0", "backward 0"], "an action must be a stage, one of F, B, I, W, "),
        (lambda rank, p, m: None, "With 2 ranks and 4 microbatches the answer must be a list of actions, got None."),
        (lambda rank, p, m: 1 / 0, "ZeroDivisionError"),
        (lambda rank: [], "takes 1 positional argument but 3 were given"),
        (7, "The answer must be a function, got 7."),
    ],
)
def test_schedule_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.schedule, answer)
    assert not result.passed
    assert reason in result.reason


def test_schedule_names_the_circle_of_a_deadlock() -> None:
    def turned_round(rank: int, p: int, m: int) -> list[str]:
        return one_at_a_time(rank, p, m) if rank == 0 else [action for i in reversed(range(m)) for action in (f"{rank}F{i}", f"{rank}B{i}")]

    result = verdict(check.schedule, turned_round)
    assert not result.passed
    assert "must let every rank go on, got a circle: rank " in result.reason


def test_a_schedule_that_runs_but_is_not_good_enough_is_shown_as_it_ran() -> None:
    trace = verdict(check.schedule, all_forwards_first).trace
    assert trace is not None
    spans = trace.to_pandas().query("kind == 'span' and label in ('forward', 'backward') and rank == 0")
    assert spans["label"].tolist() == ["forward"] * 4 + ["backward"] * 4


# -- the order that fills the bubble


def zero_bubble(rank: int, p: int, m: int) -> list[str]:
    warm_up = p - 1 - rank
    row = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        row += [f"{rank}F{i + warm_up}"] if i + warm_up < m else []
        row += [f"{rank}I{i}"]
        row += [f"{rank}W{i - rank}"] if i >= rank else []
    return row + [f"{rank}W{i}" for i in range(m - rank, m)]


@pytest.mark.parametrize("answer", [zero_bubble, lambda rank, p, m: zb_h1(p, m).actions[rank]])
def test_fast_schedule_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.fast_schedule, answer, seed)
        assert result.passed, result


def all_weights_at_the_end(rank: int, p: int, m: int) -> list[str]:
    row = with_halves(rank, p, m)
    return [action for action in row if "W" not in action] + [f"{rank}W{i}" for i in range(m)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (written_down, "With 2 ranks and 4 microbatches the step takes 15 units, and must take 13 at most."),
        (with_halves, "With 2 ranks and 4 microbatches the step takes 14 units, and must take 13 at most."),
        (all_weights_at_the_end, "With 2 ranks and 4 microbatches rank 0 holds 4 live activations at a time, and may hold 2."),
        (lambda rank, p, m: zero_bubble(rank, p, m)[:-1], "must make the weights' gradients of microbatch 3, got none (rank 0). Add 0W3"),
        (lambda rank, p, m: None, "the answer must be a list of actions, got None."),
    ],
)
def test_fast_schedule_says_what_is_wrong(answer: Answer, reason: str) -> None:
    result = verdict(check.fast_schedule, answer)
    assert not result.passed
    assert reason in result.reason
