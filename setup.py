"""Compiles the simulator's busiest modules, those with a ``.pxd`` beside them, where there is a C compiler.

The source is the same that Python runs where nothing was compiled, at a fraction of the speed; but for a module with a ``.pyx``, whose
``.py`` stands in where there is no compiler. All else about the package is in pyproject.toml.
"""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import setup

TYPED = sorted(Path("ringsim").rglob("*.pxd"))
SOURCES = [str(next(source for suffix in (".pyx", ".py") if (source := path.with_suffix(suffix)).exists())) for path in TYPED]
# Annotations are for readers and mypy: a .pxd says which types count.
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "binding": False, "show_performance_hints": False}

extensions = cythonize(SOURCES, build_dir="build/cython", compiler_directives=DIRECTIVES, quiet=True)
for extension in extensions:
    extension.optional = True  # without a compiler, installing goes on

setup(ext_modules=extensions, options={"build_ext": {"parallel": True}})
