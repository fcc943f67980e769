"""The repository: dependency lists agree, lessons are clean, and no file names a machine."""

from __future__ import annotations

import fnmatch
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ringsim

ROOT = Path(__file__).parent.parent
TEXT_SUFFIXES = {"", *".cfg .ini .ipynb .json .md .py .sh .svg .toml .txt .yaml .yml".split()}


def tracked_files() -> list[Path]:
    """Returns all files that are not ignored; in an unpacked archive, all files."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part.startswith(".venv") for part in path.parts)
        ]
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


TRACKED = tracked_files()
NOTEBOOKS = [path for path in TRACKED if path.suffix == ".ipynb"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- files


# The pattern is assembled so that this file does not match itself.
MACHINE = re.compile(
    "|".join(
        (
            # a user's directories
            r"(?<![\w.:/])/(?:home|Users|root|work|workspace|builds|scratch)/[\w.]",
            r"[A-Z]:[\\/]+Users",
            # a package index
            r"(?:index-url|find-links|trusted-host)[= ]+\S*(?:/|\.\w)",
            r"https?://[^\s/@]+:[^\s/@]+@",  # a password
            r"https?://(?:10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.)",  # a private network
        )
    )
)
NOBODYS = ("/home/student/", "/home/me/")  # examples


def test_no_text_and_no_committed_trace_names_a_machine() -> None:

    texts = [
        (path, re.sub("|".join(NOBODYS), "", path.read_text()))
        for path in TRACKED
        if path.suffix in TEXT_SUFFIXES
    ]
    for path in TRACKED:
        if path.suffix == ".ringtrace":
            trace = ringsim.load(path)
            texts.append(
                (path, "\n".join([*trace.events.tables.files, json.dumps(trace.metadata)]))
            )
    assert [
        f"{short(path)}: {match.group()}"
        for path, text in texts
        for match in MACHINE.finditer(text)
    ] == []


# -- dependencies


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


CORE = requirements(PROJECT["dependencies"])
EXTRAS = {extra: requirements(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
EVERYTHING = {
    name: requirement for group in (CORE, *EXTRAS.values()) for name, requirement in group.items()
}


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pinned = requirements([line for line in lines if line and not line.startswith("#")])
    assert all(
        re.fullmatch(r"==[\w.]+", str(requirement.specifier)) for requirement in pinned.values()
    ), "one exact version per line"
    return {name: Version(str(requirement.specifier)[2:]) for name, requirement in pinned.items()}


def test_lock_pins_everything_within_its_range() -> None:
    locked = pins("lock.txt")
    assert set(EVERYTHING) <= set(locked)
    assert [
        name
        for name, requirement in EVERYTHING.items()
        if locked[name] not in requirement.specifier
    ] == []
    assert locked["torch"] == Version("2.13.0")  # no local part, so that users can choose the build


def test_lowest_versions_are_those_of_pyproject() -> None:
    lowest = pins("lowest.txt")
    (extras,) = re.findall(
        r"lowest\.txt --editable '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text()
    )
    ranges = CORE | {
        name: requirement
        for extra in extras.split(",")
        for name, requirement in EXTRAS[extra].items()
    }
    assert set(lowest) == set(ranges)
    for name, version in lowest.items():
        assert str(ranges[name].specifier) in (
            f">={version}",
            f">={version.major}.{version.minor}",
            f">={version.major}",
        ), name
        assert version in ranges[name].specifier


def test_conda_environment_agrees_with_pyproject() -> None:
    lines = re.findall(
        r"^  - ([^:\s]+)(?: +#.*)?$", (ROOT / "environment.yml").read_text(), re.MULTILINE
    )
    conda = requirements(lines)
    assert str(conda.pop("python").specifier) == PROJECT["requires-python"]
    assert "conda-forge" in conda  # the channel
    del conda["conda-forge"], conda["pip"]
    conda["torch"] = conda.pop("pytorch")
    assert {name: requirement.specifier for name, requirement in conda.items()} == {
        name: requirement.specifier
        for name, requirement in EVERYTHING.items()
        if name not in EXTRAS["soak"] | EXTRAS["site"]
    }


def test_release_has_one_version() -> None:
    assert f"\nversion: {ringsim.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{ringsim.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


# -- the front page and the commands


def test_makefile_targets_are_in_the_docs_and_in_its_help() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "check", "lab", "figures", "clean", "help"} <= set(targets)
    assert len((readme := (ROOT / "README.md").read_text()).split()) < 400
    assert all(f"make {target}" in readme for target in ("demo", "test", "check"))
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in targets:
        assert f"make {target}" in page
        assert re.search(rf"^  make {target} +\S", shown, re.MULTILINE)


def test_commit_hooks_and_ci_run_what_make_check_runs() -> None:
    (checks,) = re.findall(r"^check: ([a-z -]+) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    hooks = re.findall(r"entry: make (\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == checks.split()
    ci = ROOT / ".ci" / "run"
    assert re.findall(r"^make .*$", ci.read_text(), re.MULTILINE) == ["make check", "make test"]
    assert ci.stat().st_mode & 0o111, ".ci/run must be executable"


def test_every_page_has_its_place_in_the_site() -> None:
    text = "".join((ROOT / "site" / name).read_text() for name in ("index.md", "decisions.md"))
    places = re.findall(r"^/([\w/.*-]+)$", text, re.MULTILINE)
    pages = [
        short(page).removesuffix(page.suffix)
        for page in TRACKED
        if page.suffix in (".md", ".ipynb")
    ]
    shown = [page for page in pages if not page.startswith(("site/", "ringsim/", "tests/"))]
    assert [
        page for page in shown if not any(fnmatch.fnmatch(page, place) for place in places)
    ] == []


def name_headings(document: Path) -> set[str]:
    """Returns the names of a document's headings in links."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_what_the_documents_link_to_exists() -> None:
    missing = []
    for document in TRACKED:
        text = document.read_text() if document.suffix == ".md" else ""
        for place, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if "://" in place:
                continue
            target = (document.parent / place).resolve() if place else document
            if not target.exists() or (
                heading and target.suffix == ".md" and heading not in name_headings(target)
            ):
                missing.append(f"{short(document)}: {place}#{heading}")
    assert missing == []


def test_tests_that_the_specification_names_exist() -> None:
    rows = [
        line
        for line in (ROOT / "tests" / "specification.md").read_text().splitlines()
        if line.startswith("| ") and "shown by" not in line
    ]
    assert len(rows) > 50
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", row)
        assert named, row
        assert [
            name for file, name in named if f"\ndef {name}(" not in sources.get(file, "")
        ] == [], row


def test_tests_that_take_long_exist() -> None:
    lines = (ROOT / "tests" / "long.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        file, name = line.partition("[")[0].split("::")
        assert re.search(rf"\b{name}\b", (ROOT / "tests" / file).read_text()), line


# -- lessons


@pytest.mark.parametrize("path", NOTEBOOKS, ids=short)
def test_lesson_is_committed_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"] >= 5) == (4, True)
    ids = [cell.get("id") for cell in notebook["cells"]]
    assert all(ids), "every cell needs an id"
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
        assert "execution" not in cell["metadata"], "times of an execution"
        assert not re.search(r"pip install.*git\+", "".join(cell["source"]))


def test_what_newcomers_are_sent_to_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Where to change what")[2].partition("##")[0]
    places = re.findall(r"`([a-z_]+/[\w/.]*|\w+\.py)`", table)
    names = re.findall(r"`(\w+)`", table)
    assert len(places) > 12
    assert len(names) > 4
    package = ROOT / "ringsim"
    assert [place for place in places if not (package / place).exists()] == []
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    assert [name for name in names if name not in source] == []


def test_each_mutation_is_of_a_line_that_is_there() -> None:
    mutations = runpy.run_path(str(ROOT / "benchmarks" / "mutations.py"))["MUTATIONS"]
    counts = {
        name: (ROOT / each.file).read_text().count(each.line) for name, each in mutations.items()
    }
    assert counts == dict.fromkeys(mutations, 1)
