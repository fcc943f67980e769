"""Generates text with a model that is split into stages: the token ring.

Each stage keeps its layers, and the keys and values of earlier tokens. Hidden states go forward
from stage to stage. The last stage chooses the next token and returns it to the first stage over
the edge that closes the ring::

    prompts -> stage 0 --hidden--> stage 1 --hidden--> stage 2 -> token
                  ^                                               |
                  +--------------------- token -------------------+

A batch's first job reads its prompts (*prefill*), and each later job reads one token (*decode*).
While a token goes around the ring, the stages work on other batches: ``num_inner_iterations``
batches are in flight at a time. ``ringsim.schedules.generation`` computes the order of jobs and
messages, the settings with which the ring can finish, and the share of time in which stages work.

Prompts of different lengths are padded on the left, so that all rows end at the same place and
continue from there. Here are three prompts and two generated tokens (``seen`` = 2)::

    token ids           attention mask      position ids
    . . 7 9   4 1       0 0 1 1  1 1        0 0 0 1  2 3
    3 5 2 8   6 6       1 1 1 1  1 1        0 1 2 3  4 5
    . 5 5 1   2 0       0 1 1 1  1 1        0 0 1 2  3 4

Every stage knows the lengths of the prompts, so it computes masks and positions itself, and no rank
sends them.

The next token is the likeliest one, or is drawn at random. Each prompt has its own random numbers,
which depend only on the seed and the prompt's place in the list of prompts. Its tokens therefore do
not depend on the batches or on the number of stages.

Between two jobs, a stage exchanges messages with its two neighbours::

    pred --- hidden states, (batch, tokens, width) ---> this stage --- hidden states ---> succ
                                                       last stage --- tokens, (batch, 1) --> stage 0

All ranks have the same prompts, so each rank knows the shape of every message, except for the width
and dtype of the hidden states. A header announces these once on each edge. The header also carries
a fingerprint of the arguments, and the receiver answers with its own fingerprint. If the two
differ, both sides raise an error.

Source:
    FlexLLMGen (FMInference/FlexLLMGen, commit 004ffef), ``flexllmgen/dist_flex_opt.py``: the loop.
    Y. Sheng et al., "FlexGen: High-Throughput Generative Inference of Large Language Models with a
    Single GPU", 2023 (arXiv:2303.06865), section 4.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.compute_costs import charge
from ringsim.errors import ArgumentError, MessageMismatch, check_integer, say
from ringsim.pipeline.adapters import Adapter
from ringsim.pipeline.messages import (
    HEADER_TAG,
    BufferSpec,
    Header,
    Route,
    Transfer,
    find_ring,
    place_in,
)
from ringsim.pipeline.partition import partition_model
from ringsim.pipeline.stage import build_stages, count_stage_flops
from ringsim.ring import Ring
from ringsim.schedules.generation import (
    TokenJob,
    check_can_finish,
    plan_batches,
    plan_jobs,
    plan_steps,
)
from ringsim.traces.spans import span

_PADDING = 0  # any token, because the mask hides it


class PromptBatch:
    """A batch of prompts.

    Args:
        prompts: the token ids of each prompt. There must be at least one prompt, and at least one
            token in each prompt.
        device: the device of the tensors.

    Attributes:
        token_ids: the prompts, shape (batch, length), int64.

    Example:
        >>> batch = PromptBatch([[7, 9], [3, 5, 2]])
        >>> batch.token_ids.tolist()
        [[0, 7, 9], [3, 5, 2]]
        >>> batch.attention_mask(seen=0).tolist()
        [[0, 1, 1], [1, 1, 1]]
        >>> batch.position_ids(seen=0).tolist(), batch.position_ids(seen=1).tolist()
        ([[0, 0, 1], [0, 1, 2]], [[2], [3]])
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> None:
        length = max(len(prompt) for prompt in prompts)
        rows = [[_PADDING] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        self.token_ids = torch.tensor(rows, device=device)
        self._padded = torch.tensor([length - len(prompt) for prompt in prompts], device=device)

    def attention_mask(self, seen: int) -> torch.Tensor:
        """Returns 1 for tokens and 0 for padding, shape (batch, length + seen), int64.

        Args:
            seen: the number of generated tokens that the model has read since the prompts.
        """
        return (self._count_from_start(seen) >= 0).long()

    def position_ids(self, seen: int) -> torch.Tensor:
        """Returns the position of each token in the next input, int64.

        The shape is (batch, length) for the prompts, and (batch, 1) after that.

        Args:
            seen: the number of tokens generated since the prompts, including the token to be read
                next, or 0 for the prompts.
        """
        positions = self._count_from_start(seen).clamp(min=0)
        return positions[:, -1:] if seen else positions

    def _count_from_start(self, seen: int) -> torch.Tensor:
        """Returns the distance of each place from the first token of its row."""
        places = torch.arange(self.token_ids.shape[1] + seen, device=self.token_ids.device)
        return places - self._padded[:, None]


class TokenChoice:
    """Chooses the next token for each prompt in a batch.

    Args:
        prompt_numbers: for each prompt in the batch, its index in the list of all prompts.
        temperature: 0 for the likeliest token. Otherwise, the logits are divided by the
            temperature, and a token is drawn; 1 uses the model's own probabilities, and lower
            values sharpen them.
        seed: the seed of the random numbers.

    Example:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]])
        >>> TokenChoice([0, 1])(logits).tolist()
        [[1], [0]]
        >>> both, second = (
        ...     TokenChoice([0, 1], temperature=1.0, seed=5),
        ...     TokenChoice([1], temperature=1.0, seed=5),
        ... )
        >>> all(both(logits)[1:].equal(second(logits[1:])) for _ in range(20))
        True
    """

    def __init__(
        self, prompt_numbers: Sequence[int], temperature: float = 0.0, seed: int = 0
    ) -> None:
        self._temperature = temperature
        self._generators = [
            # combine two numbers into one seed, so that the numbers of neighbours are independent
            torch.Generator().manual_seed(random.Random(f"{seed}/{number}").getrandbits(63))
            for number in prompt_numbers
        ]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the chosen tokens, shape (batch, 1), int64, on the device of the logits.

        Args:
            logits: the logits, shape (batch, vocabulary).
        """
        if self._temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        chances = torch.softmax(logits.double().cpu() / self._temperature, dim=-1)
        rows = [
            torch.multinomial(row, 1, generator=own)
            for row, own in zip(chances, self._generators, strict=True)
        ]
        return torch.stack(rows).to(logits.device)


class GenerationLink:
    """One stage's two edges in the ring, for one call to ``generate``.

    A ring with only one rank exchanges nothing.

    Args:
        ring: this rank's ring.
        fingerprint: a number computed from all the arguments that must be the same on all ranks.
        async_comm: whether to post a step's send and receive together instead of one after the
            other.
        device: the device of received tensors.
    """

    def __init__(
        self, ring: Ring, fingerprint: int, *, async_comm: bool, device: torch.device
    ) -> None:
        first, last = ring.ranks[0], ring.ranks[-1]
        self._rank = ring.rank
        self._is_first, self._is_last = ring.rank == first, ring.rank == last
        self._ends_at_succ = ring.succ == last
        self._from_pred, self._to_succ = Route.to_pred(ring), Route.to_succ(ring)
        self._fingerprint = fingerprint
        self._async_comm = async_comm
        self._device = device
        # The closing edge needs no announcement, because it carries token ids.
        self._has_announced = self._is_last
        self._arriving = BufferSpec((), torch.int64) if self._is_first else None

    def exchange(self, output: Tensor | None, input_shape: tuple[int, int] | None) -> Tensor | None:
        """Sends the last job's output to the successor, and receives the next job's input.

        Every stage must call this method once per step, in the order of the plan. It blocks until
        both messages have arrived. The first stage gets token ids of shape ``input_shape``, (batch,
        tokens), and the other stages get hidden states. The result is None if there is nothing to
        receive. The method raises MessageMismatch if a neighbour has different arguments.
        """
        if output is not None and not self._has_announced:
            self._announce(output)
        expected = None if input_shape is None else self._expect(input_shape)
        # A wait for a send ends when the other side receives. Stage 0 therefore receives first: if
        # all stages sent first, no stage would ever receive.
        sends_first = self._async_comm or not self._is_first
        sent = received = None
        for sends in (sends_first, not sends_first):
            if sends and output is not None:
                sent = self._begin(self._to_succ.isend(output))
            elif not sends and expected is not None:
                received = self._begin(self._from_pred.irecv(expected))
        if sent is not None:
            sent.wait()
        return None if received is None else received.wait().to(self._device)

    def share_results(self, tokens: Tensor) -> Tensor:
        """Passes the last stage's tokens, shape (prompts, tokens), to every stage.

        The tokens travel once around the ring. Every stage must call this method, which blocks
        until the tokens have arrived.
        """
        if not self._is_last:
            tokens = self._from_pred.irecv(BufferSpec.of(tokens)).wait()
        if not self._ends_at_succ:
            self._to_succ.isend(tokens).wait()
        return tokens

    def _begin(self, posted: Transfer) -> Transfer:
        """Waits for a message, unless a step's two messages are posted together."""
        if not self._async_comm:
            posted.wait()
        return posted

    def _announce(self, hidden: Tensor) -> None:
        """Sends the shape of the hidden states to the successor, and checks the answer."""
        card = Header("activation", 0, BufferSpec.of(hidden), alike=True, digest=self._fingerprint)
        self._to_succ.isend(card.pack(), HEADER_TAG).wait()
        self._compare(Header.unpack(self._to_succ.irecv_header().wait()), self._to_succ.peer)
        self._has_announced = True

    def _expect(self, shape: tuple[int, int]) -> BufferSpec:
        """Returns the shape of the next message.

        The first call waits for the predecessor's announcement and answers it.
        """
        if self._arriving is None:
            card = Header.unpack(self._from_pred.irecv_header().wait())
            self._from_pred.isend(
                Header("greeting", 0, digest=self._fingerprint).pack(), HEADER_TAG
            ).wait()
            self._compare(card, self._from_pred.peer)
            self._arriving = card.payload._replace(shape=card.payload.shape[2:])
        return self._arriving._replace(shape=(*shape, *self._arriving.shape))

    def _compare(self, card: Header, peer: int) -> None:
        if card.digest != self._fingerprint:
            raise MessageMismatch(
                f"ranks {peer} and {self._rank} called generate with different arguments. "
                "Pass the same prompts and settings on every rank."
            )


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_inner_iterations: int | None = None,
    async_comm: bool = False,
    *,
    batch_size: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    partition: str | Sequence[int] | Sequence[range] = "count",
    adapter: Adapter | None = None,
) -> list[list[int]]:
    """Continues prompts with a model that is split into one stage per rank.

    Every rank of the ring must call this function with the same arguments. The function blocks
    until all tokens are generated. If there is neither a ring nor a default process group, the
    function runs in this process only. The tokens are the same as in a single process.

    A batch continues to the last token even if all of its prompts have stopped, so that every rank
    knows which messages to expect.

    Args:
        model: the whole model, the same on every rank; it runs in ``eval`` mode.
        prompts: the token ids of each prompt; prompts may differ in length.
        max_new_tokens: the number of tokens to generate for each prompt, at least 1.
        num_inner_iterations: the number of batches in flight, or None for the number of stages,
            which keeps all stages busy.
        async_comm: whether to post a step's send and receive together. Otherwise, a stage posts
            them one after the other, and stage 0 receives first.
        batch_size: the largest number of prompts in a batch, or None to process all prompts in one
            round.
        temperature: 0 to choose the likeliest tokens. Otherwise, tokens are drawn, with the logits
            divided by the temperature.
        seed: the seed for drawing tokens. Each prompt has its own random numbers, so its tokens do
            not depend on batches or stages.
        stop_tokens: the tokens at which a prompt's continuation ends.
        partition: "count", "parameters", the number of layers in each stage, or ranges from
            ``partition_model``.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The new tokens of each prompt, on every rank. Each prompt yields ``max_new_tokens`` tokens,
        or fewer if generation ends early with a stop token.

    Raises:
        ScheduleError: the ring can never finish with these settings. The error is raised before
            anything is sent and names the nearest settings that work.
        ArgumentError: an argument is invalid.
        MessageMismatch: the arguments differ between ranks.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import SmallTransformer
        >>> def worker():
        ...     torch.manual_seed(1)
        ...     model = SmallTransformer(vocab_size=50, hidden_size=16, num_layers=4)
        ...     return generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=4)
        >>> two, one = (ringsim.trace(worker, world_size=size).results[0] for size in (2, 1))
        >>> two == one, [len(tokens) for tokens in two]
        (True, [4, 4])

    Source:
        FlexLLMGen's ``generation_loop_normal``.
    """
    ring = find_ring()
    in_turn = len(ring.ranks) if num_inner_iterations is None else num_inner_iterations
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    if not prompts or not all(prompts):
        raise ArgumentError(
            "prompts must contain at least one prompt, and each prompt at least one token, got "
            f"{say(prompts)}. For an empty prompt, pass the model's start token."
        )
    check_integer(
        "max_new_tokens",
        max_new_tokens,
        1,
        "Pass the number of tokens to generate for each prompt.",
    )
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1, "Omit it to process all prompts in one round.")
    if not temperature >= 0:
        raise ArgumentError(
            f"temperature must be non-negative, got {temperature}. Use 0 for the likeliest token."
        )
    check_can_finish(len(ring.ranks), in_turn, max_new_tokens, async_comm)
    batches = plan_batches(len(prompts), in_turn, batch_size)
    choices = [TokenChoice(batch, temperature, seed) for batch in batches]
    cut = partition_model(model, len(ring.ranks), by=partition, adapter=adapter)
    work = _StageWork(
        model,
        cut,
        place_in(ring),
        adapter,
        [[prompts[i] for i in batch] for batch in batches],
        choices,
        in_turn,
    )
    asked = [prompts, max_new_tokens, in_turn, async_comm, batch_size, cut]
    link = GenerationLink(
        ring, zlib.crc32(repr(asked).encode()), async_comm=async_comm, device=work.device
    )
    output: Tensor | None = None
    with torch.no_grad(), _evaluating(model):
        for step in plan_steps(
            work.place, len(cut), plan_jobs(len(batches), in_turn, max_new_tokens), max_new_tokens
        ):
            received = link.exchange(
                output if step.send else None,
                work.input_shape(step.receive) if step.receive else None,
            )
            output = work.compute(step.compute, received) if step.compute else None
    rows = link.share_results(work.chosen_tokens(len(prompts), max_new_tokens, batches))
    return [_until_stop(tokens, stop_tokens) for tokens in rows.tolist()]


class _StageWork:
    """The computations of one stage.

    An object holds the stage's part of the model and, for each batch, the prompts, the cache and,
    on the last stage, the tokens.
    """

    def __init__(
        self, model: nn.Module, cut: list[range], place: int, adapter: Adapter | None,
        batches: list[list[Sequence[int]]],
        choices: list[TokenChoice], in_turn: int,
    ) -> None:  # fmt: skip
        self.device = next(model.parameters()).device
        self.place = place
        self._model = model
        self._stage = build_stages(model, cut, adapter=adapter)[place]
        self._batches = [PromptBatch(batch, self.device) for batch in batches]
        self._choices = choices
        self._caches: list[Any] = [None] * in_turn  # of the batches in flight
        self._tokens: list[list[Tensor]] = [[] for _ in batches]  # each shape (batch, 1)

    def input_shape(self, job: TokenJob) -> tuple[int, int]:
        """Returns the shape of a job's input, (batch, tokens)."""
        rows, length = self._batches[job.batch].token_ids.shape
        return rows, length if job.token == 0 else 1

    def compute(self, job: TokenJob, received: Tensor | None) -> Tensor:
        """Runs a job.

        Returns hidden states or, on the last stage, the chosen tokens, shape (batch, 1).
        """
        batch, turn = self._batches[job.batch], job.batch % len(self._caches)
        if job.token == 0:
            self._caches[turn] = self._stage.adapter.cache(self._model)
        if received is not None:
            x = received
        else:  # the first stage reads prompts, and a single stage also reads its own tokens
            x = batch.token_ids if job.token == 0 else self._tokens[job.batch][-1]
        with span(job.name, stage=self.place, microbatch=job.batch):
            y: Tensor = self._stage(
                x,
                batch.attention_mask(job.token),
                batch.position_ids(job.token),
                self._caches[turn],
            )
            if self._stage.is_last:
                y = self._choices[job.batch](y[:, -1])
                self._tokens[job.batch].append(y)
            so_far = batch.token_ids.shape[1] + job.token
            charge("F", self.place, job.batch, lambda: count_stage_flops(self._stage, x, so_far))
        return y

    def chosen_tokens(self, num_prompts: int, num_tokens: int, batches: list[list[int]]) -> Tensor:
        """Returns the tokens of all prompts, in prompt order, shape (prompts, tokens), int64.

        The tokens are zeros on all stages except the last.
        """
        rows = torch.zeros(num_prompts, num_tokens, dtype=torch.int64)
        for prompt_numbers, tokens in zip(batches, self._tokens, strict=True):
            if tokens:
                rows[prompt_numbers] = torch.cat(tokens, dim=1).cpu()
        return rows


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts all modules into ``eval`` mode and restores each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _until_stop(tokens: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """Cuts off the tokens after the first stop token.

    Example:
        >>> _until_stop([5, 7, 9, 7], [7, 8])
        [5, 7]
    """
    ends = [place for place, token in enumerate(tokens) if token in stop_tokens]
    return tokens[: ends[0] + 1] if ends else tokens
