"""``ringsim simulate``: the report on schedules and networks, and mistakes in one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ringsim
from ringsim import Link, simulate_schedule
from ringsim.cli import main
from ringsim.pipeline import Costs, make_schedule, rehearse
from ringsim.topologies import FullBisection, Hosts, RingLinks

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
SMALL: dict[str, Any] = {
    "model": {"forward_ms": 10, "backward_ms": 20, "activation_kib": 1},
    "ring": {"ranks": 4},
    "schedule": {"name": "1f1b", "microbatches": 8},
    "link": {"latency_us": 0, "bandwidth_gb_per_s": 1},
}


def write(directory: Path, tables: dict[str, Any]) -> Path:
    """Writes a description; TOML reads values as JSON writes them."""
    lines = []
    for name, content in tables.items():
        for one in content if isinstance(content, list) else [content]:
            lines.append(f"[[{name}]]" if isinstance(content, list) else f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in one.items()]
    file = directory / "step.toml"
    file.write_text("\n".join(lines))
    return file


def changed(table: str, **entries: Any) -> dict[str, Any]:
    """Returns ``SMALL`` with entries of one table changed, and None entries removed."""
    merged = {**SMALL.get(table, {}), **entries}
    return {**SMALL, table: {key: value for key, value in merged.items() if value is not None}}


def ask(file: Path) -> dict[str, Any]:
    """Returns the JSON report of the command on a description."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["simulate", "--json", str(file)]) == 0
    numbers: dict[str, Any] = json.loads(printed.getvalue())
    return numbers


def find_durations(file: Path) -> dict[str, dict[int, float]]:
    """Returns the mean time of each kind of computation in the trace of a step, by stage."""
    saved = file.with_suffix(".ringtrace")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["simulate", "--save", str(saved), str(file)]) == 0
    frame = ringsim.load(saved).to_pandas()
    frame = frame[frame.stage.notna()].assign(took_s=(frame.done_ns - frame.post_ns) * 1e-9)
    return {
        str(label): own.groupby("stage").took_s.mean().to_dict()
        for label, own in frame[frame.kind == "span"].groupby("label")
    }


def refuse(file: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("ringsim: ")
    assert said.count("\n") == 1


def show(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["simulate", str(file)]) == 0
    return capsys.readouterr().out


# -- the report


def test_the_example_says_what_its_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "run.ringtrace", tmp_path / "pictures" / "run.png"
    out = ["--save", str(file), "--plot", str(picture)]
    assert main(["simulate", str(EXAMPLES / "pipeline.toml"), *out]) == 0
    forward = [0.010, 0.010, 0.010, 0.012, 0.010, 0.010, 0.010, 0.010]
    links = {
        (src, dst): Link(10e-6, 1e-10) for src in range(8) for dst in ((src + 1) % 8, (src - 1) % 8)
    }
    links[4, 5] = Link(50e-6, 1e-9)
    costs = Costs(forward, forward, forward, [2 * each for each in forward])
    expected = simulate_schedule(
        "1f1b", costs, num_ranks=8, num_microbatches=16, link=links, size_bytes=2**22
    )
    text = capsys.readouterr().out
    took = re.search(r"^  step +([\d.]+) ms$", text, re.MULTILINE)
    assert took is not None
    assert float(took[1]) == pytest.approx(1e3 * float(expected.makespan), rel=1e-5)
    assert (
        f"{expected.bubble:.1%} of the step, {expected.bubble / (1 - expected.bubble):.1%} of "
        "the work"
    ) in text
    assert (
        "closed form    none for stages that differ; at least 696 ms" in text
    )  # 3 * 30 ms before rank 3, and 16 microbatches of 36 there + 30
    saved = ringsim.load(file)
    assert saved.makespan_s == pytest.approx(float(expected.makespan))
    assert saved.metadata["source"] == "simulated"
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_closed_form_stands_beside_the_simulated_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(write(tmp_path, changed("model", activation_kib=0)), capsys)
    assert re.search(r"^  step +330 ms$", text, re.MULTILINE)  # (m + p - 1)(f + b) = 11 * 30 ms
    assert re.search(r"^  closed form +330 ms$", text, re.MULTILINE)
    assert "27.3% of the step, 37.5% of the work" in text  # 3/11 and 3/8
    assert "4 live at the same time on rank 0, 1 on rank 3" in text


@pytest.mark.parametrize(
    ("told", "step_ms"),
    # 330 + 16 and + 19 messages in a row
    [({"semantics": "buffered"}, 490), ({"semantics": "rendezvous", "ahead": 0}, 520)],
)
def test_messages_start_as_the_schedule_says(
    told: dict[str, Any], step_ms: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        **changed("schedule", **told),
        "link": {"latency_ms": 10, "bandwidth_gb_per_s": 1},
        "model": changed("model", activation_kib=0)["model"],
    }
    text = show(write(tmp_path, tables), capsys)
    assert f"  step           {step_ms} ms\n  closed form    {step_ms} ms\n" in text


def test_a_closed_form_without_messages_stands_where_none_is_known_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(write(tmp_path, changed("link", latency_us=100)), capsys)
    assert "none with these messages; 330 ms with instant messages" in text


def test_shapes_are_charged_for_their_arithmetic(tmp_path: Path) -> None:
    file = tmp_path / "step.toml"
    text = (EXAMPLES / "llama_70b.toml").read_text()
    for line, other in (  # 80 stages, and backward passes in two halves
        ("ranks = 16", "ranks = 80"),
        ('name = "interleaved_1f1b"', 'name = "zb_h1"'),
        ("microbatches = 64\nchunks = 5", "microbatches = 4"),
    ):
        assert line in text
        text = text.replace(line, other)
    file.write_text(text)
    tokens, hidden = 4096, 8192
    weights = 80 * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * 28672) + hidden * 32000
    forward = 2 * tokens * weights + 80 * 4 * tokens * tokens * hidden
    took_s = find_durations(file)
    assert [len(by_stage) for by_stage in took_s.values()] == [80] * 3
    assert sum(sum(each.values()) for each in took_s.values()) == pytest.approx(3 * forward / 4e14)
    # attention has no weights
    assert sum(took_s["weight_grad"].values()) == pytest.approx(2 * tokens * weights / 4e14)
    assert ask(file)["size_bytes"] == tokens * hidden * 2


def test_a_slow_rank_is_slow_with_all_its_stages(tmp_path: Path) -> None:
    tables = {
        **changed("schedule", name="interleaved_1f1b", chunks=2),
        "slow": [{"rank": 1, "factor": 3}],
    }
    forward_s = [0.01, 0.03, 0.01, 0.01, 0.01, 0.03, 0.01, 0.01]
    took_s = find_durations(write(tmp_path, tables))
    assert list(took_s["forward"].values()) == pytest.approx(forward_s)
    assert list(took_s["backward"].values()) == pytest.approx([2 * each for each in forward_s])


def test_a_degraded_link_is_one_that_costs_more(tmp_path: Path) -> None:
    base = changed("link", latency_us=100)
    slower = {"from": 1, "to": 2, "latency_ms": 5, "bandwidth_mb_per_s": 20}
    plain, degraded, other = (
        ask(write(tmp_path, {**base, **more}))["step_s"]
        for more in (
            {},
            {"degrade": [{"from": 1, "to": 2, "factor": 50}]},
            {"edge": [slower]},
        )
    )
    assert degraded == pytest.approx(other)
    assert degraded > plain


def test_a_schedule_of_ones_own_is_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
    tables = {
        **changed("schedule", name=None, microbatches=None, actions=actions),
        "ring": {"ranks": 2},
    }
    text = show(write(tmp_path, tables), capsys)
    named = ask(write(tmp_path, {**changed("schedule", microbatches=2), "ring": {"ranks": 2}}))
    assert f"  step           {1e3 * named['step_s']:,.6g} ms\n" in text, (
        "both must take the same time"
    )
    assert text.startswith("own on 2 ranks, 2 microbatches (simulated")
    assert "  closed form    none for a custom schedule\n" in text
    assert "2 live at the same time on rank 0, 1 on rank 1" in text


# -- mistakes in a description


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (changed("link", latensy_us=1), "[link] has an unknown key: latensy_us"),
        (changed("link", latensy_us=1), "Did you mean latency_us?"),
        (changed("link", latency_us=None, latency=10), "latency in [link] must have a unit"),
        (changed("link", latency_ms=1), "must have latency once, got latency_ms and latency_us"),
        (changed("link", bandwidth_gb_per_s=None), "[link] has no bandwidth ("),
        (changed("link", bandwidth_gb_per_s=0), "bandwidth must be positive, got 0"),
        (changed("link", latency_us="10"),
         "latency_us must be a non-negative number, got '10' ([link] in "),
        (changed("ring", ranks=4.0), "ranks must be a positive integer, got 4.0 ([ring] in "),
        (changed("ring", ranks=True), "got True"),
        (changed("ring", ranks=0), "ranks must be a positive integer, got 0"),
        (changed("ring", ranks=None), "[ring] has no ranks ("),
        (changed("ring", ranks=None, rank=4), "Did you mean ranks instead of rank?"),
        (changed("schedule", name="1fb1"), "Did you mean '1f1b'?"),
        (changed("schedule", chunks=3), "num_chunks"),
        (changed("schedule", actions="rank 0: 0F0 0B0"),
         "actions must have one line for each of the 4 ranks in [ring], got 1"),
        (changed("schedule", actions="0F0"), "actions is not a valid schedule ("),
        (changed("schedule", actions=7), "actions must be a string, got 7"),
        ({**changed("schedule", actions="rank 0: 0F0 0B0"), "ring": {"ranks": 1}},
         "has an unknown key: name"),
        (changed("schedule", semantics="eager"), "semantics must be one of rendezvous, buffered"),
        (changed("schedule", microbatches=10**9),
         "a 1f1b step must have at most 20,000,000 forward passes, got 4,000,000,000"),
        (changed("schedule", name="zb_h1", microbatches=10**6),
         "a zb_h1 step must have at most 1,000,000 forward passes, got 4,000,000"),
        (changed("model", forward_ms=[10, 10]),
         "forward must have one time for each stage, got 2 for 4"),
        (changed("model", forward_ms=[]), "got []"),
        (changed("model", input_ms=10), "[model] has no weight ("),
        (changed("model", input_ms=10, weight_ms=10),
         "must have backward, or its halves input and weight, got backward_ms"),
        (changed("model", layers=8, hidden_size=32, heads=4, kv_heads=5, sequence_length=8,
                 flops_per_s=1), "multiple of kv_heads (5), got 4"),
        (changed("model", activation_kib=0.0001),
         "activation must be 0 or at least 1 byte, got 0.1024 bytes"),
        (changed("model", activation_kib=2**63),
         "activation_kib must be at most 9,007,199,254,740,992 bytes, got 9223372036854775808"),
        (changed("model", forward_ms=1e13),
         "forward_ms must be at most 285 years, because a trace counts ns, got 1"),
        ({**changed("model", forward_ms=4e12), "jitter": [{"fraction": 0.1}]},
         "a step must last at most 285 years"),
        (changed("link", bandwidth_gb_per_s=1e-320),
         "bandwidth must be positive, got 9.99989e-312 bytes/s ([link] in "),
        ({**SMALL, "edge": [{**SMALL["link"], "from": 0, "to": 1}] * 2},
         "two [[edge]] tables describe the link from 0 to 1"),
        (changed("model", layers=8, hidden_size=30, heads=4, sequence_length=8, flops_per_s=1),
         "hidden_size must be a multiple of heads"),
        ({**SMALL, "slow": [{"rank": 4, "factor": 2}]},
         "must be from 0 to 3, got Slow(rank=4, factor=2.0)"),
        ({**SMALL, "slow": [{"rank": 1, "factor": 0.5}]},
         "factor must be a number of at least 1, got 0.5 ([[slow]] in "),
        ({**SMALL, "slow": {"rank": 1, "factor": 2}}, "slow must be a list of tables, [[slow]]"),
        ({**SMALL, "edge": [{**SMALL["link"], "from": 0, "to": 2}]},
         "must be neighbours in a ring of 4, got 0 and 2"),
        ({**changed("ring", ranks=1), "edge": [{**SMALL["link"], "from": 0, "to": 0}]},
         "neighbours in a ring of 1, got 0 and 0"),
        ({**SMALL, "links": {"latency_us": 1}},
         "the description has an unknown key: links"),
        ({key: value for key, value in SMALL.items() if key != "link"},
         "the description has no link ("),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    tables: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(write(tmp_path, tables), words, capsys)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[ring]\nranks = \n")
    binary.write_bytes(b"\xff\xfe")
    long_ones = []
    for number, (value, words) in enumerate(
        {
            "9" * 5000: "not valid TOML",
            "[" * 5000: "not valid TOML",
            "9" * 400: "a positive integer",
        }.items()
    ):
        long_ones.append((tmp_path / f"{number}.toml", words))
        long_ones[-1][0].write_text(f"[ring]\nranks = {value}\n[model]\n[link]\n[schedule]\n")
    for file, code, words in (
        (broken, 2, "at line 2"),
        *((file, 2, words) for file, words in long_ones),
        (binary, 1, "cannot read the description"),
        (tmp_path / "missing.toml", 1, "No such file"),
        (tmp_path, 2, "no such script"),
    ):
        assert main(["simulate", str(file)]) == code
        assert words in capsys.readouterr().err


VALUES = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([10**400, 2**63, 1e300, 1e-300, True, "1f1b", "zb_v", "", []]),
    st.floats(0, 1e6), st.lists(st.integers(0, 9), max_size=5),
)  # fmt: skip


@given(
    table=st.sampled_from(sorted(SMALL)),
    key=st.sampled_from(
        [key for content in SMALL.values() for key in content]
        + ["layers", "chunks", "ahead", "semantics", "heads", "nonsense"]
    ),
    value=VALUES,
)
@example(table="model", key="activation_kib", value=2**63)  # 0.1.0: OverflowError
def test_whatever_stands_there_is_simulated_or_told(
    table: str, key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = write(tmp_path_factory.mktemp("description"), changed(table, **{key: value}))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = main(["simulate", "--json", str(file)])
    if code == 0:
        assert json.loads(printed.getvalue())["step_s"] >= 0
    assert code in (0, 1, 2)


# -- networks that ranks share


OUTER = {"latency_us": 10, "bandwidth_gb_per_s": 1}
HOSTS = {
    "kind": "hosts",
    "ranks_per_host": 2,
    "inner_latency_us": 1,
    "inner_bandwidth_gb_per_s": 100,
    **{f"outer_{key}": value for key, value in OUTER.items()},
}
INNER_LINK, OUTER_LINK = Link(1e-6, 1e-11), Link(1e-5, 1e-9)
TABLES: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "link"},
    "schedule": {"name": "interleaved_1f1b", "chunks": 2, "microbatches": 8},
    "model": {"forward_ms": 10, "backward_ms": 20, "activation_mib": 4},
}


def from_python(**network: Any) -> float:
    """Returns the time of the step of ``TABLES``, in seconds."""
    args = make_schedule("interleaved_1f1b", 4, 8, 2), Costs(forward=0.01, backward=0.02)
    trace = ringsim.simulate(
        rehearse, world_size=4, args=args, kwargs={"size_bytes": 4 * 2**20}, **network
    )
    return float(trace.metadata["end_ns"]) * 1e-9


def from_file(directory: Path, **tables: Any) -> dict[str, Any]:
    found = ask(write(directory, {**TABLES, **tables}))
    assert "undisturbed_s" in found  # the command ran simulated ranks
    return found


@pytest.mark.parametrize(
    ("table", "topology"),
    [
        (HOSTS, Hosts(2, INNER_LINK, OUTER_LINK)),
        ({"kind": "full_bisection", **OUTER}, FullBisection(OUTER_LINK)),
        ({"kind": "ring", **OUTER}, RingLinks(OUTER_LINK)),
    ],
    ids=["hosts", "full_bisection", "ring"],
)
def test_a_network_is_the_topology_of_its_name(
    table: dict[str, Any], topology: Any, tmp_path: Path
) -> None:
    found = from_file(tmp_path, topology=table)["step_s"]
    assert found == pytest.approx(from_python(topology=topology), rel=1e-12)


def test_where_nothing_is_shared_the_schedule_alone_gives_the_same_time(tmp_path: Path) -> None:
    shared = from_file(tmp_path, topology={"kind": "ring", **OUTER})
    alone = ask(write(tmp_path, {**TABLES, "link": OUTER}))
    assert "undisturbed_s" not in alone
    assert shared["step_s"] == pytest.approx(alone["step_s"], abs=1e-8)
    assert shared["undisturbed_s"] == pytest.approx(alone["step_s"])


def test_what_disturbs_a_network_is_injected(tmp_path: Path) -> None:
    degrade, slow = [{"from": 1, "to": 2, "factor": 3}], [{"rank": 3, "factor": 2}]
    found = from_file(tmp_path, topology=HOSTS, degrade=degrade, slow=slow)["step_s"]
    inject: list[Any] = [ringsim.Degrade(1, 2, 3), ringsim.Slow(3, 2)]
    hosts = Hosts(2, INNER_LINK, OUTER_LINK)
    assert found == pytest.approx(from_python(topology=hosts, inject=inject), rel=1e-12)
    drawn, other = (
        from_file(tmp_path, link=OUTER, jitter=[{"fraction": 0.2, "seed": seed}])["step_s"]
        for seed in (7, 8)
    )
    inject = [ringsim.Jitter(0.2, 7)]
    assert drawn == pytest.approx(from_python(link=OUTER_LINK, inject=inject), rel=1e-12) != other


def test_the_example_says_what_sharing_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "run.ringtrace", tmp_path / "run.png"
    out = ["--save", str(file), "--plot", str(picture)]
    assert main(["simulate", str(EXAMPLES / "hosts.toml"), *out]) == 0
    text = capsys.readouterr().out
    assert "64 MiB per message, hosts of 4 ranks, jitter)\n" in text
    took, undisturbed = (
        re.search(rf"^  {word} +([\d.]+) s", text, re.MULTILINE) for word in ("step", "undisturbed")
    )
    assert took is not None
    assert undisturbed is not None
    saved = ringsim.load(file)
    assert float(took[1]) == pytest.approx(saved.metadata["end_ns"] * 1e-9, rel=1e-5)
    assert f"bubble         {saved.bubble().of_total:.1%} of the step" in text
    assert float(took[1]) > float(undisturbed[1])
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"topology": {"kind": "host"}},
         "kind must be one of hosts, full_bisection, ring, got 'host' ([topology] in "),
        ({"topology": {"kind": "host"}}, "Did you mean 'hosts'?"),
        ({"topology": {**HOSTS, "ranks_per_host": 0}},
         "ranks_per_host must be a positive integer, got 0"),
        ({"topology": {**HOSTS, "inner_latency": 1}},
         "inner_latency in [topology] must have a unit"),
        ({"topology": {**HOSTS, "outer_bandwidth_gb_per_s": 0}},
         "outer_bandwidth must be positive, got 0 ([topology] in "),
        ({"topology": {**HOSTS, "latency_us": 1}},
         "[topology] has an unknown key: latency_us"),
        ({"topology": {"kind": "ring", "latency_us": 1}},
         "[topology] has no bandwidth ("),
        ({"topology": HOSTS, "link": OUTER},
         "the links must be described once, got [topology] and [link] or [[edge]]"),
        ({"topology": HOSTS, "edge": [{"from": 0, "to": 1, **OUTER}]},
         "the links must be described once"),
        ({"topology": [HOSTS]}, "topology must be a table, [topology]"),
        ({"link": OUTER, "jitter": [{"fraction": 2}]},
         "fraction must be positive and at most 1, got 2.0"),
        ({"link": OUTER, "jitter": [{"fraction": 0.1, "sed": 1}]},
         "[[jitter]] has an unknown key: sed"),
        ({"link": OUTER, "jitter": {"fraction": 0.1}},
         "jitter must be a list of tables, [[jitter]]"),
        ({"topology": HOSTS, "model": {"forward_ms": 1, "backward_ms": 1}},
         "activation must be positive with [topology] or [[jitter]]"),
        ({"topology": HOSTS, "schedule": {"name": "1f1b", "microbatches": 10**6}},
         "must have at most 100,000 forward passes, got 4,000,000"),
    ],
)  # fmt: skip
def test_mistakes_in_a_network_are_told_in_one_line(
    tables: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(write(tmp_path, {**TABLES, **tables}), words, capsys)
