"""What the demonstration learns from."""

from __future__ import annotations

from importlib.resources import files

import torch

from ringsim.cli.demo import BATCH, LENGTH, NUM_MICROBATCHES, expected_losses, make_task

DATA = files("ringsim") / "data"


def test_targets_are_the_letters_after_the_inputs() -> None:
    task = make_task()
    text = (DATA / "sonnets.txt").read_text()
    inputs, targets = task.microbatches(step=3)
    assert len(inputs) == len(targets) == NUM_MICROBATCHES
    for tokens, target in zip(inputs, targets, strict=True):
        assert tokens.shape == target.shape == (BATCH, LENGTH)
        for row, next_row in zip(tokens.tolist(), target.tolist(), strict=True):
            assert task.decode([row[0], *next_row]) in text
            assert row[1:] == next_row[:-1]
    assert task.encode(text) == task.text.tolist()


def test_each_step_draws_its_own_the_same_everywhere() -> None:
    task, elsewhere = make_task(), make_task()
    steps = [torch.stack(task.microbatches(step)[0]) for step in range(3)]
    assert [torch.equal(one, torch.stack(elsewhere.microbatches(step)[0])) for step, one in enumerate(steps)] == [True] * 3
    assert not torch.equal(steps[0], steps[1])
    for mine, other in zip(task.model.parameters(), elsewhere.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_one_process_learns() -> None:
    losses = expected_losses(num_steps=8)
    assert abs(losses[0] - torch.tensor(len(make_task().letters)).log()) < 0.5  # it knows nothing yet: all letters are as likely
    assert losses[-1] < losses[0] - 0.8


def test_the_text_is_small_and_says_where_it_is_from() -> None:
    text, source = (DATA / "sonnets.txt").read_text(), (DATA / "README.md").read_text()
    assert len(text) < 100_000
    assert text.isascii()
    assert "Gutenberg" not in text  # its name goes with a licence of its own
    assert all(word in source for word in ("Shakespeare", "Gutenberg", "public domain"))
    assert text.count("\n\n") == 2 * 154  # a numeral before each sonnet, and the title before all
