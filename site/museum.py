"""Writes the page and the notebook about hangs on NCCL. Run ``python site/museum.py``."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import ringsim

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "docs" / "examples" / "nccl_hangs.py"
PAGE = ROOT / "docs" / "explanation" / "nccl-hangs.md"
NOTEBOOK = PROGRAMS.with_suffix(".ipynb")
LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
SEMANTICS = ("grouped", "rendezvous", "buffered")

PAGE_HEAD = """# A museum of hangs on NCCL

The programs on this page got stuck on NCCL, and were reported in public. Each is reduced to a few
lines, with a link to the thread, ringsim's verdict and a cure. All of them are in
[nccl_hangs.py](../examples/nccl_hangs.py), to which the line numbers in the verdicts refer. The
[notebook](../examples/nccl_hangs.ipynb) lets you run and change them. You need no GPU:

```python
import ringsim
from nccl_hangs import both_send_first

link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
ringsim.simulate(both_send_first, world_size=2, link=link, semantics="grouped")
```

With `semantics="grouped"`, each rank's messages on a group happen in the order in which the rank
posted them, a batch counts as one message, and a send waits for its recv ([the message
model](messages.md#the-message-model)). The verdicts come from a simulation of this order, not from
a run on a GPU. NCCL also has buffers, so that a small message may leave before its recv: try
`semantics="grouped(65536)"`. A program with a bad order may therefore pass its tests, and hang with
larger tensors or on more hosts. For measurements, see a [study of order and buffer
size](https://github.com/meta-pytorch/torchrec/pull/4472).

Messages in a bad order hang only under `"grouped"`. They pass on Gloo, so a test on CPUs does not
find the mistake. Collectives that do not match hang under all semantics. All cures end under all
three semantics.

"""

PAGE_END = """## See also

- [My job hangs](../how-to/hangs.md): find out why your own job hangs.
- [Placing messages](pipelines.md#placing-messages): the order of messages in ringsim's pipelines.
- [Findings](../reference/findings.md): every kind of verdict, and how to fix it.
"""

NOTEBOOK_HEAD = """# Hangs on NCCL to run and change

These programs got stuck on NCCL, and were reported in public. Run an exhibit: the cell prints how
the program ends under each semantics, and draws the ranks that wait for each other in NCCL's order
(`"grouped"`). Then run the cure, or change the program and find your own cure. You need no GPU.

[The page about these programs](../explanation/nccl-hangs.md) describes the model and lists the
verdicts.
"""

SETUP = '''import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringsim


def run(worker, world_size):
    """Prints how a worker ends, and returns the verdict or the run under "grouped"."""
    link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
    for semantics in ("buffered", "rendezvous", "grouped"):
        try:
            result = ringsim.simulate(worker, world_size=world_size, link=link, semantics=semantics)
            print(f"{semantics:10}  ends")
        except ringsim.errors.RingError as error:
            result = error.diagnosis
            print(f"{semantics:10}  hangs")
    return result'''


class Exhibit(NamedTuple):
    """A program that hangs, and its cure."""

    program: Callable[[], None]
    cure: Callable[[], None]
    world_size: int

    @property
    def title(self) -> str:
        """The heading of the exhibit."""
        return _describe(self.program).partition("\n")[0].rstrip(".")

    @property
    def story(self) -> str:
        """The thread and what happened, in Markdown."""
        _, source, text = _describe(self.program).split("\n\n")
        thread, place = source.split("\n")
        url, date = place.split(", ")
        return f"[{thread}]({url}), {date}.\n\n{fill(text, 100)}"


def read_exhibits() -> list[Exhibit]:
    """Returns all exhibits, in the order of the page."""
    sys.path.insert(0, str(PROGRAMS.parent))
    try:
        import nccl_hangs
    finally:
        sys.path.pop(0)
    return [Exhibit(*exhibit) for exhibit in nccl_hangs.EXHIBITS]


def _describe(function: Callable[[], None]) -> str:
    """Returns a function's docstring in Markdown."""
    return (inspect.getdoc(function) or "").replace("``", "`")


def source(function: Callable[[], None]) -> str:
    """Returns a function's source without its docstring."""
    lines = inspect.getsource(function).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.FunctionDef)
    docstring = definition.body[0]
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines)


@cache
def judge(worker: Callable[[], None], world_size: int) -> dict[str, str]:
    """Simulates a worker; returns the verdict by semantics, or "" if the worker ends."""
    verdicts = dict.fromkeys(SEMANTICS, "")
    for semantics in SEMANTICS:
        try:
            ringsim.simulate(worker, world_size=world_size, link=LINK, semantics=semantics)
        except ringsim.errors.RingError as error:
            verdicts[semantics] = str(error.diagnosis)
    return verdicts


def write_page() -> str:
    """Returns the text of the page."""
    exhibits = read_exhibits()
    verdicts = [judge(exhibit.program, exhibit.world_size) for exhibit in exhibits]
    return "".join(
        [PAGE_HEAD, *_write_table(exhibits, verdicts), *_write_rooms(exhibits, verdicts), PAGE_END]
    )


def _write_table(exhibits: list[Exhibit], verdicts: list[dict[str, str]]) -> Iterator[str]:
    yield "| exhibit | ranks | " + " | ".join(f'`"{each}"`' for each in SEMANTICS) + " |\n"
    yield "|---|---|" + "---|" * len(SEMANTICS) + "\n"
    for exhibit, by_semantics in zip(exhibits, verdicts, strict=True):
        ends = " | ".join("hangs" if by_semantics[each] else "ends" for each in SEMANTICS)
        yield f"| {exhibit.title} | {exhibit.world_size} | {ends} |\n"


def _write_rooms(exhibits: list[Exhibit], verdicts: list[dict[str, str]]) -> Iterator[str]:
    for exhibit, by_semantics in zip(exhibits, verdicts, strict=True):
        yield f"\n## {exhibit.title}\n\n{exhibit.story}\n"
        yield f"\n```python\n{source(exhibit.program)}\n```\n"
        yield f"\nVerdict:\n\n```\n{by_semantics['grouped']}\n```\n"
        yield f"\n**Cure.** {_describe(exhibit.cure)}\n"
        yield f"\n```python\n{source(exhibit.cure)}\n```\n"
    yield "\n"


def write_notebook() -> str:
    """Returns the text of the notebook."""
    cells = [_text("title", NOTEBOOK_HEAD), _code("setup", SETUP)]
    for exhibit in read_exhibits():
        name = exhibit.program.__name__.replace("_", "-")
        cells += [
            _text(f"{name}-story", f"## {exhibit.title}\n\n{exhibit.story}"),
            _code(name, _call(exhibit.program, exhibit.world_size)),
            _text(f"{name}-advice", f"**Cure.** {_describe(exhibit.cure)}"),
            _code(f"{name}-cured", _call(exhibit.cure, exhibit.world_size)),
        ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _call(function: Callable[[], None], world_size: int) -> str:
    return f"{source(function)}\n\n\nrun({function.__name__}, {world_size})"


def _text(name: str, text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text.splitlines(True)}


def _code(name: str, text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(True),
    }


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
    NOTEBOOK.write_text(write_notebook(), encoding="utf-8")
