"""Memory by its address, and tensors looked at as C code does: what is compiled of memory.pyx, and memory.py, which stands in for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringsim.simulator import memory

SOURCE = Path(__file__).parent.parent / "ringsim" / "simulator" / "memory.py"
compiled = pytest.mark.skipif(memory.__file__ == str(SOURCE), reason="nothing is compiled here: torch is asked")


def load_source() -> ModuleType:
    """Returns memory.py as a module, whatever Python would load."""
    spec = importlib.util.spec_from_file_location("memory_source", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BOTH = pytest.mark.parametrize("module", [memory, load_source()], ids=["as loaded", "source"])


@BOTH
@given(places=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=16), others=st.data())
def test_regions_bring_back_what_was_there(module: Any, places: list[bytes], others: Any) -> None:
    memories = [bytearray(place) for place in places]
    regions = module.Regions([memoryview(each) for each in memories])
    kept = regions.copy()
    assert kept == b"".join(places)
    for each in memories:
        each[:] = others.draw(st.binary(min_size=len(each), max_size=len(each)))
    changed = b"".join(memories)
    assert regions.match(kept) == (changed == kept)
    later = bytearray(kept)
    regions.read(later)
    assert later == changed
    regions.write(kept)
    assert [bytes(each) for each in memories] == places
    assert regions.match(kept)


@BOTH
def test_regions_are_16_at_most(module: Any) -> None:
    assert len(module.Regions([memoryview(bytearray(b"a"))] * 16).copy()) == 16
    with pytest.raises(ValueError, match="at most 16, got 17"):
        module.Regions([memoryview(bytearray(b"a"))] * 17)


def learned(tensor: torch.Tensor) -> Any:
    layout = memory.Layout()
    layout.learn(tensor)
    return layout


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]
SHAPES = ((), (0,), (1,), (6,), (2, 3), (3, 2), (1, 6), (6, 1))


@compiled
def test_a_layout_fits_tensors_of_one_dtype_and_shape() -> None:
    tensors = [torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in SHAPES]
    layouts = [learned(torch.empty_like(tensor)) for tensor in tensors]
    assert [[layout.fits(tensor) for tensor in tensors] for layout in layouts] == [[one is other for other in tensors] for one in tensors]


class Named(torch.Tensor):
    """A tensor of one's own class."""


@compiled
def test_a_layout_fits_plain_tensors_only() -> None:
    layout = learned(torch.zeros(4))
    assert layout.fits(torch.zeros(8)[::2])  # however it lies in memory
    assert layout.fits(torch.zeros(4, requires_grad=True))
    for other in (torch.nn.Parameter(torch.zeros(4)), torch.zeros(4).as_subclass(Named), [0.0] * 4, None):
        assert not layout.fits(other)  # type: ignore[arg-type]
    assert layout.fits(torch.zeros(4))


@compiled
@pytest.mark.parametrize("elsewhere", [torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()], ids=["meta", "sparse"])
def test_a_layout_is_given_up_where_tensors_cannot_be_looked_at(elsewhere: torch.Tensor) -> None:
    untaught = learned(elsewhere)
    assert not untaught.fits(elsewhere)
    untaught.learn(torch.zeros(4))
    assert untaught.fits(torch.zeros(4))  # it was not even tried
    layout = learned(torch.zeros(4))
    assert not layout.fits(elsewhere)  # takes 20 us, once
    assert not layout.fits(torch.zeros(4))
    layout.learn(torch.zeros(4))
    assert not layout.fits(torch.zeros(4))


@compiled
def test_inside_a_transformation_nothing_is_learned() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        layout = learned(x)
        assert not layout.fits(x)
        return (x * x).sum()

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [2.0, 2.0]


@compiled
def test_a_layout_copies_what_is_contiguous() -> None:
    layout = learned(torch.zeros(2, 3))
    source, target = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    assert layout.copy(source, target)
    assert target.equal(source)
    memory_of_seven = torch.arange(7.0)
    assert layout.copy(memory_of_seven[1:].view(2, 3), target)  # not from the beginning of its memory
    assert target.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert layout.copy(memory_of_seven[:6].view(2, 3), memory_of_seven[1:].view(2, 3))  # parts of one memory
    assert memory_of_seven.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@compiled
def test_a_layout_leaves_all_else_alone() -> None:
    layout = learned(torch.zeros(2, 3))
    plain = torch.arange(6.0).view(2, 3)
    others = [
        *(torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2], torch.zeros(3).expand(2, 3)),  # of the same shape, and not contiguous
        *(torch.zeros(6), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3).as_subclass(Named)),
    ]
    for other in others:
        assert not layout.copy(plain, other)
        assert not layout.copy(other, plain)
        assert not other.any()
    assert plain.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_the_source_asks_torch_for_everything() -> None:
    layout = load_source().Layout()
    layout.learn(torch.zeros(2))
    assert not layout.fits(torch.zeros(2))
    assert not layout.copy(torch.zeros(2), torch.zeros(2))
