"""Compares the CPU time of methods.

Each method runs in its own process, with its own Python, and the methods alternate, so a busy
machine slows down all of them. If a script that uses this module is started with ``--serve
METHOD``, it serves this method.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

OPERATIONS = 2000  # per turn


def serve(prepared: AbstractContextManager[Callable[[int], float]]) -> None:
    """Measures once per line of input, and answers on the original standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with prepared as run:
        for line in sys.stdin:
            print(run(int(line)), file=answers, flush=True)


def ask(process: subprocess.Popen[str], count: int) -> float:
    """Has a serving process take its turn, and returns its result."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{count}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(
    script: str, interpreters: dict[str, str], rounds: int, operations: dict[str, int]
) -> dict[str, list[float]]:
    """Returns the CPU time per operation in ns, by method, with one value per round.

    Args:
        script: the script that serves the methods.
        interpreters: the Python that serves each method.
        rounds: the number of turns per method, not counting a first turn that warms up.
        operations: the number of operations per turn, by method; the default is ``OPERATIONS``.
    """
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",
    }
    times: dict[str, list[float]] = {method: [] for method in interpreters}
    with ExitStack() as stack:
        processes = {}
        for method, python in interpreters.items():
            command = [python, script, "--serve", method]
            processes[method] = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
        for method, process in processes.items():
            ask(process, operations.get(method, OPERATIONS))
        for _ in range(rounds):
            for method in random.sample(list(processes), len(processes)):
                times[method].append(ask(processes[method], operations.get(method, OPERATIONS)))
    return times


def difference(
    ours: Sequence[float], baseline: Sequence[float], draws: int = 2000
) -> tuple[float, float, float]:
    """Returns the difference between the medians, and its 95 % bootstrap interval."""

    def draw() -> float:
        return statistics.median(random.choices(ours, k=len(ours))) - statistics.median(
            random.choices(baseline, k=len(baseline))
        )

    differences = sorted(draw() for _ in range(draws))
    return (
        statistics.median(ours) - statistics.median(baseline),
        differences[int(0.025 * draws)],
        differences[int(0.975 * draws)],
    )


def install_deepspeed(directory: str) -> str:
    """Installs DeepSpeed in a new environment that also sees the packages of this environment.

    Returns the Python of the new environment.
    """
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    packages, python = next(Path(directory).glob("lib/*/site-packages")), f"{directory}/bin/python"
    (packages / "host.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    for arguments in (["wheel", "setuptools"], ["--no-build-isolation", "deepspeed"]):
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *arguments],
            check=True,
            env=environment,
            timeout=600,
        )
    return python
