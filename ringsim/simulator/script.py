"""Runs scripts on the virtual clock. Each simulated rank runs the script as ``__main__``."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from ringsim.ring.printing import restore_output
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace


def simulate_script(
    script: str, arguments: Sequence[str] = (), *, module: bool = False, **options: Any
) -> Trace:
    """Runs a script for torchrun on simulated ranks.

    Args:
        script: the path of a Python file, or the name of a module. Its call of
            ``init_process_group`` joins the simulated ranks.
        arguments: the arguments of the script.
        module: whether ``script`` is the name of a module.
        options: the options of ``ringsim.simulate``: ``world_size``, ``link``, ...

    Returns:
        The trace.

    Raises:
        RingError: for the same reasons as in ``ringsim.simulate``.
    """
    place = script if module else os.path.abspath(script)
    worker = functools.partial(_run, place, [script, *arguments], module)
    return simulate(worker, **options)


def _run(place: str, argv: list[str], module: bool) -> None:
    """Runs the script. All ranks share the same arguments and import path."""
    restore_output()  # a script has no ring until it creates one, so all ranks print
    sys.argv[:] = argv
    directory = os.getcwd() if module else os.path.dirname(place)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    if module:
        runpy.run_module(place, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(place, run_name="__main__")
