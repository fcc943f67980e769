"""The pages of the site that have cells.

What stands there runs in a real kernel, and shows what the text beside it says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from processes import RANK_VARIABLES

import ringsim
from ringsim import pipeline

SITE = Path(__file__).parent.parent / "site"
SHOWN = {  # by page: what its cells print, at least
    "gallery": ["deadlock: ranks ", "straggler: rank 1 "],
    "how-to": [
        r"deadlock: ranks [\d, and]+ wait for each other\.\n  .* at train\.py:7",
        r"Bubble of a step \(mine\)",
        r"wrote figures/timeline\.pdf",
        r"1f1b, 64 ranks, 8 microbatches: \d",
        r"zb_h1, 64 ranks, 512 microbatches: \d",
    ],
    "tutorial": [
        r"\[1, 2, 3, 0\]\nTrace of 4 ranks \(measured, ",
        r"rank \d -> \d: isend to \d \(ring:.*4,096 bytes\)",
        "straggler: rank 2 made others wait ",
        r"run: first \d.*, second \d",
        "deadlock: ranks ",
        r"Hint: Let one rank send first",
        r"closed form +27\.3%",
        r"Trace of 1,000 ranks \(simulated, ",
        r"1f1b, 64 ranks, 8 microbatches: \d",
        "36 events",
    ],
}

pytestmark = pytest.mark.xdist_group("site")


def test_what_a_server_shows_first_leads_to_the_first_page() -> None:
    (target,) = re.findall(r'url=(.+)\.html"', (SITE / "root" / "index.html").read_text())
    assert (SITE.parent / f"{target}.md").is_file()


def read_cells(page: Path) -> list[str]:
    """Returns the sources of a page's cells, as MyST-NB reads them."""
    return [
        re.sub(r"\A:tags: .*\n\n?", "", cell)
        for cell in re.findall(r"^```\{code-cell\}\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=240)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)
    }
    with client.setup_kernel(cwd=str(SITE), env={**environment, "MPLBACKEND": "agg"}):
        yield client


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_runs_and_shows_what_it_says(name: str, client: NotebookClient) -> None:
    client.nb = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in read_cells(SITE / f"{name}.md")]
    )
    client.reset_execution_trackers()
    client.kc.execute(
        f"import os; os.chdir({str(SITE)!r}); get_ipython().reset(new_session=True)", silent=True
    )
    shown = ""
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)  # a cell that raises raises here
        shown += "".join(
            out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in cell.outputs
        )
    assert [words for words in SHOWN[name] if not re.search(words, shown)] == [], shown


def test_every_page_with_cells_is_run() -> None:
    assert {page.stem for page in SITE.glob("*.md") if read_cells(page)} == set(SHOWN)


def test_the_gallery_has_every_picture() -> None:
    text = (SITE / "gallery.md").read_text()
    methods = {name for name in dir(ringsim.Trace) if name.startswith("plot_")}
    functions = {name for name in dir(pipeline) if name.startswith("plot_")}
    assert [name for name in sorted(methods | functions) if f"{name}(" not in text] == []
    for call in (
        "explain().plot()", 'gloo.json").plot()', "num_microbatches=8).plot()", ").plot()",
    ):  # fmt: skip
        assert call in text
