"""Removed names: backends are torch's own now. Each raises an error that names its successor."""

from __future__ import annotations

from typing import Any

from ringsim.errors import RingError

_INSTEAD = {
    "Backend": "Derive a class from ringsim.comm.MessageGroup, and register it with torch: "
    "torch.distributed.Backend.register_backend (docs/coming-from-torch.md)",
    "TorchBackend": "Use ringsim.comm.cdb, or torch.distributed",
    "Membership": "Derive a class from ringsim.comm.MessageGroup",
    "FALLBACK_TAG": "Use ringsim.comm.FALLBACK_TAG",
    "set_backend": "Use ringsim.comm.set_backend",
    "get_backend_object": "Use ringsim.comm.cdb",
    "TORCH": "Use ringsim.comm.cdb",
}


def __getattr__(name: str) -> Any:
    """Raises RingError for a name that was here."""
    if name in _INSTEAD:
        raise RingError(
            f"{name} must not be taken from ringsim.comm.backend any more, since backends are "
            f"torch's own. {_INSTEAD[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
