"""Links between hosts that stalled or were slow, and harmless cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import MS, Story

import ringsim

DATA = Path(__file__).parent.parent / "notebooks" / "data"
LEAST_MESSAGES = 8  # of an examined link
SLOW = {frozenset((1, 2)): 40.0}  # in ms, between hosts that have numbers
Way = tuple[int, int]


def story(
    takes_ms: dict[frozenset[int], float], hosts: int = 3, rounds: int = LEAST_MESSAGES,
    size_bytes: int = 1024,
    round_ms: float = 100.0, ways: dict[Way, float | None] | None = None,
) -> Story:  # fmt: skip
    """Each host sends to all others in 4 ms; a link or direction may have another time, or none."""
    told = Story(hosts, ring=False)
    for number in range(rounds):
        for src in range(hosts):
            for dst in range(hosts):
                takes = (ways or {}).get((src, dst), takes_ms.get(frozenset((src, dst)), 4.0))
                if src != dst and takes is not None:
                    add(told, src, dst, round_ms * number, takes, tag=number, size_bytes=size_bytes)
    return told


def add(told: Story, src: int, dst: int, begin: float, takes: float, **about: Any) -> None:
    times = (begin, begin, begin + takes)
    told.message(src, dst, times, times, **{"group": "world", "size_bytes": 1024, **about})


def findings(told: Story, kind: str = "slow_link", **metadata: Any) -> list[Any]:
    hosts = [{"rank": rank, "host": f"host{rank}"} for rank in range(told.world_size)]
    diagnosis = told.trace(**{"ranks": hosts, **metadata}).explain()
    return [one for one in diagnosis.findings if one.kind == kind]


def named(told: Story, **metadata: Any) -> list[tuple[int, ...]]:
    """Returns the ranks of each slow link that is found."""
    return [one.ranks for one in findings(told, **metadata)]


def test_a_slow_link_is_named_with_what_it_costs() -> None:
    (finding,) = findings(story(SLOW))
    assert finding.ranks == (1, 2)
    assert finding.message == (
        "the link between hosts host1 and host2 is slow.\n"
        "  each of 8 messages of 1 KiB from host1 to host2 took at least 40 ms\n"
        "  between other hosts, such a message takes as little as 4 ms\n"
        # 2 ways, 8 messages, 36 ms
        "  over all messages on this link, the delay adds up to at least 576 ms"
    )
    operations = [(one.rank, one.op, one.peer) for one in finding.operations]
    assert operations == [(2, "irecv", 1), (1, "isend", 2)]
    assert finding.hint.startswith("Check the cable")


@pytest.mark.parametrize("hosts", [3, 8])
def test_all_links_of_a_host_may_be_slow(hosts: int) -> None:
    """Of three hosts, most links are then slow."""
    takes_ms = {frozenset((1, other)): 40.0 for other in range(hosts) if other != 1}
    found = findings(story(takes_ms, hosts))
    assert {one.ranks for one in found} <= {tuple(sorted(pair)) for pair in takes_ms}
    assert len(found) == min(hosts - 1, 5), "the costliest"
    hint = "Check the interface of host host1 first: all slow links lead to that host.\n"
    assert all(one.hint.startswith(hint) for one in found)


FAST = {frozenset(pair): 0.2 for pair in ((0, 1), (0, 2))}
SLOWER = {frozenset((0, 1)): 15.0, frozenset((0, 2)): 15.0}
CLOCKS = [{"ranks": [0, 1], "how": "reference", "samples": [[0, 0, 0]]}]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (story({frozenset((1, 2)): 15.9}), False),
        (story({frozenset((1, 2)): 16.0}), True),  # four times as long
        (story(SLOW, rounds=7), False),  # too few messages to exclude chance
        (story(SLOW, hosts=2), False),  # there is no other link
        (story({**FAST, frozenset((1, 2)): 1.1}, round_ms=2), False),  # less than 1 ms longer
        (story({**FAST, frozenset((1, 2)): 1.2}, round_ms=2), True),
        (story({}, ways={(1, 2): 40.0}), True),  # one direction
        # it is not compared with its own other direction
        (story(SLOWER, ways={(1, 2): 40.0}), False),
        # for the others, the faster direction counts
        (story({frozenset((1, 2)): 20.0}, ways={(1, 0): 20.0, (0, 2): None, (2, 0): None}), True),
        # large messages between two hosts are not compared with small ones between others
        (story(SLOW, size_bytes=4 * 2**20), True),
    ],
)
def test_how_slow_it_must_be(told: Story, found: bool) -> None:
    assert named(told) == [(1, 2)] * found


def test_what_is_no_slow_link() -> None:
    short = story(SLOW)
    short.span(0, "load", 0, 20_000)
    assert named(short) == [], "576 ms of 20 s are less than a twentieth of the run"
    large = story({}, ways={(1, 2): None, (2, 1): None})
    for number in range(LEAST_MESSAGES):
        for src, dst in ((1, 2), (2, 1)):
            add(large, src, dst, 100.0 * number, 40.0, tag=number, size_bytes=4 * 2**20)
    assert named(large) == [], "only messages of one size are compared"
    for hosts in (["a", "b", "b"], ["a"]):
        ranks = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
        assert named(story(SLOW), ranks=ranks) == [], "within a host, or on an unknown one"


@pytest.mark.parametrize("what", ["late", "unseen", "stalled"])
def test_what_a_busy_rank_looks_like_is_no_slow_link(what: str) -> None:
    told = story({})
    for row in told.rows:
        over = {row["rank"], row["peer"]} == {1, 2}
        if over and (what != "stalled" or row["tag"] == 3):
            row["done_ns"] += 36 * MS
        if over and what == "late" and row["rank"] == 1:  # both sides have posted 36 ms later
            row["post_ns"] += 36 * MS
            row["wait_ns"] += 36 * MS
        if over and what == "unseen":  # the receiver was busy, and the message had already arrived
            row["wait_ns"] += 38 * MS
    assert named(told) == []


@pytest.mark.parametrize(("known_ms", "found"), [(1, True), (30, False), (None, False)])
def test_clocks_may_explain_it(known_ms: int | None, found: bool) -> None:
    """Host 2's clock, read wrongly by 36 ms, would show messages from host 1 as slow."""
    how = "store" if known_ms is not None else "not compared"
    other = {"ranks": [2], "how": how, "samples": [[0, 0, (known_ms or 0) * MS]]}
    assert bool(named(story(SLOW), clocks=[*CLOCKS, other])) == found


# -- links that stalled


def stands_still(lasts_ms: float = 3000.0, size_bytes: int = 1024) -> Story:
    """The last message between two hosts takes long, the others 4 ms each."""
    told = story({}, hosts=2, rounds=LEAST_MESSAGES - 1, size_bytes=size_bytes)
    add(told, 1, 0, 700.0, 4.0, tag=7, size_bytes=size_bytes)
    add(told, 0, 1, 700.0, lasts_ms, tag=7, size_bytes=size_bytes)
    return told


def still(told: Story, **metadata: Any) -> list[str]:
    return [one.message for one in findings(told, "link", **metadata)]


def test_a_link_that_stood_still_is_told_with_when_and_for_how_long() -> None:
    (finding,) = findings(stands_still(), "link")
    assert finding.ranks == (0, 1)
    assert (
        finding.message
        == (  # from 704 ms on, when the message in the other direction had arrived
            "nothing moved on the link between hosts host0 and host1 for 3 s, "
            "and then the link recovered.\n"
            "  the link stopped 704 ms after the start of the run, when both sides had posted\n"
            "  rank 0 posted isend to 1 (world, tag 7, float32[256], 1,024 bytes)\n"
            "  rank 1 posted irecv from 0 (world, tag 7, float32[256], 1,024 bytes)"
        )
    )


@pytest.mark.parametrize(
    ("lasts_ms", "size_bytes", "found"),
    [(2003.9, 1024, False), (2004.1, 1024, True), (3000, 10**8, False), (4010, 10**8, True)],
)
def test_how_long_it_must_stand_still(lasts_ms: float, size_bytes: int, found: bool) -> None:
    """2 s, and 2 s more for a message of 100 MB, after the message in the other direction."""
    assert bool(still(stands_still(lasts_ms, size_bytes))) == found


def test_times_that_it_stood_still_add_up() -> None:
    told = stands_still()
    for src, dst, begin in ((0, 1, 10_000), (1, 0, 20_000)):
        add(told, src, dst, begin, 2500, tag=9)
    (message,) = still(told)
    assert message.endswith("the link stopped 3 times, for 8 s in total")


def test_what_is_not_called_a_link_that_stood_still() -> None:
    assert still(stands_still(), backend="nccl") == [], "a GPU comes to a message after its post"
    large = story({frozenset((0, 1)): 5000.0}, hosts=2, round_ms=6000.0)
    assert still(large) == [], "all messages take as long"
    queued = story({}, hosts=2)
    for number in range(40):  # posted at the same time, one arrives every 100 ms
        add(queued, 0, 1, 1000, 100 * number, tag=100 + number)
    assert still(queued) == [], "others come all the while"
    unseen = stands_still()
    unseen.rows[-1]["wait_ns"] += 2990 * MS
    assert still(unseen) == [], "the receiver was busy"
    clocks = [
        {"ranks": [0], "how": "reference", "samples": [[0, 0, 0]]},
        {"ranks": [1], "how": "store", "samples": [[0, 0, 1500 * MS]]},
    ]
    assert still(stands_still(), clocks=clocks) == [], "the clocks may be wrong by that much"


@given(
    st.lists(st.sampled_from([1.0, 4.0, 30.0]), min_size=6, max_size=6), st.permutations(range(4))
)
def test_names_of_hosts_do_not_matter(takes_ms: list[float], order: list[int]) -> None:
    pairs = [frozenset((one, other)) for one in range(4) for other in range(one)]
    links = dict(zip(pairs, takes_ms, strict=True))
    renamed = {frozenset(order[rank] for rank in pair): takes for pair, takes in links.items()}
    found = {frozenset(pair) for pair in named(story(links, 4))}
    assert {frozenset(order[rank] for rank in pair) for pair in found} == {
        frozenset(pair) for pair in named(story(renamed, 4))
    }
    assert all(links[pair] > min(takes_ms) for pair in found)


@pytest.mark.parametrize(("name", "slow"), [("dealt", True), ("reordered", False)])
def test_recorded_on_three_hosts_with_one_slow_cable(name: str, slow: bool) -> None:
    """The cable between host1 and host2 carried 6.25 MB/s, the others 50; one run avoids it."""
    found = ringsim.load(DATA / f"hosts_{name}.ringtrace").explain().findings
    assert [one.kind for one in found].count("slow_link") == slow
    assert not slow or "the link between hosts host1 and host2 is slow" in found[0].message
