"""The programs of docs/diagnosis.md, run on real ranks.

Each gets the finding of its heading.
"""

from __future__ import annotations

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

PAGE = (Path(__file__).parent.parent.parent / "docs" / "diagnosis.md").read_text()
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


@pytest.mark.parametrize(
    ("kind", "source", "about"), PROGRAMS, ids=[kind for kind, _, _ in PROGRAMS]
)
def test_program_is_what_its_heading_says(
    kind: str, source: str, about: str, runs: dict[str, Future[tuple[Trace, str]]]
) -> None:
    trace, said = runs[kind].result() if kind in runs else run(source, about)
    assert trace.explain().kind == kind, str(trace.explain())
    assert said in (kind, "")
