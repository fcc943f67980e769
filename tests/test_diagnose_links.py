"""Which link between hosts stood still or is called slow, and what is not.

From messages made by hand, and three runs on real hosts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story

import ringsim
from ringsim import Trace
from ringsim.diagnose.links import LEAST_MESSAGES, SLOW_NS, SLOW_SHARE, SLOW_TIMES, find_links
from ringsim.traces.events import OP_CODES

DATA = Path(__file__).parent.parent / "notebooks" / "data"
MS = 1_000_000
SLOW = {frozenset((1, 2)): 40.0}  # in ms, between hosts that have numbers


Way = tuple[int, int]


def story(
    takes_ms: dict[frozenset[int], float], hosts: int = 3, rounds: int = LEAST_MESSAGES,
    size_bytes: int = 1024,
    round_ms: float = 100.0, ways: dict[Way, float | None] | None = None,
) -> Story:  # fmt: skip
    """One rank a host; in each round each sends to each other in 4 ms.

    Or in what is said of their link, or of this way; None: nothing.
    """
    told = Story(hosts, ring=False)
    for number in range(rounds):
        for src in range(hosts):
            for dst in range(hosts):
                takes = (ways or {}).get((src, dst), takes_ms.get(frozenset((src, dst)), 4.0))
                if src != dst and takes is not None:
                    begin = round_ms * number
                    end = begin + takes
                    told.message(
                        src,
                        dst,
                        (begin, begin, end),
                        (begin, begin, end),
                        size_bytes,
                        tag=number,
                        group="world",
                    )
    return told


def named(told: Story | Trace, **metadata: Any) -> list[list[str]]:
    """Returns the hosts of each slow link that is found."""
    trace = told.trace(**about(told.world_size), **metadata) if isinstance(told, Story) else told
    return [
        one.message.partition(" is slow")[0].partition("between hosts ")[2].split(" and ")
        for one in find_links(trace)
        if one.kind == "slow_link"
    ]


def about(hosts: int) -> dict[str, Any]:
    return {"ranks": [{"rank": rank, "host": f"host{rank}"} for rank in range(hosts)]}


def test_a_slow_link_is_named_with_what_it_costs() -> None:
    (finding,) = find_links(story(SLOW).trace(**about(3)))
    assert (finding.kind, finding.ranks) == ("slow_link", (1, 2))
    assert finding.message == (
        "the link between hosts host1 and host2 is slow: each of 8 messages of 1 KiB from host1 "
        "to host2 took 40 ms or more; between other "
        # 2 ways, 8 messages, 36 ms
        "hosts 4 ms is enough. Over all messages of this link that adds up to at least 576 ms."
    )
    assert [(one.rank, one.op, one.peer) for one in finding.operations] == [
        (2, "irecv", 1),
        (1, "isend", 2),
    ]
    assert finding.hint.startswith("Look at the cable")


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_all_links_of_a_host_may_be_slow(hosts: int) -> None:
    """Of three hosts, most links are then slow."""
    takes_ms = {frozenset((1, other)): 40.0 for other in range(hosts) if other != 1}
    found = find_links(story(takes_ms, hosts).trace(**about(hosts)))
    assert {one.ranks for one in found} <= {tuple(sorted(pair)) for pair in takes_ms}
    assert len(found) == min(hosts - 1, 5), "the costliest"
    assert all(
        one.hint.startswith("All slow links lead to host host1: look at its interface first.\n")
        for one in found
    )


def test_a_link_may_be_slow_one_way() -> None:
    (finding,) = find_links(story({}, ways={(1, 2): 40.0}).trace(**about(3)))
    assert "from host1 to host2 took 40 ms or more" in finding.message
    slower = {frozenset((0, 1)): 15.0, frozenset((0, 2)): 15.0}
    assert named(story(slower, ways={(1, 2): 40.0})) == [], (
        "it is not compared with its own other way"
    )
    rest = {(0, 2): None, (2, 0): None}
    assert named(story({frozenset((1, 2)): 20.0}, ways={(1, 0): 20.0, **rest})) == [
        ["host1", "host2"]
    ], "the other's quicker way counts"


@pytest.mark.parametrize(
    ("takes_ms", "found"),
    [(4 * SLOW_TIMES - 0.1, False), (4 * SLOW_TIMES, True)],
    ids=["not four times as long", "four times"],
)
def test_how_slow_it_must_be(takes_ms: float, found: bool) -> None:
    assert bool(named(story({frozenset((1, 2)): takes_ms}))) == found


def test_others() -> None:
    assert (SLOW_TIMES, SLOW_NS, SLOW_SHARE, LEAST_MESSAGES) == (4, 1_000_000, 0.05, 8)
    assert named(story(SLOW, rounds=7)) == [], "too few messages to tell chance from a rule"
    assert named(story(SLOW, hosts=2)) == [], "there is no other link"
    fast = {frozenset(pair): 0.2 for pair in ((0, 1), (0, 2))}
    assert named(story({**fast, frozenset((1, 2)): 1.1}, round_ms=2)) == [], "less than 1 ms longer"
    short = story(SLOW)
    short.span(0, "load", 0, 20_000)
    assert named(short) == [], "576 ms of 20 s"
    assert named(story({**fast, frozenset((1, 2)): 1.2}, round_ms=2)) == [["host1", "host2"]]
    assert named(Story(3)) == []


def test_messages_within_a_host_are_no_link() -> None:
    trace = story(SLOW).trace(
        ranks=[{"rank": rank, "host": ("a", "b", "b")[rank]} for rank in range(3)]
    )
    assert find_links(trace) == ()
    assert find_links(story(SLOW).trace(ranks=[{"rank": 0, "host": "a"}])) == (), (
        "hosts that are not known"
    )


def test_what_a_busy_rank_looks_like_is_no_slow_link() -> None:
    late, unseen, stalled = story({}), story({}), story({})
    for told in (late, unseen, stalled):
        for row in told.rows:
            over, receives = {row["rank"], row["peer"]} == {1, 2}, row["op"] == OP_CODES["irecv"]
            if over and (told is not stalled or row["tag"] == 3):
                row["done_ns"] += 36 * MS
            # both sides are there 36 ms later, and the message takes 4 ms
            if over and told is late and row["rank"] == 1:
                row["post_ns"] += 36 * MS
                row["wait_ns"] += 36 * MS
            if over and told is unseen and receives:
                row["wait_ns"] += 38 * MS  # its receiver was busy, and found it there
    assert named(late) == named(unseen) == named(stalled) == []


def test_sizes_are_compared_with_their_own() -> None:
    """Large messages between two hosts, small ones between the others."""
    told, large = story({}, ways={(1, 2): None, (2, 1): None}), story(SLOW, size_bytes=4 * 2**20)
    told.rows += [
        row | {"payload": told._payload(4 * 2**20)}
        for row in story(SLOW).rows
        if {row["rank"], row["peer"]} == {1, 2}
    ]
    assert named(told) == []
    assert named(large) == [["host1", "host2"]]


@pytest.mark.parametrize(("known_ms", "found"), [(1, True), (30, False), (None, False)])
def test_clocks_may_explain_it(known_ms: int | None, found: bool) -> None:
    """Host 2's clock, had it been read wrongly by 36 ms, would show messages from host 1 as slow.

    And those to it as quick.
    """
    how = "store" if known_ms is not None else "not compared"
    clocks = [
        {"ranks": [0, 1], "how": "reference", "samples": [[0, 0, 0]]},
        {"ranks": [2], "how": how, "samples": [[0, 0, (known_ms or 0) * MS]]},
    ]
    assert bool(named(story(SLOW), clocks=clocks)) == found


def stands_still(lasts_ms: float = 3000.0, size_bytes: int = 1024) -> Story:
    """Of the messages between two hosts, 4 ms each, the last one takes long."""
    told = story({}, hosts=2, size_bytes=size_bytes)
    for row in told.rows:
        if (
            row["tag"] == LEAST_MESSAGES - 1
            and {row["rank"], row["peer"]} == {0, 1}
            and (row["rank"] == 0) == (row["op"] == OP_CODES["isend"])
        ):
            row["done_ns"] = row["post_ns"] + round(lasts_ms * MS)
    return told


def still(told: Story, **metadata: Any) -> list[str]:
    return [
        one.message
        for one in find_links(told.trace(**about(told.world_size), **metadata))
        if one.kind == "link"
    ]


def test_a_link_that_stood_still_is_told_with_when_and_for_how_long() -> None:
    told = stands_still()
    (finding,) = find_links(told.trace(**about(2)))
    assert (finding.kind, finding.ranks) == ("link", (0, 1))
    assert finding.message == (  # from 704 ms on, when the message the other way had come
        "nothing moved on the link between hosts host0 and host1 for 3 s, from 704 ms into the "
        "run on, though both sides had posted: rank "
        "0's isend to 1 (world, tag 7, float32[256], 1,024 bytes) and rank 1's irecv from 0 "
        "(world, tag 7, float32[256], 1,024 bytes). "
        "Then it recovered."
    )


@pytest.mark.parametrize(("lasts_ms", "size_bytes", "found"), [
    (2003.9, 1024, False), (2004.1, 1024, True), (3000, 100_000_000, False),
    (4010, 100_000_000, True),
])  # fmt: skip
def test_how_long_it_must_stand_still(lasts_ms: float, size_bytes: int, found: bool) -> None:
    """2 s, and for a message of 100 MB 2 s more, from when the message the other way had come.

    That was 4 ms after both sides had posted.
    """
    assert bool(still(stands_still(lasts_ms, size_bytes))) == found


def test_times_that_it_stood_still_add_up() -> None:
    told = stands_still()
    for src, dst, begin in ((0, 1, 10_000), (1, 0, 20_000)):
        told.message(
            src,
            dst,
            (begin, begin, begin + 2500),
            (begin, begin, begin + 2500),
            1024,
            tag=9,
            group="world",
        )
    (message,) = still(told)
    assert message.endswith("It stood still 3 times, 8 s in all.")


def test_what_is_not_called_a_link_that_stood_still() -> None:
    assert still(stands_still(), backend="nccl") == [], (
        "there a message is posted before the GPU comes to it"
    )
    large = story({frozenset((0, 1)): 5000.0}, hosts=2, round_ms=6000.0)
    assert still(large) == [], "all messages take as long"
    queued = story({}, hosts=2)
    for number in range(40):  # posted at once, one comes each 100 ms
        end = 1000.0 + 100 * number
        queued.message(
            0, 1, (1000, 1000, end), (1000, 1000, end), 1024, tag=100 + number, group="world"
        )
    assert still(queued) == [], "others come all the while"
    unseen = stands_still()
    for row in unseen.rows:
        if row["tag"] == LEAST_MESSAGES - 1 and row["rank"] == 1:
            row["wait_ns"] += 2990 * MS
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
    found = {frozenset(int(host[-1]) for host in pair) for pair in named(story(links, 4))}
    assert {frozenset(order[rank] for rank in pair) for pair in found} == {
        frozenset(int(host[-1]) for host in pair) for pair in named(story(renamed, 4))
    }
    assert all(links[pair] > min(takes_ms) for pair in found)


@pytest.mark.parametrize(
    ("name", "found"),
    [("dealt", [["host1", "host2"]]), ("grouped", [["host1", "host2"]]), ("mended", [])],
)
def test_recorded_on_three_hosts_with_one_slow_cable(name: str, found: list[list[str]]) -> None:
    """The cable between host1 and host2 carried 6.25 MB/s, the others 50.

    The mended run sends nothing over it.
    """
    trace = ringsim.load(DATA / f"hosts_{name}.ringtrace")
    assert named(trace) == found
    assert [one.kind for one in trace.explain().findings][: len(found)] == ["slow_link"] * len(
        found
    )
