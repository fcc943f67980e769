"""Breaks central lines in a copy of the source tree, one at a time, and runs the tests.

For each line, ``python benchmarks/mutations.py [NAME ...]`` prints the time until the tests failed,
or SURVIVED. The script finds lines by their text, and stops if a line is missing. The copy is in a
temporary directory, so the source tree itself does not change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A line, its replacement, and the tests that must fail."""

    file: str
    line: str
    broken: str
    tests: str


_NONE_SELECTED = 5  # pytest's exit code
MUTATIONS = {
    "matching of a trace": Mutation(
        "ringsim/traces/matching.py",
        "        events.tag[some] if by_tag else None,",
        "        None,",
        "test_matching.py test_golden.py",
    ),
    "wait-for analysis": Mutation(
        "ringsim/diagnose/waitfor.py",
        "            missing[waiter] -= 1",
        "            missing[waiter] -= 2",
        "test_diagnose_analyse.py test_golden.py",
    ),
    "schedule 1F1B": Mutation(
        "ringsim/schedules/phases.py",
        (
            '        warm_up = min(p - 1 - rank, m)\n        rows.append([(warm_up, "F"), (m - '
            'warm_up, "F B"), (warm_up, "B")])'
        ),
        (
            '        warm_up = min(p - rank, m)\n        rows.append([(warm_up, "F"), (m - '
            'warm_up, "F B"), (warm_up, "B")])'
        ),
        "test_schedules.py test_golden.py",
    ),
    "hook on torch": Mutation(
        "ringsim/comm/torch_hooks.py",
        "        setattr(owner, name, function)",
        "        pass",
        "test_torch_hooks.py",
    ),
    "check of the ring": Mutation(
        "ringsim/check/examination.py",
        "        if len(self.events) != number:",
        "        if len(self.events) < number:",
        "test_check_messages.py",
    ),
    "recorder": Mutation(
        "ringsim/traces/recorder.py",
        "            words[slot + 1] = words[slot]",
        "            pass",
        "test_recorder.py test_golden.py",
    ),
    "reader of parts": Mutation(
        "ringsim/traces/parts.py",
        "        records[again[there]] = now",
        "        pass",
        "test_trace_parts.py",
    ),
    "table of collectives": Mutation(
        "ringsim/traces/collectives.py",
        '    Collective("all_reduce", "all_reduce", 2, (',
        '    Collective("all_reduce", "all_reduce", 1, (',
        "test_bandwidths.py test_golden.py",
    ),
    "matching on the clock": Mutation(
        "ringsim/simulator/point_to_point.py",
        "key = (group, src, dst, tag if self.by_tag else SINGLE * (self.paired and is_single))",
        "key = (group, src, dst, 0)",
        "test_simulated_semantics.py test_golden.py test_conformance_simulator.py",
    ),
    "link": Mutation(
        "ringsim/link.py",
        "        return self.alpha_s + self.beta_s_per_byte * size_bytes",
        "        return self.alpha_s",
        "test_topologies.py test_golden.py",
    ),
    "files": Mutation(
        "ringsim/traces/documents.py",
        "struct.error, zipfile.BadZipFile, zlib.error",
        "struct.error, zlib.error",
        "test_trace_files.py",
    ),
}


def try_out(mutation: Mutation, tree: Path) -> str:
    """Breaks the line in a tree, runs its tests, restores it, and returns the result."""
    file = tree / mutation.file
    text = file.read_text()
    if text.count(mutation.line) != 1:
        raise SystemExit(
            f"{mutation.file} contains this line {text.count(mutation.line)} times instead of "
            f"once: {mutation.line.strip()}"
        )
    file.write_text(text.replace(mutation.line, mutation.broken))
    tests = [f"tests/{name}" for name in mutation.tests.split()]
    begin_s = time.monotonic()
    failed: list[str] = []
    for some in ([], ["-m", "long"]):  # first the tests that `make test` runs
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *some]
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1, _NONE_SELECTED):
            raise SystemExit(
                f"pytest could not run the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        if failed:
            break
    file.write_text(text)
    return f"{time.monotonic() - begin_s:5.1f} s  {failed[0][:110]}" if failed else "SURVIVED"


def main(names: list[str]) -> int:
    """Tries the named mutations, or all of them, and returns the number that survived."""
    survived = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "ringsim")
        shutil.copytree(
            ROOT,
            tree,
            ignore=shutil.ignore_patterns(
                ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__"
            ),
        )
        for name in names or MUTATIONS:
            verdict = try_out(MUTATIONS[name], tree)
            survived += verdict == "SURVIVED"
            print(f"{name:<24} {verdict}", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
