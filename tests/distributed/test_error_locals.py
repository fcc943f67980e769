"""The variables of ranks after a failure: ``error.locals``."""

from __future__ import annotations

import os
import pickle
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, Deadlock, RankFailed, RingError

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
RUNS = (ringsim.trace, partial(ringsim.simulate, link=LINK))


class Hostile:
    def __repr__(self) -> str:
        os.environ["HOSTILE"] = "1"
        raise SystemExit("no")


def fail(kind: str) -> None:
    """Rank 0 returns; rank 1 fails, or waits for rank 2; rank 2 waits for rank 1, or computes."""
    rank = ringsim.current_ring().rank
    weights, long, hostile = torch.zeros(3, 4, dtype=torch.float64), "x" * 10_000, Hostile()
    many = {number: [weights] * 1000 for number in range(10_000)}

    def step(loss: float) -> None:
        if rank == 1 and kind == "raise":
            try:
                raise ValueError("first")
            except ValueError:
                secret = "\x1b[31m"
                raise KeyError(secret) from None
        if kind == "computing":
            time.sleep(60 * rank)
        dist.recv(torch.zeros(1), 3 - rank)

    if rank > 0:
        step(0.25 * rank)
    del weights, long, hostile, many


def catch(run: Any, kind: str, error: type[RingError], **options: Any) -> RingError:
    """Returns the error of a run, as another process would receive it."""
    with pytest.raises(error) as caught:
        run(fail, world_size=3, args=(kind,), **options)
    again: RingError = pickle.loads(pickle.dumps(caught.value))
    return again


@pytest.mark.parametrize("run", RUNS, ids=["real", "simulated"])
@pytest.mark.parametrize(("kind", "error"), [("raise", RankFailed), ("wait", Deadlock)])
def test_the_variables_of_ranks_that_raised_or_waited(
    run: Any, kind: str, error: type[RingError]
) -> None:
    caught = catch(run, kind, error, debug=True)
    for rank in (1, 2):
        text = caught.locals(rank)
        here = r"^\S+test_error_locals\.py:\d+, in "
        assert re.findall(f"{here}(.*)$", text, re.MULTILINE) == ["fail", "step"]
        lines = text.splitlines()
        assert f"    loss = {0.25 * rank}" in lines
        assert "    weights = Tensor[3, 4] torch.float64" in lines
        assert "    hostile = <Hostile whose repr raised SystemExit>" in lines
        assert len(text) < 4000
    assert (r"    secret = '\x1b[31m'" in caught.locals(1)) is (kind == "raise")
    with pytest.raises(ArgumentError, match="the variables of rank 0 are unknown"):
        caught.locals(0)


def test_the_variables_of_a_rank_that_computes() -> None:
    caught = catch(ringsim.trace, "computing", RingError, debug=True, limit_s=8)
    assert "    loss = 0.5\n" in caught.locals(2)


@pytest.mark.parametrize("run", RUNS, ids=["real", "simulated"])
def test_variables_are_kept_only_on_request(run: Any) -> None:
    caught = catch(run, "raise", RankFailed)
    with pytest.raises(ArgumentError, match=r"rank 2 are unknown\. Run it with debug=True"):
        caught.locals(2)
