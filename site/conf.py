"""The settings with which Sphinx builds the site (`make site`).

The site shows the pages of the repository; this directory holds only the files that a site needs.
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
    *("site/*.md", "docs/**.md", "docs/examples/*.ipynb", "notebooks/*.ipynb"),
    *("benchmarks/README.md", "figures/README.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("tests/specification.md", "tests/distributed/faults.md"),
]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
myst_html_meta = {
    "description": (
        "ringsim shows how the stages of a pipeline talk: it runs, records, "
        "explains, simulates and draws them."
    )
}
# warnings about links to code, and about blocks with tables or commands that name no language
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

# Lessons and pages run when the site is built, and the build fails if one of them fails. On the
# site, views and explorers need no kernel; see frames.py.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # load nothing from other servers
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

html_theme = "furo"
html_title = f"ringsim {release}"
html_favicon = "assets/ring.svg"
html_static_path = ["_static", "assets"]
html_extra_path = [
    "root"
]  # the page that a server shows first, which redirects to the first page of the site
html_js_files = ["accessible.js"]
html_css_files = ["outputs.css"]
html_theme_options = {"top_of_page_buttons": []}


def write_pages(*_: Any) -> None:
    """Writes the pages that the site shows in frames, and the script that kernels run first.

    The pages are a recorded run and the explorers.
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
    """Has Sphinx call ``write_pages`` before it builds the site."""
    app.connect("config-inited", write_pages)
