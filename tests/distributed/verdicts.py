"""Asking a check for its verdict, and what holds for every verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ringsim.check import CheckResult

ENOUGH_S = 15.0  # what a check promises


def verdict(examine: Callable[..., CheckResult], answer: Any, seed: int | None = 1) -> CheckResult:
    start = time.monotonic()
    result = examine(answer, seed=seed)
    assert time.monotonic() - start < ENOUGH_S
    assert bool(result) is result.passed
    assert result.reason.endswith(".")
    assert "\n" not in result.reason
    assert bool(result.hint) is not result.passed
    assert json.loads(json.dumps(result.as_dict()))["passed"] is result.passed
    assert result.reason in repr(result)
    assert str(result.seed) in repr(result)
    return result


def never_ends(_: Any) -> None:
    while True:
        time.sleep(0.1)
