"""Tests that lessons have all parts of a lesson, and run from top to bottom in a real kernel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from processes import RANK_VARIABLES, descendants, gone, until

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CELL_S = 150  # limit for one cell; on two quiet cores no cell takes more than five seconds
MOST_CELLS = 40  # in a lesson, which should take at most 45 minutes
PARTS = (
    r"^# Lesson \d\d: ",
    r"\*\*You will be able to\*\*",
    r"^\*\*Predict\.\*\* ",
    r"^\*\*See\.\*\* ",
    r"^\*\*Explain\.\*\* ",
    r"^## Exercise",
    r"<details><summary>Hint 1</summary>",
    r"^## Transfer question",
    r"^## Glossary",
)
Cell = dict[str, Any]

pytestmark = pytest.mark.timeout(900)  # the first test of a lesson runs all its cells


def in_the_kernel_of(number: str) -> pytest.MarkDecorator:
    """Puts the tests of a lesson into one process, which runs the lesson once."""
    return pytest.mark.xdist_group(f"lesson {number}")


each_lesson = pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(lesson, id=lesson.stem, marks=in_the_kernel_of(lesson.stem[:2]))
        for lesson in LESSONS
    ],
)


def cells(lesson: Path, kind: str) -> list[Cell]:
    return [cell for cell in json.loads(lesson.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: Cell) -> str:
    return "".join(cell["source"])


def tagged(lesson: Path, tag: str) -> list[str]:
    return [cell["id"] for cell in cells(lesson, "code") if tag in cell["metadata"].get("tags", [])]


# -- as committed


def test_the_lessons_are_there() -> None:
    names = """
        00_four_processes 01_ring 02_send_recv_deadlock 03_bandwidth 04_stages 05_gradients
        06_schedules 07_generation_ring 08_communication_layer 09_diagnose 10_prediction
        11_slow_link 12_data_parallel 13_ring_attention 14_sharding 15_tensors_in_parallel
        16_which_parallelism
    """
    assert [lesson.stem for lesson in LESSONS] == names.split()


@each_lesson
def test_a_lesson_has_all_parts_and_no_leftovers(lesson: Path) -> None:
    notebook = json.loads(lesson.read_text())
    *chapters, glossary = (source(cell) for cell in cells(lesson, "markdown"))
    text = "\n".join([*chapters, glossary])
    code = [source(cell) for cell in cells(lesson, "code")]
    first, magic, _ = "".join(code).partition("%%ring")
    assert not magic or "%load_ext ringsim" in first, (
        "a lesson with %%ring must load the extension, which another lesson may have loaded"
    )
    (picture,) = re.findall(r"^!\[.+\]\((data/.+)\)$", chapters[0], re.MULTILINE)
    assert (lesson.parent / picture).is_file(), "the lesson must begin with a picture that exists"
    assert "ipywidgets" not in "".join(code), "use ringsim's views and explorers"
    assert [part for part in PARTS if not re.search(part, text, re.MULTILINE)] == []
    assert len(notebook["cells"]) <= MOST_CELLS
    minutes = re.search(r"^This lesson takes about (\d+) minutes\. ", text, re.MULTILINE)[1]
    assert 0 < int(minutes) <= 45
    assert text.count("<details>") == text.count("</details>")
    words = [
        word
        for line in re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE)
        for word in line.split(", ")
    ]
    used = " ".join([*chapters, *code]).lower()
    assert words
    assert [word for word in words if word not in used] == [], (
        "the glossary must only list words of the lesson"
    )
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    assert notebook["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags", "jupyter"}
        assert set(cell["metadata"].get("tags", [])) <= {"exercise", "solution"}
        folded = cell["metadata"].get("jupyter") == {"source_hidden": True}
        assert folded is ("solution" in cell["metadata"].get("tags", [])), (
            "solutions must be folded, and other cells must not"
        )


# -- run in a kernel


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[NotebookClient]:
    """Starts a kernel for all lessons of this process, and checks that no process remains."""
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=CELL_S,
        resources={"metadata": {"path": str(LESSONS[0].parent)}},
    )
    # nbclient 0.11 answers Output widgets over the socket on which it waits for the cell's reply,
    # and then sometimes misses the reply until its timeout. Without an answer, a widget's output
    # appears under the cell, and is tested like any other.
    client.comm_open_handlers.clear()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)
    }
    with client.setup_kernel(env={**environment, "MPLBACKEND": "agg"}):
        CLIENTS[:] = [client]
        yield client
        pid = client.km.provisioner.pid
        started = {pid, *descendants(pid)}
    assert until(lambda: all(gone(pid) for pid in started))


CLIENTS: list[NotebookClient] = []  # the running client
# removes the names of the previous lesson, and its ranks if it did not run to its end
RESET = "%load_ext ringsim\n%ring stop\nget_ipython().reset(new_session=True)"


@cache
def executed(lesson: Path) -> dict[str, Cell]:
    """Runs a lesson, without the names of the previous one.

    Returns the code cells with their outputs.
    """
    (client,) = CLIENTS
    client.nb = nbformat.read(lesson, as_version=4)
    client.reset_execution_trackers()
    client.kc.execute(RESET, silent=True)
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)
    return {cell.id: cell for cell in client.nb.cells if cell.cell_type == "code"}


def outputs(lesson: Path) -> Iterator[tuple[str, Cell]]:
    for name, cell in executed(lesson).items():
        for output in cell["outputs"]:
            yield name, output


def verdict(lesson: Path, cell: str) -> str:
    """Returns the text of a check under a cell."""
    shown = [
        output["data"]["text/plain"]
        for name, output in outputs(lesson)
        if name == cell and "data" in output
    ]
    (text,) = [text for text in shown if text.startswith("check.")]
    return str(text)


@each_lesson
def test_lesson_runs_and_leaves_nothing_behind(lesson: Path) -> None:
    executed(lesson)  # an error of a cell is raised here
    kernel = CLIENTS[0].km.provisioner.pid
    assert "ringsim-server" in descendants(kernel).values(), "the kernel started no rank"
    assert until(
        lambda: not any(name.startswith("ringsim-rank") for name in descendants(kernel).values())
    )
    assert [name for name, output in outputs(lesson) if output["output_type"] == "error"] == []
    warnings = [
        output["text"]
        for _, output in outputs(lesson)
        if output["output_type"] == "stream" and output["name"] == "stderr"
    ]
    assert warnings == []


FIRST_CELLS = 3


@in_the_kernel_of("00")
@pytest.mark.parametrize("lesson", LESSONS[1:], ids=lambda lesson: lesson.stem)
def test_the_first_cells_of_a_lesson_run(lesson: Path) -> None:
    """Runs only the first cells, because the tests of whole lessons take long."""
    (client,) = CLIENTS
    client.nb = nbformat.read(lesson, as_version=4)
    client.reset_execution_trackers()
    client.kc.execute(RESET, silent=True)
    code = [index for index, cell in enumerate(client.nb.cells) if cell.cell_type == "code"]
    for index in code[:FIRST_CELLS]:
        client.execute_cell(client.nb.cells[index], index)  # an error of the cell is raised here


@each_lesson
def test_every_picture_can_be_read_aloud(lesson: Path) -> None:
    pictures = [
        (name, output) for name, output in outputs(lesson) if "image/png" in output.get("data", {})
    ]
    assert pictures
    for name, output in pictures:
        assert output["metadata"]["image/png"]["alt"].endswith("."), name
        # "pattern" starts a table of bandwidths
        words = ("Trace of ", "Schedule ", "Bubble ", "Prediction ", "pattern ")
        assert output["data"]["text/plain"].startswith(words), name
    drawn = [
        name
        for name, output in outputs(lesson)
        if {"image/svg+xml", "application/javascript"} & set(output.get("data", {}))
    ]
    assert drawn == [], "front ends do not show these outputs if they do not trust the notebook"


@each_lesson
def test_solutions_pass_and_skeletons_do_not(lesson: Path) -> None:
    exercises, solutions = tagged(lesson, "exercise"), tagged(lesson, "solution")
    assert len(exercises) == len(solutions) > 0
    for exercise, solution in zip(exercises, solutions, strict=True):
        untouched, solved = verdict(lesson, exercise), verdict(lesson, solution)
        assert untouched.split(":")[0] == solved.split(":")[0], "both must be the same check"
        assert ": not yet (" in untouched
        assert "Hint: " in untouched
        assert ": passed (" in solved


@each_lesson
def test_a_prediction_is_asked_for_and_compared(lesson: Path) -> None:
    names = [cell["id"] for cell in cells(lesson, "code")]
    asked = [name.removesuffix("-guess") for name in names if name.endswith("-guess")]
    assert [name.removesuffix("-compare") for name in names if name.endswith("-compare")] == asked
    due = "check.prediction: not yet\n  Write your prediction first.\n"
    assert all(verdict(lesson, f"{name}-compare").startswith(due) for name in asked)


def texts_of(number: str) -> dict[str, str]:
    """Returns the text below each cell of a lesson."""
    texts: dict[str, str] = {}
    for name, output in outputs(next(path for path in LESSONS if path.stem.startswith(number))):
        plain = output.get("data", {}).get("text/plain", "")
        texts[name] = texts.get(name, "") + output.get("text", "") + plain
    return texts


def shows(text: str, *words: str) -> None:
    assert [each for each in words if each not in text] == [], text


def find(pattern: str, text: str) -> list[Any]:
    """Returns the matches of a regular expression, with ``^`` and ``$`` in each line."""
    return re.findall(pattern, text, re.MULTILINE)


def columns(text: str) -> list[list[float]]:
    """Returns the numbers of a printed table by row, without lines that contain other text."""
    rows = [line.replace(",", "").split() for line in text.splitlines()]
    numbers = [row for row in rows if row and all(re.fullmatch(r"[\d.]+", word) for word in row)]
    return [[*map(float, row)] for row in numbers]


STUCK = "deadlock: ranks 0, 1 and 2 wait for each other."


@in_the_kernel_of("00")
def test_lesson_00_shows_what_it_claims() -> None:
    texts = texts_of("00")
    shows(texts["memory-run"], "[[0], [1], [2], [3]]\n", "in the notebook:   []\n")
    looked = "rank 2 has the number: 20\nthe notebook has a number: False\n"
    assert texts["keep-look"] == looked
    assert find(r"waited [\d.]+ ms in recv \(Cell In\[(\d+)\]:6\)", texts["timeline-run"]) == ["9"]
    shows(texts["timeline-table"], "rank 0 received: 30 \n", "rank 0 waited longest\n")
    shows(texts["failure-run"], "rank 3 of 4 raised IndexError", "  The session goes on.\n")
    assert len(find(r"still has the number \d+$", texts["failure-after"])) == 4


@in_the_kernel_of("01")
def test_lesson_01_shows_what_it_claims() -> None:
    texts = texts_of("01")
    shows(texts["claims-ringsim"], "as in the text: True")
    members = [line.split("->")[1] for line in texts["claims-names"].splitlines() if "->" in line]
    assert [*map(str.strip, members)] == [*["same members"] * 2, *["different"] * 2]
    assert texts["traffic-run"].count(" world ") == 4
    assert {"ring:0>1", "ring:1>0"} <= set(texts["claims-two"].split())
    shown = find(r"^\[rank .*$", texts["claims-output-run"])
    # ranks print in any order
    assert sorted(shown) == ["[rank 0] plain, from rank 0", "[rank 2] forced, from rank 2"]
    assert texts["rendezvous-run"].startswith(STUCK)


@in_the_kernel_of("02")
def test_lesson_02_shows_what_it_claims() -> None:
    texts = texts_of("02")
    took = find(r"^send of +(\d+) bytes: ([\d.]+) s$", texts["rendezvous-run"])
    assert [int(size) for size, _ in took] == [4, 4_000_000]
    assert all(float(seconds) >= 0.2 for _, seconds in took)
    assert texts["provoke-run"].startswith(STUCK)
    assert texts["provoke-run"].count(STUCK) == 2, "the error, and the text of the picture"
    assert texts["provoke-run"].count(" at Cell In[5]:4") == 9  # also in the text of the view
    assert texts["read-run"].startswith("messages: 0\n")
    ends = [f"{order} ends" for order in ("RSS", "SRS", "SSR", "SRR", "RSR", "RRS")]
    assert texts["order-run"].splitlines() == ["SSS deadlock", *ends, "RRR deadlock"]
    chain, pairs = ([*map(int, row.split())] for row in find(": (.+)$", texts["chain-run"]))
    assert chain == [0, 5, 4, 3, 2, 1]
    # each even rank comes after the odd rank that it sends to
    assert all(pairs.index(even) > pairs.index(even + 1) for even in (0, 2, 4))
    assert texts["tags-run"].startswith("tag mismatch: ")
    shows(texts["scheduler-run"], "rank 0 may go: recv from any rank (world, tag 0) at Cell In[")
    shows(texts["scheduler-answer"], "After your choices, ranks 0, 1 and 2 may still go.")
    shows(texts["scheduler-solution"], "the check tried every order of 3 and 4 ranks")
    assert find(": (.+)$", texts["claims-sizes"]) == ["deadlock"] * 3


@in_the_kernel_of("09")
def test_lesson_09_shows_what_it_claims() -> None:
    texts = texts_of("09")
    failed = "rank failed: rank 1 raised KeyError: 'sclae'"
    assert texts["cause-run"].startswith(failed)
    assert texts["cause-run"].count("\n  As a result, rank ") == 2
    kinds = [texts[f"patient-{number}-solution"].partition(":")[0] for number in range(1, 6)]
    assert kinds == ["straggler", "tag mismatch", "message mismatch", "deadlock", "peer exited"]
    stuck, repaired = texts["repair-run"].splitlines()[:2]
    assert stuck.split() == "isend False messages 6 unfinished 4 deadlock True".split()
    assert repaired.split() == "isend True messages 36 unfinished 0 deadlock False".split()
    assert texts["terminal-run"].startswith(failed)
    assert texts["claims-waits"].endswith("waits least: rank 2\n")


@in_the_kernel_of("03")
def test_lesson_03_shows_what_it_claims() -> None:
    texts = texts_of("03")
    assert find(r"^8 B: \d+ us, 8 MB: \d+ us, \d+ times as long$", texts["million-run"])
    assert {*find(r"^(?:pingpong|copy) +(\w+)", texts["sweep-run"])} == {"gloo", "tcp", "memcpy"}
    assert texts["predict-line"].count(" us predicted\n") == 2
    ratio = r"^ +65536 B: +\d+ us measured, +\d+ predicted, ratio \d+\.\d\d$"
    assert find(ratio, texts["predict-measure"])
    edges = dict(find(r"^(\w+) +(\d) ", texts["patterns-run"]))
    most = {"pingpong": 3, "exchange": 3, "shift": 3, "all_reduce": 1}
    missing = find(r"^(\w+) +not measured", texts["patterns-run"])
    assert edges.keys() | set(missing) == most.keys()
    # a busy machine measures fewer edges within the limit
    assert all(int(found) <= most[pattern] for pattern, found in edges.items())
    assert find(r"Gloo \(CPU\)  up to [\d.]+ GB/s \(pingpong 0 -> 1\)", texts["claims-here"])
    sent, through = map(float, find(r"([\d.]+) MB", texts["claims-shared"]))
    assert sent == 67.1
    assert through > sent, "every byte must pass through the loopback interface"
    assert texts["claims-nvlink"].count("nccl-tests #") >= 10


@in_the_kernel_of("04")
def test_lesson_04_shows_what_it_claims() -> None:
    texts = texts_of("04")
    sizes = [int(each.replace(",", "")) for each in find(r"([\d,]+) parameters", texts["cut-run"])]
    assert sum(sizes[:4]) == sizes[4]
    assert texts["cut-run"].endswith("gives the same bits: True\n")
    for cell in ("shapes-table", "empty-table"):
        shapes = find(r"-> torch.float32 (.+)$", texts[cell])
        assert shapes == [*["(2, 9, 64)"] * 3, "(2, 9, 50)"]
    shows(texts["shapes-table"], "rank 3 has the output of the whole model: True\n")
    assert texts["shapes-table"].count("(2, 9, 64), 4608 bytes") == 3
    even, uneven = map(float, find(r"\]: (\d+) ms", texts["balance-run"]))
    # four microbatches and two stages to fill, 20 ms each: a step cannot be faster
    assert even >= 120
    assert uneven >= 180, "four microbatches of 40 ms, and two of 10 ms"
    shows(texts["balance-run"], "the same loss: True")
    assert [row[:2] for row in columns(texts["empty-table"])] == [[0, 1], [1, 2], [2, 3]]
    assert [row[-1] for row in columns(texts["header-run"])].count(128) == 3
    assert len({*find(r"loss (\d\.\d+) on every rank: True", texts["baseline-run"])}) == 1
    shows(texts["baseline-run"], "ranks: 1, ", ",  0 messages")
    shows(texts["baseline-run"], "77 gradients equal those of a single process")
    assert texts["claims-batch"].endswith(": [0.0, 7.0, 0.0]\n")
    shows(texts["claims-head"], "'head.weight': 'no gradient'")


@in_the_kernel_of("05")
def test_lesson_05_shows_what_it_claims() -> None:
    texts = texts_of("05")
    assert texts["glue-run"].startswith("first layer:  None\nsecond layer: tensor(")
    assert texts["glue-check"] == "the same gradient: True\n"
    shows(texts["message-run"], "the gradient of one process: True")
    edges = find(r"(\d) +(\d) (ring:\S+)", texts["message-run"])
    assert edges == [("0", "1", "ring:0>1"), ("1", "0", "ring:0>1")]
    assert texts["leaf-run"] == "stage 1: every parameter has a gradient\nx.grad: None\n"
    shows(texts["keep-run"], "kept: (x0, y0) (x1, y1) (x2, y2)\n")
    reported, alone = find(r"\d\.\d{4}", texts["scale-run"])
    assert reported == alone
    shows(texts["scale-run"], "53 of 53 gradients differ")
    assert find(r" scaled +2 +(\d) ", texts["scale-run"]) == ["3"] * 3
    shows(texts["mend-answer"], "Stage 0 of 3 has a gradient of zeros for its parameter ")
    equal = find(r"(\d\d) gradients equal those of a single process", texts["report-run"])
    assert equal == ["53", "52"]
    assert [line.split()[-3:] for line in texts["claims-run"].splitlines()[1:]] == [
        *(["False", "grad", "None"], ["True", "grad", "None"]),
        *(["False", "grad", "None"], ["True", "None", "None"]),
        *(["False", "grad", "grad"], ["True", "grad", "grad"]),
    ]
    assert texts["claims-inside"] == "{'0.weight': 'no gradient', '0.bias': 'no gradient'}\n"


@in_the_kernel_of("06")
def test_lesson_06_shows_what_it_claims() -> None:
    texts = texts_of("06")
    for cell in ("measure-run", "order-run", "peer-run"):
        measured, *_ = find(r"^all ranks +(\d+\.\d)%", texts[cell])
        assert 25 < float(measured) < 60, "near the closed form, or above on a busy machine"
        assert find(r"^closed form +25\.0% +25\.0% +33\.3%", texts[cell])
    for cell, expected in (("order-run", "666321"), ("peer-run", "321")):
        peaks = find(r"^rank \d +(\d) +closed form +(\d)", texts[cell])
        assert peaks == [(live, live) for live in expected]
    # between a forward and a backward, and between a backward and a forward
    assert texts["peer-run"].count("batch_isend batch_irecv") == 9
    rows = [line.split() for line in texts["more-run"].splitlines()[1:]]
    assert [row[1] for row in rows] == ["75%", "60%", "43%", "27%", "16%", "9%", "4%"]
    assert [row[4] for row in rows] == ["1", "2", "4", "4", "4", "4", "4"]
    shows(texts["more-pictures"], "simulated: 57 units, 9 idle.", "simulated: 27 units, 3 idle.")
    assert columns(texts["claims-run"]) == [
        [0, 33, 33, 33, 33],
        [0.5, 36, 36, 41, 41],
        [1, 39, 39, 49, 49],
        [2, 45, 45, 65, 65],
    ]
    idle = "while it lasts (3, 3, 3, 3), between first and last action (0, 0, 0, 0)"
    shows(texts["claims-run"], f"zb_h2  step 27, {idle}")
    known = "1f1b, 4 ranks, 8 microbatches: 33 (closed form 33), bubble 27.3 %\n"
    shows(texts["data-run"], known, "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n")
    beside = "simulated: GPipe 36 units, 1F1B 41 units: 5 units (14 %) longer."
    shows(texts["beside-run"], beside)
    kept = "kept for one microbatch: 811,008 bytes; with recomputation 16,384, 50 times less\n"
    known = "1f1b, 3 ranks, 6 microbatches: 32 (closed form 32), bubble 25.0 %\n"
    shows(texts["memory-run"], kept, known)


@in_the_kernel_of("10")
def test_lesson_10_shows_what_it_claims() -> None:
    texts = texts_of("10")
    link = r"^link +\d.+ per byte, from \d{2,} messages, \+-\d+%$"
    assert find(link, texts["predict-constants"])
    assert "not found" not in texts["predict-constants"]
    median = r"median step: measured \d+\.\d+ ms, predicted (\d+\.\d+) ms"
    predicted, *_ = map(float, find(median, texts["predict-run"]))
    assert predicted > 165, "resting and messages must take some time"
    shows(texts["predict-run"], "baseline nominal: 165.000 ms")
    lost = find(r"slow: (\d+) ms more, 16 times: (\d+) ms more", texts["slow-run"])
    assert lost == [("7", "105"), ("50", "114")]
    shows(texts["slow-path"], "link 1>2")
    foreseen = [*map(float, find(r"predicted (\d+) ms$", texts["slow-rank-run"]))]
    assert len(foreseen) == 2
    assert 165 < foreseen[0] < foreseen[1] > 210
    assert find(r"(\S+) times as long", texts["slow-ring-run"]) == ["5.00"] * 3
    bubbles = [*map(float, find(r"bubble (\d+\.\d) %", texts["thousand-scale"]))]
    assert len(bubbles) == 5
    assert bubbles[2] > 90 > 40 > bubbles[3] > 20 > bubbles[4]
    latency = "29.1% where a message takes as long as a forward"
    shows(texts["thousand-curve"], f"gpipe: 19.7% without latency, {latency}")
    known = "29,486.2 (closed form 29,486.2), bubble 16.7 %"
    shows(texts["thousand-both"], f"1f1b, 1,024 ranks, 8,192 microbatches: {known}")
    shows(texts["thousand-round"], "4 real ranks: 6\n1,000 simulated ranks: 499500\n")
    losses = find(r": gpipe +(\d+) ms more, 1f1b +(\d+) ms more$", texts["claims-run"])
    assert losses == [("7", "45"), *[("7", "50")] * 4, ("7", "45")]


@in_the_kernel_of("11")
def test_lesson_11_shows_what_it_claims() -> None:
    texts = texts_of("11")
    shows(texts["hosts-run"], "the ring crosses hosts 6 times instead of 3")
    bound = r"known to \+- *([\d.]+) us, error *(-?[\d.]+) us$"
    trips = find(bound, texts["offset-run"])
    assert len(trips) == 3
    # a bound always holds, except for rounding in print
    assert all(abs(float(wrong)) <= float(most) + 0.2 for most, wrong in trips)
    offsets = find(r"host\d, ranks .*: (\S+) s", texts["clocks-known"])
    assert offsets == ["+0.000000", "-5.000022", "-1.999997"]
    assert find(r": +(\d+) of 160 ", texts["clocks-wrong"]) == ["0", "0", "27", "39", "56"]
    assert texts["waits-run"].startswith("rank 3 waited 279 ms for rank 2.")
    cable = r"step of +(\d+) ms, +(\d+) of 160 messages over the bad cable"
    assert find(cable, texts["mend-run"]) == [("1009", "64"), ("603", "32"), ("321", "0")]
    assert find(r"predicted +(\d+) ms", texts["predict-run"]) == ["723", "632", "295"]
    shows(texts["claims-run"], "within hosts: 96 messages, 24 MiB, 13.6 MB/s")


@in_the_kernel_of("12")
def test_lesson_12_shows_what_it_claims() -> None:
    texts = texts_of("12")
    order = find(r"^ *[\d.]+ ms  (.+)$", texts["ddp-compare"])
    assert order == [*["backward of a layer"] * 2, "all_reduce of 526,336 bytes"] * 2
    for cell in ("ddp-same", "fsdp-table"):
        assert find(r"^rank (\d) has .+ whole batch: True$", texts[cell]) == ["0", "1"]
    calls = find(r"^(\w+) +(\d) calls, (.+) bytes$", texts["fsdp-table"])
    gathered, scattered = "all_gather_single", "reduce_scatter_single"
    assert {(gathered, "8", "2,105,344"), (scattered, "4", "1,052,672")} <= set(calls)
    kept = find(r"^(\w+): parameters kept by ranks 0 and 1: (.+)$", texts["fsdp-table"])
    assert kept == [("DDP", "263,168 263,168"), ("FSDP2", "131,584 131,584")]
    assert texts["grid-run"].count(": messages between (0, 1) (2, 3)\n") == 2
    groups = r"^  (\w+) among ranks \[(\d), (\d)\]: \[1\] on each, 16,640 bytes$"
    due = [(op, *pair) for op in ("all_reduce", gathered, scattered) for pair in ("02", "13")]
    assert find(groups, texts["grid-run"]) == due
    assert find(r"B3 (\w+)$", texts["grid-run"]) == ["all_reduce", scattered]
    costs = "all_reduce of 16,640 bytes: 1.4 ms\nall_gather of 16,640 bytes: 6.3 ms"
    shows(texts["many-cost"], costs)
    blocked = find(r"blocks the rank for ([\d.]+) ms", texts["many-run"])
    assert blocked == ["0.0", "0.0", "0.0", "1.4"]
    shows(texts["many-run"], "the step: 13.4 ms\n")  # 4 * 1 + 4 * 2 + 1.4
    assert texts["many-fsdp"].count("blocks the rank for 6.3 ms\n") == 12
    shows(texts["many-fsdp"], "the step: 87.8 ms\n")  # 12 + 12 * 6.3
    table = texts["claims-run"].replace("all", "1/1").replace("%", "").replace("1/", "")
    assert [row[3] for row in columns(table)] == [32, 30, 27, 20, 0]


@in_the_kernel_of("13")
def test_lesson_13_shows_what_it_claims() -> None:
    texts = texts_of("13")
    rounding = [float(each) for each in find(r": (\d\S+)$", texts["blocks-run"])]
    assert len(rounding) == 4
    assert max(rounding[:3]) > 1e-3 > 1e-5 > rounding[3]
    for cell in ("ring-run", "causal-run", "zigzag-run"):
        (difference,) = find(r"^largest difference from one process: (\S+)$", texts[cell])
        assert float(difference) < 1e-5
    shows(texts["ring-compare"], "each rank sent 3 messages, 24,576 bytes\n")
    held = find(r"^\d ranks: each holds (.+) of (.+) bytes$", texts["ring-memory"])
    assert held == [("16,384", "16,384"), ("24,576", "32,768"), ("24,576", "49,152")]
    shares = r"^(\d+) ms; ranks 0 to 3 attend for (\d+) % (\d+) % (\d+) % (\d+) %$"
    (in_order,), (zigzag,) = (find(shares, texts[cell]) for cell in ("causal-run", "zigzag-run"))
    # (3 + 33/64) blocks of 40.96 ms, and half of four blocks; resting and messages take more
    assert int(in_order[0]) >= 144
    assert int(zigzag[0]) >= 82
    assert 5 * int(in_order[1]) < int(in_order[4]), "by the formula, rank 3 attends 7 times as long"
    assert columns(texts["many-run"]) == [
        [4, 144.1, 82.6, 1.74, 1.75, 14.7, 14.3],
        [16, 635.8, 328.6, 1.93, 1.94, 3.3, 3.2],
        [64, 2602.7, 1312.5, 1.98, 1.98, 0.8, 0.8],
    ]
    shows(texts["hide-run"], "the message hides from L = 200\n")
    times = [[64, 5, 26, 26, 32], [128, 21, 43, 43, 64], [256, 84, 76, 84, 159]]
    times += [[512, 336, 141, 336, 477]]
    longer, total = ([[*row, row[column]] for row in times] for column in (3, 4))
    assert columns(texts["hide-run"]) == columns(texts["yours-run"]) == total
    assert columns(texts["exchange-solution"]) == longer
    measured = columns(texts["hide-measure"])
    assert [row[0] for row in measured] == [16, 64, 256, 1024]
    assert measured[3][3] > measured[0][3]
    shows(texts["hide-measure"], "2,198 positions over NVLink", "19,780 positions over a network")
    unseen = find(r"^(.+): (\d+) of 240 blocks are never seen", texts["claims-run"])
    assert unseen == [("in order", "120"), ("zigzag", "0")]


@in_the_kernel_of("14")
def test_lesson_14_shows_what_it_claims() -> None:
    texts = texts_of("14")
    counted = dict(find(r"^(\w+) +([\d.]+) MiB$", texts["count-run"]))
    assert [float(counted[kind]) for kind in ("parameters", "gradients", "optimizer")] == [4, 4, 8]
    assert 0 < float(counted["activations"]) < 1
    ways = find(r"^(.+?) +(\d+) calls of 133,120 bytes, ([\d.]+) ms$", texts["ways-run"])
    due = [("one by one", "16", "34.4"), ("in buckets", "4", "27.2"), ("DDP", "4", "24.8")]
    assert ways == due, "10.4, 3.2 and 0.8 ms more than 24 ms"
    losses = find(r": loss (\S+) with DDP, (\S+) with ZeRO-1$", texts["zero1-run"])
    assert len(losses) == 4
    assert all(by_ddp == by_hand for by_ddp, by_hand in losses)
    for cell in ("zero2-run", "zero3-run"):
        (shown,) = find(r"^losses of rank 0: (.+)$", texts[cell])
        assert {*shown.split()} == {losses[0][0]}
    peaks = dict(find(r"^(\S+): at most ([\d.]+) MiB$", texts["zero2-run"] + texts["zero3-run"]))
    assert {name: float(peak) for name, peak in peaks.items()} == pytest.approx(
        {"DDP": 16.8, "ZeRO-1": 10.2, "ZeRO-2": 7.3, "kept": 7.4, "FSDP2": 4.9}, abs=0.3
    )
    rows = [line.split() for line in texts["table-run"].splitlines()[2:]]
    assert [row[0] for row in rows] == ["DDP", "ZeRO-1", "ZeRO-2", "FSDP2"]
    for _, kept, formula, sent, due_sent in rows:
        assert float(formula) <= float(kept) <= float(formula) + 0.5, "and one or two layers"
        assert sent == due_sent
    assert [row[2] for row in rows] == ["16.00", "10.00", "7.00", "4.00"]
    assert [row[3] for row in rows] == ["6.00", "9.00", "6.00", "9.00"]


@in_the_kernel_of("15")
def test_lesson_15_shows_what_it_claims() -> None:
    texts = texts_of("15")
    shows(texts["cuts-run"], "as in one process: True")
    called = find(r"^(\w+) of (.+) bytes$", texts["cuts-compare"])
    assert called == [("all_reduce", "8,192"), ("all_reduce", "32,768"), ("all_gather", "8,192")]
    right = find(r"x: (\w+), of up: (\w+), of down: (\w+)$", texts["grads-run"])
    assert right == [("False", "True", "True")] * 4
    reduces = "all_reduce of 8,192 bytes"
    in_torch = [("torch: forward", reduces), ("torch: backward", reduces)]
    for cell, forward, backward, is_same in (
        ("torch-run", reduces, "", False),
        ("layer-solution", reduces, reduces, True),
        ("yours-run", "", "", False),
    ):
        by_hand = [("by hand: forward", forward), ("by hand: backward", backward)]
        assert find(r"^(\w.+ward) *(.*?) *$", texts[cell]) == by_hand + in_torch
        shows(texts[cell], f"the same gradient of x: {is_same}\n")
    kept = find(
        r": (.+), each rank sends (.+) bytes and keeps (.+); right: True$", texts["sequence-run"]
    )
    ways = [("all_reduce", "12,288", "8,704"), ("all_gather and reduce_scatter", "12,288", "2,176")]
    assert kept == ways
    meshes = r"mesh (\w): a step takes ([\d.]+) ms, and an all_reduce (\d+) us$"
    assert find(meshes, texts["mesh-run"]) == [("A", "39.4", "52"), ("B", "65.7", "540")]
    steps_ms = [row[2] for row in columns(texts["claims-run"])]
    assert steps_ms == [67.9, 46.6, 39.4, 77.8]


@in_the_kernel_of("16")
def test_lesson_16_shows_what_it_claims() -> None:
    texts = texts_of("16")
    shows(texts["machine-code"], "20.4 billion parameters; each of 64 ranks computes 4.17 s")
    layout = r"^(\w+ .+?)  +([\d.]+) s, +(\d+) GB(.*); computing ([\d.]+)(.*)$"
    alone, combined, long = (
        find(layout, texts[f"{name}-run"]) for name in ("alone", "combine", "long")
    )
    assert [(name, took) for name, took, *_ in alone] == [
        ("dp 64", "10.60"),
        ("dp 64 sharded", "9.91"),
        ("pp 64", "8.56"),
        ("tp 64", "166.61"),
    ]
    assert [bool(fits) for _, _, _, fits, *_ in alone] == [True, False, False, False]
    assert {computing for *_, computing, _ in alone + combined} == {"4.17"}
    assert [(name, took, held) for name, took, held, *_ in combined] == [
        ("pp 8 x dp 8", "6.62", "42"),
        ("pp 8 x dp 2 x tp 4", "5.58", "11"),
        ("pp 8 x tp 8", "5.93", "5"),
    ]
    waits = [dict(find(r"(\w+) ([\d.]+)", words)) for *_, words in combined]
    assert waits[0]["recv"] == "1.67"
    assert float(waits[2]["all_reduce"]) > 2 * float(waits[1]["all_reduce"])
    ((_, took, _, _, _, words),) = find(layout, texts["order-run"])
    assert (took, float(took) // 5.58) == ("62.83", 11)
    shows(words, "all_reduce 55.36")
    assert [took for _, took, *_ in long] == ["21.63", "15.83", "14.02", "13.76"]
    assert {computing for *_, computing, _ in long} == {"7.07"}
    assert "irecv" not in texts["long-run"]
    assert [held for _, _, held, *_ in long][2] == "44"
    shows(texts["published-run"], "fitted: 228 TFLOP/s", "0.79 ns for each number of other work")
    errors = [*map(float, find(r"\d ([+-]\d+\.\d)%$", texts["published-run"]))]
    assert (len(errors), max(map(abs, errors))) == (14, 10.1)
    shows(texts["published-run"], "14 rows that were not fitted: mean error 4.7 %, median 4.4 %,")
    of_all = "71 rows that were not fitted: mean error 9.5 %, median 6.0 %, largest 52.7 %"
    shows(texts["published-run"], of_all)
    assert len(find(r"error [+-]", texts["published-simulate"])) == 4
    faster = find(layout, texts["claims-run"])
    assert [took for _, took, *_ in faster] == ["4.48", "5.17", "5.88"]
    assert round(4.17 / 4.48, 2) == 0.93


@in_the_kernel_of("07")
def test_lesson_07_shows_what_it_claims() -> None:
    texts = texts_of("07")
    (alone,) = find(r"one process: (.+)", texts["round-run"])[:1]
    four = f"four stages: [{', '.join([alone] * 4)}]\n"
    shows(texts["round-run"], f"{four}messages by the formula: 15\n")
    sizes = "2 -> 3: [768, 128, 128, 128] bytes\n3 -> 0: [8, 8, 8, 32] bytes"
    shows(texts["phases-run"], "0 -> 1: [768, 128, 128, 128, 32] bytes", sizes)
    shows(texts["turns-run"], "as in one process: True")
    uses = find(r"^ +(\d) +(\w)\w* +(\d+)% +(\d+)%$", texts["turns-table"])
    full = [
        ("2", "s", "33"),
        ("4", "s", "100"),
        ("1", "a", "25"),
        ("2", "a", "50"),
        ("4", "a", "100"),
    ]
    assert [(turns, kind, most) for turns, kind, _, most in uses] == full
    # the jobs do not take exactly the same time
    assert all(0 < int(use) <= int(most) + 10 for _, _, use, most in uses)
    shows(texts["jam-run"], "got 5: a stage holds one job")
    assert texts["jam-clock"].count(" waits for stage ") == 4
    table = find(r"\bno\b|\d+%", texts["jam-clock"].partition("\nsynchronous")[2])
    asynchronous = ["25%", "50%", "75%", "100%", "75%", "50%", "25%", "no"]
    assert table == ["no", "33%", "67%", "100%", "no", "no", "no", "no", *asynchronous]
    latency = columns(texts["latency-run"])
    assert [row[1:] for row in latency[:4]] == [[40, 25], [40, 50], [40, 75], [40, 100]]
    assert [row[2] for row in latency[4:]] == [75, 50, 25]
    shows(texts["claims-run"], "collectives: 0\ntokens over the closing edge: 3\n")


@in_the_kernel_of("08")
def test_lesson_08_shows_what_it_claims() -> None:
    texts = texts_of("08")
    assert texts["adapter-run"].count(" all_reduce world        4000 ") == 6
    signature = "*, prof=False, log_name=None, debug=None)"
    shows(texts["adapter-run"], signature, "return torchs(*args, **kwargs)", "backend: torch\n")
    unwrapped = "is named wrapper with signature (*args) and docstring None\nTypeError: "
    shows(texts["decorator-run"], unwrapped)
    assert find(r"reduce_later: \d{3,} ms\nreturned None", texts["decorator-run"])
    shows(texts["log-run"], "average (span)", "average (all_reduce)", "loss (all_reduce)")
    factors = "n = 2: busbw / algbw = 1.00\nn = 4: busbw / algbw = 1.50\n"
    shows(texts["log-run"], factors)
    assert texts["bytes-steps"].count("0+1+2+3") == 4 + 8 + 16
    assert texts["fallback-run"].count("same bits: True, warnings: 1\n") == 4
    shows(texts["fallback-run"], " 6 messages, ")
    assert [line.split() for line in texts["fallback-sum"].splitlines()[1:]] == [
        ["2", "48,000", "48,000", "2", "True"],
        ["3", "64,000", "64,000", "6", "True"],
        ["4", "72,000", "72,000", "12", "True"],
        ["6", "80,000", "80,000", "30", "True"],
    ]
    assert [re.split(r"  +", line) for line in texts["nccl-run"].splitlines()[1:]] == [
        ["send, then recv", "deadlock", "deadlock", "right"],
        ["isend, then irecv", "right", "deadlock", "right"],
        ["batch_isend_irecv", "right", "right", "right"],
        ["tags, other order", "right", "WRONG NUMBERS", "right"],
    ]
    took = columns(texts["claims-cumulative"])
    assert len(took) == 5
    assert [row[2] for row in took] == sorted(row[2] for row in took)


@in_the_kernel_of("08")
def test_lesson_08_compares_costs_by_their_ratio() -> None:
    first, *lines = texts_of("08")["cost-run"].splitlines()
    assert first.startswith("torch's own call: ")
    assert [line.split()[0] for line in lines] == ["ringsim.comm", "timed_op"]
    # the ratio to torch's own call depends on the machine
    assert all(0.5 < float(line.split()[-1]) < 2 for line in lines)
