"""Whoever makes a trace file chooses its names: they are shown as they are, and nothing of them runs, in HTML, in SVG or in a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from trace_mutations import DATA, put_together

import ringsim
from ringsim.exchange import read_chrome, read_perfetto
from ringsim.plot.style import save_figure
from ringsim.traces.value import Trace

ATTACKS = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(2)>\"'-->]]>&lt;",
    "mathtext": "$\\frac{$ {0} %s $",
    "surrogate": "a\ud800b\0c\x1b[2J",
}


def hostile_file(path: Path, attack: str, source: str = "deadlock") -> None:
    """Writes the file of a real run, with ``attack`` in the place of every name and of every word about the machine."""
    with zipfile.ZipFile(DATA / f"{source}.ringtrace") as archive:
        meta, events = json.loads(archive.read("meta.json")), archive.read("events.parquet")
    tables, about = meta["tables"], meta["metadata"]
    for number, group in enumerate(tables["groups"]):
        group["name"] = f"{attack}{number}"
    for payload in tables["payloads"]:
        payload["dtype"] = attack
    for name in ("labels", "files"):
        tables[name] = [f"{attack}{number}" for number, _ in enumerate(tables[name])]
    about["ring_groups"] = []
    for name in ("run_id", "source", "backend", "comm_device", "date"):
        about[name] = attack
    for name in ("notes", "not_recorded", "not_checked"):
        about[name] = [attack]
    for name in ("machine", "versions"):
        about[name] = dict.fromkeys(about[name], attack)
    for one in about.get("ends", ()):
        one["about"] = one["error"] = attack
    path.write_bytes(put_together(json.dumps(meta).encode(), events))


HARMLESS = set("svg title desc metadata defs style g path use clipPath rect RDF Work type format pattern image creator Agent".split())
SOURCES = ("deadlock", "straggler", "pipeline")


class Tags(HTMLParser):
    """Every tag of a page, with its attributes, as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(params=[(source, attack) for source in SOURCES for attack in ATTACKS], ids="-".join)
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Trace:
    source, attack = request.param
    hostile_file(tmp_path / "x.ringtrace", ATTACKS[attack], source)
    return ringsim.load(tmp_path / "x.ringtrace")


def test_a_notebook_shows_it_and_runs_nothing(hostile: Trace) -> None:
    shown, _ = hostile._repr_mimebundle_()
    assert set(shown) == {"text/plain", "image/png"}, "no HTML: nothing to escape"
    diagnosis = hostile.explain()
    page = diagnosis._repr_mimebundle_()["text/html"]
    tags = Tags(page)
    assert [(tag, set(attributes)) for tag, attributes in tags.found] == [("pre", {"style"}), ("img", {"alt", "src"})]
    assert tags.found[1][1]["src"].startswith("data:image/png;base64,")  # type: ignore[union-attr]
    assert tags.text == str(diagnosis), "the words are there, all of them"


def test_an_svg_of_it_runs_nothing(hostile: Trace, tmp_path: Path) -> None:
    for number, draw in enumerate((hostile.plot_ring, hostile.plot_timeline, hostile.plot_bandwidth, hostile.explain().plot)):
        figure = draw().figure
        save_figure(figure, tmp_path / f"{number}.svg", title=hostile.metadata["run_id"], description=hostile.describe())
        plt.close(figure)
        root = ET.fromstring((tmp_path / f"{number}.svg").read_text())
        assert next(root.iter("{http://www.w3.org/2000/svg}title")).text == hostile.metadata["run_id"]
        for element in root.iter():
            name = element.tag.rpartition("}")[2]
            assert name in HARMLESS, name
            assert not [key for key in element.attrib if key.startswith("on")]


def test_a_terminal_gets_no_command(hostile: Trace) -> None:
    for text in (hostile.summary(), hostile.describe(), str(hostile.explain())):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
        text.encode("utf-8")


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_the_command_line_shows_half_a_character(verb: str, tmp_path: Path) -> None:
    hostile_file(tmp_path / "x.ringtrace", ATTACKS["surrogate"])
    ran = subprocess.run([sys.executable, "-m", "ringsim", verb, str(tmp_path / "x.ringtrace")], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "a\\ud800b\\x00c\\x1b[2J" in ran.stdout


@pytest.mark.parametrize("way", ["save", "to_perfetto", "to_chrome"])
def test_a_simulated_name_is_that_of_real_ranks(tmp_path: Path, way: str) -> None:
    """Escaped as what real ranks recorded, which is read from files: the simulator once kept it, and its own file came back different."""

    def work() -> None:
        with ringsim.span("a\x1bb\x00"):
            ringsim.compute(0.001)

    trace = ringsim.simulate(work, world_size=1, link=ringsim.Link(0, 0))
    assert "a\\x1bb\\x00" in trace.events.tables.labels
    path = tmp_path / "run"
    getattr(trace, way)(path)
    read = {"save": ringsim.load, "to_perfetto": read_perfetto, "to_chrome": read_chrome}[way]
    assert read(path).events.tables.labels == trace.events.tables.labels
