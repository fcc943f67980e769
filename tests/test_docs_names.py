"""The names that the docs mention exist.

Dotted names, and options of commands. For keys of a description, see test_simulation_page.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringsim.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "decisions"),
]
NOT_NAMES = {"ringsim.trace.x", "ringsim.backends"}  # what does not exist; an entry point group
RESOLVE = """
import functools, sys, ringsim
for name in sys.argv[1:]:
    try:
        functools.reduce(getattr, name.split(".")[1:], ringsim)
    except AttributeError:
        print(name)
"""


def find(pattern: str) -> set[str]:
    return {name for page in PAGES for name in re.findall(pattern, page.read_text("utf-8"))}


def test_a_dotted_name_is_a_module_or_found_by_import_ringsim() -> None:
    names = find(r"(?<![\w./-])ringsim(?:\.[A-Za-z_]\w*)+") - NOT_NAMES
    # in one order: a name that is found loads modules, in which others are found then
    command = [sys.executable, "-c", RESOLVE, *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(names) > 30
    assert [name for name in done.stdout.split() if not is_module(name)] == []


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_names_that_are_imported_exist() -> None:
    statements = find(r"from ringsim(?:\.\w+)* import [a-z]\w*(?:, \w+)*")
    assert len(statements) > 10
    exec("\n".join(statements), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_option_of_a_command_is_known(page: Path) -> None:
    lines = re.findall(r"(?<![\w-])ringsim (\w+)([^\n`#|]*)", page.read_text("utf-8"))
    for verb, rest in lines:
        options = rest.partition(".py")[0]  # those behind a script are its own
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", options))
        if mentioned:
            assert mentioned <= options_of(verb), verb


@functools.cache
def options_of(verb: str) -> set[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main([verb, "--help"])
    return set(re.findall(r"--[a-z][\w-]*", printed.getvalue()))
