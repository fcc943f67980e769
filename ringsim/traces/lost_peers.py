"""How an operation is recorded whose connection was gone when it was posted: as a wait that broke, not as a refusal.

A rank may notice that its peer has died before it posts its next message, which then raises at once instead of in the wait. To the user
both are the same: a message to a rank that is gone. What was refused never reached the wire and says nothing of the other side.
"""

from __future__ import annotations

from typing import Final

from ringsim.traces.hot_path import HotPath

__all__ = ["LOST_PEER", "fail_posting"]

LOST_PEER: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "closed the connection",
    "Failed to recv",
    "failed to recv",
    "Socket is closed",
)  # how torch words an error of a rank whose peer is gone


def fail_posting(hot: HotPath, slot: int, error: BaseException) -> bool:
    """Completes the record of an operation that raised when it was posted.

    Args:
        hot: of the recorder that has the record.
        slot: where the record is.
        error: what was raised.

    Returns:
        Whether the operation was refused: False where its peer is gone.
    """
    lost = any(words in str(error) for words in LOST_PEER)
    if lost:
        hot.begin_wait(slot)
    hot.fail(slot)
    return not lost
