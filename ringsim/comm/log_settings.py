"""The settings of the log, from arguments and from a DeepSpeed configuration, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ringsim.errors import ArgumentError

__all__ = ["read_settings"]

_SWITCHES: Final = ("enabled", "prof_all", "verbose", "debug")


def read_settings(
    deepspeed_config: Any, enabled: object, prof_all: object, prof_ops: object, verbose: object, debug: object
) -> dict[str, Any]:
    """Returns the settings that are given; an argument comes before the configuration.

    Args:
        deepspeed_config: a dictionary with the section "comms_logger", or an object whose ``comms_config`` has it; None for none.
        enabled: True, False, or None where not given.
        prof_all: likewise.
        prof_ops: names, or None where not given.
        verbose: as ``enabled``.
        debug: as ``enabled``.

    Raises:
        ArgumentError: a value is of the wrong kind.

    Example:
        >>> read_settings({"comms_logger": {"enabled": True, "prof_ops": ["isend"]}}, None, None, None, True, None)
        {'enabled': True, 'verbose': True, 'prof_ops': frozenset({'isend'})}
    """
    given = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug, "prof_ops": prof_ops}
    section = _read_section(deepspeed_config)
    merged = {name: section.get(name) if value is None else value for name, value in given.items()}
    settings: dict[str, Any] = {name: value for name, value in merged.items() if value is not None}
    for name in _SWITCHES:
        if not isinstance(settings.get(name, True), bool):
            raise ArgumentError(f"{name} must be True or False, got {settings[name]!r} (configure). Leave it out to keep it as it is.")
    if "prof_ops" in settings:
        names = settings["prof_ops"]
        if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
            raise ArgumentError(f'prof_ops must be a list of names, got {names!r} (configure). Write prof_ops=["all_reduce"].')
        settings["prof_ops"] = frozenset(names)
    return settings


def _read_section(config: Any) -> Mapping[str, Any]:
    """Returns the section "comms_logger" of a DeepSpeed configuration, as a mapping; empty where there is none."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        section = config.get("comms_logger", {})
    else:
        section = getattr(getattr(config, "comms_config", None), "comms_logger", {})
    if isinstance(section, Mapping):
        return section
    return {name: getattr(section, name, None) for name in (*_SWITCHES, "prof_ops")}
