"""The programs of ``ringsim demo`` and ``ringsim generate``, which run on the ranks.

``worker`` trains a small transformer, cut into stages, to write like Shakespeare's sonnets, letter by letter. ``generation_worker``
generates tokens on a ring of stages with a small transformer whose layers take their time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringsim.pipeline.generation import generate
from ringsim.pipeline.reports import single_process_step
from ringsim.pipeline.training import train_step_pipeline
from ringsim.pipeline.transformer import SmallTransformer

__all__ = ["Learned", "Task", "expected_losses", "generation_worker", "make_model", "make_prompts", "make_task", "worker"]

SCHEDULE = "1f1b"
NUM_LAYERS, HIDDEN, HEADS = 4, 64, 4
NUM_MICROBATCHES, BATCH, LENGTH = 8, 8, 32  # of these: sequences a microbatch, letters a sequence
NUM_STEPS = 40
PROMPTS = ("Shall I ", "My love ", "When in ", "Thy beaut")
TEMPERATURE = 0.5
REPORT_EVERY = 5  # steps


class Task(NamedTuple):
    """What every rank makes for itself, the same on each.

    Attributes:
        letters: the alphabet: letter *i* has the token id *i*.
        text: the token ids of the sonnets, shape (letters of the text,).
        model: the whole model; a rank trains its own stage of it.
        optimizer: of all its parameters; those of other stages have no gradient, and stay.
    """

    letters: str
    text: Tensor
    model: SmallTransformer
    optimizer: torch.optim.Optimizer

    def microbatches(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Draws the training data of a step, from anywhere in the text.

        Args:
            step: number of the step; the same number draws the same data.

        Returns:
            The inputs and the targets, the letters after them: for each microbatch token ids, shape (batch, letters).
        """
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.text) - LENGTH, (NUM_MICROBATCHES, BATCH, 1), generator=generator)
        windows = self.text[starts + torch.arange(LENGTH + 1)]  # (microbatches, batch, letters + 1)
        return list(windows[..., :-1]), list(windows[..., 1:])

    def encode(self, words: str) -> list[int]:
        """Returns the token ids of a text."""
        return [self.letters.index(letter) for letter in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that token ids stand for."""
        return "".join(self.letters[token] for token in token_ids)


class Learned(NamedTuple):
    """What a rank returns.

    Attributes:
        losses: the loss of each step: how surprised the model is by a letter, on average (in nats).
        lines: what it writes at the end, one line for each of ``PROMPTS``.
    """

    losses: list[float]
    lines: list[str]


def make_task() -> Task:
    """Reads the sonnets and makes the model; each rank does so for itself.

    Example:
        >>> task = make_task()
        >>> task.decode(task.text[39:71].tolist())
        'From fairest creatures we desire'
    """
    text = (files("ringsim") / "data" / "sonnets.txt").read_text()
    letters = "".join(sorted(set(text)))
    place = {letter: index for index, letter in enumerate(letters)}
    torch.manual_seed(0)
    model = SmallTransformer(len(letters), HIDDEN, NUM_LAYERS, HEADS, max_length=2 * LENGTH)
    return Task(letters, torch.tensor([place[letter] for letter in text]), model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def worker(num_steps: int = NUM_STEPS) -> Learned:
    """Trains, then writes a few lines; every rank of a ring calls it, and rank 0 prints how it goes.

    Args:
        num_steps: how many steps to train, 1 or more.

    Returns:
        The losses and the lines, the same on every rank.
    """
    torch.set_num_threads(1)  # with tensors this small, several threads are slower than one
    task = make_task()
    losses = []
    for step in range(num_steps):
        inputs, targets = task.microbatches(step)
        task.optimizer.zero_grad()
        losses.append(train_step_pipeline(task.model, inputs, targets, schedule=SCHEDULE))
        task.optimizer.step()
        if step % REPORT_EVERY == 0 or step == num_steps - 1:
            print(f"step {step + 1:>3} of {num_steps}   loss {losses[-1]:.3f}  {'#' * round(10 * losses[-1])}", flush=True)
    prompts = [task.encode(prompt) for prompt in PROMPTS]
    written = generate(task.model, prompts, LENGTH, temperature=TEMPERATURE, stop_tokens=task.encode("\n"))
    return Learned(losses, [prompt + task.decode(tokens).rstrip() for prompt, tokens in zip(PROMPTS, written, strict=True)])


def expected_losses(num_steps: int) -> list[float]:
    """Computes the losses of the first steps in one process, without a pipeline.

    Args:
        num_steps: how many steps.

    Returns:
        The loss of each.
    """
    task = make_task()
    losses = []
    for step in range(num_steps):
        loss, gradients = single_process_step(task.model, *task.microbatches(step))
        for name, parameter in task.model.named_parameters():
            parameter.grad = gradients[name]
        task.optimizer.step()
        losses.append(loss)
    return losses


VOCABULARY = 128
PROMPTS_PER_BATCH = 2


def make_model(num_layers: int) -> SmallTransformer:
    """Returns the model, the same wherever it is made; its weights are random, and so are the tokens it generates."""
    torch.manual_seed(0)
    return SmallTransformer(VOCABULARY, hidden_size=32, num_layers=num_layers, num_heads=4)


def make_prompts(num_inner_iterations: int) -> list[list[int]]:
    """Returns prompts of 5 to 8 tokens for one round."""
    return [list(range(2 + number, 7 + number + number % 4)) for number in range(PROMPTS_PER_BATCH * num_inner_iterations)]


def generation_worker(
    num_layers: int, num_tokens: int, num_inner_iterations: int, async_comm: bool, prefill_s: float, decode_s: float
) -> list[list[int]]:
    """Generates; every rank of a ring calls it.

    Each layer rests after its work, for as long as a larger one would compute. A resting rank needs no core, so that many stages can be
    observed on few cores.

    Args:
        num_layers: layers of the model; as many as there are stages for one a stage.
        num_tokens: tokens for each prompt.
        num_inner_iterations: batches on their way at a time.
        async_comm: whether a step's send and receive are posted together.
        prefill_s: how long a layer rests after it has read prompts, in seconds.
        decode_s: the same for one token.
    """
    model = make_model(num_layers)
    for block in model.blocks:
        block.register_forward_hook(partial(_rest, prefill_s, decode_s))
    return generate(model, make_prompts(num_inner_iterations), num_tokens, num_inner_iterations, async_comm)


def _rest(prefill_s: float, decode_s: float, _layer: nn.Module, _inputs: Any, hidden: torch.Tensor) -> None:
    time.sleep(prefill_s if hidden.shape[1] > 1 else decode_s)
