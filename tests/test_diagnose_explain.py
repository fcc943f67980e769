"""``explain`` of traces of any content, of runs that finished, and of files, with its picture."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_traces import WORLD_SIZE, json_values, traces
from synthetic import METADATA, Group, Story
from trace_file import put_together, take_apart

import ringsim
from ringsim import Trace

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "findings.md").read_text()
KINDS = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
IN_FLIGHT, OK, REFUSED = 1, 2, 3  # states of an operation in a file

ends = st.one_of(
    json_values,
    st.lists(
        st.fixed_dictionaries(
            {
                "rank": st.one_of(st.integers(-1, WORLD_SIZE), json_values),
                "state": st.sampled_from(
                    "exited failed killed running blocked stopped asleep".split()
                ),
                "about": st.text(max_size=12),
            }
        ),
        max_size=4,
    ),
)


@given(trace=traces, ends=ends, end_ns=json_values, given_up_ns=json_values, complete=st.booleans())
def test_explains_anything(
    trace: Trace, ends: Any, end_ns: Any, given_up_ns: Any, complete: bool
) -> None:
    """Every trace has an answer: known kinds, ranks of the run, and text."""
    said = {"ends": ends, "end_ns": end_ns, "given_up_ns": given_up_ns, "complete": complete}
    diagnosis = Trace(trace.events, {**trace.metadata, **said}).explain()
    for finding in diagnosis.findings:
        for one in (finding, *finding.consequences):
            assert one.kind in KINDS
            assert set(one.ranks) <= set(range(-1, WORLD_SIZE))
            assert one.message
    assert str(diagnosis)


@pytest.mark.filterwarnings("ignore:Glyph")  # no font has all of them
@settings(phases=(Phase.generate,))  # shrinking pictures takes minutes
@given(trace=traces, ends=ends)
def test_draws_anything(trace: Trace, ends: Any) -> None:
    diagnosis = Trace(trace.events, {**METADATA, "world_size": WORLD_SIZE, "ends": ends}).explain()
    assert "data:image/svg+xml;base64," in replace(diagnosis, trace=None).picture_html()


def named(diagnosis: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.kind, one.ranks) for one in diagnosis.findings]


# -- collectives whose lines differ


@pytest.mark.parametrize(
    ("lines", "collective", "places"),
    [
        ([[1, 2, 3, 2, 3, 9], [1, 2, 3, 3, 9]], 4, "rank 0 at ring.py:2, rank 1 at ring.py:3"),
        (
            [[1, 2, 5, 9], [1, 2, 5, 9], [1, 5, 9]],
            2,
            "ranks 0 and 1 at ring.py:2, rank 2 at ring.py:5",
        ),
        (
            [[1, 4, 6, 1, 4, 6, 7, 9], [1, 5, 6, 1, 5, 7, 9]],
            6,
            "rank 0 at ring.py:6, rank 1 at ring.py:7",
        ),
        ([[1, 4, 6, 1, 4, 6, 8], [1, 5, 6, 1, 5, 6, 7, 9]], 0, ""),
        ([[1, 2, 8], [1, 2, 3, 9]], 0, ""),
        ([[4, 4, 8], [5, 5, 5, 9]], 0, ""),
    ],
    ids=[
        *("one left out of a loop", "three ranks", "after a line of its role"),
        *("lines of their roles", "the finding names the lines", "all lines by role"),
    ],
)
def test_the_collective_at_which_the_ranks_parted_is_named(
    lines: list[list[int]], collective: int, places: str
) -> None:
    """Each rank calls collectives at its lines, the last of them a barrier that never ends."""
    story = Story(len(lines))
    for rank, mine in enumerate(lines):
        for place, line in enumerate(mine):
            op, done = ("barrier", -1) if line == mine[-1] else ("all_reduce", place + 0.5)
            story.op(rank, op, (place, place, done), group="world", line=line, file=0)
    (finding,) = story.trace().explain().findings
    assert finding.kind == "collective_mismatch"
    said = finding.hint.partition("Compare the paths that the ranks took: ")[2].partition("\n")[0]
    first = f"their lines first differ in collective {collective} of group world"
    assert said == (f"{first} ({places})." if places else "")


# -- mismatched operations that completed

FLOAT8, INT8, FLOAT4, SHAPED, TURNED = (
    ("float32", (8,), 32),
    ("int32", (8,), 32),
    ("float32", (4,), 16),
    ("float32", (2, 4), 32),
    ("float32", (4, 2), 32),
)
SUM, MAX = (*FLOAT8, "SUM"), (*FLOAT8, "MAX")
ROWS = (*FLOAT8, "", ((8, 1),))
COLUMNS = (*FLOAT8, "", ((1, 8),))
UNEVEN = (*FLOAT8, "", (), ((8, 24), (16, 8)))
FITTING = (*FLOAT8, "", (), ((8, 16), (24, 16)))
ODD = (*INT8, "", (), ((8,),))  # its splits match no group


def messages(*pairs: tuple[Any, Any], **metadata: Any) -> Any:
    """Explains a run in which rank 0 sends to rank 1, with the payloads of both sides."""
    story = Story(2)
    for tag, pair in enumerate(pairs):
        for rank, carries in enumerate(pair):
            op = ("send", "recv")[rank]
            about = {"peer": 1 - rank, "tag": tag, "group": "world", "line": 2 * tag + rank}
            story.op(rank, op, (0, 0, 1), carries=carries, **about)
    return story.trace(**metadata).explain()


def differences(*pairs: tuple[Any, Any], **metadata: Any) -> list[str]:
    """Returns the differing property of each mismatched message."""
    findings = messages(*pairs, **metadata).findings
    assert all((one.kind, one.ranks) == ("message_mismatch", (0, 1)) for one in findings)
    return [one.message.partition("\n")[0].rpartition("the ")[2] for one in findings]


def test_messages_that_disagree() -> None:
    pairs = (FLOAT8, SHAPED), (TURNED, SHAPED), (FLOAT8, INT8), (FLOAT8, FLOAT4)
    assert differences(*pairs) == ["size differs.", "dtype differs.", "shape differs."]
    assert str(messages(*pairs)).startswith("message mismatch: rank 0 sends ")
    assert len(differences(*[(FLOAT8, FLOAT4)] * 7)) == 5, "the first ones"
    # groups that were used before the recording began cannot be compared
    assert len(differences(*pairs, used_before=["ring:0>1"])) == 3
    assert differences(*pairs, used_before=["world"]) == []


@pytest.mark.parametrize(
    ("sent", "received", "what"),
    [
        (((2, 3), "float32"), ((6,), "float32"), []),  # a flat buffer
        (((1, 2, 3), "float32"), ((2, 3, 1), "float32"), []),
        (((2, 3), "float32"), ((2, 3), "int32"), ["dtype differs."]),
        (((0, 3), "float32"), ((3, 0), "int32"), []),  # nothing is carried
        (((), "float32"), ((1,), "float32"), []),
        (((2, 2, 3), "float32"), ((4, 3), "float32"), ["shape differs."]),
        (((2,), "float32"), ((3,), "int32"), ["size differs."]),
    ],
)
def test_what_counts_as_disagreement(
    sent: tuple[Any, str], received: tuple[Any, str], what: list[str]
) -> None:
    one, other = ((dtype, shape, 4 * math.prod(shape)) for shape, dtype in (sent, received))
    assert differences((one, other)) == differences((other, one)) == what


def test_a_refused_operation_takes_no_place() -> None:
    """The first send of rank 0 was refused when posted, so rank 1 receives its second."""
    story = Story(2)
    about = {"peer": 1, "tag": 0, "group": "world"}
    story.op(0, "isend", (0, -1, -1), **about, status=REFUSED, carries=FLOAT4)
    story.op(0, "isend", (0, 0, 1), **about, carries=FLOAT8)
    story.op(1, "irecv", (0, 0, 1), **about | {"peer": 0}, carries=FLOAT8)
    assert story.trace().explain().findings == ()


@pytest.mark.parametrize(
    ("backend", "found"), [("nccl", 0), ("virtual clock, grouped", 0), ("gloo", 2)]
)
def test_if_tags_are_ignored_messages_are_compared_in_the_order_of_posting(
    backend: str, found: int
) -> None:
    story = Story(2)
    for place, (sent, received) in enumerate(((1, 2), (2, 1))):
        carries = (FLOAT4, FLOAT8)[place]
        story.op(0, "send", (place, place, 3), peer=1, tag=sent, group="world", carries=carries)
        story.op(1, "recv", (place, place, 3), peer=0, tag=received, group="world", carries=carries)
    assert len(story.trace(backend=backend).explain().findings) == found


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (("all_reduce", SUM), ("broadcast", SUM, 0), "kind"),
        (("broadcast", SUM, 0), ("broadcast", SUM, 1), "root"),
        (("all_reduce", SUM), ("all_reduce", FLOAT4), "size"),
        (("all_reduce", SUM), ("all_reduce", MAX), "reduction"),
        # C++ issued one of them: its reduction is unknown
        (("all_reduce", SUM), ("all_reduce", FLOAT8), ""),
        (("broadcast", TURNED, 0), ("broadcast", TURNED, 0), ""),
        # Gloo reads memory as it is: a tensor and its transpose would be mixed up
        (("all_reduce", ROWS), ("all_reduce", COLUMNS), "order of elements in memory"),
        (("all_to_all", UNEVEN), ("all_to_all", FITTING), ""),
        (
            ("all_to_all", UNEVEN),
            ("all_to_all", UNEVEN),
            "24 bytes to rank 1, but rank 1 expects 16.",
        ),
        (("all_to_all", UNEVEN), ("all_to_all", ODD), "dtype"),
        (
            ("all_to_all", FITTING),
            ("all_to_all", FITTING),
            "16 bytes to rank 1, but rank 1 expects 24.",
        ),
        (("all_gather", SUM), ("all_gather_into_tensor", SUM), ""),
        # the same elements
        (("all_gather", TURNED), ("all_gather_into_tensor", SHAPED), ""),
        (("all_gather", TURNED), ("all_gather", SHAPED), "shape"),
    ],
)
def test_collectives_that_disagree(
    first: tuple[Any, ...], second: tuple[Any, ...], what: str
) -> None:
    story = Story(2)
    for rank, (op, carries, *root) in enumerate((first, second)):
        story.op(rank, op, (0, 0, 1), group="world", carries=carries, peer=root[0] if root else -1)
    findings = story.trace().explain().findings
    assert [one.kind for one in findings] == ["collective_mismatch"] * bool(what)
    for one in findings:
        words = what if what.endswith(".") else f"the {what} differs."
        assert one.message.partition("\n")[0].endswith(words)


def test_groups_made_in_another_order() -> None:
    story = Story(2)
    for rank in (0, 1):
        for turn in (0, 1):
            members = ((0, 1), (1, 2))[(turn + rank) % 2]
            story.op(
                rank, "new_group", (turn, turn, 2), group="world", carries=("ranks", members, 0)
            )
    (finding,) = story.trace().explain().findings  # the groups were created nevertheless
    assert (finding.kind, finding.ranks) == ("group_order_mismatch", (0, 1))
    assert "ranks[0,1]" in finding.message
    assert "ranks[1,2]" in finding.message


def test_groups_of_one_name_with_other_members(tmp_path: Path) -> None:
    story = Story(3)
    for rank, name in enumerate(("mine", "else")):  # ranks 0 and 1 for rank 0, 1 and 2 for rank 1
        story.groups.append(Group(name, (rank, rank + 1)))
        story.op(rank, "recv", (1, 1, -1), peer=rank + 1, tag=0, group=name)
    file = tmp_path / "run.ringtrace"
    story.trace(complete=False).save(file)
    meta, events = take_apart(file)
    file.write_bytes(put_together(meta.replace(b"else", b"mine"), events))
    assert named(ringsim.load(file).explain())[0] == ("group_order_mismatch", (0, 1))


# -- runs that finished or were ended, from the records of their ranks

RETURNED = [{"rank": rank, "state": "exited", "about": "has returned"} for rank in (0, 1)]


def run_of(*rows: dict[str, Any], **metadata: Any) -> Any:
    """Explains a run of two ranks; each row is the isend of a rank, or another operation."""
    story = Story(2)
    for row in rows:
        about = {"op": "isend", "tag": 0, "thread": 0, "line": 7, "status": OK, **row}
        rank, op, times = about.pop("rank"), about.pop("op"), about.pop("times", (-1, -1, -1))
        story.op(rank, op, times, group="world", **about)
    return story.trace(**{"ends": RETURNED, **metadata}).explain()


MINE = {"rank": 0, "peer": 1}
SENT = {**MINE, "op": "send", "times": (4, 4, 8)}
ALSO_SENT = {**SENT, "thread": 1, "times": (7, 4, 8)}
LEFT_OPEN, TURNED_DOWN = {**MINE, "status": IN_FLIGHT}, {**MINE, "status": REFUSED}
UNLIKE = [
    {"rank": 0, "op": "barrier"},
    {"rank": 0, "op": "all_reduce", "status": IN_FLIGHT},
    {"rank": 1, "op": "barrier"},
    {"rank": 1, "op": "broadcast", "peer": 0, "status": REFUSED},
]
FAILED_TO_MEET = {
    "complete": False,
    "ends": [
        {
            "rank": 1,
            "state": "failed",
            "about": "raised RendezvousFailed: all ranks must come, got 1 of 2.",
            "error": "RendezvousFailed",
        }
    ],
}
CUT_OFF: dict[str, Any] = {"ends": [], "complete": False}


@pytest.mark.parametrize(
    ("rows", "metadata", "found"),
    [
        (
            [{"rank": 0, "op": "all_reduce", "status": IN_FLIGHT}],
            {},
            [("missing_participant", (1, 0)), ("leaked_request", (0,))],
        ),
        ([LEFT_OPEN], {}, [("leaked_request", (0,))]),
        ([LEFT_OPEN], {"ends": []}, []),  # unknown for a rank that has not returned
        ([SENT, ALSO_SENT], {}, [("race", (0,))]),
        ([SENT, ALSO_SENT], {"backend": "nccl"}, []),  # messages complete long after the thread
        ([SENT, {**ALSO_SENT, "times": (8, 4, 8)}], {}, []),  # in turn
        ([SENT, {**ALSO_SENT, "tag": 1}], {}, []),
        ([{**SENT, "op": "isend", "times": (4, 6, 8)}, ALSO_SENT], {}, []),  # posted in turn
        (  # ordered by an answer
            [SENT, {**SENT, "rank": 1, "peer": 0, "op": "recv", "times": (4, 4, 6)}, ALSO_SENT],
            {},
            [],
        ),
        ([{"rank": 0, "op": "mark"}], FAILED_TO_MEET, [("rendezvous_failed", (1,))]),
    ],
)
def test_what_is_found_in_rows(
    rows: list[dict[str, Any]], metadata: dict[str, Any], found: list[Any]
) -> None:
    assert named(run_of(*rows, **metadata)) == found


@pytest.mark.parametrize(
    ("kind", "rows", "metadata", "found"),
    [
        # the line has a message that was sent: the notice is not about the peer
        ("buffer_hazard", [LEFT_OPEN], CUT_OFF, (0,)),
        ("buffer_hazard", [TURNED_DOWN], CUT_OFF, (0,)),
        ("invalid_argument", [TURNED_DOWN], {}, ()),  # caught, and the program ended normally
        ("invalid_argument", [TURNED_DOWN], FAILED_TO_MEET, (0, 1)),
        ("invalid_argument", [LEFT_OPEN], CUT_OFF, (0,)),
        ("invalid_argument", [TURNED_DOWN], CUT_OFF, (0, 1)),
        ("invalid_argument", [{**TURNED_DOWN, "line": 8}], CUT_OFF, (0,)),  # of another line
        ("collective_mismatch", UNLIKE, CUT_OFF, (0, 1)),
    ],
)
def test_a_notice_is_about_what_was_refused_on_its_own_line(
    kind: str, rows: list[dict[str, Any]], metadata: dict[str, Any], found: tuple[int, ...]
) -> None:
    mark = {"op": "mark", "rank": rows[-1]["rank"], "label": f"! {kind}: it must not change."}
    findings = run_of(*rows, mark, **metadata).findings
    assert [one.ranks for one in findings[:1]] == [found] * bool(found)
    if found:
        assert findings[0].kind == kind
        assert findings[0].message.endswith(": it must not change.")
        refused = [row for row in rows if row.get("status") == REFUSED and "line" not in row]
        assert [one.op for one in findings[0].operations] == (
            ["broadcast", "all_reduce"]
            if rows is UNLIKE
            else [row.get("op", "isend") for row in refused]
        )


def test_handles_that_nobody_waited_for_are_counted() -> None:
    (finding,) = run_of(LEFT_OPEN, LEFT_OPEN).findings
    assert finding.message == (
        "rank 0 never waited for its isend (2 times).\n"
        "  rank 0 posted isend to 1 (world, tag 0)\n"
        "  the other side of the message was never posted"
    )


def test_the_error_of_a_refused_operation_is_no_consequence_of_its_notice() -> None:
    said = "tag must be 0 or more, got -1."
    about = {"about": f"raised ArgumentError: {said}", "error": "ArgumentError"}
    mark = {"rank": 0, "op": "mark", "label": f"! invalid_argument: {said}"}
    ends = [{"rank": 0, "state": "failed", **about}]
    (finding,) = run_of({**TURNED_DOWN, "op": "send"}, mark, ends=ends).findings
    assert (finding.message, finding.consequences) == (f"rank 0: {said}", ())


def test_what_ended_a_thread_is_why_others_wait_and_by_itself_no_finding() -> None:
    mark = {"rank": 0, "op": "mark", "label": "! thread_failed: raised ValueError: no more batches"}
    assert run_of(mark).findings == ()
    waits = {"rank": 1, "op": "recv", "peer": 0, "times": (4, 4, -1), "status": IN_FLIGHT}
    (finding,) = run_of(mark, waits, ends=[{"rank": 0, "state": "exited"}]).findings
    assert finding.kind == "rank_failed"
    assert finding.message == "a thread of rank 0 raised ValueError: no more batches."
    assert [one.kind for one in finding.consequences] == ["peer_exited"]
    story = Story(3)  # the end of a thread of rank 2 may be the cause of the standstill
    story.op(0, "recv", (4, 4, -1), peer=1, tag=0, group="world")
    story.op(2, "mark", (1, -1, -1), label=mark["label"])
    running = [{"rank": rank, "state": "running"} for rank in (1, 2)]
    (finding,) = story.trace(complete=False, ends=running).explain().findings
    assert (finding.kind, finding.ranks) == ("rank_failed", (2,))
    assert [one.kind for one in finding.consequences] == ["stalled"]


@pytest.mark.parametrize(("status", "kind"), [(OK, "rank_failed"), (REFUSED, "stalled")])
def test_a_run_that_raised_is_never_said_to_be_right(status: int, kind: str) -> None:
    """A wait reached its limit: the rank's error is all that is known."""
    ends = [{"rank": 1, "state": "unknown", "about": "raised RuntimeError: Timed out"}]
    row = {**SENT, "rank": 1, "peer": 0, "op": "recv", "status": status}
    finding = run_of(row, ends=ends, complete=False).findings[0]
    assert finding.kind == kind
    assert "rank 1 raised RuntimeError: Timed out" in finding.message


def test_a_lost_host_is_named_and_not_the_rank_that_lost_its_peer() -> None:
    said = {"state": "unknown", "about": "raised RuntimeError: Connection closed by peer"}
    gone = {"state": "unknown", "about": "went silent: no word for 5 s", "how": "lost"}
    row = {**SENT, "rank": 1, "peer": 0, "op": "recv", "status": REFUSED}
    about: dict[str, Any] = {"complete": False, "ranks": [{"rank": 1, "host": "node1"}]}
    (finding,) = run_of(row, ends=[{"rank": 1, **said}, {"rank": 0, **gone}], **about).findings
    assert (finding.kind, finding.ranks) == ("lost", (0, 1))
    assert finding.message.startswith("rank 0 went silent: no word for 5 s.\n  rank 1 waits ")
    (finding,) = run_of(row, ends=[{"rank": 1, **said}], **about).findings
    assert "\n  rank 0 was not recorded" in finding.message
    story = Story(3)
    story.op(2, "recv", (4, 4, -1), peer=0, tag=0, group="world")
    ends = [{"rank": rank, **gone} for rank in (0, 1)]
    (finding,) = story.trace(ends=ends, complete=False).explain().findings
    assert (finding.kind, finding.ranks) == ("lost", (0, 1, 2))
    assert finding.message.startswith("ranks 0 and 1 went silent: no word for 5 s.\n")


@pytest.mark.parametrize(
    ("killed_ns", "ranks"),
    [(5, [(1, 3), (0,), (4, 5)]), (12, [(0,), (1, 3), (4, 5)]), (None, [(0,), (4, 5), (1, 3)])],
)
def test_failures_come_in_order_of_time_and_first_those_whose_time_is_known(
    killed_ns: int | None, ranks: list[tuple[int, ...]]
) -> None:
    """Rank 0 failed and rank 1 was killed; 2 and 3 wait for them, 4 and 5 for each other."""
    story = Story(6)
    for rank, peer in ((2, 0), (3, 1), (4, 5), (5, 4)):
        story.op(rank, "recv", (1, 1, -1), peer=peer, tag=0, group="world")
    ends = [
        {"rank": 0, "state": "failed", "at_ns": 9},
        {"rank": 1, "state": "killed", "at_ns": killed_ns},
    ]
    findings = story.trace(ends=ends, complete=False).explain().findings
    assert [one.ranks for one in findings] == ranks


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        # an error has its place
        (
            {"state": "failed", "about": "raised ValueError: no layer", "error": "ValueError"},
            "rank_failed",
            "rank 0 raised ValueError: no layer.\n",
        ),
        (
            {"state": "failed"},
            "rank_failed",
            "rank 0 has failed.\n  rank 0's last operation was send to 1",
        ),
        ({"state": "killed", "about": "was ended by signal 9"}, "peer_exited", "Hint: Find out"),
        (
            {"state": "exited", "about": "called sys.exit(0)", "error": "SystemExit"},
            "peer_exited",
            "Complete rank 0's part before it exits: ",
        ),
        ({"state": "running"}, "stalled", "\n  rank 0 was busy outside any span"),
    ],
)
def test_what_became_of_a_rank_that_another_waits_for(
    end: dict[str, Any], kind: str, words: str
) -> None:
    waits = {"rank": 1, "op": "recv", "peer": 0, "tag": 1, "times": (9, 9, -1), "status": IN_FLIGHT}
    diagnosis = run_of(SENT, waits, ends=[{"rank": 0, **end}], complete=False)
    assert diagnosis.kind == kind
    assert words in str(diagnosis)


# -- errors that the program caught


def test_what_was_caught_is_told_and_nonsense_is_not() -> None:
    episode = {"kind": "deadlock", "ranks": [1, 0, 7], "message": "They wait.", "hint": "Do not."}
    some = [episode, {}, 3, {**episode, "ranks": 5}, {**episode, "at_ns": float("inf")}]
    for caught, found in [(some, [("deadlock", (1, 0))]), ("deadlock", []), (None, [])]:
        told = named(run_of(MINE, caught=caught))
        assert [one for one in told if one[0] == "deadlock"] == found


@pytest.mark.parametrize(
    ("since", "retried"),
    [
        (["recv"], True),
        (["recv", "recv"], True),
        (["barrier", "recv", "barrier"], True),  # in each round
        (["recv", "barrier"], False),  # it has continued
        (["barrier"], False),
    ],
)
def test_what_is_caught_and_tried_again_to_the_end_is_why_the_run_did_not_end(
    since: list[str], retried: bool
) -> None:
    """At the end both ranks are between two attempts."""
    story = Story(2)
    for rank in (0, 1):
        for turn, op in enumerate(["recv", *since]):
            begin = 100 * turn
            about = {"peer": 1 - rank, "tag": 0, "status": REFUSED} if op == "recv" else {}
            story.op(rank, op, (begin, begin, begin + 50), group="world", **about)
    doing = {"state": "running", "about": "computing at train.py:7"}
    ends = [{"rank": rank, **doing} for rank in (0, 1)]
    episode = {"kind": "deadlock", "ranks": [0, 1], "message": "They wait.", "at_ns": 10_000_000}
    findings = story.trace(complete=False, ends=ends, caught=[episode] * 2).explain().findings
    assert ("tried again" in findings[0].message) is retried
    assert [one.kind for one in findings] == (
        ["deadlock"] if retried else ["stalled", "deadlock", "deadlock"]
    )


# -- runs that were ended from outside


@pytest.mark.parametrize("circle", [True, False])
def test_threads_that_go_on_do_not_hide_a_circle_of_the_others(circle: bool) -> None:
    """The other threads might have helped, so nothing is proved."""
    story = Story(2)
    for rank in (0, 1)[: 1 + circle]:
        story.op(rank, "recv", (0, 0, -1), peer=1 - rank, tag=0, group="world")
    for rank in (0, 1):
        for op in ("irecv", "isend"):
            story.op(rank, op, (50, 50, -1), thread=1, peer=1 - rank, tag=9, group="ring:0>1")
    doing = [{"rank": rank, "state": "running", "about": "asleep at train.py:7"} for rank in (0, 1)]
    finding = story.trace(complete=False, ends=doing, end_ns=10**9).explain().findings[0]
    assert finding.kind == "stalled"
    for words, text in (
        ("wait for each other.\n  rank 0 waits for ", finding.message),
        ("rank 1's last operation was isend to 0 (ring:0>1, tag 9)", finding.message),
        ("does not prove this", finding.hint),
    ):
        assert (words in text) is circle


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ("compute", "was still computing (for 900 ms, asleep at train.py:7)"),
        ("", "was asleep at train.py:7 (for 900 ms)"),
    ],
)
def test_a_span_says_more_of_a_busy_rank_than_its_line(span: str, said: str) -> None:
    story = Story(2)
    story.op(0, "recv", (100, 100, -1), peer=1, tag=0, group="world")
    story.op(1, "isend", (0, 0, 100), peer=0, tag=1, group="world")
    if span:
        story.op(1, "span", (100, -1, -1), label=span)
    doing = [{"rank": 1, "state": "running", "about": "asleep at train.py:7"}]
    (finding,) = story.trace(complete=False, ends=doing, end_ns=10**9).explain().findings
    assert f"\n  rank 1 {said}" in finding.message


@pytest.mark.parametrize(
    ("said", "waited_s"),
    [
        ({}, 0.0),
        ({"end_ns": 2_000_000_000}, 1.9),
        ({"given_up_ns": 600_000_000, "end_ns": 2_000_000_000}, 0.5),
    ],
)
def test_nobody_waits_any_more_once_it_is_decided_to_end_the_run(
    said: dict[str, int], waited_s: float
) -> None:
    """The time to end the ranks and to read their records does not count."""
    story = Story(3)
    for rank in (0, 1):
        story.op(rank, "recv", (100, 100, -1), peer=1 - rank, tag=0, group="world")
    if "given_up_ns" in said:  # later events do not explain the wait
        story.op(2, "irecv", (100, 700, -1), peer=0, tag=0, group="world")
        story.op(2, "barrier", (700, 700, -1), group="world")
    (finding,) = story.trace(complete=False, **said).explain().findings
    assert finding.consequences == ()
    assert [operation.waited_s for operation in finding.operations] == pytest.approx([waited_s] * 2)


# -- NCCL: operations that the GPU has not ended

GPU_HANGS: dict[str, tuple[list[tuple[int, str, int, int, int]], str, list[str]]] = {
    # rank, operation, peer, post and wait; the kind; and what the text contains
    "a rank that skipped its send waits in its next recv": (
        [(0, "recv", 1, 1, 2), (0, "send", 1, 3, 4), (1, "recv", 0, 1, 2)],
        "deadlock",
        ["ranks 0 and 1 wait for each other"],
    ),
    "a send behind a recv on both ranks": (
        [
            (rank, *row)
            for rank in (0, 1)
            for row in (("irecv", 1 - rank, 1, 5), ("isend", 1 - rank, 2, 6))
        ],
        "deadlock",
        ["rank 1 posted no send (group world), but rank 0 posted 1 recv"],
    ),
    "batches with a later collective behind them": (
        [
            (0, "irecv", 1, 1, 5),
            (0, "isend", 1, 2, 5),
            (0, "barrier", -1, 7, 8),
            (1, "barrier", -1, 1, 2),
        ],
        "collective_mismatch",
        ["in barrier (world)", "rank 0 waits in irecv from 1"],
    ),
    "a rank that is elsewhere": (
        [(0, "recv", 1, 1, 2), (0, "barrier", -1, 3, 4)],
        "stalled",
        [
            "rank 1 was asleep at train.py:7",
            "rank 1 has not posted its side of rank 0's recv from 1",
        ],
    ),
    "a rank that has returned": (
        [(0, "recv", 1, 1, 2)],
        "peer_exited",
        ["rank 1 has returned", "rank 1 posted no send (group world), but rank 0 posted 1 recv"],
    ),
}


@pytest.mark.parametrize("hang", GPU_HANGS)
def test_a_rank_that_has_not_posted_its_side_on_nccl_is_named(hang: str) -> None:
    rows, kind, said = GPU_HANGS[hang]
    story = Story(2)
    for number, (rank, op, peer, post_ns, wait_ns) in enumerate(rows):
        times = post_ns, wait_ns, -1
        tag = {"tag": number} if peer >= 0 else {}  # NCCL ignores tags
        story.op(rank, op, times, peer=peer, group="world", status=IN_FLIGHT, **tag)
    ends = [{"rank": rank, "state": "running", "about": "asleep at train.py:7"} for rank in (0, 1)]
    if kind == "peer_exited":  # the GPU of rank 0 still waits
        ends = RETURNED
    diagnosis = story.trace(backend="nccl", complete=False, ends=ends).explain()
    assert diagnosis.kind == kind
    assert 1 in diagnosis.findings[0].ranks
    assert "tag" not in str(diagnosis)
    assert all(words in str(diagnosis) for words in said), str(diagnosis)
    assert "Not proved: an operation posted behind" in diagnosis.notes[-1]


def test_on_nccl_what_both_sides_have_posted_hinders_nobody() -> None:
    story = Story(2)
    story.op(0, "recv", (1, 2, -1), peer=1, tag=1, group="world", status=IN_FLIGHT)
    story.op(1, "send", (1, 2, -1), peer=0, tag=2, group="world", status=IN_FLIGHT)
    returned = story.trace(backend="nccl", ends=RETURNED).explain()
    assert (returned.findings, returned.edges) == ((), ())
    ended = story.trace(backend="nccl", complete=False, ends=[]).explain()
    assert named(ended) == [("stalled", (0, 1))]
    assert "has not posted" not in str(ended)
    assert "Not proved" not in str(ended)


# -- the picture


def waiting(size: int, *pairs: tuple[int, int]) -> Any:
    story = Story(size)
    for rank, peer in pairs:
        story.op(rank, "recv", (1, 1, -1), peer=peer, tag=0, group="world")
    return story.trace(complete=False).explain()


def test_the_picture_marks_the_circle() -> None:
    diagnosis = waiting(3, (0, 1), (1, 0), (2, 0))
    _, given_axes = plt.subplots()
    ax = diagnosis.plot(ax=given_axes)
    assert ax is given_axes
    widths = {patch.get_gid(): patch.get_linewidth() for patch in ax.patches}
    assert widths["waits-0-1"] == widths["waits-1-0"] > widths["waits-2-0"]
    assert ax.get_title(loc="left") == "Deadlock: ranks 0 and 1"


def test_the_picture_of_many_ranks_shows_those_that_matter() -> None:
    ax = replace(waiting(100, (70, 90), (90, 70)), trace=None).plot()
    gids = [patch.get_gid() or "" for patch in ax.patches]
    ranks = {int(gid[5:]) for gid in gids if gid.startswith("rank-")}
    assert {70, 90} <= ranks
    assert len(ranks) == 12
    assert any("Not drawn: 88 ranks" in text.get_text() for text in ax.texts)
