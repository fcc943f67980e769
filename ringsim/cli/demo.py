"""``ringsim demo`` and ``ringsim generate``, with the programs that they run on the ranks.

``worker`` trains a small transformer, split into stages, to write like Shakespeare's sonnets, one
letter at a time. ``generation_worker`` generates tokens on a ring of stages with a small
transformer whose layers are slowed down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import ringsim
from ringsim.cli.verb import (
    Verbs,
    add_flag,
    add_out,
    add_ranks,
    add_verb,
    make_directory,
    save_trace,
    write_picture,
    write_pictures,
)
from ringsim.errors import ArgumentError, RingError
from ringsim.schedules.generation import (
    can_finish,
    check_can_finish,
    count_messages,
    steady_use,
    time_generation,
)
from ringsim.traces.steps import StageUse, measure_stage_use
from ringsim.traces.units import count

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ringsim.pipeline.transformer import SmallTransformer
    from ringsim.traces.value import Trace

# the number of steps repeated in one process; over so few, rounding errors stay small
CHECKED_STEPS, TOLERANCE = 3, 1e-3
_RANKS = "number of ranks, with one stage each (default: 4)"


def add_demo(verbs: Verbs) -> None:
    """Adds the command."""
    help_text = (
        "split a small transformer into stages on real ranks, train it on Shakespeare's sonnets, "
        "and draw the recorded run"
    )
    parser = add_verb(verbs, "demo", help_text, "ringsim demo -n 4 -o demo", run_demo)
    add_ranks(parser, _RANKS, 4)
    add_out(parser, "DIR", "directory for the trace and the pictures (default: demo)", "demo")


def run_demo(options: argparse.Namespace) -> int:
    """Trains a model, compares its losses with those of a single process, and draws the run.

    Returns the exit code.
    """
    import torch

    from ringsim.pipeline import compare_losses

    make_directory(options.out)
    print(
        f"starting {count(options.ranks, 'rank')} in a ring (Gloo), each with one stage of the "
        "transformer ...",
        flush=True,
    )
    trace = ringsim.trace(worker, world_size=options.ranks)
    losses, lines = trace.results[0]
    torch.set_num_threads(1)  # as on the ranks
    expected = expected_losses(CHECKED_STEPS)
    if compare_losses(losses[:CHECKED_STEPS], expected, tolerance=TOLERANCE).first_step is not None:
        raise RingError(
            f"the ring and a single process computed different losses: {losses[:CHECKED_STEPS]} "
            f"and {expected}. Please report this."
        )
    print(
        f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}; the losses of the first {CHECKED_STEPS} "
        "steps are the same as in a single process. The model now writes:\n"
    )
    print("\n".join(f"    {line}" for line in lines))
    file = options.out / "run.ringtrace"
    print(f"\n{trace.summary()}\n")
    save_trace(trace, file)
    write_pictures(trace, options.out)
    print(f"\nto see this summary again, run: ringsim show {file}")
    return 0


def add_generate(verbs: Verbs) -> None:
    """Adds the command."""
    help_text = (
        "generate tokens on a ring of stages, and compare prefill with decode and different "
        "numbers of inner iterations"
    )
    parser = add_verb(
        verbs,
        "generate",
        help_text,
        "ringsim generate -n 4 --inner 4 --tokens 8 -o generation",
        run_generate,
    )
    add_ranks(parser, _RANKS, 4)
    parser.add_argument(
        "--inner",
        type=int,
        metavar="T",
        help="number of batches in the ring at the same time (default: the number of ranks)",
    )
    parser.add_argument(
        "--async",
        dest="async_comm",
        action="store_true",
        help="post the send and the receive of a step together",
    )
    parser.add_argument(
        "--tokens", type=int, default=8, help="tokens per prompt, at least 3 (default: 8)"
    )
    parser.add_argument(
        "--job-ms",
        type=float,
        default=10.0,
        metavar="MS",
        help="compute time of a stage per token, in ms (default: 10)",
    )
    add_flag(parser, "also measure other numbers of inner iterations", "--compare")
    add_out(
        parser,
        "DIR",
        "directory for the trace and the pictures (default: generation)",
        "generation",
    )


def run_generate(options: argparse.Namespace) -> int:
    """Generates tokens, compares them with those of a single process, and draws the run.

    Returns the exit code.
    """
    from ringsim.plot.charts import MeasuredUse, plot_inner_iterations

    num_stages = options.ranks
    turns = num_stages if options.inner is None else options.inner
    if options.tokens < 3 or num_stages < 2:
        raise ArgumentError(
            f"--tokens must be at least 3 and --ranks at least 2, got {options.tokens} and "
            f"{num_stages}. Increase them: with fewer, there is nothing to compare."
        )
    # before any rank starts
    check_can_finish(num_stages, turns, options.tokens, options.async_comm)
    make_directory(options.out)

    print(
        f"starting {count(num_stages, 'rank')} with one stage each; "
        f"{count(turns, 'inner iteration')} ...",
        flush=True,
    )
    trace = _generate(options, turns, options.async_comm)
    alone = ringsim.trace(
        generation_worker, world_size=1, args=(num_stages, options.tokens, turns, False, 0.0, 0.0)
    )
    if trace.results != alone.results * num_stages:
        raise RingError(
            "the ring and a single process generated different tokens. Please report this."
        )
    use = measure_stage_use(trace)
    print(_report(options, turns, trace, use))

    measured = [MeasuredUse(turns, options.async_comm, _mean_use(use))]
    others = _others(num_stages, turns, options.async_comm) if options.compare else []
    for setting in others:
        other = measure_stage_use(_generate(options, *setting))
        measured.append(MeasuredUse(*setting, _mean_use(other)))
        print(_line(num_stages, *measured[-1]), flush=True)

    file = options.out / "run.ringtrace"
    save_trace(trace, file)
    write_pictures(trace, options.out)
    axes = plot_inner_iterations(num_stages, measured, metadata=trace.metadata)
    write_picture(axes, options.out / "inner_iterations.png")
    return 0


def _generate(options: argparse.Namespace, turns: int, async_comm: bool) -> Trace:
    """Runs the demonstration; a prefill takes a stage twice as long as a decode."""
    decode_s = options.job_ms / 1000
    return ringsim.trace(
        generation_worker,
        world_size=options.ranks,
        args=(options.ranks, options.tokens, turns, async_comm, 2 * decode_s, decode_s),
    )


def _others(num_stages: int, turns: int, async_comm: bool) -> list[tuple[int, bool]]:
    """Returns the other settings with which the ring can finish, up to one turn more than stages.

    More turns would take too long.
    """
    return [
        (number, posted)
        for posted in (False, True)
        for number in range(1, num_stages + 2)
        if (number, posted) != (turns, async_comm) and can_finish(num_stages, number, posted)
    ]


def _report(options: argparse.Namespace, turns: int, trace: Trace, use: list[StageUse]) -> str:
    """Returns the measurements, along with the planned times for jobs of that length."""
    num_stages, num_tokens = options.ranks, options.tokens
    prefill = fmean(stage.prefill_s for stage in use)
    decode = fmean(stage.decode_s for stage in use)
    run = time_generation(
        num_stages, turns, 1, num_tokens, prefill, decode, async_comm=options.async_comm
    )
    due = max(times[-1][1] for times in run.times)
    took = use[0].idle_s + turns * (use[0].prefill_s + (num_tokens - 1) * use[0].decode_s)
    rows = [(f"stage {stage:>3}  {1e3 * row.prefill_s:>10.1f}  {1e3 * row.decode_s:>9.1f}  "
            f"{1e3 * row.idle_s:>7.0f}  {row.decode_use:>10.0%}")
            for stage, row in enumerate(use)]  # fmt: skip
    tokens = sum(len(row) for row in trace.results[0])
    return "\n".join(
        [
            "",
            "           prefill ms  decode ms  idle ms  decode use",
            *rows,
            "",
            f"first to last job: {took:.3f} s; with instant messages it would be {due:.3f} s",
            f"{tokens} tokens, {tokens / took:.0f} per second; "
            f"{count_messages(num_stages, turns, num_tokens)} messages with states and tokens",
            _line(num_stages, turns, options.async_comm, _mean_use(use)),
        ]
    )


def _line(num_stages: int, turns: int, async_comm: bool, use: float) -> str:
    kind = "asynchronous" if async_comm else "synchronous"
    due = float(steady_use(num_stages, turns, async_comm))
    return (
        f"{kind}, {count(turns, 'inner iteration')}: a stage works {use:.0%} of the time while "
        f"decoding; at most {due:.0%}"
    )


def _mean_use(use: list[StageUse]) -> float:
    return fmean(stage.decode_use for stage in use)


SCHEDULE = "1f1b"
NUM_LAYERS, HIDDEN, HEADS = 4, 64, 4
# microbatches per step, sequences per microbatch, letters per sequence
NUM_MICROBATCHES, BATCH, LENGTH = 8, 8, 32
NUM_STEPS = 40
PROMPTS = ("Shall I ", "My love ", "When in ", "Thy beaut")
TEMPERATURE = 0.5
REPORT_EVERY = 5  # steps


class DemoTask(NamedTuple):
    """The data and the model, which every rank creates identically.

    Attributes:
        letters: the alphabet; letter *i* has the token id *i*.
        text: the token ids of the sonnets, shape (number of letters,).
        model: the whole model; a rank trains its own stage of it.
        optimizer: the optimizer of all parameters; parameters of other stages have no gradient and
            stay unchanged.
    """

    letters: str
    text: Tensor
    model: SmallTransformer
    optimizer: Optimizer

    def microbatches(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Draws a step's training data from random places in the text.

        The same step number always draws the same data.

        Returns:
            The inputs and the targets (the following letters): token ids for each microbatch, shape
            (batch, letters).
        """
        import torch

        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(
            len(self.text) - LENGTH, (NUM_MICROBATCHES, BATCH, 1), generator=generator
        )
        windows = self.text[starts + torch.arange(LENGTH + 1)]  # (microbatches, batch, letters + 1)
        return list(windows[..., :-1]), list(windows[..., 1:])

    def encode(self, words: str) -> list[int]:
        """Returns the token ids of a text."""
        return [self.letters.index(letter) for letter in words]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text for token ids."""
        return "".join(self.letters[token] for token in token_ids)


def make_task() -> DemoTask:
    """Reads the sonnets and creates the model, on each rank separately.

    Example:
        >>> task = make_task()
        >>> task.decode(task.text[39:71].tolist())
        'From fairest creatures we desire'
    """
    import torch

    from ringsim.pipeline.transformer import SmallTransformer

    text = (files("ringsim") / "data" / "sonnets.txt").read_text()
    letters = "".join(sorted(set(text)))
    place = {letter: index for index, letter in enumerate(letters)}
    torch.manual_seed(0)
    model = SmallTransformer(len(letters), HIDDEN, NUM_LAYERS, HEADS, max_length=2 * LENGTH)
    return DemoTask(
        letters,
        torch.tensor([place[letter] for letter in text]),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
    )


def worker(num_steps: int = NUM_STEPS) -> tuple[list[float], list[str]]:
    """Trains the model, then writes a few lines of text.

    Every rank of a ring calls this worker; rank 0 prints the progress.

    Args:
        num_steps: the number of training steps, at least 1.

    Returns:
        The loss of each step (the model's average surprise at a letter, in nats), and a line for
        each of ``PROMPTS``. Both are identical on every rank.
    """
    import torch

    from ringsim.pipeline import generate, train_step_pipeline

    torch.set_num_threads(1)  # with tensors this small, several threads are slower than one
    task = make_task()
    losses = []
    for step in range(num_steps):
        inputs, targets = task.microbatches(step)
        task.optimizer.zero_grad()
        losses.append(train_step_pipeline(task.model, inputs, targets, schedule=SCHEDULE))
        task.optimizer.step()
        if step % REPORT_EVERY == 0 or step == num_steps - 1:
            print(
                f"step {step + 1:>3} of {num_steps}   loss {losses[-1]:.3f}  "
                f"{'#' * round(10 * losses[-1])}",
                flush=True,
            )
    prompts = [task.encode(prompt) for prompt in PROMPTS]
    written = generate(
        task.model, prompts, LENGTH, temperature=TEMPERATURE, stop_tokens=task.encode("\n")
    )
    return losses, [
        prompt + task.decode(tokens).rstrip()
        for prompt, tokens in zip(PROMPTS, written, strict=True)
    ]


def expected_losses(num_steps: int) -> list[float]:
    """Computes the losses of the first steps in a single process, without a pipeline."""
    from ringsim.pipeline import single_process_step

    task = make_task()
    losses = []
    for step in range(num_steps):
        loss, gradients = single_process_step(task.model, *task.microbatches(step))
        for name, parameter in task.model.named_parameters():
            parameter.grad = gradients[name]
        task.optimizer.step()
        losses.append(loss)
    return losses


def generation_worker(
    num_layers: int,
    num_tokens: int,
    num_inner_iterations: int,
    async_comm: bool,
    prefill_s: float,
    decode_s: float,
) -> list[list[int]]:
    """Generates tokens with a random model, from two prompts of 5 to 8 tokens per batch.

    Every rank of a ring calls this worker. After its work, each layer sleeps for the time that a
    larger layer would compute. A sleeping rank needs no core, so you can observe many stages on few
    cores.

    Args:
        num_layers: the number of layers; one per stage if it equals the number of stages.
        num_tokens: the number of tokens per prompt.
        num_inner_iterations: the number of batches in the ring at the same time.
        async_comm: whether a step's send and receive are posted together.
        prefill_s: how long a layer sleeps after reading prompts, in seconds.
        decode_s: how long a layer sleeps after one token, in seconds.
    """
    import torch

    from ringsim.pipeline import generate
    from ringsim.pipeline.transformer import SmallTransformer

    def rest(_layer: Any, _inputs: Any, hidden: Tensor) -> None:
        time.sleep(prefill_s if hidden.shape[1] > 1 else decode_s)

    torch.manual_seed(0)
    model = SmallTransformer(128, hidden_size=32, num_layers=num_layers, num_heads=4)
    for block in model.blocks:
        block.register_forward_hook(rest)
    prompts = [
        list(range(2 + number, 7 + number + number % 4))
        for number in range(2 * num_inner_iterations)
    ]
    return generate(model, prompts, num_tokens, num_inner_iterations, async_comm)
