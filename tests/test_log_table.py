"""The ranks with straggler time in the log, if one rank's collective was rejected."""

from __future__ import annotations

import numpy as np

from ringsim.comm.log_table import straggler_ns
from ringsim.traces.events import ERROR, NONE, OK, OP_CODES, Group, Tables, make_events


def test_a_collective_that_was_refused_is_no_record() -> None:
    post = [0, 4, 20, 60, 40]
    columns = {
        "rank": [0, 0, 1, 2, 3],
        "op": [OP_CODES["barrier"]] * 5,
        "group": [0] * 5,
        "post_ns": post,
        "wait_ns": [NONE, *post[1:]],
        "done_ns": [NONE] + [100] * 4,
        "status": [ERROR] + [OK] * 4,
    }
    events = make_events(columns, Tables((Group("world", (0, 1, 2, 3)),)))
    assert np.isnan(straggler_ns(events)[0])
    assert straggler_ns(events)[1:].tolist() == [56, 40, 0, 20]
