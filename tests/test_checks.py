"""What is refused before torch sees it, and what the teaching mode finds: on torch's fake backend, at the line that is wrong."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringsim.comm.torch_hooks import install, uninstall
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, MARK, OP_NAMES, read_notice
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import Recorder

Mistake = Callable[[], Any]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


def run(program: Mistake, directory: Path, check: str) -> tuple[RingError | None, list[str], list[str]]:
    """Runs a program to its end as recorded; returns its error, the kinds of findings in the record, and which operations failed."""
    recorder, error = Recorder(directory, rank=0, world_size=3), None
    install(recorder, check)
    try:
        program()
        recorder.check_end()
    except RingError as raised:
        error = raised
    finally:
        uninstall(recorder)
        recorder.close()
    events = read_parts(directory)[0]
    labels = [events.tables.labels[label] for label in events.label[events.kind == MARK]]
    failed = [OP_NAMES[op] for op in events.op[events.status == ERROR]]
    return error, [notice[0] for label in labels if (notice := read_notice(label))], failed


def check_mistake(mistake: Mistake, directory: Path, check: str, kind: str, words: str, error: type[RingError]) -> list[str]:
    raised, found, failed = run(mistake, directory, check)
    assert type(raised) is error
    assert words in str(raised)
    assert "rank 0 of 3" in str(raised)
    assert found == [kind]
    with open(__file__) as file:
        lines = [number for number, line in enumerate(file, 1) if line.endswith("# here\n")]
    first = mistake.__code__.co_firstlineno
    line = next(number for number in lines if number >= first)
    assert line in [frame.lineno for frame in traceback.extract_tb(raised.__traceback__)] or f"test_checks.py:{line}" in str(raised)
    return failed


# -- arguments

# How a message goes wrong: what is given to isend, whether torch itself refuses it, and the words.
MESSAGES: dict[str, tuple[Callable[[], torch.Tensor], int, int, bool, str]] = {
    "peer too large": (lambda: torch.zeros(4), 5, 0, False, "a rank of its group, from 0 to 2, got 5"),
    "peer negative": (lambda: torch.zeros(4), -1, 0, False, "a rank of its group, from 0 to 2, got -1"),
    "meta": (lambda: torch.zeros(4, device="meta"), 1, 0, False, "must hold data, got one on the device meta"),
    "itself": (lambda: torch.zeros(4), 0, 0, True, "must be another rank, got this one"),
    "tag negative": (lambda: torch.zeros(4), 1, -1, True, "a tag must be an integer from 0 to 2,147,483,647, got -1"),
    "tag too large": (lambda: torch.zeros(4), 1, 2**31, True, "got 2147483648"),
    "not contiguous": (lambda: torch.zeros(2, 3).t(), 1, 0, True, "contiguous, got one of shape (3, 2) and stride (1, 3)"),
    "sparse": (lambda: torch.zeros(2, 3).to_sparse(), 1, 0, True, "dense, got one of layout sparse_coo"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_cannot_be_right_raises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, dst, tag, refused, words = MESSAGES[name]

    def refuse(*_: Any) -> None:
        raise RuntimeError("something that names neither rank nor peer")

    if refused:
        monkeypatch.setattr(ProcessGroup, "send", refuse)

    def mistake() -> None:
        dist.isend(tensor(), dst, tag=tag)  # here

    assert check_mistake(mistake, tmp_path, "basic", "invalid_argument", words, ArgumentError) == ["isend"]


GAPS, WHOLE = (lambda: torch.zeros(4, 4)[:, :2]), (lambda: torch.zeros(4, 2))
COLLECTIVES: list[Mistake] = [
    lambda: dist.all_reduce(GAPS()),  # here
    lambda: dist.broadcast(GAPS(), 0),  # here
    lambda: dist.reduce(GAPS(), 0),  # here
    lambda: dist.scatter(GAPS(), [WHOLE()] * 3),  # here
    lambda: dist.scatter(WHOLE(), [GAPS()] * 3),  # here
    lambda: dist.all_reduce(torch.zeros(4, device="meta")),  # here
]


@pytest.mark.parametrize("mistake", COLLECTIVES)
def test_a_collective_over_gaps_or_nothing_raises(mistake: Mistake, tmp_path: Path) -> None:
    """Gloo 2.13 sees none: it reduces, or sends, the first elements in memory and leaves the others as they were."""
    gaps = "must lie in memory without gaps, got one of shape (4, 2) and stride (4, 1)"
    words = "must hold data, got one on the device meta" if mistake is COLLECTIVES[-1] else gaps
    assert len(check_mistake(mistake, tmp_path, "basic", "invalid_argument", words, ArgumentError)) == 1


def test_an_order_of_elements_without_gaps_passes(tmp_path: Path) -> None:
    assert run(lambda: dist.all_reduce(torch.zeros(3, 4).t()), tmp_path, "basic") == (None, [], [])


@pytest.mark.parametrize(("operation", "op"), [(dist.recv, "irecv"), (dist.irecv, "irecv"), (dist.isend, "isend")])
def test_a_message_outside_its_group_raises(operation: Callable[..., Any], op: str, tmp_path: Path) -> None:
    group = dist.new_group([1, 2])

    def mistake() -> None:
        operation(torch.zeros(4), 1, group=group)  # here

    words = f"{op} must be called on a group that this rank is in, got one that it is not in"
    check_mistake(mistake, tmp_path, "basic", "invalid_argument", words, ArgumentError)


def test_a_collective_outside_its_group_does_nothing_but_warn(tmp_path: Path) -> None:
    """As in torch: programs call it on all ranks."""
    group = dist.new_group([1, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(lambda: dist.all_reduce(torch.ones(1), group=group), tmp_path, "basic") == (None, [], [])
    assert sum("does not belong to the given group" in str(one.message) for one in caught) == 1


def test_a_blocking_send_to_oneself_raises(tmp_path: Path) -> None:
    def mistake() -> None:
        dist.send(torch.zeros(4), 0)  # here

    check_mistake(mistake, tmp_path, "basic", "invalid_argument", "another rank, got this one", ArgumentError)


# -- the teaching mode


def begin(operation: Callable[..., Any] = dist.isend, *shape: int) -> tuple[torch.Tensor, Any]:
    data = torch.zeros(shape or (8,))
    return data, operation(data, 1)


def changed() -> None:
    data, _ = begin()
    data.add_(1)  # here


def changed_unseen() -> None:
    data, work = begin()
    data.numpy()[3] = 1.0
    work.wait()  # here


def changed_as_a_part() -> None:
    data, _ = begin(dist.isend, 4, 4)
    data[2, 1] = 1.0  # here


def read_early() -> None:
    data, _ = begin(dist.irecv)
    print(float(data[2]))  # here


def written_early() -> None:
    data, _ = begin(dist.irecv)
    torch.add(torch.ones(8), 1, out=data)  # here


def overlapping() -> None:
    data = torch.zeros(12)
    dist.irecv(data[:8], 1)
    dist.irecv(data[4:], 1, tag=2)  # here


def sent_while_received() -> None:
    data, _ = begin(dist.irecv)
    dist.isend(data, 1)  # here


def waited_twice() -> None:
    _, work = begin()
    work.wait()
    work.wait()  # here


def dropped() -> None:
    dist.isend(torch.zeros(8), 1)  # here


def dropped_recv() -> None:
    dist.irecv(torch.zeros(8), 1)  # here


MISTAKES: dict[Mistake, tuple[str, str]] = {
    changed: ("buffer_hazard", "must not be changed before its message was waited for, got add_"),
    changed_unseen: ("buffer_hazard", "must stay as it is until its send was waited for, got other contents"),
    changed_as_a_part: ("buffer_hazard", "must not be changed before its message was waited for"),
    read_early: ("buffer_hazard", "must not be read before its message was waited for, got _local_scalar_dense"),
    written_early: ("buffer_hazard", "must not be changed before its message was waited for, got add"),
    overlapping: ("buffer_hazard", "must belong to one message at a time, got two that overlap"),
    sent_while_received: ("buffer_hazard", "must belong to one message at a time, got two that overlap"),
    waited_twice: ("invalid_argument", "must be waited for once, got a second wait()"),
    dropped: ("leaked_request", "every handle must be waited for, got one that never was"),
    dropped_recv: ("leaked_request", "every handle must be waited for, got one that never was"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_a_buffer_or_handle_raises_at_its_line(mistake: Mistake, tmp_path: Path) -> None:
    kind, words = MISTAKES[mistake]
    check_mistake(mistake, tmp_path / "full", "full", kind, words, ArgumentError if kind == "invalid_argument" else RingError)
    assert run(mistake, tmp_path / "basic", "basic")[:2] == (None, [])


@pytest.mark.parametrize("check", ["basic", "full"])
def test_a_recv_that_autograd_does_not_see_is_warned_of_once_a_line(check: str, tmp_path: Path) -> None:
    leaf = torch.zeros(4, requires_grad=True)

    def receive() -> None:
        dist.recv(torch.zeros(4), 1)
        dist.send(torch.ones(4, requires_grad=True), 1)
        for _ in range(2):
            dist.recv(leaf, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert run(receive, tmp_path, check)[0] is None
    words = "a tensor to be received into must not require grad"
    assert [str(each.message).startswith(words) for each in caught if each.category is UserWarning] == [True] * (check == "full")
    assert all(Path(each.filename) == Path(__file__) for each in caught)
