"""What every backend must do: rules, and how one job of ranks runs them all and says how each went.

A rule is a function of (dist, rank, world_size), where ``dist`` is ``ringsim.comm`` with the backend to test in force. Every rank runs all
rules that apply to its world size, in one order, and writes a line for each; the tests read the lines of all ranks.
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

FAMILIES = ("messages", "dtypes", "collectives", "reductions", "objects", "groups", "arguments", "handles")
WORLD_SIZES = (1, 2, 3, 4)
NOT_REACHED = "was not reached"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: of its function, with what it was made for in brackets.
        check: the function.
        least: the smallest world size that it makes sense in.
    """

    name: str
    check: Callable[[Any, int, int], None]
    least: int


RULES: dict[str, Rule] = {}


def rule(*, least: int = 1, each: dict[str, Any] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a rule; with ``each``, one rule for each value, which it takes as its last argument."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        if each is None:
            RULES[check.__name__] = Rule(check.__name__, check, least)
        for label, value in (each or {}).items():
            name = f"{check.__name__}[{label}]"
            RULES[name] = Rule(name, lambda dist, rank, size, value=value: check(dist, rank, size, value), least)
        return check

    return register


def load_rules() -> dict[str, Rule]:
    """Returns all rules, by name, in the order in which they are run."""
    for family in FAMILIES:
        importlib.import_module(f"conformance_{family}")
    return RULES


def cases(skips: dict[str, str]) -> list[tuple[int, str]]:
    """Returns (world size, rule) for all that apply and are not skipped."""
    return [(size, name) for size in WORLD_SIZES for name, each in load_rules().items() if each.least <= size and name not in skips]


def run_rules(dist: Any, directory: str, skips: dict[str, str]) -> None:
    """Runs the rules on this rank, and writes how each went to ``directory``; stops at the first that fails.

    Args:
        dist: ``ringsim.comm``, initialized.
        directory: of the reports.
        skips: rules left out, with the reason.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with Path(directory, f"rank-{rank}.jsonl").open("w") as report:
        for name, each in load_rules().items():
            if each.least > size or name in skips:
                continue
            try:
                each.check(dist, rank, size)
            except Exception:
                report.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise
            report.write(json.dumps([name, ""]) + "\n")
            report.flush()


def read_verdicts(directory: Path, world_size: int) -> dict[str, str]:
    """Returns what is wrong with each rule, "" for those that passed on all ranks."""
    verdicts: dict[str, list[str]] = {}
    for rank in range(world_size):
        path = directory / f"rank-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, wrong = json.loads(line)
            verdicts.setdefault(name, []).append(f"rank {rank} of {world_size}: {wrong}" if wrong else "")
    return {
        name: "\n".join(filter(None, said)) if any(said) or len(said) == world_size else f"{NOT_REACHED} by all ranks: one hung or died"
        for name, said in verdicts.items()
    }


def make(rank: int, shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Returns what a rank puts in: small whole numbers, so that sums and products are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randint(0, 2 if dtype is torch.bool else 4, shape, generator=generator)
    return numbers.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails unless two tensors are equal to the last bit."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    left, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    assert torch.equal(left, right), (found, expected)


def strided(values: torch.Tensor) -> torch.Tensor:
    """Returns the same values in a tensor that is not contiguous."""
    columns = torch.zeros((*values.shape, 2), dtype=values.dtype)
    view = columns[..., 0]
    view.copy_(values)
    assert not view.is_contiguous()
    return view


def refused(call: Callable[[], Any]) -> None:
    """Fails unless a call raises a Python error."""
    try:
        result = call()
    except Exception:
        return
    raise AssertionError(f"nothing was raised, got {result!r}")
