"""Junk arguments: a function either works, or reports the invalid argument and its rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import compute_and_meet

import ringsim
from ringsim.errors import RingError
from ringsim.pipeline import Costs, make_schedule, rehearse
from ringsim.topologies import FullBisection, GraphLinks, Hosts, OneMachine, RingLinks

LINK = ringsim.Link(1e-5, 1e-9)
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 3, 2**70, 10**20, 10**400, 0.0, 0.5, 1.5, -1.0, 1e10, 1e30,
    1e300, float("nan"), float("inf"),
    "", "x", "measured", "1f1b", "zb_h1", b"x", [], [1], [1, 2], ["x"], (), (0, 1), (1.0,), {},
    {"a": LINK}, {(0, 1): 3}, {(7, 9): LINK},
    {(0, 1): LINK, (1, 0): LINK}, {1}, object, object(), len, Fraction(1, 3), Decimal(1), 1j,
    np.zeros(3), np.array([]), np.int64(2),
    np.float32(0.5), np.True_, torch.zeros(2), torch.tensor(1), LINK, [LINK], ringsim.Link, Costs(),
    [Costs()],
    [Costs(), 3], Costs(forward="x"), Costs(forward=[1, 2, 3, 400]), Costs(1e10, 1e10, 1e10),
    RingLinks,
    RingLinks(LINK), ringsim.Slow(0, 2), [ringsim.Slow(5, 2)],
    [ringsim.Jitter(0.5, 1)], make_schedule("gpipe", 2, 2), make_schedule("gpipe", 3, 2), range(2),
    ringsim.FlopCosts(1e9),
]  # fmt: skip


REHEARSED = {
    "schedule": make_schedule("gpipe", 2, 2),
    "costs": Costs(1.0, 1.0, 1.0),
    "size_bytes": 8,
}


def rehearsed(**arguments: Any) -> Any:
    return ringsim.simulate(rehearse, world_size=2, link=LINK, kwargs={**REHEARSED, **arguments})


RUN = ringsim.simulate_schedule("1f1b", num_ranks=2, num_microbatches=2)
TRACE = RUN.trace()
STEP = "costs num_ranks num_microbatches num_chunks link size_bytes semantics ahead"
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {  # and the arguments to try
    "simulate": (
        partial(ringsim.simulate, worker=compute_and_meet, world_size=2, link=LINK),
        "worker world_size args kwargs link semantics compute topology seed inject record",
    ),
    "rehearse": (rehearsed, "schedule costs size_bytes ahead"),
    "simulate_schedule": (
        partial(ringsim.simulate_schedule, "1f1b", num_ranks=2, num_microbatches=2, link=LINK),
        STEP,
    ),
    "schedule": (partial(ringsim.simulate_schedule, num_ranks=2, num_microbatches=2), "schedule"),
    "simulate_schedule, written out": (
        partial(ringsim.simulate_schedule, "zb_h1", num_ranks=20, num_microbatches=20),
        STEP,
    ),
    "sensitivity": (RUN.sensitivity, "by most"),
    "trace of a schedule": (RUN.trace, "ranks between"),
    "calibrate": (lambda trace: ringsim.calibrate(trace), "trace"),
    "filter": (TRACE.filter, "ranks between_s ops groups steps"),
    "compare": (partial(ringsim.compare, real=TRACE, virtual=TRACE), "real virtual"),
    "scale": (
        partial(ringsim.scale, trace=TRACE, world_size=4),
        "trace world_size num_microbatches",
    ),
    "make_schedule": (
        partial(make_schedule, name="looped_bfs", num_ranks=2, num_microbatches=2),
        "name num_ranks num_microbatches num_chunks",
    ),
    "Link": (
        partial(ringsim.Link, alpha_s=0.0, beta_s_per_byte=0.0),
        "alpha_s beta_s_per_byte alpha_error_s beta_error_s_per_byte",
    ),
    "Slow": (partial(ringsim.Slow, rank=0, factor=2), "rank factor"),
    "Degrade": (partial(ringsim.Degrade, src=0, dst=1, factor=2), "src dst factor"),
    "Fail": (partial(ringsim.Fail, rank=0, at_op=0), "rank at_op"),
    "Jitter": (partial(ringsim.Jitter, fraction=0.5), "fraction seed"),
    "FlopCosts": (ringsim.FlopCosts, "flops_per_s"),
    "RingLinks": (RingLinks, "link"),
    "FullBisection": (FullBisection, "link"),
    "Hosts": (
        partial(Hosts, ranks_per_host=2, inner=LINK, outer=LINK),
        "ranks_per_host inner outer",
    ),
    "OneMachine": (partial(OneMachine, link=LINK, cores=2), "link cores"),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "rehearse"])
def test_one_argument_that_is_junk(name: str) -> None:
    """Passes every value for every argument; many once ended in a TypeError from some line."""
    function, names = FUNCTIONS[name]
    for argument in names.split():
        for value in VALUES:
            check(function, {argument: value})


def rehearse_with_junk(argument: str) -> None:
    """Tries all values in one simulation; errors are raised on both ranks, so they stay in step."""
    for value in VALUES:
        with contextlib.suppress(Exception):
            rehearse(**{**REHEARSED, argument: value})


@pytest.mark.parametrize("argument", FUNCTIONS["rehearse"][1].split())
def test_one_argument_of_a_rehearsal_that_is_junk(argument: str) -> None:
    ringsim.simulate(rehearse_with_junk, world_size=2, link=LINK, args=(argument,))


@given(data=st.data())
def test_several_arguments_that_are_junk(data: st.DataObject) -> None:
    function, names = FUNCTIONS[data.draw(st.sampled_from(sorted(FUNCTIONS)))]
    check(
        function,
        data.draw(
            st.dictionaries(st.sampled_from(names.split()), st.sampled_from(VALUES), min_size=1)
        ),
    )


def check(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls a function, which must return a result or raise one of ringsim's errors."""
    try:
        function(**arguments)
    except RingError:
        return
    except Exception as error:
        raise AssertionError(f"{arguments} ended in {type(error).__name__}: {error}") from error


NUM_TIMES = "the length of forward must be the number of stages, 2, got 3"
RULES: dict[str, list[tuple[dict[str, Any], str]]] = {  # invalid arguments, and words of the error
    "simulate": [
        ({"link": {"a": LINK}}, "the keys of link must be pairs of ranks from 0 to 1, got 'a'"),
        ({"link": {(7, 9): LINK}}, r"keys of link must be pairs of .* 0 to 1, got \(7, 9\)"),
        ({"link": None}, "exactly one of link and topology must be given, got none"),
        ({"topology": RingLinks(LINK)}, "exactly one of link and topology .*, got both"),
        ({"link": {(0, 1): "fast"}}, r"link\[\(0, 1\)\] must be a Link, got 'fast'"),
        ({"link": None, "topology": "ring"}, "topology must have the methods .*, got 'ring'"),
        ({"link": None, "topology": GraphLinks(nx.path_graph(0))}, "no node for ranks 0 and 1"),
        ({"compute": np.zeros(3)}, "compute must be a cost table"),
        ({"link": ringsim.Link(1e12, 0)}, r"alpha_s of link must be from 0 to 9e\+09 s, got 10"),
        ({"args": 3}, "args must be a tuple of the worker's arguments, got 3"),
        ({"seed": 2**70}, r"seed must be an integer from -2\*\*63 to"),
        *(({"semantics": wrong}, "semantics must be") for wrong in ("eager", "buffered(-1)", None)),
    ],
    "simulate_schedule": [
        ({"costs": Costs(forward=[1, 2, 3])}, NUM_TIMES),
        ({"costs": Costs(forward=-1)}, r"must be from 0 to .*, got -1 \(F of every stage\)"),
        ({"costs": Costs(weight=[1, float("nan")])}, r"from 0 to .*, got nan \(W of stage 1\)"),
        ({"costs": Costs(latency=float("inf"))}, "a time must be from 0 to .*, got inf"),
        ({"costs": Costs(forward=10**400)}, "a time must be from 0 to .*, got 1000"),
        ({"costs": Costs(latency=1)}, "latency must be 0 if link is given, got 1"),
        ({"costs": []}, "must be lists of the same length, at least 1, got 0 and 0"),
        (
            {"costs": [Costs()], "link": [LINK] * 2},
            "costs and link must be lists of the same .* 1 and 2",
        ),
        ({"costs": [Costs(), 3]}, "costs must be Costs or a list of Costs, got"),
        ({"link": [LINK]}, r"link must be a Link, got \[Link"),
        ({"link": "x"}, "link must be a Link, got 'x'"),
        ({"link": {(0, 1): LINK}}, r"link contains no entry for \(1, 0\), but rank 1 sends"),
        ({"link": {(0, 1): 3}}, r"link\[\(0, 1\)\] must be a Link, got 3"),
        ({"link": None, "size_bytes": 8}, "size_bytes requires a link, got 8 without a link"),
        ({"size_bytes": [1, 2]}, "must be the number of boundaries between stages, 1, got 2"),
        ({"size_bytes": -1}, r"size_bytes must be from 0 to 2\*\*53, got -1"),
        ({"size_bytes": 2**63}, r"size_bytes must be from 0 to 2\*\*53, got 92233"),
        ({"size_bytes": 1.5}, "size_bytes must be an integer or a list of integers, got 1.5"),
        (
            {"semantics": "eager"},
            "semantics must be one of rendezvous, buffered, grouped, paired, got 'eager'",
        ),
        ({"ahead": -1}, "ahead must be a non-negative integer, got -1"),
        ({"num_ranks": 0}, "num_ranks must be a positive integer, got 0"),
        ({"num_ranks": True}, "num_ranks must be a positive integer, got True"),
        ({"num_ranks": 10**20}, "for a step of at most 100,000,000 forward passes, got 10000"),
        ({"num_chunks": 2}, "num_chunks must be 1 for 1f1b, got 2"),
    ],
    "schedule": [
        ({"schedule": "2f2b"}, "a schedule must be one of gpipe, .*, got '2f2b'"),
        ({"schedule": make_schedule("1f1b", 2, 2)}, "must be omitted if a Schedule is given"),
    ],
    "rehearse": [
        ({"costs": Costs(forward=[1, 2, 3])}, NUM_TIMES),
        ({"costs": Costs(1.0, 1e10)}, "input must be from 0 to 9e.09 s, got 10000000000.0"),
        ({"costs": Costs(latency=1)}, "latency must be 0 because .*, got 1"),
        ({"size_bytes": -1}, "size_bytes must be a non-negative integer, got -1"),
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"schedule": make_schedule("gpipe", 3, 1)}, "as many ranks as the ring, 2, got 3"),
    ],
    "sensitivity": [
        ({"by": "x"}, "by must be above 0 and below 1, got 'x'"),
        ({"by": 0}, "by must be"),
        ({"most": 0}, "most must be"),
    ],
    "trace of a schedule": [
        ({"ranks": "x"}, "ranks must be an integer from 0 to 1, got 'x'"),
        ({"ranks": [6]}, "ranks must be an integer from 0 to 1, got 6"),
    ],
    "calibrate": [({"trace": [TRACE]}, "a trace to calibrate from must be a Trace, got")],
    "compare": [({"real": "x"}, "real must be a Trace, got 'x'")],
    "scale": [({"num_microbatches": 0}, "num_microbatches must be a positive integer, got 0")],
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_told(name: str) -> None:
    for arguments, told in RULES[name]:
        with pytest.raises(RingError, match=told):
            FUNCTIONS[name][0](**arguments)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("num_ranks", [2, 20])
def test_receives_that_are_posted_as_early_as_there_is(schedule: str, num_ranks: int) -> None:
    """A receive cannot be posted before the start of the step, however large ``ahead`` is."""
    costs = Costs(latency=3)
    step, most = (
        ringsim.simulate_schedule(
            schedule, costs, num_ranks=num_ranks, num_microbatches=4, ahead=ahead
        ).makespan
        for ahead in (12, 10**20)
    )
    assert step == most


def test_a_step_of_one_rank_has_no_messages() -> None:
    run = ringsim.simulate_schedule(
        "1f1b", num_ranks=1, num_microbatches=8, link=LINK, size_bytes=10
    )
    assert run.closed_form == run.makespan == 24


def test_a_step_that_no_trace_can_hold() -> None:
    run = ringsim.simulate_schedule(
        "1f1b", Costs(1e10, 1e10, 1e10), num_ranks=2, num_microbatches=2
    )
    assert run.makespan == 9e10
    with pytest.raises(RingError, match=r"a step in a trace must take at most 9e\+09 s .*, got 9e"):
        run.trace()
