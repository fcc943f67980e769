"""Reads a table of a TOML file key by key.

`TomlTable` checks each value against a `Rule`, reads the unit of a quantity from its key, and
rejects keys that were not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from ringsim.errors import (
    LONGEST_S,
    ArgumentError,
    is_integer,
    is_list,
    is_number,
    name_integers,
    say,
)


@dataclass(frozen=True)
class Rule:
    """A rule for a value.

    Attributes:
        words: the rule in words, for errors.
        fits: a function that returns whether a value follows the rule.
        make: the type to which a value is converted.
    """

    words: str
    fits: Callable[[Any], bool]
    make: Callable[[Any], Any]


def at_least(least: int = 0) -> Rule:
    """Returns the rule for an integer of at least ``least``."""
    return Rule(
        name_integers(least), lambda value: is_integer(value) and number(least).fits(value), int
    )


def number(least: float = 0.0) -> Rule:
    """Returns the rule for a number of at least ``least``."""
    words = f"a number of at least {least:g}" if least else "a non-negative number"
    return Rule(words, lambda value: is_number(value) and value >= least, float)


TEXT = Rule("a string", lambda value: isinstance(value, str), str)
TRUTH = Rule("true or false", lambda value: isinstance(value, bool), bool)


@dataclass(frozen=True)
class Units:
    """The units allowed for a quantity.

    Attributes:
        factors: the factor from each unit to the first, as an exact number, so that 10 us are
            1e-05 s without a rounding error.
        most: the largest accepted quantity, in the first unit.
        rule: the limit in words, for errors.
    """

    factors: Mapping[str, Fraction | int]
    most: float
    rule: str

    def keys(self, what: str) -> dict[str, Fraction | int]:
        """Returns the keys for a quantity, with the factor of each."""
        return {f"{what}_{unit}": factor for unit, factor in self.factors.items()}


# the limit for any number: far above sensible values, far below the largest float
_LARGEST = 1e30
TIME = Units(
    {"s": 1, "ms": Fraction("1e-3"), "us": Fraction("1e-6"), "ns": Fraction("1e-9")},
    LONGEST_S,
    "at most 285 years, because a trace counts ns",
)
SIZE = Units(
    {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}, 2**53, f"at most {2**53:,} bytes"
)
BANDWIDTH = Units({"gb_per_s": 10**9, "mb_per_s": 10**6}, _LARGEST, f"at most {_LARGEST:g} bytes/s")


@dataclass
class TomlTable:
    """One table of a TOML file.

    Reading a key checks its value; ``finish`` rejects the keys that were not read. Every method
    raises ArgumentError if a value breaks its rule. A default of None means that the key is
    required.

    Args:
        name: the name as the file spells it, such as ``[link]``.
        file: the file that contains the table, for errors.
        entries: the entries, from ``tomllib``.

    Example:
        >>> link = TomlTable("[link]", "run.toml", {"latency_us": 10, "bandwidth_gb_per_s": 12.5})
        >>> link.quantity("latency", TIME), link.quantity("bandwidth", BANDWIDTH)
        (1e-05, 12500000000.0)
        >>> link.finish()
    """

    name: str
    file: str
    entries: Mapping[str, Any]
    _known: list[str] = field(default_factory=list)
    _inner: list[TomlTable] = field(default_factory=list)

    def __contains__(self, key: str) -> bool:
        """Returns whether the table has a key; asking does not count as reading it."""
        return key in self.entries

    def table(self, key: str) -> TomlTable:
        """Returns an inner table, ``[key]``."""
        rule = Rule(f"a table, [{key}]", lambda value: isinstance(value, dict), dict)
        return self._open(f"[{key}]", self.read(key, rule))

    def tables(self, key: str) -> list[TomlTable]:
        """Returns the tables in the list ``[[key]]``, or an empty list if there is none."""
        rule = Rule(
            f"a list of tables, [[{key}]]",
            lambda value: is_list(value) and all(isinstance(one, dict) for one in value),
            list,
        )
        return [self._open(f"[[{key}]]", one) for one in self.read(key, rule, [])]

    def _open(self, name: str, entries: Mapping[str, Any]) -> TomlTable:
        self._inner.append(TomlTable(name, self.file, entries))
        return self._inner[-1]

    def read(self, key: str, rule: Rule, default: Any = None) -> Any:
        """Returns the value of a key."""
        value = self._find(key, default)
        if not rule.fits(value):
            raise self.wrong(key, rule.words, say(value))
        if is_number(value) and value > _LARGEST:
            raise self.wrong(key, f"at most {_LARGEST:g}", say(value))
        return rule.make(value)

    def choice(self, key: str, names: tuple[str, ...]) -> str:
        """Returns the value of a key that must be one of several words."""
        value = self._find(key)
        if value not in names:
            near = get_close_matches(value, names, 1) if isinstance(value, str) else []
            raise self.wrong(
                key,
                f"one of {', '.join(names)}",
                say(value),
                f"Did you mean {near[0]!r}?" if near else "Change this value.",
            )
        return str(value)

    def quantity(
        self, what: str, units: Units, default: Any = None, *, by_stage: bool = False
    ) -> Any:
        """Returns a quantity in its base unit (the one whose factor is 1).

        The key ends in the unit, such as ``latency_us``. With ``by_stage``, the file may contain a
        list with one quantity per stage, which is returned as a tuple.
        """
        keys = units.keys(what)
        self._known += keys
        found = [key for key in keys if key in self]
        if what in self:
            raise ArgumentError(
                f"{what} in {self.name} has no unit in its key ({self.file}). Write "
                f"{' or '.join(keys)}."
            )
        if len(found) > 1:
            raise ArgumentError(
                f"{self.name} sets {what} more than once: {' and '.join(found)} ({self.file}). "
                "Keep only one."
            )
        if not found and default is None:
            raise ArgumentError(
                f"{self.name} has no {what} ({self.file}). Add {' or '.join(keys)}."
            )
        if not found:
            return default
        key, value = found[0], self.entries[found[0]]
        measured = [
            self._measure(key, one, keys[key], units)
            for one in (value if by_stage and is_list(value) and value else [value])
        ]
        return tuple(measured) if is_list(value) else measured[0]

    def _measure(self, key: str, value: Any, factor: Fraction | int, units: Units) -> float:
        if not is_number(value) or value < 0:
            raise self.wrong(key, "a non-negative number", say(value))
        exact = Fraction(value) * factor
        if exact > units.most:
            raise self.wrong(key, units.rule, say(value))
        return float(exact)

    def finish(self) -> None:
        """Rejects keys that were not read, in this table and its inner tables.

        The error suggests the most similar known key.
        """
        for key in self.entries:
            if key not in self._known:
                near = get_close_matches(key, self._known, 1, cutoff=0.5)
                hint = (
                    f"Did you mean {near[0]}?"
                    if near
                    else f"Use one of these keys: {', '.join(self._known)}."
                )
                raise ArgumentError(f"{self.name} has an unknown key: {key} ({self.file}). {hint}")
        for table in self._inner:
            table.finish()

    def wrong(
        self, what: str, rule: str, got: str, hint: str = "Change this value."
    ) -> ArgumentError:
        """Returns the error for an invalid value."""
        return ArgumentError(
            f"{what} must be {rule}, got {got} ({self.name} in {self.file}). {hint}"
        )

    def _find(self, key: str, default: Any = None) -> Any:
        self._known.append(key)
        if key not in self and default is None:
            near = get_close_matches(
                key, [each for each in self.entries if each not in self._known], 1
            )
            hint = f"Did you mean {key} instead of {near[0]}?" if near else "Add this key."
            raise ArgumentError(f"{self.name} has no {key} ({self.file}). {hint}")
        return self.entries.get(key, default)
