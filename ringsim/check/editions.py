"""The editions of a lesson, all made from one notebook.

Students do not receive cells with the tag ``solution``. Only these cells define names that end in
``_solution``, and no other cell uses such names, so a lesson runs from top to bottom without them.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from ringsim.errors import ArgumentError

EDITIONS = ("student", "instructor", "slides")
_ANSWER = re.compile(
    r"\s*(<details><summary>(?!Hint).*?</details>|A solution is in the collapsed cell below\..*)",
    re.DOTALL,
)


def make_edition(notebook: Any, edition: str) -> Any:
    """Makes an edition of a lesson.

    The instructor edition is the complete lesson. The student edition has no solutions, and folds
    only hints. The slides are the student edition with metadata for JupyterLab, RISE and nbconvert:
    each heading begins a slide, code is on slides below it, explanations are fragments, and hints
    are speaker notes.

    Args:
        notebook: the lesson, from JSON or from nbformat; it stays unchanged.
        edition: the name of the edition, one of ``EDITIONS``.

    Returns:
        The edition, of the same type as ``notebook``.

    Raises:
        ArgumentError: there is no such edition.

    Example:
        >>> cell = {
        ...     "cell_type": "code",
        ...     "source": "share_solution = 3",
        ...     "metadata": {"tags": ["solution"]},
        ... }
        >>> [
        ...     len(make_edition({"cells": [cell], "metadata": {}}, edition)["cells"])
        ...     for edition in EDITIONS
        ... ]
        [0, 1, 0]
    """
    if edition not in EDITIONS:
        raise ArgumentError(f"edition must be one of {', '.join(EDITIONS)}, got {edition!r}.")
    made = copy.deepcopy(notebook)
    if edition == "instructor":
        return made
    made["cells"] = [cell for cell in made["cells"] if "solution" not in tags_of(cell)]
    if edition == "slides":
        # the default theme loads fonts from other servers
        made["metadata"]["rise"] = {"theme": "white"}
    for cell in made["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cell["source"] = _ANSWER.sub("", source).lstrip()
        if edition == "slides":
            cell["metadata"]["slideshow"] = {
                "slide_type": _slide_type(cell, "".join(cell["source"]))
            }
    return made


def tags_of(cell: Any) -> list[str]:
    """Returns the tags of a cell."""
    return list(cell["metadata"].get("tags", []))


def _slide_type(cell: Any, source: str) -> str:
    """Returns the slide type of a cell; a cell of type "skip" runs but is not shown."""
    if source.startswith(("## Glossary", "check.prediction(")) or re.match(
        r"my_\w+ = None", source
    ):
        return "skip"
    if cell["cell_type"] == "code":
        return "subslide"
    if source.startswith("<details><summary>Hint"):
        return "notes"
    return "slide" if source.startswith("#") else "fragment"
