"""Checks the predictions that students make before a cell shows the result."""

from __future__ import annotations

from typing import Any

from ringsim.check.examination import CheckResult, shown
from ringsim.errors import is_number


def prediction(said: Any, found: Any, *, unit: str = "", within: float = 0.3) -> CheckResult:
    """Compares a prediction with the result.

    Args:
        said: the prediction, a number or a word. None means that there is no prediction yet; the
            check then does not pass.
        found: the result.
        unit: the unit of numbers.
        within: the tolerance for a number, as a fraction of the result; words must be equal.

    Returns:
        The verdict, with the prediction and the result.

    Example:
        >>> prediction(60, 63.2, unit="ms")
        check.prediction: passed
          You predicted 60 ms, and it was 63.2 ms.
        >>> prediction("deadlock", "ends").passed
        False
    """
    if said is None:
        hint = (
            "Write your prediction into the cell above that asks for it. Run that cell, and then "
            "run this cell again."
        )
        return CheckResult("prediction", False, "Write your prediction first.", hint)
    if is_number(said) and is_number(found):
        close, of = abs(said - found) <= within * abs(found), f" {unit}" if unit else ""
        reason = f"You predicted {said:g}{of}, and it was {found:.3g}{of}."
    else:
        close, reason = said == found, f"You predicted {shown(said)}, and it was {shown(found)}."
    hint = "" if close else "Why? Read on, and look at the picture again."
    return CheckResult("prediction", close, reason, hint)
