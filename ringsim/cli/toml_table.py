"""A table of a TOML file, read key by key: each value checked, units taken from the names of keys, and no key left over unread."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Final

from ringsim.arguments import LONGEST_S
from ringsim.errors import ArgumentError

__all__ = ["BANDWIDTH", "SIZE", "TIME", "TomlTable"]

Units = Mapping[str, Fraction]  # exact, so that 10 us are 1e-05 s, and not a rounding less
TIME: Final[Units] = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
SIZE: Final[Units] = {"bytes": Fraction(1), "kib": Fraction(2**10), "mib": Fraction(2**20), "gib": Fraction(2**30)}
BANDWIDTH: Final[Units] = {"gb_per_s": Fraction(10**9), "mb_per_s": Fraction(10**6)}
_LARGEST: Final = 10**30  # of any number: far beyond what means something, far below what no float can hold


class TomlTable:
    """One table, which remembers what was asked for; ``finish`` complains of everything else.

    Args:
        name: as the file spells it, ``[link]``.
        file: where it stands, for errors.
        entries: what ``tomllib`` read.

    Example:
        >>> link = TomlTable("[link]", "run.toml", {"latency_us": 10, "bandwidth_gb_per_s": 12.5})
        >>> link.quantity("latency", TIME), link.quantity("bandwidth", BANDWIDTH)
        (1e-05, 12500000000.0)
        >>> link.finish()
    """

    def __init__(self, name: str, file: str, entries: Mapping[str, Any]) -> None:
        self.name = name
        self.file = file
        self._entries = entries
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        """Tells whether the file has a key; that alone does not count as reading it."""
        return key in self._entries

    def table(self, key: str) -> TomlTable:
        """Returns a table inside, ``[key]``; see ``integer``."""
        value = self._take(key, None)
        if not isinstance(value, dict):
            raise self._complain(key, f"a table, [{key}]", value)
        return TomlTable(f"[{key}]", self.file, value)

    def tables(self, key: str) -> list[TomlTable]:
        """Returns the tables of a list, ``[[key]]``, none where there is no such list; see ``integer``."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self._complain(key, f"a list of tables, [[{key}]]", value)
        return [TomlTable(f"[[{key}]]", self.file, one) for one in value]

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """Returns a whole number.

        Args:
            key: of the table.
            default: where the key is missing; None: it must be there.
            least: how small it may be.

        Raises:
            ArgumentError: it is missing, or no such number.
        """
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._complain(key, f"a whole number from {least}", value)
        if value > _LARGEST:
            raise self._complain(key, f"{_LARGEST:g} or less", value)
        return value

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Returns a number; see ``integer``."""
        value = self._take(key, default)
        if not _is_number(value) or not value >= least:
            raise self._complain(key, f"a number from {least:g}", value)
        if value > _LARGEST:
            raise self._complain(key, f"{_LARGEST:g} or less", value)
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        """Returns true or false; see ``integer``."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._complain(key, "true or false", value)
        return value

    def text(self, key: str) -> str:
        """Returns a text, which must be there; see ``integer``."""
        value = self._take(key, None)
        if not isinstance(value, str):
            raise self._complain(key, "a text", value)
        return value

    def choice(self, key: str, names: tuple[str, ...], default: str | None = None) -> str:
        """Returns one of several words; see ``integer``."""
        value = self._take(key, default)
        if value not in names:
            hint = f" Did you mean {near[0]!r}?" if isinstance(value, str) and (near := get_close_matches(value, names, 1)) else ""
            raise self._complain(key, f"one of {', '.join(names)}", value, hint)
        return str(value)

    def has(self, what: str, units: Units) -> bool:
        """Tells whether a quantity is there, in whatever unit."""
        return any(key in self._entries for key in _keys(what, units))

    def quantity(self, what: str, units: Units, default: float | None = None) -> float:
        """Returns a number whose unit its key names, as ``latency_us``, in the unit that counts 1.

        Args:
            what: the key without its unit.
            units: what a key may end in, with their factors.
            default: where no such key is there; None: one must be.

        Raises:
            ArgumentError: none is there, or two, or it has no unit, or is no number.
        """
        found = self._find_quantity(what, units, default is None)
        return float(default or 0.0) if found is None else self._measure(*found, units)

    def quantities(self, what: str, units: Units, default: float | None = None) -> float | tuple[float, ...]:
        """Returns one number for all stages, or one for each where the file has a list; see ``quantity``."""
        found = self._find_quantity(what, units, default is None)
        if found is None:
            return float(default or 0.0)
        key, value, unit = found
        if not isinstance(value, list):
            return self._measure(key, value, unit, units)
        if not value:
            raise self._complain(key, "a number, or a list with one for each stage", value)
        return tuple(self._measure(key, one, unit, units) for one in value)

    def finish(self) -> None:
        """Complains of keys that nobody asked for.

        Raises:
            ArgumentError: there is one; the error names the nearest that is known.
        """
        for key in self._entries:
            if key not in self._known:
                near = get_close_matches(key, self._known, 1, cutoff=0.5)
                hint = f"Did you mean {near[0]}?" if near else f"It may have {', '.join(self._known)}."
                raise ArgumentError(f"{self.name} must have keys that are known, got {key} ({self.file}). {hint}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        if key in self._entries:
            return self._entries[key]
        if default is None:
            near = get_close_matches(key, [each for each in self._entries if each not in self._known], 1)
            hint = f"It has {near[0]}; is that meant?" if near else "Add the line."
            raise ArgumentError(f"{self.name} must have {key}, got none ({self.file}). {hint}")
        return default

    def _find_quantity(self, what: str, units: Units, is_needed: bool) -> tuple[str, Any, Fraction] | None:
        """Returns key, value and factor of the unit; None where it is missing, and may be."""
        keys = _keys(what, units)
        self._known += keys
        found = [key for key in keys if key in self._entries]
        if what in self._entries:
            raise ArgumentError(f"{self.name} must say the unit of {what}, got {what} ({self.file}). Write {' or '.join(keys)}.")
        if len(found) > 1:
            raise ArgumentError(f"{self.name} must have {what} once, got {' and '.join(found)} ({self.file}). Take one out.")
        if found:
            return found[0], self._entries[found[0]], keys[found[0]]
        if is_needed:
            raise ArgumentError(f"{self.name} must have {what}, got none ({self.file}). Write {' or '.join(keys)}.")
        return None

    def _measure(self, key: str, value: Any, unit: Fraction, units: Units) -> float:
        if not _is_number(value) or not value >= 0:
            raise self._complain(key, "a number from 0", value)
        if units is TIME and value * float(unit) > LONGEST_S:
            raise self._complain(key, "285 years or less, for a trace counts ns", value)
        if value > _LARGEST:
            raise self._complain(key, f"{_LARGEST:g} or less", value)
        return float(Fraction(value) * unit)

    def _complain(self, key: str, rule: str, value: object, hint: str = "") -> ArgumentError:
        return ArgumentError(f"{key} must be {rule}, got {value!r} ({self.name} of {self.file}).{hint or ' Change the line.'}")


def _keys(what: str, units: Units) -> dict[str, Fraction]:
    return {f"{what}_{unit}": factor for unit, factor in units.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
