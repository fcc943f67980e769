"""The first programs that a reader of README.md sees do what it says, as scripts without a ``__main__`` guard."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
FIRST, SECOND, *OTHERS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PIPELINE = next(block for block in OTHERS if "train_step_pipeline" in block)
SIMULATED = next(block for block in OTHERS if "ringsim.simulate(" in block)


def run(directory: Path, program: str) -> list[str]:
    """Runs a program and returns the lines that it prints."""
    (directory / "program.py").write_text(program)
    shown = subprocess.run([sys.executable, "program.py"], cwd=directory, capture_output=True, text=True, timeout=100, check=False)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def test_the_programs_on_real_ranks(tmp_path: Path) -> None:
    assert len(FIRST.splitlines()) == 3
    call = "ringsim.trace(worker, world_size=4)"
    assert call in FIRST
    short = FIRST.replace(call, "first = ringsim.trace(worker, world_size=4, args=(6,))")  # six steps of training are enough
    pipeline = f"import torch\n{PIPELINE}print(len(set(trace.results)), trace.results[0], trace.peak_activations().peaks)\n"
    shown = run(
        tmp_path,
        f"{short}print(first.world_size)\n{SECOND}print(trace.results)\nprint(len(trace.messages.src), trace.unmatched)\n{pipeline}",
    )
    *steps, world_size, token, sent, trained = shown
    assert world_size == "4"
    assert len(steps) == 2
    assert all(line.startswith("[rank 0] step ") for line in steps)
    # After three rounds a rank holds what started three ranks before it, plus one a round; each of four ranks sent three messages.
    assert (token, sent) == (str([float((rank - 3) % 4 + 3) for rank in range(4)]), "12 []")
    same, loss, peaks = trained.split(maxsplit=2)
    assert (same, peaks) == ("1", "(4, 3, 2, 1)")
    assert 3 < float(loss) < 5  # it knows nothing yet: 50 tokens, all as likely, whose logarithm is 3.9


def test_a_thousand_simulated_ranks_pass_on_what_they_have(tmp_path: Path) -> None:
    shown = run(tmp_path, f"import ringsim, torch\n{SIMULATED}print(virtual.results[:2], len(virtual.results), len(virtual.messages))\n")
    assert shown == ["[999.0, 0.0] 1000 1000"]
