"""Links measured on a virtual clock, invalid arguments, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringsim
from ringsim import Link
from ringsim.cli import main
from ringsim.errors import ArgumentError, RingError
from ringsim.topologies import FullBisection, RingLinks

LINK, SLOW = Link(alpha_s=10e-6, beta_s_per_byte=8e-11), Link(50e-6, 8e-10)
STREAM = 8  # messages in flight in the pattern "oneway"
FEW_SIZES = [8, 4096, 2**20]
TIMES_US = [1e6 * LINK.time_s(size) for size in FEW_SIZES]
SLOW_TIMES_US = [1e6 * SLOW.time_s(size) for size in FEW_SIZES]
RANK_2_IS_FAR = {
    (a, b): SLOW if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b
}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pattern": "pong"}, "pattern must be .* of pingpong, oneway, exchange, shift, all_red"),
        ({"pattern": []}, "pattern must be .* of pingpong"),
        *(
            ({"sizes": sizes}, "sizes must be a non-empty list of sizes in bytes from 1")
            for sizes in ([], [0], [2**30 + 1], [8.0], "8K", 3.5)
        ),
        ({"pattern": "all_reduce", "sizes": [10]}, "multiples of 4"),
        *(({"edge": edge}, "edge must be") for edge in ((1, 0), (0, 2), 0)),
        *(({"limit_s": limit_s}, "limit_s must be a positive number") for limit_s in (0, True)),
        ({"sizes": [2**30], "world_size": 1000}, "1000 ranks .* more than half of"),
        ({"comm_device": "tpu"}, 'comm_device must be "cpu"'),
        ({"comm_device": "gpu", "world_size": 500}, r"at most .*number of GPUs.* got 500\."),
        ({"world_size": 0}, "world_size must be an integer from 1"),
        ({"timeout_s": -1}, "timeout_s must be a positive number"),
        ({"link": "fast"}, "link must be a Link"),
        ({"link": LINK, "topology": RingLinks(LINK)}, "exactly one of link and topology"),
        ({"link": LINK, "comm_device": "gpu"}, 'comm_device must be "cpu" with link'),
        ({"link": LINK, "edge": (0, 5)}, "edge must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.bandwidth(**{"world_size": 3, "sizes": [8], **asked})


def times_us(table: Any, pattern: str, src: int, dst: int) -> Any:
    found: list[float] = table.columns["latency_us"][
        table.where(pattern, "link", src, dst)
    ].tolist()
    return pytest.approx(found, rel=1e-9)


def test_the_sizes_are_the_powers_of_two_from_8_bytes_to_256_mib() -> None:
    table = ringsim.bandwidth(link=LINK, edge=(0, 1))
    assert table.columns["size_bytes"].tolist() == [2**power for power in range(3, 29)]
    table = ringsim.bandwidth(sizes=2 ** np.arange(4, 2, -1), edge=(0, 1), link=LINK)
    assert table.columns["size_bytes"].tolist() == [8, 16], "numpy, in any order, must do"


@pytest.mark.parametrize(
    ("pattern", "links"),
    [
        ("pingpong", {"link": LINK}),
        ("exchange", {"topology": RingLinks(LINK)}),
        ("shift", {"topology": RingLinks(LINK)}),
        ("shift", {"topology": FullBisection(LINK)}),
    ],
)
def test_the_fit_gives_back_the_link(pattern: str, links: dict[str, Any]) -> None:
    """In both directions and all together, because messages in a ring do not meet."""
    table = ringsim.bandwidth(4, FEW_SIZES, pattern, **links)
    assert sorted(table.fits) == [(pattern, "link", rank, (rank + 1) % 4) for rank in range(4)]
    assert times_us(table, pattern, 1, 2) == TIMES_US
    for link in table.fits.values():
        found = link.alpha_s, link.beta_s_per_byte
        assert found == pytest.approx((LINK.alpha_s, LINK.beta_s_per_byte), rel=1e-9)


def test_streams_and_all_reduces_take_their_closed_forms() -> None:
    """A stream shows the time for which a message occupies the link: the latency counts once."""
    table = ringsim.bandwidth(2, FEW_SIZES, "oneway", edge=(0, 1), link=LINK)
    assert times_us(table, "oneway", 0, 1) == [
        1e6 * (LINK.alpha_s / STREAM + size * LINK.beta_s_per_byte) for size in FEW_SIZES
    ]
    table = ringsim.bandwidth(4, [4096, 1 << 24], "all_reduce", link=LINK)
    tree, ring = 4 * LINK.time_s(4096), 6 * LINK.time_s(1 << 22)  # for small and large sizes
    assert times_us(table, "all_reduce", -1, -1) == [1e6 * tree, 1e6 * ring]
    # with nccl-tests' bus factor
    columns = table.columns
    assert columns["busbw_gb_per_s"] == pytest.approx(columns["algbw_gb_per_s"] * 2 * 3 / 4)
    table = ringsim.bandwidth(2, [8], link=Link(0.0, 0.0))
    assert times_us(table, "pingpong", 0, 1) == [0.0]
    # without a time there is no bandwidth
    assert np.isnan(table.columns["algbw_gb_per_s"]).all()


def test_simulated_ranks_measure_the_links_of_their_own_run_and_no_others() -> None:
    def run(size: int, *args: Any, **kwargs: Any) -> Any:
        links = RANK_2_IS_FAR if size == 3 else LINK
        return ringsim.simulate(
            lambda: ringsim.bandwidth(*args, **kwargs), world_size=size, link=links
        ).results

    tables = run(3, sizes=FEW_SIZES)
    assert times_us(tables[0], "pingpong", 0, 1) == TIMES_US
    assert times_us(tables[0], "pingpong", 2, 0) == SLOW_TIMES_US
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].metadata["source"] == "simulated"
    with pytest.raises(RingError, match="simulate cannot be called from a simulated rank"):
        run(2, sizes=[8], link=LINK)
    with pytest.raises(RingError, match=r"world_size must be 2, .*, got 3"):
        run(2, 3, [8])


def test_the_table_says_that_it_is_simulated_and_is_the_same_in_each_run() -> None:
    table = ringsim.bandwidth(2, FEW_SIZES, link=LINK)
    assert set(table.columns["kind"].tolist()) == {table.metadata["source"]} == {"simulated"}
    assert table.metadata["constants"]["links"] == {
        "all": {"alpha_s": 10e-6, "beta_s_per_byte": 8e-11}
    }
    assert table == ringsim.bandwidth(2, FEW_SIZES, link=LINK)


def test_the_command_writes_table_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def bandwidth(ranks: Any, sizes: Any, pattern: Any, device: Any, **more: Any) -> Any:
        asked.update(more, ranks=ranks, sizes=sizes, pattern=pattern, device=device)
        return measure(ranks, sizes, pattern, edge=more["edge"], link=LINK)

    measure = ringsim.bandwidth
    monkeypatch.setattr(ringsim, "bandwidth", bandwidth)
    monkeypatch.chdir(tmp_path)
    command = "bandwidth --sizes 8,1KiB,64k --pattern exchange --edge 1,0 --limit 5 --no-ceilings"
    files = ["links.json", "links.csv", "links.png"]
    assert main([*command.split(), *(word for file in files for word in ("-o", file))]) == 0
    expected = {"ranks": None, "sizes": [8, 1024, 65536], "pattern": ["exchange"], "device": "cpu"}
    assert asked == expected | {"limit_s": 5.0, "ceilings": False, "edge": (1, 0)}
    assert "fit exchange link 1->0: alpha " in capsys.readouterr().out
    assert (tmp_path / "links.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "links.json").read_text())["metadata"]["source"] == "simulated"
    assert len((tmp_path / "links.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "wrong", [["--sizes", "8,many"], ["--edge", "01"], ["-o", "links.pdf"], ["--edge", "0,3"]]
)
def test_the_command_refuses_what_it_does_not_know(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bandwidth", *wrong])
    except SystemExit as refused:  # by argparse
        code = refused.code
    assert code == 2
    assert wrong[1].rpartition(",")[2].strip("0") in capsys.readouterr().err
