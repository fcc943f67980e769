"""``ringsim.bandwidth`` on links of a virtual clock: the times are the arithmetic of each pattern, and the fit gives the link back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ringsim
from ringsim.errors import ArgumentError, RingError
from ringsim.link import Link
from ringsim.links.plan import STREAM
from ringsim.topologies import FullBisection, RingLinks
from ringsim.traces.bandwidths import load

LINK = Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
SIZES = [8, 4096, 2**20]


def times_us(table: Any, pattern: str, src: int, dst: int) -> list[float]:
    found: list[float] = table.columns["latency_us"][table.where(pattern, "link", src, dst)].tolist()
    return found


@pytest.mark.parametrize("pattern", ["pingpong", "exchange", "shift"])
def test_the_fit_gives_back_the_link(pattern: str) -> None:
    table = ringsim.bandwidth(4, SIZES, pattern, link=LINK)
    assert sorted(table.fits) == [(pattern, "link", rank, (rank + 1) % 4) for rank in range(4)]
    for link in table.fits.values():
        assert link.alpha_s == pytest.approx(LINK.alpha_s, rel=1e-9)
        assert link.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte, rel=1e-9)


def test_a_stream_shows_what_a_message_keeps_the_link_busy() -> None:
    table = ringsim.bandwidth(2, SIZES, "oneway", edge=(0, 1), link=LINK)
    expected = [1e6 * (LINK.alpha_s / STREAM + size * LINK.beta_s_per_byte) for size in SIZES]  # the latency is paid once
    assert times_us(table, "oneway", 0, 1) == pytest.approx(expected, rel=1e-9)


def test_an_all_reduce_takes_its_closed_form() -> None:
    table = ringsim.bandwidth(4, [4096], "all_reduce", link=LINK)
    assert times_us(table, "all_reduce", -1, -1) == pytest.approx(
        [1e6 * (6 * LINK.alpha_s + 6 / 4 * 4096 * LINK.beta_s_per_byte)], rel=1e-9
    )


def test_edges_differ_where_their_links_do() -> None:
    slow = Link(50e-6, 8e-10)
    table = ringsim.bandwidth(3, SIZES, link={(a, b): slow if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b})
    assert times_us(table, "pingpong", 0, 1) == pytest.approx([1e6 * LINK.time_s(size) for size in SIZES], rel=1e-9)
    assert times_us(table, "pingpong", 1, 2) == pytest.approx([1e6 * slow.time_s(size) for size in SIZES], rel=1e-9)


@pytest.mark.parametrize("topology", [RingLinks(LINK), FullBisection(LINK)])
def test_both_ways_and_all_at_once_meet_nobody_in_a_ring(topology: Any) -> None:
    table = ringsim.bandwidth(4, SIZES, ["exchange", "shift"], topology=topology)
    for pattern in ("exchange", "shift"):
        assert times_us(table, pattern, 1, 2) == pytest.approx([1e6 * LINK.time_s(size) for size in SIZES], rel=1e-9)


def test_the_table_says_that_it_is_simulated_and_is_the_same_in_each_run(tmp_path: Path) -> None:
    table = ringsim.bandwidth(2, SIZES, link=LINK)
    assert set(table.columns["kind"].tolist()) == {"simulated"}
    assert table.metadata["source"] == "simulated"
    assert table.metadata["constants"]["links"] == {"all": {"alpha_s": 10e-6, "beta_s_per_byte": 8e-11}}
    assert table == ringsim.bandwidth(2, SIZES, link=LINK)
    table.save(tmp_path / "table.json")
    assert load(tmp_path / "table.json") == table


def test_a_link_that_takes_no_time_has_no_bandwidth() -> None:
    table = ringsim.bandwidth(2, [8], link=Link(0.0, 0.0))
    assert times_us(table, "pingpong", 0, 1) == [0.0]
    assert table.columns["algbw_gb_per_s"].tolist() != table.columns["algbw_gb_per_s"].tolist()  # NaN


def test_simulated_ranks_measure_the_links_of_their_own_run() -> None:
    def worker() -> Any:
        return ringsim.bandwidth(sizes=SIZES, edge=(2, 0))

    slow = Link(50e-6, 8e-10)
    links = {(a, b): slow if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b}
    tables = ringsim.simulate(worker, world_size=3, link=links).results
    assert times_us(tables[0], "pingpong", 2, 0) == pytest.approx([1e6 * slow.time_s(size) for size in SIZES], rel=1e-9)
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].metadata["source"] == "simulated"


def test_simulated_ranks_measure_no_others() -> None:
    with pytest.raises(RingError, match="simulate must be called outside of simulated ranks"):
        ringsim.simulate(lambda: ringsim.bandwidth(sizes=[8], link=LINK), world_size=2, link=LINK)
    with pytest.raises(RingError, match="world_size must be 2 or left out"):
        ringsim.simulate(lambda: ringsim.bandwidth(3, [8]), world_size=2, link=LINK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link": "fast"}, "link must be a Link"),
        ({"link": LINK, "topology": RingLinks(LINK)}, "exactly one of link and topology"),
        ({"link": LINK, "comm_device": "gpu"}, "comm_device must be left out"),
        ({"link": LINK, "world_size": 0}, "world_size must be an integer from 1"),
        ({"link": LINK, "edge": (0, 5)}, "edge must be"),
        ({"link": LINK, "pattern": "star"}, "pattern must be one of"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.bandwidth(**{"sizes": [8], **arguments})
