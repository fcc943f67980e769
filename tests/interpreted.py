"""Makes Python run the source of the modules that were compiled: ``python -m pytest -p interpreted``, with tests/ on the path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "ringsim").rglob("*.pxd")}


class Interpreted:
    """Finds the source of these modules before the import system finds what was compiled from it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(name, ROOT / f"{name.replace('.', '/')}.py") if name in NAMES else None


sys.meta_path.insert(0, Interpreted)
