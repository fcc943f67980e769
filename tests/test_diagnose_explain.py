"""``explain`` of traces of any content, of runs that finished, and of files.

Also the picture of what it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_traces import WORLD_SIZE, json_values, traces
from synthetic import METADATA, Story

from ringsim import Trace
from ringsim.diagnose.mismatches import MOST_FINDINGS, find_message_mismatches
from ringsim.plot.waitfor import MOST_RANKS, waitfor_png
from ringsim.traces.events import OP_CODES, Group, Payload, Tables, make_events, word_notice
from ringsim.traces.findings import KINDS, Diagnosis, Edge, Finding, Operation

ends = st.one_of(
    json_values,
    st.lists(
        st.fixed_dictionaries(
            {
                "rank": st.one_of(st.integers(-1, WORLD_SIZE), json_values),
                "state": st.sampled_from(
                    ["exited", "failed", "killed", "running", "blocked", "stopped", "asleep"]
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
    """Whatever a trace holds, there is an answer.

    Findings of known kinds, ranks of the run, and sentences.
    """
    metadata = {
        **trace.metadata,
        "ends": ends,
        "end_ns": end_ns,
        "given_up_ns": given_up_ns,
        "complete": complete,
    }
    diagnosis = Trace(trace.events, metadata).explain()
    for finding in diagnosis.findings:
        for one in (finding, *finding.consequences):
            assert one.kind in KINDS
            assert set(one.ranks) <= set(range(-1, WORLD_SIZE))
            assert one.message
    assert str(diagnosis)


@pytest.mark.filterwarnings("ignore:Glyph")  # no font has them all
@settings(phases=(Phase.generate,))  # shrinking pictures takes minutes
@given(trace=traces, ends=ends)
def test_draws_anything(trace: Trace, ends: Any) -> None:
    diagnosis = Trace(trace.events, {**METADATA, "world_size": WORLD_SIZE, "ends": ends}).explain()
    assert waitfor_png(replace(diagnosis, trace=None))[1:4] == b"PNG"


def parted(story: Story, *lines: list[int]) -> str:
    """What is added to the finding on collectives that each rank calls at these lines.

    One ms after the other; the last is a barrier.
    """
    for rank, mine in enumerate(lines):
        for place, line in enumerate(mine):
            done = -1 if line == mine[-1] else place + 0.5
            story.op(
                rank,
                "barrier" if line == mine[-1] else "all_reduce",
                (place, place, done),
                group="world",
                line=line,
                file=0,
            )
    (finding,) = story.trace().explain().findings
    assert finding.kind == "collective_mismatch"
    return finding.hint.partition("The ranks took different paths before: ")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("lines", "collective", "places"),
    [
        ([[1, 2, 3, 2, 3, 9], [1, 2, 3, 3, 9]], 4, "rank 0 at ring.py:2, rank 1 at ring.py:3"),
        ([[8, 10, 12, 14], [10, 12, 14]], 1, "rank 0 at ring.py:8, rank 1 at ring.py:10"),
        (
            [[1, 2, 5, 7, 9], [1, 2, 5, 7, 9], [1, 5, 7, 9]],
            2,
            "ranks 0 and 1 at ring.py:2, rank 2 at ring.py:5",
        ),
        (
            [[1, 4, 6, 1, 4, 6, 7, 9], [1, 5, 6, 1, 5, 7, 9]],
            6,
            "rank 0 at ring.py:6, rank 1 at ring.py:7",
        ),
    ],
    ids=["one left out of a loop", "one too many", "three ranks", "after a line of its role"],
)
def test_the_collective_at_which_the_ranks_parted_is_named(
    lines: list[list[int]], collective: int, places: str
) -> None:
    said = parted(Story(len(lines)), *lines)
    assert said == (
        f"the first line that differs is that of collective {collective} of group world ({places})."
    )


@pytest.mark.parametrize(
    "lines",
    [
        [[1, 4, 6, 1, 4, 6, 8], [1, 5, 6, 1, 5, 6, 7, 9]],
        [[1, 2, 8], [1, 2, 3, 9]],
        [[4, 4, 8], [5, 5, 5, 9]],
    ],
    ids=["lines of their roles", "the finding names the lines", "all lines by role"],
)
def test_lines_that_differ_by_role_are_no_parting(lines: list[list[int]]) -> None:
    assert parted(Story(2), *lines) == ""


FLOAT8, INT8, FLOAT4, SHAPED, TURNED = (
    Payload("float32", (8,), 32),
    Payload("int32", (8,), 32),
    Payload("float32", (4,), 16),
    Payload("float32", (2, 4), 32),
    Payload("float32", (4, 2), 32),
)
SUM, MAX = Payload("float32", (8,), 32, "SUM"), Payload("float32", (8,), 32, "MAX")


def messages(*pairs: tuple[Payload, Payload]) -> Trace:
    """Rank 0 sends, rank 1 receives, one message for each pair of payloads.

    All of it went through.
    """
    payloads = tuple(dict.fromkeys(payload for pair in pairs for payload in pair))
    number = len(pairs)
    columns = {
        "rank": [0] * number + [1] * number,
        "op": [OP_CODES["send"]] * number + [OP_CODES["recv"]] * number,
        "peer": [1] * number + [0] * number,
        "tag": list(range(number)) * 2,
        "group": [0] * 2 * number,
        "payload": [payloads.index(pair[side]) for side in (0, 1) for pair in pairs],
        "line": list(range(2 * number)),
        "post_ns": [0] * 2 * number,
        "wait_ns": [0] * 2 * number,
        "done_ns": [1] * 2 * number,
    }
    return Trace(
        make_events(columns, Tables(groups=(Group("world", (0, 1)),), payloads=payloads)),
        {"world_size": 2},
    )


def test_sides_that_disagree() -> None:
    diagnosis = messages(
        (FLOAT8, SHAPED), (TURNED, SHAPED), (FLOAT8, INT8), (FLOAT8, FLOAT4)
    ).explain()
    assert [finding.kind for finding in diagnosis.findings] == ["message_mismatch"] * 3
    assert str(diagnosis).startswith("message mismatch: rank 0 sends ")
    assert [finding.message.rpartition("the ")[2] for finding in diagnosis.findings] == [
        "size differs.",
        "dtype differs.",
        "shape differs.",
    ]
    assert all(finding.ranks == (0, 1) for finding in diagnosis.findings)


def test_refused_operation_takes_no_place() -> None:
    """The first send of rank 0 was refused when posted, so rank 1 receives its second."""
    trace = messages((FLOAT4, FLOAT8), (FLOAT8, FLOAT8))
    events = trace.events
    columns = {
        name: getattr(events, name).copy()
        for name in ("rank", "op", "peer", "group", "payload", "post_ns", "wait_ns", "done_ns")
    }
    columns |= {"tag": [0, 0, 0, 0], "status": [3, 2, 2, 1]}
    columns["wait_ns"][0] = columns["wait_ns"][3] = columns["done_ns"][3] = -1
    assert Trace(make_events(columns, events.tables), {"world_size": 2}).explain().findings == ()


def test_the_first_of_many_that_disagree_are_named() -> None:
    assert (
        len(find_message_mismatches(messages(*[(FLOAT8, FLOAT4)] * (MOST_FINDINGS + 2))))
        == MOST_FINDINGS
    )
    calls = [
        {"rank": rank, "op": op}
        for rank, op in ((0, "barrier"), (0, "barrier"), (1, "all_reduce"), (1, "all_reduce"))
    ]
    (finding,) = collectives(*calls).findings
    assert "as collective 1 of group world" in finding.message


def test_messages_of_a_group_that_was_used_before_are_not_compared() -> None:
    trace = messages((FLOAT8, FLOAT4))
    assert (
        Trace(trace.events, trace.metadata | {"used_before": ["ring:0>1"]}).explain().kind
        == "message_mismatch"
    )
    assert Trace(trace.events, trace.metadata | {"used_before": ["world"]}).explain().findings == ()


@pytest.mark.parametrize("backend", ["nccl", "virtual clock, grouped"])
def test_what_ignores_tags_is_compared_in_the_order_of_posting(backend: str) -> None:
    """0.1.0 compared what simulated NCCL sent by its tags.

    It found two mismatches that were none.
    """
    trace = messages((FLOAT4, FLOAT4), (FLOAT8, FLOAT8))
    crossed = replace(trace.events, tag=np.array([1, 2, 2, 1], dtype=np.int32))
    assert Trace(crossed, {"world_size": 2, "backend": backend}).explain().findings == ()
    assert len(Trace(crossed, {"world_size": 2, "backend": "gloo"}).explain().findings) == 2


UNLIKE_PARTS = (
    Payload("float32", (8,), 32, splits=((8, 24), (16, 8))),
    Payload("float32", (8,), 32, splits=((8, 16), (24, 16))),
    Payload("int32", (8,), 32, splits=((8,),)),  # nothing that splits can be
)


def collectives(
    *calls: dict[str, Any],
    payloads: tuple[Payload, ...] = (SUM, MAX, FLOAT4, TURNED, *UNLIKE_PARTS, SHAPED),
) -> Diagnosis:
    """Each call is one event; all of them went through."""
    rows = [
        {"group": 0, "payload": 0, "peer": -1, "post_ns": 0, "wait_ns": 0, "done_ns": 1, **call}
        for call in calls
    ]
    for row in rows:
        row["op"] = OP_CODES[row["op"]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    tables = Tables(groups=(Group("world", (0, 1)),), payloads=payloads)
    return Trace(make_events(columns, tables), {"world_size": 2}).explain()


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"op": "all_reduce"}, {"op": "broadcast", "peer": 0}, "kind"),
        ({"op": "broadcast", "peer": 0}, {"op": "broadcast", "peer": 1}, "root"),
        ({"op": "all_reduce"}, {"op": "all_reduce", "payload": 2}, "size"),
        ({"op": "all_reduce"}, {"op": "all_reduce", "payload": 1}, "reduction"),
        # one of them was issued by C++: its reduction is not known
        ({"op": "all_reduce"}, {"op": "all_reduce", "payload": 3}, ""),
        (
            {"op": "broadcast", "peer": 0, "payload": 3},
            {"op": "broadcast", "peer": 0, "payload": 3},
            "",
        ),
        ({"op": "all_to_all", "payload": 4}, {"op": "all_to_all", "payload": 5}, ""),
        (
            {"op": "all_to_all", "payload": 4},
            {"op": "all_to_all", "payload": 4},
            "rank 0 gives rank 1 24 bytes, which takes 16.",
        ),
        ({"op": "all_to_all", "payload": 4}, {"op": "all_to_all", "payload": 6}, "dtype"),
        (
            {"op": "all_to_all", "payload": 5},
            {"op": "all_to_all", "payload": 5},
            "rank 0 gives rank 1 16 bytes, which takes 24.",
        ),
        ({"op": "all_gather"}, {"op": "all_gather_into_tensor"}, ""),
        # the same elements
        ({"op": "all_gather", "payload": 3}, {"op": "all_gather_into_tensor", "payload": 7}, ""),
        ({"op": "all_gather", "payload": 3}, {"op": "all_gather", "payload": 7}, "shape"),
    ],
)
def test_collectives_that_disagree(
    first: dict[str, Any], second: dict[str, Any], what: str
) -> None:
    diagnosis = collectives({"rank": 0, **first}, {"rank": 1, **second})
    said = what if what.startswith("rank ") else f"the {what} differs."
    assert [finding.message.rpartition(": ")[2] for finding in diagnosis.findings] == (
        [said] if what else []
    )
    assert [finding.kind for finding in diagnosis.findings] == ["collective_mismatch"] * bool(what)


def test_groups_that_were_made_in_another_order_and_yet_came_about() -> None:
    made = (Payload("ranks", (0, 1), 0), Payload("ranks", (1, 2), 0))
    calls = [
        {"rank": rank, "op": "new_group", "payload": (turn + rank) % 2}
        for rank in (0, 1)
        for turn in range(2)
    ]
    (finding,) = collectives(*calls, payloads=made).findings
    assert (finding.kind, finding.ranks) == ("group_order_mismatch", (0, 1))
    assert "ranks[0,1]" in finding.message
    assert "ranks[1,2]" in finding.message


TIMES = dict.fromkeys(("post_ns", "wait_ns", "done_ns"), -1)


def run_of(*rows: dict[str, Any], labels: tuple[str, ...] = (), **metadata: Any) -> Diagnosis:
    rows = tuple(
        {
            "op": "isend",
            "peer": -1,
            "tag": 0,
            "label": -1,
            "thread": 0,
            "line": 7,
            "status": 2,
            "group": 0,
            **TIMES,
            **row,
        }
        for row in rows
    )
    columns = {
        name: [OP_CODES[row[name]] if name == "op" else row[name] for row in rows]
        for name in rows[0]
    }
    tables = Tables(labels=labels, groups=(Group("world", (0, 1)),))
    ends = [
        {"rank": rank, "state": "exited", "about": "has returned from its worker"}
        for rank in (0, 1)
    ]
    return Trace(
        make_events(columns, tables), {"world_size": 2, "complete": True, "ends": ends, **metadata}
    ).explain()


def test_handles_that_nobody_waited_for() -> None:
    lost = {"rank": 0, "peer": 1, "status": 1}
    (finding,) = run_of(lost, lost).findings
    assert (finding.kind, finding.ranks) == ("leaked_request", (0,))
    assert finding.message == (
        "rank 0 never waited for its isend to 1 (world, tag 0), whose "
        "other side never came (2 times)."
    )
    assert run_of(lost, ends=[]).findings == ()  # of a rank that has not returned it is not known


def test_notice_comes_first_and_what_follows_is_folded() -> None:
    labels = (word_notice("invalid_argument", "tag must be 0 or more, got -1."),)
    rows = (
        {"rank": 0, "op": "send", "peer": 1, "status": 3},
        {"rank": 0, "op": "mark", "label": 0},
    )
    ends = [
        {
            "rank": 0,
            "state": "failed",
            "about": "raised ArgumentError: tag must be 0 or more, got -1.",
            "error": "ArgumentError",
        }
    ]
    (finding,) = run_of(*rows, labels=labels, ends=ends).findings
    assert (finding.kind, finding.message) == (
        "invalid_argument",
        "rank 0: tag must be 0 or more, got -1.",
    )
    assert [one.op for one in finding.operations] == ["send"]
    assert finding.consequences == ()


MINE = {"rank": 0, "peer": 1}
SENT = {**MINE, "op": "send", "post_ns": 4, "wait_ns": 4, "done_ns": 8}
MARK = {"rank": 0, "op": "mark", "label": 0}
BARRIERS = [{"rank": rank, "op": "barrier"} for rank in (0, 1)]
REFUSED = [
    {"rank": 1, "op": "broadcast", "peer": 0, "status": 3},
    {"rank": 1, "op": "mark", "label": 0},
]
UNLIKE = [BARRIERS[0], {"rank": 0, "op": "all_reduce", "status": 1}, BARRIERS[1], *REFUSED]
NOBODY_CAME = [
    {
        "rank": 1,
        "state": "failed",
        "about": "raised RendezvousFailed: all ranks must come, got 1 of 2.",
        "error": "RendezvousFailed",
    }
]


@pytest.mark.parametrize(
    ("rows", "notice", "ends", "found"),
    [
        (
            [{"rank": 0, "op": "all_reduce", "status": 1}],
            "",
            None,
            [("missing_participant", (1, 0)), ("leaked_request", (0,))],
        ),
        ([SENT, {**SENT, "thread": 1, "post_ns": 7}], "", None, [("race", (0,))]),
        ([SENT, {**SENT, "thread": 1, "post_ns": 8}], "", None, []),  # in turn
        ([SENT, {**SENT, "thread": 1, "post_ns": 7, "tag": 1}], "", None, []),
        # posted in turn
        (
            [{**SENT, "op": "isend", "wait_ns": 6}, {**SENT, "thread": 1, "post_ns": 7}],
            "",
            None,
            [],
        ),
        (
            [
                SENT,
                {**SENT, "rank": 1, "peer": 0, "op": "recv", "done_ns": 6},
                {**SENT, "thread": 1, "post_ns": 7},
            ],
            "",
            None,
            [],
        ),  # by an answer
        ([MARK], "", NOBODY_CAME, [("rendezvous_failed", (1,))]),
        # What stands on one line with the post of a message that went its way is not about the
        # peer.
        ([{**MINE, "status": 1}, MARK], "buffer_hazard", [], [("buffer_hazard", (0,))]),
        ([{**MINE, "status": 3}, MARK], "buffer_hazard", [], [("buffer_hazard", (0,))]),
        # caught, and the program came to its end
        ([{**MINE, "status": 3}, MARK], "invalid_argument", None, []),
        (
            [{**MINE, "status": 3}, MARK],
            "invalid_argument",
            NOBODY_CAME,
            [("invalid_argument", (0, 1))],
        ),
        ([{**MINE, "status": 1}, MARK], "invalid_argument", [], [("invalid_argument", (0,))]),
        ([{**MINE, "status": 3}, MARK], "invalid_argument", [], [("invalid_argument", (0, 1))]),
        (UNLIKE, "collective_mismatch", [], [("collective_mismatch", (0, 1))]),
    ],
)
def test_what_is_found_in_rows(
    rows: list[dict[str, Any]], notice: str, ends: Any, found: list[Any]
) -> None:
    said = {} if ends is None else {"ends": ends, "complete": False}
    labels = (word_notice(notice, "the buffer must not be changed.") if notice else "",)
    findings = run_of(*rows, labels=labels, **said).findings
    assert [(one.kind, one.ranks) for one in findings][: len(found) or None] == found
    if notice and found:
        assert findings[0].message.endswith(": the buffer must not be changed.")
        wrong = [row.get("op", "isend") for row in rows if row.get("status") == 3]
        assert [one.op for one in findings[0].operations] == wrong + ["all_reduce"] * (
            rows is UNLIKE
        )


@pytest.mark.parametrize(("line", "ranks", "named"), [(7, (0, 1), ["isend"]), (8, (0,), [])])
def test_a_notice_is_about_what_was_refused_on_its_own_line(
    line: int, ranks: tuple[int, ...], named: list[str]
) -> None:
    labels = (word_notice("invalid_argument", "tag must be 0 or more, got -1."),)
    rows = ({**MINE, "status": 3}, {**MARK, "line": line})
    finding = run_of(*rows, labels=labels, ends=[], complete=False).findings[0]
    assert (finding.kind, finding.ranks) == ("invalid_argument", ranks)
    assert [one.op for one in finding.operations] == named


def test_what_ended_a_thread_is_why_others_wait_and_by_itself_no_finding() -> None:
    labels = (word_notice("thread_failed", "raised ValueError: no more batches"),)
    assert run_of(MARK, labels=labels).findings == ()
    waits = {**SENT, "rank": 1, "op": "recv", "peer": 0, "status": 1, "done_ns": -1}
    (finding,) = run_of(MARK, waits, labels=labels, ends=[{"rank": 0, "state": "exited"}]).findings
    assert (finding.kind, finding.message) == (
        "rank_failed",
        "a thread of rank 0 raised ValueError: no more batches.",
    )
    assert [one.kind for one in finding.consequences] == ["peer_exited"]


def test_a_run_that_raised_is_never_said_to_be_right() -> None:
    """A wait reached its limit, and its other side came at last.

    What the rank raised is all that there is to say.
    """
    ends = [{"rank": 1, "state": "unknown", "about": "raised RuntimeError: Timed out"}]
    row = {**SENT, "rank": 1, "peer": 0, "op": "recv"}
    found = [
        run_of({**row, "status": status}, ends=ends, complete=False).findings[0]
        for status in (2, 3)
    ]
    assert [one.kind for one in found] == ["rank_failed", "stalled"]
    assert all("rank 1 raised RuntimeError: Timed out." in one.message for one in found)


def test_a_lost_host_is_named_and_not_the_rank_that_lost_its_peer() -> None:
    """And what a rank without a record did is not known."""
    raised = {
        "rank": 1,
        "state": "unknown",
        "about": "raised RuntimeError: Connection closed by peer",
    }
    gone = {
        "rank": 0,
        "state": "unknown",
        "about": "is lost: nothing has come from host node0 for 5 s",
    }
    row = {**SENT, "rank": 1, "peer": 0, "op": "recv", "status": 3}
    recorded = [{"rank": 1, "host": "node1"}]
    (finding,) = run_of(row, ends=[raised, gone], complete=False, ranks=recorded).findings
    assert (finding.kind, finding.ranks) == ("lost", (0, 1))
    assert finding.message.startswith(
        "rank 0 is lost: nothing has come from host node0 for 5 s; rank 1 waited: rank 1 waits"
    )
    (finding,) = run_of(row, ends=[raised], complete=False, ranks=recorded).findings
    assert "Meanwhile rank 0 is not recorded." in finding.message


def test_what_was_caught_is_told_and_nonsense_is_not() -> None:
    episode = {"kind": "deadlock", "ranks": [1, 0, 7], "message": "They wait.", "hint": "Do not."}
    some = [episode, {}, 3, {**episode, "ranks": 5}, {**episode, "at_ns": float("inf")}]
    for caught, found in [(some, [("deadlock", (1, 0))]), ("deadlock", []), (None, [])]:
        told = run_of({**MINE, "status": 2}, caught=caught).findings
        assert [(one.kind, one.ranks) for one in told if one.kind == "deadlock"] == found


@pytest.mark.parametrize(
    ("since", "retried"),
    [
        (["recv"], True),
        (["recv", "recv"], True),
        (["barrier", "recv", "barrier"], True),  # in each round
        (["recv", "barrier"], False),  # it has gone on
        (["barrier"], False),
    ],
)
def test_what_is_caught_and_tried_again_to_the_end_is_why_the_run_did_not_end(
    since: list[str], retried: bool
) -> None:
    """It was called stalled, and not stuck for good.

    At the end both ranks are between two attempts.
    """
    story = Story(2)
    for rank in (0, 1):
        for turn, op in enumerate(["recv", *since]):
            begin = 100 * turn
            about = {"peer": 1 - rank, "tag": 0, "status": 3} if op == "recv" else {}
            story.op(rank, op, (begin, begin, begin + 50), group="world", **about)
    doing = [
        {"rank": rank, "state": "running", "about": "computing at train.py:7"} for rank in (0, 1)
    ]
    caught = [
        {
            "kind": "deadlock",
            "ranks": [0, 1],
            "message": "They wait.",
            "hint": "",
            "at_ns": 10_000_000,
        }
    ]
    findings = story.trace(complete=False, ends=doing, caught=caught * 2).explain().findings
    assert ("tried the same again" in findings[0].message) is retried
    assert [one.kind for one in findings] == (
        ["deadlock"] if retried else ["stalled", "deadlock", "deadlock"]
    )


@pytest.mark.parametrize("beats", [(50, 50, 60), (50, 50, -1)], ids=["between two", "on their way"])
@pytest.mark.parametrize("rank_1", ["waits", "computes"])
def test_threads_that_go_on_do_not_hide_a_circle_of_the_others(
    rank_1: str, beats: tuple[int, int, int]
) -> None:
    """They might have helped, so nothing is proved.

    No verdict came, and at the end there was no word of the circle.
    """
    story = Story(2)
    for rank in (0, 1) if rank_1 == "waits" else (0,):
        story.op(rank, "recv", (0, 0, -1), peer=1 - rank, tag=0, group="world")
    for rank in (0, 1):
        for op in ("irecv", "isend"):
            story.op(rank, op, beats, thread=1, peer=1 - rank, tag=9, group="ring:0>1")
    doing = [{"rank": rank, "state": "running", "about": "asleep at train.py:7"} for rank in (0, 1)]
    finding = story.trace(complete=False, ends=doing, end_ns=10**9).explain().findings[0]
    circle = rank_1 == "waits"
    assert (finding.kind, "wait for each other: rank 0 waits for " in finding.message) == (
        "stalled",
        circle,
    )
    assert (
        "The last that rank 1 posted was isend to 0 (ring:0>1, tag 9)" in finding.message
    ) is circle
    assert ("Not proved" in finding.hint) is circle


def test_groups_made_in_another_order() -> None:
    """Group 1 holds ranks 0 and 1 for rank 0, ranks 1 and 2 for rank 1."""
    columns = {
        "rank": [0, 1], "op": [OP_CODES["recv"]] * 2, "peer": [1, 2], "tag": [0, 0],
        "group": [0, 1], "wait_ns": [1, 1],
        "post_ns": [1, 1], "status": [1, 1],
    }  # fmt: skip
    tables = Tables(groups=(Group("1", (0, 1)), Group("1", (1, 2))))
    diagnosis = Trace(make_events(columns, tables), {"world_size": 3, "complete": False}).explain()
    assert (diagnosis.kind, diagnosis.findings[0].ranks) == ("group_order_mismatch", (0, 1))


HOSTILE = "<script>alert(1)</script>$x_{$"


def hostile() -> Diagnosis:
    operation = Operation(0, "recv", peer=1, tag=0, group=HOSTILE, file=HOSTILE, line=1)
    return Diagnosis(
        (Finding("deadlock", (0, 1), (operation,), HOSTILE, HOSTILE),),
        2,
        (Edge(0, 1, operation, in_cycle=True),),
    )


def test_picture_marks_the_cycle() -> None:
    edges = (Edge(0, 1, None, in_cycle=True), Edge(1, 0, None, in_cycle=True), Edge(2, 0, None))
    finding = Finding("deadlock", (0, 1), (), "ranks 0 and 1 wait for each other.")
    ax = Diagnosis((finding,), 3, edges, ("blocked",) * 3).plot()
    widths = {
        patch.get_gid(): patch.get_linewidth()
        for patch in ax.patches
        if (patch.get_gid() or "").startswith("waits")
    }
    assert widths["waits-0-1"] == widths["waits-1-0"] > widths["waits-2-0"]
    assert ax.get_title(loc="left") == "Deadlock: ranks 0 and 1"
    _, given_axes = plt.subplots()
    assert hostile().plot(ax=given_axes) is given_axes


def test_picture_of_many_ranks_shows_those_that_matter() -> None:
    edges = (Edge(70, 90, None, in_cycle=True), Edge(90, 70, None, in_cycle=True))
    ax = Diagnosis((Finding("deadlock", (70, 90), (), "both wait."),), 100, edges).plot()
    ranks = {
        int(patch.get_gid()[5:])
        for patch in ax.patches
        if (patch.get_gid() or "").startswith("rank-")
    }
    assert {70, 90} <= ranks
    assert len(ranks) == MOST_RANKS
    assert any("Not drawn: 88 ranks" in text.get_text() for text in ax.texts)


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
    """The time to end the ranks and to read what they left counted as time that they waited."""
    story = Story(2)
    for rank in (0, 1):
        story.op(rank, "recv", (100, 100, -1), peer=1 - rank, tag=0, group="world")
    (finding,) = story.trace(complete=False, **said).explain().findings
    assert [operation.waited_s for operation in finding.operations] == pytest.approx([waited_s] * 2)
