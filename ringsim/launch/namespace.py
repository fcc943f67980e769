"""Packs the calls of a session, and holds the variables that stay on a rank between them.

A function from a notebook or a script is packed without its global variables. The rank runs it in a
namespace that lives as long as the rank. The variables that the function uses are sent as well,
each with a fingerprint of its value, so that a rank takes over only what is new or has changed::

    caller                                        rank
    ------                                        ----
    def step(): global loss; loss = f(lr)
    lr = 0.1
    step, {lr: 0.1, f: ...}  ------------------>  its namespace has lr, f; step assigns loss
    step, {lr: 0.1, f: ...}  ------------------>  nothing new: an lr that the rank has changed stays
    lr = 0.2
    step, {lr: 0.2, f: ...}  ------------------>  lr = 0.2
"""

from __future__ import annotations

import ast
import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from ringsim.errors import RingError
from ringsim.ring.packing import Pickler, dumps
from ringsim.state import get_state

MAIN = "__main__"


class _Pickler(Pickler):
    """Packs functions without their global variables.

    Attributes:
        used: these variables, by name.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.used: dict[str, Any] = {}

    def persistent_id(self, obj: Any) -> str | None:
        """Returns a name for the global variables of a packed function."""
        is_global = type(obj) is dict and any(obj is each for each in self.globals_ref.values())
        return MAIN if is_global else None

    def reducer_override(self, obj: Any) -> Any:
        """Returns the recipe for ``obj``; a function's recipe has no variables."""
        recipe = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and recipe is not NotImplemented:
            slots = recipe[2][1]  # of the function's state
            self.used |= slots["__globals__"]
            slots["__globals__"] = {}
        return recipe


def pack(call: Any, variables: Mapping[str, Any] | None = None) -> bytes:
    """Packs a value, and the variables that its functions use, for ``Namespace.load``.

    Args:
        call: the value.
        variables: further variables of the program.
    """
    with io.BytesIO() as out:
        pickler = _Pickler(out)
        pickler.dump(call)
        used = {**pickler.used, **(variables or {})}
        marks: dict[str, bytes] = {}
        while new := used.keys() - marks.keys():
            for name in new:
                with io.BytesIO() as part:
                    alone = _Pickler(part)
                    alone.dump(used[name])
                    marks[name] = hashlib.sha256(part.getvalue()).digest()
                    used |= alone.used
        pickler.dump({name: (marks[name], value) for name, value in used.items()})
        return out.getvalue()


class Namespace:
    """The variables of a rank's program, which are also those of its module ``__main__``."""

    def __init__(self) -> None:
        sys.modules[MAIN] = ModuleType(MAIN)
        self._marks: dict[str, bytes] = {}  # the fingerprints of the variables taken over

    def load(self, packed: bytes) -> Any:
        """Returns a packed value, and takes over the variables that are new or have changed."""
        unpickler = _Unpickler(io.BytesIO(packed))
        call, space = unpickler.load(), find_space()
        for name, (mark, value) in unpickler.load().items():
            if self._marks.get(name) != mark or name not in space:
                space[name] = value
                self._marks[name] = mark
        return call


def find_space() -> dict[str, Any]:
    """Returns the variables of the program."""
    return vars(sys.modules[MAIN])


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, _pid: str) -> dict[str, Any]:
        return find_space()


def run_source(source: str, filename: str, space: dict[str, Any] | None = None) -> Any:
    """Runs a cell's code, and returns the value of the last line.

    The cell can use ``ringsim``, and also ``ring``, which is this rank's place in its ring.

    Args:
        source: the text of the cell.
        filename: the file name for tracebacks.
        space: the variables, or None for this rank's namespace.

    Returns:
        The value of the last statement, or the value's repr if it cannot be pickled; None if the
        last statement is not an expression.

    Example:
        >>> run_source("double = 2 * number; double + 1", "<cell>", {"number": 4})
        9
    """
    space = find_space() if space is None else space
    space |= {"ring": get_state().ring, "ringsim": sys.modules["ringsim"]}
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    # the user asked to run this cell
    exec(compile(tree, filename, "exec"), space)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), filename, "eval"), space)
    return repr(value) if find_size(value) is None else value


def find_size(value: Any) -> int | None:
    """Returns the size of a packed value in bytes, or None if it cannot be packed."""
    try:
        return len(dumps(value))
    except Exception:  # pickling runs code of the value's class
        return None


# -- the calls that look at variables


@dataclass
class Reference:
    """A variable that stays on its rank, because it is large or cannot be sent.

    Attributes:
        kind: the name of its type.
        size_bytes: the size of its packed value, or None if it cannot be packed.
        shape: its shape, or None if it has none.
        fetch: a function that returns the value as ``look`` does.
    """

    kind: str
    size_bytes: int | None
    shape: tuple[int, ...] | None
    fetch: Callable[[], Any] = field(default=list, repr=False, compare=False)

    def get(self) -> Any:
        """Returns the value itself.

        Raises:
            RingError: the value cannot be sent.
        """
        if self.size_bytes is None:
            raise RingError(
                f"a {self.kind} cannot be sent from its rank. Use it there, in ranks.run."
            )
        ((value,),) = self.fetch()
        return value


def look(name: str, most_bytes: float = 1e6) -> list[Any]:
    """Returns a list of the variable's value or a reference to it, or [] if it is missing."""
    space = find_space()
    if name not in space:
        return []
    value = space[name]
    size_bytes = find_size(value)
    if size_bytes is None or size_bytes > most_bytes:
        return [Reference(type(value).__qualname__, size_bytes, getattr(value, "shape", None))]
    return [value]


def assign(**variables: Any) -> None:
    """Sets variables of the program."""
    find_space().update(variables)


def list_names() -> list[str]:
    """Returns the names of the program's variables."""
    return [name for name in find_space() if not name.startswith("__")]
