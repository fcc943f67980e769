"""A trace is shown by a summary, by pictures with a text in a notebook, and by tables."""

from __future__ import annotations

import base64
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from random_traces import traces
from trace_file import ANY_SOURCE, NONE, make_trace

from ringsim import Trace
from ringsim.errors import ArgumentError, RingError

MS = 1_000_000


def three_ranks(**metadata: object) -> Trace:
    """Rank 0 sends twice to 1 and once to 2, late; a last isend of rank 2 has no recv."""
    operations = [
        (0, "isend", 1, (3.0, 3.0, 3.4)),
        (0, "isend", 1, (3.1, 3.1, 3.6)),
        (0, "isend", 2, (3.2, 3.2, 3.7)),
        (1, "recv", 0, (1.0, 1.0, 3.4)),
        (1, "recv", 0, (3.5, 3.5, 3.6)),
        (2, "recv", 0, (2.5, 2.5, 3.7)),
        (2, "isend", 1, (4.0, -1, -1)),
    ]
    rows = []
    for line, (rank, op, peer, times_ms) in enumerate(operations, start=5):
        times = [NONE if time < 0 else round(time * MS) for time in times_ms]
        about = {"tag": 0, "group": "world", "size_bytes": 4096, "file": "ring.py", "line": line}
        status = "in_flight" if NONE in times else "ok"
        rows.append(
            {"rank": rank, "op": op, "peer": peer, "times": times, **about, "status": status}
        )
    return make_trace(rows, groups={"world": (0, 1, 2)}, **{"world_size": 3, **metadata})


def test_summary_and_description() -> None:
    about = {"source": "measured", "backend": "gloo", "date": "2026-11-20"}
    notes = [f"note {number}" for number in range(9)]
    trace = three_ranks(**about, notes=notes, not_recorded=["collectives issued from C++"])
    assert repr(trace) == str(trace) == trace.summary()
    assert trace.summary().splitlines() == [
        "Trace of 3 ranks (measured, gloo, 2026-11-20)",
        "  messages      3 messages, 12 KiB, 7 events in 3 ms",
        "  busiest edge  0 -> 1: 2 messages, 8 KiB",
        "  longest wait  rank 1 waited 2 ms in recv (ring.py:8) for rank 0 to send",
        "  unmatched     1 operation",
        "    rank 2: isend to 1 (world, tag 0, 4096 bytes) at ring.py:11 has no recv",
        *("  note: note 0", "  note: note 1", "  note: note 2", "    ... and 6 more"),
        "  not recorded: collectives issued from C++",
    ]
    assert trace.describe() == (
        "Trace of 3 ranks that exchanged 3 messages in 3 ms, most bytes from rank 0 to rank 1; "
        "the longest wait: rank 1 waited 2 ms in recv (ring.py:8) for rank 0 to send; 1 "
        "operation without a partner."
    )


def test_summary_of_nothing_of_a_late_receiver_and_of_edges_alike() -> None:
    nothing = make_trace([], world_size=4)
    assert nothing.summary().splitlines()[1:] == [
        "  messages      0 messages, 0 B, 0 events in 0 ns",
        "  unmatched     none",
    ]
    assert nothing.makespan_s == 0
    send, recv = {"rank": 0, "op": "send", "peer": 1}, {"rank": 1, "op": "recv", "peer": 0}
    late = make_trace([send | {"times": (0, 0, 900)}, recv | {"times": (700, 700, 900)}])
    assert "rank 0 waited 700 ns in send for rank 1 to receive" in late.summary()
    there, back = (send, {**recv, "rank": 0, "peer": 1}), ({**send, "rank": 1, "peer": 0}, recv)
    alike = make_trace([*there, *back])
    assert "busiest edge  0 -> 1 and 1 other: 1 message, 0 B each" in alike.summary()
    assert alike.describe() == "Trace of 2 ranks that exchanged 2 messages in 0 ns."


@given(traces)
def test_events_and_messages_one_by_one_say_what_the_tables_say(trace: Trace) -> None:
    whole = trace.to_pandas()
    table = whole.drop(columns=["run", "message_id"]).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    events = list(trace)
    said = [
        event._asdict()
        | {"shape": None if event.shape is None else "x".join(map(str, event.shape))}
        for event in events
    ]
    assert (said, len(trace)) == (rows, len(rows))
    ids, messages = whole.message_id, trace.to_pandas("messages")
    assert ids.notna().sum() == 2 * len(messages)
    for row, message in enumerate(trace.messages):
        send, recv = trace.messages.send[row], trace.messages.recv[row]
        assert set(np.flatnonzero((ids == row).fillna(False))) == {send, recv}
        assert (message.send, message.recv) == (events[send], events[recv])
        ranks = events[send].rank, events[recv].rank
        assert (message.src, message.dst) == (messages.src[row], messages.dst[row]) == ranks
    assert all(repr(one) for one in (*events, *trace.messages))


def test_events_and_messages_read_as_sentences() -> None:
    trace = three_ranks()
    assert repr(trace[3]) == (
        "rank 1: recv from 0 (world, tag 0, float32[1024], 4,096 bytes) "
        "at ring.py:8 from 1 ms to 3.4 ms"
    )
    assert repr(trace[-1]).endswith(" at ring.py:11 from 4 ms, in flight")
    assert repr(trace.messages[0]) == (
        "rank 0 -> 1: isend to 1 (world, tag 0, float32[1024], 4,096 bytes) at ring.py:5, posted "
        "at 3 ms, received at 3.4 ms"
    )
    span = {"rank": 0, "op": "span", "label": "forward", "stage": 1, "times": (0, NONE, 2000)}
    assert [*map(repr, make_trace([span, {"rank": 0, "op": "mark", "post_ns": 5}]))] == [
        "rank 0: span 'forward' (stage 1) from 0 ns to 2 µs",
        "rank 0: mark '' at 5 ns",
    ]
    with pytest.raises(IndexError):
        trace.messages[3]


def test_a_trace_is_a_value() -> None:
    trace = three_ranks(backend="gloo")
    assert trace.makespan_s == pytest.approx(3e-3)  # from the first post to the last moment
    # ranks without events count
    sizes = [Trace(trace.events, about).world_size for about in ({"world_size": 8}, {})]
    assert sizes == [8, 3]
    assert trace == Trace(trace.events, {"backend": "gloo", "world_size": 3}, results=[1, 2, 3])
    shorter = Trace(trace.events.select([0, 1]), trace.metadata)
    assert trace not in (three_ranks(backend="nccl"), shorter, "a trace")
    with pytest.raises(AttributeError):
        trace.events = None  # type: ignore[misc]


def test_a_notebook_gets_picture_text_and_alternative_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = three_ranks()
    data, metadata = trace._repr_mimebundle_()
    assert base64.b64decode(data["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    assert data["text/plain"] == trace.summary()
    assert metadata == {"image/png": {"alt": trace.describe()}}
    # IPython in a terminal draws nothing
    for active, drawn in ((["text/plain"], False), (["text/plain", "image/png"], True)):
        shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(active_types=active))
        ipython = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert ("image/png" in trace._repr_mimebundle_()[0]) is drawn


WITHOUT_LIBRARIES = """
import sys
sys.modules["matplotlib"] = None
import ringsim, ringsim.cli
assert not {"torch", "pandas", "pyarrow"} & set(sys.modules)
trace = ringsim.load(sys.argv[1])
assert trace.summary() and trace.describe() and len(trace.waits.blocked_ns) == 7
trace.save(sys.argv[1])
assert ringsim.load(sys.argv[1]) == trace
assert not {"torch", "pandas"} & set(sys.modules)
assert trace._repr_mimebundle_() == ({"text/plain": trace.summary()}, {})
"""


def test_reading_and_matching_and_the_command_line_import_nothing_heavy(
    tmp_path: Path,
) -> None:
    three_ranks().save(path := f"{tmp_path}/x.ringtrace")
    subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES, path], check=True)


@pytest.mark.parametrize("name", ["to_goal", "to_chakra", "to_otf2"])
def test_a_format_that_was_removed_says_what_to_use(name: str) -> None:
    with pytest.raises(RingError, match=f"Trace.{name} was removed in ringsim 0.3. Use Perfetto"):
        getattr(three_ranks(), name)("run")


EVENT_COLUMNS = """run rank thread seq kind op group peer tag size_bytes dtype shape stage
microbatch label file line post_ns wait_ns done_ns status message_id""".split()
MESSAGE_COLUMNS = """src dst tag group size_bytes dtype shape send_post_ns send_done_ns
recv_post_ns recv_done_ns late_sender_ns late_receiver_ns transfer_ns stage microbatch""".split()


def one_of_each() -> Trace:
    """A matched send and recv, a recv in flight from any source, a span."""
    on_pair = {"group": "ring:0>1", "tag": 7, "size_bytes": 32, "shape": (4, 2), "file": "ring.py"}
    rows = [
        {"rank": 0, "op": "span", "stage": 2, "label": "compute", "times": (0, NONE, 90)},
        {"rank": 0, "op": "isend", "peer": 1, "stage": 2, "microbatch": 5, **on_pair, "line": 12},
        {"rank": 1, "op": "irecv", "peer": 0, **on_pair, "line": 14, "times": (40, 50, 250)},
        {"rank": 1, "op": "recv", "peer": ANY_SOURCE, "group": "ring:0>1", "tag": 0},
    ]
    rows[1]["times"] = (100, 110, 200)
    scalar = {"size_bytes": 8, "dtype": "int64", "shape": ()}
    rows[3] |= {"times": (300, 300, NONE), "status": "in_flight", **scalar}
    return make_trace(rows, groups={"ring:0>1": (0, 1)}, run_id="a", world_size=2)


def test_the_table_of_events_says_what_happened() -> None:
    table = one_of_each().to_pandas()
    assert list(table) == list(make_trace([]).to_pandas()) == EVENT_COLUMNS
    rows = table.astype(object)
    span, send, irecv, recv = rows.where(rows.notna(), None).to_dict("records")
    none = dict.fromkeys(EVENT_COLUMNS)
    first = {"run": "a", "rank": 0, "thread": 0, "stage": 2, "status": "ok"}
    lasted = {"seq": 0, "post_ns": 0, "done_ns": 90}
    assert span == none | first | lasted | {"kind": "span", "op": "span", "label": "compute"}
    carried = {"group": "ring:0>1", "tag": 7, "size_bytes": 32, "dtype": "float32", "shape": "4x2"}
    message = carried | {"file": "ring.py", "message_id": 0}
    posted = {"seq": 1, "kind": "send", "op": "isend", "peer": 1, "microbatch": 5, "line": 12}
    times = {"post_ns": 100, "wait_ns": 110, "done_ns": 200}
    assert send == none | first | message | posted | times
    received = {"kind": "recv", "op": "irecv", "peer": 0, "line": 14, "post_ns": 40, "done_ns": 250}
    assert irecv.items() >= (message | received).items()
    unknown = dict.fromkeys(("peer", "done_ns", "message_id"))
    scalar = {"shape": "", "dtype": "int64", "status": "in_flight"}
    assert recv.items() >= (unknown | scalar).items()
    types = {"rank": "int32", "post_ns": "int64", "done_ns": "Int64", "peer": "Int32",
             "kind": "category", "message_id": "Int64"}  # fmt: skip
    assert {name: str(table[name].dtype) for name in types} == types
    assert (table.done_ns - table.post_ns).tolist()[-1] is pd.NA  # it has not ended
    barrier = {"op": "barrier", "size_bytes": 0, "dtype": "", "shape": (), "group": "pair"}
    table = make_trace([{"rank": 0, **barrier}, {"rank": 1, **barrier}]).to_pandas()
    assert table[["dtype", "shape"]].isna().all(axis=None)
    assert table.size_bytes.tolist() == [0, 0]


def test_the_table_of_messages_says_who_was_late() -> None:
    table = one_of_each().to_pandas("messages")
    assert list(table) == list(make_trace([]).to_pandas("messages")) == MESSAGE_COLUMNS
    expected = [0, 1, 7, "ring:0>1", 32, "float32", "4x2", 100, 200, 40, 250, 50, 0, 150, 2, 5]
    assert table.iloc[0].tolist() == expected
    send, recv = {"rank": 0, "op": "send", "peer": 1}, {"rank": 1, "op": "recv", "peer": 0}
    table = make_trace([send, recv | {"post_ns": 5}]).to_pandas("messages")  # in flight
    assert table[["transfer_ns", "send_done_ns", "recv_done_ns"]].isna().all(axis=None)


def test_a_table_belongs_to_its_owner() -> None:
    trace = one_of_each()
    table = trace.to_pandas()
    table.loc[0, "post_ns"] = 77
    table.loc[:, "tag"] = 3
    assert trace.events.post_ns[0] == 0
    assert trace.to_pandas().tag.tolist() == [pd.NA, 7, 7, 0]
    for which in ("message", "", None, 3):
        with pytest.raises(ArgumentError, match='which must be "events" or "messages", got'):
            trace.to_pandas(which)  # type: ignore[arg-type]
