"""Names in the docs exist: dotted names, command options, variables and modules."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ringsim.cli import main
from ringsim.traces.findings import KINDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "decisions"),
]
NOT_NAMES = {"ringsim.trace.x", "ringsim.backends"}  # a nonexistent name; an entry point group
RESOLVE = """
import functools, sys, ringsim
for name in sys.argv[1:]:
    try:
        functools.reduce(getattr, name.split(".")[1:], ringsim)
    except AttributeError:
        print(name)
"""


DOCS = ROOT / "docs"


def find(pattern: str) -> set[str]:
    return {name for page in PAGES for name in re.findall(pattern, page.read_text("utf-8"))}


def test_a_dotted_name_is_a_module_or_found_by_import_ringsim() -> None:
    names = find(r"(?<![\w./-])ringsim(?:\.[A-Za-z_]\w*)+") - NOT_NAMES
    # in a fixed order, because resolving a name loads modules and so may define other names
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
    lines = re.findall(r"(?<![\w-])ringsim ([\w-]+)([^\n`#|]*)", page.read_text("utf-8"))
    for verb, rest in lines:
        options = rest.partition(".py")[0]  # options after a script belong to the script
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", options))
        if mentioned:
            assert mentioned <= options_of(verb), verb


@functools.cache
def options_of(verb: str) -> set[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main([verb, "--help"])
    return set(re.findall(r"--[a-z][\w-]*", printed.getvalue()))


def test_the_page_of_commands_is_that_of_the_parser() -> None:
    """Compares the page with the parser; run ``python site/command_line.py`` to update it."""
    script = runpy.run_path(str(ROOT / "site" / "command_line.py"))
    assert script["PAGE"].read_text("utf-8") == script["write_page"]()


def test_variables_that_are_read_are_listed() -> None:
    pages = [DOCS / "reference" / f"{name}.md" for name in ("environment", "launchers")]
    text = "".join(page.read_text("utf-8") for page in pages)
    source = "".join(path.read_text("utf-8") for path in (ROOT / "ringsim").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\.pop\(|\[)\s*\"([A-Z_0-9]+)\"", source))
    assert len(read) > 10
    names = [name.replace("OMPI_COMM_WORLD_LOCAL_", "OMPI_COMM_WORLD_") for name in read]
    assert [
        name for name in names if name not in text and name.rpartition("_")[0] not in text
    ] == []


def test_modules_that_the_architecture_names_exist() -> None:
    text = (DOCS / "explanation" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"(?<![\w/])([a-z]+/[a-z_]+)(?![\w/.])", text)) - {"comm/pipeline"}
    assert len(named) > 30
    package = ROOT / "ringsim"
    assert [name for name in sorted(named) if not (package / f"{name}.py").exists()] == []


def test_findings_that_the_faults_link_to_exist() -> None:
    text = (DOCS / "reference" / "faults.md").read_text("utf-8")
    linked = re.findall(r"\[(\w+)\]\(findings\.md#(\w+)\)", text)
    assert len(linked) > 30
    assert {kind for kind, _ in linked} <= set(KINDS)
    assert [kind for kind, anchor in linked if kind != anchor] == []
