"""``ringsim lessons`` and ``ringsim lab``: the lessons, copied to where one can write in them, and opened."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb, make_directory, tell_written
from ringsim.errors import RingError, escape

_DIRECTORY = Path("ringsim-lessons")


def add_lessons(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb that copies them."""
    parser = add_verb(verbs, "lessons", "copy the lessons into a directory; what is there already stays", "ringsim lessons", copy)
    _add_directory(parser)


def add_lab(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb that opens them."""
    parser = add_verb(verbs, "lab", "open the lessons in JupyterLab, copied where they are not there yet", "ringsim lab", open_lab)
    _add_directory(parser)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, nargs="?", default=_DIRECTORY, metavar="DIR", help=f"where they go (default: {_DIRECTORY})")


def copy(options: argparse.Namespace) -> int:
    """Copies the lessons and their data; returns the exit code."""
    written, kept = copy_lessons(options.directory)
    for file in written:
        tell_written(file)
    if kept:
        print(f"kept {len(kept)} that {'was' if len(kept) == 1 else 'were'} there already")
    print(f"open them: ringsim lab {escape(str(options.directory), lines=False)}")
    return 0


def copy_lessons(directory: Path) -> tuple[list[Path], list[Path]]:
    """Copies the lessons and their data into a directory, which is made; returns what it has written, and what was there and stays.

    Raises:
        RingError: the directory cannot be written.
    """
    written, kept = list[Path](), list[Path]()
    with as_file(files("ringsim") / "lessons") as lessons:
        for source in sorted([*lessons.glob("*.ipynb"), *lessons.glob("data/*.ringtrace"), *lessons.glob("data/*.py")]):
            target = directory / source.relative_to(lessons)
            if target.exists():  # somebody's answers may be in it
                kept.append(target)
                continue
            make_directory(target.parent)
            try:
                shutil.copyfile(source, target)
            except OSError as error:
                raise RingError(f"the lessons must be writable to {escape(str(target), lines=False)}, got {error}.") from None
            written.append(target)
    return written, kept


def open_lab(options: argparse.Namespace) -> int:
    """Opens the lessons in JupyterLab, and ends when that does; returns its exit code."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise RingError("JupyterLab must be installed, got a Python without it. Install it: pip install 'ringsim[lab]'.")
    copy_lessons(options.directory)
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(options.directory)], check=False).returncode
