"""Tests that the programs in the explanations of the virtual clock run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringsim.cli import main

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [DOCS / "explanation" / f"{name}.md" for name in ("messages", "accuracy")]
DESCRIPTIONS = DOCS / "reference" / "descriptions.md"
UNIT = re.compile(r"_(s|ms|us|ns|bytes|kib|mib|gib|gb_per_s|mb_per_s)$")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_programs_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    programs = [block for page in PAGES for block in blocks(page, "python")]
    for number, block in enumerate(programs):
        exec(compile(block, "page", "exec"), names)
        if number == 0:  # a token travels around the ring
            assert (names["real"].results[0], names["virtual"].results[0]) == (4.0, 1000.0)
            assert names["virtual"].makespan_s == pytest.approx(
                1000 * (1e-3 + 10e-6 + 1024 * 8e-11), rel=1e-6
            )
    assert names["virtual"].metadata["source"] == "simulated"
    assert names["real"].metadata["source"] == "measured"
    said = capsys.readouterr().out
    promised = re.search(r"print\(run\) +# (.+)", "".join(programs))
    assert promised is not None
    assert promised[1] in said
    assert "median step: measured " in said
    assert "gpipe, 256 ranks, 8 microbatches: " in said


def test_the_description_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.toml"
    file.write_text(blocks(DESCRIPTIONS, "toml")[0])
    assert main(["simulate", "--json", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    names = ("schedule", "num_ranks", "num_microbatches", "size_bytes")
    assert [told[name] for name in names] == ["1f1b", 8, 16, 4 * 2**20]


def keys_of(text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, set[str]]:
    """Returns the keys that each table of a description may have, as the errors list them."""
    found = {}
    for header in set(re.findall(r"(?m)^\[+\w+\]+", text)):
        file.write_text(text.replace(header, f"{header}\nzzz = 1\n", 1))
        assert main(["simulate", str(file)]) == 2
        said = capsys.readouterr().err
        told = re.search(r"unknown key: zzz \(.*\)\. Use one of these keys: (.*)\.$", said)
        assert told is not None, said
        found[header] = {UNIT.sub("", key) for key in told[1].split(", ")}
    return found


def test_the_keys_are_those_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = DOCS / "examples"
    ending = "\n[[degrade]]\nfrom = 0\nto = 1\nfactor = 2\n"
    texts = [
        (examples / f"{name}.toml").read_text() + ending
        for name in ("pipeline", "llama_70b", "hosts")
    ]
    page = blocks(DESCRIPTIONS, "toml")[0]
    halves = page.replace("backward_ms = 20 ", "input_ms = 10\nweight_ms = 10 ")
    written_out = re.sub(
        r"(?m)^name = .*\nmicrobatches = .*$",
        'actions = "rank 0: 0F0 0B0"',
        halves.split("[[slow]]")[0],
    )
    texts += [halves, written_out.replace("ranks = 8", "ranks = 1")]
    texts.append(page.replace("[link]", '[topology]\nkind = "full_bisection"'))
    asked: dict[str, set[str]] = {}
    for text in texts:
        for header, keys in keys_of(text, tmp_path / "example.toml", capsys).items():
            asked.setdefault(header, set()).update(keys)
    rows = re.findall(
        r"^\| `(\[+\w+\]+)`(?:, by \w+)? \| (.+) \|$", DESCRIPTIONS.read_text(), re.MULTILINE
    )
    told: dict[str, set[str]] = {}
    for name, keys in rows:
        told.setdefault(name, set()).update(
            UNIT.sub("", key)
            for key in set(re.findall(r"`(\w+)`", keys))
            - {"rendezvous", "buffered", "grouped", "paired"}
        )
    assert asked == told
