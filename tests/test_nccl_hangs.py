"""The hangs on NCCL that the docs describe: programs, cures, verdicts, page and notebook."""

from __future__ import annotations

import ast
import os
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from processes import RANK_VARIABLES

import ringsim
from ringsim.errors import RingError

ROOT = Path(__file__).parent.parent
MUSEUM = runpy.run_path(str(ROOT / "site" / "museum.py"))
EXHIBITS = {each.program.__name__: each for each in MUSEUM["read_exhibits"]()}
MOST_LINES = 30
OTHERS = {"rendezvous", "buffered"}
# by program: the kind of verdict, the ranks, the calls in which they wait, and the semantics under
# which the program ends
EXPECTED = {
    "both_send_first": ("deadlock", {0: "isend to 1", 1: "isend to 0"}, OTHERS),
    "interleaved": ("deadlock", {0: "irecv from 1", 1: "irecv from 0"}, OTHERS),
    "one_f_one_b": ("deadlock", {0: "recv from 1", 1: "recv from 0"}, OTHERS),
    "looped_stages": (
        "deadlock",
        {0: "recv from 2", 1: "recv from 0", 2: "recv from 1"},
        OTHERS,
    ),
    "interleaved_1f1b": ("deadlock", {0: "recv from 1", 1: "recv from 0"}, OTHERS),
    "two_groups": ("deadlock", {0: "all_to_all_single", 2: "all_reduce"}, set()),
    "save_the_best": ("collective_mismatch", {0: "reduce", 1: "all_gather"}, set()),
    "uneven_batches": ("collective_mismatch", {0: "all_reduce", 1: "all_gather"}, set()),
    "evaluate_on_rank_0": ("collective_mismatch", {0: "broadcast", 1: "barrier"}, set()),
}

pytestmark = pytest.mark.xdist_group("museum")  # one process, which judges each program once
each_exhibit = pytest.mark.parametrize("name", EXPECTED)


def test_every_exhibit_has_an_expectation() -> None:
    assert list(EXHIBITS) == list(EXPECTED)
    assert len(EXHIBITS) >= 8


@each_exhibit
def test_a_program_hangs_as_reported(name: str) -> None:
    kind, waits, ends = EXPECTED[name]
    exhibit = EXHIBITS[name]
    with pytest.raises(RingError) as caught:
        ringsim.simulate(
            exhibit.program,
            world_size=exhibit.world_size,
            link=MUSEUM["LINK"],
            semantics="grouped",
        )
    assert caught.value.diagnosis is not None
    finding = caught.value.diagnosis.findings[0]
    assert (finding.kind, set(finding.ranks)) == (kind, set(waits))
    verdicts = MUSEUM["judge"](exhibit.program, exhibit.world_size)
    assert verdicts["grouped"] == str(caught.value.diagnosis)
    for rank, call in waits.items():
        place = rf"\b{call}\b" if kind != "deadlock" else rf"rank {rank} waits .*\b{call} \("
        assert re.search(place, verdicts["grouped"])
    assert {semantics for semantics, verdict in verdicts.items() if not verdict} == ends


@each_exhibit
def test_a_cure_ends_under_all_semantics(name: str) -> None:
    exhibit = EXHIBITS[name]
    assert exhibit.cure.__name__ == f"{name}_cured"
    assert set(MUSEUM["judge"](exhibit.cure, exhibit.world_size).values()) == {""}


@each_exhibit
def test_a_program_is_short_and_names_its_thread(name: str) -> None:
    exhibit = EXHIBITS[name]
    for function in (exhibit.program, exhibit.cure):
        text = MUSEUM["source"](function)
        assert len(text.splitlines()) <= MOST_LINES
        assert isinstance(ast.parse(text).body[0], ast.FunctionDef)
    thread = (
        r"\[[\w-]+/[\w-]+ #(\d+): .+\]\(https://github\.com/.+/\1\), \d+ [A-Z][a-z]+ 20\d\d\.\n"
    )
    assert re.match(thread, exhibit.story)


def test_the_page_and_the_notebook_show_these_programs() -> None:
    """Compares both with the programs; run ``python site/museum.py`` to update them."""
    assert MUSEUM["PAGE"].read_text("utf-8") == MUSEUM["write_page"]()
    assert MUSEUM["NOTEBOOK"].read_text("utf-8") == MUSEUM["write_notebook"]()


@pytest.mark.notebooks
def test_the_notebook_shows_each_hang_and_its_cure() -> None:
    notebook = nbformat.read(MUSEUM["NOTEBOOK"], as_version=4)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)
    }
    client = NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(MUSEUM["NOTEBOOK"].parent)}}
    )
    client.execute(env={**environment, "MPLBACKEND": "agg"})
    cells = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    for name, (kind, _, ends) in EXPECTED.items():
        hang, cure = cells[name.replace("_", "-")], cells[f"{name}_cured".replace("_", "-")]
        semantics = MUSEUM["SEMANTICS"]
        assert printed(hang) == {each: "ends" if each in ends else "hangs" for each in semantics}
        assert printed(cure) == dict.fromkeys(semantics, "ends")
        verdict, run = hang[-1]["data"], cure[-1]["data"]
        assert verdict["text/plain"].startswith(kind.replace("_", " "))
        assert "<img" in verdict["text/html"]
        assert run["text/plain"].startswith("Trace of ")
        assert "image/png" in run


def printed(outputs: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the printed words, which a kernel may send in several pieces."""
    text = "".join(output.get("text", "") for output in outputs)
    return dict(line.split() for line in text.splitlines())
