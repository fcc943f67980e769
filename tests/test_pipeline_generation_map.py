"""The generation ring without ranks: its closed forms against the plan, played step by step."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules.costs import Time
from ringsim.schedules.engine import Run
from ringsim.schedules.generation import (
    can_finish,
    check_can_finish,
    count_messages,
    idle_of_full_ring,
    makespan_of_async_ring,
    makespan_of_full_ring,
    plan_batches,
    plan_jobs,
    plan_steps,
    steady_use,
    time_generation,
)

SETTINGS = [(stages, turns, async_comm) for stages, async_comm in product(range(1, 7), (False, True)) for turns in range(1, 2 * stages + 3)]


def makespan(run: Run) -> Time:
    assert run.blocked == ()
    return max(times[-1][1] for times in run.times)


@pytest.mark.parametrize(("stages", "turns", "async_comm"), SETTINGS)
def test_the_deadlock_map_is_what_the_plan_does(stages: int, turns: int, async_comm: bool) -> None:
    for rounds, tokens in product((1, 2, 3), (1, 2, 3, 5)):
        run = time_generation(stages, turns, rounds, tokens, prefill=3, decode=2, async_comm=async_comm)
        assert (run.blocked == ()) is (tokens == 1 or can_finish(stages, turns, async_comm)), (rounds, tokens)


@pytest.mark.parametrize(("stages", "turns", "async_comm"), [each for each in SETTINGS if can_finish(*each)])
def test_steady_use_is_the_share_in_which_a_full_ring_works(stages: int, turns: int, async_comm: bool) -> None:
    use = steady_use(stages, turns, async_comm)
    # Between two numbers of tokens that are a whole number of repetitions apart, once filling is over.
    period = use.numerator * stages
    first, second = (
        makespan(time_generation(stages, turns, 1, tokens, 1, 1, async_comm=async_comm)) for tokens in (2 * period, 4 * period)
    )
    assert Fraction(2 * period * turns, second - first) == use


def test_steady_use_drawn() -> None:
    drawn = {
        async_comm: [[str(steady_use(stages, turns, async_comm)) for turns in range(1, 9)] for stages in (2, 3, 4)]
        for async_comm in (False, True)
    }
    assert drawn == {
        False: [
            ["0", "1", "0", "0", "0", "0", "0", "0"],
            ["0", "1/2", "1", "0", "0", "0", "0", "0"],
            ["0", "1/3", "2/3", "1", "0", "0", "0", "0"],
        ],
        True: [
            ["1/2", "1", "1/2", "0", "0", "0", "0", "0"],
            ["1/3", "2/3", "1", "2/3", "1/3", "0", "0", "0"],
            ["1/4", "1/2", "3/4", "1", "3/4", "1/2", "1/4", "0"],
        ],
    }


times = st.fractions(min_value=0, max_value=100, max_denominator=12)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), times, times, st.booleans())
def test_a_full_ring_takes_what_its_form_says(
    stages: int, rounds: int, tokens: int, one: Fraction, other: Fraction, async_comm: bool
) -> None:
    decode, prefill = sorted((one, other))
    run = time_generation(stages, stages, rounds, tokens, prefill, decode, async_comm=async_comm)
    assert makespan(run) == makespan_of_full_ring(stages, rounds, tokens, prefill, decode)
    busy = rounds * stages * (prefill + (tokens - 1) * decode)
    assert makespan(run) - busy == idle_of_full_ring(stages, rounds, tokens, prefill, decode)


@given(st.integers(1, 6), st.data(), st.integers(1, 4), st.integers(1, 6))
def test_an_asynchronous_ring_takes_what_its_form_says(stages: int, data: st.DataObject, rounds: int, tokens: int) -> None:
    turns = data.draw(st.integers(1, stages))
    run = time_generation(stages, turns, rounds, tokens, 1, 1, async_comm=True)
    assert makespan(run) == makespan_of_async_ring(stages, turns, rounds, tokens)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_messages_are_as_many_as_their_form_says(stages: int, rounds: int, tokens: int) -> None:
    run = time_generation(stages, stages, rounds, tokens, 1, 1)
    assert len(run.messages) == count_messages(stages, rounds * stages, tokens)
    sends = [(message.source, message.rank) for message in run.messages]
    closing = sends.count((stages - 1, 0)) if stages > 2 else None
    assert closing is None or closing == rounds * stages * (tokens - 1)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
def test_every_output_is_the_input_of_the_next_stage(stages: int, turns: int, rounds: int, tokens: int) -> None:
    """What a stage sends and what its successor receives are the same jobs in the same order, whatever the setting."""
    jobs = plan_jobs(rounds * turns, turns, tokens)
    assert sorted(jobs) == sorted(product(range(rounds * turns), range(tokens)))
    steps = [list(plan_steps(stage, stages, jobs, tokens)) for stage in range(stages)]
    for stage in range(stages):
        assert [step.compute for step in steps[stage] if step.compute] == jobs
        sent = [step.send for step in steps[stage] if step.send]
        received = [step.receive for step in steps[(stage + 1) % stages] if step.receive]
        if stage < stages - 1:
            assert sent == received
        else:  # the token that closes the ring belongs to the next job of its batch
            assert [(job.batch, job.token + 1) for job in sent] == received
    for before, after in zip(steps[0], steps[0][1:], strict=False):
        assert after.send is None or after.send == before.compute


@pytest.mark.parametrize(
    ("stages", "turns", "async_comm", "words"),
    [
        (4, 5, False, ("must be 2 to 4 with 4 stages and synchronous messages, got 5", "Use 4, or async_comm=True.")),
        (4, 1, False, ("must be 2 to 4 ", "got 1: stage 0 receives before it sends", "Use 2, or async_comm=True.")),
        (2, 1, False, ("must be 2 with 2 stages", "Use 2, or async_comm=True.")),
        (4, 8, False, ("got 8", "Use 4.")),
        (4, 8, True, ("must be 1 to 7 with 4 stages and asynchronous messages, got 8", "Use 7.")),
    ],
)
def test_a_ring_that_never_ends_is_refused_with_the_nearest_that_does(
    stages: int, turns: int, async_comm: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(ScheduleError) as refused:
        check_can_finish(stages, turns, num_tokens=2, async_comm=async_comm)
    assert [word for word in words if word not in str(refused.value)] == []
    check_can_finish(stages, turns, num_tokens=1, async_comm=async_comm)  # a single token never goes round


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "4"])
def test_numbers_must_be_numbers(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"num_inner_iterations must be an integer of 1 or more, got "):
        steady_use(4, wrong)
    with pytest.raises(ArgumentError, match="num_tokens must be"):
        check_can_finish(4, 4, wrong)


def test_forms_say_where_they_do_not_hold() -> None:
    with pytest.raises(ArgumentError, match="decode must be at most prefill, 1, got 2"):
        idle_of_full_ring(4, 1, 5, prefill=1, decode=2)
    with pytest.raises(ArgumentError, match="at most num_stages, 4, got 5"):
        makespan_of_async_ring(4, 5, 1, 5)


@given(st.integers(1, 40), st.integers(1, 6), st.none() | st.integers(1, 8))
def test_batches_hold_every_prompt_in_full_rounds(prompts: int, turns: int, size: int | None) -> None:
    batches = plan_batches(prompts, turns, size)
    assert len(batches) % turns == 0
    assert all(batches)
    assert size is None or max(map(len, batches)) <= size
    own = [number for batch in batches for number in batch]
    assert own[:prompts] == list(range(prompts))
    assert set(own[prompts:]) <= {0}
    if prompts >= len(batches):
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        assert len(own) == prompts
