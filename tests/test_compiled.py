"""The modules that are compiled where there is a C compiler: Python runs their source, and both do the same."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "ringsim").rglob("*.pxd")]
# Files of tests that go through all of these modules: random numbers and modes, messages, the tape, links.
TESTS = ("test_simulated_state.py", "test_simulated_ranks.py", "test_simulated_semantics.py", "test_simulated_times.py")

WORKER = """
import hashlib, sys, random
import torch
import ringsim
from ringsim import comm as dist
from ringsim.simulator import hub

def work():
    ring = ringsim.current_ring()
    token, arriving = torch.rand(64), torch.zeros(64)
    for step in range(5):
        ringsim.compute(random.random() * 1e-3)
        handles = [dist.irecv(arriving, ring.pred, group=ring.pred_group), dist.isend(token, ring.succ, group=ring.succ_group)]
        for handle in handles:
            handle.wait()
        dist.all_reduce(token)
        token += arriving
    dist.send(token, 1) if ring.rank == 0 else dist.recv(token) if ring.rank == 1 else None
    return token.tolist()

trace = ringsim.simulate(work, world_size=5, link=ringsim.Link(1e-5, 1e-9), record=sys.argv[1] == "recorded")
said = repr([trace.results, trace.to_pandas().to_csv(index=False)])
print(hub.__file__.endswith(".py"), hashlib.sha256(said.encode()).hexdigest())
"""


def compiled_file(name: str) -> Path | None:
    """Returns the machine code of a module, None where it was not compiled."""
    file = Path(str(importlib.import_module(name).__file__))
    return None if file.suffix == ".py" else file


def run_python(*args: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_machine_code_is_that_of_the_source() -> None:
    compiled = {name: file for name in NAMES if (file := compiled_file(name)) is not None}
    assert len(compiled) in (0, len(NAMES))  # all of them, or no compiler
    for name, file in compiled.items():
        typed = ROOT / f"{name.replace('.', '/')}.pxd"
        source = next(path for suffix in (".pyx", ".py") if (path := typed.with_suffix(suffix)).exists())
        newest_s = max(source.stat().st_mtime, typed.stat().st_mtime)
        assert file.stat().st_mtime >= newest_s, f"{name} has changed since it was compiled. Run: python setup.py build_ext --inplace"


def test_without_a_compiler_installing_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("Cython", reason="only what builds ringsim needs it")
    command = [sys.executable, "setup.py", "build_ext", "--force", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: build_ext: building extension") == len(NAMES)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(compiled_file("ringsim.simulator.hub") is None, reason="nothing is compiled here: the other tests ran the source")
class TestInterpreted:
    @pytest.mark.parametrize("recorded", ["recorded", "not recorded"])
    def test_the_trace_is_the_same(self, recorded: str) -> None:
        interpreted, of_source = run_python("-c", f"import interpreted{WORKER}", recorded).split()
        is_source, of_machine_code = run_python("-c", f"import sys{WORKER}", recorded).split()
        assert (interpreted, is_source) == ("True", "False")
        assert of_source == of_machine_code

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("file", TESTS)
    def test_the_tests_pass(self, file: str) -> None:
        run_python("-m", "pytest", "-q", "-p", "interpreted", "-p", "no:cacheprovider", str(HERE / file))
