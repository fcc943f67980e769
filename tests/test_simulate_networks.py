"""``ringsim simulate`` with links that ranks share, and with jitter: ranks go through the step, as the same run from Python does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_simulate_command import EXAMPLES, SMALL, changed, write

import ringsim
from ringsim.cli import main
from ringsim.cli.description import read_description
from ringsim.link import Link
from ringsim.pipeline import Costs, make_schedule, rehearse
from ringsim.topologies import FullBisection, Hosts, RingLinks

OUTER = {"latency_us": 10, "bandwidth_gb_per_s": 1}
HOSTS = {
    "kind": "hosts",
    "ranks_per_host": 2,
    "inner_latency_us": 1,
    "inner_bandwidth_gb_per_s": 100,
    **{f"outer_{key}": value for key, value in OUTER.items()},
}
INNER_LINK, OUTER_LINK = Link(1e-6, 1e-11), Link(1e-5, 1e-9)
TABLES: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "link"},
    "schedule": {"name": "interleaved_1f1b", "chunks": 2, "microbatches": 8},
    "model": {"forward_ms": 10, "backward_ms": 20, "activation_mib": 4},
}


def from_python(**network: Any) -> float:
    """What the step of ``TABLES`` takes, in seconds."""
    args = make_schedule("interleaved_1f1b", 4, 8, 2), Costs(forward=0.01, backward=0.02)
    trace = ringsim.simulate(rehearse, world_size=4, args=args, kwargs={"size_bytes": 4 * 2**20}, **network)
    return float(trace.metadata["end_ns"]) * 1e-9


def from_file(directory: Path, **tables: Any) -> float:
    told = read_description(write(directory, {**TABLES, **tables}))
    assert told.needs_ranks
    return float(told.rehearse().metadata["end_ns"]) * 1e-9


@pytest.mark.parametrize(
    ("table", "topology"),
    [
        (HOSTS, Hosts(2, INNER_LINK, OUTER_LINK)),
        ({"kind": "full_bisection", **OUTER}, FullBisection(OUTER_LINK)),
        ({"kind": "ring", **OUTER}, RingLinks(OUTER_LINK)),
    ],
    ids=["hosts", "full_bisection", "ring"],
)
def test_a_network_is_the_topology_of_its_name(table: dict[str, Any], topology: Any, tmp_path: Path) -> None:
    assert from_file(tmp_path, topology=table) == pytest.approx(from_python(topology=topology), rel=1e-12)


def test_where_nothing_is_shared_the_schedule_alone_gives_the_same_time(tmp_path: Path) -> None:
    told = read_description(write(tmp_path, {**TABLES, "topology": {"kind": "ring", **OUTER}}))
    alone = read_description(write(tmp_path, {**TABLES, "link": OUTER}))
    assert not alone.needs_ranks
    undisturbed = float(alone.simulate().makespan)
    assert told.rehearse().metadata["end_ns"] * 1e-9 == pytest.approx(undisturbed, abs=1e-8)
    assert float(told.simulate().makespan) == pytest.approx(undisturbed)


def test_what_disturbs_a_shared_network_is_injected(tmp_path: Path) -> None:
    found = from_file(tmp_path, topology=HOSTS, degrade=[{"from": 1, "to": 2, "factor": 3}], slow=[{"rank": 3, "factor": 2}])
    inject = [ringsim.Degrade(1, 2, 3), ringsim.Slow(3, 2)]
    assert found == pytest.approx(from_python(topology=Hosts(2, INNER_LINK, OUTER_LINK), inject=inject), rel=1e-12)


def test_jitter_is_drawn_from_its_seed(tmp_path: Path) -> None:
    jitter = {"fraction": 0.2, "seed": 7}
    found = from_file(tmp_path, link=OUTER, jitter=[jitter])
    assert found == pytest.approx(from_python(link=OUTER_LINK, inject=[ringsim.Jitter(0.2, 7)]), rel=1e-12)
    assert found != from_file(tmp_path, link=OUTER, jitter=[{**jitter, "seed": 8}])


def test_the_example_says_what_sharing_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "run.ringtrace", tmp_path / "run.png"
    assert main(["simulate", str(EXAMPLES / "hosts.toml"), "--save", str(file), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "64 MiB a message, hosts of 4 ranks, jitter)\n" in text
    took, undisturbed = (re.search(rf"^  {word} +([\d.]+) s", text, re.MULTILINE) for word in ("step", "undisturbed"))
    assert took is not None
    assert undisturbed is not None
    saved = ringsim.load(file)
    assert float(took[1]) == pytest.approx(saved.metadata["end_ns"] * 1e-9, rel=1e-5)
    assert f"bubble         {saved.bubble().of_total:.1%} of the step" in text
    assert float(took[1]) > float(undisturbed[1])
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"topology": {"kind": "host"}}, "kind must be one of hosts, full_bisection, ring, got 'host' ([topology] of "),
        ({"topology": {"kind": "host"}}, "Did you mean 'hosts'?"),
        ({"topology": {**HOSTS, "ranks_per_host": 0}}, "ranks_per_host must be a whole number from 1, got 0"),
        ({"topology": {**HOSTS, "inner_latency": 1}}, "[topology] must say the unit of inner_latency"),
        ({"topology": {**HOSTS, "outer_bandwidth_gb_per_s": 0}}, "outer_bandwidth must be above 0, got 0 ([topology] of "),
        ({"topology": {**HOSTS, "latency_us": 1}}, "[topology] must have keys that are known, got latency_us"),
        ({"topology": {"kind": "ring", "latency_us": 1}}, "[topology] must have bandwidth, got none"),
        ({"topology": HOSTS, "link": OUTER}, "the links must be said once, got [topology] and [link] or [[edge]]"),
        ({"topology": HOSTS, "edge": [{"from": 0, "to": 1, **OUTER}]}, "the links must be said once"),
        ({"topology": [HOSTS]}, "topology must be a table, [topology]"),
        ({"link": OUTER, "jitter": [{"fraction": 2}]}, "fraction must be above 0 and at most 1, got 2.0"),
        ({"link": OUTER, "jitter": [{"fraction": 0.1, "sed": 1}]}, "[[jitter]] must have keys that are known, got sed"),
        ({"link": OUTER, "jitter": {"fraction": 0.1}}, "jitter must be a list of tables, [[jitter]]"),
        ({"topology": HOSTS, "model": {"forward_ms": 1, "backward_ms": 1}}, "activation must be above 0 with [topology] or [[jitter]]"),
        (
            {"topology": HOSTS, "schedule": changed("schedule", microbatches=10**6)["schedule"]},
            "a step with [topology] or [[jitter]] must have 100,000 forward passes or fewer, got 4,000,000",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(tables: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(write(tmp_path, {**TABLES, **tables}))]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
