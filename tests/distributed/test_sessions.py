"""Sessions: ranks that stay, with their variables, from one call to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("nothing_left_behind")]

rate = 0.5
total: float
model: torch.nn.Module
optimizer: torch.optim.Optimizer


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with ringsim.session(world_size=3) as session:
        session.run(set_total, 0)  # its processes have started
        yield session


def set_total(value: float) -> None:
    global total
    total = value


def add() -> float:
    global total
    total += rate * ringsim.current_ring().rank
    return total


def test_variables_of_one_call_are_there_in_the_next(ranks: Any) -> None:
    ranks.run(set_total, 3)
    assert ranks.run(add).results == [3, 3.5, 4]
    assert ranks.run(add).results == [3, 4, 5]
    assert ranks.pull("total") == [3, 4, 5]
    assert ranks[1].total == 4


def test_a_variable_of_the_caller_is_sent_again_only_if_it_has_changed(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve() -> float:
        global rate
        rate /= 2
        return rate

    assert [ranks.run(halve).results[0] for _ in range(2)] == [0.25, 0.125]
    monkeypatch.setattr("test_sessions.rate", 8.0)
    assert ranks.run(halve).results[0] == 4


def test_a_model_trains_on_over_calls(ranks: Any) -> None:
    def build() -> None:
        global model, optimizer
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * (1 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def weights() -> list[float]:
        return next(model.parameters()).detach().flatten().tolist()

    ranks.run(build)
    losses = [ranks.run(step).results[0] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    of_ranks = ranks.run(weights).results
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]


def test_each_call_is_a_trace(ranks: Any) -> None:
    def pass_on() -> float:
        ring = ringsim.current_ring()
        token = torch.tensor([float(ring.rank)])
        sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
        dist.recv(token, ring.pred, group=ring.pred_group)
        sending.wait()
        print("got", token.item(), force=True)
        return token.item()

    for _ in range(2):
        trace = ranks.run(pass_on)
        assert trace.results == [2, 0, 1]
        assert trace.output == ["got 2.0\n", "got 0.0\n", "got 1.0\n"]
        assert len(trace.to_pandas("messages")) == 3
        assert not trace.explain().findings


def test_some_ranks_run_a_call(ranks: Any) -> None:
    ranks.push(total=7)
    assert ranks[0, 2].run(set_total, 1).results == [None] * 3
    assert ranks.pull("total") == [1, 7, 1]
    with pytest.raises(IndexError, match="from 0 to 2, got 3"):
        ranks[3]


def test_large_variables_are_references(ranks: Any) -> None:
    ranks.push(batch=torch.ones(1000, 500), small=torch.ones(2))
    reference = ranks[1].batch
    assert (reference.kind, reference.shape) == ("Tensor", (1000, 500))
    assert reference.size_bytes > 2_000_000
    assert torch.equal(reference.get(), torch.ones(1000, 500))
    assert torch.equal(ranks[1].small, torch.ones(2))
    assert {"batch", "small", "run"} <= set(dir(ranks[1]))


def test_a_variable_that_is_missing_is_named(ranks: Any) -> None:
    with pytest.raises(AttributeError, match="rank 1 has no variable 'nothing'"):
        _ = ranks[1].nothing


def test_cells_run_in_the_namespace_of_the_ranks(ranks: Any) -> None:
    def run(source: str, **variables: Any) -> list[Any]:
        trace: ringsim.Trace = ranks.run_cell(source, "<cell>", variables)
        return trace.results

    assert run("data = [start + ring.rank]\ndata", start=40) == [[40], [41], [42]]
    assert run("data.append(start)\nlen(data)", start=40) == [2, 2, 2]
    assert run("def double(): return [2 * each for each in data]") == [None] * 3
    assert run("double()[0]") == [80, 82, 84]
    assert ranks.run_cell("data", "<cell>", {}, ranks=[1]).results == [None, [41, 40], None]


def test_closed_sessions_refuse() -> None:
    with ringsim.session(world_size=1) as ranks:
        pass
    ranks.close()
    with pytest.raises(ringsim.errors.RingError, match="the session is closed"):
        ranks.run(add)
