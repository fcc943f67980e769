"""Reads a table of a TOML file key by key.

`TomlTable` checks each value against a `Rule`, takes the unit of a quantity from the name of its
key, and rejects keys that were not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Final

from ringsim.errors import LONGEST_S, ArgumentError, is_integer, is_list, is_number, say


@dataclass(frozen=True)
class Rule:
    """What a value must be.

    Attributes:
        words: the rule, for errors.
        fits: whether a value keeps it.
        make: the type that a value is to have.
    """

    words: str
    fits: Callable[[Any], bool]
    make: Callable[[Any], Any]


def at_least(least: int = 0) -> Rule:
    """Returns the rule for a whole number."""
    words = f"a whole number from {least}"
    return Rule(words, lambda value: is_integer(value) and number(least).fits(value), int)


def number(least: float = 0.0) -> Rule:
    """Returns the rule for any number."""
    words = f"a number from {least:g}"
    return Rule(words, lambda value: is_number(value) and value >= least, float)


TEXT: Final = Rule("a text", lambda value: isinstance(value, str), str)
TRUTH: Final = Rule("true or false", lambda value: isinstance(value, bool), bool)


@dataclass(frozen=True)
class Units:
    """The units that a quantity may have.

    Attributes:
        factors: what each is in the first one. Exact, so that 10 us are 1e-05 s without a rounding
            error.
        most: the largest quantity that is taken, in the first one.
        rule: says so.
    """

    factors: Mapping[str, Fraction | int]
    most: float
    rule: str

    def keys(self, what: str) -> dict[str, Fraction | int]:
        """Returns the keys that give a quantity, with the factor of each."""
        return {f"{what}_{unit}": factor for unit, factor in self.factors.items()}


# of any number: far beyond anything sensible, far below the limit of a float
_LARGEST: Final = 1e30
TIME: Final = Units(
    {"s": 1, "ms": Fraction("1e-3"), "us": Fraction("1e-6"), "ns": Fraction("1e-9")},
    LONGEST_S,
    "285 years or less, since a trace counts ns",
)
SIZE: Final = Units(
    {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}, 2**53, f"{2**53:,} bytes or less"
)
BANDWIDTH: Final = Units(
    {"gb_per_s": 10**9, "mb_per_s": 10**6}, _LARGEST, f"{_LARGEST:g} bytes a second or less"
)


class TomlTable:
    """One table of a TOML file.

    Reading a key checks its value; ``finish`` rejects the keys that were not read. Every method
    raises ArgumentError if a value breaks its rule. A default of None means that the key must be
    there.

    Args:
        name: as the file spells it, ``[link]``.
        file: the file that holds it, for errors.
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
        self._inner: list[TomlTable] = []

    def __contains__(self, key: str) -> bool:
        """Returns whether the table has a key; asking does not count as reading it."""
        return key in self._entries

    def table(self, key: str) -> TomlTable:
        """Returns an inner table, ``[key]``."""
        rule = Rule(f"a table, [{key}]", lambda value: isinstance(value, dict), dict)
        return self._open(f"[{key}]", self.read(key, rule))

    def tables(self, key: str) -> list[TomlTable]:
        """Returns the tables of a list, ``[[key]]``; none if there is no such list."""
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
            raise self.wrong(key, f"{_LARGEST:g} or less", say(value))
        return rule.make(value)

    def choice(self, key: str, names: tuple[str, ...], default: str | None = None) -> str:
        """Returns one of several words."""
        value = self._find(key, default)
        if value not in names:
            near = get_close_matches(value, names, 1) if isinstance(value, str) else []
            raise self.wrong(
                key,
                f"one of {', '.join(names)}",
                say(value),
                f"Did you mean {near[0]!r}?" if near else "Change the line.",
            )
        return str(value)

    def quantity(
        self, what: str, units: Units, default: Any = None, *, by_stage: bool = False
    ) -> Any:
        """Returns a number in the unit whose factor is 1.

        Its key ends in its unit, such as ``latency_us``. With ``by_stage``, the file may have a
        list, which becomes a tuple with one for each stage.
        """
        keys = units.keys(what)
        self._known += keys
        found = [key for key in keys if key in self]
        if what in self:
            raise ArgumentError(
                f"{self.name} must say the unit of {what}, got {what} ({self.file}). Write "
                f"{' or '.join(keys)}."
            )
        if len(found) > 1:
            raise ArgumentError(
                f"{self.name} must have {what} once, got {' and '.join(found)} ({self.file}). "
                "Take one out."
            )
        if not found and default is None:
            raise ArgumentError(
                f"{self.name} must have {what}, got none ({self.file}). Write {' or '.join(keys)}."
            )
        if not found:
            return default
        key, value = found[0], self._entries[found[0]]
        measured = [
            self._measure(key, one, keys[key], units)
            for one in (value if by_stage and is_list(value) and value else [value])
        ]
        return tuple(measured) if is_list(value) else measured[0]

    def _measure(self, key: str, value: Any, factor: Fraction | int, units: Units) -> float:
        if not is_number(value) or value < 0:
            raise self.wrong(key, "a number from 0", say(value))
        exact = Fraction(value) * factor
        if exact > units.most:
            raise self.wrong(key, units.rule, say(value))
        return float(exact)

    def finish(self) -> None:
        """Rejects keys that were not read, here and in the inner tables.

        The error names the most similar key that was.
        """
        for key in self._entries:
            if key not in self._known:
                near = get_close_matches(key, self._known, 1, cutoff=0.5)
                hint = (
                    f"Did you mean {near[0]}?" if near else f"It may have {', '.join(self._known)}."
                )
                raise ArgumentError(
                    f"{self.name} must have keys that are known, got {key} ({self.file}). {hint}"
                )
        for table in self._inner:
            table.finish()

    def wrong(
        self, what: str, rule: str, got: str, hint: str = "Change the line."
    ) -> ArgumentError:
        """Makes the error about a value."""
        return ArgumentError(
            f"{what} must be {rule}, got {got} ({self.name} of {self.file}). {hint}"
        )

    def _find(self, key: str, default: Any) -> Any:
        self._known.append(key)
        if key not in self and default is None:
            near = get_close_matches(
                key, [each for each in self._entries if each not in self._known], 1
            )
            hint = f"It has {near[0]}; is that meant?" if near else "Add the line."
            raise ArgumentError(f"{self.name} must have {key}, got none ({self.file}). {hint}")
        return self._entries.get(key, default)
