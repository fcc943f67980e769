"""Names chosen by the author of a trace file are shown, and none of them is executed."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trace_file import put_together, take_apart
from trace_mutations import DATA

import ringsim
from ringsim.cli import main
from ringsim.exchange import read_chrome, read_perfetto

# A script, an invalid formula, and characters that are not allowed in text or that fake another
# line or text direction.
ATTACK = (
    "$\\frac{$<script>alert(1)</script><img src=x onerror=alert(2)>\"'-->]]>&lt;{0} %s "
    "a\ud800b\0c\x1b[2J\r\nd\te\u202ef"
)
SHOWN = "a\\ud800b\\x00c\\x1b[2J\\r\\nd\\te\\u202ef"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]|\nd")
HARMLESS = set(
    (
        "svg title desc metadata defs style g path use clipPath rect RDF Work type format pattern "
        "image creator Agent"
    ).split()
)


def hostile_file(path: Path, source: str) -> Path:
    """Writes the file of a real run, with the attack in place of every name and machine."""
    text, events = take_apart(DATA / f"{source}.ringtrace")
    meta = json.loads(text)
    tables, about = meta["tables"], meta["metadata"]
    for number, group in enumerate(tables["groups"]):
        group["name"] = f"{ATTACK}{number}"
    for payload in tables["payloads"]:
        payload["dtype"] = ATTACK
    for name in ("labels", "files"):
        tables[name] = [f"{ATTACK}{number}" for number, _ in enumerate(tables[name])]
    about |= dict.fromkeys(("run_id", "source", "backend", "comm_device", "date"), ATTACK)
    about |= {name: [ATTACK] for name in ("notes", "not_recorded", "not_checked")}
    about["ring_groups"] = []
    for name in ("machine", "versions"):
        about[name] = dict.fromkeys(about[name], ATTACK)
    for one in about.get("ends", ()):
        # errors may have several lines
        one["about"] = one["error"] = ATTACK.replace("\n", "").replace("\t", "")
    path.write_bytes(put_together(json.dumps(meta).encode(), events))
    return path


class Tags(HTMLParser):
    """Collects every tag of a page, with its attributes, as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def check_svg(text: str) -> None:
    elements = list(ET.fromstring(text).iter())
    assert {element.tag.rpartition("}")[2] for element in elements} <= HARMLESS
    assert not [key for element in elements for key in element.attrib if key.startswith("on")]


@pytest.mark.parametrize("source", ["deadlock", "straggler"])
def test_names_are_shown_and_nothing_of_them_runs(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hostile_file(tmp_path / "x.ringtrace", source)
    trace = ringsim.load(path)
    diagnosis = trace.explain()

    shown, tags = (
        Tags(bundle["text/html"])
        for bundle in (trace._repr_mimebundle_()[0], diagnosis._repr_mimebundle_())
    )
    assert [(tag, set(attributes)) for tag, attributes in shown.found + tags.found] == [
        ("img", {"alt", "src"}),
        ("pre", {"style"}),
        ("img", {"alt", "src"}),
    ]
    for _, attributes in (shown.found[0], tags.found[1]):
        kind, _, content = (attributes["src"] or "").partition(";base64,")
        assert kind == "data:image/svg+xml"
        check_svg(base64.b64decode(content).decode())
    assert (shown.text, tags.text) == ("", str(diagnosis)), "the whole text must be displayed"

    assert main(["figures", str(path), "--for", "web", "-o", str(tmp_path)]) == 0
    assert main(["explain", "-o", str(tmp_path / "x.svg"), str(path)]) == 0
    drawn = sorted(tmp_path.glob("*.svg"))
    assert {"ring", "timeline", "x"} <= {file.stem for file in drawn}
    for file in drawn:
        check_svg(file.read_text())
    capsys.readouterr()

    texts = (trace.summary(), trace.describe(), str(diagnosis))
    assert not any(CONTROLS.search(text) for text in texts)
    for verb in ("show", "explain"):
        assert main([verb, str(path)]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert SHOWN in printed.out
        assert main([verb, str(tmp_path / "x\x1b\r\nd\t\u202e")]) == 1
        assert "x\\x1b\\r\\nd\\t\\u202e" in (said := capsys.readouterr().err)
        assert not CONTROLS.search(said)
        assert not CONTROLS.search(printed.out)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "{file}", "-o", "{bad}"], 0),
        (["show", "{file}", "-o", "{bad}.html"], 0),
        (["open", "{bad}"], 1),
        (["simulate", "{description}"], 2),
        (["show", "{file}", "-o", "{bad}.xyz"], 2),
        (["demo", "{bad}"], 2),
        (["show", "{file}", "-o", "\0{bad}/x.html"], 1),
        (["generate", "-o", "{file}/{bad}"], 1),
    ],
    ids=lambda value: " ".join(value).replace("\0", "") if isinstance(value, list) else str(value),
)
def test_names_on_the_command_line_command_no_terminal(
    words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shells complete the names of files that other users made."""
    bad = tmp_path / "x\x1b[2J\r\nd\t\u202e"
    places = {"file": DATA / "deadlock.ringtrace", "bad": bad, "description": f"{bad}.toml"}
    Path(places["description"]).write_text("[model]")
    try:
        ended = main([word.format(**places) for word in words])
    except SystemExit as end:
        ended = end.code
    printed = "".join(capsys.readouterr())
    assert ended == code, printed
    assert "x\\x1b[2J\\r\\nd\\t\\u202e" in printed
    assert not CONTROLS.search(printed)
    assert "starting" not in printed


def test_a_simulated_name_is_that_of_real_ranks(tmp_path: Path) -> None:
    """The simulator once kept such a name, and its own file loaded with another name."""

    def work() -> None:
        with ringsim.span("a\x1bb\x00"):
            ringsim.compute(0.001)

    trace = ringsim.simulate(work, world_size=1, link=ringsim.Link(0, 0))
    assert "a\\x1bb\\x00" in trace.events.tables.labels
    for write, read in (
        (trace.save, ringsim.load),
        (trace.to_perfetto, read_perfetto),
        (trace.to_chrome, read_chrome),
    ):
        write(tmp_path / "run")
        assert read(tmp_path / "run").events.tables.labels == trace.events.tables.labels
