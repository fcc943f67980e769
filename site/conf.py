"""How Sphinx builds the site: `make site`.

Its sources are the repository's own pages; what stands here is what only a site has.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ringsim
from ringsim import explore

HERE = Path(__file__).parent
ROOT = HERE.parent

project, author, release = "ringsim", "The ringsim authors", ringsim.__version__
copyright = author
root_doc = "site/index"
include_patterns = [
    *("site/*.md", "docs/**.md", "notebooks/*.ipynb", "benchmarks/README.md", "figures/README.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("tests/specification.md", "tests/distributed/faults.md"),
]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
myst_html_meta = {
    "description": (
        "ringsim shows how the stages of a pipeline talk: runs, records, "
        "explains, simulates and draws them."
    )
}
# links to code; tables and commands in blocks without a language
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

# Lessons and pages run when the site is built; one that fails, fails the build. Views and explorers
# need no kernel there: see frames.py.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # nothing from other servers
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

html_theme = "furo"
html_title = f"ringsim {release}"
html_favicon = "assets/ring.svg"
html_static_path = ["_static", "assets"]
html_extra_path = ["root"]  # what a server shows first, which leads to the first page
html_js_files = ["accessible.js"]
html_css_files = ["outputs.css"]
html_theme_options = {"top_of_page_buttons": []}


def write_pages(*_: Any) -> None:
    """Writes what pages show in frames and what kernels run first.

    A recorded run and the explorers.
    """
    static, own = HERE / "_static", ROOT / "build" / "ipython"
    static.mkdir(exist_ok=True)
    startup = own / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "frames.py", startup)
    os.environ.update(IPYTHONDIR=str(own), RINGSIM_SITE_STATIC=str(static))
    ringsim.load(ROOT / "figures" / "data" / "pipeline.ringtrace").to_html(static / "run.html")
    for name in ("schedule", "ring", "generation", "deadlock", "bandwidth"):
        getattr(explore, name)().to_html(static / f"{name}.html")


def setup(app: Any) -> None:
    """Hooks in."""
    app.connect("config-inited", write_pages)
