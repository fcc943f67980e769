"""Predictions: what somebody says before a cell answers it, and what was found."""

from __future__ import annotations

from typing import Any

from ringsim.check.examination import CheckResult, shown
from ringsim.errors import is_number

__all__ = ["prediction"]


def prediction(said: Any, found: Any, *, unit: str = "", within: float = 0.3) -> CheckResult:
    """Compares a prediction with what was found.

    Args:
        said: a number or a word, written down before; None for nothing yet, which does not pass.
        found: what it turned out to be.
        unit: of numbers.
        within: how far off a number may be, as a fraction of what was found; words must be the
            same.

    Returns:
        The verdict, with both.

    Example:
        >>> prediction(60, 63.2, unit="ms")
        check.prediction: passed
          You said 60 ms, and it was 63.2 ms.
        >>> prediction("deadlock", "ends").passed
        False
    """
    if said is None:
        hint = "Put it into the cell above that asks for it, run that cell, then this one again."
        return CheckResult("prediction", False, "Write your prediction first.", hint)
    if is_number(said) and is_number(found):
        close, of = abs(said - found) <= within * abs(found), f" {unit}" if unit else ""
        reason = f"You said {said:g}{of}, and it was {found:.3g}{of}."
    else:
        close, reason = said == found, f"You said {shown(said)}, and it was {shown(found)}."
    return CheckResult(
        "prediction", close, reason, "" if close else "Why? Read on, and look at the picture again."
    )
