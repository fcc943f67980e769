"""The cells of site pages run in a real kernel, and their outputs match the text of the page."""

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

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
SHOWN = {  # by page: patterns that its cells must print
    "site/gallery": ["deadlock: ranks ", "straggler: rank 1 "],
    "docs/tutorial": [
        r"\[1, 2, 3, 0\]\nTrace of 4 ranks \(measured, ",
        r"rank \d -> \d: isend to \d \(ring:.*4,096 bytes\)",
        "straggler: rank 2 made others wait ",
        r"run: first \d.*, second \d",
        "deadlock: ranks ",
        r"Hint: Send first on one rank",
        r"closed form +27\.3%",
        r"Trace of 1,000 ranks \(simulated, ",
        r"1f1b, 64 ranks, 8 microbatches: \d",
        "36 events",
    ],
    "docs/how-to/what-if": [
        "straggler: rank 2 made others wait ",
        r"this run would take \d+ % less \(predicted; the replay itself is ",
        r"Trace of 4 ranks \(predicted",
    ],
    "docs/how-to/bubble": [
        r"Bubble of a step \(gpipe\)",
        r"closed form +20\.0%",
        r"rank 1 +4 +closed form +4",
        r"zb_h1, 2 ranks, 4 microbatches: 13\.4, bubble 10\.4 %",
    ],
    "docs/how-to/compare": [
        r"rank 2: backward of stage 2 took 32 ms longer",
        r"median step: first 301\.058 ms",
    ],
    "docs/how-to/figures": [r"wrote figures/ring\.pdf", r"wrote figures/timeline\.pdf"],
    "docs/how-to/fit": [r"\n0 +20 +20 +0 +115 +154\n", r"\n0 +20 +20 +40 +16 +95\n"],
    "docs/how-to/hangs": [
        r"deadlock: ranks [\d, and]+ wait for each other\.\s+rank .* at train\.py:7",
        r"wrote waits\.png",
        "Deadlock tag_mismatch",
    ],
    "docs/how-to/measure-links": [r"pingpong +gloo", r"Link\(alpha_s=", r"1e-05|9\.9+e-06"],
    "docs/how-to/notebook": [
        r"\[rank 3\] the loss is ",
        r"Trace of 4 ranks \(measured, ",
        r"\(\[0\.05, 0\.05, 0\.05, 0\.05\], ",
    ],
    "docs/how-to/record": [
        r"\[8\.0, 16\.0, 24\.0, 0\.0\]",
        r"Trace of 4 ranks \(measured, ",
        r"12 \[\]",
    ],
    "docs/how-to/session": [
        r"from outside",
        r"ValueError: no such layer",
        r"\[0\.\d+, 0\.\d+\]",
    ],
    "docs/how-to/simulate": [
        r"Trace of 1,000 ranks \(simulated, ",
        r"1f1b, 64 ranks, 8 microbatches: \d",
        r"zb_h1, 64 ranks, 512 microbatches: \d",
        r"Critical path of \d+ hops",
        r"stage 2 +\d",
        "late receiver: rank 2 ",
    ],
    "docs/how-to/slow": [
        r"wrote train\.ringtrace",
        "straggler: rank 1 ",
        r"all_reduce +world +3 +5 ",
        r"30 events, 10 in the part",
    ],
}

pytestmark = pytest.mark.xdist_group("site")


def test_what_a_server_shows_first_leads_to_the_first_page() -> None:
    (target,) = re.findall(r'url=(.+)\.html"', (SITE / "root" / "index.html").read_text())
    assert (ROOT / f"{target}.md").is_file()


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
        cells=[nbformat.v4.new_code_cell(cell) for cell in read_cells(ROOT / f"{name}.md")]
    )
    client.reset_execution_trackers()
    client.kc.execute(
        f"import os; os.chdir({str((ROOT / name).parent)!r}); "
        "get_ipython().reset(new_session=True)",
        silent=True,
    )
    shown = ""
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)  # an error of the cell is raised here
        for out in cell.outputs:
            shown += out.get("text", "") + out.get("data", {}).get("text/plain", "")
    assert [words for words in SHOWN[name] if not re.search(words, shown)] == [], shown


def test_every_page_with_cells_is_run() -> None:
    pages = [*SITE.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = {
        page.relative_to(ROOT).with_suffix("").as_posix() for page in pages if read_cells(page)
    }
    assert names == set(SHOWN)


def test_the_gallery_has_every_picture() -> None:
    text = (SITE / "gallery.md").read_text()
    methods = {name for name in dir(ringsim.Trace) if name.startswith("plot_")}
    functions = {name for name in dir(pipeline) if name.startswith("plot_")}
    assert [name for name in sorted(methods | functions) if f"{name}(" not in text] == []
    for call in ("explain().plot()", 'gloo.json").plot()', "num_microbatches=8).plot()"):
        assert call in text
