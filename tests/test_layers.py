"""The layers of ringsim: its packages ("rooms") are on "floors" and import only from lower floors.

There are no import cycles. The tests read the source, and count every import of ringsim, also
inside functions and for type checkers. The methods of values such as ``Trace`` are an exception:
they may import the modules that draw, write or explain the value. Tables of dotted names, such as
the contents in ``ringsim/__init__.py``, are not imports, because they are resolved on use; a test
below lists the files that may have one.

The tests also run the examples in the docstrings, module by module.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ringsim").rglob("*.py"))
}

# From the lowest floor up. A room imports from lower floors, and a package also from its own files.
# Rooms on the same floor do not import each other, except those in NEIGHBOURS.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "state", "provenance"),
    ("link", "faults", "environment", "schedules"),
    ("traces", "topologies"),
    ("diagnose", "compute_costs", "comm"),
    ("ring",),
    ("launch", "pipeline"),
    ("simulator",),
    ("prediction", "measuring", "exchange", "plot", "view", "check", "magics"),
    ("cli", "explore"),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS, start=1) for room in rooms}
NEIGHBOURS = {("plot", "prediction"), ("view", "plot"), ("view", "prediction")}
# modules of values whose methods import the modules that draw, write or explain them
VALUES = {
    "ringsim.traces.value",
    "ringsim.traces.bandwidths",
    "ringsim.traces.findings",
    "ringsim.schedules.engine",
    "ringsim.simulator.schedules",
    "ringsim.prediction.comparison",
}
# tables of public names; type checkers see the same names as imports
CONTENTS = {"ringsim", "ringsim.pipeline"}
DATA = {"numpy", "pandas", "pyarrow"}
# libraries beyond the standard library and numpy; imports only for type checkers do not count
LIBRARIES: dict[str, set[str]] = {
    "environment": {"mpi4py"},
    "traces": DATA,
    "comm": {"torch", "mpi4py", "pandas"},
    "compute_costs": {"torch"},
    "ring": {"torch", "cloudpickle"},
    "launch": {"torch", "IPython"},
    "pipeline": {"torch", "transformers"},
    "simulator": {"torch", "greenlet"},
    "prediction": {"pandas"},
    "measuring": {"torch"},
    "exchange": DATA | {"google"},
    "plot": {"matplotlib", "networkx"},
    "view": {"anywidget", "ipywidgets", "traitlets", "IPython", "pandas"},
    "check": {"torch", "cloudpickle", "IPython", "matplotlib", "nbclient", "nbformat"},
    "magics": {"IPython"},
    "explore": {"torch"},
    "cli": {"torch", "matplotlib", "cloudpickle", "IPython", "ipywidgets", "shtab"},
}


def room_of(module: str) -> str:
    """Returns the room of a module: its package, or itself at the top level."""
    return module.split(".")[1]


@cache
def imports(source: str, methods: bool = True) -> tuple[tuple[str, int, bool], ...]:
    """Lists (dotted name, line, whether only for type checkers) of every import.

    ``from a import b`` gives ``a.b``. Imports in methods are omitted unless ``methods`` is true.
    """
    tree = ast.parse(source)
    if not methods:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [one for one in node.body if not isinstance(one, ast.FunctionDef)]
    nodes = list(ast.walk(tree))
    checked = [
        node
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    for_types = {
        id(node) for block in checked for statement in block.body for node in ast.walk(statement)
    }
    found: list[tuple[str, int, bool]] = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found += [
                (prefix + alias.name, node.lineno, id(node) in for_types) for alias in node.names
            ]
    return tuple(found)


def own_module(name: str) -> str | None:
    """Returns the ringsim module of a dotted name, None for names outside of ringsim."""
    if name.partition(".")[0] != "ringsim":
        return None
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def complaints(module: str, source: str) -> list[str]:
    """Returns the imports of a module that break a rule."""
    room = room_of(module)
    floor = FLOOR[room]
    found = []
    for name, line, for_types in imports(source, module not in VALUES):
        other = own_module(name)
        if for_types and (other is None or module in CONTENTS):
            continue
        if other == "ringsim":
            if floor < FLOOR["check"]:
                found.append(
                    f"line {line} imports {name}: import it from the module that defines it, "
                    "because the contents may lead anywhere"
                )
        elif other is not None:
            there = room_of(other)
            if there != room and FLOOR[there] >= floor and (room, there) not in NEIGHBOURS:
                found.append(
                    f"line {line} imports {other} of floor {FLOOR[there]}, from floor {floor}"
                )
        else:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in {"numpy"} | LIBRARIES.get(
                room, set()
            ):
                found.append(f"line {line} imports {top}, which {room} may not")
    return sorted(found)


def test_every_room_has_a_floor() -> None:
    assert set(FLOOR) == {room_of(module) for module in MODULES if module != "ringsim"}, (
        "add the new room to FLOORS and docs/explanation/architecture.md"
    )


def test_the_house_can_be_drawn_from_memory() -> None:
    rooms = {
        path.name
        for path in (ROOT / "ringsim").iterdir()
        if path.is_dir() and any(path.glob("*.py"))
    }
    assert len(rooms) <= 15
    assert len(list((ROOT / "ringsim").glob("*.py"))) <= 12


def test_rooms_import_from_below() -> None:
    found = {
        module: complaints(module, path.read_text())
        for module, path in MODULES.items()
        if module != "ringsim"
    }
    assert {module: lines for module, lines in found.items() if lines} == {}


def test_no_circle() -> None:
    graph = {}
    for module, path in MODULES.items():
        read = imports(path.read_text(), module not in VALUES)
        found = [(own_module(name), for_types) for name, _, for_types in read]
        others = {other for other, for_types in found if not (for_types and module in CONTENTS)}
        graph[module] = others - {None, "ringsim", module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_contents_import_nothing() -> None:
    source = ast.parse(MODULES["ringsim"].read_text())
    at_run_time = [node for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)]
    light = {"importlib", "importlib.machinery", "sys", "typing", "ringsim.provenance"}
    assert {ast.unparse(node).split()[1] for node in at_run_time} <= light


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("ringsim.errors", "import torch", "errors may not"),
        (
            "ringsim.errors",
            "def late():\n    from ringsim.ring import current_ring",
            "of floor 5, from floor 1",
        ),
        (
            "ringsim.errors",
            (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from "
                "ringsim.traces.value import Trace"
            ),
            "of floor 3",
        ),
        ("ringsim.plot.style", "import torch.distributed", "plot may not"),
        ("ringsim.state", "import ringsim", "the contents may lead anywhere"),
        ("ringsim.state", "from ringsim import trace", "the contents may lead anywhere"),
        ("ringsim.launch.run", "from ringsim.pipeline import training", "of floor 6, from floor 6"),
        (
            "ringsim.traces.value",
            "try:\n    import ringsim.plot.ring\nexcept ImportError:\n    pass",
            "of floor 8",
        ),
    ],
)
def test_rule_finds_what_breaks_it(module: str, source: str, why: str) -> None:
    (complaint,) = complaints(module, source)
    assert why in complaint


def users_of(pattern: str) -> set[str]:
    """Returns the modules whose code, without comments and strings, matches a pattern."""
    found = set()
    for module, path in MODULES.items():
        if not re.search(pattern, source := path.read_text()):
            continue
        tree = ast.parse(source)
        for node in ast.walk(tree):  # docstrings and messages may match
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        if re.search(pattern, ast.unparse(tree)):
            found.add(module)
    return found


def test_nothing_behind_the_back_of_python_and_torch() -> None:
    lazy, packed = (
        {"ringsim", "ringsim.pipeline", "ringsim.ring"},
        {"ringsim.ring.packing"},
    )  # modules by name in a pickle
    assert users_of(r"\b(import_module|__import__)\b") == lazy | packed
    assert users_of(r"\b(?<!\.)exec\(") <= {"ringsim.launch.namespace"}  # runs the user's cell
    # the kernel ends a child with its parent: prctl has no public name
    assert users_of(r"\bctypes\b") <= {"ringsim.launch.forkserver"}
    assert not [
        path
        for suffix in ("pyx", "pxd", "c", "so")
        for path in (ROOT / "ringsim").rglob(f"*.{suffix}")
    ]
    assert not (ROOT / "setup.py").exists()


def starts_no_ranks(room: str) -> bool:
    """Returns whether the examples of a room run in one process."""
    return FLOOR[room] <= FLOOR["topologies"] or room in {
        "diagnose",
        "compute_costs",
        "exchange",
        "plot",
    }


EXAMPLES = [
    pytest.param(
        module,
        marks=()
        if module != "ringsim" and starts_no_ranks(room_of(module))
        else pytest.mark.distributed,
    )
    for module, path in MODULES.items()
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # examples may save files
    loaded = importlib.import_module(module)
    for name in dir(loaded):  # load lazy names first, so that doctest sees a fixed list
        getattr(loaded, name)
    failed, tried = doctest.testmod(loaded, optionflags=doctest.ELLIPSIS)
    assert tried, "doctest must find the examples of this module"
    assert not failed, capsys.readouterr().out
