"""The roll-call over a store in this process, with ranks as threads.

For real ranks see tests/distributed/test_rendezvous.py; for name resolution see test_heads.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import pytest
import torch.distributed as dist

from ringsim.comm import bootstrap
from ringsim.comm.bootstrap import (
    Card,
    LeftAlready,
    RollCall,
    _follow_rank_0,
    find_fault,
)
from ringsim.errors import RendezvousFailed

CARD = Card(2, "cpu", (0, 1))
GPU_A = Card(2, "gpu", (0, 1), "A")


@pytest.mark.parametrize(
    ("cards", "fault"),
    [
        ([Card(4, "cpu", (rank % 2, rank % 2 + 2)) for rank in range(4)], None),
        ([Card(3, "cpu", (1, 0)), Card(3, "cpu", (1, 0)), Card(3, "cpu", (2,))], None),
        ([GPU_A, replace(GPU_A, gpu="B")], None),
        ([CARD, replace(CARD, world_size=3)], "world_size is 2 on rank 0, but 3 on rank 1"),
        ([CARD, Card(2, "gpu", (0, 1))], "comm_device is 'cpu' on rank 0, but 'gpu' on rank 1"),
        (
            [CARD, replace(CARD, ring=(1,))],
            "the ranks .* of ring_ranks: rank 0 passed [0, 1], but rank 1 passed [1]",
        ),
        ([CARD, replace(CARD, host="node1")], "only rank 1 passed ring_order"),
        ([GPU_A, GPU_A], "ranks 0 and 1 use the same GPU, A"),
    ],
)
def test_find_fault(cards: list[Card], fault: str | None) -> None:
    found = find_fault(cards)
    assert (found is None) is (fault is None)
    start, _, end = (fault or "").partition(" .* ")
    assert (found or "").startswith(start)
    assert end in (found or "")


class CountingStore(dist.Store):
    """A store in this process that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.operations = dist.HashStore(), 0  # type: ignore[attr-defined]

    def has_extended_api(self) -> bool:
        return True

    def ask(self, *args: Any, name: str) -> Any:
        self.operations += 1
        return getattr(self.inner, name)(*args)


for method in ("set", "get", "multi_get", "add", "compare_set", "check", "wait"):
    setattr(CountingStore, method, partialmethod(CountingStore.ask, name=method))


@pytest.fixture(autouse=True)
def hasty_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes hosts leave immediately: the store outlives them, so others can still read an error."""
    monkeypatch.setattr(bootstrap, "_READERS_GRACE_S", 0.05)


def together(parts: list[Callable[[], Any]]) -> list[Any]:
    """Runs one function per rank in threads; returns the result or the error of each."""
    with ThreadPoolExecutor(len(parts)) as pool:
        ended = [pool.submit(part) for part in parts]
        return [each.exception(20) or each.result() for each in ended]


def start(store: dist.Store, rank: int, card: Card, *, reused: bool = True) -> Any:
    roll = RollCall(store, rank, card, hosts=rank == 0, reused=reused)
    return roll.start(time.monotonic() + 10)


def starts(store: dist.Store, cards: dict[int, Card], **options: Any) -> list[Any]:
    """Starts one rank per card."""
    return together([partial(start, store, rank, cards[rank], **options) for rank in cards])


def whole_world(count: int) -> dict[int, Card]:
    return {rank: Card(count, "cpu", tuple(range(count))) for rank in range(count)}


def test_everybody_learns_of_every_ring_by_a_fixed_number_of_questions() -> None:
    rings = [(0, 2), (3, 1)]
    cards = {rank: Card(4, "cpu", rings[rank % 2]) for rank in range(4)}
    assert starts(CountingStore(), cards) == [rings] * 4
    asked = []
    for count in (64, 8, 2):
        store = CountingStore()
        for _ in range(2):  # one store serves one roll-call after another
            assert starts(store, whole_world(count)) == [[tuple(range(count))]] * count
        asked.append(store.operations / count)
    assert asked == sorted(asked)


def test_a_rank_that_comes_twice_ends_it_for_all_who_do_not_run_yet() -> None:
    store = CountingStore()

    def start_after_rank_0() -> Any:
        # otherwise the ranks present at the verdict depend on timing
        store.wait(["ringsim/0/start/0"], timedelta(seconds=10))
        return start(store, 1, whole_world(3)[1])

    first = partial(start, store, 0, whole_world(3)[0])
    for error in together([first, start_after_rank_0, start_after_rank_0]):
        assert "two processes have rank 1: ranks 0-1 present, rank 2 missing" in str(error)
    store = CountingStore()
    assert starts(store, whole_world(2), reused=False) == [[(0, 1)]] * 2
    (late,) = starts(store, {1: whole_world(2)[1]}, reused=False)
    assert "two processes have rank 1" in str(late)


@pytest.mark.parametrize(("odd", "size"), [(0, 5), (1, 3)])
def test_another_world_size_ends_it_for_all_and_names_it(odd: int, size: int) -> None:
    cards = {rank: Card(size if rank == odd else 4, "cpu", (rank,)) for rank in range(4)}
    ended = starts(CountingStore(), cards, reused=False)
    assert {type(error) for error in ended} == {RendezvousFailed}
    (words,) = {str(error).partition(":")[0] for error in ended}
    # if rank 0 is the one that differs, the first other rank is named
    named = odd or int(words.rpartition(" ")[2])
    sizes = cards[0].world_size, cards[named].world_size
    assert words == "world_size is {} on rank 0, but {} on rank {}".format(*sizes, named)


def test_the_host_stays_until_the_others_have_left_and_then_sends_others_away() -> None:
    store = CountingStore()
    rolls = [RollCall(store, rank, CARD, hosts=rank == 0, reused=False) for rank in range(2)]
    head = threading.Thread(target=rolls[0].leave, args=(10,), daemon=True)
    head.start()
    head.join(0.05)
    assert head.is_alive()
    rolls[1].leave(10)
    head.join(5)
    assert not head.is_alive()
    with pytest.raises(LeftAlready):
        RollCall(store, 0, CARD, hosts=True, reused=False)


@pytest.mark.parametrize("left_behind", [[1], [0, 1, 2], [0, 2]])
def test_restarted_ranks_follow_rank_0_and_not_what_an_earlier_attempt_left(
    left_behind: list[int],
) -> None:
    """Tests restarts in torchrun's store.

    The processes of the earlier attempt died at different places, and any rank may be restarted
    before rank 0.
    """
    store = dist.HashStore()

    def join(rank: int) -> Any:
        deadline = time.monotonic() + 10
        while True:
            try:
                return _follow_rank_0(store, rank, whole_world(3)[rank]).start(deadline)
            except LeftAlready:
                time.sleep(0.001)

    if 0 in left_behind:
        number = store.add("ringsim/roll-calls", 1)
        if left_behind == [0, 1, 2]:
            store.set(
                f"ringsim/roll-call {number}/ringsim/0/start/verdict",
                json.dumps({"rings": [[0, 1, 2]]}),
            )
        for rank in left_behind:
            store.set(
                f"ringsim/roll-call {number}/ringsim/0/start/{rank}", whole_world(3)[rank].to_json()
            )
            store.add(f"ringsim/roll-call {number}/ringsim/0/start/count", 1)
        store.set(f"ringsim/roll-call {number}/ringsim/0/head", whole_world(3)[0].to_json())

    def join_late() -> Any:
        while 0 in left_behind and not any(
            store.check([f"ringsim/roll-call 1/ringsim/0/start/{rank}"]) for rank in (1, 2)
        ):
            time.sleep(0.001)
        return join(0)

    assert together([join_late, partial(join, 1), partial(join, 2)]) == [[(0, 1, 2)]] * 3
