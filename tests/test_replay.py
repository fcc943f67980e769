"""Tests of replay: lessons show recorded runs, without torch and without running anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import ringsim
from ringsim.errors import RingError

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
# Torch is not loaded. Plots are not drawn, because the tests that run the lessons check them.
PRELUDE = (
    "import sys; sys.modules['torch'] = None; import ringsim; del ringsim.Trace._repr_mimebundle_"
)


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    client = NotebookClient(
        nbformat.v4.new_notebook(), timeout=240, resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.comm_open_handlers.clear()
    with client.setup_kernel(env={**os.environ, "RINGSIM_REPLAY": "1", "MPLBACKEND": "agg"}):
        yield client


@pytest.mark.parametrize(
    "lesson",
    ["00_four_processes", "01_ring", "02_send_recv_deadlock", "09_diagnose", "11_slow_link"],
)
def test_a_lesson_goes_to_its_end_without_torch(lesson: str, client: NotebookClient) -> None:
    client.nb = nbformat.read(NOTEBOOKS / f"{lesson}.ipynb", as_version=4)
    client.reset_execution_trackers()
    client.kc.execute(f"get_ipython().reset(new_session=True)\n{PRELUDE}", silent=True)
    texts = {}
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)  # a run without a record raises an error here
        texts[cell.id] = "".join(
            out.get("text", "") + out.get("data", {}).get("text/plain", "")
            for out in cell.get("outputs", ())
        )
        if "check.prediction" in cell.source:
            assert "Write your prediction first." in texts[cell.id]
        elif "check." in cell.source and lesson != "09_diagnose":
            assert ": undecided" in texts[cell.id], "answers must be undecided, not wrong"
    if lesson == "00_four_processes":
        assert texts["keep-look"] == "rank 2 has the number: 20\nthe notebook has a number: False\n"
        assert texts["timeline-table"].startswith("rank 0 received: 30 \n")
    traces = [
        text
        for text in texts.values()
        if "Trace of " in text and "patients.py" not in text and "hosts.py" not in text
    ]
    assert traces or lesson == "11_slow_link", (
        "every lesson except 11 must replay a run that shows a trace"
    )
    assert all(
        "(replayed, measured, gloo, " in text and "nothing runs here" in text for text in traces
    )


def test_what_has_no_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSIM_REPLAY", "1")
    with pytest.raises(RingError, match="not in an unchanged cell of a lesson"):
        ringsim.trace(lambda: 7, world_size=2)
    with pytest.raises(RingError, match="cannot start ranks: RINGSIM_REPLAY is set"):
        ringsim.bandwidth(sizes=[8])
    monkeypatch.setenv("RINGSIM_REPLAY", "0")
    assert ringsim.trace(lambda: 7, world_size=1).results == [7]
