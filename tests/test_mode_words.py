"""Modes are seen in torch's memory, where its words are found; else torch is asked. Both tell the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ringsim.simulator import mode_words
from ringsim.simulator.mode_words import find_words
from ringsim.simulator.modes import Modes

GETTERS = mode_words._GETTERS


class Unchanged(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def vmapped() -> Any:
    """Inside a transformation."""
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield level
    finally:
        torch._C._functorch._vmap_decrement_nesting()


@contextlib.contextmanager
def dtype_of_numbers(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "device": lambda: torch.device("meta"),
    "function mode": Unchanged,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "vmap": vmapped,
    "dtype": lambda: dtype_of_numbers(torch.float64),
}


@pytest.fixture(params=["seen", "asked"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asked":
        monkeypatch.setattr("ringsim.simulator.modes.find_words", lambda: None)


def test_words_are_found_here() -> None:
    assert find_words() is not None  # else it still works, slowly: the other tests


@pytest.mark.usefixtures("both_ways")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_seen_as_long_as_it_lasts(name: str) -> None:
    modes = Modes()
    assert modes.are_common()
    for _ in range(2):
        with MODES[name]():
            assert not modes.are_common()
            assert not modes.are_common()  # looking changes nothing
        assert modes.are_common()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("common", MODES)
@pytest.mark.parametrize("name", MODES)
def test_both_ways_tell_the_same(common: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> bool:
        verdicts = {each.are_common() for each in both}
        assert len(verdicts) == 1
        return verdicts.pop()

    with MODES[common]():
        both = [Modes()]
        monkeypatch.setattr("ringsim.simulator.modes.find_words", lambda: None)
        both.append(Modes())
        at_first = look()
        with MODES[name]():
            look()
        assert look() == at_first
    look()


@pytest.mark.usefixtures("both_ways")
def test_a_stack_that_holds_something_is_looked_into() -> None:
    outer, other = Unchanged(), Unchanged()
    with outer:
        modes = Modes()
        torch._C._pop_torch_function_stack()
        torch._C._push_on_torch_function_stack(other)
        assert not modes.are_common()  # as many, and another one
        torch._C._pop_torch_function_stack()
        torch._C._push_on_torch_function_stack(outer)
        assert modes.are_common()


@pytest.mark.parametrize("missing", range(len(GETTERS)))
def test_without_a_symbol_torch_is_asked(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library, symbol, size = GETTERS[missing]
    monkeypatch.setattr(mode_words, "_GETTERS", ((library, symbol + "_of_another_torch", size),))
    assert find_words() is None
    monkeypatch.setattr(mode_words, "_GETTERS", (("libtorch_of_another_system.so", symbol, size),))
    assert find_words() is None


@pytest.mark.parametrize("missing", range(len(GETTERS)))
def test_memory_that_does_not_tell_is_not_used(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_words, "_GETTERS", GETTERS[:missing] + GETTERS[missing + 1 :])
    assert find_words() is None
