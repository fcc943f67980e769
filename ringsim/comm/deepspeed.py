"""``deepspeed.comm`` on ringsim: ``from ringsim.comm import deepspeed as dist`` instead of ``from deepspeed import comm as dist``.

Names, arguments, ``ReduceOp`` and the form of ``log_summary(return_dict=True)`` are DeepSpeed's; ``ringsim.comm`` itself keeps to torch
where the two differ. What carries the messages, and what is logged, is the same for both. Names that DeepSpeed has not are those of
``ringsim.comm``.

Source:
    DeepSpeed, ``deepspeed/comm/comm.py``: names, arguments, and the keys of the summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringsim import comm
from ringsim.comm import deepspeed_names
from ringsim.comm.backend import TorchBackend as TorchBackend
from ringsim.comm.backend import set_backend as _set_backend
from ringsim.comm.deepspeed_log import describe
from ringsim.comm.deepspeed_names import OPERATIONS, get_all_ranks_from_group
from ringsim.comm.functions import MANAGING
from ringsim.comm.log import log_summary as gather_summary

_QUESTIONS = [name for name in deepspeed_names.__all__ if name not in ("OPERATIONS", "to_torch")]
globals().update(OPERATIONS)
globals().update({name: getattr(deepspeed_names, name) for name in _QUESTIONS})
__all__ = [
    *OPERATIONS,
    *_QUESTIONS,
    *("ProcessGroup", "destroy_process_group", "get_global_rank", "get_rank", "get_world_size", "is_available", "is_initialized"),
    *("configure", "get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "log_summary", "new_group", "reset_log"),
    *("TorchBackend", "set_backend", "timed_op"),
]


@dataclass(frozen=True)
class ProcessGroup:
    """A group as DeepSpeed describes it; operations take torch's groups.

    Attributes:
        comm_id: what it is called.
        ranks: its members.
    """

    comm_id: Any
    ranks: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def is_available() -> bool:
    """Returns True."""
    return True


def is_initialized() -> bool:
    """Returns whether the ranks are joined."""
    return bool(MANAGING["is_initialized"]())


def get_rank(group: Any = None) -> int:
    """Returns this rank's number within a group; its global rank for None."""
    return int(MANAGING["get_rank"](group))


def get_world_size(group: Any = None) -> int:
    """Returns how many ranks a group has; of all for None."""
    return int(MANAGING["get_world_size"](group))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns the global rank of a member of a group; of the group of all for None."""
    return get_all_ranks_from_group(group)[group_rank]


def new_group(ranks: Sequence[int] | None) -> Any:
    """Makes a group; all ranks call it, and it blocks until all have."""
    return MANAGING["new_group"](ranks)


def destroy_process_group(group: Any = None) -> None:
    """Ends a group, or for None the job; every member calls it when its messages are done."""
    MANAGING["destroy_process_group"](group)


def set_backend(backend: Any = None) -> None:
    """Makes another backend the current one, as ``ringsim.comm.set_backend`` does; with None, as in DeepSpeed, it stays."""
    if backend is not None:
        _set_backend(backend)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Brings the logs of all ranks together, as ``ringsim.comm.log_summary`` does; rank 0 prints them. All ranks call it.

    Args:
        show_straggler: whether straggler time is printed, and in the dictionary.
        return_dict: whether to return a dictionary.

    Returns:
        None, or a dictionary with DeepSpeed's keys: ``summary`` and ``straggler_analysis`` by name and size in bytes, and ``metadata``.
        Unlike DeepSpeed's, a value is of all ranks, and a latency is of one operation.
    """
    table = gather_summary(show_straggler=show_straggler)
    if not return_dict:
        return None
    summary, stragglers = describe(table)
    return {
        "summary": summary,
        "straggler_analysis": stragglers if show_straggler else None,
        "metadata": {
            "world_size": table.world_size,
            "rank": get_rank() if is_initialized() else 0,
            "timestamp": datetime.now(UTC).isoformat(),
        },
    }


def __getattr__(name: str) -> Any:
    """Returns what ``ringsim.comm`` has under a name that DeepSpeed has not; ``cdb``, the current backend, is one."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(comm, name)
