"""What a check returns: one verdict, one reason, one hint, and the picture of the run that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringsim.traces.value import count

if TYPE_CHECKING:
    from ringsim.traces.findings import Diagnosis
    from ringsim.traces.value import Trace

__all__ = ["CheckResult"]


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult:
    """The verdict on one answer; true where the answer passed.

    In a notebook it shows its text and, below, the picture of the run that failed, or of who waited for whom; in a terminal the text.

    Attributes:
        check: name of the check.
        passed: whether the answer holds.
        reason: why, in one sentence.
        hint: what to try next; empty where the answer passed.
        seed: what sizes and data were drawn from; passed to the check again it draws the same. None where nothing was drawn.
        world_size: number of ranks of the run that the reason is about, None where no run got that far.
        trace: what was recorded of that run, None where nothing was.
        diagnosis: who waited for whom in that run, where that is what is wrong.

    Example:
        >>> result = CheckResult("ring", False, "Rank 0 of 3 sent nothing.", "Send to ring.succ.", seed=5, world_size=3)
        >>> result
        check.ring: not yet (3 ranks, seed 5)
          Rank 0 of 3 sent nothing.
          Hint: Send to ring.succ.
        >>> bool(result)
        False
    """

    check: str
    passed: bool
    reason: str
    hint: str
    seed: int | None = None
    world_size: int | None = None
    trace: Trace | None = None
    diagnosis: Diagnosis | None = None

    def __bool__(self) -> bool:
        """Tells whether the answer passed."""
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data, for JSON; without the trace.

        Example:
            >>> CheckResult("hello", True, "It holds.", "", seed=7).as_dict()
            {'check': 'hello', 'passed': True, 'reason': 'It holds.', 'hint': '', 'seed': 7, 'world_size': None}
        """
        return {name: getattr(self, name) for name in ("check", "passed", "reason", "hint", "seed", "world_size")}

    def __repr__(self) -> str:
        """Returns the verdict as text."""
        about = [] if self.seed is None else [f"seed {self.seed}"]
        if self.world_size is not None and not (self.passed and about):
            about.insert(0, count(self.world_size, "rank"))
        lines = [f"check.{self.check}: {'passed' if self.passed else 'not yet'} ({', '.join(about)})", f"  {self.reason}"]
        return "\n".join([*lines, f"  Hint: {self.hint}"] if self.hint else lines)

    def _ipython_display_(self) -> None:
        """Shows the text and then the picture: as one output with both, a notebook would show the picture alone."""
        from IPython.display import display

        display({"text/plain": repr(self)}, raw=True)
        picture = self.diagnosis or self.trace
        if picture is not None and not self.passed:
            display(picture)
