"""The rules for every backend, and a job of ranks that runs them all and reports each result.

A rule is a function of (dist, rank, world_size), where ``dist`` is ``ringsim.comm`` on the backend
under test. Every rank runs all rules that apply to its world size, in one order, and writes a line
for each. A test runs one job and reads the lines of all its ranks.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringsim

FAMILIES = ("messages", "collectives", "groups", "arguments", "handles")
WORLD_SIZES = (1, 2, 3, 4)
DTYPES = (
    *(
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
        "bool",
    ),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: the name of its function, followed by its value in brackets.
        check: the function.
        least: the smallest world size for which it makes sense.
    """

    name: str
    check: Callable[[Any, int, int], None]
    least: int


RULES: dict[str, Rule] = {}


def add_rule(name: str, check: Callable[[Any, int, int], None], least: int = 1) -> None:
    """Adds a rule."""
    RULES[name] = Rule(name, check, least)


def rule(
    *, least: int = 1, each: dict[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a rule.

    With ``each``, registers one rule for each value, which it takes as its last argument.
    """

    def register(check: Callable[..., None]) -> Callable[..., None]:
        if each is None:
            add_rule(check.__name__, check, least)
        for label, value in (each or {}).items():
            add_rule(
                f"{check.__name__}[{label}]",
                lambda dist, rank, size, value=value: check(dist, rank, size, value),
                least,
            )
        return check

    return register


def load_rules() -> dict[str, Rule]:
    """Returns all rules by name, in the order in which they run."""
    for family in FAMILIES:
        importlib.import_module(f"conformance_{family}")
    return RULES


def run_rules(dist: Any, directory: str, skips: dict[str, str]) -> None:
    """Runs the rules on this rank, each in a span of its name.

    Writes the results to ``directory``; stops at the first failure.

    Args:
        dist: ``ringsim.comm``, initialized.
        directory: the directory for the reports.
        skips: the rules to leave out, with the reasons.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with Path(directory, f"rank-{rank}.jsonl").open("w") as report:
        for name, each in load_rules().items():
            if each.least > size or name in skips:
                continue
            try:
                with ringsim.span(name):
                    each.check(dist, rank, size)
            except Exception:
                report.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise
            report.write(json.dumps([name, ""]) + "\n")
            report.flush()


def check_job(
    directory: Path, world_size: int, skips: dict[str, str], run: Callable[[], str]
) -> None:
    """Runs a job.

    Fails with the reports of its ranks on each rule that was broken, or that some did not reach.

    Args:
        directory: the directory in which the ranks write their reports.
        world_size: the number of ranks.
        skips: the rules to leave out, with the reasons.
        run: the function that runs the job, and returns the reason if it ended early.
    """
    assert set(skips) <= set(load_rules()), "an exception must name a rule"
    ended = run()
    said: dict[str, list[str]] = {
        name: []
        for name, each in load_rules().items()
        if each.least <= world_size and name not in skips
    }
    for rank in range(world_size):
        path = directory / f"rank-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, wrong = json.loads(line)
            said[name].append(f"rank {rank} of {world_size}: {wrong}" if wrong else "")
    broken = {name: "\n".join(filter(None, words)) for name, words in said.items() if any(words)}
    unreached = [
        name for name, words in said.items() if len(words) < world_size and name not in broken
    ]
    if broken or unreached:
        lines = [f"{name}: {words}" for name, words in broken.items()]
        raise AssertionError(
            "\n".join(
                [*lines, f"{len(unreached)} not reached by all ranks: {unreached[:3]}", ended]
            )
        )


def make(
    rank: int, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    """Returns the input of a rank.

    It has small integers, so sums and products are exact in every dtype and order.
    """
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=generator)
    return numbers.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails unless two tensors are equal to the last bit."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    left, right = (
        each.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for each in (found, expected)
    )
    assert torch.equal(left, right), (found, expected)


def strided(values: torch.Tensor) -> torch.Tensor:
    """Returns the same values in a tensor that is not contiguous."""
    columns = torch.zeros((*values.shape, 2), dtype=values.dtype)
    view = columns[..., 0]
    view.copy_(values)
    assert not view.is_contiguous() or view.numel() < 2
    return view


def refused(call: Callable[[], Any]) -> None:
    """Fails unless a call raises a Python error."""
    try:
        result = call()
    except Exception:
        return
    raise AssertionError(f"nothing was raised, got {result!r}")
