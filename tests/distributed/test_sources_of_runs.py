"""The user's source code in traces of real ranks: of functions, scripts and recorded blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from test_view import read, unpack

import ringsim
from ringsim.cli import main

SCRIPT = """
import sys
import ringsim, torch.distributed as dist
dist.init_process_group("gloo")
if sys.argv[1:]:
    with ringsim.trace(sys.argv[1]) as recording:
        dist.barrier()
    if dist.get_rank() == 0:
        print(*recording.trace.sources, *ringsim.load(sys.argv[1]).sources)
else:
    dist.barrier()
"""


def worker() -> None:
    dist.barrier()


def test_the_code_of_a_function_a_script_and_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = ringsim.trace(worker, world_size=2)
    assert trace.sources == {__file__: Path(__file__).read_text()}
    Path("train.py").write_text(SCRIPT)
    assert main(["trace", "--source", "train.py"]) == 0
    saved = ringsim.load("train.ringtrace")
    assert list(saved.sources.values()) == [SCRIPT]
    capsys.readouterr()
    assert main(["trace", "train.py", "block.ringtrace"]) == 0
    # recording.trace has the code, and its file has not
    assert capsys.readouterr().out.splitlines()[1].endswith("train.py")
    assert ringsim.load("train-2.ringtrace").sources == {}
    assert ringsim.load("block.ringtrace").sources == {}
    main(["open", "train.ringtrace", "--no-browser"])
    assert unpack(read(Path("train.html").read_text()))[0]["sources"] == saved.sources
