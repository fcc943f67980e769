"""The programs of docs/reference/findings.md, run on real ranks.

Each gets the finding of its heading.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import Trace
from ringsim.errors import RingError

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "reference" / "findings.md"
PAGE = FILE.read_text()
HEADINGS = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
PROGRAMS = re.findall(
    r"^### (\w+)\n(?:(?!^#).*\n)*?```python\n(def worker\(\):  # (.*)\n(?:.*\n)*?)```",
    PAGE,
    re.MULTILINE,
)
SLOW_KINDS = re.findall(r"^### (\w+)$", PAGE.partition("\n## A run that finished")[2], re.MULTILINE)
AT_ONCE = 5
# they take ranks that were started by hand, or several hosts
WITHOUT = {"rendezvous_failed", "lost", "link", "slow_link"}
VARYING = {"group_order_mismatch", "race"}  # their texts depend on the rank that comes first


class Options(NamedTuple):
    world_size: int
    limit_s: float
    more: dict[str, Any]


def read_options(text: str) -> Options:
    """Reads "2 ranks, 3 s" or '2 ranks, check="full"'."""
    ranks, *rest = text.split(", ")
    limits = [float(one.removesuffix(" s")) for one in rest if one.endswith(" s")]
    more = {"check": "full"} if 'check="full"' in rest else {}
    return Options(int(ranks.split()[0]), limits[0] if limits else 30.0, more)


def test_every_kind_has_its_program() -> None:
    assert {kind for kind, _, _ in PROGRAMS} == set(HEADINGS) - WITHOUT


def run(source: str, about: str) -> tuple[Trace, str]:
    """Returns the trace of a program, and the kind of finding while it ran.

    "" if there was none.
    """
    options = read_options(about)
    names: dict[str, Any] = {
        "ringsim": ringsim,
        "torch": torch,
        "dist": dist,
        "time": time,
        "threading": threading,
        "__name__": "page",
    }
    exec(compile(source, "page.py", "exec"), names)
    try:
        return ringsim.trace(
            names["worker"], world_size=options.world_size, limit_s=options.limit_s, **options.more
        ), ""
    except RingError as error:
        assert error.trace is not None  # noqa: PT017
        return error.trace, error.diagnosis.kind if error.diagnosis is not None else ""


@pytest.fixture(scope="module")
def runs() -> dict[str, Future[tuple[Trace, str]]]:
    """Runs all programs at the same time.

    Programs about late ranks run separately, because they would make others late.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            kind: pool.submit(run, source, about)
            for kind, source, about in PROGRAMS
            if kind not in SLOW_KINDS
        }


def shown_below(kind: str) -> str:
    """Returns the output that the page shows in the section of a kind."""
    section = PAGE.partition(f"\n### {kind}\n")[2].partition("\n### ")[0]
    return section.partition("```text\n")[2].partition("```")[0]


def without_times(text: str) -> str:
    """Returns a text without its times and shares, which differ from run to run."""
    return re.sub(r"\d[\d.]* (?:s|ms|µs|%)", "N", text)


@pytest.mark.parametrize(
    ("kind", "source", "about"), PROGRAMS, ids=[kind for kind, _, _ in PROGRAMS]
)
def test_program_is_what_its_heading_says(
    kind: str, source: str, about: str, runs: dict[str, Future[tuple[Trace, str]]]
) -> None:
    trace, said = runs[kind].result() if kind in runs else run(source, about)
    assert trace.explain().kind == kind, str(trace.explain())
    assert said in (kind, "")
    if kind not in VARYING:
        first, *_ = str(trace.explain()).splitlines()
        assert without_times(first) == without_times(shown_below(kind).splitlines()[0])


def first_of(trace: Trace) -> str:
    """Returns the text of the first finding: a line, and the indented lines that follow it."""
    first, *others = str(trace.explain()).splitlines()
    return "\n".join([first, *itertools.takewhile(lambda line: line.startswith(" "), others)])


def explain_slow_link() -> str:
    """Returns the first finding of the recorded run with a slow link."""
    return first_of(ringsim.load(ROOT / "notebooks" / "data" / "hosts_grouped.ringtrace"))


def test_the_slow_link_of_the_page_is_found() -> None:
    assert explain_slow_link() in shown_below("slow_link")


def write_outputs() -> None:
    """Writes the outputs of all programs into the page."""
    ringsim.trace(time.monotonic, world_size=2)  # loads torch, which no limit should include
    outputs = {}
    for kind, source, about in PROGRAMS:
        trace, _ = run(source, about)
        if trace.explain().kind != kind:
            raise RuntimeError(f"{kind} was not found: {trace.explain()}\n{trace.summary()}")
        outputs[kind] = first_of(trace)
    command = "$ ringsim explain notebooks/data/hosts_grouped.ringtrace"
    outputs["slow_link"] = f"{command}\n{explain_slow_link()}"
    page = PAGE
    for kind, text in outputs.items():
        before, heading, section = page.partition(f"\n### {kind}\n")
        start, fence, rest = section.partition("```text\n")
        _, end, after = rest.partition("```")
        page = f"{before}{heading}{start}{fence}{text}\n{end}{after}"
    FILE.write_text(page)


if __name__ == "__main__":
    write_outputs()
