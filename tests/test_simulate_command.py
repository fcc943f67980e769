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
from ringsim import Link
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
        for label, own in frame[frame.kind == "span"].groupby("label", observed=True)
    }


def refuse(file: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("ringsim: ")
    assert said.count("\n") == 1


def show(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["simulate", *options, str(file)]) == 0
    return capsys.readouterr().out


# -- the report


def test_a_closed_form_stands_beside_the_simulated_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = show(write(tmp_path, changed("model", activation_kib=0)), capsys)
    assert re.search(r"^  step +330 ms$", text, re.MULTILINE)  # (m + p - 1)(f + b) = 11 * 30 ms
    assert re.search(r"^  closed form +330 ms$", text, re.MULTILINE)
    assert "27.3% of the step, 37.5% of the work" in text  # 3/11 and 3/8
    assert "4 live at the same time on rank 0, 1 on rank 3" in text
    text = show(write(tmp_path, changed("link", latency_us=100)), capsys)
    assert "none with these messages; 330 ms with instant messages" in text
    times = {"forward_ms": [10, 10, 12, 10], "backward_ms": [20, 20, 24, 20], "activation_kib": 0}
    text = show(write(tmp_path, changed("model", **times)), capsys)
    # two forward passes before stage 2, 8 microbatches of 36 ms there, two backward passes after
    assert "none for stages that differ; at least 348 ms" in text


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


def test_shapes_are_charged_for_their_arithmetic(tmp_path: Path) -> None:
    file = tmp_path / "step.toml"
    # 80 stages, and backward passes in two halves
    text = (EXAMPLES / "llama_70b.toml").read_text()
    text = text.replace("ranks = 16", "ranks = 80").replace('"interleaved_1f1b"', '"zb_h1"')
    file.write_text(text.replace("microbatches = 64\nchunks = 5", "microbatches = 4"))
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
        "model": changed("model", forward_ms=[10, 10, 10, 12, 10, 10, 10, 10])["model"],
        "slow": [{"rank": 1, "factor": 3}],
    }
    took_s = find_durations(write(tmp_path, tables))
    forward_s = [0.01, 0.03, 0.01, 0.012, 0.01, 0.03, 0.01, 0.01]
    assert list(took_s["forward"].values()) == pytest.approx(forward_s)
    backward_s = [0.02, 0.06, 0.02, 0.02, 0.02, 0.06, 0.02, 0.02]
    assert list(took_s["backward"].values()) == pytest.approx(backward_s)


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
    assert f"  step           {1e3 * named['step_s']:,.6g} ms\n" in text
    assert text.startswith("own on 2 ranks, 2 microbatches (simulated")
    assert "none for a custom schedule\n" in text
    assert "2 live at the same time on rank 0, 1 on rank 1" in text


# -- mistakes in a description


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (changed("link", latensy_us=1), "Did you mean latency_us?"),
        (changed("link", latency_us=None, latency=10), "latency in [link] has no unit"),
        (changed("link", latency_ms=1), "sets latency more than once: latency_ms and latency_us"),
        (changed("link", bandwidth_gb_per_s=0), "bandwidth must be positive, got 0"),
        (changed("link", latency_us="10"),
         "latency_us must be a non-negative number, got '10' ([link] in "),
        (changed("ring", ranks=None, rank=4), "Did you mean ranks instead of rank?"),
        (changed("schedule", name="1fb1"), "Did you mean '1f1b'?"),
        (changed("schedule", actions="rank 0: 0F0 0B0"),
         "actions must have one line for each of the 4 ranks in [ring], got 1"),
        (changed("schedule", actions=7), "actions must be a string, got 7"),
        ({**changed("schedule", actions="rank 0: 0F0 0B0"), "ring": {"ranks": 1}},
         "has an unknown key: name"),
        (changed("schedule", semantics="eager"), "semantics must be one of rendezvous, buffered"),
        (changed("schedule", name="zb_h1", microbatches=10**6),
         "a zb_h1 step must have at most 1,000,000 forward passes, got 4,000,000"),
        (changed("model", forward_ms=[10, 10]),
         "the length of forward must be the number of stages, 4, got 2"),
        (changed("model", input_ms=10), "[model] has no weight ("),
        (changed("model", input_ms=10, weight_ms=10),
         "has both backward_ms and its halves"),
        (changed("model", layers=8, hidden_size=32, heads=4, kv_heads=5, sequence_length=8,
                 flops_per_s=1), "multiple of kv_heads (5), got 4"),
        (changed("model", activation_kib=0.0001),
         "activation must be either 0 or at least 1 byte, got 0.1024 bytes"),
        (changed("model", activation_kib=2**63),
         "activation_kib must be at most 9,007,199,254,740,992 bytes, got 9223372036854775808"),
        (changed("model", forward_ms=1e13),
         "forward_ms must be at most 285 years, because a trace counts ns, got 1"),
        ({**changed("model", forward_ms=4e12), "jitter": [{"fraction": 0.1}]},
         "a step can last at most 285 years"),
        ({**SMALL, "edge": [{**SMALL["link"], "from": 0, "to": 1}] * 2},
         "two [[edge]] tables describe the link from 0 to 1"),
        ({**SMALL, "slow": [{"rank": 4, "factor": 2}]},
         "must be from 0 to 3, got Slow(rank=4, factor=2.0)"),
        ({**SMALL, "slow": [{"rank": 1, "factor": 0.5}]},
         "factor must be a number of at least 1, got 0.5 ([[slow]] in "),
        ({**SMALL, "slow": {"rank": 1, "factor": 2}}, "slow must be a list of tables, [[slow]]"),
        ({**SMALL, "edge": [{**SMALL["link"], "from": 0, "to": 2}]},
         "must be neighbours in a ring of 4, got 0 and 2"),
        ({key: value for key, value in SMALL.items() if key != "link"},
         "the description has no link ("),
        (changed("ring", ranks=True), "ranks must be a positive integer, got True"),
        ({**TABLES, "topology": {"kind": "host"}}, "Did you mean 'hosts'?"),
        ({**TABLES, "topology": {**HOSTS, "inner_latency": 1}},
         "inner_latency in [topology] has no unit"),
        ({**TABLES, "topology": {"kind": "ring", "latency_us": 1}},
         "[topology] has no bandwidth ("),
        ({**TABLES, "topology": HOSTS, "link": OUTER},
         "the links are described twice, in [topology]"),
        ({**TABLES, "topology": [HOSTS]}, "topology must be a table, [topology]"),
        ({**TABLES, "link": OUTER, "jitter": [{"fraction": 2}]},
         "fraction must be positive and at most 1, got 2.0"),
        ({**TABLES, "link": OUTER, "jitter": [{"fraction": 0.1, "sed": 1}]},
         "[[jitter]] has an unknown key: sed"),
        ({**TABLES, "topology": HOSTS, "model": {"forward_ms": 1, "backward_ms": 1}},
         "activation must be positive with [topology] or [[jitter]]"),
        ({**TABLES, "topology": HOSTS, "schedule": {"name": "1f1b", "microbatches": 10**6}},
         "must have at most 100,000 forward passes, got 4,000,000"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(
    tables: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(write(tmp_path, tables), words, capsys)


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"[ring]\nranks = \n", 2, "at line 2"),
        (b"[ring]\nranks = " + b"9" * 5000, 2, "not valid TOML"),
        (b"[ring]\nranks = " + b"[" * 5000, 2, "not valid TOML"),
        (b"\xff\xfe", 1, "cannot read the description"),
        (None, 1, "No such file"),
    ],
)
def test_files_that_are_none(
    content: bytes | None, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.toml"
    if content is not None:
        file.write_bytes(content)
    assert main(["simulate", str(file)]) == code
    assert words in capsys.readouterr().err
    assert main(["simulate", str(tmp_path)]) == 2
    assert "no such script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("latency_us", "bandwidth_gbps"), [("10", "0"), ("10", "-1"), ("-1", "10"), ("nan", "10")]
)
def test_impossible_links_are_refused(
    latency_us: str, bandwidth_gbps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 0.3.0 divided by a bandwidth of 0, which raised ZeroDivisionError."""
    (tmp_path / "script.py").touch()
    link = [f"--latency-us={latency_us}", f"--bandwidth-gbps={bandwidth_gbps}"]
    assert main(["simulate", *link, str(tmp_path / "script.py")]) == 2
    words = f"positive bandwidth, got {latency_us} and {bandwidth_gbps}. Use microseconds"
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


def test_what_disturbs_a_network_is_injected(tmp_path: Path) -> None:
    degrade, slow = [{"from": 1, "to": 2, "factor": 3}], [{"rank": 3, "factor": 2}]
    jitter = [{"fraction": 0.2, "seed": 7}]
    found = from_file(tmp_path, topology=HOSTS, degrade=degrade, slow=slow, jitter=jitter)
    expected_s = from_python(
        topology=Hosts(2, INNER_LINK, OUTER_LINK),
        inject=[ringsim.Degrade(1, 2, 3), ringsim.Slow(3, 2), ringsim.Jitter(0.2, 7)],
    )
    assert found["step_s"] == pytest.approx(expected_s, rel=1e-12)


def test_the_example_says_what_sharing_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "run.ringtrace", tmp_path / "run.png"
    out = ["--save", str(file), "--plot", str(picture)]
    text = show(EXAMPLES / "hosts.toml", capsys, *out)
    assert "64 MiB per message, hosts of 4 ranks, jitter)\n" in text
    took, undisturbed = (
        float(re.findall(rf"^  {word} +([\d.]+) s", text, re.MULTILINE)[0])
        for word in ("step", "undisturbed")
    )
    saved = ringsim.load(file)
    assert took == pytest.approx(saved.makespan_s, rel=1e-5)
    assert took > undisturbed
    assert f"bubble         {saved.bubble().of_total:.1%} of the step" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
