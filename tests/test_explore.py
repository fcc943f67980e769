"""Explorers: simulations agree with closed forms for every choice, and pages hold all frames."""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringsim import explore
from ringsim.errors import ArgumentError

EXPLORERS = (
    explore.schedule,
    explore.ring,
    explore.bandwidth,
    explore.generation,
    explore.deadlock,
)
every = pytest.mark.parametrize("make", EXPLORERS, ids=lambda make: make.__name__)


def choose(explorer: Any, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {choice.name: rng.choice(list(choice.options)) for choice in explorer.choices}


@every
def test_any_choice_has_a_frame(make: Any) -> None:
    explorer = make()
    for choice in explorer.choices:
        assert choice.value in choice.options
        assert not choice.exported or choice.value in choice.exported
        assert set(choice.exported) <= set(choice.options)
    for seed in range(6):
        frame = explorer.frame(**choose(explorer, seed))
        assert frame.text
        assert 1 <= len(frame.traces) <= 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        explorer.frame(rank=4)
    with pytest.raises(ArgumentError, match=f"{choice.name} must be .*, got 1000"):
        explorer.frame(**{choice.name: 1000})


@pytest.mark.parametrize("right", ["1f1b", "zb_h1", "zb_h2", "zb_v", "interleaved_1f1b"])
def test_schedules_take_what_their_closed_forms_say(right: str) -> None:
    for latency in (0.0, 0.5):
        frame = explore.schedule().frame(right=right, latency=latency)
        for _, step, closed, *_ in frame.table[1:]:
            assert closed in (step, "none")
    assert frame.text.count("none") <= 3  # for gpipe, only the bubble


def test_numbers_between_the_options_can_be_typed() -> None:
    frame = explore.bandwidth().frame(latency_a=37.5, bandwidth_a=4)
    said = "A (37.5 µs, 4 GB/s) reaches half of its bandwidth with 146 KiB."
    assert frame.sentences[0] == said
    explorer = explore.ring()
    for latency, computing in ((2.5, 0.3), (99.9, 7.25)):
        row = explorer.frame(ranks=5, latency=latency, computing=computing).table[1]
        assert row[1] == row[2]
    for wrong in (2.5, 17, "4", None):
        with pytest.raises(ArgumentError, match="ranks must be an integer from 2 to 16, got"):
            explorer.frame(ranks=wrong)
    for beyond in (0.5, float("nan"), "10"):
        with pytest.raises(ArgumentError, match="latency must be a number from 1 to 100, got"):
            explorer.frame(latency=beyond)


def test_what_goes_round_a_ring_takes_what_the_closed_form_says() -> None:
    explorer = explore.ring()
    for seed in range(30):
        row = explorer.frame(**choose(explorer, seed) | {"slow": 1}).table[1]
        assert row[1] == row[2]


def test_links_give_what_the_closed_form_says() -> None:
    names, *rows = explore.bandwidth().frame().table
    assert len(rows) == 8
    assert names[1:] == tuple(
        f"{link}: {name}" for link in "AB" for name in ("simulated", "closed form", "bandwidth")
    )
    for row in rows:
        assert (row[1], row[4]) == (row[2], row[5])
    assert (rows[0][3], rows[-1][3]) == ("800 kB/s", "9.94 GB/s")  # in units that people read


def test_an_order_ends_where_the_rule_says_so() -> None:
    explorer, rules = explore.deadlock(), {"ends": "no", "never ends": "a"}
    for seed in range(40):
        text = explorer.frame(**choose(explorer, seed)).text
        found = re.match(r"The run (ends|never ends)\b.* The rule predicts (a|no) deadlock:", text)
        assert found is not None
        assert rules[found[1]] == found[2]
    eager = {"semantics": "eager up to 64 KiB"}
    assert explorer.frame(**eager).text.startswith("The run ends")
    assert explorer.frame(**eager, size=1024).text.startswith("The run never ends")


@pytest.mark.parametrize(
    "make", [explore.deadlock, explore.ring, explore.generation, explore.bandwidth]
)
def test_no_operation_of_an_explorer_has_a_line_of_ringsims_own(make: Callable[[], Any]) -> None:
    """0.2.0 cited comm/backend.py and compute_costs.py, which the operations pass through."""
    for trace in make().frame().traces:
        assert trace.events.tables.files == ()


def test_a_generation_ring_takes_as_long_as_its_plan_and_jams_where_the_closed_form_says() -> None:
    explorer = explore.generation()
    for seed in range(30):
        frame = explorer.frame(**choose(explorer, seed))
        if frame.text.startswith("The run never ends"):
            assert " 0 % " in frame.text
        else:
            _, simulated, planned = frame.table
            assert simulated[1] == planned[1]


def test_a_page_holds_the_frames_of_every_choice(tmp_path: Path) -> None:
    explorer = explore.deadlock()
    explorer.to_html(tmp_path / "explorer.html")
    (data,) = re.findall(
        r'<script type="application/x-ringsim">(.*?)</script>',
        (tmp_path / "explorer.html").read_text(),
    )
    packed = gzip.decompress(b64decode(data))
    (length,) = struct.unpack_from("<I", packed)
    head = json.loads(packed[4 : 4 + length])
    labels = [*(f"rank {rank} first" for rank in range(4)), "size", "messages"]
    assert [choice["label"] for choice in head["choices"]] == labels
    assert len(head["frames"]) == 2**6
    assert 4 + length + sum(head["sizes"]) == len(packed)
    receives = {f"rank_{rank}": "receives" for rank in range(4)}
    last = explorer.frame(**receives, size=1024, semantics="eager up to 64 KiB")
    assert head["frames"][-1]["sentences"] == list(last.sentences)
