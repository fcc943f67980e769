"""Writes the public names and signatures of torch.distributed to a file, from its source and without importing it.

``python tests/signatures/make_snapshot.py [WHEEL ...]`` writes ``torch-<version>.json`` next to this file for each torch wheel (for any
platform). Without arguments it reads the installed torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = ("torch/distributed/distributed_c10d.py", "torch/distributed/device_mesh.py", "torch/distributed/__init__.py")


def make_snapshot(read: Callable[[str], str], version: str) -> dict[str, Any]:
    """Makes the snapshot of one version.

    Args:
        read: returns the text of a file, given its path in the wheel.
        version: the version of torch.

    Returns:
        ``torch``: the version; ``functions``: the parameters of each public function, without annotations; ``classes``: the parameters of
        constructors written in Python; ``names``: all public names of ``distributed_c10d``.
    """
    functions, classes, names = {}, {}, []
    for path in SOURCES:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.FunctionDef) and node.col_offset == 0 and not node.name.startswith("_"):
                functions[node.name] = _spell(node.args)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] = next((_spell(each.args) for each in node.body if getattr(each, "name", "") == "__init__"), "")
            elif path == SOURCES[0] and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
    # Deprecated spellings and helpers for torch's own modules are public only by name.
    public = {name: text for name, text in functions.items() if name in names or name in _exported(read(SOURCES[2]))}
    public_classes = {name: text for name, text in classes.items() if name in names and text}
    return {
        "torch": version,
        "functions": dict(sorted(public.items())),
        "classes": dict(sorted(public_classes.items())),
        "names": sorted(names),
    }


def _exported(source: str) -> set[str]:
    """Returns the names that ``torch/distributed/__init__.py`` defines or imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def _spell(arguments: ast.arguments) -> str:
    """Returns parameters as text, without annotations."""
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(arguments)


def snapshot_of_wheel(path: Path) -> dict[str, Any]:
    """Makes the snapshot of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return make_snapshot(lambda name: wheel.read(name).decode(), path.name.split("-")[1].partition("+")[0])


def snapshot_of_installed() -> dict[str, Any]:
    """Makes the snapshot of the installed torch."""
    torch = importlib.metadata.distribution("torch")
    return make_snapshot(lambda name: Path(str(torch.locate_file(name))).read_text(), torch.version.partition("+")[0])


if __name__ == "__main__":
    for snapshot in [snapshot_of_wheel(Path(name)) for name in sys.argv[1:]] or [snapshot_of_installed()]:
        (HERE / f"torch-{snapshot['torch']}.json").write_text(json.dumps(snapshot, indent=1) + "\n")
