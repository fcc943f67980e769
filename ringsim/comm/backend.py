"""Names removed from this module; using one raises an error that names the replacement."""

from __future__ import annotations

from typing import Any

from ringsim.errors import RingError

_INSTEAD = {
    "Backend": "Derive a class from ringsim.comm.MessageGroup and register it with "
    "torch.distributed.Backend.register_backend (see docs/how-to/write-a-backend.md)",
    "TorchBackend": "Use ringsim.comm.cdb or torch.distributed",
    "Membership": "Derive a class from ringsim.comm.MessageGroup",
    "FALLBACK_TAG": "Use ringsim.comm.FALLBACK_TAG",
    "set_backend": "Use ringsim.comm.set_backend",
    "get_backend_object": "Use ringsim.comm.cdb",
    "TORCH": "Use ringsim.comm.cdb",
}


def __getattr__(name: str) -> Any:
    """Raises RingError for a removed name."""
    if name in _INSTEAD:
        raise RingError(
            f"ringsim.comm.backend no longer contains {name}, because backends are now torch's "
            f"own. {_INSTEAD[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
