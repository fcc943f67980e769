"""The roll-call over a store in this process, ranks as threads. Real ranks are in tests/distributed/test_rendezvous.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringsim.comm.bootstrap import Card, LeftAlready, RollCall, find_fault, in_words
from ringsim.errors import RendezvousFailed


@given(st.sets(st.integers(0, 200), min_size=1))
def test_in_words_names_exactly_these_ranks(ranks: set[int]) -> None:
    words = in_words(sorted(ranks)).removeprefix("ranks ").removeprefix("rank ")
    named: set[int] = set()
    for run in words.split(", "):
        first, _, last = run.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    assert named == ranks


@given(st.integers(1, 40), st.data())
def test_a_card_survives_its_text(world_size: int, data: st.DataObject) -> None:
    ring = data.draw(st.permutations(range(world_size)).map(lambda order: tuple(order[: max(1, world_size // 2)])))
    card = Card(world_size, "cpu", ring)
    assert Card.from_json(card.to_json().encode()) == card
    whole = Card(world_size, "gpu", tuple(range(world_size)), gpu="a name")
    assert Card.from_json(whole.to_json().encode()) == whole


@pytest.mark.parametrize(
    ("cards", "fault"),
    [
        ([Card(2, "cpu", (0, 1)), Card(2, "cpu", (0, 1))], None),
        ([Card(4, "cpu", (0, 2)), Card(4, "cpu", (1, 3)), Card(4, "cpu", (0, 2)), Card(4, "cpu", (1, 3))], None),
        ([Card(3, "cpu", (1, 0)), Card(3, "cpu", (1, 0)), Card(3, "cpu", (2,))], None),
        ([Card(2, "gpu", (0, 1), "A"), Card(2, "gpu", (0, 1), "B")], None),
        ([Card(2, "cpu", (0, 1)), Card(3, "cpu", (0, 1))], "world_size must be the same on every rank, got 2 on rank 0 and 3 on rank 1"),
        (
            [Card(2, "cpu", (0, 1)), Card(2, "gpu", (0, 1))],
            "comm_device must be the same on every rank, got 'cpu' on rank 0 and 'gpu' on rank 1",
        ),
        (
            [Card(2, "cpu", (0, 1)), Card(2, "cpu", (1,))],
            r"ring_ranks must be the same on every rank of a ring, got [0, 1] on rank 0 and [1] on rank 1",
        ),
        ([Card(2, "gpu", (0, 1), "A"), Card(2, "gpu", (0, 1), "A")], "a GPU must be used by one rank only, got ranks 0 and 1 on GPU A"),
    ],
)
def test_find_fault(cards: list[Card], fault: str | None) -> None:
    assert find_fault(cards) == fault


class CountingStore(dist.Store):
    """A store in this process that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.operations = 0

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.operations += 1
            self.values[key] = bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            self.operations += 1
            return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self.changed:
            self.operations += 1
            return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.operations += 1
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            self.changed.notify_all()
            return int(self.values[key])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self.changed:
            self.operations += 1
            if self.values.get(key, b"") == bytes(expected):
                self.values[key] = bytes(desired)
            self.changed.notify_all()
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            self.operations += 1
            return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any) -> None:
        with self.changed:
            self.operations += 1
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise dist.DistStoreError("timed out")

    def has_extended_api(self) -> bool:
        return True


def meet(parts: list[Callable[[], Any]], *, limit_s: float = 20) -> list[Any]:
    """Runs one part for each rank in threads; returns what each returned or raised."""
    ended: list[Any] = [None] * len(parts)

    def run(index: int) -> None:
        try:
            ended[index] = parts[index]()
        except Exception as error:
            ended[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "a rank never came back"
    return ended


def start(store: dist.Store, rank: int, card: Card, *, limit_s: float = 10, reused: bool = True) -> Any:
    return RollCall(store, rank, card.world_size, hosts=rank == 0, reused=reused).start(card, time.monotonic() + limit_s)


def starts(store: dist.Store, ranks: list[int], card: Card, **options: Any) -> list[Any]:
    """Starts these ranks with the same card but a token of their own."""
    cards = [replace(card, token=str(place)) for place in range(len(ranks))]
    return meet([lambda rank=rank, card=card: start(store, rank, card, **options) for rank, card in zip(ranks, cards, strict=True)])


def test_everybody_learns_of_every_ring() -> None:
    store = CountingStore()
    rings = [(0, 2), (3, 1)]
    cards = [Card(4, "cpu", rings[rank % 2]) for rank in range(4)]
    assert meet([lambda rank=rank: start(store, rank, cards[rank]) for rank in range(4)]) == [rings] * 4


def test_a_rank_asks_a_fixed_number_of_times() -> None:
    asked = {}
    for count in (2, 8, 64):
        store = CountingStore()
        starts(store, list(range(count)), Card(count, "cpu", tuple(range(count))))
        asked[count] = store.operations / count
    assert asked[64] <= asked[8] <= asked[2]


def test_one_store_serves_one_roll_call_after_another() -> None:
    store = CountingStore()
    for _ in range(3):
        assert starts(store, [0, 1, 2], Card(3, "cpu", (0, 1, 2))) == [[(0, 1, 2)]] * 3


def test_those_present_and_those_missing_are_named_with_the_same_words() -> None:
    ended = starts(CountingStore(), [0, 1, 4], Card(6, "cpu", tuple(range(6))), limit_s=0.3)
    assert {type(error) for error in ended} == {RendezvousFailed}
    for rank, error in zip([0, 1, 4], ended, strict=True):
        assert str(error).startswith(
            f"every rank must be there in time, got a time-out: ranks 0-1, 4 present, ranks 2-3, 5 missing (rank {rank} of 6)"
        )


def test_without_rank_0_the_others_name_it() -> None:
    ended = starts(CountingStore(), [1, 2], Card(3, "cpu", (0, 1, 2)), limit_s=0.3)
    assert ["ranks 1-2 present, rank 0 missing" in str(error) for error in ended] == [True, True]


def test_a_rank_that_comes_twice_ends_it_for_all() -> None:
    store = CountingStore()
    zero, one, other = (Card(3, "cpu", (0, 1, 2), token=str(place)) for place in range(3))

    def start_after_rank_0(card: Card) -> Any:
        store.wait(["ringsim/0/start/0"], timedelta(seconds=10))  # else who is present when the verdict falls is a matter of luck
        return start(store, 1, card)

    ended = meet([lambda: start(store, 0, zero), lambda: start_after_rank_0(one), lambda: start_after_rank_0(other)])
    assert ["two processes that say they are rank 1: ranks 0-1 present, rank 2 missing" in str(error) for error in ended] == [True] * 3


def test_a_rank_too_many_does_not_end_what_runs() -> None:
    store = CountingStore()
    card = Card(2, "cpu", (0, 1))
    assert starts(store, [0, 1], card, reused=False) == [[(0, 1)]] * 2
    late = starts(store, [1], Card(2, "cpu", (0, 1)), reused=False)[0]
    assert "two processes that say they are rank 1" in str(late)


@pytest.mark.parametrize(("odd", "size"), [(0, 3), (0, 5), (1, 3), (1, 5), (3, 5)])
def test_another_world_size_ends_it_for_all_and_names_it(odd: int, size: int) -> None:
    store = CountingStore()
    cards = [Card(size if rank == odd else 4, "cpu", (rank,)) for rank in range(4)]
    ended = meet([lambda rank=rank: start(store, rank, cards[rank], reused=False) for rank in range(4)])
    assert {type(error) for error in ended} == {RendezvousFailed}
    (words,) = {str(error).partition(":")[0] for error in ended}
    named = odd or int(words.rpartition(" ")[2])  # where rank 0 is the odd one, whoever came first is named
    assert (
        words
        == f"world_size must be the same on every rank, got {cards[0].world_size} on rank 0 and {cards[named].world_size} on rank {named}"
    )


def test_a_rank_that_cannot_build_ends_it_for_all() -> None:
    store = CountingStore()
    card = Card(3, "cpu", (0, 1, 2))

    def build(rank: int) -> Any:
        roll = RollCall(store, rank, 3, hosts=rank == 0, reused=False)
        roll.start(card, time.monotonic() + 10)
        return roll.finish(time.monotonic() + 10, "rank 2 must reach its peers, got no route" if rank == 2 else None)

    ended = meet([lambda rank=rank: build(rank) for rank in range(3)])
    assert ["rank 2 must reach its peers, got no route" in str(error) for error in ended] == [True] * 3


def test_who_asks_a_store_that_is_being_left_is_sent_away() -> None:
    store = CountingStore()
    card = Card(1, "cpu", (0,))
    roll = RollCall(store, 0, 1, hosts=True, reused=False)
    roll.start(card, time.monotonic() + 10)
    roll.leave(1.0)
    with pytest.raises(LeftAlready):
        RollCall(store, 0, 1, hosts=True, reused=False)


def test_the_host_stays_until_the_others_have_left() -> None:
    store = CountingStore()
    rolls = [RollCall(store, rank, 2, hosts=rank == 0, reused=False) for rank in range(2)]
    left: list[int] = []

    def leave_second() -> None:
        assert left == []
        rolls[1].leave(10)

    host = threading.Thread(target=lambda: (rolls[0].leave(10), left.append(0)), daemon=True)
    host.start()
    host.join(0.05)
    leave_second()
    host.join(10)
    assert left == [0]
