"""``ringsim lessons`` and ``ringsim lab``.

The lessons, copied to where one can write in them, and opened.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb, make_directory, tell_written
from ringsim.errors import RingError, escape

_DIRECTORY = "ringsim-lessons"
_EDITION = "student"


def add_lessons(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb that copies them."""
    parser = add_verb(
        verbs,
        "lessons",
        "copy the lessons into a directory; what is there already stays",
        "ringsim lessons",
        copy,
    )
    _add_directory(parser, f"; of other editions {_DIRECTORY}-EDITION")
    words = "student (the default; no solutions), instructor (everything) or slides"
    parser.add_argument("--edition", default=_EDITION, help=words)


def add_lab(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb that opens them."""
    _add_directory(
        add_verb(
            verbs,
            "lab",
            "open the lessons in JupyterLab, copied where they are not there yet",
            "ringsim lab",
            open_lab,
        )
    )


def _add_directory(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        metavar="DIR",
        help=f"where they go (default: {_DIRECTORY}{more})",
    )


def copy(options: argparse.Namespace) -> int:
    """Copies the lessons and their data; returns the exit code."""
    directory = options.directory or Path(
        _DIRECTORY if options.edition == _EDITION else f"{_DIRECTORY}-{options.edition}"
    )
    written, kept = copy_lessons(directory, options.edition)
    for file in written:
        tell_written(file)
    if kept:
        print(f"kept {len(kept)} that {'was' if len(kept) == 1 else 'were'} there already")
    print(f"open them: ringsim lab {escape(str(directory), lines=False)}")
    return 0


def copy_lessons(directory: Path, edition: str) -> tuple[list[Path], list[Path]]:
    """Copies an edition of the lessons, and their data, into a directory, which is made.

    Returns:
        What it has written, and what was there and stays.

    Raises:
        ArgumentError: there is no such edition.
        RingError: the directory cannot be written.
    """
    # on use: what only reads traces does not load the checks
    from ringsim.check.editions import make_edition

    written, kept = list[Path](), list[Path]()
    with as_file(files("ringsim") / "lessons") as lessons:
        patterns = ["*.ipynb", "data/*.ringtrace", "data/*.json", "data/*.png"]
        if edition == "instructor":
            patterns.append("data/*.py")  # they have the answers
        for source in sorted(file for pattern in patterns for file in lessons.glob(pattern)):
            target = directory / source.relative_to(lessons)
            if target.exists():  # somebody's answers may be in it
                kept.append(target)
                continue
            content = source.read_bytes()
            if source.suffix == ".ipynb":
                notebook = make_edition(json.loads(content), edition)
                content = json.dumps(notebook, indent=1, ensure_ascii=False).encode() + b"\n"
            make_directory(target.parent)
            try:
                target.write_bytes(content)
            except OSError as error:
                raise RingError(
                    f"the lessons must be writable to {escape(str(target), lines=False)}, got "
                    f"{error}."
                ) from None
            written.append(target)
    return written, kept


def open_lab(options: argparse.Namespace) -> int:
    """Opens the lessons in JupyterLab, and ends when that does; returns its exit code."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise RingError(
            "JupyterLab must be installed, got a Python without it. Install it: pip install "
            "'ringsim[lab]'."
        )
    directory = options.directory or Path(_DIRECTORY)
    copy_lessons(directory, _EDITION)
    return subprocess.run(
        [sys.executable, "-m", "jupyterlab", str(directory)], check=False
    ).returncode
