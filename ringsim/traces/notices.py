"""What was found wrong while a program ran, written into its trace as marks: so a file that is loaded later says it, too.

Such a mark stands on the rank that found it, at the user's line, right after the record of the operation, and repeats its group, peer, tag
and payload. Its label reads ``! kind: message``, where the kind is one of ``ringsim.diagnose.finding.KINDS``.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["DESTROYED", "MADE_ANEW", "read_notice", "word_notice"]

# Labels of the marks where a rank has destroyed the world, and all groups with it, and where it has made it anew.
DESTROYED: Final = "process groups destroyed"
MADE_ANEW: Final = "process groups made anew"

_NOTICE: Final = re.compile(r"! ([a-z_]+): (.*)", re.DOTALL)


def word_notice(kind: str, message: str) -> str:
    """Returns the label of a mark that says what was found.

    Args:
        kind: kind of the finding, such as "message_mismatch".
        message: a sentence.

    Example:
        >>> word_notice("buffer_hazard", "two buffers overlap.")
        '! buffer_hazard: two buffers overlap.'
    """
    return f"! {kind}: {message}"


def read_notice(label: str) -> tuple[str, str] | None:
    """Returns kind and message of a label that ``word_notice`` made, None for any other.

    Example:
        >>> read_notice("! buffer_hazard: two buffers overlap."), read_notice("warm-up is over")
        (('buffer_hazard', 'two buffers overlap.'), None)
    """
    match = _NOTICE.fullmatch(label)
    return (match[1], match[2]) if match else None
