"""Compiles the simulator's busiest modules, those with a ``.pxd`` beside them, where there is a C compiler.

The source is the same that Python runs where nothing was compiled, at half the speed. All else about the package is in pyproject.toml.
"""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import setup

SOURCES = sorted(str(path.with_suffix(".py")) for path in Path("ringsim").rglob("*.pxd"))
# Annotations are for readers and mypy: a .pxd says which types count.
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "binding": False, "show_performance_hints": False}

extensions = cythonize(SOURCES, build_dir="build/cython", compiler_directives=DIRECTIVES, quiet=True)
for extension in extensions:
    extension.optional = True  # without a compiler, installing goes on

setup(ext_modules=extensions, options={"build_ext": {"parallel": True}})
