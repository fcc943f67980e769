"""The messages of a generation ring: what a stage exchanges with its two neighbours between one job and the next.

::

    pred --- hidden states, (batch, tokens, width) ---> this stage --- hidden states ---> succ
                                                        last stage --- tokens, (batch, 1) ---> stage 0

All ranks were told the same prompts, so every one knows the shape of each message, but for the width and the dtype of hidden states: a
header announces these, once on each edge. It also carries a fingerprint of what was asked for, and is answered with the receiver's. Where
two neighbours were asked for different things both raise, instead of taking one message for another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringsim.errors import MessageMismatch
from ringsim.pipeline.headers import Header, Payload
from ringsim.pipeline.routes import HEADER_TAG, Route
from ringsim.ring import Ring

__all__ = ["GenerationLink"]


class GenerationLink:
    """One stage's two ends of the ring, for one call of ``generate``.

    Args:
        ring: this rank's ring; in a ring of one there is nothing to exchange.
        fingerprint: a number made of all that the ranks must have been told alike.
        async_comm: whether to post a step's send and receive together; else one after the other.
        device: where what is received shall be.
    """

    def __init__(self, ring: Ring, fingerprint: int, *, async_comm: bool, device: torch.device) -> None:
        here, size = ring.ranks.index(ring.rank), len(ring.ranks)
        self._rank = ring.rank
        self._is_first, self._is_last = here == 0, here == size - 1
        self._ends_at_succ = (here + 1) % size == size - 1
        self._from_pred = Route.over_edge(ring, (here - 1) % size, here)
        self._to_succ = Route.over_edge(ring, here, (here + 1) % size)
        self._fingerprint = fingerprint
        self._async_comm = async_comm
        self._device = device
        # The closing edge needs no announcement: it carries token ids.
        self._has_announced = self._is_last
        self._arriving = Payload((), torch.int64) if self._is_first else None

    def exchange(self, output: Tensor | None, input_shape: tuple[int, int] | None) -> Tensor | None:
        """Sends the output of the last job to the successor, and receives the input of the next one from the predecessor.

        Every stage calls it once a step, in the order of the plan. It blocks until both messages have arrived.

        Args:
            output: what to send; None for nothing.
            input_shape: (batch, tokens) of what to receive; None for nothing.

        Returns:
            What was received: token ids of that shape on the first stage, else hidden states, shape (batch, tokens, width).

        Raises:
            MessageMismatch: a neighbour was asked for something else.
        """
        if output is not None and not self._has_announced:
            self._announce(output)
        expected = None if input_shape is None else self._expect(input_shape)
        if self._async_comm:
            received = self._post_both(output, expected)
        else:
            received = self._one_after_the_other(output, expected)
        return None if received is None else received.to(self._device)

    def share_results(self, tokens: Tensor) -> Tensor:
        """Brings the last stage's tokens to all others, once round the ring. Every stage calls it at the end; it blocks.

        Args:
            tokens: the tokens of all prompts, shape (prompts, tokens), int64; on other stages anything of that shape.

        Returns:
            The last stage's.
        """
        if not self._is_last:
            tokens = self._from_pred.irecv(Payload.of(tokens)).wait()
        if not self._ends_at_succ:
            self._to_succ.isend(tokens).wait()
        return tokens

    def _one_after_the_other(self, output: Tensor | None, expected: Payload | None) -> Tensor | None:
        """A send ends when the other side receives. Stage 0 receives first: if all sent first, nobody would ever receive."""
        received = self._receive(expected) if self._is_first else None
        if output is not None:
            self._to_succ.isend(output).wait()
        return received if self._is_first else self._receive(expected)

    def _receive(self, expected: Payload | None) -> Tensor | None:
        return None if expected is None else self._from_pred.irecv(expected).wait()

    def _post_both(self, output: Tensor | None, expected: Payload | None) -> Tensor | None:
        """Nobody waits before both are posted, so it does not matter who begins."""
        sent = None if output is None else self._to_succ.isend(output)
        received = None if expected is None else self._from_pred.irecv(expected)
        if sent is not None:
            sent.wait()
        return None if received is None else received.wait()

    def _announce(self, hidden: Tensor) -> None:
        """Tells the successor what hidden states are like, and takes its answer."""
        card = Header("activation", 0, Payload.of(hidden), alike=True, digest=self._fingerprint)
        self._to_succ.isend(card.pack(), HEADER_TAG).wait()
        self._compare(Header.unpack(self._to_succ.irecv_header().wait()), self._to_succ.peer)
        self._has_announced = True

    def _expect(self, shape: tuple[int, int]) -> Payload:
        """Returns what the next message is like; the first one waits for the predecessor's announcement, and answers it."""
        if self._arriving is None:
            card = Header.unpack(self._from_pred.irecv_header().wait())
            self._from_pred.isend(Header("greeting", 0, digest=self._fingerprint).pack(), HEADER_TAG).wait()
            self._compare(card, self._from_pred.peer)
            self._arriving = card.payload._replace(shape=card.payload.shape[2:])
        return self._arriving._replace(shape=(*shape, *self._arriving.shape))

    def _compare(self, card: Header, peer: int) -> None:
        if card.digest != self._fingerprint:
            raise MessageMismatch(
                f"the arguments of generate must be the same on all ranks, got others on rank {peer} than on rank {self._rank}. "
                "Pass the same prompts and settings everywhere."
            )
