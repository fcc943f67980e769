"""``ringsim lessons`` and ``ringsim lab``: copy the lessons to a writable place, and open them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb, make_directory, tell_written
from ringsim.errors import RingError, escape_line
from ringsim.traces.units import count

_DIRECTORY = "ringsim-lessons"
_EDITION = "student"


def add_lessons(verbs: Verbs) -> None:
    """Adds the command that copies the lessons."""
    parser = add_verb(
        verbs,
        "lessons",
        "copy the lessons into a directory without overwriting existing files",
        "ringsim lessons",
        copy,
    )
    _add_directory(parser, f", or {_DIRECTORY}-EDITION for other editions")
    words = "student (without solutions), instructor (complete) or slides (default: student)"
    parser.add_argument("--edition", default=_EDITION, help=words)


def add_lab(verbs: Verbs) -> None:
    """Adds the command that opens the lessons."""
    _add_directory(
        add_verb(
            verbs,
            "lab",
            "copy missing lessons, and open the lessons in JupyterLab",
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
        help=f"directory for the lessons (default: {_DIRECTORY}{more})",
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
        print(f"kept {count(len(kept), 'file')} that already existed")
    print(f"to open the lessons, run: ringsim lab {escape_line(str(directory))}")
    return 0


def copy_lessons(directory: Path, edition: str) -> tuple[list[Path], list[Path]]:
    """Copies an edition of the lessons and their data into a directory, which it creates.

    Returns:
        The files written, and the files kept because they already existed.

    Raises:
        ArgumentError: there is no such edition.
        RingError: the directory cannot be written.
    """
    # on use: commands that only read traces do not load the checks
    from ringsim.check.editions import make_edition

    written, kept = list[Path](), list[Path]()
    with as_file(files("ringsim") / "lessons") as lessons:
        patterns = ["*.ipynb", "data/*.ringtrace", "data/*.json", "data/*.png"]
        if edition == "instructor":
            patterns.append("data/*.py")  # these files contain the answers
        for source in sorted(file for pattern in patterns for file in lessons.glob(pattern)):
            target = directory / source.relative_to(lessons)
            if target.exists():  # it may contain the user's answers
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
                    f"cannot write the lesson {escape_line(str(target))}: {error}. "
                    "Choose another directory."
                ) from None
            written.append(target)
    return written, kept


def open_lab(options: argparse.Namespace) -> int:
    """Opens the lessons in JupyterLab and waits until JupyterLab exits; returns its exit code."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise RingError(
            "this command needs JupyterLab, which is not installed. Install it: pip install "
            "'ringsim[lab]'."
        )
    directory = options.directory or Path(_DIRECTORY)
    copy_lessons(directory, _EDITION)
    return subprocess.run(
        [sys.executable, "-m", "jupyterlab", str(directory)], check=False
    ).returncode
