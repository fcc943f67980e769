"""docs/simulation.md.

What it shows runs, and the tables of its description are those that are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ringsim.cli.description import TomlTable, read_description
from ringsim.schedules.closed_forms import Step

PAGE = Path(__file__).parent.parent.parent / "docs" / "simulation.md"
UNIT = re.compile(r"_(s|ms|us|ns|bytes|kib|mib|gib|gb_per_s|mb_per_s)$")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_its_programs_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, str(PAGE), "exec"), names)
        if number == 0:  # a token goes round
            assert (names["real"].results[0], names["virtual"].results[0]) == (4.0, 1000.0)
            assert names["virtual"].makespan_s == pytest.approx(
                1000 * (1e-3 + 10e-6 + 1024 * 8e-11), rel=1e-6
            )
    assert names["virtual"].metadata["source"] == "simulated"
    assert names["real"].metadata["source"] == "measured"
    said = capsys.readouterr().out
    promised = re.search(r"print\(run\) +# (.+)", PAGE.read_text())
    assert promised is not None
    assert promised[1] in said
    assert "median step: measured " in said
    assert "1f1b, 256 ranks, 8 microbatches: " in said


def test_its_description_is_read(tmp_path: Path) -> None:
    file = tmp_path / "page.toml"
    file.write_text(blocks("toml")[0])
    told = read_description(file)
    assert (told.schedule, told.size_bytes) == (Step("1f1b", 8, 16), 4 * 2**20)


def test_its_keys_are_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}
    finish = TomlTable.finish

    def note(table: TomlTable) -> None:
        asked.setdefault(table.name, set()).update(UNIT.sub("", key) for key in table._known)
        finish(table)

    monkeypatch.setattr(TomlTable, "finish", note)
    examples = PAGE.parent / "examples"
    ending = "\n[[degrade]]\nfrom = 0\nto = 1\nfactor = 2\n"
    for name in ("pipeline", "llama_70b", "hosts"):
        file = tmp_path / "example.toml"
        file.write_text((examples / f"{name}.toml").read_text() + ending)
        read_description(file)
    other = blocks("toml")[0].replace("backward_ms = 20 ", "input_ms = 10\nweight_ms = 10 ")
    file.write_text(other)
    read_description(file)
    file.write_text(
        re.sub(
            r"(?m)^name = .*\nmicrobatches = .*$",
            'actions = "rank 0: 0F0 0B0"',
            other.split("[[slow]]")[0],
        ).replace("ranks = 8", "ranks = 1")
    )
    read_description(file)
    file.write_text(blocks("toml")[0].replace("[link]", '[topology]\nkind = "full_bisection"'))
    read_description(file)
    rows = re.findall(r"^\| `(\[+\w+\]+)`(?:, by \w+)? \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    told: dict[str, set[str]] = {}
    for name, keys in rows:
        told.setdefault(name, set()).update(
            UNIT.sub("", key)
            for key in set(re.findall(r"`(\w+)`", keys)) - {"rendezvous", "buffered"}
        )
    asked.pop("the description")
    assert asked == told
