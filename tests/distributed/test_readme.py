"""Tests that programs of README.md and the how-to guides do what the pages describe."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim

ROOT = Path(__file__).parent.parent.parent
GUIDES = ROOT / "docs" / "how-to"


def read_programs(page: Path, language: str = "python") -> list[str]:
    """Returns the programs of a page, in their order."""
    fence = rf"^```{re.escape(language)}\n(.*?)^```$"
    return re.findall(fence, page.read_text(), re.MULTILINE | re.DOTALL)


def find_program(name: str, *words: str) -> str:
    """Returns the only program of a guide that has some words."""
    programs = read_programs(GUIDES / f"{name}.md")
    (found,) = (each for each in programs if all(word in each for word in words))
    return found


(PROGRAM,) = read_programs(ROOT / "README.md")


def run(*programs: str) -> dict[str, Any]:
    """Runs programs as one script (``test_launch`` starts real ones), and returns its variables."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(programs), variables)
    return variables


def test_the_program_of_the_front_page() -> None:
    found = run(PROGRAM)
    trace, virtual = found["trace"], found["virtual"]
    # After three rounds, a rank has the token that started three ranks before it, plus one per
    # round. Each rank has sent three messages.
    assert trace.results == [float((rank - 3) % 4 + 3) for rank in range(4)]
    assert virtual.results == [float((rank - 3) % 64 + 3) for rank in range(64)]
    assert (len(trace.messages.src), trace.unmatched) == (12, [])


def test_a_model_of_ones_own_is_trained_as_a_pipeline() -> None:
    trained = run(*read_programs(GUIDES / "add-a-model.md"))["trace"]
    assert len(set(trained.results)) == 1
    # an untrained model: 50 tokens are equally likely, and log(50) is 3.9
    assert 3 < trained.results[0] < 5
    assert trained.peak_activations().peaks == (4, 3, 2, 1)


def test_a_thousand_simulated_ranks_pass_on_what_they_have() -> None:
    (program, *_) = read_programs(GUIDES / "simulate.md", "{code-cell}")
    virtual = run(program)["virtual"]
    assert virtual.results == [999.0, *map(float, range(999))]
    assert len(virtual.messages) == 1000


def test_a_backend_gives_what_gloo_gives() -> None:
    first, _, second = read_programs(GUIDES / "write-a-backend.md")
    names = run(first, second)
    assert names["mine"].results == [[0.0, 3.0, 6.0, 9.0]] * 3


@pytest.mark.parametrize(
    ("page", "spelling"),
    [("from-torch", "ringsim.comm"), ("from-deepspeed", "ringsim.comm.deepspeed")],
)
def test_the_log_is_kept_as_the_guides_say(page: str, spelling: str) -> None:
    program = find_program(page, "log_summary(")

    def worker() -> list[str]:
        dist = importlib.import_module(spelling)
        tensor = torch.ones(4)
        names: dict[str, Any] = {
            "dist": dist,
            "tensor": tensor,
            "train": lambda: dist.all_reduce(tensor),
        }
        exec(program, names)
        dist.configure(enabled=False)
        if page == "from-torch":
            return names["table"].to_pandas()["name"].tolist()
        return list(names["summary"]["summary"])

    link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
    expected = ["all_reduce"] if page == "from-torch" else ["gradients"]
    assert ringsim.simulate(worker, world_size=2, link=link).results == [expected] * 2


def test_clocks_and_single_steps_are_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "notebooks" / "data" / "hosts_grouped.ringtrace", "run.ringtrace")
    run("import ringsim", find_program("launchers", "trace.clocks"))
    assert len(capsys.readouterr().out.splitlines()) >= 2
    shutil.copy(ROOT / "figures" / "data" / "schedule.ringtrace", "run.ringtrace")
    run("import ringsim", find_program("bubble", "plot_timeline(step=0)"))
    assert "Bubble of a step (1f1b)" in capsys.readouterr().out


def test_an_exam_has_a_patient_of_its_own() -> None:
    patient = run("from ringsim import check", find_program("grade", "check.patient"))["patient"]
    assert patient.explain().findings
