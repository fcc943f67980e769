"""The roll-call: every rank says who it is before any of them builds anything that could hang.

Ranks that disagree (two of one number, other world sizes, one that never came) would make torch wait for half an hour, or run a smaller
world in silence. So each rank first puts a card into the store and waits for one verdict on all cards::

    rank                      store                         what it costs a rank
      |-- get "head" --------->|  rank 0's card               one wait
      |-- compare_set card/r ->|  mine, unless taken          one operation
      |-- add "count" -------->|  I am the n-th               one operation
      |      (the last one reads all cards and writes the verdict)
      |-- get "verdict" ------>|  who rings with whom, or why not

Whoever finds a fault, or runs out of time, writes the verdict instead. The first verdict stands, so every rank ends with the same words.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim.errors import RendezvousFailed

__all__ = ["Card", "LeftAlready", "RollCall", "find_fault", "in_words"]

_READERS_GRACE_S = 1.0  # a host that failed stays this long at most, for the others to read why, and for those that are just starting
_POLL_S = 0.005


class LeftAlready(Exception):
    """The store belongs to a ring that is being taken down; the next one is not there yet."""


@dataclass(frozen=True)
class Card:
    """What a rank says of itself at the roll-call.

    Attributes:
        world_size: how many ranks it expects.
        comm_device: "cpu" or "gpu".
        ring: the global ranks of its ring, in order.
        gpu: the GPU it uses, "" on the CPU.
        token: tells two processes of the same rank apart.
    """

    world_size: int
    comm_device: str
    ring: tuple[int, ...]
    gpu: str = ""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> str:
        """Returns the card as text for the store; a ring over all ranks in order is left out, to keep N cards short."""
        values = asdict(self)
        if self.ring == tuple(range(self.world_size)):
            values["ring"] = None
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: bytes) -> Card:
        """Returns the card that ``to_json`` wrote."""
        values = json.loads(text)
        ring = range(values["world_size"]) if values["ring"] is None else values["ring"]
        return cls(values["world_size"], values["comm_device"], tuple(ring), values["gpu"], values["token"])


def in_words(ranks: list[int]) -> str:
    """Names ranks in a sentence.

    Example:
        >>> in_words([]), in_words([2]), in_words([0, 1, 2, 5])
        ('no rank', 'rank 2', 'ranks 0-2, 5')
    """
    if not ranks:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def find_fault(cards: list[Card]) -> str | None:
    """Finds what is wrong with a full set of cards, or None.

    Args:
        cards: one for each rank, in order of ranks.

    Returns:
        The sentence that says what must hold and what was found, None where all is well.

    Example:
        >>> find_fault([Card(2, "cpu", (0, 1)), Card(2, "cpu", (0, 1))]) is None
        True
        >>> find_fault([Card(2, "cpu", (0, 1)), Card(2, "cpu", (1, 0))])
        'ring_ranks must be the same on every rank of a ring, got [0, 1] on rank 0 and [1, 0] on rank 1'
    """
    users: dict[str, int] = {}
    for rank, card in enumerate(cards):
        disagreement = _disagreement(cards[0], card, rank)
        if disagreement is not None:
            return disagreement
        if card.gpu and users.setdefault(card.gpu, rank) != rank:
            return f"a GPU must be used by one rank only, got ranks {users[card.gpu]} and {rank} on GPU {card.gpu}"
        for other in card.ring:
            if cards[other].ring != card.ring:
                return (
                    f"ring_ranks must be the same on every rank of a ring, got {list(card.ring)} on rank {rank} "
                    f"and {list(cards[other].ring)} on rank {other}"
                )
    return None


def _disagreement(head: Card, card: Card, rank: int) -> str | None:
    """Says what differs between rank 0's card and that of ``rank``, None where they agree."""
    for name in ("world_size", "comm_device"):
        if getattr(card, name) != getattr(head, name):
            return (
                f"{name} must be the same on every rank, got {getattr(head, name)!r} on rank 0 and {getattr(card, name)!r} on rank {rank}"
            )
    return None


class RollCall:
    """One rank's part in the roll-call over a store.

    Every rank of the world calls ``start``, ``finish`` and at the end ``leave``, in this order. The first two block until all ranks have
    called them.

    Args:
        store: the store that all ranks reach.
        rank: this rank.
        world_size: how many ranks it expects.
        hosts: the store lives in this process, so it must outlast the others' last look at it.
        reused: the store outlives the ring, so each roll-call on it needs keys of its own.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, hosts: bool, reused: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts = hosts
        self._expected = world_size  # the larger of this rank's and rank 0's, once known: the ranks that a message must name
        self._listed = False  # this process has this rank's number, and no other has it
        # All ranks take part in a roll-call before any can begin the next, so this count is the same number of full rounds on each of them.
        generation = (store.add("ringsim/arrivals", 1) - 1) // world_size if reused else 0
        self.store = PrefixStore(f"ringsim/{generation}", store)
        if not reused and self.store.add("left", 0) > 0:
            raise LeftAlready

    def start(self, card: Card, deadline: float) -> list[tuple[int, ...]]:
        """Meets all ranks and compares their cards.

        Args:
            card: what this rank says of itself.
            deadline: when to give up, on ``time.monotonic``'s clock.

        Returns:
            Every ring of this world, as its global ranks in order.

        Raises:
            RendezvousFailed: a rank is missing, there twice, or disagrees; the message names those present and those missing.
        """
        with self._connection():
            mine = card.to_json()
            if self.store.compare_set(f"start/{self.rank}", "", mine).decode() != mine:
                self._refuse("start", f"each rank must be there once, got two processes that say they are rank {self.rank}")
            self._listed = True
            if self.rank == 0:
                self.store.set("head", mine)
            elif not self._wait("head", deadline):
                self._refuse("start", "rank 0 must be there in time, got a time-out")
            head = Card.from_json(self.store.get("head"))
            self._expected = max(self.world_size, head.world_size)
            disagreement = _disagreement(head, card, self.rank)
            if disagreement is not None:
                self._refuse("start", disagreement)
            if self.store.add("start/count", 1) == self.world_size:
                cards = [Card.from_json(text) for text in self.store.multi_get([f"start/{rank}" for rank in range(self.world_size)])]
                fault = find_fault(cards)
                if fault is not None:
                    self._refuse("start", fault)
                self._publish("start", {"rings": sorted({each.ring for each in cards})})
            verdict = self._verdict("start", deadline)
        return [tuple(ring) for ring in verdict["rings"]]

    def finish(self, deadline: float, failure: str | None = None) -> None:
        """Waits until every rank has built its groups, so that none uses, or takes down, what another still needs.

        Args:
            deadline: when to give up, on ``time.monotonic``'s clock.
            failure: why this rank could not build its groups; the others then end with these words at once.

        Raises:
            RendezvousFailed: a rank failed, or did not come this far in time.
        """
        with self._connection():
            self.store.set(f"built/{self.rank}", "")
            if failure is not None:
                self._refuse("built", failure)
            if self.store.add("built/count", 1) == self.world_size:
                self._publish("built", {})
            self._verdict("built", deadline)

    def leave(self, limit_s: float) -> None:
        """Says that this rank is done with the store; the host stays until all are, at most ``limit_s`` seconds."""
        try:
            if self.store.add("left", 1) == self.world_size:
                self.store.set("all left", "")
            if self.hosts:
                self._wait("all left", time.monotonic() + limit_s)
        except RuntimeError:
            pass  # the store is gone already: nobody is left to tell

    @contextmanager
    def _connection(self) -> Iterator[None]:
        """Says in ringsim's words that the store was lost."""
        try:
            yield
        except RuntimeError as error:
            raise RendezvousFailed(
                f"rank 0 must stay until every rank has built its groups, got a lost connection ({self._where()}). See why rank 0 ended."
            ) from error

    def _where(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def _wait(self, key: str, deadline: float) -> bool:
        """Waits for a key and returns whether it came in time."""
        remaining = max(deadline - time.monotonic(), 0.001)
        try:
            self.store.wait([key], timedelta(seconds=remaining))
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            return False
        return True

    def _publish(self, stage: str, verdict: dict[str, Any]) -> dict[str, Any]:
        """Writes a verdict unless there is one, and returns the one that stands."""
        standing: dict[str, Any] = json.loads(self.store.compare_set(f"{stage}/verdict", "", json.dumps(verdict)))
        return standing

    def _verdict(self, stage: str, deadline: float) -> dict[str, Any]:
        """Waits for the verdict and returns it; raises where it is a refusal."""
        if self._wait(f"{stage}/verdict", deadline):
            verdict: dict[str, Any] = json.loads(self.store.get(f"{stage}/verdict"))
        else:
            here = self.store.add(f"{stage}/count", 0)
            why = "every rank must be there in time, got a time-out" + self._attendance(stage)
            verdict = self._publish(stage, {"error": why, "readers": here})
        if "error" in verdict:
            self._end(stage, verdict)
        return verdict

    def _attendance(self, stage: str) -> str:
        """Names the ranks that came this far and those that did not; asks N times, so only when all is lost."""
        present = [rank for rank in range(self._expected) if self.store.check([f"{stage}/{rank}"])]
        missing = [rank for rank in range(self._expected) if rank not in present]
        return f": {in_words(present)} present, {in_words(missing)} missing"

    def _refuse(self, stage: str, why: str) -> NoReturn:
        """Ends the roll-call for every rank with one reason, also for those on their way; where it ended well, for this rank alone."""
        refusal = {"error": why + self._attendance(stage), "readers": self._expected}
        standing = self._publish(stage, refusal)
        self._end(stage, standing if "error" in standing else refusal)

    def _end(self, stage: str, verdict: dict[str, Any]) -> NoReturn:
        """Raises; a host waits before that until those who are concerned, itself among them, could read the verdict."""
        if self._listed:
            read = self.store.add(f"{stage}/read", 1)
            give_up = time.monotonic() + _READERS_GRACE_S
            while self.hosts and read < verdict["readers"] and time.monotonic() < give_up:
                time.sleep(_POLL_S)
                read = self.store.add(f"{stage}/read", 0)
        raise RendezvousFailed(
            f"{verdict['error']} ({self._where()}). Start every rank once, with the same arguments but its own rank, within the time limit."
        )
