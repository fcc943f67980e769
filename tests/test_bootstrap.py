"""How ranks meet: the roll-call over a store in this process, ranks as threads.

What a machine's name leads to; calls left behind. Real ranks are in
tests/distributed/test_rendezvous.py.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringsim.comm import bootstrap
from ringsim.comm.bootstrap import (
    BackgroundCall,
    Card,
    LeftAlready,
    RollCall,
    _follow_rank_0,
    build_default_group,
    find_fault,
    host,
    in_words,
    leave,
    listen,
    meet,
)
from ringsim.errors import RendezvousFailed, RingError


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
    ring = data.draw(
        st.permutations(range(world_size)).map(
            lambda order: tuple(order[: max(1, world_size // 2)])
        )
    )
    card = Card(world_size, "cpu", ring)
    assert Card.from_json(card.to_json().encode()) == card
    whole = Card(world_size, "gpu", tuple(range(world_size)), gpu="a name")
    assert Card.from_json(whole.to_json().encode()) == whole


def pair(other: Card) -> list[Card]:
    return [
        Card(2, other.comm_device if other.gpu else "cpu", (0, 1), "A" if other.gpu else ""),
        other,
    ]


@pytest.mark.parametrize(
    ("cards", "fault"),
    [
        (pair(Card(2, "cpu", (0, 1))), None),
        ([Card(4, "cpu", (rank % 2, rank % 2 + 2)) for rank in range(4)], None),
        ([Card(3, "cpu", (1, 0)), Card(3, "cpu", (1, 0)), Card(3, "cpu", (2,))], None),
        (pair(Card(2, "gpu", (0, 1), "B")), None),
        (
            pair(Card(3, "cpu", (0, 1))),
            "world_size must be the same on every rank, got 2 on rank 0 and 3 on rank 1",
        ),
        (
            pair(Card(2, "gpu", (0, 1))),
            "comm_device must be the same on every rank, got 'cpu' on rank 0 and 'gpu' on rank 1",
        ),
        (
            pair(Card(2, "cpu", (1,))),
            (
                "ring_ranks must be the same on every rank of a ring, got "
                "[0, 1] on rank 0 and [1] on rank 1"
            ),
        ),
        (
            pair(Card(2, "cpu", (0, 1), host="node1")),
            'ring_order must be the same on every rank, got "hosts" on rank 1 alone',
        ),
        (
            pair(Card(2, "gpu", (0, 1), "A")),
            "a GPU must be used by one rank only, got ranks 0 and 1 on GPU A",
        ),
    ],
)
def test_find_fault(cards: list[Card], fault: str | None) -> None:
    assert find_fault(cards) == fault


class CountingStore(dist.Store):
    """A store in this process that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.operations = dist.HashStore(), 0  # type: ignore[attr-defined]

    def has_extended_api(self) -> bool:
        return True


def _counted(name: str) -> Callable[..., Any]:
    def ask(self: CountingStore, *args: Any) -> Any:
        self.operations += 1
        return getattr(self.inner, name)(*args)

    return ask


for method in ("set", "get", "multi_get", "add", "compare_set", "check", "wait"):
    setattr(CountingStore, method, _counted(method))


@pytest.fixture(autouse=True)
def hasty_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This store outlives its host, who need not stay for the others to read why it failed."""
    monkeypatch.setattr(bootstrap, "_READERS_GRACE_S", 0.05)


def together(parts: list[Callable[[], Any]]) -> list[Any]:
    """Runs one part for each rank in threads; returns what each returned or raised."""
    with ThreadPoolExecutor(len(parts)) as pool:
        ended = [pool.submit(part) for part in parts]
        return [each.exception(20) or each.result() for each in ended]


def start(
    store: dist.Store, rank: int, card: Card, *, limit_s: float = 10, reused: bool = True
) -> Any:
    return RollCall(store, rank, card.world_size, hosts=rank == 0, reused=reused).start(
        card, time.monotonic() + limit_s
    )


def starts(store: dist.Store, cards: dict[int, Card], **options: Any) -> list[Any]:
    """Starts a rank with each card."""
    return together(
        [
            lambda rank=rank, card=card: start(store, rank, card, **options)
            for rank, card in cards.items()
        ]
    )


def whole_world(count: int) -> dict[int, Card]:
    return {rank: Card(count, "cpu", tuple(range(count))) for rank in range(count)}


def test_everybody_learns_of_every_ring_by_a_fixed_number_of_questions() -> None:
    rings = [(0, 2), (3, 1)]
    assert (
        starts(CountingStore(), {rank: Card(4, "cpu", rings[rank % 2]) for rank in range(4)})
        == [rings] * 4
    )
    asked = []
    for count in (64, 8, 2):
        store = CountingStore()
        for _ in range(2):  # one store serves one roll-call after another
            assert starts(store, whole_world(count)) == [[tuple(range(count))]] * count
        asked.append(store.operations / count)
    assert asked == sorted(asked)


def test_those_present_and_those_missing_are_named_with_the_same_words() -> None:
    present = {rank: card for rank, card in whole_world(6).items() if rank in (0, 1, 4)}
    for rank, error in zip(present, starts(CountingStore(), present, limit_s=0.3), strict=True):
        assert type(error) is RendezvousFailed
        words = (
            "every rank must be there in time, got a time-out: ranks 0-1, 4 present, ranks 2-3, 5 "
            f"missing (rank {rank} of 6)"
        )
        assert str(error).startswith(words)


def test_a_rank_that_comes_twice_ends_it_for_all_who_do_not_run_yet() -> None:
    store = CountingStore()

    def start_after_rank_0() -> Any:
        # else who is present when the verdict falls is a matter of luck
        store.wait(["ringsim/0/start/0"], timedelta(seconds=10))
        return start(store, 1, whole_world(3)[1])

    ended = together(
        [lambda: start(store, 0, whole_world(3)[0]), start_after_rank_0, start_after_rank_0]
    )
    assert [
        "two processes that say they are rank 1: ranks 0-1 present, rank 2 missing" in str(error)
        for error in ended
    ] == [True] * 3
    store = CountingStore()
    assert starts(store, whole_world(2), reused=False) == [[(0, 1)]] * 2
    assert "two processes that say they are rank 1" in str(
        starts(store, {1: whole_world(2)[1]}, reused=False)[0]
    )


@pytest.mark.parametrize(("odd", "size"), [(0, 3), (0, 5), (1, 3), (3, 5)])
def test_another_world_size_ends_it_for_all_and_names_it(odd: int, size: int) -> None:
    cards = {rank: Card(size if rank == odd else 4, "cpu", (rank,)) for rank in range(4)}
    ended = starts(CountingStore(), cards, reused=False)
    assert {type(error) for error in ended} == {RendezvousFailed}
    (words,) = {str(error).partition(":")[0] for error in ended}
    # where rank 0 is the odd one, whoever came first is named
    named = odd or int(words.rpartition(" ")[2])
    sides = f"{cards[0].world_size} on rank 0 and {cards[named].world_size} on rank {named}"
    assert words == f"world_size must be the same on every rank, got {sides}"


def test_a_rank_that_cannot_build_ends_it_for_all() -> None:
    store = CountingStore()

    def build(rank: int, card: Card) -> Any:
        roll = RollCall(store, rank, 3, hosts=rank == 0, reused=False)
        roll.start(card, time.monotonic() + 10)
        return roll.finish(
            time.monotonic() + 10,
            "rank 2 must reach its peers, got no route" if rank == 2 else None,
        )

    ended = together([partial(build, rank, card) for rank, card in whole_world(3).items()])
    assert ["rank 2 must reach its peers, got no route" in str(error) for error in ended] == [
        True
    ] * 3


def test_the_host_stays_until_the_others_have_left_and_then_sends_others_away() -> None:
    store = CountingStore()
    rolls = [RollCall(store, rank, 2, hosts=rank == 0, reused=False) for rank in range(2)]
    head = threading.Thread(target=rolls[0].leave, args=(10,), daemon=True)
    head.start()
    head.join(0.05)
    assert head.is_alive()
    rolls[1].leave(10)
    head.join(5)
    assert not head.is_alive()
    with pytest.raises(LeftAlready):
        RollCall(store, 0, 1, hosts=True, reused=False)


@pytest.mark.parametrize("left_behind", [[0], [1], [0, 1], [0, 1, 2], [0, 2]])
def test_restarted_ranks_follow_rank_0_and_not_what_an_earlier_attempt_left(
    left_behind: list[int],
) -> None:
    """In torchrun's store.

    The earlier attempt's processes are gone, whatever they had come to, and each rank may be back
    before rank 0.
    """
    store = dist.HashStore()

    def join(rank: int) -> Any:
        deadline = time.monotonic() + 10
        while True:
            try:
                return _follow_rank_0(store, rank, 3).start(whole_world(3)[rank], deadline)
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


# -- what a name leads to

DEBIAN = "127.0.1.1"
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@pytest.fixture
def node07(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns this machine's name, as Debian's /etc/hosts has it.

    It leads to loopback here, to the network elsewhere.
    """
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        return real(DEBIAN if host == "node07" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    try:
        listen("node07", 0).close()
    except RendezvousFailed:
        pytest.skip("this system has 127.0.0.1 alone on its loopback interface")
    return "node07"


def meet_alone(head: str, world_size: int = 1, timeout_s: float = 20) -> Any:
    listener = listen(head, 0)
    assert ipaddress.ip_address(listener.getsockname()[0]) in LOOPBACK
    return meet(
        head,
        listener.getsockname()[1],
        0,
        world_size,
        Card(world_size, "cpu", tuple(range(world_size))),
        timeout_s,
        listener,
    )


@pytest.mark.parametrize(
    ("head", "local"), [("127.0.0.1", True), (DEBIAN, True), ("localhost", True), ("node07", False)]
)
def test_gloo_is_kept_on_loopback_only_where_the_head_says_so_everywhere(
    node07: str, head: str, local: bool
) -> None:
    rendezvous = meet_alone(head)
    assert rendezvous.loopback is local
    undo = build_default_group(rendezvous, 0, 1, "gloo", timedelta(seconds=20))
    assert ("GLOO_SOCKET_IFNAME" in os.environ) is local
    dist.destroy_process_group()
    undo()
    leave(rendezvous, 1)


def test_who_joins_by_the_name_does_not_take_it_for_local_either(
    node07: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun rank 0 joins too: the store is the agent's."""
    listener = listen(DEBIAN, 0)
    port = listener.getsockname()[1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = host(listener, 20)
    for head, local in ((node07, False), (DEBIAN, True)):
        assert meet(head, port, 0, 1, Card(1, "cpu", (0,)), 20).loopback is local
    with pytest.raises(RendezvousFailed, match="rank 1 missing"):
        meet(DEBIAN, port, 0, 2, Card(2, "cpu", (0, 1)), 0.3)
    del store


def test_missing_ranks_may_be_those_that_cannot_reach_loopback(node07: str) -> None:
    with pytest.raises(
        RendezvousFailed,
        match=(
            r"rank 1 missing.*'node07' leads to 127\.0\.1\.1 on rank 0's "
            r"own machine.*MASTER_ADDR"
        ),
    ):
        meet_alone(node07, world_size=2, timeout_s=0.3)
    with pytest.raises(RendezvousFailed) as caught:
        meet_alone("127.0.0.1", world_size=2, timeout_s=0.3)
    assert "own machine" not in str(caught.value)


ELSEWHERE = "head_ip must be an address of rank 0's own machine, got"
UNKNOWN = "head_ip must be an address or a name that this machine knows, got"
EVERYWHERE = "head_ip must be one address that the ranks can reach"


@pytest.mark.parametrize(
    ("head", "rank", "words"),
    [
        ("192.0.2.1", 0, ELSEWHERE),
        ("2001:db8::1", 0, ELSEWHERE),
        ("no-such-machine.invalid", 0, UNKNOWN),
        ("a name with spaces", 1, UNKNOWN),
        ("x" * 300, 1, UNKNOWN),
        ("0.0.0.0", 0, EVERYWHERE),
        ("::", 1, EVERYWHERE),
    ],
)
def test_a_head_that_cannot_be(head: str, rank: int, words: str) -> None:
    with pytest.raises(RingError, match=f"^{words}"):
        meet(head, 0, rank, 2, Card(2, "cpu", (0, 1)), 0.3)


@pytest.mark.parametrize("head", ["127.0.0.1", "::1", "localhost"])
def test_listen_on_loopback_only_and_once(head: str) -> None:
    with listen(head, 0) as listener:
        address, port = listener.getsockname()[:2]
        assert address in ("127.0.0.1", "::1")
        with pytest.raises(
            RendezvousFailed, match=f"^port must be free on rank 0's machine, got {port}"
        ):
            listen(head, port)


def test_a_name_that_is_not_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(30))
    with pytest.raises(
        RendezvousFailed, match=r"this machine knows, got 'slow\.example': no answer within"
    ):
        listen("slow.example", 0, timeout_s=0.1)
    never.set()


# -- calls that may never return


def test_a_call_in_the_background_returns_raises_or_is_left_behind() -> None:
    assert BackgroundCall(lambda: None).result(10) is None
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(lambda: 1 // 0).result(10)
    gate = threading.Event()
    call = BackgroundCall(lambda: gate.wait(30))
    with pytest.raises(TimeoutError, match="no answer within"):
        call.result(0.01)
    gate.set()
    assert call.result(10) is True
